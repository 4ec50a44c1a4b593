"""The section of ``docs/benchmarks.md`` about training steps of whole models, from ``tilegym train --summary_file``."""

from typing import Any

from tilegym.bench import training
from tilegym.bench.report import markdown

TRAIN_FILES = "train*.json"
HEADING = "## Training steps"
USUAL_SIZES = 4, 2048  # the defaults of tilegym train

EXPLAINED = """\
One step after the other, without waiting in between: medians of events around each part; behind the whole step's half
the distance between the 20th and the 80th percentile, in brackets what multiple the unpatched one's is of it: above
1.00x it is faster, or needs less. All begin with the same weights and see the same batches. *Kept for the backward
pass* is what a forward pass leaves allocated. Errors of gradients are root sums of squares against the unpatched model
in the next wider precision, relative to its gradients; patched ones may be twice as far off, parameter by parameter.
"""


def name_of(summary: dict[str, Any]) -> str:
    """A run's heading: the model, and whatever is not as it comes."""
    parts = [summary["model"]["id"]]
    parts += [f"{summary['num_layers']} layers"] if summary["num_layers"] else []
    parts += [summary["precision"]] if summary["precision"] != "bfloat16" else []
    sizes, optimizer = (summary["batch_size"], summary["sequence_length"]), summary["optimizer"]
    parts += ["{} x {} tokens".format(*sizes)] if sizes != USUAL_SIZES else []
    parts += [f"optimizer {optimizer}"] if optimizer != training.ADAMW else []
    parts += [flag.replace("_", " ") for flag in training.FLAGS if summary.get(flag)]
    return ", ".join(parts)


def section(summary: dict[str, Any]) -> str:
    """The section about one run."""
    model, peer = summary["model"], summary["peer"]
    head = (
        f"### {name_of(summary)}\n\n{summary['device']}, {summary['precision']}"
        f"{', random weights' if model['random_weights'] else ''}, {summary['batch_size']} x "
        f"{summary['sequence_length']} tokens, {summary['steps']} steps, optimizer {summary['optimizer']}, torch "
        f"{summary['torch']}.\n"
    )
    sides = {"Unpatched": summary["unpatched"], "TileGym": summary["patched"]}
    sides |= {f"{peer['name'].capitalize()} {peer['version']}": peer["measurement"]} if peer else {}
    sides = {name: side for name, side in sides.items() if side}
    lines = [head, markdown(("", *sides), _rows(list(sides.values())))]
    coverage, check = summary["kernel_coverage"], summary["gradient_check"]
    if coverage:
        of = "GPU time" if coverage["measure"].startswith("gpu") else "CPU time in dispatched ops"
        lines.append(f"- Kernel coverage ({of}): {coverage['percent']:.1f}%")
    if check:
        lines.append(f"- {_checked('TileGym', check)}")
        difference = float(summary["largest_loss_difference"])
        lines.append(f"- Largest difference of a step's loss from the unpatched model's: {difference:.2g}")
    if peer and peer["error"]:
        lines.append(f"- {peer['name'].capitalize()} was not measured: {peer['error']}")
    elif peer and peer["gradient_check"]:
        lines.append(f"- {_checked(peer['name'].capitalize(), peer['gradient_check'])}")
    return "\n".join(lines) + "\n"


def _rows(sides: list[dict[str, Any]]) -> list[list[str]]:
    first = sides[0]

    def times(side: dict[str, Any], key: str) -> str:
        return f"{side[key]:.1f}" + (f" ({first[key] / side[key]:.2f}x)" if side is not first and side[key] else "")

    def whole(side: dict[str, Any]) -> str:
        spread = (side["step_ms_high"] - side["step_ms_low"]) / 2
        ratio = "" if side is first else f" ({first['step_ms'] / side['step_ms']:.2f}x)"
        return f"{side['step_ms']:.1f} ± {spread:.1f}{ratio}"

    def size(side: dict[str, Any], *keys: str) -> str:
        def total(one: dict[str, Any]) -> int:
            return sum(one["memory_bytes"][key] for key in keys)

        ratio = f" ({total(first) / total(side):.2f}x)" if side is not first and total(side) else ""
        return f"{total(side) / 1e9:.2f}{ratio}"

    rows = [["A step, ms", *map(whole, sides)]]
    for part in ("forward", "backward", "optimizer"):
        rows.append([f"{part.capitalize()}, ms", *(times(side, f"{part}_ms") for side in sides)])
    rows.append(["Tokens/s", *(f"{side['tokens_per_second']:.0f}" for side in sides)])
    if all(side["memory_bytes"] for side in sides):
        kinds = {
            "Peak memory, GB": ("peak",),
            "Kept for the backward pass, GB": ("activations",),
            "Weights, gradients and optimizer, GB": ("weights", "gradients", "optimizer"),
        }
        rows += [[label, *(size(side, *keys) for side in sides)] for label, keys in kinds.items()]
    return rows


def _checked(name: str, check: dict[str, Any]) -> str:
    """What the check of gradients found, in a sentence or two."""

    def relative(entry: dict[str, Any], key: str) -> str:
        return f"{float(entry[key]) / (entry['norm'] or 1.0):.2g}"

    overall, worst = check["overall"], check["parameters"][0]
    part = ", a part of a step's" if check["cut"] else ""
    return (
        f"{name}'s gradients of {check['rows']} x {check['tokens']} tokens{part}, against {check['oracle']}: error of "
        f"all {relative(overall, 'patched_error')} (unpatched {relative(overall, 'unpatched_error')}); nearest to what "
        f"is allowed: `{worst['name']}`, {relative(worst, 'patched_error')} (unpatched "
        f"{relative(worst, 'unpatched_error')}). {'Passed' if check['passed'] else 'FAILED'}: {check['reason']}."
    )

"""The report of a run: Markdown, one HTML page that needs nothing else, and JSON."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

import torch

import tilegym
from tilegym.bench.job import device_name

if TYPE_CHECKING:
    from tilegym.integrate.pipeline import Outcome


def summary(outcome: "Outcome") -> dict[str, Any]:
    """Everything that a run found, as plain data."""
    return {
        "tilegym": tilegym.__version__,
        "torch": torch.__version__,
        "device": device_name(outcome.device),
        "backend": outcome.backend,
        "model": outcome.options.model_id,
        "random_weights": outcome.options.random_weights,
        "precision": outcome.options.precision,
        "output_length": outcome.options.output_length,
        "plan": outcome.plan.summary(),
        "verified": outcome.checks,
        "compiled": outcome.compiled,
        "accepted": {name: [asdict(place) for place in places] for name, places in outcome.accepted.items()},
        "dropped": outcome.dropped,
        "graph": outcome.graph,
        "together": outcome.together,
        "measured": outcome.measured,
        "outputs": outcome.outputs,
        "notices": outcome.notices,
        "package": str(outcome.package) if outcome.package else None,
    }


def write_report(outcome: "Outcome") -> list[Path]:
    """Writes report.md, report.html and report.json into the outcome's folder; returns the files."""
    from tilegym.integrate.report_html import page

    data = summary(outcome)
    files = {
        "report.md": markdown(data),
        "report.html": page(data),
        "report.json": json.dumps(finite(data), indent=2, allow_nan=False) + "\n",
    }
    written = []
    for name, text in files.items():
        path = outcome.folder / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def finite(value: Any) -> Any:
    """``value`` with the text "inf" or "nan" for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def plan_rows(data: dict[str, Any]) -> list[list[str]]:
    """What, where, the kernel, how it fits, and what came of it; a row for each requirement, and for decoding."""
    checks, dropped, rows = data["verified"], data["dropped"], []
    for item in data["plan"]["items"]:
        count = f"{item['modules']} x " if item["modules"] > 1 else ""
        where = f"{count}{item['implementation'].rpartition('.')[2]}"
        tried = checks.get(item["key"], [])
        chosen = tried[-1]["candidate"] if tried else (item["candidates"] or [None])[0]
        kernel = (chosen["solution"] or chosen["op"]) if chosen else "-"
        fit = chosen["fit"] if chosen else ""
        if item["compute"] in dropped and tried:
            result = f"dropped: {dropped[item['compute']]}"
        elif tried:
            failed = [f"{t['candidate']['solution'] or t['candidate']['op']} failed: {t['why']}" for t in tried[:-1]]
            result = "; ".join([*failed, "verified" if tried[-1]["passed"] else f"unsuitable: {tried[-1]['why']}"])
        else:
            others = len(item["candidates"]) - 1
            result = item["why"] or (f"{others} more to try" if others > 0 else "")
        rows.append([item["key"], where, kernel, fit, result])
    if data["graph"]:
        rows.append(["graph", "generate", "decoding steps as CUDA graphs", "", data["graph"]])
    return rows


def error_rows(checks: dict[str, list[dict[str, Any]]]) -> list[tuple[str, str, str, float, float]]:
    """Of each verified requirement the result nearest to what is allowed: key, call, result, error, allowed."""
    rows = []
    for key, tried in checks.items():
        errors = [e for e in tried[-1]["errors"] if e[3]] if tried[-1]["passed"] else []
        if errors:
            call, result, error, allowed = max(errors, key=lambda e: e[2] / e[3])
            rows.append((key, call, result, error, allowed))
    return rows


def speed_rows(measured: dict[str, Any], device: str) -> list[list[str]]:
    """Unpatched, patched, and how they compare, on the ``device`` of this name."""
    before, after = measured["unpatched"], measured["patched"]

    def row(label: str, key: str, form: str, lower: bool = False) -> list[str]:
        a, b = before[key], after[key]
        if a is None or b is None:
            return [label, "-", "-", "-"]
        ratio = a / b if lower else b / a
        return [label, form.format(a), form.format(b), f"{ratio:.2f}x"]

    rows = [
        row("throughput, tokens/s", "throughput_tokens_per_second", "{:.1f}"),
        row("time to first token, ms", "time_to_first_token_ms", "{:.2f}", lower=True),
        row("time per token, ms", "time_per_output_token_ms", "{:.2f}", lower=True),
    ]
    rows.append(["coverage", *(f"{side['coverage_percent']:.1f}%" for side in (before, after)), ""])
    memory = [f"{side['peak_memory_bytes'] / 2**20:.0f}" for side in (before, after)]
    # On a CPU it counts what ran before, the interpreter too.
    label = "peak memory of the process so far" if device.startswith("CPU ") else "peak memory"
    rows.append([f"{label}, MiB", *memory, ""])
    same = sum(a == b for a, b in zip(before["tokens"], after["tokens"], strict=True))
    rows.append(["greedy tokens", "", f"{same} of {len(before['tokens'])} equal", ""])
    return rows


def flag_rows(measured: dict[str, Any], accepted: Iterable[str]) -> list[list[str]]:
    """Each flag by itself: throughput, against unpatched, whether the tokens are equal."""
    before, rows = measured["unpatched"], []
    for name, side in measured["alone"].items():
        gain = side["throughput_tokens_per_second"] / before["throughput_tokens_per_second"]
        equal = "equal" if side["tokens"] == before["tokens"] else "differ"
        rows.append([name, f"{side['throughput_tokens_per_second']:.1f}", f"{gain:.2f}x", equal])
    timed = {part for name in measured["alone"] for part in name.split(" and ")}
    return rows + [[name, "-", "-", "not called while it generates"] for name in accepted if name not in timed]


def verdict(data: dict[str, Any]) -> str:
    """One sentence on the whole set."""
    found = data["together"]["comparison"]
    return (
        f"All {len(data['accepted'])} together ({found['steps_compared']} tokens, a prompt and a padded batch, backend "
        f"{data['together']['backend']}): {found['reason']}; token agreement {found['token_agreement']:.1%}, largest "
        f"difference of a logit {found['max_logit_difference']:.3g} where logits reach {found['max_logit']:.3g}."
    )


def use(data: dict[str, Any]) -> str:
    """How to use what was written."""
    family = data["plan"]["family"]
    if Path(data["package"]).parent.name == "transformers":
        return "from tilegym.transformers import monkey_patch\n\nreport = monkey_patch.apply(model)\n"
    return (
        "from tilegym.transformers import generated\n\n"
        f"apply_tilegym_kernel_to_{family} = generated.register({json.dumps(data['package'])})\n"
        f"report = apply_tilegym_kernel_to_{family}(model=model)\n"
    )


def compile_line(compiled: dict[str, str]) -> str:
    """What was compiled ahead, in a sentence."""
    if not compiled:
        return "Nothing was compiled ahead here."
    kernels, architectures = ({job.split()[i] for job in compiled} for i in (0, 1))
    bad = [job for job, why in compiled.items() if why]
    names = ", ".join(sorted(architectures, key=lambda a: int(a.removeprefix("sm_"))))
    return f"{len(kernels)} kernels compiled for {names}" + (f"; not: {', '.join(bad)}." if bad else ", all of them.")


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines)


def markdown(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    plan, measured = data["plan"], data["measured"]
    weights = ", random weights" if data["random_weights"] else ""
    errors = [
        [key, call, result, f"{error:.3g}", f"{allowed:.3g}"]
        for key, call, result, error, allowed in error_rows(data["verified"])
    ]
    sides = ("unpatched", "TileGym")
    texts = "\n".join(f"{s}: {o['prompt']}{o['text']}" for s, o in zip(sides, data["outputs"], strict=True))
    parts = [
        f"# TileGym in {data['model']}",
        f"{plan['architecture']} ({plan['family']}){weights}, {data['precision']}, on {data['device']}; transformers "
        f"{plan['transformers']}, torch {data['torch']}, TileGym {data['tilegym']}.",
        *(f"Note: {notice}." for notice in data["notices"]),
        verdict(data),
        "## What was found and what serves it",
        table(["compute", "where", "kernel", "fit", "result"], plan_rows(data)),
    ]
    if plan["unrecognised"]:
        parts.append("Not recognised, and left as it is:")
        parts.append("\n".join(f"- `{m['implementation']}`: {m['why']}" for m in plan["unrecognised"]))
    parts += [
        "## Errors on captured tensors",
        "Against float64, of the result that comes nearest to what is allowed: twice the error that the model's own "
        "code makes in its dtype, and four roundings in any case. " + compile_line(data["compiled"]),
        table(["compute", "call", "result", "error", "allowed"], errors),
        f"## Before and after: {data['output_length']} tokens, backend {data['backend']}",
        table(["", "unpatched", "TileGym", "speed-up"], speed_rows(measured, data["device"])),
        "## Each flag by itself",
        table(["flag", "tokens/s", "against unpatched", "greedy tokens"], flag_rows(measured, data["accepted"])),
        "## The text",
        f"```text\n{texts}\n```",
        "## How to use it",
        f"The patches are in `{data['package']}`.",
        f"```python\n{use(data)}```",
    ]
    return "\n\n".join(parts) + "\n"

"""Writes ``docs/benchmarks.md`` from the results of one or several runs, and from end-to-end runs beside them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tilegym.backend import slower
from tilegym.bench import docs_bandwidth
from tilegym.bench import docs_machine
from tilegym.bench import docs_steps
from tilegym.bench import docs_training
from tilegym.bench import slower_table
from tilegym.bench import store
from tilegym.bench.merge import Merged
from tilegym.bench.merge import merge
from tilegym.bench.report import RESULTS_FILE
from tilegym.bench.report import HostResult
from tilegym.bench.report import Result
from tilegym.bench.report import Run
from tilegym.bench.report import beside
from tilegym.bench.report import markdown
from tilegym.bench.report import microseconds
from tilegym.bench.report import rate
from tilegym.bench.report import spread
from tilegym.bench.runner import COPY
from tilegym.bench.runner import OVERWRITES
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import BOTH
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import IN_PLACE
from tilegym.bench.spec import MODES
from tilegym.bench.spec import OURS
from tilegym.bench.spec import BenchmarkError

INFER_FILES = "infer*.json"
MODELS = "## Whole models"
EARLIER = "*From an earlier run than the tables above.*"

PREAMBLE = """\
# Benchmarks on {gpu}

*Written by `tests/benchmark/write_docs.py` from measured results; edit that, not this page.*

## To measure again

```bash
bash tests/benchmark/run_all.sh --output out/bench
tilegym infer --model_id llama-3.1-8b --random_weights --use_tilegym --use_cutile --use_attn --compare \\
    --report_kernel_coverage --summary_file out/bench/infer-llama-3.1-8b.json
tilegym train --model_id llama-3.2-1b --random_weights --compare --peer liger --report_kernel_coverage \\
    --summary_file out/bench/train-llama-3.2-1b.json
python tests/benchmark/write_docs.py out/bench
```

`tilegym bench rms_norm fmha` measures some ops only, `--quick` the headline shapes only, `--minutes 9` what fits into
nine minutes, the most important first; `--skip out/bench`, with another `--output`, goes on where a run ended.
`write_docs.py` takes the folders of several runs; `--target` names another page, as for another GPU. What none of them
has measured stays: the `.json.xz` beside a page holds what it was written from. Without a GPU only the `pytorch`
backend is measured, and this page is not written.
"""

METHOD = """\
## How to read the tables

- Every figure has passed a check in the same run: the provider's outputs (and gradients) are at most twice as far
  from an fp64 oracle as PyTorch's in the same dtype, plus half a unit in the last place. A provider that is further
  off shows as WRONG, without a figure; one whose root mean square error is within the limit, and only the error of
  single elements up to four times too large, as *inexact*, with one. *Error* is TileGym's, root mean square, relative
  to the oracle's. The oracle computes all of the outputs and gradients, on the GPU.
- Times are medians over CUDA events around single calls; behind them half the distance between the 20th and the 80th
  percentile. Inputs and upstream gradients are normal random numbers, the gradient of a scalar loss 1. Before each
  call the L2 cache is emptied; it then holds as many modified bytes as the call itself leaves behind, so that nobody's
  writes go uncounted. The providers of a row take turns, so that they meet the same clocks. A call of more than 20 ms
  is timed three times. *unsteady* is what spread over more than a quarter of its median, as small calls do where
  something else keeps the host from launching in time; such a row has no figure of it.
- *GB/s* counts every input read once and every output written once; *TFLOP/s* counts two operations a multiply-add,
  and half the scores for causal attention. *Of the roofline* is the least time that the two ceilings of the same run
  allow for this work, over the time measured.
- For the others, the time is followed by what multiple it is of TileGym's: above 1.00x TileGym is faster.
- *pytorch backend* is the op called with `backend="pytorch"`, to which dispatch turns where the kernels are slower;
  *cutile backend* are the kernels where it does so. *tilegym in place* writes gradients over activations:
  forward and backward together in the table against Liger, which says how, backward in the ops' own.
- torch.compile is measured at the headline shapes, in ops that are bound by memory, or where attention has a form of
  its own (flex).
- *A copy of as many bytes* is PyTorch's copy of a tensor that causes the same traffic, start and end of the launch
  included: small sizes cannot reach the roofline's bandwidth.
- *Peak memory* is what a pass allocates at its worst moment beyond what was there before it: outputs, gradients, what
  is kept for the backward pass, temporaries. Inputs are not in it, nor, for a backward pass alone, what its forward
  pass kept.
"""


HOST = """\
## Host time of one call

Microseconds of the CPU for one call on tiny tensors, without autograd: medians over batches of 20 calls, between which
the GPU is waited for, so that its queue never fills. Behind them half the distance between the 20th and the 80th
percentile. They grow where other programs keep the machine busy, and so do the others' in the same row; of several runs
a row is of the one in which the others took the least.
"""

TO_PYTORCH = """\
## Where PyTorch is faster

By at least 5%, noise included, with no more time of the host, and in at most 1.25 times the memory and 16 MiB.
`write_slower.py` lists these calls, and dispatch sends those of the shipped table to PyTorch.
"""

FROM_ROWS = """\
fp32 has no tensor cores, unless tf32 is allowed (`tfloat32` below). Whatever their sizes, these calls go to PyTorch
from so many rows of the first argument on, as `sweep_float32.py` has measured.
"""

FROM_ROWS_OF_16_BITS = """\
In bf16 and fp16 cuBLAS is the faster one at most sizes of products, and serves those, too, at which nothing was
measured, unless 16 bytes do not divide a size. The kernels serve the sizes at which they are as fast: the tables in
`src/tilegym/backend/cutile/slower/` list them, those of this page's rows, and what `sweep_linear.py` has measured, on
an H200 for all GPUs with its chip.
"""


def default_target() -> Path:
    """``docs/benchmarks.md`` of the checkout that this package is installed from.

    Raises:
        BenchmarkError: the package is not installed from a checkout.
    """
    folder = Path(__file__).resolve().parents[3] / "docs"
    if not folder.is_dir():
        raise BenchmarkError(f"{folder} is no folder: --write-docs works in a checkout of TileGym")
    return folder / "benchmarks.md"


def write(results: list[Path], target: Path | None = None, note: str = "") -> Path:
    """Writes ``target``, by default the checkout's page, from the ``results.json``, ``infer*.json`` and
    ``train*.json`` in ``results``.

    Of a case that several runs have measured, the latest run counts that compared TileGym with anything. Cases and
    models that the page has and the folders do not stay on it: the former in the file ``.json.xz`` beside it, as long
    as they are of the same GPU and dtype. For a page that has any, folders may have measured models alone. ``note``
    stands below the machines: what the figures do not tell.

    Raises:
        BenchmarkError: a file is missing or cannot be read; the runs are of different GPUs or dtypes, or have
            measured nothing; or they had no GPU and would take the place of the checkout's page.
    """
    ops = [folder for folder in results if (folder / RESULTS_FILE).exists() or not _measured_models(folder)]
    runs = {folder: Run.read(folder).steady() for folder in ops}
    if target is None:
        if runs and not any(run.machine.get("gpu") for run in runs.values()):
            raise BenchmarkError("these runs had no GPU: docs/benchmarks.md is not for them, give another --target")
        target = default_target()
    dates = {folder: run.machine["date"] for folder, run in runs.items()}
    folders = sorted(results, key=lambda folder: dates.get(folder, ""))
    before = target.read_text(encoding="utf-8") if target.is_file() else ""
    models, trainings = _sections_of(before, MODELS), _sections_of(before, docs_steps.HEADING)
    for summary in _summaries(folders, INFER_FILES):
        models[_name_of(summary)] = _inference(summary)
    for summary in _summaries(folders, docs_steps.TRAIN_FILES):
        trainings[docs_steps.name_of(summary)] = docs_steps.section(summary)
    kept = store.store_of(target)
    latest, former = list(runs.values()), store.read(kept)
    if latest:
        kind = _kind(merge(latest).runs[0])
        former = [run for run in former if _kind(run) == kind]
    counted = store.shown(merge([*latest, *former])) if latest or former else []
    if not counted:
        raise BenchmarkError("these runs have measured nothing")
    target.write_text(page(merge(counted), models, note, trainings), encoding="utf-8")
    store.write(kept, counted)
    return target


def _measured_models(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in (INFER_FILES, docs_steps.TRAIN_FILES))


def _kind(run: Run) -> tuple[Any, Any]:
    return run.machine.get("gpu"), run.settings["dtype"]


def _summaries(folders: list[Path], pattern: str) -> list[dict[str, Any]]:
    """What the files have that ``pattern`` matches; of those with one name only the last folder's."""
    found: dict[str, dict[str, Any]] = {}
    for folder in folders:
        found |= {path.name: _read_json(path) for path in sorted(folder.glob(pattern))}
    return list(found.values())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{path} cannot be read ({error}): write it with --summary_file") from error


def _sections_of(page: str, heading: str) -> dict[str, str]:
    """The sections of an existing page under ``heading``, by name, each marked as an earlier run's."""
    _, _, rest = page.partition(f"\n{heading}\n")
    found = {}
    for section in rest.partition("\n## ")[0].split("\n### ")[1:]:
        name, _, text = section.partition("\n")
        text = text.strip()
        found[name] = f"### {name}\n\n{text}\n" + ("" if EARLIER in text else f"\n{EARLIER}\n")
    return found


def page(merged: Merged, models: dict[str, str], note: str = "", trainings: dict[str, str] | None = None) -> str:
    """The whole page; ``models`` and ``trainings``: sections about whole models that generate and train, by name."""
    gpu = merged.runs[0].machine.get("gpu")
    preamble = PREAMBLE.format(gpu=f"an {gpu}" if gpu else "a CPU")
    parts = [preamble, docs_machine.section(merged), *([f"{note}\n"] if note else []), METHOD]
    if not all(run.complete for run in merged.runs):
        parts.append("**A run ended before it had measured everything: what none has reached is missing below.**\n")
    sections = (docs_bandwidth.section(merged), docs_training.section(merged), _to_pytorch(merged))
    parts += [section for section in sections if section]
    if merged.host:
        parts.append(f"{HOST}\n{_host_table(merged)}")
    if merged.cases:
        parts.append("## Ops\n")
        measured = dict.fromkeys((op, mode) for op, mode, _ in merged.cases)
        ops = dict.fromkeys(op for op, _ in measured)
        for op, mode in ((op, mode) for op in ops for mode in MODES if (op, mode) in measured):
            rows = {shape: found for (o, m, shape), found in merged.cases.items() if (o, m) == (op, mode)}
            parts.append(f"### {op}, {mode}\n\n{_op_table(rows, merged, mode)}")
    if models:
        parts.append(f"{MODELS}\n")
        parts += [models[name] for name in sorted(models)]
    if trainings:
        parts.append(f"{docs_steps.HEADING}\n\n{docs_steps.EXPLAINED}")
        parts += [trainings[name] for name in sorted(trainings)]
    return "\n".join(parts)


def _others(rows: Iterable[dict[str, Result]]) -> list[str]:
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row if name not in (OURS, COPY))
    return [name for name in names if any(row[name].status != "missing" for row in rows if name in row)]


def _op_table(rows: dict[str, tuple[int, dict[str, Result]]], merged: Merged, mode: str) -> str:
    # In place forward and backward together stand in the table against Liger.
    others = [n for n in _others(row for _, row in rows.values()) if (n, mode) != (IN_PLACE, BOTH)]
    has_copy = any(COPY in row for _, row in rows.values())
    several = len(merged.runs) > 1
    header = ["Shape", "TileGym, us", "Rate", "Of the roofline", *(f"{name}, us" for name in others)]
    header += ["A copy of as many bytes, us"] if has_copy else []
    header += ["Peak memory, MB", "Error", *(["Run"] if several else [])]
    notes: dict[str, list[str]] = {}
    lines = []
    for shape, (number, row) in rows.items():
        ours = row.get(OURS)
        measured = ours is not None and ours.measured
        line = [shape]
        if measured:
            line += [f"{microseconds(ours.seconds)} ± {spread(ours)}", rate(ours), f"{ours.roofline_share:.0%}"]
        else:
            line += [ours.status if ours else "-", "-", "-"]
        line += [beside(row.get(name), ours if measured else None) for name in others]
        if has_copy:
            line.append(beside(row.get(COPY), ours if measured else None))
        line += [_memory(row, others), f"{ours.error:.1e}" if measured else "-"]
        lines.append(line + ([merged.run_of(number)] if several else []))
        for result in row.values():
            implied = result.provider == IN_PLACE and result.note == OVERWRITES
            if result.note and result.status != "missing" and not implied:
                who = "TileGym" if result.provider == OURS else result.provider
                notes.setdefault(f"{who}: {result.note}", []).append(shape)
    told = []
    for note, shapes in notes.items():
        every = len(rows) > 1 and len(shapes) == len(rows)
        told.append(f"\n- {note} ({'every shape' if every else ', '.join(shapes)}).")
    return markdown(header, lines) + "".join(told) + ("\n" if told else "")


def _memory(row: dict[str, Result], others: list[str]) -> str:
    """TileGym's peak memory, and in brackets that of the others."""

    def of(name: str) -> str | None:
        result = row.get(name)
        known = result is not None and result.measured and result.peak_bytes is not None
        return f"{result.peak_bytes / 1e6:.0f}" if known else None

    told = ", ".join(f"{name} {of(name)}" for name in others if of(name))
    return (of(OURS) or "-") + (f" ({told})" if told else "")


def _to_pytorch(merged: Merged) -> str:
    """The calls that PyTorch serves better, each by the run that the tables show."""
    lines = []
    for number, run in enumerate(merged.runs):
        for case in slower_table.cases(run, merged.runs):
            trained = BOTH if (case.op, BOTH, case.shape) in merged.cases else BACKWARD
            mode = trained if case.gradients else FORWARD
            if case.goes_to_pytorch and merged.cases[case.op, mode, case.shape][0] == number:
                passes = "forward and backward" if case.gradients else "forward"
                lines.append((case.op, passes, case.shape, microseconds(case.kernels), microseconds(case.pytorch)))
    table = markdown(("Op", "Passes", "Shape", "Kernels, us", "PyTorch, us"), lines) if lines else ""
    parts = [part for part in (table, _from_rows(merged)) if part]
    return "\n".join((TO_PYTORCH, *parts)) if parts else ""


def _from_rows(merged: Merged) -> str:
    """What the shipped table sends to PyTorch from a number of rows on."""
    rows = slower.rows_to_pytorch(merged.runs[0].machine.get("gpu"))
    lines = [
        (op, f"`{kind}`", str(least)) for op, kinds in sorted(rows.items()) for kind, least in sorted(kinds.items())
    ]
    if not lines:
        return ""
    texts = [FROM_ROWS, *([FROM_ROWS_OF_16_BITS] if any("bfloat16" in kind for _, kind, _ in lines) else [])]
    return "\n".join((*texts, markdown(("Op", "Arguments", "From rows"), lines)))


def _host_table(merged: Merged) -> str:
    shown = [name for name in _others(row for _, row in merged.host.values())]
    several = len(merged.runs) > 1
    lines = []
    for op, (number, row) in merged.host.items():
        figures = [_host(row.get(name)) for name in (OURS, *shown)]
        lines.append([op, *figures, *([merged.run_of(number)] if several else [])])
    return markdown(("Op", "TileGym", *shown, *(("Run",) if several else ())), lines)


def _host(result: HostResult | None) -> str:
    if result is None or not result.measured:
        return beside(result, None)
    return f"{microseconds(result.seconds)} ± {spread(result)}"  # no multiple: these are absolute goals


def _name_of(summary: dict[str, Any]) -> str:
    """A model's heading; runs in another precision than the usual one, of several sequences, or with a peer, stand
    beside it."""
    name, precision, batch = summary["model"]["id"], summary["precision"], max(summary["batch_sizes"])
    name = name if precision == "bfloat16" else f"{name}, {precision}"
    name = name if batch == 1 else f"{name}, batch {batch}"
    return f"{name}, beside torch.compile" if (summary.get("peer") or {}).get("compiled") else name


def _inference(summary: dict[str, Any]) -> str:
    model = summary["model"]
    head = (
        f"### {_name_of(summary)}\n\n{summary['device']}, {summary['precision']}"
        f"{', random weights' if model.get('random_weights') else ''}, batch {_list(summary['batch_sizes'])}, "
        f"prompt of {_list(summary['prompt_lengths'])} tokens, {summary['output_length']} generated, "
        f"{summary['num_runs']} runs, torch {summary['torch']}.\n"
    )
    figures = (
        ("Throughput, tokens/s", lambda m: f"{m['throughput_tokens_per_second']:.1f} ± {m['throughput_stdev']:.1f}"),
        ("Decoding, tokens/s", lambda m: _number(m["decode_tokens_per_second"], ".1f")),
        ("Time to first token, ms", lambda m: _number(m["time_to_first_token_ms"], ".2f")),
        ("Time per output token, ms", lambda m: _number(m["time_per_output_token_ms"], ".2f")),
        ("Peak memory, GB", lambda m: _number(m["peak_memory_bytes"] / 1e9, ".2f")),
    )
    peer = summary.get("peer") or {}
    compiled = "torch.compile" if peer.get("compiled") else "Static cache"
    sides = {"Unpatched": summary["unpatched"], compiled: peer.get("measurement"), "TileGym": summary["patched"]}
    sides = {label: side for label, side in sides.items() if side}
    table = markdown(("", *sides), ([label, *(show(side) for side in sides.values())] for label, show in figures))
    lines = [head, table]
    coverage, comparison = summary.get("kernel_coverage"), summary.get("comparison")
    if peer.get("error"):
        lines.append(f"- transformers' static cache with torch.compile was not measured: {peer['error']}")
    if coverage:
        of = "GPU time" if coverage["measure"].startswith("gpu") else "CPU time in dispatched ops"
        lines.append(f"- Kernel coverage ({of}): {coverage['percent']:.1f}%")
    if comparison:
        lines.append(
            f"- Tokens equal to the unpatched model's: {comparison['token_agreement']:.1%} of the generated text; "
            f"{comparison['choice_agreement']:.1%} where both continue the unpatched model's text. Largest difference "
            f"of a logit {comparison['max_logit_difference']:.3g}, where they reach {comparison['max_logit']:.3g}. "
            f"{'Passed' if comparison['passed'] else 'FAILED'}: {comparison['reason']}."
        )
    return "\n".join(lines) + "\n"


def _list(values: list[int]) -> str:
    return ", ".join(str(value) for value in values)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

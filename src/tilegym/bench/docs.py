"""Writes ``docs/benchmarks.md`` from the results of a run, and from end-to-end runs beside them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tilegym.bench.report import HostResult
from tilegym.bench.report import Result
from tilegym.bench.report import Run
from tilegym.bench.report import cases
from tilegym.bench.report import microseconds
from tilegym.bench.report import rate
from tilegym.bench.report import spread
from tilegym.bench.runner import COPY
from tilegym.bench.spec import OURS
from tilegym.bench.spec import BenchmarkError

INFER_FILES = "infer*.json"

PREAMBLE = """\
# Benchmarks

*Written by `tests/benchmark/write_docs.py` from measured results; edit that, not this page.*

## To measure again

```bash
bash tests/benchmark/run_all.sh{options} --output out/bench
tilegym infer --model_id llama-3.1-8b --random_weights --use_tilegym --use_cutile --use_attn --compare \\
    --report_kernel_coverage --summary_file out/bench/infer-llama-3.1-8b.json
python tests/benchmark/write_docs.py out/bench
```

`tilegym bench rms_norm fmha` measures some ops only, `tilegym bench --help` lists the options. Without a GPU only the
`pytorch` backend is measured, and this page is not worth writing.
"""

METHOD = """\
## How to read the tables

- Every figure has passed a check in the same run: the provider's outputs (and gradients) are at most twice as far
  from an fp64 oracle as PyTorch's in the same dtype, plus half a unit in the last place. A provider that is further
  off shows as WRONG, without a figure. *Error* is TileGym's, root mean square, relative to the oracle's.
- Times are medians over CUDA events around single calls; behind them half the distance between the 20th and the 80th
  percentile. Inputs are normal random numbers. Before each call the L2 cache is emptied; it then holds as many
  modified bytes as the call itself leaves behind, so that nobody's writes go uncounted. The providers of a row take
  turns, so that they meet the same clocks.
- *GB/s* counts every input read once and every output written once; *TFLOP/s* counts two operations a multiply-add,
  and half the scores for causal attention. *Of the roofline* is the least time that the two ceilings above allow for
  this work, over the time measured.
- For the others, the time is followed by what multiple it is of TileGym's: above 1.00x TileGym is faster.
- *A copy of as many bytes* is PyTorch's copy of a tensor that causes the same traffic, start and end of the launch
  included: small sizes cannot reach the roofline's bandwidth.
"""


HOST = """\
## Host time of one call

Microseconds of the CPU, over many calls without waiting for the GPU, on tiny tensors, without autograd.
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


def write(results: Path, target: Path, earlier: Path | None = None) -> Path:
    """Writes ``target`` from ``results.json`` and every ``infer*.json`` in the folder ``results``.

    ``earlier``, the folder of another run, fills in the ops that this one has not measured, said to be of that run.

    Raises:
        BenchmarkError: a file is missing or cannot be read.
    """
    run = Run.read(results)
    inferences = [_read_json(path) for path in sorted(results.glob(INFER_FILES))]
    target.write_text(page(run, inferences, Run.read(earlier) if earlier else None), encoding="utf-8")
    return target


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{path} cannot be read ({error}): write it with tilegym infer --summary_file") from error


def _op_sections(results: list[Result]) -> list[str]:
    sections, grouped = [], cases(results)
    for op in dict.fromkeys(op for op, _, _ in grouped):
        for mode in dict.fromkeys(mode for name, mode, _ in grouped if name == op):
            rows = {shape: row for (name, m, shape), row in grouped.items() if (name, m) == (op, mode)}
            sections.append(f"### {op}, {mode}\n\n{_op_table(rows)}")
    return sections


def page(run: Run, inferences: list[dict[str, Any]], earlier: Run | None = None) -> str:
    """The whole page."""
    options = " --quick" if run.settings.get("quick") else ""
    parts = [PREAMBLE.format(options=options), _machine(run), METHOD]
    if not run.complete:
        parts.append("**This run was interrupted: what it had not reached is missing below.**\n")
    if run.results:
        parts += ["## Ops\n", *_op_sections(run.results)]
    if run.host:
        parts.append(f"{HOST}\n{_host_table(run.host)}")
    if inferences:
        parts.append("## Whole models\n")
        parts += [_inference(summary) for summary in inferences]
    if earlier:
        measured = {result.op for result in run.results}
        parts.append(
            f"## Ops of an earlier run\n\nWhat the run above has not measured.\n\n{_machine(earlier, level=3)}"
        )
        parts += _op_sections([result for result in earlier.results if result.op not in measured])
        if earlier.host and not run.host:
            parts.append(f"#{HOST}\n{_host_table(earlier.host)}")
    return "\n".join(parts)


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def _machine(run: Run, level: int = 2) -> str:
    machine = run.machine
    known = {
        "Date": machine["date"],
        "GPU": machine.get("gpu"),
        "Compute capability": machine.get("compute_capability"),
        "Driver": machine.get("driver"),
        "CUDA (torch's)": machine.get("cuda"),
        "cuDNN": machine.get("cudnn"),
        "Processor": machine.get("processor"),
        "Python": machine.get("python"),
        "TileGym": machine.get("tilegym"),
        "torch": machine.get("torch"),
        "cuda-tile": machine.get("cuda_tile"),
        "Triton": machine.get("triton"),
        "Liger-Kernel": machine.get("liger_kernel"),
        "transformers": machine.get("transformers"),
        "dtype": run.settings.get("dtype"),
        "Backend": run.settings.get("backend"),
    }
    if run.roofline:
        copied = run.roofline["copied_bytes"] / 2**20
        size = run.roofline["gemm_size"]
        known[f"Copy bandwidth ({copied:.0f} MiB)"] = f"{run.roofline['bandwidth'] / 1e9:.0f} GB/s"
        known[f"GEMM {size}x{size}x{size} of the vendor's library"] = f"{run.roofline['rate'] / 1e12:.3g} TFLOP/s"
    rows = [(name, str(value)) for name, value in known.items() if value is not None]
    if machine.get("gpu") is None:
        rows.insert(1, ("GPU", "none: these figures say nothing about the kernels"))
    return "#" * level + " The machine, and its ceilings in this run\n\n" + _table(("", ""), rows)


def _others(rows: dict[str, dict[str, Result]]) -> list[str]:
    names = dict.fromkeys(name for row in rows.values() for name in row if name not in (OURS, COPY))
    return [name for name in names if any(row[name].status != "missing" for row in rows.values() if name in row)]


def _op_table(rows: dict[str, dict[str, Result]]) -> str:
    others = _others(rows)
    has_copy = any(COPY in row for row in rows.values())
    header = ["Shape", "TileGym, us", "Rate", "Of the roofline", *(f"{name}, us" for name in others)]
    if has_copy:
        header.append("A copy of as many bytes, us")
    header += ["Peak memory, MB", "Error"]
    notes: dict[str, None] = {}
    lines = []
    for shape, row in rows.items():
        ours = row.get(OURS)
        measured = ours is not None and ours.status == "ok"
        line = [shape]
        if measured:
            line += [f"{microseconds(ours.seconds)} ± {spread(ours)}", rate(ours), f"{ours.roofline_share:.0%}"]
        else:
            line += [ours.status if ours else "-", "-", "-"]
        line += [_other(row.get(name), ours if measured else None) for name in others]
        if has_copy:
            line.append(_other(row.get(COPY), ours if measured else None))
        line += [f"{ours.peak_bytes / 1e6:.0f}" if measured and ours.peak_bytes is not None else "-"]
        line += [f"{ours.error:.1e}" if measured else "-"]
        lines.append(line)
        for result in row.values():
            if result.note and result.status != "missing":
                who = "TileGym" if result.provider == OURS else result.provider
                notes[f"{shape}, {who}: {result.note}."] = None
    return _table(header, lines) + "".join(f"\n- {note}" for note in notes) + ("\n" if notes else "")


def _other(result: Result | HostResult | None, ours: Result | HostResult | None) -> str:
    if result is None or result.status == "missing":
        return "-"
    if result.status != "ok":
        return result.status
    text = microseconds(result.seconds)
    return f"{text} ({result.seconds / ours.seconds:.2f}x)" if ours is not None else text


def _host_table(results: list[HostResult]) -> str:
    rows: dict[str, dict[str, HostResult]] = {}
    for result in results:
        if result.status != "missing":
            rows.setdefault(result.op, {})[result.provider] = result
    names = [name for name in dict.fromkeys(name for row in rows.values() for name in row) if name != OURS]
    lines = [
        [op, *(_other(row.get(name), None) for name in (OURS, *names))]  # no multiple: these are absolute goals
        for op, row in rows.items()
    ]
    return _table(("Op", "TileGym", *names), lines)


def _inference(summary: dict[str, Any]) -> str:
    model = summary["model"]
    name = model["id"]
    head = (
        f"### {name}\n\n{summary['device']}, {summary['precision']}"
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
    sides = {label: summary[key] for label, key in (("Unpatched", "unpatched"), ("TileGym", "patched")) if summary[key]}
    table = _table(("", *sides), ([label, *(show(side) for side in sides.values())] for label, show in figures))
    lines = [head, table]
    coverage, comparison = summary.get("kernel_coverage"), summary.get("comparison")
    if coverage:
        of = "GPU time" if coverage["measure"].startswith("gpu") else "CPU time in dispatched ops"
        lines.append(f"- Kernel coverage ({of}): {coverage['percent']:.1f}%")
    if comparison:
        lines.append(
            f"- Tokens equal to the unpatched model's: {comparison['token_agreement']:.1%}; largest difference of a "
            f"logit {comparison['max_logit_difference']:.3g}. {'Passed' if comparison['passed'] else 'FAILED'}: "
            f"{comparison['reason']}."
        )
    return "\n".join(lines) + "\n"


def _list(values: list[int]) -> str:
    return ", ".join(str(value) for value in values)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

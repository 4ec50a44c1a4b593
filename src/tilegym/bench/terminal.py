"""Shows the result of a job on a terminal."""

import textwrap
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from tilegym.bench.compare import Comparison
from tilegym.bench.coverage import Coverage
from tilegym.bench.job import Result
from tilegym.bench.job import device_name

_SHOWN_ENTRIES = 12
_SHOWN_PROMPT = 300


def show(result: Result, console: Console, show_outputs: bool) -> None:
    """Prints what was run, what it gave, how fast, and whether patched and unpatched agree."""
    _show_job(result, console)
    if result.patches is not None:
        console.print(escape(str(result.patches).rstrip()), highlight=False, soft_wrap=True)
        console.print()
    if show_outputs:
        _show_outputs(result, console)
    if result.coverage is not None:
        show_coverage_table(result.coverage, console)
    if result.profile_table is not None:
        console.print(escape(result.profile_table), highlight=False, soft_wrap=True)
        console.print(f"profile written to {result.profile_file} (open it in chrome://tracing or ui.perfetto.dev)\n")
    _show_speed(result, console)
    if result.comparison is not None:
        _show_comparison(result.comparison, console)


def show_coverage(result: Result, console: Console) -> None:
    """Prints what was run, and which share of its time each kernel took."""
    _show_job(result, console)
    show_coverage_table(result.coverage, console)


def _show_job(result: Result, console: Console) -> None:
    options = result.options
    sizes = ", ".join(f"{batch.size} x {batch.prompt_length}" for batch in result.batches[:4])
    more = f" and {len(result.batches) - 4} more" if len(result.batches) > 4 else ""
    pictures = f" with {', '.join(options.image)}" if options.image else ""
    show_setup(
        result,
        console,
        f"prompts {sizes}{more} tokens{pictures}, {options.output_length} new tokens each, "
        f"{options.num_runs} runs after {options.warmup_runs} warm-up",
    )


def show_setup(result: Any, console: Console, work: str) -> None:
    """Prints the model, the device, the kernels, and what was done with them: ``work``; then the notices.

    Args:
        result: a job's, with ``options``, ``device``, ``backend``, ``model`` and ``notices``.
    """
    model = result.model
    weights = "random weights" if model["random_weights"] else "trained weights"
    rows = {
        "model": f"{model['id']} ({model['type']}, {_count(model['parameters'])} parameters, {weights})",
        "device": f"{device_name(result.device, result.options.gpus)}, {result.options.dtype_name}",
        "kernels": "unpatched" if result.backend is None else f"TileGym, backend {result.backend}",
        "work": work,
    }
    console.print()
    for key, value in rows.items():
        console.print(f"[bold]{key:8}[/bold] {escape(value)}", highlight=False, soft_wrap=True)
    for notice in result.notices:
        console.print(f"[yellow]note    [/yellow] {escape(notice)}", highlight=False, soft_wrap=True)
    console.print()


def _show_outputs(result: Result, console: Console) -> None:
    for i, output in enumerate(result.outputs):
        prompt = output["prompt"]
        shown = prompt if len(prompt) <= _SHOWN_PROMPT else "..." + prompt[-_SHOWN_PROMPT:]
        console.print(f"[bold]output {i + 1}[/bold] (prompt in grey)", highlight=False)
        text = f"[dim]{escape(shown)}[/dim]{escape(output['text'])}"
        console.print(textwrap.indent(text.rstrip("\n"), "    "), highlight=False, soft_wrap=True)
    console.print()


def show_coverage_table(coverage: Coverage, console: Console) -> None:
    """Prints the kernels that took longest and all of TileGym's own, and which share these took together."""
    table = Table("kernel" if coverage.device_type == "cuda" else "op", box=box.SIMPLE_HEAD)
    table.add_column("TileGym's")
    for column in ("calls", "ms", "share"):
        table.add_column(column, justify="right")
    shown = coverage.entries[:_SHOWN_ENTRIES]
    shown += [entry for entry in coverage.entries[_SHOWN_ENTRIES:] if entry.own]
    for entry in shown:
        share = entry.seconds / coverage.total_seconds if coverage.total_seconds else 0.0
        name = entry.name if len(entry.name) <= 60 else entry.name[:57] + "..."
        table.add_row(
            escape(name), "yes" if entry.own else "", str(entry.calls), f"{1e3 * entry.seconds:.2f}", f"{share:.1%}"
        )
    hidden = [entry for entry in coverage.entries if entry not in shown]
    if hidden:
        spent = sum(entry.seconds for entry in hidden)
        share = spent / coverage.total_seconds
        calls = sum(entry.calls for entry in hidden)
        table.add_row(f"{len(hidden)} others", "", str(calls), f"{1e3 * spent:.2f}", f"{share:.1%}")
    console.print(table)
    console.print(escape(coverage.headline), highlight=False, style="bold", soft_wrap=True)
    console.print(f"    {coverage.explanation}\n", highlight=False, soft_wrap=True)


def _show_speed(result: Result, console: Console) -> None:
    sides = {"unpatched": result.unpatched}
    sides |= {result.peer.label: result.peer.measurement} if result.peer else {}
    sides |= {"TileGym": result.patched}
    sides = {name: side.summary() for name, side in sides.items() if side is not None}
    table = Table("", box=box.SIMPLE_HEAD)
    for name in sides:
        table.add_column(name, justify="right")
    # The interpreter is there to be right: how much slower it is than PyTorch says nothing.
    compared = [] if result.options.interpret or result.patched is None else list(sides)[:-1]
    for i, name in enumerate(compared):
        table.add_column(f"vs {name}" if i else "TileGym is", justify="right")
    rows = [
        ("throughput", "throughput_tokens_per_second", "{:.1f} tokens/sec", False),
        ("time to first token", "time_to_first_token_ms", "{:.2f} ms", True),
        ("time per output token", "time_per_output_token_ms", "{:.2f} ms", True),
        ("decode rate", "decode_tokens_per_second", "{:.1f} tokens/sec", False),
    ]
    for label, key, form, lower_is_better in rows:
        values = [side[key] for side in sides.values()]
        cells = ["-" if value is None else form.format(value) for value in values]
        for value in values[: len(compared)]:
            if None not in values:
                ratio = value / values[-1] if lower_is_better else values[-1] / value
                cells.append(f"{ratio:.2f}x as fast")
        table.add_row(label, *cells)
    table.add_row("peak memory", *(bytes_text(side["peak_memory_bytes"]) for side in sides.values()))
    console.print(table)
    if result.device.type == "cpu":
        console.print("    peak memory on a CPU is the whole process's so far", highlight=False)
    for name, side in sides.items():
        rate, spread = side["throughput_tokens_per_second"], side["throughput_stdev"]
        label = f"{name + ':':{max(map(len, sides)) + 2}}" if len(sides) > 1 else ""
        console.print(f"{label}Average throughput: {rate:.2f} ± {spread:.2f} tokens/sec", highlight=False, style="bold")
    console.print()


def _show_comparison(comparison: Comparison, console: Console) -> None:
    agreement = f"{comparison.token_agreement:.1%}"
    if comparison.first_difference is not None:
        agreement += f", first difference at step {comparison.first_difference + 1}"
    rows = {
        "token agreement": agreement,
        "same choice, same text": f"{comparison.choice_agreement:.1%} of {comparison.steps_compared} steps",
        "equal sequences": f"{comparison.sequences_equal} of {comparison.sequences}",
        "largest logit difference": f"{comparison.max_logit_difference:.4g}"
        f" (logits reach {comparison.max_logit:.3g}; {comparison.steps_compared} steps compared)",
    }
    rows[f"error against {comparison.oracle}"] = (
        f"unpatched {comparison.unpatched_max_error:.4g} at most, {comparison.unpatched_rms_error:.3g} rms; "
        f"TileGym {comparison.patched_max_error:.4g} at most, {comparison.patched_rms_error:.3g} rms"
    )
    width = max(len(label) for label in rows)
    for label, value in rows.items():
        console.print(f"{label:{width}}  {value}", highlight=False, soft_wrap=True)
    verdict = "[bold green]PASS[/bold green]" if comparison.passed else "[bold red]FAIL[/bold red]"
    console.print(f"{verdict}: {escape(comparison.reason)}", highlight=False, soft_wrap=True)
    console.print(Padding(f"criterion: {comparison.criterion}", (0, 0, 0, 4)), highlight=False, style="dim")


def _count(number: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if number >= 0.1 * size:
            return f"{number / size:.2f} {unit}"
    return f"{number:,}"


def bytes_text(number: int) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"

"""Shows the result of a training job on a terminal."""

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from tilegym.bench import terminal
from tilegym.bench import training
from tilegym.bench.train_job import Result
from tilegym.bench.train_job import loss_differences

_SHOWN_LOSSES = 12
_SHOWN_PARAMETERS = 3


def show(result: Result, console: Console) -> None:
    """Prints what was run, how fast each variant trains and in how much memory, its losses, and whether it is right."""
    options = result.options
    cut = f", cut to {options.num_layers} layers" if options.num_layers is not None else ""
    extras = "".join(f", {name.replace('_', ' ')}" for name in training.FLAGS if getattr(options, name))
    rate = f" with a learning rate of {options.learning_rate:g}" if options.optimizer != "none" else ""
    terminal.show_setup(
        result,
        console,
        f"{options.batch_size} x {options.sequence_length} tokens a step, {options.steps} steps after "
        f"{options.warmup_steps} warm-up{cut}, optimizer {options.optimizer}{rate}{extras}",
    )
    if result.patches is not None:
        console.print(escape(str(result.patches).rstrip()), highlight=False, soft_wrap=True)
        console.print()
    if result.coverage is not None:
        terminal.show_coverage_table(result.coverage, console)
    sides = variants(result)
    _show_speed(sides, result, console)
    _show_losses(sides, result, console)
    if result.peer is not None:
        _show_peer(result.peer, console)
    if result.check is not None:
        _show_check(result.check.summary(), console)
        verdict = "[bold red]FAIL[/bold red]" if result.failed else "[bold green]PASS[/bold green]"
        console.print(f"{verdict}: {escape(result.reason)}", highlight=False, soft_wrap=True)
        console.print(Padding(f"criterion: {result.check.criterion}", (0, 0, 0, 4)), highlight=False, style="dim")


def variants(result: Result) -> dict[str, dict[str, Any]]:
    """The measurements that there are, as plain data, by the names that they are shown under."""
    found = {"unpatched": result.unpatched, "TileGym": result.patched}
    sides = {name: measured.summary() for name, measured in found.items() if measured is not None}
    if result.peer is not None and result.peer["measurement"] is not None:
        sides[result.peer["name"]] = result.peer["measurement"]
    return sides


def _show_speed(sides: dict[str, dict[str, Any]], result: Result, console: Console) -> None:
    table = Table("", *sides, box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    # The interpreter is there to be right: how much slower it is than PyTorch says nothing.
    first = next(iter(sides.values())) if len(sides) > 1 and not result.options.interpret else None

    def times(side: dict[str, Any], key: str) -> str:
        ratio = "" if first is None or side is first or not side[key] else f" ({first[key] / side[key]:.2f}x)"
        return f"{side[key]:.2f} ms{ratio}"

    for label, key in (
        ("a step", "step_ms"),
        ("    forward", "forward_ms"),
        ("    backward", "backward_ms"),
        ("    optimizer", "optimizer_ms"),
    ):
        table.add_row(label, *(times(side, key) for side in sides.values()))
    table.add_row(
        "of steps 60% within",
        *(f"{side['step_ms_low']:.2f} to {side['step_ms_high']:.2f} ms" for side in sides.values()),
    )
    table.add_row("throughput", *(f"{side['tokens_per_second']:.0f} tokens/sec" for side in sides.values()))
    for label, key in (
        ("peak memory", "peak"),
        ("    kept for the backward pass", "activations"),
        ("    weights", "weights"),
        ("    gradients", "gradients"),
        ("    optimizer", "optimizer"),
    ):
        if all(side["memory_bytes"] for side in sides.values()):
            table.add_row(label, *(terminal.bytes_text(side["memory_bytes"][key]) for side in sides.values()))
    console.print(table)
    if result.device.type == "cpu":
        console.print("    on a CPU: times by the clock, memory not measured\n", highlight=False)


def _show_losses(sides: dict[str, dict[str, Any]], result: Result, console: Console) -> None:
    losses = {name: [float(loss) for loss in side["losses"]] for name, side in sides.items()}
    count = len(next(iter(losses.values())))
    both = "unpatched" in losses and "TileGym" in losses
    table = Table("loss of step", *losses, *(["difference"] if both else []), box=box.SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    differences = loss_differences(losses["unpatched"], losses["TileGym"]) if both else None
    shown = range(0, count, -(-count // _SHOWN_LOSSES))
    for i in dict.fromkeys([*shown, count - 1]):
        cells = [f"{values[i]:.6f}" for values in losses.values()]
        table.add_row(str(i + 1), *cells, *([f"{differences[i]:.2g}"] if both else []))
    console.print(table)
    if both:
        console.print(
            f"largest difference of a loss, of all steps: {result.largest_loss_difference:.3g}\n", highlight=False
        )


def _show_peer(peer: dict[str, Any], console: Console) -> None:
    if peer["error"] is not None:
        line = f"{peer['name']} could not be measured: {peer['error']}"
        console.print(f"[yellow]note    [/yellow] {escape(line)}", highlight=False, soft_wrap=True)
    elif peer["gradient_check"] is not None:
        check = peer["gradient_check"]
        verdict = "passes the same check" if check["passed"] else f"does not pass the same check: {check['reason']}"
        console.print(escape(f"{peer['name']} {peer['version']} {verdict}"), highlight=False, soft_wrap=True)
        _show_check(check, console, peer["name"])


def _show_check(check: dict[str, Any], console: Console, name: str = "TileGym") -> None:
    part = " (a part of a batch: the oracle of more did not fit the memory)" if check["cut"] else ""
    rows = {
        "gradients compared for": f"{check['rows']} x {check['tokens']} tokens{part}",
        "loss": f"unpatched {check['unpatched_loss']:.7g}, {name} {float(check['patched_loss']):.7g}, "
        f"{check['oracle']} {check['oracle_loss']:.7g}",
    }
    shown = [("error of all gradients", check["overall"])]
    shown += [(f"error of {entry['name']}", entry) for entry in check["parameters"][:_SHOWN_PARAMETERS]]
    for label, entry in shown:
        norm = entry["norm"] or 1.0
        rows[label] = (
            f"unpatched {entry['unpatched_error'] / norm:.3g}, {name} {float(entry['patched_error']) / norm:.3g}, "
            f"allowed {entry['allowed'] / norm:.3g}"
        )
    for label, value in rows.items():
        console.print(f"{label}: {value}", highlight=False, soft_wrap=True)

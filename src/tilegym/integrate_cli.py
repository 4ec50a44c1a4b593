"""``tilegym integrate``: from a model's name to a patch that is verified and measured."""

import json
import sys
import time
from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tilegym.bench import models
from tilegym.errors import TileGymError
from tilegym.infer import _warnings_told
from tilegym.integrate import report
from tilegym.integrate.pipeline import Options
from tilegym.integrate.pipeline import Outcome
from tilegym.integrate.pipeline import integrate as run
from tilegym.integrate.source_regions import look_up_commit

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def integrate(
    model: str = typer.Argument(
        help="Hub id or local folder; with --random_weights also a config file or a preset: "
        + ", ".join(models.presets())
    ),
    random_weights: bool = typer.Option(False, "--random_weights", help="Build from the config; download no weights."),
    plan_only: bool = typer.Option(False, "--plan-only", help="Stop after the plan."),
    output: Path | None = typer.Option(
        None,
        "--output",
        help="The folder for patches and report. Default: ./tilegym_FAMILY; the patches of a family "
        "that is new go into the package in a checkout.",
    ),
    force: bool = typer.Option(False, "--force", help="Go on though the family is patched already."),
    restart: bool = typer.Option(False, "--restart", help="Forget what an earlier run into the same folder found."),
    trust_remote_code: bool = typer.Option(
        False, "--trust-remote-code", help="Run code that comes with the model. Read it first."
    ),
    resolve_commits: bool = typer.Option(
        False,
        "--resolve-commits",
        help="Ask GitHub once which commit the installed transformers release is, for links that never change.",
    ),
    precision: str = typer.Option("bfloat16", "--precision", help=", ".join(models.PRECISIONS)),
    output_length: int = typer.Option(32, "--output_length", min=2, help="New tokens of each timed run."),
    num_runs: int = typer.Option(3, "--num_runs", min=1, help="Timed runs."),
    as_json: bool = typer.Option(False, "--json", help="Print all results as JSON to stdout, and nothing else there."),
) -> None:
    """Find the kernels for a model, verify each on its own tensors, write the patch, and measure it.

    Stopped anywhere, the same command continues. Exit status: 0 all well; 2 the input cannot be used; 130 interrupted.
    """
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 120)
    progress = Console(stderr=True)

    start = time.monotonic()

    def tell(line: str) -> None:
        passed = f"{time.monotonic() - start:3.0f} s"
        progress.print(f"[dim]... {passed}  {escape(line)}[/dim]", highlight=False, soft_wrap=True)

    options = Options(
        model, random_weights, plan_only, output, force, restart, trust_remote_code, precision, output_length, num_runs
    )
    try:
        if resolve_commits and not look_up_commit():
            tell("GitHub does not say which commit this transformers is: drafts link to the tag of its release")
        with models.quiet_transformers(), _warnings_told(tell):
            outcome = run(options, tell)
    except KeyboardInterrupt:
        again = "the same command without --restart" if restart else "the same command"
        print(f"interrupted: {again} continues where it stopped", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except TileGymError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except OSError as error:
        print(f"error: {error.filename or 'a file'} cannot be used ({error.strerror}): free the disk, or name another "
              "folder with --output; the same command continues", file=sys.stderr)  # fmt: skip
        raise typer.Exit(EXIT_BAD_INPUT) from None
    _show(outcome, console)
    if as_json:
        print(json.dumps(report.finite(report.summary(outcome)), indent=2, allow_nan=False))


def _show(outcome: Outcome, console: Console) -> None:
    plan = outcome.plan
    data = report.summary(outcome)
    console.print(f"\n[bold]{escape(outcome.options.model_id)}[/bold]: {plan.research.architecture}", highlight=False)
    for notice in outcome.notices:
        console.print(f"[yellow]note[/yellow] {escape(notice)}", highlight=False, soft_wrap=True)
    rows = report.plan_rows(data)
    _print(console, ["compute", "where", "kernel", "fit", "result" if outcome.checks else ""], rows)
    for missed in plan.research.unrecognised:
        console.print(f"    not recognised: {missed.implementation}: {missed.why}", highlight=False, soft_wrap=True)
    if outcome.measured is None:
        _show_end_of_plan(outcome, console)
        return
    console.print(escape(report.compile_line(outcome.compiled)), highlight=False, soft_wrap=True)
    console.print(f"\n[bold green]PASS[/bold green] {escape(report.verdict(data))}", highlight=False, soft_wrap=True)
    _print(console, ["", "unpatched", "TileGym", "speed-up"], report.speed_rows(outcome.measured, data["device"]))
    flags = report.flag_rows(outcome.measured, outcome.accepted)
    _print(console, ["flag", "tokens/s", "against unpatched", "greedy tokens"], flags)
    for side, output in zip(("unpatched", "TileGym"), outcome.outputs, strict=True):
        text = f"{side:10} [dim]{escape(output['prompt'])}[/dim]{escape(output['text'])}"
        console.print(text.replace("\n", " "), highlight=False, soft_wrap=True)
    console.print(f"\npatches  {outcome.package}", highlight=False, soft_wrap=True)
    for path in outcome.reports:
        console.print(f"report   {path}", highlight=False, soft_wrap=True)


def _show_end_of_plan(outcome: Outcome, console: Console) -> None:
    plan = outcome.plan
    if plan.by_hand:
        console.print(
            f"{plan.research.model_type} is patched by hand already: monkey_patch.apply(model) does it"
            + ("" if outcome.options.plan_only else "; --force integrates it all the same, into a folder of its own"),
            highlight=False,
            soft_wrap=True,
        )


def _print(console: Console, header: list[str], rows: list[list[str]]) -> None:
    table = Table(*header, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console.print(table)

"""The command ``tilegym``: what commands there are.

It stands beside the package, whose import takes seconds, most of them PyTorch's: the help, the version and what is no
command at all do not wait for it. Each command lives in a module of its own, which is imported when that command is
asked for and not before, so that one whose optional package is missing takes no other one down.
"""

import importlib
import importlib.metadata
import sys
from typing import NamedTuple

import typer


class Command(NamedTuple):
    """A subcommand: the module and the function (or typer application) in it, and the line that ``--help`` shows."""

    module: str
    function: str
    help: str


COMMANDS = {
    "infer": Command("tilegym.infer", "infer", "Run a Hugging Face model, with and without TileGym's kernels."),
    "train": Command("tilegym.train", "train", "Measure training steps, with and without TileGym's kernels."),
    "integrate": Command(
        "tilegym.integrate_cli", "integrate", "Find, verify and write the kernels for any language model."
    ),
    "tune": Command("tilegym.tune", "tune", "List, clear or export what the autotuner has measured."),
    "bench": Command("tilegym.bench_cli", "bench", "Measure ops against other implementations and the roofline."),
    "coverage": Command("tilegym.coverage", "coverage", "Tell how much of a model's work TileGym's kernels do."),
    "inventory": Command("tilegym.inventory_cli", "app", "List, show, check, match and export the kernels there are."),
    "autokernel": Command("tilegym.autokernel_cli", "autokernel", "Find, judge and keep new kernels for a model."),
    "doctor": Command("tilegym.doctor", "doctor", "Check that this machine can run TileGym; say what to do if not."),
}


def build_app(asked: str | None = None) -> typer.Typer:
    """The typer application, in which only the command ``asked`` can run; the others are there for ``--help``."""
    app = typer.Typer(
        name="tilegym",
        help="TileGym kernelizes Hugging Face models with CUDA Tile kernels.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},  # options with either
    )

    @app.callback()
    def root(
        version: bool = typer.Option(False, "--version", help="Show the version and exit.", callback=_print_version),
    ) -> None:
        pass

    for name, command in COMMANDS.items():
        if name == asked:
            function = getattr(importlib.import_module(command.module), command.function)
        else:
            function = _not_loaded
        if isinstance(function, typer.Typer):
            app.add_typer(function, name=name, help=command.help)
        else:
            app.command(name, help=command.help)(function)
    return app


def _not_loaded() -> None:
    raise AssertionError("a command that was not asked for")


def _print_version(wanted: bool) -> None:
    if wanted:
        package = sys.modules.get("tilegym")
        print("tilegym", package.__version__ if package else importlib.metadata.version("tilegym"))
        raise typer.Exit()


def asked_for() -> str | None:
    """The command in ``sys.argv``, or what stands in its place."""
    return next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)


def main() -> None:
    """Entry point: as ``tilegym.cli.main``, but Ctrl-C ends the import too in one line, with status 130."""
    try:
        if asked_for() in COMMANDS:
            from tilegym.cli import main as run
        else:
            run = build_app()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()

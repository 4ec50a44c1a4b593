"""The command line: ``tilegym <command>``.

Each command lives in a module of its own, which is imported when that command is asked for and not before, so that
``tilegym --help`` is quick and a command whose optional package is missing takes no other one down.
"""

import importlib
import os
import sys
import warnings
from typing import Any
from typing import NamedTuple

import typer

from tilegym import __version__
from tilegym.errors import TileGymError


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
        print(f"tilegym {__version__}")
        raise typer.Exit()


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


def main() -> None:
    """Entry point of ``tilegym``: runs the command in ``sys.argv``; TileGym's own errors become one line, exit 1."""
    warnings.showwarning = _show_warning  # without the line of source that gave it
    asked = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    try:
        build_app(asked)()
    except TileGymError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "tilegym":
            raise
        print(f"error: `tilegym {asked}` needs a package that is not installed: {error.name}", file=sys.stderr)
        print("remedy: pip install 'tilegym[dev]', or that package alone", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:  # while the command was being imported; each has its own way to end afterwards
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `tilegym tune --list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()

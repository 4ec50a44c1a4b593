"""Writes docs/benchmarks.md from a folder with results.json (tilegym bench) and infer*.json (tilegym infer)."""

import sys
from pathlib import Path

import typer

from tilegym.bench.docs import default_target
from tilegym.bench.docs import write
from tilegym.errors import TileGymError


def write_docs(
    results: Path = typer.Argument(..., help="The folder that tilegym bench --output named."),
    target: Path = typer.Option(None, help="The page to write. Default: docs/benchmarks.md of this checkout."),
    earlier: Path = typer.Option(None, help="The folder of another run, for the ops that this one has not measured."),
) -> None:
    """Write docs/benchmarks.md from measured results."""
    try:
        print(f"written: {write(results, target or default_target(), earlier)}")
    except TileGymError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(write_docs)

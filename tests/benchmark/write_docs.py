"""Writes docs/benchmarks.md from folders with results.json (tilegym bench) and infer*.json (tilegym infer)."""

import sys
from pathlib import Path

import typer

from tilegym.bench.docs import write
from tilegym.errors import TileGymError


def write_docs(
    results: list[Path] = typer.Argument(..., help="Folders that tilegym bench --output named; the latest run counts."),
    target: Path = typer.Option(None, help="The page to write. Default: docs/benchmarks.md of this checkout."),
    note: str = typer.Option("", help="A paragraph for the page: what the figures do not tell."),
) -> None:
    """Write docs/benchmarks.md from measured results."""
    try:
        print(f"written: {write(results, target, note)}")
    except TileGymError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(write_docs)

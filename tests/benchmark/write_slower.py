"""Writes which calls are slower in cuTile than in PyTorch, and go there therefore, from runs of the benchmarks.

    tilegym bench --output out/bench
    python tests/benchmark/write_slower.py out/bench

On a GPU ``tilegym bench`` measures each op with ``backend="pytorch"`` beside the kernels; the kernels too where the
present table sends a call to PyTorch. What is listed, and what not, says ``tilegym.bench.slower_table``. The file
replaces the one for the same GPU in ``src/tilegym/backend/cutile/slower/``, but for what ``sweep_float32.py`` and
``sweep_linear.py`` wrote.
"""

import json
import sys
from pathlib import Path

import typer

from tilegym.backend import slower
from tilegym.bench.report import Run
from tilegym.bench.slower_table import slower_calls
from tilegym.bench.spec import default_folder
from tilegym.bench.spec import load_benchmarks
from tilegym.errors import TileGymError


def write_slower(
    results: list[Path] = typer.Argument(..., help="Folders that tilegym bench --output named."),
    target: Path = typer.Option(slower.FOLDER, help="The folder to write to."),
) -> None:
    """List the calls that go to PyTorch because it is faster."""
    try:
        runs = [Run.read(folder).steady() for folder in results]
        calls = slower_calls(runs, load_benchmarks(default_folder()))
    except TileGymError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    latest = max(runs, key=lambda run: run.machine["date"])
    table = {key: latest.machine.get(key) for key in ("gpu", "date", "torch", "cuda_tile")} | {"slower": calls}
    path = slower.file_of(table["gpu"], target)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        known = json.loads(path.read_text(encoding="utf-8"))
        table |= {key: known[key] for key in ("from_rows", "exceptions") if key in known}
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}, {sum(map(len, calls.values()))} calls of {len(calls)} ops")


if __name__ == "__main__":
    typer.run(write_slower)

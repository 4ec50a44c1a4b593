"""What ``docs/benchmarks.md`` was written from, in a file beside it: what no new run has measured stays on the page."""

import dataclasses
import json
import lzma
import os
from pathlib import Path

from tilegym.bench.merge import Merged
from tilegym.bench.report import HostResult
from tilegym.bench.report import Result
from tilegym.bench.report import Run
from tilegym.bench.spec import BenchmarkError

SUFFIX = ".json.xz"
DIGITS = 6  # of a figure: the page shows four


def store_of(page: Path) -> Path:
    return page.with_suffix(SUFFIX)


def read(path: Path) -> list[Run]:
    """The runs in ``path``; none if there is no such file.

    Raises:
        BenchmarkError: it cannot be read.
    """
    if not path.is_file():
        return []
    try:
        return [Run.of(stored, path) for stored in json.loads(lzma.decompress(path.read_bytes()))]
    except (OSError, lzma.LZMAError, ValueError, TypeError) as error:
        if isinstance(error, BenchmarkError):
            raise
        why = f"{path} cannot be read ({error}): restore it, or remove it and give all results"
        raise BenchmarkError(why) from error


def write(path: Path, runs: list[Run]) -> None:
    """Writes ``runs``; a reader never sees half a file."""
    text = json.dumps([dataclasses.asdict(run) for run in runs], separators=(",", ":"), default=str)
    part = path.with_name(path.name + ".part")
    part.write_bytes(lzma.compress(text.encode("utf-8"), preset=9))
    os.replace(part, path)


def _rounded(row: Result | HostResult) -> Result | HostResult:
    figures = {name: float(f"{value:.{DIGITS}g}") for name, value in vars(row).items() if isinstance(value, float)}
    return dataclasses.replace(row, **figures)


def shown(merged: Merged) -> list[Run]:
    """The runs of which anything counts, each with that alone, its figures to DIGITS."""
    kept = []
    for number, run in enumerate(merged.runs):
        results = [_rounded(row) for of, rows in merged.cases.values() if of == number for row in rows.values()]
        host = [_rounded(row) for of, rows in merged.host.values() if of == number for row in rows.values()]
        if results or host:
            kept.append(dataclasses.replace(run, results=results, host=host, spent={}))
    return kept

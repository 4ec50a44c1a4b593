"""The results of a run: what one is, and how they are written (JSON, CSV) and shown (compact tables)."""

import csv
import dataclasses
import json
import os
from collections.abc import Collection
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

from tilegym.bench.spec import IN_PLACE
from tilegym.bench.spec import OURS
from tilegym.bench.spec import BenchmarkError

SCHEMA = 1
RESULTS_FILE = "results.json"
OK, INEXACT = "ok", "inexact"
UNSTEADY, MAX_SPREAD = "unsteady", 0.25  # of the median: half the distance between the 20th and the 80th percentile


@dataclass
class Result:
    """One provider, at one shape, in one mode. Times in seconds, sizes in bytes; figures only where it was measured.

    ``status``: "ok"; "inexact": a peer whose error is that of rounding, but at single elements larger than allowed;
    "WRONG": it does not compute the op; "failed": it raised; "missing": it is not installed. Figures: the first two.
    ``backend``: for the op itself, the backend that served the call.
    """

    op: str
    shape: str
    model: str
    dims: dict[str, Any]
    mode: str
    provider: str
    status: str
    note: str = ""
    backend: str = ""
    error: float | None = None
    largest_error: float | None = None
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    samples: int = 0
    bytes_per_second: float | None = None
    flops_per_second: float | None = None
    bound: str = ""
    roofline_share: float | None = None
    peak_bytes: int | None = None

    @property
    def measured(self) -> bool:
        return self.status in (OK, INEXACT)


@dataclass
class HostResult:
    """The host's seconds for one call of a provider on tiny tensors."""

    op: str
    dims: dict[str, Any]
    provider: str
    status: str
    note: str = ""
    backend: str = ""
    seconds: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def measured(self) -> bool:
        return self.status in (OK, INEXACT)


@dataclass
class Run:
    """Everything that one run of the benchmarks has found so far. ``spent``: seconds by op and what took them."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    roofline: dict[str, Any] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    host: list[HostResult] = field(default_factory=list)
    complete: bool = False
    spent: dict[str, dict[str, float]] = field(default_factory=dict)
    schema: int = SCHEMA

    def write(self, folder: Path) -> None:
        """Writes ``results.json``, ``results.csv`` and ``host.csv``; a reader never sees half a file."""
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / RESULTS_FILE, json.dumps(dataclasses.asdict(self), indent=1, default=str) + "\n")
        for name, rows in (("results.csv", self.results), ("host.csv", self.host)):
            _write_csv(folder / name, rows, self.machine)

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """The run that was written to ``folder``.

        Raises:
            BenchmarkError: there is none, or it was written by another version of TileGym.
        """
        path = folder / RESULTS_FILE
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BenchmarkError(f"{path} cannot be read ({error}): give the folder that --output named") from error
        return cls.of(stored, path)

    @classmethod
    def of(cls, stored: dict[str, Any], path: Path) -> "Run":
        """The run that ``path`` holds as these dictionaries.

        Raises:
            BenchmarkError: it was written by another version of TileGym.
        """
        schema = stored.get("schema") if isinstance(stored, dict) else None
        if schema != SCHEMA:
            raise BenchmarkError(f"{path} has schema {schema}, not {SCHEMA}: measure again")
        try:
            results = [Result(**row) for row in stored["results"]]
            return cls(**stored | {"results": results, "host": [HostResult(**row) for row in stored["host"]]})
        except (KeyError, TypeError) as error:  # written by hand, or by another version
            raise BenchmarkError(f"{path} does not hold what a run writes ({error}): measure again") from error

    def steady(self) -> "Run":
        """This run, without the figures of what was not timed steadily: its status is "unsteady" then."""
        rows = [dataclasses.replace(row, status=UNSTEADY) if _is_unsteady(row) else row for row in self.results]
        return dataclasses.replace(self, results=rows)

    def add_spent(self, op: str, seconds: dict[str, float]) -> None:
        """Adds seconds by what they were spent on to those of ``op``."""
        known = self.spent.setdefault(op, {})
        for what, taken in seconds.items():
            known[what] = round(known.get(what, 0.0) + taken, 3)

    def wrong(self, plugged: Collection[str] = ()) -> list[Result | HostResult]:
        """Results of ours that are wrong or failed, wrong ones of ``plugged`` providers, and all of those of which none
        is measured: a run that has any is a failure."""
        rows = (*self.results, *self.host)
        found = [row for row in rows if row.provider in (OURS, IN_PLACE) and row.status != OK]
        for provider in plugged:
            own = [row for row in self.results if row.provider == provider]
            never = all(row.status == "failed" for row in own)  # nor forward alone
            found += [row for row in own if never or row.status == "WRONG"]
        return found


def _is_unsteady(row: Result) -> bool:
    return row.measured and None not in (row.low, row.high) and row.high - row.low > 2 * MAX_SPREAD * row.seconds


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _write_csv(path: Path, rows: list, machine: dict[str, Any]) -> None:
    columns = {key: machine[key] for key in ("gpu", "driver", "torch", "tilegym", "cuda_tile") if key in machine}
    part = path.with_name(path.name + ".part")
    with part.open("w", newline="", encoding="utf-8") as file:
        writer = None
        for row in rows:
            flat = dataclasses.asdict(row) | {"dims": json.dumps(row.dims)} | columns
            if writer is None:
                writer = csv.DictWriter(file, flat)
                writer.writeheader()
            writer.writerow(flat)
    os.replace(part, path)


def rate(result: Result) -> str:
    """The figure that the roofline's binding ceiling is about: "3912 GB/s" or "640 TFLOP/s"."""
    if result.bound == "compute":
        return f"{result.flops_per_second / 1e12:.3g} TFLOP/s"
    return f"{result.bytes_per_second / 1e9:.4g} GB/s"


def microseconds(seconds: float) -> str:
    """Three or four digits: "4.31", "36.2", "1620"."""
    value = seconds * 1e6
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def spread(result: Result | HostResult) -> str:
    """Half the distance of the 20th and 80th percentile, in percent of the median."""
    return f"{50 * (result.high - result.low) / result.seconds:.0f}%"


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of a page."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def beside(result: Result | HostResult | None, ours: Result | HostResult | None) -> str:
    """Another provider's time, and what multiple it is of ours; what kept it from being measured; "-"."""
    if result is None or result.status == "missing":
        return "-"
    if not result.measured:
        return result.status
    text = microseconds(result.seconds)
    text += f" ({result.seconds / ours.seconds:.2f}x)" if ours is not None else ""
    return f"{text} {INEXACT}" if result.status == INEXACT else text


def cases(results: Iterable[Result]) -> dict[tuple[str, str, str], dict[str, Result]]:
    """{(op, mode, shape): {provider: result}}, in the order of measurement."""
    grouped: dict[tuple[str, str, str], dict[str, Result]] = {}
    for row in results:
        grouped.setdefault((row.op, row.mode, row.shape), {})[row.provider] = row
    return grouped


def _line(key: tuple[str, str, str], row: dict[str, Result], op_width: int, shape_width: int) -> str:
    op, mode, shape = key
    head = f"{op:{op_width}} {mode:8} {shape:{shape_width}}"
    ours = row.get(OURS)
    if ours is None or not ours.measured:
        head += f"{ours.status if ours else '-':>9}{'':28}"
    else:
        figures = f"{microseconds(ours.seconds):>9} ±{spread(ours):>4} {rate(ours):>15} {ours.roofline_share:>5.0%}"
        head += figures + (f"  [{ours.note}]" if ours.note else "")
    others = []
    for name, other in row.items():
        if name == OURS or other.status == "missing":
            continue
        if not other.measured:
            others.append(f"{name} {other.status}")
            continue
        times = f" ({other.seconds / ours.seconds:.2f}x)" if ours is not None and ours.measured else ""
        mark = " inexact" if other.status == INEXACT else ""
        others.append(f"{name} {microseconds(other.seconds)}{times}{mark}")
    return f"{head}  | {', '.join(others)}"


def table(run: Run) -> str:
    """The run as compact lines: a heading, one line a case, one line an op for host time, and what went wrong."""
    lines = [f"{run.machine.get('device_name')}, {run.settings['dtype']}"]
    op_width = max((len(row.op) for row in (*run.results, *run.host)), default=0)
    if run.roofline:
        lines.append(
            f"roofline of this run: copy {run.roofline['bandwidth'] / 1e9:.0f} GB/s, "
            f"GEMM {run.roofline['rate'] / 1e12:.3g} TFLOP/s"
        )
    if run.results:
        shape_width = max(len(row.shape) for row in run.results)
        lines += [
            "",
            f"{'op':{op_width}} {'pass':8} {'shape':{shape_width}}{'us':>9}{'':7}{'rate':>15} {'roof':>6}  "
            "| others: us (their time as a multiple of ours)",
        ]
        lines += [_line(key, row, op_width, shape_width) for key, row in cases(run.results).items()]
    if run.host:
        lines += ["", "host time of one call, us"]
        by_op: dict[str, list[HostResult]] = {}
        for row in run.host:
            by_op.setdefault(row.op, []).append(row)
        for op, rows in by_op.items():
            figures = [
                f"{row.provider} {microseconds(row.seconds)}" if row.measured else f"{row.provider} {row.status}"
                for row in rows
                if row.status != "missing"
            ]
            lines.append(f"{op:{op_width}} {', '.join(figures)}")
    faults = dict.fromkeys(
        f"{row.op} {getattr(row, 'shape', 'host')}, {row.provider} {row.status}: {row.note}"
        for row in (*run.results, *run.host)
        if row.status in (INEXACT, "WRONG", "failed")
    )
    return "\n".join([*lines, *([""] if faults else []), *faults])

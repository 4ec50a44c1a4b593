"""Several runs as one: of every case the latest run that compared something; rows of two runs are never in one case.

Of host times it is the run in which the machine was least busy, by the other providers' times.
"""

from dataclasses import dataclass

from tilegym.bench.report import HostResult
from tilegym.bench.report import Result
from tilegym.bench.report import Run
from tilegym.bench.report import cases
from tilegym.bench.runner import COPY
from tilegym.bench.runner import OF_OURS
from tilegym.bench.schedule import by_importance
from tilegym.bench.spec import OURS
from tilegym.bench.spec import BenchmarkError

Case = tuple[str, str, str]  # op, mode, shape
OWN = (*OF_OURS, COPY)


@dataclass(frozen=True)
class Merged:
    """``runs``, the latest first; for each case, and for each op's host time, the number of its run and its rows.

    Cases are in the order of the ops' importance, and within an op as they were measured.
    """

    runs: list[Run]
    cases: dict[Case, tuple[int, dict[str, Result]]]
    host: dict[str, tuple[int, dict[str, HostResult]]]

    def run_of(self, number: int) -> str:
        """What the page calls a run: "A" for the latest, "AA" behind "Z"."""
        more, letter = divmod(number, 26)
        return (self.run_of(more - 1) if more else "") + chr(ord("A") + letter)


def _worth(row: dict) -> int:
    """2: ours and another provider were measured; 1: ours alone; 0: nothing of ours."""
    if OURS not in row or not row[OURS].measured:
        return 0
    return 2 if any(result.measured for name, result in row.items() if name not in OWN) else 1


def _calmer(row: dict[str, HostResult], other: dict[str, HostResult]) -> bool:
    """Whether the providers that are not ours took the host less time in ``row``, those that both measured."""
    both = [n for n in row if n in other and n not in OWN and row[n].measured and other[n].measured]
    return bool(both) and sum(row[n].seconds for n in both) < sum(other[n].seconds for n in both)


def merge(runs: list[Run]) -> Merged:
    """Merges ``runs`` of one GPU and dtype.

    Raises:
        BenchmarkError: they are of different GPUs or dtypes.
    """
    for what, values in (
        ("GPU", {run.machine.get("gpu") for run in runs}),
        ("dtype", {run.settings["dtype"] for run in runs}),
    ):
        if len(values) != 1:
            raise BenchmarkError(f"runs of one {what} can be merged, these are of {sorted(map(str, values))}")
    runs = sorted(runs, key=lambda run: run.machine["date"], reverse=True)
    found: dict[Case, tuple[int, dict[str, Result]]] = {}
    host: dict[str, tuple[int, dict[str, HostResult]]] = {}
    for number, run in enumerate(runs):
        timed: dict[str, dict[str, HostResult]] = {}
        for result in run.host:
            timed.setdefault(result.op, {})[result.provider] = result
        for known, rows in ((found, cases(run.results)), (host, timed)):
            for key, row in rows.items():
                worth = _worth(row) - (_worth(known[key][1]) if key in known else -1)
                if worth > 0 or (worth == 0 and known is host and _calmer(row, known[key][1])):
                    known[key] = number, row
    ranks = {op: rank for rank, op in enumerate(by_importance([*{op for op, _, _ in found} | set(host)]))}
    return Merged(
        runs,
        {key: found[key] for key in sorted(found, key=lambda key: ranks[key[0]])},
        {op: host[op] for op in sorted(host, key=ranks.__getitem__)},
    )

"""The ledger: what a run has decided and why. SQLite is the truth; JSON Traces and reports are made from it.

Every method is one transaction, on disk when it returns, so that a run can be killed between any two of them.
"""

import json
import sqlite3
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

from tilegym.autokernel.judge import Verdict
from tilegym.autokernel.protocol import Attempt
from tilegym.autokernel.protocol import Proposal

# How far an experiment has come, in order.
STATES = ("drawn", "committed", "judged", "measured", "decided", "finished")
KEEP = "keep"
STATUSES = (KEEP, "discard", "timeout", "crash", "incorrect", "suspect")

_SCHEMA = """
create table if not exists facts (name text primary key, value text not null);
create table if not exists regions (
    key text primary key, position integer not null, task text not null, seconds real not null, bound real not null,
    closed text not null default ''
);
create table if not exists rounds (number integer primary key, regions text not null, head text not null);
create table if not exists experiments (
    number integer primary key, round integer not null, region text not null, proposer text not null,
    proposal text not null, base text not null, state text not null default 'drawn', commit_id text not null default '',
    verdict text not null default '', model text not null default '', status text not null default '',
    gate text not null default '', description text not null default '', kept_commit text not null default '',
    coverage real, throughput real, seconds real not null default 0,
    unique (round, region)
);
"""


@dataclass(frozen=True)
class RegionRow:
    """A region and its task; ``seconds`` and ``bound`` of one run of the model; ``closed``: why it is out, if it is."""

    key: str
    task: str
    seconds: float
    bound: float
    closed: str


@dataclass(frozen=True)
class Round:
    """The regions that are tried next, together, from the same commit."""

    number: int
    regions: tuple[str, ...]
    head: str


@dataclass(frozen=True)
class Experiment:
    """One proposal and what became of it."""

    number: int
    round: int
    region: str
    proposer: str
    proposal: Proposal
    base: str
    state: str
    commit_id: str
    verdict: Verdict | None
    model: dict[str, Any]
    status: str
    gate: str
    description: str
    kept_commit: str
    coverage: float | None
    throughput: float | None
    seconds: float

    @property
    def name(self) -> str:
        """Of the Definition that it computes."""
        return self.proposal.definition.name

    def attempt(self) -> Attempt:
        """It as history for the next proposal."""
        solution = self.proposal.solution.to_json()
        return Attempt(self.proposer, self.gate, self.status, self.description, dict(self.proposal.files), solution)


@dataclass(frozen=True)
class Decision:
    """What becomes of an experiment."""

    status: str
    gate: str
    description: str
    coverage: float
    throughput: float | None
    notes: dict[str, Any] = field(default_factory=dict)


class Ledger:
    """The ledger of one run.

    Args:
        path: of the SQLite file; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("pragma synchronous=full")
        self._connection.executescript(_SCHEMA)

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    def fact(self, name: str) -> Any:
        """What was noted under ``name``; None if nothing was."""
        row = self._connection.execute("select value from facts where name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row["value"])

    def note(self, name: str, value: Any) -> None:
        """Notes a fact, in the place of an earlier one."""
        self._connection.execute("insert or replace into facts values (?, ?)", (name, json.dumps(value)))

    def begin(self, baseline: dict[str, Any], regions: list[RegionRow]) -> None:
        """Writes row one, the baseline, and the regions, all at once."""
        rows = [(r.key, i, r.task, r.seconds, r.bound, r.closed) for i, r in enumerate(regions)]
        self._connection.execute("begin immediate")
        self._connection.executemany("insert into regions values (?, ?, ?, ?, ?, ?)", rows)
        self._connection.execute("insert into facts values ('baseline', ?)", (json.dumps(baseline),))
        self._connection.execute("commit")

    def regions(self) -> list[RegionRow]:
        """All regions, in the order of the model."""
        rows = self._connection.execute("select * from regions order by position")
        return [RegionRow(r["key"], r["task"], r["seconds"], r["bound"], r["closed"]) for r in rows]

    def close_region(self, key: str, why: str) -> None:
        """Says that a region is tried no more."""
        self._connection.execute("update regions set closed = ? where key = ?", (why, key))

    def open_round(self, regions: tuple[str, ...], head: str) -> Round:
        """Notes what the next round tries."""
        number = self._connection.execute("select coalesce(max(number), 0) + 1 from rounds").fetchone()[0]
        self._connection.execute("insert into rounds values (?, ?, ?)", (number, json.dumps(regions), head))
        return Round(number, regions, head)

    def last_round(self) -> Round | None:
        """The round that was opened last."""
        row = self._connection.execute("select * from rounds order by number desc limit 1").fetchone()
        return None if row is None else Round(row["number"], tuple(json.loads(row["regions"])), row["head"])

    def draw(self, round: Round, region: str, proposer: str, proposal: Proposal, seconds: float) -> int:
        """Adds an experiment; its number."""
        number = self._connection.execute("select coalesce(max(number), 0) + 1 from experiments").fetchone()[0]
        self._connection.execute(
            "insert into experiments (number, round, region, proposer, proposal, base, seconds) "
            "values (?, ?, ?, ?, ?, ?, ?)",
            (number, round.number, region, proposer, proposal.to_json(), round.head, seconds),
        )
        return number

    def advance(self, number: int, state: str, **values: Any) -> None:
        """Writes what a step found, and that it is done."""
        columns = ", ".join(f"{name} = ?" for name in (*values, "state"))
        self._connection.execute(
            f"update experiments set {columns} where number = ?", (*values.values(), state, number)
        )

    def decide(self, number: int, decision: Decision, model: dict[str, Any]) -> None:
        """Writes the decision on an experiment."""
        self.advance(
            number,
            "decided",
            status=decision.status,
            gate=decision.gate,
            description=decision.description,
            coverage=decision.coverage,
            throughput=decision.throughput,
            model=json.dumps(model | decision.notes),
        )

    def experiments(self) -> list[Experiment]:
        """All experiments, in order."""
        return [_experiment(row) for row in self._connection.execute("select * from experiments order by number")]

    def unfinished(self) -> list[Experiment]:
        """Those that still have steps to go."""
        return [e for e in self.experiments() if e.state != "finished"]

    def kept(self) -> list[Experiment]:
        """Those that were kept, in order."""
        return [e for e in self.experiments() if e.status == KEEP and e.kept_commit]


def _experiment(row: sqlite3.Row) -> Experiment:
    values = {name: row[name] for name in row.keys()}
    values["proposal"] = Proposal.from_json(values["proposal"])
    values["verdict"] = Verdict.from_json(values["verdict"]) if values["verdict"] else None
    values["model"] = json.loads(values["model"]) if values["model"] else {}
    return Experiment(**values)

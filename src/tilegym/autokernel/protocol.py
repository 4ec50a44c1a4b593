"""What the loop and its proposers say to each other: a Task goes in, a Proposal (or None) comes out.

Nothing here needs a GPU, and everything survives ``to_json`` and ``from_json``: an agent gets the same task as a file.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import Protocol

from tilegym.inventory import Definition
from tilegym.inventory import Solution
from tilegym.inventory import reference


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a captured call, without its contents. ``dtype`` as in a Definition: "bfloat16"."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Sample:
    """A call of the region while the model ran.

    Attributes:
        axes: the size of every axis of the Definition.
        inputs: by name, in the Definition's order: a :class:`TensorInfo`, or the number that was passed.
        calls: how often a run of the model makes this call.
    """

    axes: dict[str, int]
    inputs: dict[str, TensorInfo | bool | int | float]
    calls: int = 1


@dataclass(frozen=True)
class Attempt:
    """An earlier proposal for the same region that was not kept.

    Attributes:
        proposer: who made it.
        gate: where it failed: "G0" to "G8", or "keep" for the last decision.
        status: discard, timeout, crash, incorrect or suspect.
        log: what was wrong, in words.
        files: its files, by path.
        solution: its Solution's JSON.
    """

    proposer: str
    gate: str
    status: str
    log: str
    files: dict[str, str] = field(default_factory=dict)
    solution: str = ""


@dataclass(frozen=True)
class Task:
    """A region of a model that wants a kernel.

    Attributes:
        definition: what is to be computed. Its ``reference`` is the region itself: ``run`` takes the inputs, rounds
            where the model rounds, and has the model's source lines above it.
        region: the region's key, unique in the model: the class, the lines, the group of modules.
        modules: the paths of the modules that contain it.
        samples: the calls that were seen, those that take the most time first.
        architectures: what the kernel has to compile for: "sm_80", "sm_90", "sm_100", "sm_120".
        folder: where, in the repository, the proposal's files belong; they may lie nowhere else.
        trains: whether gradients flow through the region, so that it needs a backward.
        bound_seconds: what the region's bytes and operations allow at best, all calls together.
        seconds: what it takes now.
        history: what was tried and not kept, oldest first.
    """

    definition: Definition
    region: str
    modules: tuple[str, ...]
    samples: tuple[Sample, ...]
    architectures: tuple[str, ...]
    folder: str
    trains: bool = False
    bound_seconds: float = 0.0
    seconds: float = 0.0
    history: tuple[Attempt, ...] = ()

    def run(self) -> Callable:
        """The region as a function of PyTorch: the ``run`` of the Definition's reference."""
        return reference.load(self.definition.reference, self.definition.name)

    def to_json(self) -> str:
        """JSON text, from which :meth:`from_json` makes an equal object."""
        data = asdict(self) | {"definition": json.loads(self.definition.to_json())}
        return json.dumps(data, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Task":
        """Reads what :meth:`to_json` wrote."""
        data = json.loads(text)
        data["definition"] = Definition.from_json(json.dumps(data["definition"]))
        data["samples"] = tuple(_sample(item) for item in data["samples"])
        data["history"] = tuple(Attempt(**item) for item in data["history"])
        return cls(**{**data, **{name: tuple(data[name]) for name in ("modules", "architectures")}})


def _sample(item: dict[str, Any]) -> Sample:
    inputs = {
        name: TensorInfo(tuple(value["shape"]), tuple(value["strides"]), value["dtype"])
        if isinstance(value, dict)
        else value
        for name, value in item["inputs"].items()
    }
    return Sample(item["axes"], inputs, item["calls"])


@dataclass(frozen=True)
class Proposal:
    """A kernel for a Task. Nothing in it is believed: it is judged.

    Attributes:
        definition: the Task's, unchanged.
        solution: its entry point takes the Definition's inputs, in order, and returns the outputs
            (``destination_passing_style`` false); its sources name ``files`` and what the repository has.
        files: text by path in the repository, below the Task's ``folder``.
        rationale: why it should be right and fast, for the record.
    """

    definition: Definition
    solution: Solution
    files: dict[str, str]
    rationale: str = ""

    def to_json(self) -> str:
        """JSON text, from which :meth:`from_json` makes an equal object."""
        data = {"files": self.files, "rationale": self.rationale}
        models = {"definition": json.loads(self.definition.to_json()), "solution": json.loads(self.solution.to_json())}
        return json.dumps(models | data, indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Proposal":
        """Reads what :meth:`to_json` wrote.

        Raises:
            pydantic.ValidationError: the Definition or the Solution is none.
            KeyError, ValueError: the text is not JSON, or lacks something.
        """
        data = json.loads(text)
        definition = Definition.from_json(json.dumps(data["definition"]))
        solution = Solution.from_json(json.dumps(data["solution"]))
        return cls(definition, solution, dict(data["files"]), str(data.get("rationale", "")))


class Proposer(Protocol):
    """Who writes kernels. ``name`` goes into the ledger."""

    name: str

    def propose(self, task: Task) -> Proposal | None:
        """A proposal that ``task.history`` does not hold yet, or None if this proposer has no (more) idea."""
        ...

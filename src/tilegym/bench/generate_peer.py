"""What transformers itself offers for faster decoding, measured beside TileGym's kernels: ``tilegym infer --peer``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilegym.bench import generate
from tilegym.bench import models
from tilegym.errors import ModelError

# Arguments of ``generate``. With a static cache transformers compiles a step by itself, on a GPU.
PEERS = {"compile": {"cache_implementation": "static"}}


@dataclass(frozen=True)
class Peer:
    """The unpatched model with one of PEERS; ``error`` says why there is no ``measurement``. ``compiled``: whether
    transformers did compile it, as it does not on a CPU."""

    name: str
    compiled: bool
    measurement: generate.Measurement | None
    error: str | None = None

    def summary(self) -> dict[str, Any]:
        measured = self.measurement.summary() if self.measurement else None
        return {"name": self.name, "compiled": self.compiled, "error": self.error, "measurement": measured}

    @property
    def label(self) -> str:
        return "compiled" if self.compiled else "static cache"


def check(name: str | None) -> None:
    """Raises ModelError if there is no such peer; None is none."""
    if name is not None and name not in PEERS:
        raise ModelError(f"--peer {name!r} is none of {', '.join(PEERS)}")


def run(model: Any, name: str, measure: Callable[..., generate.Measurement]) -> Peer:
    """Measures the unpatched ``model`` with the peer's arguments: the last use of it, which leaves a cache and compiled
    code in it. What fails is told in the result."""
    try:
        measurement = measure(f"transformers, {name}", **PEERS[name])
    except Exception as error:  # of any kind: it is not ours
        return Peer(name, False, None, models.first_sentence(error))
    return Peer(name, hasattr(model, "_compiled_call"), measurement)

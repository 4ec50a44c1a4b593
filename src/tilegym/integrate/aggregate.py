"""All accepted kernels together: does the whole model still give the same, and if not, whose fault is it?"""

import contextlib
import itertools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from torch import nn

from tilegym.backend import use_backend
from tilegym.bench import generate
from tilegym.bench.compare import Comparison
from tilegym.bench.compare import collect_logits
from tilegym.bench.compare import compare
from tilegym.bench.prompts import Batch
from tilegym.integrate.verify import untuned
from tilegym.transformers.decode_graph import eager_steps
from tilegym.transformers.general import Place
from tilegym.transformers.general import put
from tilegym.transformers.general_graph import put_graph
from tilegym.transformers.patching import PatchSet

GRAPH = "graph"  # the compute that is the model's generate, and has no places


@contextlib.contextmanager
def patched(model: nn.Module, computes: dict[str, tuple[Place, ...]], backend: str) -> Iterator[PatchSet]:
    """``model`` with the kernels of ``computes`` on ``backend`` within the block."""
    with use_backend(backend), PatchSet(model, maker=__name__) as patches:
        for compute, places in computes.items():
            if compute == GRAPH:
                put_graph(model, backend == "cutile", patches)
            else:
                put(model, compute, places, backend == "cutile", patches)
        # Without a GPU the loop over the graph's cache runs all the same, step by step.
        with eager_steps("cpu"):
            yield patches


def without_effect(model: nn.Module, computes: dict[str, tuple[Place, ...]], backend: str) -> dict[str, str]:
    """The computes that patch nothing in ``model`` once all are put there, and why."""
    with patched(model, computes, backend) as patches:
        done = {entry.compute for entry in patches.patched}
        why = {entry.compute: entry.why for entry in patches.skipped}
    return {name: why.get(name, "there is nothing to patch") for name in computes if name not in done}


def judge(model: nn.Module, batches: list[Batch], length: int, context: Callable[[], Any]) -> Comparison:
    """Compares greedy generation and logits of the model as it is with those inside of ``context()``."""
    plain = generate.run_once(model, batches, length).tokens
    with untuned(), context():
        chosen = generate.run_once(model, batches, length).tokens
        logits = collect_logits(model, batches, plain, length)
    return compare(model, batches, plain, chosen, logits)


def drop_culprits(names: list[str], why_not: Callable[[tuple[str, ...]], str]) -> tuple[list[str], dict[str, str]]:
    """The largest set of names that passes, and why each other was dropped.

    First the whole set is tried, then each name by itself, then the set without as few names as possible.

    Args:
        why_not: what is wrong with a set, "" if nothing is.
    """
    dropped: dict[str, str] = {}
    kept = list(names)
    why = why_not(tuple(kept))
    if not why:
        return kept, dropped
    for name in names:
        alone = why_not((name,))
        if alone:
            dropped[name] = f"by itself: {alone}"
            kept.remove(name)
    if dropped and kept:
        why = why_not(tuple(kept))
    if not why or not kept:
        return kept, dropped
    for size in range(1, len(kept)):
        for culprits in itertools.combinations(kept, size):
            rest = tuple(name for name in kept if name not in culprits)
            if not why_not(rest):
                return list(rest), dropped | {name: f"together with the others: {why}" for name in culprits}
    return [], dropped | {name: f"together with the others: {why}" for name in kept}


def drop_culprits_or_graph(
    names: list[str], why_not: Callable[[tuple[str, ...]], str]
) -> tuple[list[str], dict[str, str]]:
    """As :func:`drop_culprits` where ``graph`` is among the names: it is suspected first, since it needs the others."""
    why = why_not(tuple(names))
    if not why:
        return list(names), {}
    kept, dropped = drop_culprits([name for name in names if name != GRAPH], why_not)
    if dropped and kept and not why_not((*kept, GRAPH)):
        return [*kept, GRAPH], dropped
    return kept, dropped | {GRAPH: f"together with the others: {why}"}

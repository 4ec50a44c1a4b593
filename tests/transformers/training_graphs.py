"""Counts replayed training steps; without a GPU a graph is stood in for by running the same over its buffers."""

import torch
from common import HAS_GPU

from tilegym.transformers import graph_calls
from tilegym.transformers import training_graph


class Again:
    """A graph without a GPU: does what was captured once more, and writes where it wrote."""

    def __init__(self, run, former):
        self.run, self.former = run, former
        self.latest = self._do()
        self.buffers = [t.detach().clone() for t in _tensors(self.latest)]

    def _do(self):
        with torch.enable_grad():
            return self.run(self.former and self.former.latest)

    def replay(self):
        self.latest = self._do()
        with torch.no_grad():
            for buffer, new in zip(self.buffers, _tensors(self.latest), strict=True):
                buffer.copy_(new)

    @property
    def result(self):
        """What was captured returned: the buffers, which require gradients where that did."""
        buffers = iter(self.buffers)
        if isinstance(self.latest, tuple):  # gradients
            return tuple(t if t is None else next(buffers) for t in self.latest)
        return graph_calls.mapped(self.latest, lambda t: next(buffers).requires_grad_(t.requires_grad))


def _tensors(result):
    return [t for t in result if t is not None] if isinstance(result, tuple) else graph_calls.leaves_of(result)


def count_replays(monkeypatch):
    """The captures from now on, each as the number of training steps that were replays since."""
    counts, real, apply = [], training_graph.capture_in_turn, training_graph._replay

    def capture(runs, at, pool):
        counts.append(0)
        if at.type == "cuda":
            return real(runs, at, pool)
        made = []
        for run in runs:
            made.append(Again(run, made[-1] if made else None))
        return [(graph, graph.result) for graph in made]

    def replay(*args):
        counts[-1] += 1
        return apply(*args)

    monkeypatch.setattr(training_graph, "capture_in_turn", capture)
    monkeypatch.setattr(training_graph, "_replay", replay)
    if not HAS_GPU:
        monkeypatch.setattr(graph_calls, "DEVICES", ("cpu",))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    return counts

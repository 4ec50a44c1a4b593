"""Small models that are trained by graphs, and what counts the replays; without a GPU a graph is stood in for by
running the same over its buffers."""

import copy

import torch
import transformers
from common import HAS_GPU
from common import device

import tilegym
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


CONFIG = dict(
    vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
)  # fmt: skip


def make(name="Qwen3ForCausalLM", **changes):
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**CONFIG | changes)).to(device()).train()
    model.config.use_cache = False
    return model


def ids(batch=2, length=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (batch, length), generator=generator).to(device())


def gradients_of(model, inputs, **options):
    model.zero_grad()
    loss = model(input_ids=inputs, labels=inputs, **options).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def as_it_is(model, inputs, **options):
    plain = copy.deepcopy(model)
    tilegym.revert(plain)
    return gradients_of(plain, inputs, **options)

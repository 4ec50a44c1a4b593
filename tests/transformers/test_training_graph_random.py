"""Random numbers in training steps that are replayed: those of the device, and those that the host draws."""

import copy
import random

import numpy
import pytest
import torch
from common import HAS_GPU
from common import device
from training_graphs import count_replays
from training_graphs import gradients_of
from training_graphs import ids
from training_graphs import make

import tilegym
from tilegym.errors import FallbackWarning
from tilegym.transformers import training_graph
from tilegym.transformers.training_graph import graph_training


@pytest.fixture(autouse=True)
def replays(monkeypatch):
    return count_replays(monkeypatch)


class Shaken(torch.nn.Module):
    """An activation with a number in it that the host draws."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return torch.nn.functional.silu(x) * (0.9 + 0.1 * self.draw())


DRAWS = {"Python": random.random, "numpy": numpy.random.random}
if HAS_GPU:
    DRAWS["torch"] = lambda: torch.rand(()).item()


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_random_numbers_of_the_host(draw, replays):
    model = make()
    model.model.layers[0].mlp.act_fn = Shaken(draw)
    with tilegym.apply(model, use_cutile=False), graph_training(model):
        gradients_of(model, ids())
        with pytest.warns(FallbackWarning, match="on the host"):
            gradients_of(model, ids())
        gradients_of(model, ids())
    assert replays == []


def test_dropout(replays):
    """Other numbers are dropped in each step, the same ones as without a graph."""
    model = make(attention_dropout=0.3)
    with tilegym.apply(model, use_cutile=False), graph_training(model):
        plain, losses = copy.deepcopy(model), []
        tilegym.revert(plain)
        for seed in (5, 6, 7, 7):
            found = []
            for one in (model, plain):
                torch.manual_seed(seed)
                found.append(gradients_of(one, ids()))
                drawn = torch.rand(2, device=device())
            torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-5)
            losses.append((found[0][0].item(), drawn.tolist()))
    assert len({loss for loss, _ in losses}) == 3 and losses[-1] == losses[-2]
    assert HAS_GPU or replays == [3]


def test_numbers_that_a_graph_holds_fast_are_found(replays, monkeypatch):
    real = training_graph.capture_in_turn

    def capture(runs, at, pool):
        (graph, results), backward = real(runs, at, pool)
        replay = graph.replay
        graph = type("Graph", (), {"replay": lambda self: (torch.manual_seed(0), replay())})()
        return (graph, results), backward

    monkeypatch.setattr(training_graph, "capture_in_turn", capture)
    model = make(attention_dropout=0.3)
    with tilegym.apply(model, use_cutile=False), graph_training(model):
        gradients_of(model, ids())
        with pytest.warns(FallbackWarning, match="differ by"):
            gradients_of(model, ids())
    assert replays == [0]


def test_a_capture_takes_no_random_numbers(replays):
    model = make()
    with tilegym.apply(model, use_cutile=False), graph_training(model):
        gradients_of(model, ids())
        torch.manual_seed(3)
        expected = torch.rand(3, device=device())
        torch.manual_seed(3)
        gradients_of(model, ids())
    assert torch.equal(torch.rand(3, device=device()), expected) and replays == [1]

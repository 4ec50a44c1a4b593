"""Finding the culprit among kernels that do not do together."""

import pytest
import torch
from integration import small

from tilegym.bench.prompts import Batch
from tilegym.integrate.aggregate import drop_culprits
from tilegym.integrate.aggregate import drop_culprits_or_graph
from tilegym.integrate.aggregate import judge
from tilegym.integrate.aggregate import patched
from tilegym.integrate.aggregate import without_effect
from tilegym.integrate.plan import make_plan
from tilegym.transformers.general import Place

NAMES = ["a", "b", "c", "d"]


def test_a_set_that_passes_is_kept_and_tried_once():
    tried = []
    kept, dropped = drop_culprits(NAMES, lambda names: tried.append(names) or "")
    assert (kept, dropped, len(tried)) == (NAMES, {}, 1)


def test_one_that_fails_alone_is_dropped():
    kept, dropped = drop_culprits(NAMES, lambda names: "it is wrong" if "c" in names else "")
    assert kept == ["a", "b", "d"] and dropped == {"c": "by itself: it is wrong"}


def test_two_that_only_fail_together_cost_one():
    kept, dropped = drop_culprits(NAMES, lambda names: "clash" if {"b", "d"} <= set(names) else "")
    assert kept == ["a", "c", "d"] and dropped == {"b": "together with the others: clash"}


def test_the_smallest_set_is_dropped():
    kept, dropped = drop_culprits(NAMES, lambda names: "too many" if len(names) > 2 else "")
    assert kept == ["c", "d"] and set(dropped) == {"a", "b"}


def test_nothing_may_be_left():
    assert drop_culprits(NAMES, lambda names: "no")[0] == []


def test_the_graph_is_suspected_first():
    tried = []

    def why_not(names):
        tried.append(names)
        return "graph is wrong" if "graph" in names else ""

    kept, dropped = drop_culprits_or_graph([*NAMES, "graph"], why_not)
    assert kept == NAMES and dropped == {"graph": "together with the others: graph is wrong"} and len(tried) == 2


def test_the_graph_is_kept_where_another_is_the_culprit():
    kept, dropped = drop_culprits_or_graph([*NAMES, "graph"], lambda names: "wrong" if "b" in names else "")
    assert kept == ["a", "c", "d", "graph"] and dropped == {"b": "by itself: wrong"}


def test_what_patches_nothing_is_said():
    model = small("mpt")
    computes = {"loss": (), "norm": (Place("torch.nn.modules.linear.Bilinear", "linear"),)}
    found = without_effect(model, computes, "pytorch")
    assert found == {"loss": "there is nothing to patch", "norm": "there is no Bilinear in it"}


@pytest.mark.parametrize("wrong", [False, True])
def test_the_whole_model_is_judged(wrong):
    model = small("olmo2", torch.bfloat16)
    plan = make_plan(model, look_up=False)
    computes = {name: tuple(i.candidates[0].place for i in items) for name, items in plan.computes.items()}
    if wrong:
        # Passes the check before it is put in, since nothing is tried for this one.
        computes["attn"] = (Place("torch.nn.modules.sparse.Embedding", "linear"),)
    batch = Batch(torch.tensor([[5, 6, 7, 8], [0, 0, 9, 4]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]))
    if wrong:
        with pytest.raises((RuntimeError, AttributeError)):
            judge(model, [batch], 4, lambda: patched(model, computes, "pytorch"))
    else:
        assert judge(model, [batch], 4, lambda: patched(model, computes, "pytorch")).passed
    assert not any("forward" in vars(module) for module in model.modules())

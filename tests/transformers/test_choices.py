"""Class patches: of several families, whose models keep theirs when one is reverted; what of one needs a model."""

import contextlib

import pytest
from tiny_models import make_model
from tiny_models import observed
from tiny_models import ops_of
from tiny_models import tokens

from tilegym.errors import PatchError
from tilegym.transformers import monkey_patch

PATCHES = {
    "llama": monkey_patch.apply_tilegym_kernel_to_llama,
    "mixtral": monkey_patch.apply_tilegym_kernel_to_mixtral,
    "qwen3_moe": monkey_patch.apply_tilegym_kernel_to_qwen3_moe,
}


def ops_called(model):
    with observed() as calls:
        model(tokens(2, 11))
    return {op for op, _ in calls}


@pytest.mark.parametrize("reverted", PATCHES)
def test_reverting_one_family_leaves_the_models_of_others(reverted):
    with contextlib.ExitStack() as stack:
        patches = {family: stack.enter_context(patch()) for family, patch in PATCHES.items()}
        models = {family: make_model(family) for family in PATCHES}
        patches[reverted].revert()
        for family, model in models.items():
            assert not ops_called(model) if family == reverted else ops_called(model) >= ops_of(family), family
    assert not any(ops_called(model) for model in models.values())


def test_reverting_what_is_no_model():
    with pytest.raises(PatchError, match="patched into a torch.nn.Module, this is str"):
        monkey_patch.revert("llama")


def test_what_needs_a_model_is_skipped_without_one_if_it_was_asked_for():
    for asked in ({}, {"graph": False}, {"graph": True, "linear": True}):
        with monkey_patch.apply_tilegym_kernel_to_llama(**asked) as report:
            skipped = {entry.compute: entry.why for entry in report.skipped}
        assert skipped == {name: "it needs a model: pass model=" for name, wanted in asked.items() if wanted}

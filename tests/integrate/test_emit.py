"""The text of what integration writes: formatted, and Python that says what was found."""

import ast

import pytest

from tilegym.integrate import emit
from tilegym.transformers.general import Place

NORM = Place("transformers.models.llama.modeling_llama.LlamaRMSNorm", "rms_norm", {"weight": "weight", "eps": 1e-6})
LONG = Place(
    "transformers.models.some_family.modeling_some_family.SomeFamilyFeedForward",
    "swiglu",
    {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "activation": 'of "silu"', "bias": None},
    put="function",
)


@pytest.mark.parametrize("compute", ["rope", "fused_linear_cross_entropy"])
@pytest.mark.parametrize("places", [(NORM,), (NORM, LONG), (LONG,), (Place("a.B", "c"),)], ids=len)
def test_patch(compute, places):
    text = emit.patch_text(compute, "SomeFamilyForConditionalGeneration", places)
    assert max(map(len, text.splitlines())) <= 120 and "'" not in text
    tree = ast.parse(text)
    assigned = next(node for node in tree.body if isinstance(node, ast.Assign))
    assert eval(ast.unparse(assigned.value), {"Place": Place}) == places
    assert tree.body[-1].name == f"monkey_patch_{compute}"


def test_all_computes_in_one_function():
    computes = ["attn", "rms_norm", "rope", "swiglu", "linear", "moe", "gated_delta_rule", "causal_conv1d", "graph"]
    text = emit.aggregate_text("some", "some", "SomeFamilyForCausalLM", computes)
    ast.parse(text)
    assert max(map(len, text.splitlines())) <= 120


def test_a_model_that_brings_code_is_named_as_it_is():
    assert 'check_patch(PLACES, "owner/the \\"one\\"")' in emit.test_text("rope", 'owner/the "one"')

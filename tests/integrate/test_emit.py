"""The text of what integration writes: formatted, and Python that says what was found."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tilegym.integrate import emit
from tilegym.integrate.research import research
from tilegym.transformers.general import Place

NORM = Place("transformers.models.llama.modeling_llama.LlamaRMSNorm", "rms_norm", {"weight": "weight", "eps": 1e-6})
LONG = Place(
    "transformers.models.some_family.modeling_some_family.SomeFamilyFeedForward",
    "swiglu",
    {"gate": "gate_proj", "up": "up_proj", "down": "down_proj", "activation": 'of "silu"', "bias": None},
    put="function",
)
PAIRS = Place(
    "transformers.models.llama.modeling_llama.apply_rotary_pos_emb",
    "rope",
    {"parameters": ("q", "k", "cos", "sin"), "roles": (("q", "q"), ("k", "it's")), "one": ("q",), "none": ()},
    put="function",
)
WIDE = Place("a.B", "c", {"parameters": tuple(f"a_parameter_with_a_long_name_{index}" for index in range(9))})
PLACES = {"norm": NORM, "long": LONG, "pairs": PAIRS, "wide": WIDE}


@pytest.mark.parametrize("compute", ["rope", "fused_linear_cross_entropy"])
@pytest.mark.parametrize("places", [(NORM,), (NORM, LONG), (LONG,), (WIDE,), (Place("a.B", "c"),)], ids=len)
def test_patch(compute, places):
    text = emit.patch_text(compute, "SomeFamilyForConditionalGeneration", places)
    assert max(map(len, text.splitlines())) <= 120
    tree = ast.parse(text)
    assigned = next(node for node in tree.body if isinstance(node, ast.Assign))
    assert eval(ast.unparse(assigned.value), {"Place": Place}) == places
    assert tree.body[-1].name == f"monkey_patch_{compute}"


def test_all_computes_in_one_function():
    computes = ["attn", "rms_norm", "rope", "swiglu", "linear", "moe", "gated_delta_rule", "causal_conv1d", "graph"]
    text = emit.aggregate_text("some", "some", "SomeFamilyForCausalLM", computes)
    ast.parse(text)
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.skipif(importlib.util.find_spec("ruff") is None, reason="ruff is not installed")
def test_all_that_is_written_is_formatted(tmp_path):
    settings = Path(__file__).parents[2] / "pyproject.toml"
    computes = ["attn", "rms_norm", "rope", "swiglu", "linear", "moe", "gated_delta_rule", "causal_conv1d", "graph"]
    files = {
        f"monkey_patch_{n}.py": emit.patch_text("rope", "SomeForCausalLM", (place,)) for n, place in PLACES.items()
    }
    files["test_monkey_patch_rope.py"] = emit.test_text("rope")
    files["test_monkey_patch_graph.py"] = emit.test_text("graph", "owner/model")
    files["monkey_patch_graph.py"] = emit.graph_text("SomeForCausalLM")
    files["__init__.py"] = emit.aggregate_text("some", "some", "SomeForCausalLM", computes)
    emit.write(tmp_path, files)
    for command in (["format", "--diff"], ["check"]):
        ran = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", settings, tmp_path], capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_definitions_of_others_stay(tmp_path):
    drafts = [requirement.definition for requirement in research("stablelm").requirements]
    emit.write_drafts(tmp_path, drafts)
    other = tmp_path / "definitions" / "other.json"
    other.write_text('{"tags": ["op:linear"]}')
    emit.write_drafts(tmp_path, drafts[:1])
    assert {p.name for p in other.parent.iterdir()} == {"other.json", f"{drafts[0]['name']}.json"}


def test_a_model_that_brings_code_is_named_as_it_is():
    assert 'check_patch(PLACES, "owner/it\'s")' in emit.test_text("rope", "owner/it's")

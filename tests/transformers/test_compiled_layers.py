"""Layers of a patched model under torch.compile: one compilation for all of a kind, for batches of any length."""

import copy

import pytest
import torch
import transformers
from common import device
from tiny_models import make_model
from tiny_models import tokens

import tilegym
from tilegym.transformers import monkey_patch

TWO_KINDS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.parametrize(
    ("family", "options", "kinds"),
    [
        ("llama", {}, 1),
        pytest.param("gemma3", TWO_KINDS, 2, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"mlp_only_layers": []}, 1, marks=pytest.mark.slow),
    ],
)
def test_they_share_what_is_compiled_for_any_length(family, options, kinds):
    model, graphs = make_model(family, **options).train(), []
    tilegym.apply(model)
    eager = copy.deepcopy(model)

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(backend=backend)
    for length in (8, 11, 20):
        ids = tokens(2, length)
        losses = [m(input_ids=ids, labels=ids, use_cache=False).loss for m in (model, eager)]
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
    assert len(model.model.layers) > kinds
    assert len(graphs) == 2 * kinds, "of the first length, and of any"
    for got, expected in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad)


def test_a_family_without_a_patch_of_its_own_is_one_graph():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.AutoConfig.for_model("stablelm", vocab_size=61, num_hidden_layers=2, pad_token_id=0, **sizes)
    model, ids = transformers.AutoModelForCausalLM.from_config(config).to(device()).train(), tokens(2, 8)
    assert {"swiglu", "attn"} <= {entry.compute for entry in tilegym.apply(model, graph=False).patched}
    expected = model(input_ids=ids, labels=ids, use_cache=False).loss
    torch.compiler.reset()
    model.compile(backend="eager", fullgraph=True)
    torch.testing.assert_close(model(input_ids=ids, labels=ids, use_cache=False).loss, expected)


def test_experts_under_a_patch_of_the_process_want_one_call_before():
    ids = tokens(2, 8)
    torch.compiler.reset()
    with monkey_patch.apply_tilegym_kernel_to_qwen3_moe(), torch.no_grad():
        model = make_model("qwen3_moe")
        model.compile(backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="call the model once before it is compiled"):
            model(input_ids=ids, use_cache=False)
        with torch.compiler.set_stance("force_eager"):
            expected = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("activation", ["relu", "gelu", torch.nn.GELU(approximate="tanh")])
def test_an_activation_under_a_patch_of_the_process_is_a_constant(activation):
    name = activation if isinstance(activation, str) else "silu"
    mlp = make_model("gemma3", hidden_activation=name).model.layers[0].mlp
    if name != activation:
        mlp.act_fn = activation
    x = torch.randn(2, 3, mlp.gate_proj.in_features, device=device())
    expected = mlp(x)
    torch.compiler.reset()
    with monkey_patch.apply_tilegym_kernel_to_gemma3():
        torch.testing.assert_close(mlp(x), expected)
        torch.testing.assert_close(torch.compile(mlp, backend="eager", fullgraph=True)(x), expected)

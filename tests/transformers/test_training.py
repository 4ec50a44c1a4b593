"""Training a patched model: the same gradients for every parameter."""

import pytest
import torch
from common import TORCH
from tiny_models import FAMILIES
from tiny_models import assert_close
from tiny_models import backends
from tiny_models import computes
from tiny_models import default_attention
from tiny_models import families
from tiny_models import few_families
from tiny_models import make_model
from tiny_models import observed
from tiny_models import padded
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tilegym.backend import dispatcher
from tilegym.errors import FallbackWarning
from tilegym.transformers import attention
from tilegym.transformers import decode_layer
from tilegym.transformers import monkey_patch


@pytest.fixture
def warned_anew(monkeypatch):
    monkeypatch.setattr(dispatcher, "_warned", set())


def loss_and_gradients(model, **options):
    torch.manual_seed(0)
    ids, mask = padded([14, 9], "right")
    model.zero_grad()
    loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), **options).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same_step(got, expected, backend="pytorch"):
    assert_close(got[0], expected[0], backend)
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.abs().max() > 0, name
        assert_close(got[1][name], gradient, backend)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@backends
@pytest.mark.parametrize(
    ("family", "checkpointing"), [(family, False) for family in FAMILIES] + [("llama", True), ("gpt_oss", True)]
)
def test_gradients_of_all_parameters(family, backend, checkpointing):
    model = make_model(family).train()
    expected = loss_and_gradients(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with monkey_patch.apply(model, use_cutile=backend == "cutile"), observed() as calls:
        assert_same_step(loss_and_gradients(model, use_cache=False), expected, backend)
    assert {served for op, served in calls if op == "fmha"} == {backend}
    assert_same_step(loss_and_gradients(model, use_cache=False), expected)


@backends
@pytest.mark.parametrize(
    ("family", "compute"), [(family, "all") for family in FAMILIES] + [("llama", "attn"), ("gpt_oss", "attn")]
)
def test_mixed_precision(family, backend, compute):
    """fp32 weights under autocast: the linears give bf16, while norms and the rotation may give fp32."""
    # With the weights of seed 0 a token of gpt_oss is so near between two experts that any rounding decides.
    model = make_model(family, seed=4 if family == "gpt_oss" else 0).train()

    def step():
        with torch.autocast(model.device.type, torch.bfloat16):
            return loss_and_gradients(model, use_cache=False)

    def errors(got, expected):
        return [
            ((got[name] - gradient).abs().max() / gradient.abs().max()).item() for name, gradient in expected.items()
        ]

    others = dict.fromkeys(computes(family) - {"attn"}, compute == "all")
    exact, expected = loss_and_gradients(model, use_cache=False), step()
    with monkey_patch.apply(model, use_cutile=backend == "cutile", **others), observed() as calls:
        loss, gradients = step()
    assert {served for op, served in calls if op == "fmha"} == {backend}
    if "moe" not in computes(family):
        torch.testing.assert_close(loss, expected[0], rtol=1e-2, atol=1e-2)
        assert max(errors(gradients, expected[1])) < 0.05
    # Rounding decides between experts that are nearly equal: then only the distance from fp32 can be compared.
    assert sum(errors(gradients, exact[1])) <= 1.3 * sum(errors(expected[1], exact[1]))


def test_routers_under_autocast_take_what_norms_in_fp32_give():
    """As in a quantised model whose norms are kept in fp32 (peft's ``prepare_model_for_kbit_training``)."""
    model = make_model("mixtral", torch.bfloat16).train()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    ids = padded([5], "right")[0]
    with torch.autocast(model.device.type, torch.bfloat16):
        expected = model(ids, labels=ids).loss
        with monkey_patch.apply(model, use_cutile=False), observed() as calls:
            torch.testing.assert_close(model(ids, labels=ids).loss, expected, rtol=1e-2, atol=1e-2)
    assert "moe_topk_routing" in {op for op, _ in calls}


@pytest.mark.parametrize("autocast", [False, True])
def test_a_class_of_routers_is_tried_without_hooks_and_autocast(autocast):
    """What is tried in the first step is none of its router logits, and is tried in fp32."""
    ids = padded([5, 5], "right")[0]
    options = dict(labels=ids, output_router_logits=True)

    def step():
        model = make_model("qwen3_moe").train()
        with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
            out = model(ids, **options)
        return out.aux_loss, out.loss, out.router_logits

    expected = step()
    with monkey_patch.apply_tilegym_kernel_to_qwen3_moe(), observed() as calls:
        got = step()
    assert [t.shape for t in got[2]] == [t.shape for t in expected[2]]
    assert "moe_topk_routing" in {op for op, _ in calls}
    torch.testing.assert_close(got[:2], expected[:2], rtol=1e-2 if autocast else 1e-5, atol=0)


@families
def test_a_single_token_step_has_gradients(family):
    model = make_model(family).train()
    ids = padded([1, 1], "right")[0]

    def gradients():
        model.zero_grad()
        model(ids).logits.square().mean().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if "v_proj" in name or "embed" in name}

    expected = gradients()
    with monkey_patch.apply(model, use_cutile=False), observed() as calls:
        for name, gradient in gradients().items():
            assert_close(gradient, expected[name])
    assert "fmha" in {op for op, _ in calls}  # fmha_decode has no gradients


@few_families
def test_dropout_is_left_to_pytorch(family, monkeypatch, no_run_ahead):
    """With the same seed SDPA draws the same numbers, if it is given masks of the same shape."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs["dropout"])
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setattr(attention, "sdpa_attention_forward", counted)
    model = make_model(family, attention_dropout=0.3).train()
    expected = loss_and_gradients(model)
    with monkey_patch.apply(model, use_cutile=False):
        assert_same_step(loss_and_gradients(model, use_cache=False), expected)
        # With sinks it is PyTorch that TileGym calls itself.
        assert calls == ([] if default_attention(family) == "eager" else [0.3, 0.3])
        model.eval()
        with observed() as served:
            loss_and_gradients(model)
        assert len(calls) in (0, 2) and "fmha" in {op for op, _ in served}


def test_a_patch_that_fails_half_way_leaves_the_model_in_training_mode(monkeypatch):
    model = make_model("llama", mlp_bias=False).train()

    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(decode_layer, "rope_fmha_decode", fails)
    with pytest.raises(torch.OutOfMemoryError):
        monkey_patch.apply(model)
    assert all(module.training for module in model.modules())


@few_families
@pytest.mark.usefixtures("warned_anew")
def test_functional_gradients(family):
    """By torch.func, whose tensors no kernel can read: PyTorch serves all ops."""
    model = make_model(family)
    ids, mask = padded([14, 9], "right")
    labels = ids.masked_fill(mask == 0, -100)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights):
        inputs = dict(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
        return torch.func.functional_call(model, weights, (), inputs).loss

    def step():
        gradients, value = torch.func.grad_and_value(loss)(weights)
        return value, gradients

    try:
        expected = step()
    except RuntimeError as error:
        if TORCH >= (2, 11):
            raise
        pytest.skip(f"transformers' experts cannot do it here: {error}")
    with monkey_patch.apply(model, use_cutile=True), pytest.warns(FallbackWarning, match="transforms"):
        assert_same_step(step(), expected)


@pytest.mark.usefixtures("warned_anew")
def test_gradients_of_each_sample():
    model = make_model("llama")
    ids, _ = padded([14, 14, 14], "right")
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights, ids):
        inputs = dict(input_ids=ids[None], labels=ids[None], use_cache=False)
        return torch.func.functional_call(model, weights, (), inputs).loss

    def step():
        gradients, values = torch.func.vmap(torch.func.grad_and_value(loss), (None, 0))(weights, ids)
        return values, gradients

    expected = step()
    assert all(len(gradient) == len(ids) for gradient in expected[1].values())
    with monkey_patch.apply(model, use_cutile=True), pytest.warns(FallbackWarning, match="transforms"):
        assert_same_step(step(), expected)

"""Models of peft's: those that it wraps, adapters that are switched, virtual tokens. peft itself runs where it is."""

import copy

import pytest
import torch
from late_loss import FUSED
from late_loss import WHOLE
from late_loss import losses_of
from test_training import assert_same_step
from tiny_models import assert_close
from tiny_models import make_model
from tiny_models import observed
from tiny_models import padded
from tiny_models import tokens
from torch import nn
from training_graphs import count_replays

import tilegym
from tilegym.integrate.small_model import small_model
from tilegym.transformers import decode_graph
from tilegym.transformers import monkey_patch
from tilegym.transformers.cache_name import CACHE
from tilegym.transformers.decode_graph import eager_steps
from tilegym.transformers.patching import PatchSet


class Wrapper(nn.Module):
    """As ``PeftModel`` with virtual tokens: it has the model's config, attributes and ``generate``."""

    def __init__(self, model):
        super().__init__()
        self.base_model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def get_base_model(self):
        return self.base_model

    def generate(self, *args, **kwargs):
        return self.base_model.generate(*args, **kwargs)

    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)


class Adapted(nn.Module):
    """As a linear layer of peft's, in what it keeps besides the adapters."""

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.merged_adapters, self.scaling = base, [], {"default": 2.0}
        self._active_adapter, self._disable_adapters = ["default"], False

    def forward(self, x):
        y = self.base_layer(x)
        return y if self._disable_adapters or self.merged_adapters else y + self.scaling["default"] * x.mean()


def generate(model, ids):
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("apply", [
    lambda model: monkey_patch.apply(model, use_cutile=False),
    lambda model: tilegym.apply(model, use_cutile=False),
    lambda model: tilegym.apply(model, use_cutile=False, by_hand=False),
    lambda model: monkey_patch.apply_tilegym_kernel_to_llama(model=model),
])  # fmt: skip
def test_the_model_in_a_wrapper_is_patched(apply):
    model, ids = make_model("llama"), tokens(2, 7)
    expected = generate(model, ids)
    wrapper = Wrapper(model)
    report = apply(wrapper)
    assert {"linear", "loss", "attn", "graph"} <= {entry.compute for entry in report.patched}
    assert "generate" in vars(model) and "generate" not in vars(wrapper)
    assert PatchSet.active(model) == [report] and torch.equal(generate(wrapper, ids), expected)
    tilegym.revert(wrapper)
    assert not PatchSet.active(model) and "generate" not in vars(model)


@pytest.mark.parametrize("switch", [
    lambda layer: setattr(layer, "_disable_adapters", True),
    lambda layer: setattr(layer, "_active_adapter", ["other"]),
    lambda layer: layer.merged_adapters.append("default"),
    lambda layer: layer.scaling.update(default=0.5),
])  # fmt: skip
def test_a_graph_is_captured_anew_for_other_adapters(switch):
    """None of these changes a module, a hook, or where a parameter lies."""
    model = make_model("llama")
    model.model.layers[0].mlp.up_proj = Adapted(model.model.layers[0].mlp.up_proj)
    with monkey_patch.apply(model, use_cutile=False), eager_steps("cpu"):
        generate(model, tokens(1, 7))
        first = decode_graph._sessions[model]
        generate(model, tokens(1, 7))
        assert decode_graph._sessions[model] is first
        switch(model.model.layers[0].mlp.up_proj)
        generate(model, tokens(1, 7))
        assert decode_graph._sessions[model] is not first


def test_virtual_tokens_are_left_to_transformers():
    """peft puts another function into the model, that gives embeddings of more tokens than the prompt has."""
    model, ids = make_model("llama"), tokens(2, 7)
    original, virtual = model.prepare_inputs_for_generation, torch.randn(2, 3, 64, device=model.device)

    def prepare(ids, **kwargs):
        inputs = original(ids, **kwargs)
        cache = inputs.get(CACHE)
        inputs["attention_mask"] = inputs["position_ids"] = None
        if cache is None or not cache.get_seq_length():
            embeddings = model.get_input_embeddings()(inputs.pop("input_ids"))
            inputs["inputs_embeds"] = torch.cat([virtual, embeddings], 1)
        else:
            inputs["input_ids"] = inputs["input_ids"][:, -1:]
        return inputs

    model.prepare_inputs_for_generation = prepare
    expected = generate(model, ids)
    with monkey_patch.apply(model, use_cutile=False), eager_steps("cpu"):
        assert torch.equal(generate(model, ids), expected) and model not in decode_graph._sessions
        model.prepare_inputs_for_generation = original  # as peft leaves it
        generate(model, ids)
        assert model in decode_graph._sessions


def test_what_calls_adapted_layers_is_found_out():
    model, ids = make_model("llama", mlp_bias=False), tokens(2, 7)
    for layer in model.model.layers:
        layer.mlp.up_proj, layer.self_attn.q_proj = Adapted(layer.mlp.up_proj), Adapted(layer.self_attn.q_proj)
    expected = model(ids).logits
    with tilegym.apply(Wrapper(model), use_cutile=False, by_hand=False) as report, observed() as calls:
        assert_close(model(ids).logits, expected)
    assert {"swiglu", "apply_rope_base", "rms_norm", "linear", "fmha"} <= {op for op, _ in calls}
    assert "model.layers.1.self_attn.q_proj.base_layer" in {e.module for e in report.patched if e.compute == "linear"}


# With peft itself.

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def loss_and_gradients(wrapper):
    ids, mask = padded([14, 9], "right")
    wrapper.zero_grad()
    loss = wrapper(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in wrapper.named_parameters() if p.requires_grad}


def with_adapters(model, **options):
    """The model in one of peft's, whose adapters compute something."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    wrapper = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, **options))
    with torch.no_grad():
        for name, parameter in wrapper.named_parameters():
            if parameter.requires_grad and "lora_B" in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return wrapper


@pytest.mark.parametrize("options, op", [
    (dict(target_modules=LINEARS), FUSED),
    (dict(target_modules=LINEARS, use_dora=True), FUSED),
    (dict(target_modules=["q_proj", "lm_head"]), WHOLE),
    (dict(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]), WHOLE),
])  # fmt: skip
@pytest.mark.parametrize("first", [True, False])
def test_lora(options, op, first):
    expected = loss_and_gradients(with_adapters(make_model("llama").train(), **options))
    model = make_model("llama").train()
    report = monkey_patch.apply(model, use_cutile=False) if first else None
    wrapper = with_adapters(model, **options)
    report = report or monkey_patch.apply(wrapper, use_cutile=False)
    with observed() as calls:
        got = loss_and_gradients(wrapper)
    assert {"rms_norm", "swiglu", "fmha"} <= {name for name, _ in calls} and losses_of(calls) == {op}
    assert_same_step(got, expected)
    assert any("lora_A" in name for name in got[1])
    report.revert()
    assert_same_step(loss_and_gradients(wrapper), expected)


def test_adapters_are_trained_by_graphs(monkeypatch):
    replays = count_replays(monkeypatch)
    model = make_model("llama").train()
    model.config.use_cache = False
    wrapper = with_adapters(model, target_modules=LINEARS)
    expected = loss_and_gradients(copy.deepcopy(wrapper))
    with monkey_patch.apply(wrapper, use_cutile=False), tilegym.graph_training(wrapper):
        for _ in range(4):
            wrapper.zero_grad()
            got = loss_and_gradients(wrapper)
            assert_same_step(got, expected)
    assert replays == [3] and all("lora_" in name for name in got[1])


def test_merged_adapters():
    model, ids = make_model("llama"), tokens(2, 7)
    wrapper = with_adapters(copy.deepcopy(model), target_modules="all-linear")
    expected = generate(wrapper, ids)
    with monkey_patch.apply(wrapper, use_cutile=False), eager_steps("cpu"):
        assert torch.equal(generate(wrapper, ids), expected)
        with wrapper.disable_adapter():
            assert torch.equal(generate(wrapper, ids), generate(model, ids))
        merged = wrapper.merge_and_unload()
        assert torch.equal(generate(merged, ids), expected)
        assert not any("lora" in name for name in merged.state_dict())


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_of_peft(kind):
    peft = pytest.importorskip("peft")
    ids = tokens(2, 7)
    torch.manual_seed(1)
    wrapper = peft.get_peft_model(
        make_model("llama"), getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    ).eval()
    expected, logits = generate(wrapper, ids), wrapper(ids).logits
    with monkey_patch.apply(wrapper, use_cutile=False), eager_steps("cpu"):
        assert_close(wrapper(ids).logits, logits)
        assert torch.equal(generate(wrapper, ids), expected)


def test_adapters_with_dropout_while_they_train():
    """A part is compared with its replacement as it is without dropout, whatever mode its model is in."""
    peft = pytest.importorskip("peft")
    ids = tokens(2, 8)
    model = small_model("stablelm").model.to(ids.device)
    options = dict(r=4, lora_dropout=0.3, init_lora_weights=False, target_modules="all-linear")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**options)).train()
    torch.manual_seed(0)
    expected = wrapped(input_ids=ids, labels=ids).loss
    with tilegym.apply(wrapped, use_cutile=False) as report:
        assert {"swiglu", "layer_norm"} <= {entry.compute for entry in report.patched}
        assert all(module.training for module in model.modules())
        torch.manual_seed(0)
        torch.testing.assert_close(wrapped(input_ids=ids, labels=ids).loss, expected)

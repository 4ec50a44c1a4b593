"""apply, apply_tilegym_kernel_to_* and revert: what they change, what they leave alone, what they report."""

import copy
import functools
import pickle

import pytest
import torch
from tiny_models import assert_close
from tiny_models import backends
from tiny_models import computes
from tiny_models import default_attention
from tiny_models import families
from tiny_models import few_families
from tiny_models import make_model
from tiny_models import observed
from tiny_models import ops_by_compute
from tiny_models import ops_of
from tiny_models import tokens
from torch import nn

import tilegym.transformers as tt
from tilegym.backend import get_current_backend
from tilegym.errors import BackendError
from tilegym.errors import ModelError
from tilegym.errors import PatchError
from tilegym.transformers import choices
from tilegym.transformers import monkey_patch
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet

LLAMA_OPS = ops_of("llama")


@pytest.fixture(autouse=True)
def nothing_stays_patched():
    yield
    leftover = PatchSet.active()
    monkey_patch.revert()
    assert not leftover


def apply_to(family, **options):
    return getattr(monkey_patch, f"apply_tilegym_kernel_to_{family}")(**options)


def logits(model, ids=None):
    with torch.no_grad():
        return model(tokens(2, 11) if ids is None else ids).logits


def ops_called(model, backend=None):
    """The ops that a forward dispatches, or those that a backend serves."""
    with observed() as calls:
        logits(model)
    return {op for op, served_by in calls if backend in (None, served_by)}


@families
@backends
def test_logits_are_those_of_the_unpatched_model(family, backend):
    model = make_model(family)
    expected = logits(model)
    with monkey_patch.apply(model, use_cutile=backend == "cutile"):
        assert ops_called(model, backend) >= ops_of(family)
        assert_close(logits(model), expected, backend)


@few_families
def test_other_models_are_bit_identical_and_revert_restores(family):
    model, other = make_model(family), make_model(family)
    expected = logits(other)
    report = monkey_patch.apply(model, use_cutile=False)
    assert ops_called(model) >= ops_of(family) and not ops_called(other)
    assert torch.equal(logits(other), expected)
    report.revert()
    assert not ops_called(model)
    assert torch.equal(logits(model), expected)
    assert model.config._attn_implementation == default_attention(family)
    assert all("forward" not in vars(module) for module in model.modules())
    report = monkey_patch.apply(model, use_cutile=False)  # and again
    assert ops_called(model) >= ops_of(family)
    report.revert()


def test_models_made_from_one_config_object_do_not_share_the_patch():
    model = make_model("mistral")
    config = model.config
    other = type(model)(model.config).eval().to(model.device)
    other.load_state_dict(model.state_dict())
    expected = logits(other)
    with monkey_patch.apply(model, use_cutile=False):
        model.config.pad_token_id = 7  # what is set while patched stays
        assert other.config._attn_implementation == "sdpa" and not ops_called(other)
        assert torch.equal(logits(other), expected)
    assert model.config.pad_token_id == 7 and model.config._attn_implementation == "sdpa"
    assert {id(module.config) for module in model.modules() if hasattr(module, "config")} == {id(config)}


@families
def test_the_report_names_every_module(family):
    model = make_model(family)
    kinds = {
        "rms_norm": "RMSNorm",
        "swiglu": "MLP",
        "geglu": "MLP",
        "rope": "Attention",
        "linear": "Linear",
        "moe": ("TopKRouter", "ForCausalLM"),
        "attn": "ForCausalLM",
        "graph": "ForCausalLM",
        "loss": "ForCausalLM",
    }
    with monkey_patch.apply(model, use_cutile=False) as report:
        patched = {(e.compute, e.module) for e in report.patched}
        captured = "graph" if type(model)._can_compile_fullgraph else None  # OLMoE: only in later transformers
        for compute in computes(family) - ({"graph"} - {captured}):
            expected = {
                path or type(model).__name__
                for path, module in model.named_modules()
                if type(module).__name__.endswith(kinds[compute])
            }
            if compute == "loss":
                expected |= {f"{name}.loss_function" for name in expected}
                expected -= {type(model).__name__} if family == "gemma3" else set()  # its logits are capped
            assert {module for name, module in patched if name == compute} == expected, compute
        assert {e.backend for e in report.patched} == {get_current_backend()}
        steps = {"model.layers.0", "model.layers.1"} if family != "olmoe" else set()
        # Llama's has MLPs with biases here.
        entries = report.skipped if family == "llama" else report.patched
        assert {e.module for e in entries if e.compute == "decode_step"} == steps
        assert {e.compute for e in report.skipped} <= {"decode_step", "loss"} | ({"graph"} - {captured})
        assert "model.layers.*.self_attn" in str(report)


@families
@pytest.mark.parametrize("of_instance", [True, False])
def test_each_compute_alone(family, of_instance):
    expected = logits(make_model(family))
    for compute, ops in ops_by_compute(family).items():
        if compute == "linear" and not of_instance:
            continue
        only = {name: name == compute for name in computes(family)}
        made_before = make_model(family)
        report = apply_to(family, model=made_before if of_instance else None, **only)
        model = made_before if of_instance else make_model(family)
        assert ops_called(model) == ops
        assert {e.compute for e in report.patched} == {compute}
        assert_close(logits(model), expected)
        report.revert()
        assert not ops_called(model) and torch.equal(logits(model), expected)


@families
def test_without_a_model_models_made_afterwards_are_patched(family):
    expected = logits(make_model(family))
    others = [make_model(other) for other in ("llama", "mistral", "qwen3_moe") if other != family]
    ops, default = ops_of(family), default_attention(family)
    with apply_to(family) as report:
        model = make_model(family)
        assert ops_called(model) >= ops
        assert_close(logits(model), expected)
        assert {e.compute for e in report.patched} == computes(family) - {"linear", "graph"}
        assert not any(ops_called(other) for other in others)
        again = apply_to(family)
        assert not again.patched and {e.why for e in again.skipped} == {"already patched"}
        again.revert()
        assert ops_called(model) >= ops
        eager = make_model(family, attn_implementation="eager")  # who asks for another attention gets it
        assert ops_called(eager) == ops - {"fmha"}
        chosen = make_model(family)
        chosen.set_attn_implementation(default)
        assert ops_called(chosen) == ops - {"fmha"}
    assert not PatchSet.active() and eager.config._attn_implementation == "eager"
    assert model.config._attn_implementation == default
    for one in (model, chosen, make_model(family)):
        assert not ops_called(one) and torch.equal(logits(one), expected)


def test_a_class_patch_and_an_instance_patch_revert_independently():
    expected = logits(make_model("llama"))
    of_class = apply_to("llama", attn=False)
    model = make_model("llama")
    of_instance = monkey_patch.apply(model, use_cutile=False)
    of_class.revert()
    assert ops_called(model) >= LLAMA_OPS and not ops_called(make_model("llama"))
    of_instance.revert()
    assert not ops_called(model) and torch.equal(logits(model), expected)


def test_a_class_patch_leaves_an_mlp_with_another_activation():
    model = make_model("llama", hidden_act="gelu")
    expected = logits(model)
    with apply_to("llama", rope=False, rms_norm=False, attn=False):
        assert not ops_called(model) and torch.equal(logits(model), expected)


def test_a_second_apply_is_idempotent_and_reverts_nothing():
    model = make_model("llama")
    first = monkey_patch.apply(model, use_cutile=False, use_attn=False)
    second = monkey_patch.apply(model, use_cutile=False)
    assert [e.compute for e in second.patched] == ["attn", "graph"]
    skipped = [e.why for e in second.skipped if e.compute != "decode_step"]
    assert set(skipped) == {"already patched"} and len(skipped) == len(first.patched)
    third = monkey_patch.apply(model, use_cutile=False)
    assert not third.patched
    third.revert()
    second.revert()
    assert ops_called(model) == LLAMA_OPS - {"fmha"} | {"linear"}
    monkey_patch.revert(model)
    assert not ops_called(model) and not PatchSet.active(model)
    monkey_patch.revert(model)  # nothing left, no complaint


def test_revert_leaves_what_others_have_patched():
    model = make_model("llama")
    others = PatchSet(model, maker="others")
    others.replace_forward(model.model.norm, lambda self, x: x, Entry("model.norm", "norm"))
    monkey_patch.apply(model, use_cutile=False)
    monkey_patch.revert(model)
    assert PatchSet.active(model) == [others] and not ops_called(model)
    others.revert()


@pytest.mark.parametrize("first", [0, 1])
def test_two_backends_one_over_the_other_revert_in_any_order(first):
    model = make_model("llama")
    sets = monkey_patch.apply(model, use_cutile=False), monkey_patch.apply(model, use_cutile=True)
    # The graph is not one backend's, nor are late logits.
    assert {e.backend for e in sets[1].patched} == {"cutile"} and len(sets[1].patched) == len(sets[0].patched) - 2
    assert model.config._attn_implementation == "tilegym_cutile"
    sets[first].revert()
    assert model.config._attn_implementation == ("tilegym_cutile" if first == 0 else "tilegym")
    sets[1 - first].revert()
    assert model.config._attn_implementation == "sdpa" and not ops_called(model)


def test_an_unsupported_family_is_an_error_that_names_the_supported_ones():
    from transformers import GPT2Config
    from transformers import GPT2Model

    gpt2 = GPT2Model(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9, n_positions=8))
    with pytest.raises(
        ModelError, match="GPT2Model has .*'gpt2'; supported here: llama, mistral, .* is tilegym.apply[(]"
    ):
        monkey_patch.apply(gpt2)
    with pytest.raises(ModelError, match="Linear has no config.model_type"):
        monkey_patch.apply(nn.Linear(1, 1))
    with pytest.raises(ModelError, match="'mistral'; supported here: llama. For others there is monkey_patch.apply[(]"):
        apply_to("llama", model=make_model("mistral"))


def test_what_matches_nothing_is_an_error_and_leaves_nothing():
    model = make_model("llama", hidden_act="gelu")
    with pytest.raises(PatchError, match="LlamaForCausalLM: swiglu at model.layers.0.mlp: its activation is GELU"):
        apply_to("llama", model=model, rope=False, rms_norm=False, attn=False, linear=False, graph=False, loss=False)
    with pytest.raises(PatchError, match="no compute was asked for"):
        nothing = dict.fromkeys(("rope", "rms_norm", "attn", "swiglu", "linear", "graph", "loss"), False)
        apply_to("llama", model=model, **nothing)
    assert not PatchSet.active(model)


def test_what_does_not_fit_is_skipped_with_the_reason():
    class OtherNorm(nn.Module):
        def forward(self, x):
            return 2 * x

    model = make_model("llama", hidden_act="gelu")
    model.model.norm = OtherNorm()
    attention = model.model.layers[0].self_attn
    attention.forward = functools.partial(type(attention).forward, attention)
    expected = logits(model)
    with monkey_patch.apply(model, use_cutile=False) as report:
        why = {(e.module, e.compute): e.why for e in report.skipped if e.compute != "decode_step"}
        assert "OtherNorm, not a LlamaRMSNorm" in why["model.norm", "rms_norm"]
        assert "activation is GELU" in why["model.layers.1.mlp", "swiglu"]
        assert "has been replaced already, by" in why["model.layers.0.self_attn", "rope"]
        assert len(why) == 4
        assert_close(logits(model), expected)


def test_a_class_whose_math_has_changed_is_skipped(monkeypatch):
    from transformers.models.llama import modeling_llama

    def gemma(self, x):
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight.float())

    def interleaved(q, k, cos, sin, unsqueeze_dim=1):
        return q, k

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", gemma)
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", interleaved)
    model = make_model("llama")
    expected = logits(model)
    for patched in (monkey_patch.apply(model, use_cutile=False), apply_to("llama")):
        with patched as report:
            assert {e.compute for e in report.patched} - {"linear", "graph", "loss"} == {"attn"}
            skipped = [e for e in report.skipped if e.compute != "decode_step"]
            assert {e.compute for e in skipped} == {"rope", "rms_norm", "swiglu"}
            assert all("computes something else" in e.why for e in skipped)
            assert_close(logits(model), expected)


def test_an_attention_that_rotates_otherwise_is_skipped(monkeypatch):
    from transformers.models.llama import modeling_llama

    model = make_model("llama")
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", lambda self, hidden_states, **kwargs: hidden_states)
    with monkey_patch.apply(model, use_cutile=False) as report:
        (why,) = {e.why for e in report.skipped if e.compute == "rope"}
        assert why.endswith("does not use the global apply_rotary_pos_emb; nothing to replace in it")


@pytest.mark.parametrize("of_instance", [True, False])
def test_an_exception_half_way_leaves_nothing_patched(of_instance, monkeypatch):
    model = make_model("llama")

    def fails(*args):
        raise KeyError("half-way")

    monkeypatch.setattr(PatchSet, "use_attention", fails)  # the last of the four
    monkeypatch.setattr(choices, "attention_choice", fails)
    with pytest.raises(KeyError):
        apply_to("llama", model=model if of_instance else None)
    assert not ops_called(model) and not PatchSet.active() and not PatchSet.active(model)


def test_without_cutile_nothing_is_touched(monkeypatch):
    model = make_model("llama")

    def missing(name):
        raise BackendError(f"backend {name!r} cannot be used: it is not installed")

    monkeypatch.setattr(monkey_patch, "assert_backend_available", missing)
    with pytest.raises(BackendError):
        monkey_patch.apply(model)
    assert not ops_called(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_patched_model_is_a_patched_model(copied):
    model = make_model("qwen3")
    expected = logits(model)
    report = monkey_patch.apply(model, use_cutile=False)
    patched, other = logits(model), copied(model)
    assert isinstance(other, type(model)) and str(other) == str(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    report.revert()
    assert ops_called(other) >= LLAMA_OPS and torch.equal(logits(other), patched)
    monkey_patch.revert(other)
    assert not ops_called(other) and torch.equal(logits(other), expected)


@few_families
def test_saving_and_loading(family, tmp_path):
    model = make_model(family)
    names, expected = list(model.state_dict()), logits(model)
    with monkey_patch.apply(model, use_cutile=False):
        assert list(model.state_dict()) == names
        model.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    assert "tilegym" not in config
    loaded = type(model).from_pretrained(tmp_path).eval().to(model.device)
    assert list(loaded.state_dict()) == names
    assert not ops_called(loaded) and torch.equal(logits(loaded), expected)
    with apply_to(family):
        loaded = type(model).from_pretrained(tmp_path).eval().to(model.device)
        assert ops_called(loaded) >= ops_of(family)
        assert_close(logits(loaded), expected)


def test_attention_weights_are_not_lost_silently():
    model = make_model("llama", attn_implementation="eager")
    model.config.output_attentions = True
    with monkey_patch.apply(model, use_cutile=False) as report:
        why = {e.compute: e.why for e in report.skipped}
        assert why["attn"] == "its config asks for attention weights (output_attentions)"
        assert why["graph"] == "its attention is not TileGym's"
        assert len(model(tokens(1, 5)).attentions) == 2


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gpt_oss", "gemma3"])
def test_attention_weights_of_a_call(family):
    """The patched model gives them as transformers' eager attention does; calls without them take the kernel."""
    model = make_model(family, attn_implementation="eager")
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    seen = mask.bool()
    with torch.no_grad():
        for given in (mask, None):
            expected = model(ids, attention_mask=given, output_attentions=True)
            with monkey_patch.apply(model, use_cutile=False):
                got = model(ids, attention_mask=given, output_attentions=True)
                assert not model(ids).attentions
            assert len(got.attentions) == len(expected.attentions) > 0
            for weights, right in zip(got.attentions, expected.attentions, strict=True):
                assert weights.shape == right.shape
                assert_close(weights.transpose(1, 2)[seen], right.transpose(1, 2)[seen])
            assert_close(got.logits[seen], expected.logits[seen])


def test_norms_kept_in_fp32_in_a_bf16_model():
    model = make_model("llama", torch.bfloat16)
    norm = model.model.norm.float()
    x = torch.randn(2, 3, 64, device=model.device, dtype=torch.bfloat16)
    expected = norm(x)
    with monkey_patch.apply(model, use_cutile=False):
        assert norm(x).dtype is torch.float32
        assert_close(norm(x), expected)


def test_wrapped_linears_are_called():
    class LowRank(nn.Module):
        """As LoRA wraps a linear layer."""

        def __init__(self, base):
            super().__init__()
            self.base_layer, self.down, self.up = base, nn.Linear(64, 2), nn.Linear(2, base.out_features)
            self.to(base.weight.device)

        def forward(self, x):
            return self.base_layer(x) + self.up(self.down(x))

    model = make_model("qwen2")
    for layer in model.model.layers:
        layer.mlp.gate_proj, layer.self_attn.q_proj = LowRank(layer.mlp.gate_proj), LowRank(layer.self_attn.q_proj)
    expected = logits(model)
    with monkey_patch.apply(model, use_cutile=False) as report:
        assert {e.why for e in report.skipped} == {"its self_attn.q_proj is not patched"}
        assert_close(logits(model), expected)


def test_other_heads_of_a_family():
    from transformers import LlamaForSequenceClassification
    from transformers import LlamaModel

    for cls in (LlamaModel, LlamaForSequenceClassification):
        torch.manual_seed(0)
        model = cls(make_model("llama").config).eval()
        with torch.no_grad():
            expected = model(tokens(1, 7).cpu())[0]
            with tt.apply(model, use_cutile=False) as report:
                assert len([e for e in report.patched if e.compute != "linear"]) == 11
                assert_close(model(tokens(1, 7).cpu())[0], expected)

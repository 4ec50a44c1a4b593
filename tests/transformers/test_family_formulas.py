"""What finds out which formula a class or function of transformers computes, and refuses what none computes."""

import pickle

import pytest
import torch
from tiny_models import make_model
from tiny_models import observed
from tiny_models import ops_of
from tiny_models import tokens
from torch import nn
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.glm4 import modeling_glm4
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.phi3 import modeling_phi3

from tilegym.transformers import experts
from tilegym.transformers import layers
from tilegym.transformers import monkey_patch

NORMS = {
    modeling_llama.LlamaRMSNorm: ("variance_epsilon", 0.0, "llama"),
    modeling_gpt_oss.GptOssRMSNorm: ("variance_epsilon", 0.0, "gemma"),
    modeling_olmo2.Olmo2RMSNorm: ("variance_epsilon", 0.0, "gemma"),
    modeling_gemma3.Gemma3RMSNorm: ("eps", 1.0, "gemma"),
}
ROPES = {
    modeling_llama: "halves",
    modeling_gpt_oss: "halves",
    modeling_phi3: "first dimensions",
    modeling_glm4: "pairs",
}


def changed(cls, change):
    """A class whose forward gives ``change`` of what ``cls`` gives."""
    return type(cls.__name__, (cls,), {"forward": lambda self, x: change(cls.forward(self, x))})


@pytest.mark.parametrize("cls", NORMS, ids=lambda cls: cls.__name__)
def test_norms(cls):
    assert layers.find_rms_norm(cls) == NORMS[cls]
    assert layers.find_rms_norm(changed(cls, lambda y: 1.01 * y)) is None
    assert layers.find_rms_norm(changed(cls, lambda y: y.float())) is None
    assert layers.find_rms_norm(changed(cls, lambda y: y - y.mean(-1, keepdim=True))) is None


@pytest.mark.parametrize("cls", NORMS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), (torch.float32,) * 2])
def test_a_norm_s_forward_rounds_as_its_class_does(cls, dtypes, monkeypatch):
    """Also with weights kept in fp32, as gpt-oss has them."""
    monkeypatch.setenv("DISABLE_FALLBACK", "1")
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtypes[0])
    norm = cls(64).to(dtypes[1])
    nn.init.normal_(norm.weight, 1.0)
    with torch.no_grad():
        expected = norm(x)
        got, kernel = (layers.rms_norm_forward(b, layers.find_rms_norm(cls))(norm, x) for b in ("pytorch", "cutile"))
    assert got.dtype is kernel.dtype is expected.dtype and torch.equal(got, expected)
    # Sums in another order may tip a rounding.
    torch.testing.assert_close(kernel, expected, rtol=2 * torch.finfo(dtypes[0]).eps, atol=1e-6)


@pytest.mark.parametrize("module", ROPES, ids=lambda module: module.__name__.rpartition("_")[2])
def test_rotations(module):
    rotate = module.apply_rotary_pos_emb
    assert layers.find_rope(rotate) == ROPES[module]
    assert layers.find_rope(lambda q, k, cos, sin: rotate(q, k, cos, -sin)) is None
    assert layers.find_rope(lambda q, k, cos, sin: (rotate(q, k, cos, sin)[0], k)) is None


def test_gated_mlps():
    llama, phi3 = modeling_llama.LlamaMLP.forward, modeling_phi3.Phi3MLP.forward
    assert layers.find_gated_mlp(llama).linears == ("gate_proj", "up_proj")
    assert layers.find_gated_mlp(phi3).linears == ("gate_up_proj",)
    assert layers.find_gated_mlp(lambda self, x: llama(self, x) + x) is None
    # The linears' roles exchanged.
    assert layers.find_gated_mlp(lambda m, x: m.down_proj(m.gate_proj(x) * m.act_fn(m.up_proj(x)))) is None


def test_activations():
    functions = {"silu": nn.SiLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh"), None: nn.ReLU()}
    assert [layers.find_activation(function) for function in functions.values()] == list(functions)


def test_exact_gelu_and_packed_gelu():
    for family, options in (("gemma3", {"hidden_activation": "gelu"}), ("llama", {"hidden_act": "gelu"})):
        model, ids = make_model(family, **options), tokens(1, 7)
        with torch.no_grad():
            expected = model(ids).logits
            # On a GPU PyTorch's attention rounds otherwise than transformers' way of calling it.
            with monkey_patch.apply(model, use_cutile=False, use_attn=False) as report, observed() as calls:
                assert torch.equal(model(ids).logits, expected)
        # Llama's flag is swiglu; what is no swiglu stays as it was.
        assert ("geglu" in {op for op, _ in calls}) == (family == "gemma3")
        capped = {"loss"} if getattr(model.config, "final_logit_softcapping", None) else set()
        assert {e.compute for e in report.skipped} <= {"swiglu", "decode_step", "graph", *capped}
    mlp = modeling_phi3.Phi3MLP(make_model("phi3", hidden_act="gelu").config)
    x = torch.randn(3, 96)
    forward = layers.gated_mlp_forward("pytorch", layers.find_gated_mlp(type(mlp).forward), "gelu")
    torch.testing.assert_close(forward(mlp, x), mlp(x))


def logits(model):
    with torch.no_grad():
        return model(tokens(2, 9)).logits


def ops_called(model):
    with observed() as calls:
        logits(model)
    return {op for op, _ in calls}


def test_routers_that_choose_otherwise_are_skipped(monkeypatch):
    def forward(self, hidden_states):
        scores = nn.functional.linear(hidden_states, self.weight)
        weights, ids = scores.abs().topk(self.top_k)  # the farthest from zero
        return scores, weights.softmax(-1), ids

    monkeypatch.setattr(modeling_mixtral.MixtralTopKRouter, "forward", forward)
    model = make_model("mixtral")
    expected = logits(model)
    with monkey_patch.apply(model, use_cutile=False) as report:
        why = {e.why for e in report.skipped if "gate" in e.module}
        assert why == {"the router's choice is none that moe_topk_routing makes"}
        assert "moe_topk_routing" not in ops_called(model) and "fused_moe" in ops_called(model)
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    with monkey_patch.apply_tilegym_kernel_to_mixtral():
        model = make_model("mixtral")
        assert "moe_topk_routing" not in ops_called(model)
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_experts_with_another_activation_are_skipped():
    model = make_model("mixtral", hidden_act="sigmoid")
    expected = logits(model)
    with monkey_patch.apply(model, use_cutile=False) as report:
        why = [e.why for e in report.skipped if e.compute == "moe"]
        assert why == ["the experts' activation is none that fused_moe computes"]
        assert "fused_moe" not in ops_called(model)
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    with monkey_patch.apply_tilegym_kernel_to_mixtral():
        model = make_model("mixtral", hidden_act="sigmoid")
        assert model.config._experts_implementation == "tilegym" and "fused_moe" not in ops_called(model)
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_experts_that_were_asked_for_are_kept():
    with monkey_patch.apply_tilegym_kernel_to_olmoe():
        eager, model = make_model("olmoe", experts_implementation="eager"), make_model("olmoe")
        assert eager.config._experts_implementation == "eager" and "fused_moe" not in ops_called(eager)
        model.set_experts_implementation("grouped_mm")
        assert "fused_moe" not in ops_called(model)
        model.set_experts_implementation("tilegym")
        assert "fused_moe" in ops_called(model)
    assert model.config._experts_implementation == "grouped_mm"
    assert eager.config._experts_implementation == "eager"


def test_nothing_stays_in_the_experts():
    model = make_model("gpt_oss")
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    monkey_patch.apply(model, use_cutile=False).revert()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


@pytest.mark.parametrize("family", ["gpt_oss", "glm4", "gemma3"])
def test_a_pickled_model_is_a_patched_model_elsewhere(family):
    """Where no function has been made yet."""
    model = make_model(family)
    monkey_patch.apply(model, use_cutile=False)
    expected, pickled = logits(model), pickle.dumps(model)
    for make in (layers.rms_norm_forward, layers.gated_mlp_forward, layers.rope_function, experts.routing_forward):
        make.cache_clear()
    other = pickle.loads(pickled)
    assert ops_called(other) == ops_of(family) | {"linear"} and torch.equal(logits(other), expected)
    monkey_patch.revert(other)
    assert not ops_called(other)


def test_router_logits_are_those_of_the_unpatched_model():
    """They are what the load-balancing loss is made of."""
    model = make_model("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.1).train()
    ids = tokens(2, 9)

    def step():
        model.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        return out.aux_loss, model.model.layers[1].mlp.gate.weight.grad.clone()

    expected = step()
    with monkey_patch.apply(model, use_cutile=False):
        for got, value in zip(step(), expected, strict=True):
            torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-5)


def test_a_rotation_that_changes_with_the_length_is_not_captured():
    parameters = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 12, long_factor=[4.0] * 12)
    parameters |= dict(original_max_position_embeddings=16, partial_rotary_factor=1.0)
    model = make_model("phi3", rope_parameters=parameters, original_max_position_embeddings=16)
    ids = tokens(1, 12)
    options = dict(max_new_tokens=9, min_new_tokens=9, do_sample=False)
    expected = model.generate(ids, **options)  # beyond 16, where the rotation changes
    with monkey_patch.apply(model, use_cutile=False) as report:
        (why,) = {e.why for e in report.skipped if e.compute == "graph"}
        assert why == "its rotary embedding changes with the length of the sequence"
        assert torch.equal(model.generate(ids, **options), expected)


def test_flags():
    model = make_model("phi3")
    with pytest.raises(TypeError, match="apply: no family has sparsity; flags are"):
        monkey_patch.apply(model, sparsity=True)
    with pytest.raises(TypeError, match="apply_tilegym_kernel_to_gemma3: got an unexpected keyword argument 'swiglu'"):
        monkey_patch.apply_tilegym_kernel_to_gemma3(swiglu=True)
    with monkey_patch.apply(model, use_cutile=False, moe=False, swiglu=False) as report:  # moe: it has none
        assert "swiglu" not in {e.compute for e in report.patched}


def test_a_function_that_this_transformers_has_not_is_skipped(monkeypatch):
    """Before transformers 5.17 Qwen2.5-VL rotated by one of another name."""
    model = make_model("llama")
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", lambda self, hidden_states, **kwargs: hidden_states)
    monkeypatch.delattr(modeling_llama, "apply_rotary_pos_emb")
    for patched in (monkey_patch.apply(model, use_cutile=False), monkey_patch.apply_tilegym_kernel_to_llama()):
        with patched as report:
            (why,) = {e.why for e in report.skipped if e.compute == "rope"}
            assert "computes something else" in why

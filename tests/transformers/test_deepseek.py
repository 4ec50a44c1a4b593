"""DeepSeek-V2 and V3: what every family must do, and the latent attention with its cache."""

import copy
import importlib

import pytest
import torch
from common import some
from family_parity import Family
from family_parity import Parity
from family_parity import logits
from family_parity import make
from family_parity import ops_called
from test_decode_graph import generate
from test_decode_graph import logits_of_steps
from test_decode_graph import one_by_one
from test_decode_graph import rotations
from tiny_models import assert_close
from tiny_models import backends
from tiny_models import observed
from tiny_models import padded
from tiny_models import tokens
from torch import nn
from transformers import DynamicCache
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from tilegym.transformers import decode_graph
from tilegym.transformers import monkey_patch
from tilegym.transformers.attention import NAMES
from tilegym.transformers.deepseek2 import attention

pytestmark = pytest.mark.skipif(
    not hasattr(modeling_deepseek_v3.DeepseekV3Attention, "expand_kv"),
    reason="this transformers caches expanded keys, and routes in the MLP",
)

COMPUTES = {
    "rope": {"apply_rope_base"},
    "rms_norm": {"rms_norm"},
    "swiglu": {"swiglu"},
    "moe": {"moe_topk_routing", "linear", "fused_moe"},
    "attn": {"mla", "linear"},
}
SIZES = dict(
    num_hidden_layers=2,
    num_key_value_heads=4,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.5,
)
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, mscale=0.707, mscale_all_dim=0.707,
    original_max_position_embeddings=64, beta_fast=32, beta_slow=1,
)  # fmt: skip
V2 = Family(
    "deepseek_v2",
    "deepseek_v2",
    COMPUTES,
    q_lora_rank=None,
    topk_method="group_limited_greedy",
    rope_parameters=YARN,
    **SIZES,
)
V3 = Family("deepseek_v3", "deepseek_v3", COMPUTES, q_lora_rank=24, rope_parameters=YARN, **SIZES)
one_family = pytest.mark.parametrize("family", some([V2, V3], V3), ids=repr)  # with the weights that the other lacks


@pytest.fixture(params=[V2, V3], ids=repr)
def family(request):
    return request.param


class Test_Deepseek(Parity):
    decoding_ops = {"mla_decoding_split_kv", "bmm"}
    changed = ("rope", "attn")

    def modeling(self, family):
        return importlib.import_module(f"transformers.models.{family.name}.modeling_{family.name}")

    def change(self, modeling, monkeypatch):
        """Rotates by twice the angle, and scores without the part that has a position."""
        for name in attention.ROTATIONS:
            former = getattr(modeling, name, None)
            if former is not None:
                monkeypatch.setattr(modeling, name, lambda q, k, *args, f=former: f(*f(q, k, *args), *args))
        cls = next(c for n, c in vars(modeling).items() if n.endswith("Attention") and n.startswith("Deepseek"))
        former = cls.expand_kv

        def without_position(self, latents, kpe):
            return former(self, latents, 0 * kpe)

        monkeypatch.setattr(cls, "expand_kv", without_position)

    @one_family
    def test_cutile_in_the_interpreter(self, family, monkeypatch):
        super().test_cutile_in_the_interpreter(family, monkeypatch)

    def test_layers_are_refused_and_keep_what_they_compute(self):
        """Where kv_b_proj is more than its weight, the weight may not be taken for it."""
        model = make(V3)
        layers = [layer.self_attn for layer in model.model.layers]
        layers[0].kv_b_proj.register_forward_hook(lambda module, args, output: 2 * output)
        expected = logits(model)
        with monkey_patch.apply(model, use_cutile=False) as report:
            why = {e.module: e.why for e in report.skipped if e.compute == "attn"}
            assert list(why) == ["model.layers.0.self_attn"] and "kv_b_proj" in why["model.layers.0.self_attn"]
            assert_close(logits(model), expected)
            handle = layers[1].kv_b_proj.register_forward_hook(lambda module, args, output: 3 * output)
            changed = logits(model)  # registered after the patch
            assert not torch.allclose(changed, expected)
        assert_close(logits(model), changed)
        handle.remove()


def test_the_cache_holds_latents_and_decoding_absorbs():
    model = make(V2)
    with monkey_patch.apply(model, use_cutile=False), torch.no_grad():
        cache = DynamicCache(config=model.config)
        with observed() as prefill:
            model(tokens(2, 7), past_key_values=cache)
        with observed() as step:
            model(tokens(2, 1), past_key_values=cache)
        assert cache.layers[0].keys.shape == (2, 1, 8, 32) and cache.layers[0].values.shape == (2, 1, 8, 8)
    assert "mla" in {op for op, _ in prefill} and "mla_decoding_split_kv" not in {op for op, _ in prefill}
    assert "mla" not in {op for op, _ in step} and "mla_decoding_split_kv" in {op for op, _ in step}


@pytest.mark.parametrize("chosen", ["eager", "sdpa"])
def test_another_attention_is_obeyed(family, chosen):
    model = make(family)
    with monkey_patch.apply(model, use_cutile=False):
        model.set_attn_implementation(chosen)
        assert "mla" not in ops_called(model) and "apply_rope_base" in ops_called(model)
        got = logits(model)
        model.set_attn_implementation(NAMES[None])
        assert "mla" in ops_called(model)
    model.set_attn_implementation(chosen)
    assert_close(got, logits(model))


def test_attention_weights_of_a_call(family):
    """They are computed from the latents that the kernels have left in the cache."""
    model, ids = make(family), tokens(2, 7)
    model.set_attn_implementation("eager")

    def run():
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            prompt = model(ids[:, :6], past_key_values=cache)
            return prompt, model(ids[:, 6:], past_key_values=cache, output_attentions=True)

    expected = run()[1]
    with monkey_patch.apply(model, use_cutile=False):
        prompt, got = run()
    assert not prompt.attentions and len(got.attentions) == 2
    for weights, right in zip(got.attentions, expected.attentions, strict=True):
        assert_close(weights, right)
    assert_close(got.logits, expected.logits)


def test_rotation_of_halves():
    model = make(V3, rope_interleave=False)
    expected = logits(model)
    assert not torch.allclose(logits(make(V3)), expected)
    with monkey_patch.apply(model, use_cutile=False):
        assert_close(logits(model), expected)


def test_a_longer_mask_of_the_callers():
    """A 4D additive mask, in which tokens do not see some that are before them."""
    model, ids = make(V3), tokens(1, 8)
    visible = torch.ones(8, 8, dtype=torch.bool, device=ids.device).tril()
    visible[5:, 1:3] = False
    mask = torch.zeros(1, 1, 8, 8, device=ids.device).masked_fill(~visible, torch.finfo(torch.float32).min)
    expected = logits(model, ids, mask)
    assert not torch.allclose(expected, logits(model, ids))
    with monkey_patch.apply(model, use_cutile=False):
        assert_close(logits(model, ids, mask), expected)


def test_what_is_no_weight_alone():
    linear = nn.Linear(4, 4, bias=False)
    assert attention.expands_by_its_weight(linear)
    assert not attention.expands_by_its_weight(nn.Linear(4, 4))
    assert not attention.expands_by_its_weight(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False)))
    linear.register_forward_pre_hook(lambda module, args: args)
    assert not attention.expands_by_its_weight(linear)


@pytest.mark.parametrize("options", [{}, {"n_shared_experts": 1, "q_lora_rank": 16}], ids=["", "low rank"])
@backends
def test_one_sequence_decodes_by_fused_steps(family, options, backend):
    """Of layers with an MLP and with experts: to the latents with their own width, residual and shared experts last."""
    model = make(family, **options)
    ids, mask = padded([5, 11, 8], "left")
    with decode_graph.eager_steps("cpu"):
        expected = one_by_one(model, ids, mask, max_new_tokens=14)
        with monkey_patch.apply(model, use_cutile=backend == "cutile") as report:
            assert len([e for e in report.patched if e.compute == "decode_step"]) == 2
            with observed() as calls:
                got = one_by_one(model, ids, mask, max_new_tokens=14)
            assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
            fused = {"rms_norm_linear", "rope_and_cache", "rms_norm_swiglu", "linear_add"}
            assert fused | {"mla_decoding_split_kv", "fused_moe"} <= {op for op, _ in calls}
        # What somebody listens to is called.
        last = model.model.layers[1]
        for part in (last.self_attn.kv_b_proj, last.mlp.shared_experts.up_proj, last.post_attention_layernorm):
            with monkey_patch.apply(model, use_cutile=backend == "cutile"):
                handle = part.register_forward_hook(lambda module, args, out: -9 * out)
                changed = generate(model, ids[1:2], max_new_tokens=14)
            assert torch.equal(generate(model, ids[1:2], max_new_tokens=14), changed)
            assert not torch.equal(changed, expected[1])
            handle.remove()


def test_one_sequence_takes_rows_of_the_rotary_embedding(family, monkeypatch):
    """Of V2's complex numbers as of V3's cos and sin."""
    model, ids = make(family), tokens(1, 11)
    with decode_graph.eager_steps("cpu"), monkey_patch.apply(model, use_cutile=False):
        expected = generate(model, ids)
        counts = rotations(model, monkeypatch)
        assert torch.equal(generate(model, ids), expected)
        # The prompt, with what fills a graph's room too, and all that comes behind it.
        assert counts[-1] == 8 and set(counts[:-1]) == {11, 16}


@one_family
def test_prompts_of_similar_lengths_share_a_graph(family):
    model = make(family)
    prompts = [(tokens(2, n, seed=n), None) for n in (11, 9, 16, 7)] + [padded(n, "left") for n in ([5, 11], [3, 9])]
    expected = [generate(model, *prompt) for prompt in prompts]
    with decode_graph.eager_steps("cpu"), monkey_patch.apply(model, use_cutile=False):
        for _ in range(2):
            assert all(torch.equal(generate(model, *p), e) for p, e in zip(prompts, expected, strict=True))
        assert decode_graph._sessions[model].prompts.forms.keys() == {(False, 16), (True, 16)}


@one_family
@torch.no_grad()
def test_steps_by_the_kernels(family, monkeypatch):
    """In bf16: three tokens, one after the other."""
    monkeypatch.setenv("DISABLE_FALLBACK", "1")
    model, ids = make(family, torch.bfloat16), tokens(1, 14)
    exact, expected = copy.deepcopy(model).float()(ids).logits[:, 11:], model(ids).logits[:, 11:]
    with monkey_patch.apply(model, use_cutile=True), observed() as calls:
        got = logits_of_steps(model, ids, 11)
    assert ("rope_and_cache", "cutile") in calls
    assert (got - exact).norm() <= 2 * (expected - exact).norm()

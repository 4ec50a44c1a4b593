"""Qwen3.5, its model with experts and Qwen3-Next: what every family must do, and their linear attention."""

import importlib

import pytest
import torch
from common import some
from family_parity import Family
from family_parity import Parity
from family_parity import logits
from family_parity import make
from family_parity import ops_called
from tiny_models import assert_close
from tiny_models import backends
from tiny_models import observed
from tiny_models import padded
from tiny_models import tokens
from transformers.models.qwen3_5 import modeling_qwen3_5

from tilegym.transformers import decode_graph
from tilegym.transformers import decode_layer
from tilegym.transformers import monkey_patch
from tilegym.transformers.forwards import unwrapped

pytestmark = pytest.mark.skipif(
    getattr(modeling_qwen3_5, "causal_conv1d_fn", None) is None,
    reason="in this transformers the functions are attributes of each layer",
)

DENSE = {
    "rope": {"apply_rope_base"},
    "rms_norm": {"rms_norm"},
    "rms_norm_gated": {"rms_norm_gated"},
    "causal_conv1d": {"causal_conv1d_fn"},
    "gated_delta_rule": {"chunk_gated_delta_rule"},
    "sigmoid_mul": {"sigmoid_mul"},
    "swiglu": {"swiglu"},
    "attn": {"fmha"},
}
WITH_EXPERTS = DENSE | {"moe": {"moe_topk_routing", "linear", "fused_moe"}}
SIZES = dict(
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    head_dim=32,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32)
QWEN3_5 = Family("qwen3_5_text", "qwen3_5", DENSE, **SIZES)
QWEN3_5_MOE = Family("qwen3_5_moe_text", "qwen3_5_moe", WITH_EXPERTS, **SIZES, **EXPERTS)
QWEN3_NEXT = Family("qwen3_next", "qwen3_next", WITH_EXPERTS, **SIZES, **EXPERTS)
FAMILIES = [QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT]


@pytest.fixture(params=FAMILIES, ids=repr)
def family(request):
    return request.param


class Test_Qwen3_5(Parity):
    decoding_ops = {"recurrent_gated_delta_rule", "causal_conv1d_update", "fmha_decode"}
    changed = ("rope", "rms_norm_gated", "causal_conv1d", "gated_delta_rule", "sigmoid_mul")

    def modeling(self, family):
        return importlib.import_module(f"transformers.models.{family.name}.modeling_{family.name}")

    def change(self, modeling, monkeypatch):
        """Everything of these models' own gives half of what it gave."""

        def half(name):
            former = getattr(modeling, name)

            def halved(*args, **kwargs):
                got = former(*args, **kwargs)
                return tuple(x / 2 for x in got) if isinstance(got, tuple) else got / 2

            monkeypatch.setattr(modeling, name, halved)

        for name in ("apply_rotary_pos_emb", "causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
            half(name)
        norm = next(c for n, c in vars(modeling).items() if n.endswith("RMSNormGated") and c is not None)
        former = norm.forward
        monkeypatch.setattr(norm, "forward", lambda self, x, gate: former(self, x, gate) / 2)
        gated = next(c for n, c in vars(modeling).items() if n.endswith("Attention") and "Vision" not in n)
        attend = gated.forward

        def halved_attention(self, *args, **kwargs):
            out, weights = attend(self, *args, **kwargs)
            return out / 2, weights

        monkeypatch.setattr(gated, "forward", halved_attention)

    @pytest.mark.parametrize("family", some(FAMILIES, QWEN3_NEXT), ids=repr)
    def test_cutile_in_the_interpreter(self, family, monkeypatch):
        super().test_cutile_in_the_interpreter(family, monkeypatch)


def test_one_token_reads_and_writes_the_states_of_the_cache(family):
    """Decoding takes the recurrent forms, and the states behind it are those of the unpatched model."""
    ids, states = tokens(2, 6), []
    for patched in (False, True):
        model = make(family)
        if patched:
            monkey_patch.apply(model, use_cutile=False)
        with torch.no_grad(), observed() as calls:
            cache = model(ids[:, :5], use_cache=True).past_key_values
            model(ids[:, 5:], past_key_values=cache)
        layer = cache.layers[0]
        states.append((layer.conv_states[0], layer.recurrent_states[0]))
    for got, expected in zip(states[1], states[0], strict=True):
        assert got.abs().max() > 0
        assert_close(got, expected)
    assert {"recurrent_gated_delta_rule", "causal_conv1d_update"} <= {op for op, _ in calls}


@backends
def test_one_sequence_decodes_by_fused_steps(family, backend):
    """Padded or not; and what somebody listens to is called."""
    model, (ids, mask) = make(family), padded([5, 11], "left")
    prompts = (ids[:1], mask[:1]), (ids[1:], mask[1:])
    options = dict(max_new_tokens=9, do_sample=False)
    expected = [model.generate(i, attention_mask=m, **options) for i, m in prompts]
    linear = family is not QWEN3_NEXT  # of whose linear attention the projections are others
    with decode_graph.eager_steps("cpu"), monkey_patch.apply(model, use_cutile=backend == "cutile") as report:
        assert len([e for e in report.patched if e.compute == "decode_step"]) == 1 + linear
        for (i, m), wanted in zip(prompts, expected, strict=True):
            with observed() as calls:
                assert torch.equal(model.generate(i, attention_mask=m, **options), wanted)
            ops = {op for op, _ in calls}
            attends = {"rope_fmha_decode"} if m.all() else {"rope_and_cache", "fmha_decode"}
            assert ops >= {"rms_norm_linear", *attends, "sigmoid_mul", "linear_add"}
            assert ("gated_delta_step" in ops) == linear and ("recurrent_gated_delta_rule" in ops) == (not linear)
        layers = model.model.layers
        for part in (layers[0].linear_attn.conv1d, layers[0].linear_attn.norm, layers[1].self_attn.q_norm):
            handle = part.register_forward_hook(lambda module, args, out: 0 * out)
            assert (decode_layer.misfit(layers[0]) != "") == (part is not layers[1].self_attn.q_norm or not linear)
            assert (decode_layer.misfit(layers[1]) != "") == (part is layers[1].self_attn.q_norm)
            handle.remove()


def test_three_positions_alike_take_rows_of_the_rotary_embedding(monkeypatch):
    model, cls = make(QWEN3_5), modeling_qwen3_5.Qwen3_5TextRotaryEmbedding
    counts, former = [], cls.forward

    def forward(self, x, position_ids):
        out = former(self, x, position_ids)
        counts.append(position_ids.shape[-1])
        return out

    options = dict(max_new_tokens=9, do_sample=False)
    expected = model.generate(tokens(1, 7), **options)
    monkeypatch.setattr(cls, "forward", forward)
    with decode_graph.eager_steps("cpu"), monkey_patch.apply(model, use_cutile=False):
        counts.clear()
        assert torch.equal(model.generate(tokens(1, 7), **options), expected)
        # The prompt; what is tried: the ends, all, the first one alone and as three; the rows. No step computes any.
        assert counts == [7, 1, 1, 8, 1, 1, 8]


def test_packed_sequences_are_kept_apart():
    """Two sequences in a row of tokens give what they give in rows of their own."""
    model, a, b = make(QWEN3_5), tokens(1, 7), tokens(1, 5, seed=1)
    layer = model.model.layers[0].linear_attn
    x, y = (model.model.embed_tokens(ids) for ids in (a, b))
    starts = torch.tensor([0, 7, 12], dtype=torch.int32, device=a.device)
    numbers = torch.tensor([[0] * 7 + [1] * 5], dtype=torch.int32, device=a.device)
    with monkey_patch.apply(model, use_cutile=False), torch.no_grad():
        together = layer(torch.cat((x, y), 1), cu_seq_lens_q=starts, seq_idx=numbers)
        assert_close(together, torch.cat((layer(x), layer(y)), 1))


def test_another_activation_of_the_convolution_is_refused():
    model = make(QWEN3_5, hidden_act="gelu")
    expected = logits(model)
    with monkey_patch.apply(model, use_cutile=False) as report:
        why = {e.compute: e.why for e in report.skipped}
        assert "gelu" in why["causal_conv1d"] and "swiglu" in why
        patched = {op for compute, ops in DENSE.items() if compute not in why for op in ops}
        assert ops_called(model) == patched | {"linear"}
        assert_close(logits(model), expected)


def test_a_forward_behind_a_decorator_that_does_not_say_so(monkeypatch):
    """As transformers 5.15 has it around the linear attention."""

    def decorator(forward_func):
        def wrapped(self, *args, **kwargs):
            return forward_func(self, *args, **kwargs)

        return wrapped

    cls = modeling_qwen3_5.Qwen3_5GatedDeltaNet
    monkeypatch.setattr(cls, "forward", decorator(unwrapped(cls.forward)))
    model = make(QWEN3_5)
    expected = logits(model)
    with monkey_patch.apply(model, use_cutile=False) as report:
        assert {"causal_conv1d", "gated_delta_rule"} <= {e.compute for e in report.patched}
        assert ops_called(model) >= {"causal_conv1d_fn", "chunk_gated_delta_rule"}
        assert_close(logits(model), expected)

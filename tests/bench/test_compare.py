import copy
import json

import pytest
import torch
from bench.tiny import tiny_batches
from bench.tiny import tiny_model

from tilegym.bench import compare
from tilegym.bench import generate
from tilegym.bench.prompts import Batch
from tilegym.errors import ModelError
from tilegym.transformers.cache_name import CACHE

LENGTH = 8


def judge(model, batches, patch):
    """Runs ``model`` as it is and with ``patch``, a function that changes it and returns one that undoes that."""
    unpatched = generate.run_once(model, batches, LENGTH).tokens
    undo = patch(model)
    patched = generate.run_once(model, batches, LENGTH).tokens
    logits = compare.collect_logits(model, batches, unpatched, LENGTH)
    undo()
    return compare.compare(model, batches, unpatched, patched, logits)


def unchanged(model):
    return lambda: None


def fused_mlp(model):
    """An honest rewrite of the activation, whose roundings fall elsewhere than PyTorch's."""

    def forward(self, x):
        gate, up = self.gate_proj(x).float(), self.up_proj(x).float()
        return self.down_proj((gate / (1 + torch.exp2(-1.4426950408889634 * gate)) * up).to(x.dtype))

    kind = type(model.model.layers[0].mlp)
    original, kind.forward = kind.forward, forward
    return lambda: setattr(kind, "forward", original)


def norm_of_other_eps(model):
    model.model.norm.variance_epsilon, before = 0.05, model.model.norm.variance_epsilon
    return lambda: setattr(model.model.norm, "variance_epsilon", before)


def nan_in_one_logit(model):
    def spoil(module, inputs, output):
        output[0, -1, 7] = torch.nan

    return model.lm_head.register_forward_hook(spoil).remove


def blind_to_the_cache(model):
    """Wrong in decoding only: every step sees its own token and nothing before it."""

    def forget(module, args, kwargs):
        if kwargs.get(CACHE) is not None and kwargs["hidden_states"].shape[1] == 1:
            kwargs["position_embeddings"] = tuple(torch.zeros_like(x) for x in kwargs["position_embeddings"])
        return args, kwargs

    handles = [layer.self_attn.register_forward_pre_hook(forget, with_kwargs=True) for layer in model.model.layers]
    return lambda: [handle.remove() for handle in handles]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("patch", [unchanged, fused_mlp])
def test_honest_patches_pass(patch, dtype):
    result = judge(tiny_model(dtype), tiny_batches(), patch)
    assert result.passed, result.reason
    assert result.oracle == ("float64" if dtype == torch.float32 else "float32")
    assert result.patched_max_error <= 2 * result.unpatched_max_error + torch.finfo(dtype).eps * result.max_logit
    assert (result.max_logit_difference > 0) == (patch is fused_mlp)
    if patch is unchanged:
        assert result.token_agreement == result.choice_agreement == 1.0
        assert result.first_difference is None
        assert result.max_logit_difference == 0.0
        assert result.sequences_equal == result.sequences == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("patch", [norm_of_other_eps, nan_in_one_logit, blind_to_the_cache])
def test_wrong_patches_fail(patch, dtype):
    result = judge(tiny_model(dtype), tiny_batches(), patch)
    assert not result.passed
    assert "off by" in result.reason
    assert result.max_logit_difference > 0
    json.dumps(result.summary(), allow_nan=False)
    if patch is nan_in_one_logit:
        assert result.summary()["patched_max_error"] == "inf"


def test_a_model_whose_own_logits_overflow_is_compared_with_nothing():
    """However wrong a patched model's are, they are no further from the oracle than NaN is."""
    model = tiny_model(torch.float16)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight *= 1e4
        model.model.layers[0].mlp.down_proj.weight *= 1e4
    with pytest.raises(ModelError, match="logits are not finite in float16.*take a --precision of more range"):
        judge(model, tiny_batches(), unchanged)


@pytest.mark.parametrize("patch", [unchanged, norm_of_other_eps])
def test_tokens_that_a_model_never_gives_do_not_count(patch):
    model = tiny_model()

    def never(module, inputs, output):
        return output.masked_fill(torch.arange(300, device=output.device) % 2 == 0, -torch.inf)

    model.lm_head.register_forward_hook(never)
    result = judge(model, tiny_batches(), patch)
    assert result.passed == (patch is unchanged), result.reason
    assert result.unpatched_max_error < 1e-3 and result.max_logit < 1e3


def test_tokens_that_differ_without_a_tie_fail_although_the_logits_agree():
    model, batches = tiny_model(), tiny_batches()
    tokens = generate.run_once(model, batches, LENGTH).tokens
    logits = compare.collect_logits(model, batches, tokens, LENGTH)
    other = [rows.clone() for rows in tokens]
    other[0][1, 3] = (other[0][1, 3] + 1) % 300
    result = compare.compare(model, batches, tokens, other, logits)
    assert not result.passed
    assert "step 4" in result.reason
    assert result.token_agreement == pytest.approx(23 / 24)
    assert (result.sequences_equal, result.sequences, result.first_difference) == (2, 3, 3)
    assert result.choice_agreement == 1.0
    logits[0][0, 2] *= -1  # of 24 steps, one that chooses another token
    assert compare.compare(model, batches, tokens, tokens, logits).choice_agreement == pytest.approx(23 / 24)


def test_tokens_may_differ_where_the_logits_tie():
    model, batches = tiny_model(), tiny_batches()
    with torch.no_grad():
        model.lm_head.weight[151:] = model.lm_head.weight[:149]  # every token has a twin
    tokens = generate.run_once(model, batches, LENGTH).tokens
    logits = compare.collect_logits(model, batches, tokens, LENGTH)
    other = [rows.clone() for rows in tokens]
    step = (tokens[0][1] < 149).nonzero()[0].item()
    other[0][1, step:] += 151
    other[0][1, step + 1 :] %= 300
    result = compare.compare(model, batches, tokens, other, logits)
    assert result.passed, result.reason
    assert result.token_agreement < 1


def test_kept_logits_stay_within_the_budget(monkeypatch):
    batches = tiny_batches()
    assert compare.compared_steps(batches, 8, 300, torch.bfloat16) == 8
    monkeypatch.setattr(compare, "_LOGIT_BUDGET", 3 * 300 * 2 * 5)
    assert compare.compared_steps(batches, 8, 300, torch.bfloat16) == 5
    assert compare.compared_steps(batches, 8, 10**9, torch.bfloat16) == 1


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_oracle_is_the_same_model_in_a_wider_precision(dtype, at_once):
    model, batch = tiny_model(dtype), tiny_batches()[0]
    before = copy.deepcopy(model.state_dict())
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    with compare.widened(model, at_once) as wide:
        logits = generate.forward_logits(model, batch, tokens)
    assert logits.dtype == wide
    assert torch.equal(logits, generate.forward_logits(copy.deepcopy(model).to(wide), batch, tokens))
    for name, weight in model.state_dict().items():
        assert weight.dtype == dtype
        assert torch.equal(weight, before[name])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_oracle_of_a_model_that_reads_the_weights_of_its_parts():
    """Mamba's mixer multiplies by ``self.dt_proj.weight``, and its head casts to what ``lm_head`` holds."""
    from transformers import MambaConfig
    from transformers import MambaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2}
    model = MambaForCausalLM(MambaConfig(**sizes)).to(torch.bfloat16).eval()
    ids = torch.arange(6)[None]
    wide, (logits,) = compare._oracle(model, [Batch(ids, torch.ones_like(ids))], [ids[:, :3]])
    assert wide == torch.float32 and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    expected = copy.deepcopy(model).float()(torch.cat([ids, ids[:, :2]], dim=1), use_cache=False).logits[:, -3:]
    torch.testing.assert_close(logits, expected)


class Tied(torch.nn.Module):
    """A module that holds a parameter of the one inside of it too, as BERT's output layer does its bias."""

    dtype = torch.bfloat16

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 3, dtype=torch.bfloat16)
        self.bias = self.inner.bias

    def forward(self, x):
        return self.inner(x) + self.bias


def test_parameters_of_two_modules_are_widened_once_and_put_back():
    model = Tied()
    with compare.widened(model) as wide:
        for _ in range(2):
            assert model(torch.ones(1, 3, dtype=wide)).dtype is wide
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_the_weights_come_back_if_the_oracle_fails():
    model = tiny_model(torch.bfloat16)
    with pytest.raises(RuntimeError), compare.widened(model):
        model.model.norm(torch.zeros(2, 7))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def mixture(kind):
    """A small model with experts, and a batch of two sequences with tokens to follow."""
    from transformers import AutoModelForCausalLM
    from transformers import DeepseekV2Config
    from transformers import GptOssConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "gpt_oss":
        config = GptOssConfig(**sizes, intermediate_size=32, num_local_experts=8, num_key_value_heads=2, head_dim=16)
    else:
        config = DeepseekV2Config(
            **sizes, intermediate_size=48, moe_intermediate_size=16, n_routed_experts=8, n_shared_experts=1,
            num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=16,
            qk_rope_head_dim=8, v_head_dim=16, n_group=1, topk_group=1, num_key_value_heads=2,
        )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.randint(1, 64, (2, 6))
    return model, Batch(ids, torch.ones_like(ids)), ids[:, :4]


@pytest.mark.parametrize("kind", ["deepseek_v2", "gpt_oss"])
def test_the_oracle_of_experts_in_float64_widens_a_module_at_a_time(kind, monkeypatch):
    model, batch, tokens = mixture(kind)
    before = model.config._experts_implementation
    most, all_weights = [0], sum(p.numel() for p in model.parameters())
    of_a_module = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    forward = torch.nn.functional.linear

    def linear(*args, **kwargs):
        most.append(sum(p.numel() for p in model.parameters() if p.dtype == torch.float64))
        return forward(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    wide, (logits,) = compare._oracle(model, [batch], [tokens])
    monkeypatch.undo()
    assert wide == torch.float64 and 0 < max(most) <= of_a_module < all_weights / 2
    assert model.config._experts_implementation == before and {p.dtype for p in model.parameters()} == {torch.float32}
    with compare.experts_in_turn(model):
        assert torch.equal(logits, generate.forward_logits(copy.deepcopy(model).double(), batch, tokens))


def test_the_oracle_takes_a_sequence_at_a_time_where_memory_is_short(monkeypatch):
    model, (batch, _) = tiny_model(), tiny_batches()
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    _, (expected,) = compare._oracle(model, [batch], [tokens])
    forward_logits, sizes = generate.forward_logits, []

    def with_little_memory(model, batch, tokens):
        sizes.append(batch.size)
        if batch.size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward_logits(model, batch, tokens)

    monkeypatch.setattr(generate, "forward_logits", with_little_memory)
    _, (logits,) = compare._oracle(model, [batch], [tokens])
    assert sizes == [2, 1, 1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


def test_an_oracle_without_enough_memory_says_so_in_a_sentence(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(generate, "forward_logits", fail)
    model, (batch, _) = tiny_model(), tiny_batches()
    with pytest.raises(ModelError, match="float64 .* leave out --compare$"):
        compare._oracle(model, [batch], [torch.tensor([[5, 6], [8, 9]])])

"""What holds for every family with parts of its own: tests to inherit, run for each value of the fixture ``family``."""

import copy
import pickle

import pytest
import torch
from common import HAS_GPU
from common import gpu
from tiny_models import assert_close
from tiny_models import backends
from tiny_models import observed
from tiny_models import padded
from tiny_models import tokens
from transformers import AutoConfig
from transformers import AutoModelForCausalLM
from transformers import DynamicCache
from transformers import StaticCache

from tilegym.errors import PatchError
from tilegym.transformers import decode_graph
from tilegym.transformers import monkey_patch
from tilegym.transformers.patching import ALREADY_PATCHED
from tilegym.transformers.patching import PatchSet

COMMON = dict(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)


def make(family, dtype=torch.float32, **options):
    """A random model in eval mode, the same every time."""
    options = {"attn_implementation": "sdpa", **COMMON, **family.config, **options}
    attention = options.pop("attn_implementation")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family.model_type, **options), attn_implementation=attention
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval().to("cuda" if HAS_GPU else "cpu", dtype)


def logits(model, ids=None, mask=None):
    with torch.no_grad():
        return model(tokens(2, 11) if ids is None else ids, attention_mask=mask).logits


def ops_called(model):
    with observed() as calls:
        logits(model)
    return {op for op, _ in calls}


def gradients(model):
    model.train()
    ids, mask = padded([9, 6], "right")
    model.zero_grad()
    model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Family:
    """A family under test: its model type, the sizes of its own, and the ops of a prompt by compute."""

    def __init__(self, model_type, name, computes, **config):
        self.model_type, self.name, self.computes, self.config = model_type, name, computes, config

    def __repr__(self):
        return self.name

    def apply(self, **options):
        return getattr(monkey_patch, f"apply_tilegym_kernel_to_{self.name}")(**options)


class Parity:
    decoding_ops: set[str]

    @pytest.fixture(autouse=True)
    def nothing_stays_patched(self):
        yield
        leftover = PatchSet.active()
        monkey_patch.revert()
        assert not leftover

    @backends
    def test_logits(self, family, backend):
        model = make(family)
        ids, mask = padded([13, 8], "left")
        expected = logits(model), logits(model, ids, mask)[mask.bool()]
        with monkey_patch.apply(model, use_cutile=backend == "cutile"), observed() as calls:
            assert_close(logits(model), expected[0], backend)
            assert_close(logits(model, ids, mask)[mask.bool()], expected[1], backend)
        assert {op for op, _ in calls} == {op for ops in family.computes.values() for op in ops} | {"linear"}
        assert {served for _, served in calls} == {backend}

    @backends
    def test_bf16_is_as_exact_as_the_unpatched_model(self, family, backend):
        exact, model = logits(make(family)), make(family, torch.bfloat16)
        own_error = (logits(model).float() - exact).abs()
        with monkey_patch.apply(model, use_cutile=backend == "cutile"):
            error = (logits(model).float() - exact).abs()
        # Rounding that sends a token to another expert makes the maximum and the mean meaningless.
        assert error.median() <= 1.5 * own_error.median()

    def test_a_checkpoint_in_16_bits(self, family, tmp_path):
        """Some weights of it transformers keeps in fp32, as those of routers; a model of a config has them in bf16."""
        made = make(family, torch.bfloat16)
        made.save_pretrained(tmp_path)
        model, wide = (
            type(made).from_pretrained(tmp_path, dtype=dtype).to(made.device)
            for dtype in (torch.bfloat16, torch.float32)
        )
        exact, ids = logits(wide), tokens(2, 7)
        own_error = (logits(model).float() - exact).abs()
        with monkey_patch.apply(model, use_cutile=HAS_GPU), decode_graph.eager_steps("cpu"):
            error = (logits(model).float() - exact).abs()
            for prompts in (ids[:1], ids):
                assert model.generate(prompts, max_new_tokens=3, min_new_tokens=3).shape == (len(prompts), 10)
        assert error.median() <= 1.5 * own_error.median()

    @backends
    def test_tokens_of_a_padded_batch(self, family, backend):
        model = make(family)
        ids, mask = padded([9, 4], "left")
        options = dict(attention_mask=mask, max_new_tokens=6, do_sample=False)
        expected = model.generate(ids, **options)
        with monkey_patch.apply(model, use_cutile=backend == "cutile"), observed() as calls:
            assert torch.equal(model.generate(ids, **options), expected)
        assert {op for op, _ in calls} >= self.decoding_ops

    @pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
    def test_cached_decoding_equals_the_full_forward(self, family, static):
        """A prompt, a second piece of several tokens, then single ones, in transformers' own caches."""
        model, ids = make(family), tokens(2, 12)
        with monkey_patch.apply(model, use_cutile=False), torch.no_grad():
            expected = logits(model, ids)
            cache = StaticCache(config=model.config, max_cache_len=16) if static else DynamicCache(config=model.config)
            got, done = [], 0
            for count in (5, 4, 1, 1, 1):
                positions = torch.arange(done, done + count, device=ids.device)[None]
                piece = ids[:, done : done + count]
                got.append(model(piece, past_key_values=cache, position_ids=positions, use_cache=True).logits)
                done += count
            assert_close(torch.cat(got, 1), expected)

    @backends
    def test_gradients_of_a_training_step(self, family, backend):
        model = make(family)
        expected = gradients(model)
        with monkey_patch.apply(model, use_cutile=backend == "cutile"), observed() as calls:
            got = gradients(model)
        assert got.keys() == expected.keys() and len(calls) > 5
        for name, gradient in expected.items():
            assert gradient.abs().max() > 0, name
            # Sums over experts and over time; tf32 products on a GPU.
            tolerance = 0.05 if HAS_GPU and backend == "cutile" else 5e-4
            torch.testing.assert_close(got[name], gradient, rtol=0, atol=tolerance * gradient.abs().max().item())

    def test_one_of_two_models_and_revert(self, family):
        model, other = make(family), make(family)
        expected = logits(other)
        report = monkey_patch.apply(model, use_cutile=False)
        assert ops_called(model) and not ops_called(other)
        assert torch.equal(logits(other), expected)
        clone = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert ops_called(clone) == ops_called(model)
        assert_close(logits(clone), expected)
        again = monkey_patch.apply(model, use_cutile=False)
        assert not again.patched and {e.why for e in again.skipped} <= {ALREADY_PATCHED} | {
            e.why for e in report.skipped
        }
        report.revert()
        assert not ops_called(model) and torch.equal(logits(model), expected)
        assert all("forward" not in vars(module) for module in model.modules())

    def test_each_compute_alone(self, family):
        expected = logits(make(family))
        off = dict.fromkeys((*family.computes, "linear", "graph", "loss"), False)
        for compute, ops in family.computes.items():
            model = make(family)
            with family.apply(model=model, **{**off, compute: True}) as report:
                assert ops_called(model) == ops, compute
                assert {e.compute for e in report.patched} == {compute}
                assert_close(logits(model), expected)

    def test_computes_one_after_the_other(self, family):
        """Parts of one forward, put in by calls of their own, in another order, and taken out again."""
        model, off = make(family), dict.fromkeys((*family.computes, "linear", "graph", "loss"), False)
        expected, reports, ops = logits(model), [], set()
        for compute in reversed(family.computes):
            reports.append(family.apply(model=model, **{**off, compute: True}))
            ops |= family.computes[compute]
            assert ops_called(model) == ops, compute
        assert_close(logits(model), expected)
        for report in reports[::2] + reports[1::2]:
            report.revert()
        assert not ops_called(model) and torch.equal(logits(model), expected)

    def test_without_a_model_models_made_afterwards_are_patched(self, family):
        before = make(family)
        expected = logits(before)
        with family.apply() as report:
            model = make(family)
            assert ops_called(model) == {op for ops in family.computes.values() for op in ops}
            assert_close(logits(model), expected)
            assert {e.compute for e in report.patched} == {*family.computes, "loss"}
            again = family.apply()
            assert not again.patched
        assert not ops_called(make(family)) and torch.equal(logits(make(family)), expected)
        assert not ops_called(model) and not ops_called(before)

    def test_what_computes_something_else_is_refused(self, family, monkeypatch):
        model, modeling = make(family), self.modeling(family)
        self.change(modeling, monkeypatch)
        changed = set(self.changed)
        expected = logits(model)
        report = monkey_patch.apply(model, use_cutile=False)
        refused = {e.compute for e in report.skipped if "computes something else" in e.why}
        assert refused == changed
        assert_close(logits(model), expected)
        report.revert()
        only = {name: name in changed for name in (*family.computes, "linear", "graph", "loss")}
        if "attn" not in changed:
            with pytest.raises(PatchError, match="computes something else"):
                family.apply(model=model, **only)

    @pytest.mark.skipif(HAS_GPU, reason="on a GPU the other tests run the kernels themselves")
    def test_cutile_in_the_interpreter(self, family, monkeypatch):
        """A left-padded batch, two tokens, then every gradient: nothing may fall back."""
        monkeypatch.setenv("DISABLE_FALLBACK", "1")
        model = make(family)
        ids, mask = padded([7, 4], "left")
        options = dict(attention_mask=mask, max_new_tokens=2, do_sample=False)
        expected = model.generate(ids, **options), logits(model, ids, mask)[mask.bool()], gradients(model)
        model.eval()
        with monkey_patch.apply(model, use_cutile=True), observed() as calls:
            assert torch.equal(model.generate(ids, **options), expected[0])
            torch.testing.assert_close(
                logits(model, ids, mask)[mask.bool()], expected[1], rtol=0, atol=2e-4 * expected[1].abs().max().item()
            )
            got = gradients(model)
        for name, gradient in expected[2].items():
            torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-3 * gradient.abs().max().item())
        ops = {op for op, _ in calls}
        assert ops >= self.decoding_ops | {op for ops in family.computes.values() for op in ops}
        assert {served for _, served in calls} == {"cutile"}

    def test_steps_on_buffers_of_fixed_size(self, family, monkeypatch):
        """The loop and the cache of captured decoding, each step run anew; a session serves several prompts."""
        model, steps, step = make(family), [], decode_graph.Session.step
        monkeypatch.setattr(decode_graph.Session, "step", lambda *args: (steps.append(1), step(*args))[1])
        prompts = [padded([5, 11, 8], "left"), padded([9, 9, 9], "left"), padded([2, 3, 1], "left")]
        calls = [dict(input_ids=ids, attention_mask=m, max_new_tokens=6, do_sample=False) for ids, m in prompts]
        expected = [model.generate(**call) for call in calls]
        with decode_graph.eager_steps("cpu"), monkey_patch.apply(model, use_cutile=False) as report:
            assert "graph" in {e.compute for e in report.patched}
            for call, wanted in zip(calls, expected, strict=True):
                assert torch.equal(model.generate(**call), wanted)
        assert len(steps) == 3 * 5

    def test_what_a_step_changes_is_put_back_behind_its_trial(self, family):
        """Capturing runs a step before it counts: twice the same logits, if the state is what it was."""
        model, (ids, mask) = make(family), padded([7, 4], "left")
        with monkey_patch.apply(model, use_cutile=False), torch.no_grad():
            session = decode_graph.session_for(model, 2, 20)
            model(ids, attention_mask=mask, past_key_values=session.cache)
            session.start(mask, None, ids.shape[1])
            state = session.cache.state()
            values = [t.clone() for t in state]
            session.tokens.fill_(3)
            first = session.compute(model, True).clone()
            assert all(not torch.equal(t, v) for t, v in zip(state, values, strict=True))
            for tensor, value in zip(state, values, strict=True):
                tensor.copy_(value)
            assert torch.equal(session.compute(model, True), first)

    @gpu
    @pytest.mark.parametrize("backend", ["pytorch", "cutile"])
    def test_replays(self, family, backend):
        """One graph serves other prompts and lengths."""
        model = make(family)
        prompts = [padded([5, 11, 8], "left"), padded([3, 4, 9], "left"), (tokens(3, 17), None)]
        calls = [dict(input_ids=ids, attention_mask=m, max_new_tokens=9, do_sample=False) for ids, m in prompts]
        expected = [model.generate(**call) for call in calls]
        with monkey_patch.apply(model, use_cutile=backend == "cutile"):
            for call, wanted in zip(calls + calls, expected + expected, strict=True):
                assert torch.equal(model.generate(**call), wanted)
            assert decode_graph._NO_GRAPH not in decode_graph._sessions[model].graphs.values()

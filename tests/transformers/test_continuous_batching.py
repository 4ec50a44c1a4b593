"""Continuous batching of patched models, their attention included."""

import functools
import warnings

import pytest
import torch
from common import HAS_GPU
from common import some
from tiny_models import assert_close
from tiny_models import backends
from tiny_models import default_attention
from tiny_models import families
from tiny_models import make_model
from tiny_models import observed
from tiny_models import tokens
from transformers import GenerationConfig

import tilegym
from tilegym.errors import FallbackWarning
from tilegym.errors import UnsupportedError
from tilegym.ops import fmha_paged_decode
from tilegym.ops import fmha_varlen
from tilegym.transformers import continuous_batching
from tilegym.transformers import monkey_patch
from tilegym.transformers import paged_attention

config = pytest.importorskip("transformers.generation.configuration_utils")
pytestmark = pytest.mark.skipif(
    not hasattr(config, "ContinuousBatchingConfig"), reason="this transformers batches otherwise"
)

PAGE = "page_size" if hasattr(config.ContinuousBatchingConfig(), "page_size") else "block_size"
LENGTHS = 5, 11, 8  # the windows are 6
OURS = "tilegym"


def options(new_tokens=4, **more):
    return {
        "generation_config": GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        # No CUDA graphs, and no cache as large as the memory: what is left is what a patch can break.
        "continuous_batching_config": config.ContinuousBatchingConfig(
            **{"num_blocks": 16, "max_batch_tokens": 64, "use_cuda_graph": False} | more
        ),
    }


def outputs_of(model, **more):
    prompts = [tokens(1, length, seed=i)[0].tolist() for i, length in enumerate(LENGTHS)]
    outputs = model.generate_batch(inputs=prompts, warmup=False, **options(**more))
    assert len(outputs) == len(prompts)
    return [outputs[key] for key in sorted(outputs)]


def generate(model, **more):
    """The new tokens of three prompts."""
    return [output.generated_tokens for output in outputs_of(model, **more)]


def unpatched(family, **more):
    """A model, and what it generates; skips where transformers does not batch the family."""
    model = make_model(family)
    try:
        expected = generate(model, **more)
    except Exception as error:
        pytest.skip(f"transformers does not batch it: {error}")
    assert [len(row) for row in expected] == [more.get("new_tokens", 4)] * len(LENGTHS)
    return model, expected


@families
@backends
def test_a_patched_model_gives_the_same_tokens(family, backend):
    model, expected = unpatched(family)
    with monkey_patch.apply(model, use_cutile=backend == "cutile"):
        name = model.config._attn_implementation
        assert name.startswith(OURS)
        with observed() as calls:
            assert generate(model) == expected
        ops = {op for op, _ in calls}
        assert {"rms_norm", "fmha_varlen"} <= ops
        assert model.config._attn_implementation == name
    assert model.config._attn_implementation == default_attention(family)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_prompts_in_chunks(family):
    """A batch holds the end of one prompt, the beginning of another, and tokens of those that are done."""
    more = {"new_tokens": 9, "max_batch_tokens": 7}
    model, expected = unpatched(family, **more)
    for i, length in enumerate(LENGTHS):
        alone = model.generate(tokens(1, length, seed=i), max_new_tokens=9, do_sample=False)
        if alone[0, length:].tolist() != expected[i]:
            pytest.skip("this transformers batches it wrongly")
    more["return_logprobs"] = True
    before = outputs_of(model, **more)
    with monkey_patch.apply(model, use_cutile=False), observed() as calls:
        outputs = outputs_of(model, **more)
    assert "fmha_varlen" in {op for op, _ in calls}
    for got, wanted in zip(outputs, before, strict=True):
        assert got.generated_tokens == wanted.generated_tokens
        # A window that is one key too long shows here, though the most likely tokens may be the same.
        assert_close(torch.tensor(got.logprobs), torch.tensor(wanted.logprobs))


@pytest.mark.skipif(HAS_GPU, reason="on a GPU the other tests run the kernels themselves")
@pytest.mark.parametrize("family", some(["llama", "gemma3", "gpt_oss"], "gemma3", "gpt_oss"))
def test_in_the_interpreter(family, monkeypatch):
    """Attention alone, by its kernels."""
    monkeypatch.setenv("DISABLE_FALLBACK", "1")
    more = {"new_tokens": 3}
    model, expected = unpatched(family, **more)
    others = dict.fromkeys(("rope", "rms_norm", "swiglu", "geglu", "moe", "linear"), False)
    with monkey_patch.apply(model, use_cutile=True, **others), observed() as calls:
        assert generate(model, **more) == expected
    tables = {("fmha_paged_decode", "cutile")} if family == "llama" else set()  # transformers has none for windows
    assert calls == {("fmha_varlen", "cutile")} | tables


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padded_batches(family, monkeypatch):
    """As those of CUDA graphs and compiled code are: with tokens and requests that are none."""
    made = config.ContinuousBatchingConfig()
    if not hasattr(made, "varlen_compile_config"):
        pytest.skip("this transformers does not compile it")
    more = {
        "varlen_compile_config": config.CompileConfig(),
        "decode_compile_config": config.CompileConfig(),
        "q_padding_interval_size": 16,
        "kv_padding_interval_size": 64,
        "max_requests_per_batch": 8,
    }
    more = {name: value for name, value in more.items() if hasattr(made, name)}
    model, expected = unpatched(family)
    sizes = set()

    def spy(op, q, *args, **kwargs):
        sizes.add((op.__name__, q.shape[0]))
        return op(q, *args, **kwargs)

    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for op in (fmha_varlen, fmha_paged_decode):
        monkeypatch.setattr(paged_attention, op.__name__, functools.partial(spy, op))
    with monkey_patch.apply(model, use_cutile=False):
        assert generate(model, **more) == expected
    decoding = ("fmha_paged_decode", 4) if family == "llama" else ("fmha_varlen", 16)
    assert sizes == {("fmha_varlen", 32), decoding}


@pytest.mark.parametrize(
    "more, tables",
    [
        ({}, True),
        ({"max_blocks_per_request": 1, PAGE: 16}, True),  # for some tokens, then there are more keys
        ({PAGE: 32}, True),
        ({PAGE: 8}, False),  # the kernels read no such pages
        ({"max_blocks_per_request": 0}, False),
    ],
)
def test_block_tables(more, tables):
    """Tokens beyond a page, and requests that end before others."""
    more = {"new_tokens": 30, "num_blocks": 64} | more
    model, expected = unpatched("llama", **more)
    with monkey_patch.apply(model, use_cutile=False), observed() as calls:
        assert generate(model, **more) == expected
    ops = {op for op, _ in calls}
    assert "fmha_varlen" in ops and ("fmha_paged_decode" in ops) == tables


def test_a_model_that_is_made_with_the_patch():
    with monkey_patch.apply_tilegym_kernel_to_llama(use_cutile=False):
        model = make_model("llama")
        with observed() as calls:
            got = generate(model)
        assert "fmha_varlen" in {op for op, _ in calls}
        assert model.config._attn_implementation == OURS
    assert got == generate(make_model("llama"))


def test_what_was_found_out():
    model, expected = unpatched("llama")
    with tilegym.apply(model, use_cutile=False), observed() as calls:
        assert model.config._attn_implementation.startswith(OURS)
        assert generate(model) == expected
    assert "fmha_varlen" in {op for op, _ in calls}


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_transformers_that_is_not_known_keeps_its_own_attention(family, monkeypatch):
    monkeypatch.setattr(continuous_batching, "name_in_batching", lambda name: None)
    model, expected = unpatched(family)
    with monkey_patch.apply(model, use_cutile=False), observed() as calls:
        with pytest.warns(FallbackWarning, match="attention is transformers' "):
            assert generate(model) == expected
        assert model.config._attn_implementation == OURS
    ops = {op for op, _ in calls}
    assert "rms_norm" in ops and "fmha_varlen" not in ops


def test_models_without_our_attention_are_left_alone():
    model, expected = unpatched("llama")
    with monkey_patch.apply(model, use_cutile=False, use_attn=False), warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        assert generate(model) == expected


@pytest.mark.filterwarnings("ignore::tilegym.errors.FallbackWarning")
class Test_Managers:
    @pytest.mark.parametrize("first", [0, 1])
    def test_of_two_backends_one_is_reverted(self, first):
        model, expected = unpatched("llama")
        sets = [monkey_patch.apply(model, use_cutile=cutile, linear=False) for cutile in (False, True)]
        sets[first].revert()
        name = model.config._attn_implementation
        assert name.startswith(OURS)
        if first:  # without a GPU the other one is the interpreter's, and slow
            assert generate(model) == expected
        manager = model.init_continuous_batching(**options())
        assert name in model.config._attn_implementation  # or with the prefix that older ones ask for
        manager.stop()
        assert model.config._attn_implementation == name
        sets[1 - first].revert()
        assert model.config._attn_implementation == "sdpa" and "init_continuous_batching" not in vars(model)

    def test_reverted_before_it_stops(self):
        model, expected = unpatched("llama")
        report = monkey_patch.apply(model, use_cutile=False)
        manager = model.init_continuous_batching(**options())
        manager.start()
        report.revert()
        assert not manager.is_running()  # it makes no masks, which transformers' attention needs
        manager.stop()
        assert model.config._attn_implementation == "sdpa" and "init_continuous_batching" not in vars(model)
        assert generate(model) == expected

    def test_kept_for_the_next_session(self):
        model, expected = unpatched("llama")
        with monkey_patch.apply(model, use_cutile=False):
            for _ in range(2):
                assert self.first(model) == expected[0]
                assert model.config._attn_implementation == OURS
            model.destroy_cached_continuous_batching_manager()

    def test_kept_beyond_the_patch(self):
        """One that made no masks is not asked again, one that makes them may be."""
        model, expected = unpatched("llama")
        with monkey_patch.apply(model, use_cutile=False):
            assert self.first(model) == expected[0]
        assert self.first(model) == expected[0]
        with monkey_patch.apply(model, use_cutile=False):
            assert self.first(model) == expected[0]
        assert self.first(model) == expected[0]
        model.destroy_cached_continuous_batching_manager()

    def first(self, model):
        """What it generates for the first prompt, by a manager that it keeps."""
        prompts = [tokens(1, LENGTHS[0])[0].tolist()]
        out = model.generate_batch(inputs=prompts, warmup=False, persistent_manager=True, **options())
        return next(iter(out.values())).generated_tokens

    def test_the_callers_options_are_left_alone(self):
        model, given = make_model("llama"), options()["continuous_batching_config"]
        before = getattr(given, "auto_switch_to_flash", None)
        with monkey_patch.apply(model, use_cutile=False):
            model.init_continuous_batching(continuous_batching_config=given).stop()
        assert getattr(given, "auto_switch_to_flash", None) == before

    def test_generate_beside_it(self):
        """Where transformers lets it: with older ones the attention serves batches alone, and says so."""
        model = make_model("llama")
        ids = torch.tensor([[1, 2, 3], [0, 4, 5]], device=model.device)
        beside = dict(attention_mask=(ids != 0).long(), max_new_tokens=3, do_sample=False)
        expected = model.generate(ids, **beside)
        with monkey_patch.apply(model, use_cutile=False):
            manager = model.init_continuous_batching(**options())
            if model.config._attn_implementation == OURS:
                assert torch.equal(model.generate(ids, **beside), expected)
            else:
                with pytest.raises(UnsupportedError, match="batching continuously"):
                    model.generate(ids, **beside)
            manager.stop()
            assert torch.equal(model.generate(ids, **beside), expected)

    def test_what_transformers_refuses(self):
        model = make_model("llama")
        with monkey_patch.apply(model, use_cutile=False):
            with pytest.raises(AttributeError):
                model.init_continuous_batching(continuous_batching_config="none")
            assert model.config._attn_implementation == OURS
            ids = torch.tensor([[1, 2, 3]], device=model.device)
            assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 5)

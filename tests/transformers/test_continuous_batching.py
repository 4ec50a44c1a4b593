"""Continuous batching of patched models: their attention is transformers' own meanwhile, all else stays."""

import warnings

import pytest
import torch
from tiny_models import backends
from tiny_models import default_attention
from tiny_models import families
from tiny_models import make_model
from tiny_models import observed
from tiny_models import tokens
from transformers import GenerationConfig

import tilegym
from tilegym.errors import FallbackWarning
from tilegym.transformers import monkey_patch

config = pytest.importorskip("transformers.generation.configuration_utils")
pytestmark = pytest.mark.skipif(
    not hasattr(config, "ContinuousBatchingConfig"), reason="this transformers batches otherwise"
)

LENGTHS = 5, 11, 8  # the windows are 6
OURS = "tilegym"


def options():
    return {
        "generation_config": GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0),
        # No CUDA graphs, and no cache as large as the memory: what is left is what a patch can break.
        "continuous_batching_config": config.ContinuousBatchingConfig(
            num_blocks=16, max_batch_tokens=64, use_cuda_graph=False
        ),
    }


def generate(model):
    """The new tokens of three prompts."""
    prompts = [tokens(1, length, seed=i)[0].tolist() for i, length in enumerate(LENGTHS)]
    outputs = model.generate_batch(inputs=prompts, warmup=False, **options())
    assert len(outputs) == len(prompts)
    return [outputs[key].generated_tokens for key in sorted(outputs)]


def unpatched(family):
    """A model, and what it generates; skips where transformers does not batch the family."""
    model = make_model(family)
    try:
        expected = generate(model)
    except Exception as error:
        pytest.skip(f"transformers does not batch it: {error}")
    assert [len(row) for row in expected] == [4, 4, 4]
    return model, expected


@families
@backends
def test_a_patched_model_gives_the_same_tokens(family, backend):
    model, expected = unpatched(family)
    with monkey_patch.apply(model, use_cutile=backend == "cutile"):
        name = model.config._attn_implementation
        assert name.startswith(OURS)
        with observed() as calls, pytest.warns(FallbackWarning, match="attention is transformers' "):
            assert generate(model) == expected
        ops = {op for op, _ in calls}
        assert "rms_norm" in ops and not ops & {"fmha", "fmha_decode"}
        assert model.config._attn_implementation == name
    assert model.config._attn_implementation == default_attention(family)


def test_a_model_that_is_made_with_the_patch():
    with monkey_patch.apply_tilegym_kernel_to_llama(use_cutile=False):
        model = make_model("llama")
        with pytest.warns(FallbackWarning):
            got = generate(model)
        assert model.config._attn_implementation == OURS
    assert got == generate(make_model("llama"))


def test_what_was_found_out():
    model, expected = unpatched("llama")
    with tilegym.apply(model, use_cutile=False), pytest.warns(FallbackWarning):
        assert model.config._attn_implementation.startswith(OURS)
        assert generate(model) == expected


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
        assert model.config._attn_implementation != name
        manager.stop()
        assert model.config._attn_implementation == name
        sets[1 - first].revert()
        assert model.config._attn_implementation == "sdpa" and "init_continuous_batching" not in vars(model)

    def test_reverted_before_it_stops(self):
        model = make_model("llama")
        report = monkey_patch.apply(model, use_cutile=False)
        manager = model.init_continuous_batching(**options())
        manager.start()
        report.revert()
        manager.stop()
        assert model.config._attn_implementation == "sdpa" and "init_continuous_batching" not in vars(model)

    def test_kept_for_the_next_session(self):
        model, expected = unpatched("llama")
        with monkey_patch.apply(model, use_cutile=False):
            for _ in range(2):
                prompts = [tokens(1, LENGTHS[0])[0].tolist()]
                out = model.generate_batch(inputs=prompts, warmup=False, persistent_manager=True, **options())
                assert [o.generated_tokens for o in out.values()] == expected[:1]
                assert model.config._attn_implementation == OURS
            model.destroy_cached_continuous_batching_manager()

    def test_what_transformers_refuses(self):
        model = make_model("llama")
        with monkey_patch.apply(model, use_cutile=False):
            with pytest.raises(AttributeError):
                model.init_continuous_batching(continuous_batching_config="none")
            assert model.config._attn_implementation == OURS
            ids = torch.tensor([[1, 2, 3]], device=model.device)
            assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 5)

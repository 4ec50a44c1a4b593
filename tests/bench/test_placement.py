"""Models over several GPUs: which of them has which layers, and what is said where that cannot be."""

import pytest
import torch
from common import gpu
from transformers import AutoConfig
from transformers import AutoModelForCausalLM

from tilegym.bench import job
from tilegym.bench import models
from tilegym.bench import placement
from tilegym.errors import ModelError

pytest.importorskip("accelerate")
CPU = torch.device("cpu")
TWO = [torch.device("cuda", 0), torch.device("cuda", 1)]
SIZES = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=300, pad_token_id=0,
)  # fmt: skip
FAMILIES = {
    "llama": {},
    "gemma3_text": {},
    "gpt_oss": dict(num_local_experts=4),
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
}


def config_of(family: str):
    return AutoConfig.for_model(family, **SIZES, **FAMILIES[family])


def on_meta(family: str):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [2, 3])
def test_each_has_as_much(family, count):
    """Up to a layer or an embedding, and layers are in their order and in one piece."""
    model, devices = on_meta(family), [torch.device("cuda", i) for i in range(count)]
    places = placement.places_of(model, torch.float32, devices)
    layers = [places[f"model.layers.{i}"].index for i in range(8)]
    assert layers == sorted(layers) and set(layers) == set(range(count))
    held = [0] * count
    for path, device in places.items():
        held[device.index] += sum(p.numel() for p in model.get_submodule(path).parameters())
    largest = max(sum(p.numel() for p in model.get_submodule(path).parameters()) for path in places)
    assert max(held) - min(held) <= 3 * largest
    assert {name.rsplit(".", 1)[0] for name, _ in model.named_parameters()} <= {
        name
        for path in places
        for name in (path, *(f"{path}.{n}" for n, _ in model.get_submodule(path).named_modules()))
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_class(family):
    """Drawn anew, with the spread of its own; norms and tables of angles as its constructor makes them."""
    model = on_meta(family)
    expected = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    places = dict.fromkeys(placement.places_of(model, torch.float32, TWO), CPU)
    found = placement.filled(model, places)
    for (name, a), (_, b) in zip(found.named_buffers(), expected.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    for (name, a), (_, b) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        assert a.dtype == b.dtype and a.device == CPU
        if b.numel() > 500:
            assert 0.8 * b.std() <= a.std() <= 1.25 * b.std(), name
        elif (b == b.view(-1)[0]).all():
            assert torch.equal(a, b), name
    head, embeddings = found.get_output_embeddings().weight, found.get_input_embeddings().weight
    assert (head is embeddings) == bool(model.config.tie_word_embeddings)
    assert torch.isfinite(found(torch.arange(7)[None]).logits).all()


def test_too_few_gpus_are_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="--gpus 2: this machine has no GPU to use; leave it out"):
        job.Options(model_id="llama-3.1-8b", random_weights=True, gpus=2).check()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    job.Options(model_id="llama-3.1-8b", random_weights=True, gpus=2).check()
    with pytest.raises(ModelError, match="--gpus 3: this machine has 2 GPUs to use; take --gpus 2"):
        job.Options(model_id="llama-3.1-8b", random_weights=True, gpus=3).check()
    flags = dict(use_tilegym=True, use_cutile=True, interpret=True)
    with pytest.raises(ModelError, match="--interpret runs on the CPU: leave out --gpus"):
        job.Options(model_id="llama-3.1-8b", random_weights=True, gpus=2, **flags).check()
    monkeypatch.setattr(placement.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="--gpus 2 needs accelerate: pip install accelerate"):
        job.Options(model_id="llama-3.1-8b", random_weights=True, gpus=2).check()


def test_what_more_gpus_have_room_for_is_said(monkeypatch):
    monkeypatch.setattr(placement, "free_memory", lambda device: 10 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = models.load_config("llama-3.1-8b", True)
    given = config, torch.bfloat16, torch.device("cuda")
    with pytest.raises(ModelError, match="15.0 GiB in bfloat16 and 10.0 GiB are free on cuda; .* or more --gpus"):
        models.check_memory(*given, gpus=1)
    with pytest.raises(ModelError, match="or a device with more memory"):  # of a command that does not spread
        models.check_memory(*given)
    models.check_memory(*given, gpus=2)
    monkeypatch.setattr(placement, "free_memory", lambda device: 6 * 2**30)
    with pytest.raises(ModelError, match="12.0 GiB are free on cuda:0 and cuda:1; .* a device with more memory"):
        models.check_memory(*given, gpus=2)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_over_two_gpus_is_compared(tmp_path):
    config_of("llama").save_pretrained(tmp_path)
    flags = dict(use_tilegym=True, use_cutile=True, use_attn=True, compare=True, report_kernel_coverage=True)
    options = job.Options(
        model_id=str(tmp_path), random_weights=True, gpus=2, precision="fp32", output_length=8, num_runs=1, **flags
    )
    result = job.run_job(options)
    assert result.comparison.passed, result.comparison.reason
    assert result.patched.peak_memory > 0 and result.coverage.share > 0.5
    assert result.summary()["device"].startswith("2 x ")

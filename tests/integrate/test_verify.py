"""Capturing calls, and telling right kernels from wrong ones on them."""

import dataclasses
import functools

import pytest
import torch
from common import some
from integration import small

from tilegym.bench.prompts import Batch
from tilegym.integrate import capture
from tilegym.integrate import verify
from tilegym.integrate.plan import make_plan
from tilegym.transformers.general import Place

BATCHES = {
    "prompt": Batch(torch.tensor([[5, 6, 7, 8]]), torch.ones(1, 4, dtype=torch.int64)),
    "padded batch": Batch(torch.tensor([[5, 6, 7, 8], [0, 0, 9, 4]]), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])),
}


def captured(family, dtype=torch.bfloat16):
    model = small(family, dtype)
    plan = make_plan(model, look_up=False)
    points = {i.key: (i.candidates[0].place, i.requirement.modules[0]) for i in plan.items if i.candidates}
    return model, points, capture.capture(model, points, BATCHES)


@pytest.mark.parametrize("family", some(["llama", "cohere", "gpt_oss"], "cohere"))
def test_every_kernel_passes_in_the_interpreter(family):
    model, points, calls = captured(family)
    for key, (place, path) in points.items():
        check = verify.verify(model, place, path, calls[key], "cutile")
        assert check.passed, f"{key}: {check.why}"
        assert check.errors and all(e.error <= e.allowed for e in check.errors)
    labels = [call.label for call in calls["rope"]]
    assert labels == ["prompt, prefill", "prompt, decode", "padded batch, prefill", "padded batch, decode"]
    assert [call.label for call in calls["loss"]] == ["training"]


@pytest.mark.parametrize(
    "key, wrong",
    [
        ("rms_norm", {"eps": 0.5}),
        ("rms_norm", {"offset": 1.0}),
        ("rope", {"style": "interleaved"}),
        ("swiglu", {"gate": "up_proj", "up": "gate_proj"}),
        ("swiglu", {"activation": "gelu"}),
        ("loss", {"shift": False}),
    ],
)
def test_a_wrong_kernel_is_found_out(key, wrong):
    model, points, calls = captured("llama")
    place, path = points[key]
    place = dataclasses.replace(place, options={**place.options, **wrong})
    check = verify.verify(model, place, path, calls[key], "pytorch")
    assert not check.passed and check.why.startswith(calls[key][0].label)


@functools.cache
def delta_rules():
    """Qwen3.5's delta rule in bf16, by chunks and by tokens: its state is in fp32."""
    model, points, calls = captured("qwen3_5_text")
    return model, {key: (*points[key], calls[key]) for key in ("gated_delta_rule", "gated_delta_rule_2")}


@pytest.mark.parametrize("key", ["gated_delta_rule", "gated_delta_rule_2"])
def test_a_state_in_fp32_is_no_more_exact_than_its_tokens(key):
    model, rules = delta_rules()
    check = verify.verify(model, *rules[key], "cutile")
    assert check.passed, check.why
    states = [e for e in check.errors if e.result == "output 1"]
    assert len(states) == 2 and all(e.allowed < 0.01 for e in states)


@pytest.mark.parametrize("key", ["gated_delta_rule", "gated_delta_rule_2"])
@pytest.mark.parametrize(
    "name, wrong",
    [
        ("use_qk_l2norm_in_kernel", lambda given: False),
        ("g", torch.zeros_like),
        ("beta", torch.ones_like),
        ("g", lambda given: 0.98 * given),
    ],
    ids=["no normalisation", "no decay", "no beta", "another decay"],
)
def test_a_wrong_delta_rule_is_found_out(key, name, wrong, monkeypatch):
    model, rules = delta_rules()
    place, path, calls = rules[key]
    kernel = place.replacement("pytorch")

    def forgetful(*args, **kwargs):
        return kernel(*args, **{**kwargs, name: wrong(kwargs[name])})

    monkeypatch.setattr(Place, "replacement", lambda *_: forgetful)
    check = verify.verify(model, place, path, calls, "pytorch", gradients=False)
    assert "is allowed" in check.why
    monkeypatch.setattr(Place, "replacement", lambda *_: kernel)
    assert verify.verify(model, place, path, calls, "pytorch", gradients=False).passed


def test_a_kernel_that_the_backend_does_not_serve_is_no_success():
    model, points, calls = captured("llama", torch.float32)
    place, path = points["rms_norm"]
    for call in calls["rms_norm"]:
        call.args = [call.args[0].double()]
    check = verify.verify(model.double(), place, path, calls["rms_norm"], "cutile")
    assert "instead of cutile" in check.why


def test_a_part_that_does_not_run_is_not_verified():
    model, points, calls = captured("llama")
    assert "did not run" in verify.verify(model, *points["swiglu"], [], "pytorch").why


def test_the_model_is_as_it_was():
    model = small("qwen3")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = model(ids).logits
    plan = make_plan(model, look_up=False)
    points = {i.key: (i.candidates[0].place, i.requirement.modules[0]) for i in plan.items if i.candidates}
    capture.capture(model, points, BATCHES)
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys(), name
        assert not module._forward_pre_hooks
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)


def test_calls_survive_the_disk(tmp_path):
    freqs = torch.polar(torch.ones(2, 3), torch.rand(2, 3))
    calls = [capture.Recorded("prefill", [torch.rand(2, 3).bfloat16(), capture.MODULE, [1, None]], {"f": freqs})]
    capture.save(calls, tmp_path / "a" / "x.safetensors")
    (back,) = capture.load(tmp_path / "a" / "x.safetensors", torch.device("cpu"))
    assert back.label == "prefill" and back.args[1:] == calls[0].args[1:]
    assert torch.equal(back.args[0], calls[0].args[0]) and torch.equal(back.kwargs["f"], freqs)


def test_launches_compile_once_for_every_architecture():
    if not verify.compiler_is_there():
        pytest.skip("no compiler")
    model, points, calls = captured("llama")
    launches: list = []
    verify.verify(model, *points["swiglu"], calls["swiglu"], "cutile", launches=launches)
    done = verify.compile_ahead(launches, {}, ("sm_90",))
    assert done and not any(done.values())
    assert verify.compile_ahead(launches, done, ("sm_90",)) == done

"""Regions: what is cut out of forwards, and that putting them back as functions changes no bit."""

from pathlib import Path

import pytest
import torch
from common import some
from torch import nn

from tilegym.autokernel import profile
from tilegym.autokernel.model_worker import ModelSpec
from tilegym.autokernel.regions import find_regions
from tilegym.autokernel.regions import install
from tilegym.integrate.inputs import example
from tilegym.integrate.small_model import small_model
from tilegym.inventory import reference
from tilegym.inventory.rules import check_definition

MODELS = Path(__file__).with_name("autokernel_models.py")


FAMILIES = ["llama", "gemma3_text", "granite", "qwen3_5_text", "mixtral"]


@pytest.fixture(scope="module", params=some(FAMILIES, "gemma3_text", "qwen3_5_text", "mixtral"))
def small(request):
    return small_model(request.param).model


def test_regions_put_back_change_nothing(small):
    ids = example(small)
    with torch.no_grad():
        expected = small(input_ids=ids).logits
        found = find_regions(small)
        with install(small, {r.key: reference.load(r.source, r.key) for r in found}) as patches:
            assert torch.equal(small(input_ids=ids).logits, expected)
            assert len(patches.patched) >= 10 and not patches.skipped
        assert torch.equal(small(input_ids=ids).logits, expected)
    assert len({r.key for r in found}) == len(found)
    assert [r.key for r in find_regions(small)] == [r.key for r in found]


def test_every_region_runs_where_it_stands(small):
    ids = example(small)
    found = find_regions(small)
    called = []

    def noted(region):
        run = reference.load(region.source, region.key)
        return lambda *inputs: called.append(region.key) or run(*inputs)

    for grouped in (False, True):  # a larger region is called in the place of those inside it
        with torch.no_grad(), install(small, {r.key: noted(r) for r in found if r.grouped == grouped}):
            small(input_ids=ids)
    assert len(set(called)) >= 0.8 * len(found)


def test_a_residual_and_the_norm_behind_it_are_one_region():
    model, _ = ModelSpec(f"{MODELS}::gated_norm", "float32").load(torch.device("cpu"))
    found = {r.outputs: r for r in find_regions(model) if r.index is not None and "DecoderLayer" in r.key}
    fused = found["hidden_states", "residual"]
    assert "residual + hidden_states" in fused.source and "rsqrt" in fused.source
    assert fused.inputs == ("residual", "hidden_states", "post_attention_layernorm_weight")


@pytest.mark.parametrize("name, text", [("scaled_residual", "* 0.22"), ("unusual_activation", ".square()")])
def test_unusual_parts_are_regions(name, text):
    model, _ = ModelSpec(f"{MODELS}::{name}", "float32").load(torch.device("cpu"))
    assert any(text in r.source for r in find_regions(model))


def test_drafts_are_definitions():
    model, _ = ModelSpec(f"{MODELS}::gated_norm", "float32").load(torch.device("cpu"))

    def run():
        with torch.no_grad():
            for batch, length in ((2, 5), (3, 9)):
                model(input_ids=example(model, batch, length))

    found = profile.record(model, [run])
    for region in find_regions(model):
        definition = profile.draft(region, found[region.key], "llama")
        profile.check_draft(definition, found[region.key], torch.device("cpu"))
        wrong = [message for _, message, _ in check_definition(definition) if "permalink" not in message]
        assert not wrong, region.key
        assert definition.reference.startswith("# Source: https://github.com/")
        work = profile.work(definition, found[region.key])
        assert work.bytes > 0 and (work.flops > 0) == (region.index is None or region.grouped)


def test_seconds_add_up():
    model, _ = ModelSpec(f"{MODELS}::gated_norm", "float32").load(torch.device("cpu"))
    ids = example(model)

    def run(tokens):
        with torch.no_grad():
            for _ in range(tokens):
                model(input_ids=ids)

    found = profile.profile(model, run, 2, torch.device("cpu"))
    assert set(found.seconds) <= {r.key for r in find_regions(model)}
    assert 0 < sum(found.seconds.values()) < found.total


def test_a_short_trace_stands_for_a_long_run():
    prompt = profile.Profiled({"a": 2.0}, 4.0)
    some = profile.Profiled({"a": 3.0, "b": 2.0}, 9.0)  # six tokens: five steps
    found = profile.extrapolated(prompt, some, few=6, tokens=21)
    assert found.seconds == {"a": 3.0 + 15 * 0.2, "b": 2.0 + 15 * 0.4}
    assert found.total == 9.0 + 15 * 1.0
    assert profile.extrapolated(some, some, few=6, tokens=6) == some


def test_time_of_a_gpu_belongs_to_annotations():
    from types import SimpleNamespace

    cpu, cuda = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA

    def event(name, device, microseconds, annotation=False):
        elapsed = SimpleNamespace(elapsed_us=lambda: microseconds)
        return SimpleNamespace(name=name, device_type=device, time_range=elapsed, is_user_annotation=annotation,
                               device_time_total=microseconds, cpu_parent=None)  # fmt: skip

    events = [event("norm", cpu, 30.0, True), event("norm", cuda, 50.0, True), event("aten::add", cpu, 30.0)]
    events += [event("add_kernel", cuda, 30.0), event("gemm", cuda, 70.0)]
    found = profile.attributed(events, {"norm"}, set())
    assert found.seconds == pytest.approx({"norm": 30e-6}) and found.total == pytest.approx(100e-6)


class Offset(nn.Module):
    """A norm in two methods, as Gemma's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x):
        return self._norm(x.float()) * (1.0 + self.weight.float())


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = Offset(), nn.Linear(4, 4)

    def forward(self, x, residual):
        x = residual + x
        return self.linear(self.norm(x)) + x


def test_methods_of_an_instance_are_followed():
    model, x, residual = nn.Sequential(Residual()), torch.randn(3, 4), torch.randn(3, 4)
    expected = model[0](x, residual)
    first, *_ = [r for r in find_regions(model) if r.index is not None]
    assert "rsqrt" in first.source and "norm_weight" in first.inputs and "x" in first.outputs
    with install(model, {first.key: reference.load(first.source, first.key)}):
        assert torch.equal(model[0](x, residual), expected)


class Branches(nn.Module):
    """Computation around what is more than computation."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = []

    def forward(self, x, flag=True):
        y = torch.exp(x) * 2
        self.seen.append(y)
        if flag:
            y = y + 1
        z = self.linear(torch.tanh(y) * self.linear(x)) + torch.sin(x)
        z += 1
        return z.cos() * 2


def test_what_is_more_than_computation_stays():
    model = nn.Sequential(Branches())
    x = torch.randn(3, 4)
    expected = model(x)
    found = [r for r in find_regions(model) if r.index is not None and not r.grouped]
    assert len(found) == 4
    with install(model, {r.key: reference.load(r.source, r.key) for r in found}):
        assert torch.equal(model(x), expected)
    assert len(model[0].seen) == 2


def test_linear_layers_and_what_is_around_them_are_larger_regions():
    model = small_model("llama").model
    ids, layers = example(model), len(model.model.layers)
    found = find_regions(model)
    gated, last = [r for r in found if r.grouped and "DecoderLayer" in r.key]
    assert gated.outputs == ("residual", "_value_2") and len(gated.modules) == len(last.modules) == layers
    assert all(text in gated.source for text in ("rsqrt", "silu", "residual + hidden_states"))
    assert gated.source.count("functional.linear(") == 2 and last.source.count("functional.linear(") == 1
    assert gated.inputs[-2:] == ("mlp_gate_proj_weight", "mlp_up_proj_weight") and "residual" in last.inputs
    # No product needs another's result, and what is inlined is no region of its own again.
    assert not any("LlamaMLP" in r.key for r in found)
    part = next(r for r in found if r.index == r.last == gated.index and r.modules == gated.modules)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        called = []

        def noted(region):
            run = reference.load(region.source, region.key)
            return lambda *inputs: called.append(region.key) or run(*inputs)

        with install(model, {r.key: noted(r) for r in (part, gated)}):
            assert torch.equal(model(input_ids=ids).logits, expected)
        assert called == [gated.key] * layers  # the larger one
        with install(model, {part.key: noted(part)}):
            assert torch.equal(model(input_ids=ids).logits, expected)
        assert called[layers:] == [part.key] * layers


def test_time_inside_a_larger_region_is_known():
    model = small_model("llama").model
    ids = example(model)

    def run(tokens):
        with torch.no_grad():
            model(input_ids=ids)

    found = profile.profile(model, run, 1, torch.device("cpu"))
    groups = [r for r in find_regions(model) if r.grouped]
    for group in groups:
        inside = {key: seconds for (g, key), seconds in found.inside.items() if g == group.key}
        assert 0 < sum(inside.values()) < found.seconds[group.key] < found.total
        assert all(seconds <= found.seconds[key] for key, seconds in inside.items())
    assert {g for g, _ in found.inside} == {g.key for g in groups}


def test_annotations_of_a_gpu_are_nested():
    from types import SimpleNamespace

    def event(name, parent, microseconds):
        return SimpleNamespace(name=name, device_type=torch.autograd.DeviceType.CPU, cpu_parent=parent,
                               device_time_total=microseconds)  # fmt: skip

    mlp = event("mlp", event("aten::whatever", None, 0.0), 70.0)
    layer = event("linear", event("aten::linear", mlp, 60.0), 60.0)
    found = profile.attributed([mlp, layer, event("linear", None, 5.0)], {"linear"}, {"mlp"})
    assert found.seconds == pytest.approx({"mlp": 70e-6, "linear": 65e-6})
    assert found.inside == pytest.approx({("mlp", "linear"): 60e-6})

"""Linear layers with weights of 8 bits, which quantized_linear takes as they are."""

import copy
import pickle
import sys

import pytest
import torch
from common import device
from test_quantised import Int8
from test_quantised import answers
from test_quantised import made
from test_quantised import quantised
from tiny_models import assert_close
from torch import Tensor
from torch import nn
from transformers.integrations import finegrained_fp8

import tilegym
from tilegym.transformers import decode_graph
from tilegym.transformers import monkey_patch
from tilegym.transformers import quantised_weights
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet


class Shifted(Int8):
    """Whole numbers that another number is taken from, as where quantisation is asymmetric."""

    @staticmethod
    def of(weight: Tensor) -> "Shifted":
        whole = Int8.of(weight)
        return Shifted(whole.data8, whole.scale)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            x, weight, *bias = args
            return nn.functional.linear(x, (weight.data8.to(x.dtype) - 3) * weight.scale, *bias)
        return super().__torch_function__(function, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        whole = super().__torch_dispatch__(function, types, args, kwargs)
        return Shifted(whole.data8, whole.scale)


def with_weight(weight: Tensor, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias).to(device())
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).to(device())


def quantize_input(x: Tensor) -> Tensor:
    scale = x.float().unflatten(-1, (-1, 128)).abs().amax(-1, keepdim=True) / 448
    return ((x.float().unflatten(-1, (-1, 128)) / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


@pytest.fixture
def fp8_kernel(monkeypatch):
    """What transformers fetches from the Hub, for a CPU: a product of both operands in fp8."""

    def matmul(x, weight, scale, block_size, dtype, activation_scale=None):
        assert x.dtype is torch.bfloat16  # as Triton's: of 16 bits
        rows, columns = block_size
        wide = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return (quantize_input(x) @ (weight.float() * wide[: weight.shape[0], : weight.shape[1]]).T).to(dtype)

    kernel = finegrained_fp8.FineGrainedFP8(matmul, None, None)
    monkeypatch.setattr(finegrained_fp8, "_FINEGRAINED_FP8", kernel)


def fp8_layer(n: int, k: int, bias: bool = False, scale_fmt: str = "float") -> nn.Module:
    layer = finegrained_fp8.FP8Linear(k, n, (128, 128), scale_fmt=scale_fmt, has_bias=bias)
    layer.weight.data = (60 * numbers(n, k)).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = 2.0 ** -(8 + numbers(-(-n // 128), -(-k // 128)).abs().floor())
    layer.weight_scale_inv.data = scale.to(layer.weight_scale_inv.dtype)
    if bias:
        layer.bias.data = numbers(n).to(torch.bfloat16)
    return layer.to(device())


def put(layer: nn.Module, backend: str | None = "cutile") -> PatchSet:
    patches = PatchSet(nn.Sequential(layer))
    assert quantised_weights.put(patches, layer, backend, Entry("0", "linear", "cutile"), {})
    return patches


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "stablelm"])
@pytest.mark.filterwarnings("error::tilegym.errors.FallbackWarning")
def test_a_model(family):
    """All its layers are served, in families with a patch and without, and the library's again behind ``revert``."""
    model = quantised(made(family), "weight")
    expected = answers(model)
    report = tilegym.apply(model, use_cutile=True)
    layers = {path for path, m in model.named_modules() if type(m) is nn.Linear}
    assert {e.module for e in report.patched if e.compute == "linear"} == layers
    with decode_graph.eager_steps("cpu"):
        found = answers(model)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(found[1:], expected[1:], strict=True))
    assert any(e.compute == "graph" for e in report.patched)
    report.revert()
    assert_close(answers(model)[0], expected[0])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "granite"])
def test_a_decoding_step(family, monkeypatch):
    """Kernels add the residual where nothing stands between, as Gemma's norms and Granite's factor do."""
    model, seen = quantised(made(family), "weight"), []
    for layer in model.model.layers if family == "granite" else ():
        layer.residual_multiplier = 0.5
    expected = answers(model)
    real = quantised_weights.quantized_linear
    monkeypatch.setattr(quantised_weights, "quantized_linear", lambda *a, **k: seen.append(a) or real(*a, **k))
    with monkey_patch.apply(model, use_cutile=True) as report, decode_graph.eager_steps("cpu"):
        assert len([e for e in report.patched if e.compute == "decode_step"]) == len(model.model.layers)
        found = answers(model)
    assert all(torch.equal(a, b) for a, b in zip(found[1:], expected[1:], strict=True))
    residuals = [args[5] for args in seen if len(args) > 5]  # the trial of a layer has none to give
    assert any(r is not None for r in residuals) is (family in ("llama", "phi3"))


def test_an_fp8_model(fp8_kernel):
    """Of transformers' own layers, which quantise their input as well: off by what that rounds."""
    model = made("llama").to(torch.bfloat16)
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = fp8_layer(256, 64), fp8_layer(256, 64)
    mlp.down_proj = fp8_layer(64, 256)
    for layer in (mlp.gate_proj, mlp.up_proj):  # of one block, that is not whole
        layer.weight_scale_inv.data = layer.weight_scale_inv.data[:, :1]
    model.config.quantization_config = {"quant_method": "fp8"}
    with monkey_patch.apply(model, use_cutile=True) as report:
        mine = {e.module for e in report.patched if e.compute == "linear"}
        assert "model.layers.0.mlp.down_proj" in mine
        why = {e.module: e.why for e in report.skipped if e.compute == "linear"}
        assert "could not be tried" in why["model.layers.0.mlp.gate_proj"]  # 64 columns are no block of 128


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("bias", [False, True])
def test_an_fp8_layer(fp8_kernel, scale_fmt, bias):
    layer, x = fp8_layer(256, 128, bias, scale_fmt), numbers(2, 1, 128).to(torch.bfloat16)
    expected = layer(x)
    put(layer)
    with torch.no_grad():
        found = layer(x).float()
    assert not torch.equal(found, expected.float())
    assert (found - expected.float()).norm() < 0.06 * expected.float().norm()
    assert torch.equal(layer(numbers(20, 128).to(x)), type(layer).forward(layer, numbers(20, 128).to(x)))


@pytest.mark.skipif("torch.cuda.is_available()", reason="the kernel may be there")
def test_a_layer_whose_own_kernel_is_missing(monkeypatch):
    monkeypatch.setattr(finegrained_fp8, "_FINEGRAINED_FP8", None)
    monkeypatch.setitem(sys.modules, "kernels", None)
    monkeypatch.setattr(finegrained_fp8, "is_kernels_available", lambda: False)
    patches = put(fp8_layer(128, 128))
    (entry,) = patches.skipped
    assert "could not be tried: ImportError" in entry.why and not patches.patched


def test_which_calls_are_the_kernels(monkeypatch):
    layer, seen = with_weight(Int8.of(numbers(48, 64))), []
    real = quantised_weights.quantized_linear
    monkeypatch.setattr(quantised_weights, "quantized_linear", lambda *a, **k: seen.append(a) or real(*a, **k))
    put(layer)
    del seen[:]

    def calls(x: Tensor) -> int:
        before = len(seen)
        torch.testing.assert_close(layer(x), nn.Linear.forward(layer, x), rtol=1e-4, atol=1e-4)
        return len(seen) - before

    with torch.no_grad():
        assert calls(numbers(1, 64)) == calls(numbers(2, 3, 64)) == 1
        assert calls(numbers(0, 64)) == calls(numbers(1025, 64)) == 0
        with torch.autocast(device(), torch.bfloat16):
            before = len(seen)
            assert layer(numbers(1, 64)).dtype is torch.bfloat16 and len(seen) == before
    assert calls(numbers(1, 64)) == 1  # the bias alone wants a gradient, which is not asked for
    assert calls(numbers(1, 64).requires_grad_()) == 0
    layer.weight = nn.Parameter(numbers(48, 64))  # written out meanwhile
    assert calls(numbers(1, 64)) == 0


def test_copies_and_pickles():
    layer, x = with_weight(Int8.of(numbers(48, 64))), numbers(1, 64)
    held = quantised_weights.held_by(layer)
    forward = quantised_weights.quantised_forward(nn.Linear.forward, held, "cutile")
    assert pickle.loads(pickle.dumps(forward.recipe[1])) == forward.recipe[1]
    held = quantised_weights.held_by(fp8_layer(256, 128))
    assert held.block_size == (128, 128) and held.most_rows == quantised_weights.FEW_ROWS
    put(layer)
    with torch.no_grad():
        assert torch.equal(copy.copy(layer)(x), layer(x))


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (lambda: with_weight(Shifted.of(numbers(48, 64))), "its weight is quantised in a way of its own"),
        (lambda: with_weight(Int8(torch.ones(48, 64).to(torch.int8), torch.ones(48, 4))), "its weight is quantised"),
        (lambda: with_weight(Int8(torch.ones(48, 64).to(torch.int16), torch.ones(48, 1))), "its weight is quantised"),
    ],
)
def test_what_stays_the_librarys(layer, why):
    """Another formula, scales of groups of columns, and other numbers than those of 8 bits."""
    patches = put(layer().to(device()))
    assert [e.why for e in patches.skipped] == [why] and not patches.patched


def test_without_kernels_all_stays_the_librarys():
    patches = put(with_weight(Int8.of(numbers(48, 64))), backend="pytorch")
    assert [e.why for e in patches.skipped] == ["its weight is quantised"]


def test_what_is_no_quantised_layer():
    patches = PatchSet(nn.Sequential())
    for module in (nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(4, 4), nn.Linear(4, 4).half()):
        assert not quantised_weights.put(patches, module, "cutile", Entry("", "linear"), {})
    assert not patches.patched and not patches.skipped

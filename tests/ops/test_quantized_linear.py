"""quantized_linear: weights of 8 bits with one scale, one a row, or one a block."""

import itertools
import warnings

import pytest
import torch
from common import ARCHITECTURES
from common import HAS_GPU
from common import assert_compiles
from common import device
from common import dtypes
from common import gpu
from common import randn
from common import recorded_launches
from common import sanitized
from common import some

from tilegym.backend import recording
from tilegym.errors import FallbackWarning
from tilegym.errors import UnsupportedError
from tilegym.ops import quantized_linear
from tilegym.ops.cutile import quantized_linear as kernels
from tilegym.ops.cutile.few_rows import merge_rows_kernel
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.pytorch.quantized_linear import dequantized

KINDS = torch.int8, torch.float8_e4m3fn
HOW = {"one": (), "rows": (-1,), "column": (-1, 1), "blocks": (64, 128)}


def made(n: int, k: int, kind: torch.dtype, how: str, dtype: torch.dtype = torch.float32) -> dict:
    """A weight, its scales and a bias."""
    weight = (40 * randn(n, k, seed=1)).clamp(-128, 127).to(kind)
    block = HOW[how] if how == "blocks" else None
    shape = (-(-n // 64), -(-k // 128)) if block else tuple(n if size == -1 else size for size in HOW[how])
    scale = randn(*shape, seed=2).abs() / 40 + 0.01
    return {"weight": weight, "scale": scale, "bias": randn(n, dtype=dtype, seed=3), "block_size": block}


def exact(x: torch.Tensor, weight, scale, bias, block_size=None) -> torch.Tensor:
    return x.double() @ dequantized(weight, scale, block_size, torch.float64).T + (0 if bias is None else bias.double())


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch):
    monkeypatch.setenv("DISABLE_FALLBACK", "1")


# n and k by which a CPU's plans choose each kernel: rows in turns, the others, columns in two parts.
SIZES = [(40, 64), (44, 160), (40, 96), (100, 160), (9, 130), (5, 48)]


@dtypes(torch.bfloat16, torch.float16, torch.float32)
@pytest.mark.parametrize("rows", some([1, 2, 9, 16, 17, 40], 1, 9, 40))
def test_products(dtype, rows):
    for kind, how, (n, k) in itertools.product(KINDS, HOW, SIZES):
        x, given = randn(rows, k, dtype=dtype), made(n, k, kind, how, dtype)
        with sanitized():
            got = quantized_linear(x, **given, backend="cutile").double()
        reference = quantized_linear(x, **given, backend="pytorch").double()
        expected = exact(x, **given)
        off, allowed = ((t - expected).norm() for t in (got, reference))
        eps = torch.finfo(dtype).eps
        floor = eps / 2 * expected.norm()  # the few numbers of a small case may be exact by luck
        assert off <= 2 * allowed + floor, (kind, how, n, k)
        bare = quantized_linear(x[None], **given | {"bias": None}, backend="cutile")
        assert bare.shape == (1, rows, n) and bare.dtype is dtype
        torch.testing.assert_close(bare[0] + given["bias"], got.to(dtype), rtol=2**-6, atol=2**-5)
        residual = randn(rows, n, dtype=dtype, seed=4)
        with sanitized():
            added = quantized_linear(x, **given, residual=residual, backend="cutile")
        torch.testing.assert_close(added, residual + got.to(dtype), rtol=2 * eps, atol=2 * eps)


def every_number(kind: torch.dtype) -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(kind).to(device())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3])
def test_every_number_is_read_as_it_is(kind, rows):
    """NaN of fp8, too."""
    numbers = every_number(kind)
    weight = numbers[:, None].expand(256, 64).contiguous()
    x = torch.zeros(rows, 64, dtype=torch.bfloat16, device=device())
    x[:, 5] = 1
    got = quantized_linear(x, weight, torch.ones((), device=device()), backend="cutile")
    torch.testing.assert_close(got, numbers.to(torch.bfloat16).expand(rows, -1), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16])
def test_scales_of_other_dtypes(scale):
    x, given = randn(2, 64, dtype=torch.bfloat16), made(40, 64, torch.int8, "rows", torch.bfloat16)
    given["scale"] = given["scale"].to(scale)
    got = quantized_linear(x, **given, backend="cutile")
    torch.testing.assert_close(got.double(), exact(x, **given), rtol=2**-7, atol=2**-5)


def test_layouts():
    given = made(40, 130, torch.int8, "rows", torch.bfloat16)
    x = randn(3, 260, dtype=torch.bfloat16)[:, ::2]
    turned = given["weight"].T.contiguous().T
    expected = quantized_linear(x.contiguous(), **given, backend="cutile")
    assert torch.equal(quantized_linear(x, **given, backend="cutile"), expected)
    assert torch.equal(quantized_linear(x, **given | {"weight": turned}, backend="cutile"), expected)


def test_gradients_are_the_references(monkeypatch):
    monkeypatch.delenv("DISABLE_FALLBACK")
    x, given = randn(3, 64).requires_grad_(), made(40, 64, torch.int8, "rows")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        quantized_linear(x, **given).sum().backward()
    torch.testing.assert_close(x.grad[0], dequantized(given["weight"], given["scale"], None, torch.float32).sum(0))
    with pytest.raises(UnsupportedError, match="no backward kernel"):
        monkeypatch.setenv("DISABLE_FALLBACK", "1")
        quantized_linear(x, **given, backend="cutile")


@pytest.mark.parametrize("backend", ["cutile", "pytorch"])
def test_what_does_not_fit_is_an_error(backend):
    x, given = randn(3, 128), made(70, 128, torch.int8, "rows")

    def call(x=x, **changed):
        return quantized_linear(x, **given | changed, backend=backend)

    with pytest.raises(ValueError, match=r"expected x \[..., K\] and weight \[N, K\], got \(3, 127\), \(70, 128\)"):
        call(x[:, :127])
    with pytest.raises(TypeError, match="weight must be int8 or float8_e4m3fn, it is torch.float32"):
        call(weight=given["weight"].float())
    with pytest.raises(TypeError, match="x must be fp32, fp16 or bf16, it is torch.int64"):
        call(x.long())
    with pytest.raises(TypeError, match="scale must be fp32, fp16 or bf16, it is torch.int8"):
        call(scale=given["scale"].to(torch.int8))
    with pytest.raises(ValueError, match=r"scale must be one number, \[70\] or \[70, 1\], it is \[69\]"):
        call(scale=given["scale"][:69])
    with pytest.raises(ValueError, match=r"scale must be \[2, 1\], it is \[70\]"):
        call(block_size=(64, 128))
    with pytest.raises(ValueError, match=r"block_size must be \(rows, columns\), it is \(0, 128\)"):
        call(block_size=(0, 128))
    with pytest.raises(ValueError, match=r"bias must be \[70\], it is \[71\]"):
        call(bias=randn(71))
    with pytest.raises(ValueError, match=r"residual must be \[3, 70\], it is \[70\]"):
        call(residual=randn(70))
    with pytest.raises(TypeError, match="residual must have the dtype of x, torch.float32, it has torch.float16"):
        call(residual=randn(3, 70).half())
    with pytest.raises(TypeError, match="bias must have the dtype of x, torch.float32, it has torch.float16"):
        call(bias=randn(70).half())


def test_other_blocks_are_left_to_pytorch():
    x, given = randn(3, 96), made(40, 96, torch.int8, "rows")
    given |= {"scale": randn(2, 3).abs(), "block_size": (32, 32)}
    with pytest.raises(UnsupportedError, match="blocks of multiples of 64 rows and 128 columns"):
        quantized_linear(x, **given, backend="cutile")


def launched(rows: int, n: int, k: int, kind: torch.dtype, how: str, dtype: torch.dtype = torch.bfloat16) -> list:
    recording.forget()
    x, given = torch.zeros(rows, k, dtype=dtype), made(n, k, kind, how, dtype)
    with recorded_launches() as recorded:
        quantized_linear(x, **given, backend="cutile")
    return recorded


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
def test_launches():
    def of(*args):
        return [kernel for kernel, _ in launched(*args)]

    assert of(1, 40, 64, torch.int8, "rows") == [kernels.quantized_stream_kernel]
    assert of(1, 40, 96, torch.int8, "rows") == [kernels.quantized_gemv_kernel]
    assert of(9, 40, 96, torch.int8, "rows") == [kernels.quantized_rows_kernel]
    assert of(9, 40, 160, torch.int8, "rows") == [kernels.quantized_rows_kernel, merge_rows_kernel]
    assert of(40, 40, 160, torch.int8, "rows") == [kernels.quantized_rows_kernel]
    assert of(9, 40, 96, torch.int8, "rows", torch.float32) == [kernels.quantized_gemv_kernel]
    assert kernels.quantized_rows_kernel not in of(1025, 8, 64, torch.int8, "rows")


@pytest.fixture
def of_a_gpu(monkeypatch):
    """Plans are those of an H200."""
    gemv, rows = kernels.gemv_plan.__wrapped__, kernels.rows_plan.__wrapped__
    monkeypatch.setattr(kernels, "sm_count", lambda index: 132)
    monkeypatch.setattr(kernels, "gemv_plan", lambda *args: gemv(*args[:-1], 0))
    monkeypatch.setattr(kernels, "rows_plan", lambda *args: rows(*args[:-1], 0))


# How many rows, of what weight.
CASES = [
    (1, 64, 4096, torch.int8, "rows"), (1, 64, 4096, torch.float8_e4m3fn, "blocks"), (1, 64, 2560, torch.int8, "one"),
    (1, 64, 14336, torch.int8, "rows"), (1, 64, 14336, torch.float8_e4m3fn, "blocks"),
    (16, 64, 4096, torch.int8, "rows"), (64, 64, 1024, torch.float8_e4m3fn, "blocks"),
    (200, 64, 1024, torch.int8, "rows"),
]  # fmt: skip


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
@pytest.mark.parametrize("case", some(CASES, CASES[0], CASES[4], CASES[5]), ids=str)
@pytest.mark.usefixtures("of_a_gpu")
def test_compiles(case):
    """With the tiles of a GPU; fp8 needs compute capability 8.9."""
    for kernel, (*args, overlap) in launched(*case):
        assert overlap is False
        for arch in ARCHITECTURES:
            if arch != "sm_80" or case[3] is torch.int8:
                assert_compiles(kernel, (*args, arch != "sm_80"), (arch,))


@pytest.mark.usefixtures("of_a_gpu")
def test_plans():
    """As measured on an H200."""
    stream, gemv = kernels.quantized_stream_kernel, kernels.quantized_gemv_kernel

    def one(n, k, fp8=False, in_blocks=False, one_row=True):
        return kernels.gemv_plan(n, k, fp8, in_blocks, one_row, 0)

    assert one(4096, 4096) == (hinted(stream, occupancy=3), 342, 4, 2048, 1, 1)
    assert one(14336, 4096)[1:4] == (359, 4, 2048)
    assert one(8192, 8192)[1:4] == (512, 2, 2048) and one(17408, 5120)[1:4] == (256, 4, 1024)
    assert one(4096, 14336) == (hinted(gemv, occupancy=4), 1024, 4, 2048, 1, 1)
    assert one(4096, 14336, fp8=True) == (hinted(gemv, occupancy=2), 512, 8, 2048, 1, 1)
    assert one(4096, 14336, True, True) == (hinted(gemv, occupancy=4), 512, 8, 1024, 1, 1)
    assert one(4095, 4096).kernel is one(4096, 4096, one_row=False).kernel is hinted(gemv, occupancy=4)

    def few(rows, n, k, block_n=0):
        return kernels.rows_plan(rows, n, k, block_n, 0)[1:]

    assert few(16, 4096, 4096) == (64, 64, 256, 4, 16) and few(16, 14336, 4096) == (224, 64, 256, 1, 16)
    assert few(2, 1024, 4096) == (16, 64, 128, 16, 8)
    assert few(64, 14336, 4096, 128) == (112, 128, 128, 2, 64) and few(64, 14336, 4096, 64)[1] == 64
    assert few(512, 4096, 4096) == (64, 64, 128, 1, 128)


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 16, 33, 64, 128, 300, 1100])
@pytest.mark.parametrize("how", ["one", "rows", "blocks"])
def test_products_on_a_gpu(kind, rows, how):
    """Of sizes for which plans differ."""
    for n, k in ((4096, 4096), (1024, 4096), (256, 14336), (2048, 2048), (512, 2560), (256, 8192), (384, 5120)):
        x, given = randn(rows, k, dtype=torch.bfloat16), made(n, k, kind, how, torch.bfloat16)
        got = quantized_linear(x, **given, backend="cutile").double()
        reference = quantized_linear(x, **given, backend="pytorch").double()
        expected = exact(x, **given)
        assert (got - expected).norm() <= 2 * (reference - expected).norm(), (n, k)

"""rms_norm_linear, rms_norm_swiglu and linear_add of 2 to 16 rows: which kernels serve them, and with which tiles."""

import functools

import pytest
import torch
from common import ARCHITECTURES
from common import HAS_GPU
from common import assert_compiles
from common import randn
from common import recorded_launches
from common import sanitized
from common import some
from test_decode_ops import one_row
from test_decode_ops import weights_of

from tilegym.backend import recording
from tilegym.ops import linear_add
from tilegym.ops import rms_norm_linear
from tilegym.ops import rms_norm_swiglu
from tilegym.ops.cutile import few_rows
from tilegym.ops.cutile import few_rows_norm
from tilegym.ops.cutile.fused_gemv import gemv_add
from tilegym.ops.cutile.tiling import hinted


def kernels_of(call):
    """The kernels that ``call`` launches, and what it returns."""
    recording.forget()
    with recorded_launches(run=True) as recorded, torch.no_grad(), sanitized():
        result = call()
    return [kernel for kernel, _ in recorded], result


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
@pytest.mark.parametrize("rows", [2, 3, 8, 16, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_launches_of_several_rows(rows, dtype):
    """A norm, and one launch for all weights behind it, with the activation; one with the residual: up to 16 rows."""
    x, norm, residual = randn(rows, 1, 96, dtype=dtype), randn(96, dtype=dtype, seed=1), randn(rows, 1, 40, dtype=dtype)
    weights = weights_of(96, (40, 24, 24, 40), dtype)
    many = rows > 16
    several, gated, one = (
        hinted(kernel, occupancy=2)
        for kernel in (
            few_rows_norm.few_rows_several_kernel,
            few_rows_norm.few_rows_gated_kernel,
            few_rows.few_rows_kernel,
        )
    )
    for count in (1, 2, 3, 4):
        launched, _ = kernels_of(lambda n=count: rms_norm_linear(x, norm, 1e-5, weights[:n], backend="cutile"))
        assert len(launched) == (1 + count if many else 2)
        assert (several in launched) is not many
    launched, _ = kernels_of(lambda: rms_norm_swiglu(x, norm, 1e-5, weights[0], weights[3], backend="cutile"))
    assert len(launched) == (4 if many else 2) and (gated in launched) is not many
    launched, _ = kernels_of(lambda: linear_add(x, weights[0], residual, backend="cutile"))
    assert len(launched) == (2 if many else 1) and (launched == [one]) is not many
    x, weight = randn(rows, 1, 130, dtype=dtype), weights_of(130, (40,), dtype)[0]
    launched, found = kernels_of(lambda: linear_add(x, weight, residual, backend="cutile"))
    assert many or launched == [one, few_rows.merge_rows_kernel]
    _, again = kernels_of(lambda: linear_add(x, weight, residual, backend="cutile"))
    assert torch.equal(found, again)


@pytest.mark.parametrize("rows", [2, 16])
def test_what_is_not_contiguous_is_left_to_the_ops(rows):
    x, norm = randn(rows, 128, dtype=torch.bfloat16)[:, ::2], randn(64, dtype=torch.bfloat16, seed=1)
    weight, residual = randn(64, 40, dtype=torch.bfloat16, seed=2).t(), randn(rows, 40, dtype=torch.bfloat16, seed=3)
    with torch.no_grad():
        for op, args in (
            (linear_add, (x, weight, residual)),
            (linear_add, (x.contiguous(), weight.contiguous(), randn(40, rows, dtype=torch.bfloat16, seed=3).t())),
            (rms_norm_swiglu, (x, norm, 1e-5, weight, weight)),
            (lambda *a, **k: rms_norm_linear(*a, **k)[0], (x, norm, 1e-5, [weight])),
        ):
            found, expected = (op(*args, backend=backend) for backend in ("cutile", "pytorch"))
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-5)


def launches_of_several_rows(rows):
    _, _, weight = one_row()
    x, long = torch.zeros(rows, 1, 4096, dtype=torch.bfloat16), torch.zeros(64, 14336, dtype=torch.bfloat16)
    for count in (1, 3, 4):
        few_rows_norm.few_rows_several(x, [weight] * count, [])
    few_rows_norm.few_rows_several(x, [weight] * 2, [weight[0, :1024].clone()] * 2)
    few_rows_norm.few_rows_gated(x, weight, weight, 0)
    few_rows_norm.few_rows_gated(x, weight, weight, 1)
    gemv_add(x, weight, x[..., :1024].contiguous(), weight[0, :1024].clone(), 0.22)
    gemv_add(long[:rows], long, x[:, 0, :64].contiguous(), None, 1.0)


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
@pytest.mark.parametrize(("rows", "architectures"), [(16, ARCHITECTURES), (8, ("sm_90",))])
def test_launches_of_several_rows_compile(rows, architectures, monkeypatch):
    """With the tiles of a GPU."""
    monkeypatch.setattr(few_rows, "plan_of", lambda *args: few_rows.gpu_plan(*args[:-1], 132))
    monkeypatch.setattr(few_rows_norm, "plan_of", lambda *args: few_rows_norm.gpu_plan(*args[:-1]))
    with recorded_launches() as recorded:
        launches_of_several_rows(rows)
    assert len(recorded) == 9  # the last product is split
    for kernel, (*args, overlap) in recorded:
        assert overlap is False
        for arch in architectures:
            assert_compiles(kernel, (*args, arch != "sm_80"), (arch,))


def test_plans_of_several_rows():
    """As measured; splits only of long rows in 16 bits, where few blocks have them."""
    plan = functools.partial(few_rows.gpu_plan, processors=132)
    assert plan(8, 4096, 14336, 16) == (8, 64, 128, 2, 4) and plan(16, 4096, 14336, 16) == (16, 64, 128, 2, 4)
    assert plan(8, 4096, 12288, 16) == plan(8, 4096, 4096, 16) == (8, 64, 256, 1, 1)
    assert plan(8, 4096, 14336, 32) == (8, 64, 128, 1, 1) and plan(8, 8192, 28672, 16).splits == 1
    assert few_rows_norm.gpu_plan(8, 4096, 16, False) == (16, 32, 256, 2, 1)
    assert few_rows_norm.gpu_plan(8, 4096, 16, True) == (8, 64, 128, 2, 1)


@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], torch.bfloat16))
def test_operators(dtype):
    weight = randn(9, 24, dtype=dtype)
    x = randn(3, 1, 24, dtype=dtype)
    torch.library.opcheck(few_rows_norm.few_rows_several.operator, (x, [weight, weight], [x[0, 0, :9].clone()] * 2))
    torch.library.opcheck(few_rows_norm.few_rows_gated.operator, (x, weight, weight, 0))
    torch.library.opcheck(gemv_add.operator, (x, weight, randn(3, 1, 9, dtype=dtype), None, 0.5))

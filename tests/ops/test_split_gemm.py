"""Products of few tiles, which are split along K."""

import pytest
import torch
from common import HAS_GPU
from common import assert_compiles
from common import dtypes
from common import gpu
from common import randn
from common import recorded_launches

from tilegym.backend import recording
from tilegym.ops import linear
from tilegym.ops.cutile import linear as linear_module
from tilegym.ops.cutile import split_gemm
from tilegym.ops.cutile.split_gemm import add_splits_kernel
from tilegym.ops.cutile.split_gemm import launch_split
from tilegym.ops.cutile.split_gemm import split_gemm_kernel

BF16 = torch.bfloat16


def of_an_h200(monkeypatch):
    monkeypatch.setattr(split_gemm, "sm_count", lambda device: 132)
    split_gemm.splits_of.cache_clear()


def test_few_tiles_with_long_sums_are_split(monkeypatch):
    of_an_h200(monkeypatch)
    try:
        splits = {
            sizes: split_gemm.splits_of(*sizes, BF16, 0)
            for sizes in ((64, 896, 4864), (64, 1280, 5120), (128, 768, 3072), (64, 896, 896), (512, 4096, 4096))
        }
        assert list(splits.values()) == [8, 6, 5, 0, 0]
        assert split_gemm.splits_of(64, 900, 4864, BF16, 0) == 0, "rows of the sums would not begin at 16 bytes"
        assert split_gemm.splits_of(64, 896, 4864, torch.float32, 0) == 0, "no tensor cores"
        assert split_gemm.splits_of(64, 896, 4864, BF16, -1) == 0, "no multiprocessors"
    finally:
        split_gemm.splits_of.cache_clear()


@dtypes(torch.bfloat16, torch.float16)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("m", "n", "k", "splits"), [(70, 136, 1000, 3), (17, 64, 600, 4), (130, 72, 2048, 8)])
def test_the_sums_of_all_parts(m, n, k, splits, bias, dtype):
    x, weight = randn(m, k, dtype=dtype), randn(n, k, dtype=dtype, seed=1)
    added = randn(n, dtype=dtype, seed=2) if bias else None
    out = torch.full((m, n), float("nan"), dtype=dtype, device=x.device)
    launch_split(x, weight, added, out, splits)
    exact = torch.nn.functional.linear(*(None if t is None else t.double() for t in (x, weight, added)))
    # Rounded once: the sums are in fp32.
    assert (out.double() - exact).norm() / exact.norm() < (2e-3 if dtype == BF16 else 3e-4)


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
def test_linear_splits_in_any_layout(monkeypatch):
    monkeypatch.setattr(linear_module, "splits_of", lambda *sizes: 3)
    weight = randn(64, 640, dtype=BF16, seed=1)
    # Columns that are not beside each other are not split: its loads are of rows.
    for x, split in ((randn(4, 10, 640, dtype=BF16), True), (randn(640, 40, dtype=BF16).T, False)):
        recording.forget()
        with recorded_launches() as launches:
            linear(x, weight, backend="cutile")
        kernels = [kernel._pyfunc for kernel, _ in launches]
        assert (kernels == [split_gemm_kernel._pyfunc, add_splits_kernel._pyfunc]) == split
        assert (split_gemm_kernel._pyfunc in kernels) == split
        recording.forget()
        for factor in (1, 2, 3, 4):  # from the second one on it is recorded
            ours, theirs = (linear(x * factor, weight, backend=name).float() for name in ("cutile", "pytorch"))
            assert (ours - theirs).norm() / theirs.norm() < 5e-3


def test_compiles_for_every_architecture():
    x, weight, out = (torch.empty(*sizes, dtype=BF16) for sizes in ((64, 4096), (512, 4096), (64, 512)))
    sums = torch.empty(4, 64, 512)
    for overlap, more in ((False, ()), (True, (("sm_90", "sm_100", "sm_120"),))):
        assert_compiles(split_gemm_kernel, (x, weight, out[0], sums, 64, 64, 16, True, overlap), *more)
        assert_compiles(add_splits_kernel, (sums.view(4, -1), out.view(-1), 4, 2048, overlap), *more)


@gpu
def test_on_a_gpu():
    x, weight = randn(64, 4864, dtype=BF16), randn(896, 4864, dtype=BF16, seed=1)
    recording.forget()
    assert split_gemm.splits_of(64, 896, 4864, BF16, 0) >= 3
    exact = x.double() @ weight.double().T
    for _ in range(3):
        y = linear(x, weight, backend="cutile")
        assert (y.double() - exact).norm() / exact.norm() < 2e-3

"""How much memory fused_linear_cross_entropy takes, and how it divides its work."""

import sys

import pytest
import torch
from common import HAS_GPU
from common import dtypes
from common import randn
from peak_memory import PeakMemory
from torch._subclasses import FakeTensorMode

from tilegym import interpreter
from tilegym.ops import fused_linear_cross_entropy
from tilegym.ops.cutile.fused_linear_cross_entropy import ROWS_SUMMED
from tilegym.ops.cutile.linear_cross_entropy_plan import aligned
from tilegym.ops.cutile.linear_cross_entropy_plan import classes_held
from tilegym.ops.cutile.linear_cross_entropy_plan import classes_of_slice
from tilegym.ops.cutile.linear_cross_entropy_plan import direct_slices
from tilegym.ops.cutile.linear_cross_entropy_plan import rows_of_chunk
from tilegym.ops.cutile.linear_cross_entropy_plan import rows_stored
from tilegym.ops.cutile.linear_cross_entropy_plan import slices as all_slices

PLAN = sys.modules[classes_of_slice.__module__]


class Test_FusedLinearCrossEntropyMemory:
    @pytest.mark.skipif(HAS_GPU, reason="counts what is allocated on a CPU")
    @dtypes(torch.float32, torch.bfloat16)
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    def test_peak_memory(self, dtype, reduction, monkeypatch):
        """Both passes hold the gradients, a slice's logits, and a few numbers for each token; no copy of a gradient."""
        hidden, vocab, size = 128, 1024, dtype.itemsize
        monkeypatch.setattr(interpreter, "launch", lambda *_: None)  # kernels allocate nothing
        monkeypatch.setattr(PLAN, "FEWEST_CLASSES", 16)
        monkeypatch.setattr(PLAN, "SLICE_ELEMENTS", 4096)
        for tokens in (64, 128, 256, 1024):
            inputs = [randn(n, hidden, dtype=dtype, seed=n).requires_grad_() for n in (tokens, vocab)]
            target = torch.arange(tokens) % vocab
            with PeakMemory() as memory:
                fused_linear_cross_entropy(*inputs, target, reduction=reduction, backend="cutile").sum().backward()
            assert all(t.grad.dtype == dtype for t in inputs)
            gradients = sum(t.nbytes for t in inputs)
            # Without the gradient of weight, in the forward pass of "none", logits are somewhere: all, as they are few.
            logits = max(16, 4096 // tokens) * tokens * size
            if reduction == "none":
                gradients = max(gradients, tokens * vocab * size)
            assert gradients + logits * (reduction != "none") <= memory.peak <= gradients + logits + 128 * tokens

    @pytest.mark.skipif(HAS_GPU, reason="counts what is allocated on a CPU")
    @dtypes(torch.float32, torch.bfloat16, torch.float16)
    @pytest.mark.parametrize(
        "tokens, hidden, vocab, logits",
        [
            (512, 4096, 128256, 2**20),
            (512, 8192, 128256, 2**20),
            (512, 4096, 151936, 2**20),
            (512, 2048, 151936, 2**20),
            (512, 2048, 102400, 2**20),
            (512, 2560, 262208, 2**20),
            (512, 2880, 201088, 2**20),
            (2048, 4096, 128256, 2**22),
            (2048, 2048, 151936, 2**24),
            (2048, 2560, 262208, 2**24),
            (8192, 4096, 128256, 2**24),
            (16384, 4096, 128256, 2**24),
        ],
    )
    def test_peak_memory_of_a_large_model(self, dtype, tokens, hidden, vocab, logits, monkeypatch):
        """The gradients and so many logits. In fp16 that of weight is in fp32 until the backward pass."""
        monkeypatch.setattr(interpreter, "launch", lambda *_: None)
        with FakeTensorMode():
            inputs = [torch.empty(n, hidden, dtype=dtype, requires_grad=True) for n in (tokens, vocab)]
            target = torch.empty(tokens, dtype=torch.int64)
            with PeakMemory() as memory:
                fused_linear_cross_entropy(*inputs, target, backend="cutile").backward()
        gradients = sum(t.nbytes for t in inputs) + (2 * inputs[1].nbytes if dtype == torch.float16 else 0)
        assert gradients <= memory.peak <= gradients + logits * dtype.itemsize + 128 * tokens

    @pytest.mark.skipif(HAS_GPU, reason="counts what is allocated on a CPU")
    @pytest.mark.parametrize(
        "tokens, chunk_size, more", [(8192, 4096, 0), (8192, 6144, 2048), (8192, 8192, 4096), (16384, 8192, 4096)]
    )
    def test_peak_memory_of_a_large_chunk(self, tokens, chunk_size, more, monkeypatch):
        """The logits of the tokens for which there is no room where the gradient will be, and some sums, are more."""
        monkeypatch.setattr(interpreter, "launch", lambda *_: None)
        hidden, vocab = 4096, 128256
        with FakeTensorMode():
            inputs = [torch.empty(n, hidden, requires_grad=True) for n in (tokens, vocab)]
            target = torch.empty(tokens, dtype=torch.int64)
            with PeakMemory() as memory:
                fused_linear_cross_entropy(*inputs, target, backend="cutile", chunk_size=chunk_size).backward()
        least = sum(t.nbytes for t in inputs) + 4 * more * vocab
        slices = 4 * max(2**24, tokens * 1024) + 2 * 64 * 8 * tokens
        assert least <= memory.peak <= least + slices + (4 * ROWS_SUMMED * hidden if more else 0)

    def test_sizes(self):
        assert rows_of_chunk(128256, 4096) == 1024
        assert rows_of_chunk(16384, 4096) == 4096  # 128 MiB of logits
        assert rows_of_chunk(128256, 100) == 100
        assert rows_of_chunk(0, 7) == 7
        assert rows_stored(8192, 128256, 4096, 4096) == (4096, 4096)
        assert rows_stored(8192, 128256, 4096, 100) == (100, 112)
        assert rows_stored(9000, 128256, 8192, 4096) == (8192, 8192) and rows_stored(9000, 128256, 8192, 4095) == (
            4095,
            4096,
        )
        assert rows_stored(510, 128256, 4096, 4096) == (510, 512)
        assert rows_stored(8192, 128256, 2890, 4096) == (2880, 2880)
        assert rows_stored(8192, 128256, 9, 4096) == (9, 9)
        assert rows_stored(8192, 128256, 4096, 8192) == (8192, 8192)
        assert rows_stored(9000, 128256, 4096, 5000) == (5000, 5008)
        assert rows_stored(5000, 128256, 8192, 6000) == (5000, 5008)
        assert rows_stored(5000, 1, 9, 8192) == (9, 9)  # not even one class's logits have room
        assert classes_held(128256, 4096, 4096) == 128256 and classes_held(128256, 4096, 8192) == 64128
        assert classes_held(300, 40, 64) == 128 and classes_held(100, 10, 64) == 15
        assert classes_of_slice(8192, 128256, 4096) == 2048
        assert classes_of_slice(10**6, 128256, 4096) == 512
        assert classes_of_slice(512, 128256, 4096) == 32768
        assert classes_of_slice(8192, 500, 4096) == 128
        assert classes_of_slice(100, 50, 1) == 1
        slices = [slice(16128, 128256), slice(2048, 16128), slice(256, 2048)]
        assert direct_slices(128256, 512, 4096, 32768) == (slices, 256)
        assert direct_slices(128256, 4096, 4096, 4096) == ([], 128256)
        assert direct_slices(50, 16, 64, 50) == ([], 50)

    @pytest.mark.parametrize("vocab", [1, 129, 5000, 32000, 102400, 128256, 151936, 201088, 262208])
    def test_direct_slices(self, vocab):
        for tokens in (1, 16, 100, 512, 1024, 2047, 2048, 3000, 4000, 8192):
            for room in (64, 512, 2048, 2560, 2880, 4096, 8192, 16384):
                if (width := aligned(tokens)) > room:
                    continue
                classes = classes_of_slice(tokens, vocab, 4096)
                slices, left = direct_slices(vocab, width, room, classes)
                # From the last class on, without a gap.
                assert [s.stop for s in slices] + [left] == [vocab] + [s.start for s in slices] and left > 0
                for rows in slices:
                    # What is written begins behind what is still to be read, and not a tile too late.
                    assert rows.start * room >= rows.stop * width > (rows.start - 128) * room
                    assert rows.start % 128 == 0 and rows.stop - rows.start >= min(classes, 1024)
                if 2 * width <= room:
                    assert left < 2 * 1024 + 2 * 128
                else:  # no more GEMMs than with copies alone
                    assert len(slices) + -(-left // classes) <= -(-vocab // classes)

    @pytest.mark.parametrize("vocab", [1, 129, 5000, 128256])
    def test_slices_of_two_pieces(self, vocab):
        for tokens, room in ((5008, 4096), (8192, 4096), (8192, 64), (4112, 4096), (6144, 2880)):
            held = classes_held(vocab, room, tokens)
            if held == 0:
                continue
            for stored in (False, True):
                classes = classes_of_slice(tokens, vocab, tokens)
                slices = all_slices(vocab, held, tokens, room, classes, stored)
                # From the first class on, without a gap, none in both pieces.
                assert [rows.start for rows, _ in slices] == [0] + [rows.stop for rows, _ in slices[:-1]]
                assert slices[-1][0].stop == vocab and held in [rows.stop for rows, _ in slices]
                for rows, direct in slices:
                    assert direct or rows.stop - rows.start <= classes
                    if rows.stop <= held:
                        # What is written ends before what is read, or with a copy before what is to be read, begins.
                        assert rows.stop * room <= (rows.start if direct else rows.stop) * tokens
                    assert not direct or stored
                assert not stored or slices[-1][1]

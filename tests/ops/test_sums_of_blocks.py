"""The launch that adds up the sums of blocks begins while the one before it, which writes them, ends."""

import pytest
import torch
from common import HAS_GPU
from common import randn
from common import recorded_launches

from tilegym.backend import recording
from tilegym.interpreter import compile_kernel
from tilegym.ops.cutile import dual_rms_norm
from tilegym.ops.cutile import group_norm
from tilegym.ops.cutile import rms_norm_gated
from tilegym.ops.cutile import row_norms
from tilegym.ops.cutile import row_norms_backward

PREEXIT = b"\x2d\x78" + bytes(6)  # the instruction of sm_90 by which a block lets the next launch begin


def tensors(*shape: int, count: int = 1) -> tuple[torch.Tensor, ...]:
    return tuple(randn(*shape, dtype=torch.bfloat16, seed=i).cpu() for i in range(count))


def norm():
    (x, dy), (w,) = tensors(33, 1024, count=2), tensors(1024)
    row_norms_backward.norm_backward(dy, x, None, w, None, torch.ones(33), 0.0, 1, True, False, torch.bfloat16)


def dual():
    q, k, (w,) = tensors(33, 2, 64, count=2), tensors(33, 1, 64, count=2), tensors(64)
    dual_rms_norm.dual_rms_norm_backward(q[0], k[0], q[1], k[1], w, w, 1e-6, 0.0, True, True)


def gated():
    (x, gate, dy), (w,) = tensors(33, 1024, count=3), tensors(1024)
    rms_norm_gated.rms_norm_gated_backward(dy, x, gate, w, 1e-6, True, 1024, True, True)


def group(size: int):
    (x, dy), (w,) = tensors(2, 4, size, count=2), tensors(4)
    group_norm.group_norm_backward(dy, x, torch.ones(4, 3), 2, w, True, True, torch.bfloat16)


CALLS = {
    "rms_norm": norm,
    "dual_rms_norm": dual,
    "rms_norm_gated": gated,
    "group_norm of one part": lambda: group(64),
    "group_norm of too many parts": lambda: group(2**15),
}


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_sums_are_added_by_a_launch_that_begins_early(call, monkeypatch):
    for module in (dual_rms_norm, group_norm, rms_norm_gated, row_norms, row_norms_backward):
        monkeypatch.setattr(module, "overlaps", lambda device: True)
    recording.forget()  # a call that repeats a recorded one asks for nothing
    with recorded_launches() as launches:
        call()
    recording.forget()
    (kernel, args), (adding, overlapping) = launches[-2:]
    assert adding._pyfunc.__name__ == "add_blocks_kernel"
    assert overlapping[-1] is True
    assert PREEXIT in compile_kernel(kernel, args, "sm_90")

"""What a repeated call of an op has the host do, by counts that are the same in every run.

A call costs the host the launches, the allocations and views, each several hundred nanoseconds of PyTorch's, and the
Python functions around them. Where one of these figures has to grow, measure with ``tilegym bench --host-only`` first.
"""

import sys
from collections.abc import Callable

import pytest
import torch
from common import recorded_launches

from tilegym import ops
from tilegym.backend import recording
from tilegym.backend import use_backend

# From the public function to the first launch: the dispatch, the look at the arguments, the recording. In the
# interpreter a launch takes three more: that and an import in it, and the tests' stand-in.
PYTHON_FUNCTIONS = 6
PER_LAUNCH = 3


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def heads(*shape: int) -> torch.Tensor:
    """[B, H, S, D], as a model has it: the heads of a token lie side by side."""
    return tensor(*shape).transpose(1, 2).contiguous().transpose(1, 2)


ROW, ROWS, WEIGHT = tensor(1, 1, 512), tensor(2, 64, 512), tensor(512)
# The call, its launches, the tensors that it makes, and the functions in C that Python calls.
CALLS: dict[str, tuple[Callable, int, int, int]] = {
    "fmha": (lambda q=heads(1, 4, 64, 64), k=heads(1, 2, 64, 64), v=heads(1, 2, 64, 64): ops.fmha(q, k, v), 1, 1, 7),
    "fmha_decode": (
        lambda q=tensor(1, 8, 1, 64), k=tensor(1, 2, 640, 64), v=tensor(1, 2, 640, 64): ops.fmha_decode(q, k, v),
        2, 2, 10,
    ),
    "splitk_reduce": (
        lambda part=tensor(1, 8, 4, 64, dtype=torch.float32), lse=tensor(1, 8, 4, dtype=torch.float32):
            ops.splitk_reduce(part, lse, torch.bfloat16),
        1, 1, 7,
    ),
    "rms_norm": (lambda: ops.rms_norm(ROW, (512,), WEIGHT, 1e-6), 1, 1, 7),
    "fused_add_rms_norm": (lambda other=ROW + 1: ops.fused_add_rms_norm(ROW, other, WEIGHT, 1e-6), 1, 2, 8),
    "layer_norm": (lambda bias=tensor(512): ops.layer_norm(ROW, (512,), WEIGHT, bias), 1, 1, 7),
    "linear of one row": (lambda weight=tensor(64, 512): ops.linear(ROW, weight), 1, 1, 7),
    "linear of a batch": (
        lambda x=tensor(3, 1, 512), weight=tensor(64, 512): ops.linear(x, weight), 1, 1, 7
    ),
    "linear of many rows": (lambda weight=tensor(64, 512): ops.linear(ROWS, weight), 1, 3, 7),
    "matmul": (lambda a=tensor(64, 64), b=tensor(64, 64): ops.matmul(a, b), 1, 1, 7),
    "softmax": (lambda: ops.softmax(ROW), 1, 1, 7),
    "silu_and_mul": (lambda: ops.silu_and_mul(ROW), 1, 1, 7),
    "swiglu": (lambda other=ROW + 1: ops.swiglu(ROW, other), 1, 1, 7),
    "apply_rope_base": (
        lambda q=heads(1, 8, 4, 64), k=heads(1, 2, 4, 64), cos=tensor(1, 4, 64), sin=tensor(1, 4, 64):
            ops.apply_rope_base(q, k, cos, sin),
        1, 2, 8,
    ),
    "cross_entropy": (lambda x=tensor(4, 70), y=torch.tensor([3, 2, 1, 0]): ops.cross_entropy(x, y), 2, 5, 12),
}  # fmt: skip


def counted(call: Callable) -> tuple[int, int]:
    """How many functions of Python, and of C, a call runs below its own."""
    counts = dict.fromkeys(("call", "c_call"), 0)

    def count(frame, event, arg):
        counts[event] = counts.get(event, 0) + 1

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counts["call"] - 1, counts["c_call"] - 1


def made_by(repeat: Callable) -> int:
    """How many tensors a function of :class:`recording_source.Repeat` allocates or takes as views."""
    return sum(name.startswith("m") for name in repeat.__code__.co_varnames)


@pytest.mark.parametrize("name", CALLS)
def test_repeated_calls(name):
    call, launches, made, c_functions = CALLS[name]
    with recorded_launches() as seen, use_backend("cutile"):
        for _ in range(4):  # seen, recorded, repeated, and kept as the latest
            call()
        seen.clear()
        python_calls, c_calls = counted(call)
        assert len(seen) == launches
    found = [
        known
        for recordings in getattr(ops, name.split()[0]).op.chosen_recordings.values()
        for known in recordings.known.values()
    ]
    assert [made_by(known.repeat) for known in found if isinstance(known, recording.Recording)] == [made]
    assert python_calls <= PYTHON_FUNCTIONS + PER_LAUNCH * launches
    assert c_calls - launches <= c_functions  # the tests' stand-in takes one down

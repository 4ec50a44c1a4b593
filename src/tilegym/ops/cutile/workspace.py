"""Memory through which blocks of one launch pass parts of a result to the block that puts them together.

Which block that is, the last one, comes out by counting: a block stores its part, then adds one to a counter by
``ct.atomic_add``, whose default order and scope (acquire and release, of the device) make all that the block has
stored visible to whoever counts later. cuTile orders every access of a block that comes before such an operation in the
program before it, and every later one behind it. The block that finds all others counted reads their parts, and sets
the counter back to zero for the next launch.
"""

import torch

# As in launch.py: torch.cuda's own functions for these cost as much as a launch.
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
MIN_PARTS, MIN_COUNTERS = 2**18, 2**12
MAX_KEPT = 2**22  # numbers, 16 MB a stream


class _Workspace:
    """What the launches on one stream, which run one after the other, share."""

    def __init__(self, like: torch.Tensor, numbers: int, count: int) -> None:
        self.numbers = like.new_empty(max(numbers, MIN_PARTS), dtype=torch.float32)
        self.counters = like.new_zeros(max(count, MIN_COUNTERS), dtype=torch.int32)
        self.views: dict[tuple[int, ...], torch.Tensor] = {}


_workspaces: dict[tuple[int, int], _Workspace] = {}


def workspace(like: torch.Tensor, shape: tuple[int, ...], count: int, reuse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """For one launch on the current stream: fp32 of ``shape`` with any content, and at least ``count`` int32 zeros.

    The launch has to leave the counters at zero.

    Args:
        like: a tensor on the launch's device.
        shape, count: what is needed.
        reuse: whether it may be what earlier launches on this stream used: an allocation takes as long as a quarter of
            a launch, and zeros are a launch. Even so a CUDA graph gets its own, since it may be replayed on any stream.
            False in compiled code, which may run in a memory pool that has to give everything back.
    """
    index = like.get_device()
    if reuse and index >= 0 and index == _current_device() and not torch.cuda.is_current_stream_capturing():
        stream = index, _raw_stream(index)
        kept = _workspaces.get(stream)
        parts = None if kept is None else kept.views.get(shape)
        if parts is not None and kept.counters.shape[0] >= count:
            return parts, kept.counters
        numbers = torch.Size(shape).numel()
        if numbers <= MAX_KEPT:
            if kept is None or kept.numbers.numel() < numbers or kept.counters.numel() < count:
                kept = _workspaces[stream] = _Workspace(like, numbers, count)
            if len(kept.views) >= 1024:
                kept.views.clear()
            parts = kept.views[shape] = kept.numbers[:numbers].view(shape)
            return parts, kept.counters
    return like.new_empty(shape, dtype=torch.float32), like.new_zeros(count, dtype=torch.int32)

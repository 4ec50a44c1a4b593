"""Counters by which the last of several blocks that share a piece of work finds out that it is the last.

A block stores its part, then adds one to the piece's counter by ``ct.atomic_add``, whose default order and scope
(acquire and release, of the device) make all stores of the block before it visible to whoever counts later: cuTile
orders every access of a block before such an operation and every access after it behind it. The block that finds all
others counted reads their parts, and sets the counter back to zero for the next launch.
"""

import torch

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_counters: dict[tuple[int, int], torch.Tensor] = {}
MIN_COUNTERS = 4096


def arrival_counters(like: torch.Tensor, count: int, reuse: bool) -> torch.Tensor:
    """At least ``count`` int32 zeros on the device of ``like`` for one launch on the current stream.

    Args:
        like: any tensor of the launch.
        count: pieces of work.
        reuse: whether the counters may be those that earlier launches on this stream have left at zero. Even so a
            CUDA graph gets its own, zeroed by every replay, since it may run beside anything else on that stream's
            device. False in compiled code, which may run in a memory pool that has to give everything back.
    """
    index = like.get_device()
    if not reuse or index < 0 or index != torch.cuda.current_device() or torch.cuda.is_current_stream_capturing():
        return like.new_zeros(count, dtype=torch.int32)
    key = (index, _raw_stream(index))
    counters = _counters.get(key)
    if counters is None or counters.shape[0] < count:
        counters = _counters[key] = like.new_zeros(max(count, MIN_COUNTERS), dtype=torch.int32)
    return counters

"""``argmax`` in cuTile: the best of each tile of a row, then the best of these, as numbers with the index in them.

On an H200 the logits of Llama-3.1-8B take 4 us in a graph, PyTorch's of 256 parts of them 15.
"""

import math

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import INT32_MAX
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.pytorch.argmax import check_argmax

TILE = 1024  # elements a block, as long as the second launch takes what blocks there are in one tile
MAX_BLOCKS = 1024
MAX_ROWS = 65535  # of one launch: blocks along the second axis
INFINITY_BITS, LOW_WORD = 0x7F800000, 2**32 - 1


@ct.kernel
def top_kernel(x, tops, TILE_N: Int, OVERLAP: Bool):
    """x [M, V]; tops [M, blocks] int64: of each tile the largest element in the order of integers, above what its first
    index leaves of INT32_MAX."""
    begin(OVERLAP)
    row = ct.bid(1)
    at = ct.bid(0) * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    value = ct.gather(x, (row, at), padding_value=-math.inf).astype(ct.float32)
    bits = ct.bitcast(value, ct.int32)
    size = ct.bitwise_and(bits, INT32_MAX)
    order = ct.where(bits < 0, -size, size)  # both zeros alike
    order = ct.where(size > INFINITY_BITS, INT32_MAX, order)  # NaN
    key = order.astype(ct.int64) * (LOW_WORD + 1) + (INT32_MAX - at).astype(ct.int64)
    ct.scatter(tops, (row, ct.bid(0)), ct.max(key))


@ct.kernel
def pick_kernel(tops, out, TILE_N: Int, OVERLAP: Bool):
    """tops [M, blocks], out [M]; one block a row."""
    begin(OVERLAP)
    row = ct.bid(0)
    at = ct.minimum(ct.arange(TILE_N, dtype=ct.int32), tops.shape[1] - 1)
    key = ct.max(ct.gather(tops, (row, at)))
    ct.scatter(out, row, INT32_MAX - ct.bitwise_and(key, LOW_WORD))


def _fake(x):
    return x.new_empty(x.shape[:-1], dtype=torch.int64)


@compilable(_fake)
def argmax_forward(x: torch.Tensor) -> torch.Tensor:
    out = _fake(x)
    _launch(x, out)
    return out


@compilable(fake=lambda x, out: None, mutates=("out",))
def argmax_into(x: torch.Tensor, out: torch.Tensor) -> None:
    _launch(x, out)


def _launch(x: torch.Tensor, out: torch.Tensor) -> None:
    width, overlap, count = x.shape[-1], overlaps(x.get_device()), out.numel()
    if count == 0:
        return
    tile = max(TILE, next_power_of_2(-(-width // MAX_BLOCKS)))
    blocks = -(-width // tile)
    tops = x.new_empty(count, blocks, dtype=torch.int64)
    launch(x, (blocks, count), top_kernel, (rows_of(x), tops, tile, overlap), overlap)
    launch(x, (count,), pick_kernel, (tops, out.view(-1), next_power_of_2(blocks), overlap), overlap)


@register_impl("argmax", "cutile")
def argmax(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    check_argmax(x, out)
    if x.dtype not in FLOATS:
        raise UnsupportedError("x is not fp32, fp16 or bf16")
    if x.shape[:-1].numel() > MAX_ROWS:
        raise UnsupportedError(f"x has more than {MAX_ROWS} rows")
    if out is None:
        return argmax_forward(x.detach())
    argmax_into(x.detach(), out)
    return out

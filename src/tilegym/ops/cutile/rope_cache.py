"""``rope_and_cache`` in cuTile: a block a head; q comes out rotated, k and v go into the cache."""

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.pytorch.rope_cache import check_cache


def _copy(x, y, b, head, token, FIRST: Int, COUNT: Int):
    """Columns FIRST to FIRST + COUNT of x's only token to ``token`` of y."""
    cols = ct.arange(ct.static_eval(next_power_of_2(COUNT)), dtype=ct.int32) + FIRST
    inside = cols < FIRST + COUNT
    ct.scatter(y, (b, head, token, cols), ct.gather(x, (b, head, 0, cols), mask=inside), mask=inside)


def _rotate(x, y, cos, sin, b, head, token, HALF: Int, REST: Int, BATCHED: Bool, PAIRS: Bool, KEPT: Bool):
    cols = ct.arange(ct.static_eval(next_power_of_2(HALF)), dtype=ct.int32)
    own, row = cols < HALF, b if BATCHED else 0
    c = ct.gather(cos, (row, 0, cols), mask=own).astype(ct.float32)
    s = ct.gather(sin, (row, 0, cols), mask=own).astype(ct.float32)
    first, second = (2 * cols, 2 * cols + 1) if PAIRS else (cols, cols + HALF)
    x1 = ct.gather(x, (b, head, 0, first), mask=own).astype(ct.float32)
    x2 = ct.gather(x, (b, head, 0, second), mask=own).astype(ct.float32)
    if PAIRS and not KEPT:
        first, second = cols, cols + HALF
    ct.scatter(y, (b, head, token, first), (x1 * c - x2 * s).astype(y.dtype), mask=own)
    ct.scatter(y, (b, head, token, second), (x2 * c + x1 * s).astype(y.dtype), mask=own)
    if REST:
        _copy(x, y, b, head, token, 2 * HALF, REST)


@ct.kernel
def rope_cache_kernel(
    q, k, v, cos, sin, out, keys, values, position, HALF: Int, REST: Int, V_DIM: Int, BATCHED: Bool, PAIRS: Bool,
    KEPT: Bool, OVERLAP: Bool,
):  # fmt: skip
    begin(OVERLAP)
    b, head = ct.bid(1), ct.bid(0)
    q_heads, kv_heads = q.shape[1], k.shape[1]
    token = ct.load(position, (0,), (1,)).item()
    if head < q_heads:
        _rotate(q, out, cos, sin, b, head, 0, HALF, REST, BATCHED, PAIRS, KEPT)
    elif head < q_heads + kv_heads:
        _rotate(k, keys, cos, sin, b, head - q_heads, token, HALF, REST, BATCHED, PAIRS, KEPT)
    else:
        _copy(v, values, b, head - q_heads - kv_heads, token, 0, V_DIM)


@compilable(fake=lambda q, *_: torch.empty_like(q), mutates=("keys", "values"))
def rope_cache_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    one_half: bool,
    pairs: str,
) -> torch.Tensor:
    out = torch.empty_like(q)
    half, dim, overlap = cos.shape[2] // (1 if one_half else 2), q.shape[3], overlaps(q.get_device())
    grid = (q.shape[1] + 2 * k.shape[1], q.shape[0])
    form = (half, dim - 2 * half, v.shape[3], cos.shape[0] > 1, pairs != "", pairs == "kept", overlap)
    launch(q, grid, rope_cache_kernel, (q, k, v, cos, sin, out, keys, values, position, *form), overlap)
    return out


@register_impl("rope_and_cache", "cutile")
def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: torch.Tensor,
    one_half: bool = False,
    pairs: str = "",
) -> torch.Tensor:
    check_cache(q, k, v, cos, sin, keys, values, position, one_half, pairs)
    if q.dtype not in FLOATS:
        raise UnsupportedError("q is not fp32, fp16 or bf16")
    return rope_cache_forward(q, k, v, cos, sin, keys, values, position.view(1), one_half, pairs)

"""``rope_and_cache`` in cuTile: a block a head; q comes out normalised and rotated, k and v go into the cache."""

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.row_norms import rstd_of
from tilegym.ops.cutile.row_norms import scaled
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import let_next_begin
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.pytorch.rope_cache import check_cache
from tilegym.ops.pytorch.rope_cache import check_head_norms


def _copy(x, y, b, head, token, FIRST: Int, COUNT: Int):
    """Columns FIRST to FIRST + COUNT of x's only token to ``token`` of y."""
    cols = ct.arange(ct.static_eval(next_power_of_2(COUNT)), dtype=ct.int32) + FIRST
    inside = cols < FIRST + COUNT
    ct.scatter(y, (b, head, token, cols), ct.gather(x, (b, head, 0, cols), mask=inside), mask=inside)


def _places(HALF: Int, PAIRS: Bool):
    """Which elements of a head are rotated together, and the tile's columns, those up to HALF of them real."""
    cols = ct.arange(ct.static_eval(next_power_of_2(HALF)), dtype=ct.int32)
    first, second = (2 * cols, 2 * cols + 1) if PAIRS else (cols, cols + HALF)
    return first, second, cols


def _parts(x, at, HALF: Int, REST: Int, PAIRS: Bool):
    """The elements of a head of x, or of a norm's weight, that are rotated together, and those that are not."""
    first, second, cols = _places(HALF, PAIRS)
    parts = ct.gather(x, (*at, first), mask=cols < HALF), ct.gather(x, (*at, second), mask=cols < HALF)
    if REST:
        others = ct.arange(ct.static_eval(next_power_of_2(REST)), dtype=ct.int32)
        parts = (*parts, ct.gather(x, (*at, others + 2 * HALF), mask=others < REST))
    return parts


def _normed(x, norm, eps, dtype, OFFSET: Float, ROUND: Bool, HALF: Int, REST: Int):
    """Such parts of a head, normalised as rms_norm rounds them, in fp32."""
    x1, x2 = x[0].astype(ct.float32), x[1].astype(ct.float32)
    squares = ct.sum((x1 * x1 + x2 * x2).reshape((1, x1.shape[0])), axis=1, keepdims=True)
    if REST:
        rest = x[2].astype(ct.float32)
        squares = squares + ct.sum((rest * rest).reshape((1, rest.shape[0])), axis=1, keepdims=True)
    rstd, ys = rstd_of(squares, eps, ct.static_eval(2 * HALF + REST)).reshape((1,)), ()
    for i in ct.static_iter(range(3 if REST else 2)):
        y = scaled(x[i].astype(ct.float32) * rstd, norm[i], None, dtype, OFFSET, ROUND)
        ys = (*ys, y.astype(dtype).astype(ct.float32))
    return ys


def _rotate(
    x, y, cos, sin, norm, eps, b, head, token, HALF: Int, REST: Int, BATCHED: Bool, PAIRS: Bool, KEPT: Bool,
    OFFSET: Float, ROUND: Bool,
):  # fmt: skip
    first, second, cols = _places(HALF, PAIRS)
    own, row = cols < HALF, b if BATCHED else 0
    c = ct.gather(cos, (row, 0, cols), mask=own).astype(ct.float32)
    s = ct.gather(sin, (row, 0, cols), mask=own).astype(ct.float32)
    if norm is None:
        x1 = ct.gather(x, (b, head, 0, first), mask=own).astype(ct.float32)
        x2 = ct.gather(x, (b, head, 0, second), mask=own).astype(ct.float32)
    else:
        parts = _parts(x, (b, head, 0), HALF, REST, PAIRS)
        parts = _normed(parts, norm, eps, x.dtype, OFFSET, ROUND, HALF, REST)
        x1, x2 = parts[0], parts[1]
    if PAIRS and not KEPT:
        first, second = cols, cols + HALF
    ct.scatter(y, (b, head, token, first), (x1 * c - x2 * s).astype(y.dtype), mask=own)
    ct.scatter(y, (b, head, token, second), (x2 * c + x1 * s).astype(y.dtype), mask=own)
    if REST and norm is None:
        _copy(x, y, b, head, token, 2 * HALF, REST)
    elif REST:
        others = ct.arange(ct.static_eval(next_power_of_2(REST)), dtype=ct.int32)
        ct.scatter(y, (b, head, token, others + 2 * HALF), parts[2].astype(y.dtype), mask=others < REST)


@ct.kernel
def rope_cache_kernel(
    q, k, v, cos, sin, out, keys, values, position, q_norm, k_norm, eps, HALF: Int, REST: Int, V_DIM: Int,
    BATCHED: Bool, PAIRS: Bool, KEPT: Bool, NORMED: Bool, OFFSET: Float, ROUND: Bool, OVERLAP: Bool,
):  # fmt: skip
    # q_norm and k_norm [D] if NORMED, else 0
    let_next_begin(OVERLAP)
    query_norm = own_norm = None
    if NORMED:
        query_norm, own_norm = _parts(q_norm, (), HALF, REST, PAIRS), _parts(k_norm, (), HALF, REST, PAIRS)
    if OVERLAP:
        ct.grid_dependency_control_wait()
    b, head = ct.bid(1), ct.bid(0)
    q_heads, kv_heads = q.shape[1], k.shape[1]
    token = ct.load(position, (0,), (1,)).item()
    if head < q_heads:
        _rotate(q, out, cos, sin, query_norm, eps, b, head, 0, HALF, REST, BATCHED, PAIRS, KEPT, OFFSET, ROUND)
    elif head < q_heads + kv_heads:
        at = head - q_heads
        _rotate(k, keys, cos, sin, own_norm, eps, b, at, token, HALF, REST, BATCHED, PAIRS, KEPT, OFFSET, ROUND)
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
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    offset: float,
    rounded: bool,
) -> torch.Tensor:
    out = torch.empty_like(q)
    half, dim, overlap = cos.shape[2] // (1 if one_half else 2), q.shape[3], overlaps(q.get_device())
    grid = (q.shape[1] + 2 * k.shape[1], q.shape[0])
    form = (half, dim - 2 * half, v.shape[3], cos.shape[0] > 1, pairs != "", pairs == "kept")
    norms = (0, 0, 0.0) if q_norm is None else (q_norm, k_norm, eps)
    how = (q_norm is not None, offset, rounded, overlap)
    launch(q, grid, rope_cache_kernel, (q, k, v, cos, sin, out, keys, values, position, *norms, *form, *how), overlap)
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
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor:
    check_cache(q, k, v, cos, sin, keys, values, position, one_half, pairs)
    check_head_norms("rope_and_cache", q, k, q_norm, k_norm, casting)
    if q.dtype not in FLOATS:
        raise UnsupportedError("q is not fp32, fp16 or bf16")
    norms = (q_norm, k_norm, float(eps), float(offset), casting == "llama")
    return rope_cache_forward(q, k, v, cos, sin, keys, values, position.view(1), one_half, pairs, *norms)

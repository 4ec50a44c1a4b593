"""Group normalisation, ``y = (x - mean) * rstd * w + b`` with mean and variance over a group of channels.

Kernels take x as [B * C, S], a channel of a sample a row. Most groups are cut into parts, which as many blocks hold in
their registers: see :mod:`tilegym.ops.cutile.group_norm_parts`. Groups of more parts than can be sure to have blocks at
the same time take two kernels. The first one reads x once and leaves each row's mean and sum of squared differences to
it; tiles are merged as Chan, Golub and LeVeque 1979 do, so that nothing cancels. The second one merges those of a group
in the same way, and writes y.

Backward: a first kernel leaves each row's ``sum(dy)`` and ``sum(dy * xhat)``. With ``g = dy * w``, those of a group
give the means in ``dx = rstd * (g - mean(g) - xhat * mean(g * xhat))``, and those of a channel, added up over batches,
the gradients of b and w. Sums are in a fixed order.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import of_caller
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.group_norm_parts import group_norm_parts_backward_kernel
from tilegym.ops.cutile.group_norm_parts import group_norm_parts_kernel
from tilegym.ops.cutile.group_norm_parts import known
from tilegym.ops.cutile.parts import launch_parts
from tilegym.ops.cutile.row_norms import add_rows
from tilegym.ops.cutile.row_norms import contiguous_like
from tilegym.ops.cutile.row_norms import load
from tilegym.ops.cutile.row_norms import store
from tilegym.ops.cutile.row_norms import sums_dtype
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.group_norm import check_group_norm

MAX_GROUP = 8192  # channels, of whose statistics a block holds all
MAX_GROUPS = 65535  # of several parts: blocks along axis 2


@ct.kernel
def channel_statistics_kernel(x, means, squares, S: Int, TILE_M: Int, TILE_N: Int):
    """x: [B * C, S]; means, squares: [B * C], the mean and the sum of squared differences to it."""
    rows = span(ct.bid(0), TILE_M)
    mean = ct.zeros((TILE_M, 1), ct.float32)
    total = ct.zeros((TILE_M, 1), ct.float32)
    for tile in range(ct.cdiv(S, TILE_N)):
        cols = span(tile, TILE_N)
        part = load(x, rows, cols).astype(ct.float32)
        seen, new = tile * TILE_N, min(TILE_N, S - tile * TILE_N)
        part_mean = ct.sum(part, axis=1, keepdims=True) / new
        rest = ct.where(cols[None, :] < S, part - part_mean, 0.0)
        # What rounding left of the mean: a long sum of large values is off by more than one such value's rounding.
        off = ct.sum(rest, axis=1, keepdims=True) / new
        part_mean, rest = part_mean + off, ct.where(cols[None, :] < S, rest - off, 0.0)
        delta, share = part_mean - mean, new / (seen + new)
        mean = mean + delta * share
        total = total + ct.sum(rest * rest, axis=1, keepdims=True) + delta * delta * (seen * share)
    ct.scatter(means, rows[:, None], mean)
    ct.scatter(squares, rows[:, None], total)


def _of_group(values, rows, CHANNELS: Int):
    """The values [B * C] of all channels of each row's group, [TILE_M, next power of 2], and which of them exist."""
    at = ct.arange(ct.static_eval(next_power_of_2(CHANNELS)), dtype=ct.int32)[None, :]
    inside = (at < CHANNELS) & (rows[:, None] >= 0)
    return ct.gather(values, (rows // CHANNELS * CHANNELS)[:, None] + at, mask=inside), inside


def _statistics(means, squares, rows, eps, S: Int, CHANNELS: Int):
    """Mean, what rounding left of it, and rstd of each row's group, [TILE_M, 1]."""
    of_channels, inside = _of_group(means, rows, CHANNELS)
    mean = ct.sum(of_channels, axis=1, keepdims=True) / CHANNELS
    rest = ct.where(inside, of_channels - mean, 0.0)
    off = ct.sum(rest, axis=1, keepdims=True) / CHANNELS
    rest = ct.where(inside, rest - off, 0.0)
    total = ct.sum(_of_group(squares, rows, CHANNELS)[0], axis=1, keepdims=True)
    total = total + ct.sum(rest * rest, axis=1, keepdims=True) * S
    return mean, off, ct.rsqrt(total / (CHANNELS * S) + eps)


def _of_channel(vector, rows, C: Int, GIVEN: Bool):
    return ct.gather(vector, rows % C)[:, None].astype(ct.float32) if GIVEN else None


@ct.kernel
def group_norm_kernel(
    x, means, squares, weight, bias, y, statistics, eps, S: Int, C: Int, CHANNELS: Int, TILE_M: Int, TILE_N: Int,
    WEIGHT: Bool, BIAS: Bool,
):  # fmt: skip
    """Given those of the rows, writes ``statistics`` of the groups, too; CHANNELS in a group, C in all."""
    across = ct.cdiv(S, TILE_N)
    rows, cols = span(ct.bid(0) // across, TILE_M), span(ct.bid(0) % across, TILE_N)
    row = load(x, rows, cols)
    mean, off, rstd = _statistics(means, squares, rows, eps, S, CHANNELS)
    if ct.bid(0) % across == 0:
        groups = ct.where(rows % CHANNELS == 0, rows // CHANNELS, -1)[:, None]
        for i, value in ct.static_iter(((0, mean), (1, off), (2, rstd))):
            ct.scatter(statistics, (groups, i), value)
    w, b = _of_channel(weight, rows, C, WEIGHT), _of_channel(bias, rows, C, BIAS)
    out = (row.astype(ct.float32) - mean - off) * rstd
    out = out * w if WEIGHT else out
    store(y, rows, cols, out + b if BIAS else out)


@ct.kernel
def channel_sums_kernel(dy, x, statistics, sums, products, S: Int, CHANNELS: Int, TILE_M: Int, TILE_N: Int):
    """sums, products: [B * C], each row's sum of dy and of dy * xhat."""
    rows = span(ct.bid(0), TILE_M)
    mean, off, rstd = known(statistics, rows[:, None] // CHANNELS)
    total = ct.zeros((TILE_M, TILE_N), ct.float32)
    product = ct.zeros((TILE_M, TILE_N), ct.float32)
    for tile in range(ct.cdiv(S, TILE_N)):
        cols = span(tile, TILE_N)
        up = load(dy, rows, cols).astype(ct.float32)  # 0 beyond the row's end
        total = total + up
        product = product + up * ((load(x, rows, cols).astype(ct.float32) - mean - off) * rstd)
    ct.scatter(sums, rows, ct.sum(total, axis=1))
    ct.scatter(products, rows, ct.sum(product, axis=1))


@ct.kernel
def group_norm_backward_kernel(
    dy, x, statistics, sums, products, weight, dx, S: Int, C: Int, CHANNELS: Int, TILE_M: Int, TILE_N: Int,
    WEIGHT: Bool,
):  # fmt: skip
    across = ct.cdiv(S, TILE_N)
    block = ct.num_blocks(0) - 1 - ct.bid(0)  # what the sums were read from last is in the cache still
    rows, cols = span(block // across, TILE_M), span(block % across, TILE_N)
    g, row = load(dy, rows, cols).astype(ct.float32), load(x, rows, cols).astype(ct.float32)
    mean, off, rstd = known(statistics, rows[:, None] // CHANNELS)
    of_g, of_product = _of_group(sums, rows, CHANNELS)[0], _of_group(products, rows, CHANNELS)[0]
    if WEIGHT:
        g = g * _of_channel(weight, rows, C, True)
        at = ct.arange(ct.static_eval(next_power_of_2(CHANNELS)), dtype=ct.int32)[None, :]
        of_group = ct.gather(weight, (rows % C // CHANNELS * CHANNELS)[:, None] + at).astype(ct.float32)
        of_g, of_product = of_g * of_group, of_product * of_group
    mean_g = ct.sum(of_g, axis=1, keepdims=True) / (CHANNELS * S)
    mean_product = ct.sum(of_product, axis=1, keepdims=True) / (CHANNELS * S)
    store(dx, rows, cols, rstd * (g - mean_g - (row - mean - off) * rstd * mean_product))


@functools.lru_cache(maxsize=1024)
def reduction_plan(rows: int, s: int, channels: int) -> tuple[tuple[int], int, int]:
    """(grid, TILE_M, TILE_N) of the kernels that walk along rows [rows, s]."""
    tile_n = min(4096, next_power_of_2(s))
    tile_m = max(1, min(4096 // tile_n, 8192 // next_power_of_2(channels)))
    return (ct.cdiv(rows if s else 0, tile_m),), tile_m, tile_n


@functools.lru_cache(maxsize=1024)
def tile_plan(rows: int, s: int, channels: int, elements: int) -> tuple[tuple[int], int, int]:
    """(grid, TILE_M, TILE_N) of the kernels whose blocks take a tile each; statistics count as elements."""
    tile_n = min(elements, next_power_of_2(s))
    tile_m = max(1, min(elements // tile_n, 8192 // next_power_of_2(channels)))
    return (ct.cdiv(rows, tile_m) * ct.cdiv(s, tile_n),), tile_m, tile_n


# Elements of a part, warps, blocks to a multiprocessor, and how many there have to be: in bf16, the fastest on an H200,
# and in other dtypes, of which a thread holds half as many; forward and backward.
PARTS = {
    True: (((16384, 8, 4, 6), (8192, 4, 7, 3), (4096, 4, 8, 0)), ((8192, 8, 4, 6), (4096, 4, 8, 0))),
    False: (((4096, 4, 6, 6), (2048, 4, 8, 0)), ((4096, 8, 4, 6), (2048, 4, 8, 0))),
}


def tiles_of(s: int, channels: int, elements: int) -> tuple[int, int, int]:
    """(parts of a group, TILE_M, TILE_N): as few as there can be, as wide as they can be."""
    widths = [2**i for i in range(min(elements, next_power_of_2(s)).bit_length())]
    tiles = ((min(elements // n, next_power_of_2(channels)), n) for n in widths)
    return min(((ct.cdiv(s, n) * ct.cdiv(channels, m), m, n) for m, n in tiles), key=lambda t: (t[0], -t[2]))


@functools.lru_cache(maxsize=1024)
def parts_plan(
    groups: int, s: int, channels: int, device: int, backward: bool, bf16: bool
) -> tuple[ct.kernel, int, tuple[int, ...]] | None:
    """(kernel, parts of a group, (TILE_M, TILE_N, PARTS) and, forward, DEEP), or None where a group has too many parts.

    On an H200 DEEP makes 16x320x128x128 3 us faster forward, 94 instead of 97, and would make it 6 us slower backward.
    """
    for how in PARTS[bf16][backward]:
        elements, warps, occupancy, least = how
        parts, *tiles = tiles_of(s, channels, elements)
        if groups * parts >= least * sm_count(device):
            break
    # Blocks do not wait for others of which it is not sure that they run at the same time.
    if parts > sm_count(device) or (parts > 1 and groups > MAX_GROUPS):
        return None
    kernel = group_norm_parts_backward_kernel if backward else group_norm_parts_kernel
    kernel = hinted(kernel, num_worker_warps=warps, occupancy=occupancy)
    tiles = *tiles, next_power_of_2(parts)
    if backward:
        return kernel, parts, tiles
    # In fp32 the sums over a thread's values could lose too much.
    full = bf16 and tiles[:2] == (1, elements) and s % elements == 0
    return kernel, parts, (*tiles, elements // (warps * 32 * 8) if full else 0)


def _launch_parts(x, groups, parts, kernel, arrays, constants):
    """Launches ``kernel`` for so many groups of so many parts each."""
    if parts > 1:
        launch_parts(x, (1, parts, groups), kernel, arrays, constants)
    else:
        launch(x, (groups,), kernel, (*arrays, 0, 0, *constants, False, 1))


def _channels(x: torch.Tensor) -> torch.Tensor:
    """``x`` [B, C, ...] as [B * C, S]."""
    batch, channels = x.shape[:2]
    return x.reshape(batch * channels, x.shape[2:].numel())


def _fake_forward(x, num_groups, *_):
    return contiguous_like(x), x.new_empty(x.shape[0] * num_groups, 3, dtype=torch.float32)


@compilable(fake=_fake_forward)
def group_norm_forward(
    x: torch.Tensor, num_groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """y, and of every group of every sample the mean, what rounding left of it, and rstd, [B * groups, 3]."""
    y, rows = contiguous_like(x), _channels(x)
    (m, s), c, device = rows.shape, x.shape[1], x.get_device()
    in_group = c // num_groups
    statistics = torch.empty(x.shape[0] * num_groups, 3, dtype=torch.float32, device=x.device)
    vectors = (0 if weight is None else weight, 0 if bias is None else bias)
    given, sizes = (weight is not None, bias is not None), (s, c, in_group)
    plan = parts_plan(len(statistics), s, in_group, device, False, x.dtype == torch.bfloat16) if m * s else None
    if plan is not None:
        kernel, parts, tiles = plan
        arrays = (rows, *vectors, y.view(m, s), statistics)
        _launch_parts(x, len(statistics), parts, kernel, arrays, (eps, *sizes, *tiles, *given))
        return y, statistics
    means, squares = (torch.empty(m, dtype=torch.float32, device=x.device) for _ in range(2))
    grid, tile_m, tile_n = reduction_plan(m, s, in_group)
    launch(x, grid, channel_statistics_kernel, (rows, means, squares, s, tile_m, tile_n))
    grid, *tiles = tile_plan(m, s, in_group, 2048)
    arrays = (rows, means, squares, *vectors, y.view(m, s), statistics)
    launch(x, grid, group_norm_kernel, (*arrays, eps, *sizes, *tiles, *given))
    return y, statistics


def _fake_backward(dy, x, statistics, num_groups, weight, dweight, dbias, dtype):
    return contiguous_like(x), *(x.new_empty(x.shape[1] if wanted else 0, dtype=dtype) for wanted in (dweight, dbias))


@compilable(fake=_fake_backward)
def group_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    statistics: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None,
    dweight: bool,
    dbias: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x and, in ``dtype``, of weight and bias, empty where not asked for."""
    dx, dy, rows = contiguous_like(x), _channels(dy), _channels(x)
    (m, s), c, device = rows.shape, x.shape[1], x.get_device()
    in_group = c // num_groups
    sizes, w = (s, c, in_group), rows if weight is None else weight
    plan = parts_plan(len(statistics), s, in_group, device, True, x.dtype == torch.bfloat16) if m * s else None
    if plan is not None:
        kernel, parts, tiles = plan
        lines = x.shape[0] * ct.cdiv(s, tiles[1])
        sums, products = (torch.empty(lines, c, dtype=torch.float32, device=x.device) for _ in range(2))
        arrays = (dy, rows, statistics, w, dx.view(m, s), sums, products)
        _launch_parts(x, len(statistics), parts, kernel, arrays, (*sizes, *tiles, weight is not None))
    else:
        empty = torch.empty if s else torch.zeros
        sums, products = (empty(m, dtype=torch.float32, device=x.device) for _ in range(2))
        grid, *tiles = reduction_plan(m, s, in_group)
        # Left to itself the compiler takes registers for two blocks: 16x320x128x128 on an H200 252 us instead of 210.
        kernel = hinted(channel_sums_kernel, occupancy=4)
        launch(x, grid, kernel, (dy, rows, statistics, sums, products, s, in_group, *tiles))
        grid, *tiles = tile_plan(m, s, in_group, 4096)
        arrays = (dy, rows, statistics, sums, products, w, dx.view(m, s))
        launch(x, grid, group_norm_backward_kernel, (*arrays, *sizes, *tiles, weight is not None))
    results = tuple(x.new_empty(c if wanted else 0, dtype=dtype) for wanted in (dweight, dbias))
    pairs = [(t.view(-1, c), out) for t, out in zip((products, sums), results, strict=True) if out.numel()]
    if pairs:
        add_rows(*pairs)
    return dx, *results


class GroupNorm(Function):
    @staticmethod
    def forward(ctx, x, num_groups, weight, bias, eps):
        y, statistics = group_norm_forward(x, num_groups, weight, bias, eps)
        ctx.save_for_backward(x, statistics, weight)
        ctx.num_groups = num_groups
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, statistics, weight = ctx.saved_tensors
        _, _, dweight, dbias, _ = ctx.needs_input_grad
        dtype = sums_dtype(weight, ctx.bias_dtype)
        dx, dw, db = group_norm_backward(dy, x, statistics, ctx.num_groups, weight, dweight, dbias, dtype)
        dw = dw.to(weight.dtype) if dweight else None
        return dx, None, dw, db.to(ctx.bias_dtype) if dbias else None, None


@register_impl("group_norm", "cutile")
def group_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    check_group_norm(input, num_groups, weight, bias)
    if input.dtype not in FLOATS:
        check_floating("group_norm", input=input)
        raise UnsupportedError("input is not fp32, fp16 or bf16")
    if input.shape[1] > MAX_GROUP * num_groups:
        raise UnsupportedError(f"a group has more than {MAX_GROUP} channels")
    if torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return GroupNorm.apply(input, num_groups, weight, bias, of_caller(eps))
    return group_norm_forward(input, num_groups, weight, bias, eps)[0]

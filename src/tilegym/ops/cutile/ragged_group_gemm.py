"""``ragged_group_gemm`` in cuTile: consecutive rows, each group of them times a matrix of its own.

A group's tiles begin at its first row, wherever that is, and of the last one only the group's own rows are stored.
Which rows an item of work has, a first kernel finds out: the host need not know.
"""

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.matmul import GROUP_M
from tilegym.ops.cutile.matmul import tile_of_block
from tilegym.ops.cutile.matmul import uses_tf32
from tilegym.ops.cutile.moe_experts import MAX_ROWS
from tilegym.ops.cutile.moe_experts import as_stored
from tilegym.ops.cutile.moe_experts import choose
from tilegym.ops.cutile.moe_experts import is_hopper
from tilegym.ops.cutile.moe_gemm import depth
from tilegym.ops.cutile.moe_gemm import grouped_outer_kernel
from tilegym.ops.cutile.moe_gemm import grouped_sum_kernel
from tilegym.ops.cutile.moe_gemm import load_bias
from tilegym.ops.cutile.moe_gemm import load_weight
from tilegym.ops.cutile.moe_gemm import multiply
from tilegym.ops.cutile.moe_gemm import zeros_for
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.group_gemm import check_ragged


@ct.kernel
def ragged_schedule_kernel(offsets, rows, work, TILE_M: Int, GROUPS: Int, STEP: Int):
    """For each item of work: its group, its first row, the end of the group, and how many items have one; offsets
    [E + 1], work [4, items].

    Group 0 is what lies before all others, groups 1 to E are those that have a matrix, and E + 1 what lies behind them;
    items that are left over get a larger number.
    """
    groups = ct.arange(GROUPS, dtype=ct.int32)
    experts = offsets.shape[0] - 1
    # Out of bounds is 0: where group 0 begins, and both bounds of the groups that only fill.
    begins = ct.gather(offsets, groups - 1).astype(ct.int32)
    ends = ct.where(groups == experts + 1, rows, ct.gather(offsets, groups).astype(ct.int32))
    tiles = ct.where(ends > begins, ct.cdiv(ends - begins, TILE_M), 0)
    last = ct.cumsum(tiles, axis=0)
    items = span(ct.bid(0), STEP)
    group = ct.sum((items[:, None] >= last[None, :]).astype(ct.int32), axis=1)
    mine = groups[None, :] == group[:, None]
    # Where the group begins, less the rows of the items before it.
    shift = ct.sum(ct.where(mine, (begins - (last - tiles) * TILE_M)[None, :], 0), axis=1)
    ct.scatter(work, (0, items), group)
    ct.scatter(work, (1, items), items * TILE_M + shift)
    ct.scatter(work, (2, items), ct.sum(ct.where(mine, ends[None, :], 0), axis=1))
    ct.scatter(work, (3, items), ct.sum(tiles))


def ragged_product(
    x, w, expert, first, end, n, TILE_M: Int, TILE_N: Int, TILE_K: Int, TRANSPOSED: Bool, WEIGHT_LEFT: Bool, TF32: Bool,
    STEPS: Bool, MAY_BE_NONE: Bool = False,
):  # fmt: skip
    """In a kernel: TILE_M rows of x from row ``first`` on times tile n of the expert's matrix, as :func:`product`.

    MAY_BE_NONE: of an expert that does not exist it is 0.
    """
    acc = zeros_for(TILE_M, TILE_N, WEIGHT_LEFT)
    step = depth(x.dtype, TILE_K, TF32)
    zero = ct.PaddingMode.ZERO
    k_tiles = ct.cdiv(x.shape[1], step)
    if MAY_BE_NONE:
        k_tiles = ct.where((expert >= 0) & (expert < w.shape[0]), k_tiles, 0).item()
    if STEPS:
        x = x.tiled_view((TILE_M, step), padding_mode=zero, traversal_steps=(1, step))
    else:
        x = x.slice(0, first, end).tiled_view((TILE_M, step), padding_mode=zero)
        first = 0
    for k in range(k_tiles):
        rows = x.load((first, k))
        if WEIGHT_LEFT:
            rows = rows.transpose()
        weight = load_weight(w, expert, n, k, TILE_N, step, TRANSPOSED, WEIGHT_LEFT)
        acc = multiply(rows, weight, acc, WEIGHT_LEFT, TF32)
    return acc


@ct.kernel
def ragged_gemm_kernel(
    x,  # [T, K]
    w,  # [E, N, K], or [E, K, N] if TRANSPOSED
    bias,  # [E, N] if BIAS, else 0
    work,  # [4, items]
    c,  # [T, N]
    TILE_M: Int,
    TILE_N: Int,
    TILE_K: Int,
    GROUP_M: Int,
    TRANSPOSED: Bool,
    BIAS: Bool,
    WEIGHT_LEFT: Bool,
    TF32: Bool,
    STEPS: Bool,
    PERSISTENT: Bool,
):
    """Every row of c is written: those of no group with zeros. PERSISTENT, without BIAS: by no more blocks than run at
    once, which load for a tile while they store the one before."""
    n_tiles, sizes = ct.cdiv(c.shape[1], TILE_N), (TILE_M, TILE_N, TILE_K, TRANSPOSED, WEIGHT_LEFT, TF32, STEPS)
    if PERSISTENT:
        items = ct.gather(work, (3, 0))
        for block in range(ct.bid(0), items * n_tiles, ct.num_blocks(0)):
            item, n = tile_of_block(block, items, n_tiles, GROUP_M)
            # Gathered: what ct.load reads in a loop comes by way of shared memory, which the tiles need.
            group, first, end = ct.gather(work, (0, item)), ct.gather(work, (1, item)), ct.gather(work, (2, item))
            # With a branch the tensor cores' instructions would wait for each other.
            acc = ragged_product(x, w, group - 1, first, end, n, *sizes, True)
            store_some(c, first, end, n, acc, TILE_M, TILE_N, WEIGHT_LEFT)
    else:
        item, n = tile_of_block(ct.bid(0), work.shape[1], n_tiles, GROUP_M)
        group = work_at(work, 0, item)
        if group <= w.shape[0] + 1:
            first, end = work_at(work, 1, item), work_at(work, 2, item)
            if (group >= 1) & (group <= w.shape[0]):
                acc = ragged_product(x, w, group - 1, first, end, n, *sizes)
                if BIAS:
                    acc = acc + load_bias(bias, group - 1, n, TILE_N, WEIGHT_LEFT)
            else:
                acc = zeros_for(TILE_M, TILE_N, WEIGHT_LEFT)
            store_some(c, first, end, n, acc, TILE_M, TILE_N, WEIGHT_LEFT)


def store_some(c, first, end, n, acc, TILE_M: Int, TILE_N: Int, WEIGHT_LEFT: Bool):
    """In a kernel: stores tile n of the columns of the rows from ``first`` on, without those from ``end`` on."""
    rows, columns = first + ct.arange(TILE_M, dtype=ct.int32), span(n, TILE_N)
    if WEIGHT_LEFT:
        ct.scatter(c, (rows[None, :], columns[:, None]), acc.astype(c.dtype), mask=(rows < end)[None, :])
    else:
        ct.scatter(c, (rows[:, None], columns[None, :]), acc.astype(c.dtype), mask=(rows < end)[:, None])


def work_at(work, which: Int, item):
    return ct.load(work, (which, item), (1, 1)).item()


def _fake_ragged(a, b, offsets, transpose_b, bias):
    return a.new_empty(a.shape[0], b.shape[1 if transpose_b else 2])


@compilable(fake=_fake_ragged)
def ragged_forward(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, transpose_b: bool, bias: torch.Tensor | None
) -> torch.Tensor:
    c = _fake_ragged(a, b, offsets, transpose_b, bias)
    rows, experts = a.shape[0], b.shape[0]
    if c.numel() == 0 or experts == 0 or (a.shape[1] == 0 and bias is None):
        return c.zero_()
    a = a if a.stride(1) == 1 else a.contiguous()
    b, transposed = as_stored(b, not transpose_b)
    # Large blocks of rows that have a bias were not measured.
    alone = bias is None
    plan = choose(rows, 1, experts, a.element_size(), transposed, a.get_device(), as_vectors=False, alone=alone)
    tile, height = plan.down, plan.rows
    items = rows // height + min(rows, experts + 2)  # at most one tile of each group is not full
    work = offsets.new_empty(4, items, dtype=torch.int32)
    width = next_power_of_2(experts + 2)
    step = max(1, min(32, 8192 // width))
    launch(a, (-(-items // step),), ragged_schedule_kernel, (offsets, rows, work, height, width, step))
    group_m = 4 if height == MAX_ROWS else GROUP_M
    sizes = (height, tile.n, tile.k, group_m, transposed, bias is not None, plan.weight_left, uses_tf32(a.dtype))
    args = (a, b, 0 if bias is None else bias, work, c, *sizes)
    tiles, persistent = items * -(-c.shape[1] // tile.n), plan.persistent and bias is None
    _launch_ragged(tiles, tile.of(ragged_gemm_kernel), args, persistent)
    return c


_older_compiler = False


def _launch_ragged(tiles: int, kernel: ct.kernel, args: tuple, persistent: bool) -> None:
    """With tiles that begin at any row; for compilers before CUDA 13.3, slices, whose descriptors blocks build.

    Measured on an H200 in bf16, in us, persistent (a block a tile, torch's grouped_mm): 65500 rows of Qwen3-30B-A3B's
    experts 629 (644, 598), 16300 of Mixtral-8x7B's 5570 (6350, 6050). Four rows of tiles that share: 641, eight: 646.
    """
    global _older_compiler
    if not _older_compiler:
        blocks = min(tiles, sm_count(args[0].get_device())) if persistent else tiles
        try:
            launch(args[0], (blocks,), kernel, (*args, True, persistent))
            return
        except ct.TileUnsupportedFeatureError:
            _older_compiler = True
    launch(args[0], (tiles,), kernel, (*args, False, False))


@compilable(fake=lambda a, b, offsets: a.new_empty(offsets.shape[0] - 1, a.shape[1], b.shape[1]))
def ragged_outer(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """For each group of rows: a^T b, [E, M, N]."""
    c = a.new_empty(offsets.shape[0] - 1, a.shape[1], b.shape[1])
    if a.numel() == 0 or b.numel() == 0:
        return c.zero_()
    launch_outer(a, b, offsets, c, False, 32)
    return c


def launch_outer(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, c: torch.Tensor, aligned: bool, rows: int
) -> None:
    """Writes a^T b of each group of rows to c; ``aligned`` as in the kernel, to tiles of ``rows``."""
    a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b))
    kernel, tile_m, tile_n = grouped_outer_kernel, 64, 64
    if a.get_device() < 0:
        tile_m, tile_n = 32, 32
    elif a.element_size() == 2:
        tile_m, tile_n = 128, 128
        if is_hopper(a.get_device()):
            # The tile that matmul's sweep on an H200 found.
            kernel, tile_n = hinted(kernel, num_worker_warps=8), 256
    grid = (c.shape[0] * -(-c.shape[1] // tile_m) * -(-c.shape[2] // tile_n),)
    args = (a, b, offsets, c, tile_m, tile_n, rows, aligned, uses_tf32(a.dtype))
    launch(c, grid, kernel, args)


@compilable(fake=lambda x, weights, offsets: x.new_empty(offsets.shape[0] - 1, x.shape[1]))
def ragged_sum(x: torch.Tensor, weights: torch.Tensor | None, offsets: torch.Tensor) -> torch.Tensor:
    """The sum of each group's rows of ``x`` [T, N], times ``weights`` [T] if given: [E, N]."""
    out = x.new_empty(offsets.shape[0] - 1, x.shape[1])
    tile = min(128, next_power_of_2(x.shape[1]))
    grid = (out.shape[0] * -(-out.shape[1] // tile),)
    given = weights is not None
    launch(x, grid, grouped_sum_kernel, (x, weights if given else 0, offsets, out, 16, tile, given))
    return out


class RaggedGroupGEMM(Function):
    @staticmethod
    def forward(ctx, a, b, offsets, transpose_b, bias):
        ctx.save_for_backward(a, b, offsets)
        ctx.transpose_b = transpose_b
        return ragged_forward(a, b, offsets, transpose_b, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dc):
        a, b, offsets = ctx.saved_tensors
        da = db = dbias = None
        if ctx.needs_input_grad[0]:
            da = ragged_forward(dc, b, offsets, not ctx.transpose_b, None)
        if ctx.needs_input_grad[1]:
            db = ragged_outer(*((dc, a) if ctx.transpose_b else (a, dc)), offsets)
        if ctx.needs_input_grad[4]:
            dbias = ragged_sum(dc, None, offsets)
        return da, db, None, None, dbias


@register_impl("ragged_group_gemm", "cutile")
def ragged_group_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    transpose_b: bool = True,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    check_ragged(a, b, offsets, transpose_b, bias)
    if a.dtype not in FLOATS:
        raise UnsupportedError("a is not fp32, fp16 or bf16")
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)):
        return RaggedGroupGEMM.apply(a, b, offsets, transpose_b, bias)
    return ragged_forward(a, b, offsets, transpose_b, bias)

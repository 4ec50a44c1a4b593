"""``group_gemm`` and ``ragged_group_gemm`` in cuTile: many matrix products in one launch.

A list of products: a block finds the one that its tile belongs to by their numbers of tiles; products that fill the GPU
alone have a launch each. Ragged rows: a group's tiles begin at its first row, wherever that is, and of the last one
only the group's own rows are stored. Which rows an item of work has, a first kernel finds out: the host need not know.
"""

import cuda.tile as ct
import torch

from tilegym.backend import recording
from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.matmul import GROUP_M
from tilegym.ops.cutile.matmul import gemm
from tilegym.ops.cutile.matmul import load_tile
from tilegym.ops.cutile.matmul import matmul_kernel
from tilegym.ops.cutile.matmul import multiply_tiles
from tilegym.ops.cutile.matmul import tile_of_block
from tilegym.ops.cutile.matmul import uses_tf32
from tilegym.ops.cutile.moe_experts import PAIRED
from tilegym.ops.cutile.moe_experts import WARPS_8
from tilegym.ops.cutile.moe_experts import Tile
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
from tilegym.ops.pytorch.group_gemm import check_group
from tilegym.ops.pytorch.group_gemm import check_ragged

FEW_ROWS = 16


def few_rows_tile(n, a, b, c, TILE_M: Int, TILE_N: Int, TILE_K: Int, TRANS_A: Bool, TRANS_B: Bool, TF32: Bool):
    """In a kernel: computes and stores tile n of the columns of op(A) @ op(B), of at most TILE_M rows.

    Tensor cores take 64 rows of the left operand at a time, and of the right one 8 columns: that is what A becomes.
    """
    acc = ct.zeros((TILE_N, TILE_M), dtype=ct.float32)
    for k in range(ct.cdiv(a.shape[0 if TRANS_A else 1], TILE_K)):
        left = load_tile(b, n, k, TILE_N, TILE_K, not TRANS_B, True)
        acc = multiply(load_tile(a, k, 0, TILE_K, TILE_M, not TRANS_A, True), left, acc, True, TF32)
    ct.store(c, (0, n), acc.transpose().astype(c.dtype))


@ct.kernel
def few_rows_product_kernel(a, b, c, TILE_M: Int, TILE_N: Int, TILE_K: Int, TRANS_A: Bool, TRANS_B: Bool, TF32: Bool):
    """One of the products of a group of which all have few rows."""
    few_rows_tile(ct.bid(0), a, b, c, TILE_M, TILE_N, TILE_K, TRANS_A, TRANS_B, TF32)


@ct.kernel
def group_gemm_kernel(
    group_a,  # [M_i, K_i] each, or [K_i, M_i] if TRANS_A
    group_b,  # [K_i, N_i] each, or [N_i, K_i] if TRANS_B
    group_c,  # [M_i, N_i] each
    count,
    tiles,  # of each product, if EQUAL
    TILE_M: Int,
    TILE_N: Int,
    TILE_K: Int,
    GROUP_M: Int,
    TRANS_A: Bool,
    TRANS_B: Bool,
    TF32: Bool,
    FEW_ROWS: Bool,
    EQUAL: Bool,
):
    """FEW_ROWS: no product has more than TILE_M."""
    # Which product comes first, and then one loop over K: in a loop over the products the tensor cores' instructions
    # would wait for each other.
    if EQUAL:
        i, block = ct.bid(0) // tiles, ct.bid(0) % tiles
    else:
        i, block = 0, ct.bid(0)
        for j in range(count - 1):
            c = group_c[j]
            passed = ct.cdiv(c.shape[0], TILE_M) * ct.cdiv(c.shape[1], TILE_N)
            if (i == j) & (block >= passed):
                i, block = i + 1, block - passed
    a, b, c = group_a[i], group_b[i], group_c[i]
    if FEW_ROWS:
        few_rows_tile(block, a, b, c, TILE_M, TILE_N, TILE_K, TRANS_A, TRANS_B, TF32)
    else:
        m, n = tile_of_block(block, ct.cdiv(c.shape[0], TILE_M), ct.cdiv(c.shape[1], TILE_N), GROUP_M)
        k_tiles = ct.cdiv(a.shape[0 if TRANS_A else 1], TILE_K)
        acc = multiply_tiles(a, b, m, n, k_tiles, TILE_M, TILE_N, TILE_K, TRANS_A, TRANS_B, TF32, True)
        ct.store(c, (m, n), acc.astype(c.dtype))


@ct.kernel
def ragged_schedule_kernel(offsets, rows, work, TILE_M: Int, GROUPS: Int, STEP: Int):
    """For each item of work: its group, its first row and the end of the group; offsets [E + 1], work [3, items].

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


def ragged_product(
    x, w, expert, first, end, n, TILE_M: Int, TILE_N: Int, TILE_K: Int, TRANSPOSED: Bool, WEIGHT_LEFT: Bool, TF32: Bool,
    STEPS: Bool,
):  # fmt: skip
    """In a kernel: TILE_M rows of x from row ``first`` on times tile n of the expert's matrix, as :func:`product`."""
    acc = zeros_for(TILE_M, TILE_N, WEIGHT_LEFT)
    step = depth(x.dtype, TILE_K, TF32)
    zero = ct.PaddingMode.ZERO
    k_tiles = ct.cdiv(x.shape[1], step)
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
    work,  # [3, items]
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
):
    """Every row of c is written: those of no group with zeros."""
    item, n = tile_of_block(ct.bid(0), work.shape[1], ct.cdiv(c.shape[1], TILE_N), GROUP_M)
    group = work_at(work, 0, item)
    if group <= w.shape[0] + 1:
        first, end = work_at(work, 1, item), work_at(work, 2, item)
        rows, columns = first + ct.arange(TILE_M, dtype=ct.int32), span(n, TILE_N)
        if (group >= 1) & (group <= w.shape[0]):
            sizes = (TILE_M, TILE_N, TILE_K, TRANSPOSED, WEIGHT_LEFT, TF32, STEPS)
            acc = ragged_product(x, w, group - 1, first, end, n, *sizes)
            if BIAS:
                acc = acc + load_bias(bias, group - 1, n, TILE_N, WEIGHT_LEFT)
        else:
            acc = zeros_for(TILE_M, TILE_N, WEIGHT_LEFT)
        if WEIGHT_LEFT:
            ct.scatter(c, (rows[None, :], columns[:, None]), acc.astype(c.dtype), mask=(rows < end)[None, :])
        else:
            ct.scatter(c, (rows[:, None], columns[None, :]), acc.astype(c.dtype), mask=(rows < end)[:, None])


def work_at(work, which: Int, item):
    return ct.load(work, (which, item), (1, 1)).item()


def _is_captured(x: torch.Tensor) -> bool:
    return x.is_cuda and recording.ask(torch.cuda.is_current_stream_capturing)


def _fake_group(group_a, group_b, trans_a, trans_b):
    return [
        a.new_empty(a.shape[1 if trans_a else 0], b.shape[0 if trans_b else 1])
        for a, b in zip(group_a, group_b, strict=True)
    ]


def _tiles(c: torch.Tensor, tile_m: int, tile_n: int) -> int:
    return -(-c.shape[0] // tile_m) * -(-c.shape[1] // tile_n)


def _list_plan(c: list[torch.Tensor], itemsize: int, device: int) -> tuple[int, Tile, bool]:
    """The rows of a group's tiles, their columns and depth, and whether no product has more rows.

    Measured on an H200 in bf16, in us: 32 of 512x768x2048 109 (in a loop over the products 151), 4 of 1024 23.8 (27.1),
    8 of 16x4096x4096 73 as few rows, otherwise 82 (90).
    """
    rows = max(x.shape[0] for x in c)
    few = rows <= FEW_ROWS and itemsize == 2
    if device < 0:
        return (16, Tile(32, 32), True) if few else (32, Tile(32, 32), False)
    if itemsize == 4:
        return 64, Tile(64, 32), False
    if few:
        return FEW_ROWS, Tile(128, 128, PAIRED), True
    if rows <= 64:
        return 64, Tile(128, 64), False
    if is_hopper(device) and 4 * sum(_tiles(x, 128, 256) for x in c) >= 3 * sm_count(device):
        return 128, Tile(256, 64, WARPS_8), False
    return 128, Tile(128, 64, PAIRED), False


@compilable(fake=_fake_group)
def group_gemm_forward(
    group_a: list[torch.Tensor], group_b: list[torch.Tensor], trans_a: bool, trans_b: bool
) -> list[torch.Tensor]:
    group_c = _fake_group(group_a, group_b, trans_a, trans_b)
    some = [i for i, (a, c) in enumerate(zip(group_a, group_c, strict=True)) if a.numel() and c.numel()]
    for i in set(range(len(group_c))).difference(some):
        group_c[i].zero_()
    if not some:
        return group_c
    a, b, c = ([group[i] for i in some] for group in (group_a, group_b, group_c))
    # One layout for all: what is stored the other way round is copied.
    a = [x if x.stride(1) == 1 else x.contiguous() for x in a]
    b = [x if x.stride(1) == 1 else x.contiguous() for x in b]
    device, itemsize = a[0].get_device(), a[0].element_size()
    if all(_tiles(x, 128, 256) >= sm_count(device) for x in c) and device >= 0:
        # A block that takes its arrays from a list builds their descriptors itself, before it can begin.
        for x, y, z in zip(a, b, c, strict=True):
            gemm(x, y, None, z, trans_a, trans_b)
        return group_c
    tile_m, tile, few = _list_plan(c, itemsize, device)
    tiles, sizes = [_tiles(x, tile_m, tile.n) for x in c], (tile_m, tile.n, tile.k)
    trans, tf32 = (trans_a, trans_b), uses_tf32(a[0].dtype)
    if _is_captured(c[0]):
        # A graph's launches take no lists: each product has its own then, of the same tiles and with the same bits.
        for x, y, z, count in zip(a, b, c, tiles, strict=True):
            if few:
                launch(z, (count,), tile.of(few_rows_product_kernel), (x, y, z, *sizes, *trans, tf32))
            else:
                args = (x, y, 0, z, *sizes, GROUP_M, *trans, False, tf32, True, False)
                launch(z, (count,), tile.of(matmul_kernel), args)
    else:
        args = (a, b, c, len(c), tiles[0], *sizes, GROUP_M, *trans, tf32, few, len(set(tiles)) == 1)
        launch(c[0], (sum(tiles),), tile.of(group_gemm_kernel), args)
    return group_c


class GroupGEMM(torch.autograd.Function):
    """Both gradients are groups of products: dA = dC op(B)^T and dB = A^T dC, transposed as B was."""

    @staticmethod
    def forward(ctx, transpose_b, count, *operands):
        ctx.save_for_backward(*operands)
        ctx.options = transpose_b, count
        return tuple(group_gemm_forward(list(operands[:count]), list(operands[count:]), False, transpose_b))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads):
        transpose_b, count = ctx.options
        a, b, grads = list(ctx.saved_tensors[:count]), list(ctx.saved_tensors[count:]), list(grads)
        da = db = [None] * count
        if any(ctx.needs_input_grad[2 : 2 + count]):
            da = group_gemm_forward(grads, b, False, not transpose_b)
        if any(ctx.needs_input_grad[2 + count :]):
            db = group_gemm_forward(*((grads, a) if transpose_b else (a, grads)), True, False)
        return None, None, *da, *db


@register_impl("group_gemm", "cutile")
def group_gemm(
    group_A: list[torch.Tensor], group_B: list[torch.Tensor], transpose_b: bool = False
) -> list[torch.Tensor]:
    check_group(group_A, group_B, transpose_b)
    if not group_A:
        return []
    if group_A[0].dtype not in FLOATS:
        raise UnsupportedError("the matrices are not fp32, fp16 or bf16")
    if torch.is_grad_enabled() and any(t.requires_grad for group in (group_A, group_B) for t in group):
        return list(GroupGEMM.apply(transpose_b, len(group_A), *group_A, *group_B))
    return group_gemm_forward(list(group_A), list(group_B), False, transpose_b)


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
    plan = choose(rows, 1, experts, a.element_size(), transposed, a.get_device(), as_vectors=False)
    tile, height = plan.down, plan.rows
    items = rows // height + min(rows, experts + 2)  # at most one tile of each group is not full
    work = offsets.new_empty(3, items, dtype=torch.int32)
    width = next_power_of_2(experts + 2)
    step = max(1, min(32, 8192 // width))
    launch(a, (-(-items // step),), ragged_schedule_kernel, (offsets, rows, work, height, width, step))
    sizes = (height, tile.n, tile.k, GROUP_M, transposed, bias is not None, plan.weight_left, uses_tf32(a.dtype))
    args = (a, b, 0 if bias is None else bias, work, c, *sizes)
    _launch_ragged((items * -(-c.shape[1] // tile.n),), tile.of(ragged_gemm_kernel), args)
    return c


_older_compiler = False


def _launch_ragged(grid: tuple[int], kernel: ct.kernel, args: tuple) -> None:
    """With tiles that begin at any row; for compilers before CUDA 13.3, slices, whose descriptors blocks build."""
    global _older_compiler
    if not _older_compiler:
        try:
            launch(args[0], grid, kernel, (*args, True))
            return
        except ct.TileUnsupportedFeatureError:
            _older_compiler = True
    launch(args[0], grid, kernel, (*args, False))


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


class RaggedGroupGEMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, offsets, transpose_b, bias):
        ctx.save_for_backward(a, b, offsets)
        ctx.transpose_b = transpose_b
        return ragged_forward(a, b, offsets, transpose_b, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
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

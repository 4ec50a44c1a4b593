"""``group_gemm`` in cuTile: a list of matrix products in one launch.

A block finds the product that its tile belongs to by their numbers of tiles; products that fill the GPU alone have a
launch each, and those whose operands lie at equal distances in memory are ``bmm``'s.
"""

import cuda.tile as ct
import torch

from tilegym.backend import recording
from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.bmm import GROUP_M as BATCH_GROUP_M
from tilegym.ops.cutile.bmm import bmm_kernel
from tilegym.ops.cutile.bmm import with_unit_stride
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
from tilegym.ops.cutile.moe_experts import is_hopper
from tilegym.ops.cutile.moe_gemm import multiply
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.pytorch.group_gemm import check_group

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


def evenly_spaced(group: list[torch.Tensor]) -> torch.Tensor | None:
    """The matrices [M, N] as one view [G, M, N] of the first one's memory; None where that is not possible.

    It is where they are slices of one tensor, as the matrices of experts are slices of a parameter.
    """
    first, size = group[0], group[0].element_size()
    if len(group) < 2:
        return None
    place = first.data_ptr()
    step = group[1].data_ptr() - place
    if step <= 0 or step % size or any(x.data_ptr() != place + i * step for i, x in enumerate(group)):
        return None
    shape, strides = first.shape, first.stride()
    if any(x.shape != shape or x.stride() != strides for x in group):
        return None
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    end = (first.storage_offset() + last + 1) * size + (len(group) - 1) * step
    if end > first.untyped_storage().nbytes():
        return None
    return first.as_strided((len(group), *shape), (step // size, *strides))


def _batch_plan(count: int, m: int, n: int, device: int) -> tuple[int, Tile, bool]:
    """The rows of the tiles of so many products [m, n], their columns and depth, and whether blocks are persistent.

    Measured on an H200 in bf16, in us (as a list, torch.bmm): 32 of 512x768x2048 82.6 and with tiles of 128 x 256 85.2
    (102.3, 77.7), 64 of 256x512x1024 37.7 and 40.1 (61.5, 37.3), 16 of 1024x1024x2048 103.4 and 104.8 (124.8, 100.7),
    8 of 2048 188.1 with those of 128 x 256 (217.1, 184.7), 4 of 1024 18.6 (23.2, 18.3), 8 of 64x4096x4096 70.6 (76.6,
    71.3), 8 of 256 7.1 (13.4, 7.3).
    """
    if device < 0:
        return 32, Tile(32, 32), False
    if m <= 64:
        return 64, Tile(128, 64, PAIRED), False
    wide, narrow = (count * -(-m // 128) * -(-n // width) for width in (256, 128))
    if is_hopper(device) and wide >= 6 * sm_count(device):
        return 128, Tile(256, 64, WARPS_8), True
    return (128, Tile(128, 64), True) if narrow >= sm_count(device) else (64, Tile(64, 128, PAIRED), False)


def _fake_batch(a, b, trans_a, trans_b):
    return a.new_empty(a.shape[0], a.shape[2 if trans_a else 1], b.shape[1 if trans_b else 2])


@compilable(fake=_fake_batch)
def batch_forward(a: torch.Tensor, b: torch.Tensor, trans_a: bool, trans_b: bool) -> torch.Tensor:
    """op(a[i]) @ op(b[i]) of 16 bits, none of them empty."""
    c, device = _fake_batch(a, b, trans_a, trans_b), a.get_device()
    (a, a_flipped), (b, b_flipped) = with_unit_stride(a), with_unit_stride(b)
    count, m, n = c.shape
    tile_m, tile, persistent = _batch_plan(count, m, n, device)
    tiles = count * -(-m // tile_m) * -(-n // tile.n)
    flags = (trans_a != a_flipped, trans_b != b_flipped, False, persistent)
    args = (a, b, c, tile_m, tile.n, tile.k, BATCH_GROUP_M, *flags)
    launch(c, (min(tiles, sm_count(device)) if persistent else tiles,), tile.of(bmm_kernel), args)
    return c


def products(
    group_a: list[torch.Tensor], group_b: list[torch.Tensor], trans_a: bool, trans_b: bool
) -> list[torch.Tensor]:
    """op(A_i) @ op(B_i), as a batch where the operands are one already: a block that takes its arrays from a list
    builds their descriptors itself, before it can begin."""
    if not torch.compiler.is_compiling() and group_a[0].element_size() == 2:
        a = evenly_spaced(group_a)
        b = None if a is None else evenly_spaced(group_b)
        if b is not None and a.numel() and b.numel():
            # Where the next call's matrices lie is not told by their shapes.
            recording.refuse()
            # For autograd neither views, which could not be changed in place, nor changed where another one is.
            return [c.data for c in batch_forward(a, b, trans_a, trans_b).unbind()]
    return group_gemm_forward(group_a, group_b, trans_a, trans_b)


class GroupGEMM(Function):
    """Both gradients are groups of products: dA = dC op(B)^T and dB = A^T dC, transposed as B was."""

    @staticmethod
    def forward(ctx, transpose_b, count, *operands):
        ctx.save_for_backward(*operands)
        ctx.options = transpose_b, count
        return tuple(products(list(operands[:count]), list(operands[count:]), False, transpose_b))

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        transpose_b, count = ctx.options
        a, b, grads = list(ctx.saved_tensors[:count]), list(ctx.saved_tensors[count:]), list(grads)
        da = db = [None] * count
        if any(ctx.needs_input_grad[2 : 2 + count]):
            da = products(grads, b, False, not transpose_b)
        if any(ctx.needs_input_grad[2 + count :]):
            db = products(*((grads, a) if transpose_b else (a, grads)), True, False)
        return None, None, *da, *db


@register_impl("group_gemm", "cutile")
def group_gemm(
    group_A: list[torch.Tensor], group_B: list[torch.Tensor], transpose_b: bool = False
) -> list[torch.Tensor]:
    group_A, group_B = list(group_A), list(group_B)  # of one tensor the matrices in it
    check_group(group_A, group_B, transpose_b)
    if not group_A:
        return []
    if group_A[0].dtype not in FLOATS:
        raise UnsupportedError("the matrices are not fp32, fp16 or bf16")
    if torch.is_grad_enabled() and any(t.requires_grad for group in (group_A, group_B) for t in group):
        return list(GroupGEMM.apply(transpose_b, len(group_A), *group_A, *group_B))
    return products(group_A, group_B, False, transpose_b)

"""``bmm`` in cuTile: ``matmul``'s tiles, configurations and order of blocks, for every matrix of a batch in turn."""

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.autotuner import Config
from tilegym.backend.cutile.autotuner import SearchSpace
from tilegym.backend.cutile.autotuner import autotune
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.cutile.tuning_key import bucket
from tilegym.backend.derivatives import Function
from tilegym.ops.cutile.matmul import DTYPES
from tilegym.ops.cutile.matmul import _configs
from tilegym.ops.cutile.matmul import check_supported
from tilegym.ops.cutile.matmul import tile_of_block
from tilegym.ops.cutile.matmul import uses_tf32
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import aligned
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.pytorch.bmm import check_batches
from tilegym.ops.pytorch.matmul import FP8_DTYPES

ROW_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
# Rows of tiles that blocks running at the same time share: with short rows of A and B, as of attention scores, few.
GROUP_M = 4


def load_tile(array, batch, row, col, TILE_R: Int, TILE_C: Int, TRANSPOSED: Bool):
    """Tile (row, col) of ``array[batch]``, or of its transpose, with zeros for what lies outside."""
    order = (0, 2, 1) if TRANSPOSED else (0, 1, 2)
    tile = ct.load(array, (batch, row, col), (1, TILE_R, TILE_C), order=order, padding_mode=ct.PaddingMode.ZERO)
    return tile.reshape((TILE_R, TILE_C))


def output_tile(
    block, a, b, c, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP_M: Int, TRANS_A: Bool, TRANS_B: Bool, TF32: Bool
):
    """Computes and stores one tile of C; the blocks of one matrix follow each other."""
    m_tiles, n_tiles = ct.cdiv(c.shape[1], TILE_M), ct.cdiv(c.shape[2], TILE_N)
    batch = block // (m_tiles * n_tiles)
    m, n = tile_of_block(block % (m_tiles * n_tiles), m_tiles, n_tiles, GROUP_M)
    acc = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    for k in range(ct.cdiv(a.shape[1 if TRANS_A else 2], TILE_K)):
        a_tile = load_tile(a, batch, m, k, TILE_M, TILE_K, TRANS_A)
        b_tile = load_tile(b, batch, k, n, TILE_K, TILE_N, TRANS_B)
        if TF32:
            acc = ct.mma(a_tile.astype(ct.tfloat32), b_tile.astype(ct.tfloat32), acc)
        else:
            acc = ct.mma(a_tile, b_tile, acc)
    ct.store(c, (batch, m, n), acc.astype(c.dtype).reshape((1, TILE_M, TILE_N)))


@ct.kernel
def bmm_kernel(
    a,  # [batch, M, K], or [batch, K, M] if TRANS_A
    b,  # [batch, K, N], or [batch, N, K] if TRANS_B
    c,  # [batch, M, N]
    TILE_M: Int,
    TILE_N: Int,
    TILE_K: Int,
    GROUP_M: Int,
    TRANS_A: Bool,
    TRANS_B: Bool,
    TF32: Bool,
    PERSISTENT: Bool,
):
    tile = (TILE_M, TILE_N, TILE_K, GROUP_M, TRANS_A, TRANS_B, TF32)
    if PERSISTENT:
        # No more blocks than run at once: each takes every num_blocks-th tile, and stores one while it loads the next.
        tiles = c.shape[0] * ct.cdiv(c.shape[1], TILE_M) * ct.cdiv(c.shape[2], TILE_N)
        for block in range(ct.bid(0), tiles, ct.num_blocks(0)):
            output_tile(block, a, b, c, *tile)
    else:
        output_tile(ct.bid(0), a, b, c, *tile)


@ct.kernel
def bmm_row_kernel(
    a,  # [batch, 1, K]
    b,  # [batch, K, N], or [batch, N, K] if TRANS_B
    c,  # [batch, 1, N]
    TILE_N: Int,
    TILE_K: Int,
    TRANS_B: Bool,
    OVERLAP: Bool,
):
    begin(OVERLAP)
    tiles = ct.cdiv(c.shape[2], TILE_N)
    batch, n = ct.bid(0) // tiles, ct.bid(0) % tiles * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
    if TRANS_B:
        acc = ct.zeros((TILE_N, TILE_K), dtype=ct.float32)
    else:
        acc = ct.zeros((TILE_K, TILE_N), dtype=ct.float32)
    for step in range(ct.cdiv(a.shape[2], TILE_K)):
        k = step * TILE_K + ct.arange(TILE_K, dtype=ct.int32)
        row = ct.gather(a, (batch, 0, k)).astype(ct.float32)
        if TRANS_B:
            acc = acc + ct.gather(b, (batch, n[:, None], k[None, :])).astype(ct.float32) * row[None, :]
        else:
            acc = acc + ct.gather(b, (batch, k[:, None], n[None, :])).astype(ct.float32) * row[:, None]
    ct.scatter(c, (batch, 0, n), ct.sum(acc, axis=1 if TRANS_B else 0).astype(c.dtype))


def row_plan(n: int, k: int, bits: int, transposed: bool) -> tuple[int, int]:
    """(TILE_N, TILE_K) for a row times each [k, n] of so many bits an element: about 16 KB of it a block.

    On an H200 a step of DeepSeek-V2-Lite takes 2.20 ms so, 2.18 with half as much, 2.23 with other tiles as large.
    """
    tile_k = min(next_power_of_2(k), 8192 // bits if transposed else 2048 // bits)
    return max(8, min(next_power_of_2(n), 131072 // bits // tile_k)), tile_k


def _tiles(batch: int, m: int, n: int, cfg: Config) -> int:
    return batch * -(-m // cfg.TILE_M) * -(-n // cfg.TILE_N)


def _suits(a: torch.Tensor, c: torch.Tensor, cfg: Config, arch: str) -> bool:
    """As for ``matmul``: whether a configuration, by its tiles' size and how full it leaves the GPU, can be fast.

    Measured on an H200 in bf16, in us (cuBLAS in the same run): 32 of 4096x4096x128 335 (338), not persistent 562; 16
    of 2048 364 (354) and 391; 16 of 1024 56 (55) and 64; 32 of 512x128x512 12.2 with 128 x 128 (12.2), 14.1 with
    64 x 128; 16 of 256 7.9 with 64 x 128 (8.0), 9.8 with 64 x 64. The formula's best is within 2 % of the fastest.
    """
    if arch == "cpu":
        return True
    sizes, multiprocessors = [bucket(size) for size in c.shape], sm_count(c.get_device())

    def waves(config: Config) -> int:
        return -(-_tiles(*sizes, config) // multiprocessors)

    def time(config: Config) -> float:
        area = config.TILE_M * config.TILE_N
        return waves(config) * area / (area / (config.TILE_M + config.TILE_N)) ** 0.3

    if cfg.PERSISTENT and waves(cfg) < 2:
        return False
    # Without tensor cores (fp32) large accumulators only spill.
    candidates = [other for other in _configs(arch) if a.dtype != torch.float32 or other.TILE_M * other.TILE_N <= 16384]
    margin = 1.05 if arch.startswith("sm_9") else 1.2
    return cfg in candidates and time(cfg) <= margin * min(map(time, candidates))


def with_unit_stride(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """``x``, its transpose, or a copy: matrices with unit stride in the last dimension; and whether it is x.mT."""
    batches, rows, columns = x.stride()
    if batches > 0 or x.shape[0] == 1:  # expanded: the same matrix at every index
        if columns == 1 and rows >= x.shape[2]:
            return x, False
        if rows == 1 and columns >= x.shape[1]:
            return x.mT, True
    return x.contiguous(), False


@autotune(search_space=SearchSpace(_configs, _suits))
def batched_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    transpose_a: bool,
    transpose_b: bool,
    static_persistent: bool | None,
    autotuner=None,
) -> None:
    """Launches ``c[i] = op(a[i]) @ op(b[i])``."""
    a, a_flipped = with_unit_stride(a)
    b, b_flipped = with_unit_stride(b)
    a, b = aligned(a), aligned(b)
    flags = (transpose_a != a_flipped, transpose_b != b_flipped, uses_tf32(a.dtype))
    shape, k = tuple(c.shape), a.shape[1 if flags[0] else 2]
    device, dtype = c.get_device(), a.dtype

    def persistent(cfg: Config) -> bool:
        return cfg.PERSISTENT if static_persistent is None else static_persistent

    def grid(args, cfg: Config) -> tuple[int]:
        tiles = _tiles(*shape, cfg)
        return (min(tiles, sm_count(device) // cfg.hints.get("num_ctas", 1)) if persistent(cfg) else tiles,)

    def arguments(cfg: Config) -> tuple:
        tile = (cfg.TILE_M, cfg.TILE_N, cfg.BYTES_K // dtype.itemsize, GROUP_M)
        return (a, b, c, *tile, *flags, persistent(cfg))

    autotuner(
        None,
        grid_fn=grid,
        kernel=bmm_kernel,
        args_fn=arguments,
        key=(*shape, k, dtype, device, flags, static_persistent),
    )


def row_of_each(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, transposed: bool) -> None:
    """Launches ``c[i] = a[i] @ b[i]``, or ``@ b[i].T``, for a [batch, 1, K]: bound by reading b, as in decoding."""
    batch, _, n = c.shape
    tile_n, tile_k = row_plan(n, a.shape[2], a.dtype.itemsize * 8, transposed)
    overlap = overlaps(a.get_device())
    launch(c, (batch * -(-n // tile_n),), bmm_row_kernel, (a, b, c, tile_n, tile_k, transposed, overlap), overlap)


def _fake(a, b, transpose_a, transpose_b, static_persistent):
    shape = (a.shape[0], a.shape[2 if transpose_a else 1], b.shape[1 if transpose_b else 2])
    return a.new_empty(shape, dtype=torch.float16) if a.dtype in FP8_DTYPES else a.new_empty(shape)


@compilable(_fake)
def bmm_forward(
    a: torch.Tensor, b: torch.Tensor, transpose_a: bool, transpose_b: bool, static_persistent: bool | None
) -> torch.Tensor:
    c = _fake(a, b, transpose_a, transpose_b, static_persistent)
    if a.numel() == 0 or b.numel() == 0:
        return c.zero_()
    if c.shape[1] == 1 and a.dtype in ROW_DTYPES and static_persistent is None:
        row = a.mT if transpose_a else a
        b, flipped = with_unit_stride(b)
        lies_well = row.stride(2) == 1 and row.stride(0) > 0
        row_of_each(row if lies_well else row.contiguous(), b, c, transpose_b != flipped)
        return c
    batched_gemm(a, b, c, transpose_a, transpose_b, static_persistent)
    return c


class BMM(Function):
    """Both gradients are products of the same kind: dA = dC B^T and dB = A^T dC, transposed as the operands were."""

    @staticmethod
    def forward(ctx, a, b, transpose_a, transpose_b, static_persistent):
        ctx.save_for_backward(a, b)
        ctx.options = transpose_a, transpose_b, static_persistent
        return bmm_forward(a, b, transpose_a, transpose_b, static_persistent)

    @staticmethod
    def backward(ctx, dc):
        a, b = ctx.saved_tensors
        transpose_a, transpose_b, how = ctx.options
        da = db = None
        if ctx.needs_input_grad[0]:
            da = differentiable(*((b, dc, transpose_b, True) if transpose_a else (dc, b, False, not transpose_b)), how)
        if ctx.needs_input_grad[1]:
            db = differentiable(*((dc, a, True, transpose_a) if transpose_b else (a, dc, not transpose_a, False)), how)
        return da, db, None, None, None


def differentiable(
    a: torch.Tensor, b: torch.Tensor, transpose_a: bool, transpose_b: bool, static_persistent: bool | None
) -> torch.Tensor:
    """The products of checked operands, recorded for autograd where that is needed."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return BMM.apply(a, b, transpose_a, transpose_b, static_persistent)
    return bmm_forward(a, b, transpose_a, transpose_b, static_persistent)


@register_impl("bmm", "cutile")
def bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    transpose_a: bool = False,
    transpose_b: bool = False,
    static_persistent: bool | None = None,
) -> torch.Tensor:
    check_batches(a, b, transpose_a, transpose_b)
    check_supported(a, DTYPES)
    return differentiable(a, b, transpose_a, transpose_b, static_persistent)

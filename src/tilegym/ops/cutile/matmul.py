"""``matmul`` in cuTile: the kernel to read first.

A block computes a TILE_M x TILE_N tile of C. It walks along K, loads a tile of A and one of B at each step, and lets
``ct.mma`` add their product to an fp32 accumulator on the tensor cores. Indices of ``ct.load`` and ``ct.store`` count
tiles, not elements; what sticks out of an array is read as zero and not written.
"""

import cuda.tile as ct
import torch

from tilegym.backend import recording
from tilegym.backend import register_impl
from tilegym.backend.cutile.autotuner import Config
from tilegym.backend.cutile.autotuner import SearchSpace
from tilegym.backend.cutile.autotuner import autotune
from tilegym.backend.cutile.library import compilable
from tilegym.backend.cutile.tuning_key import bucket
from tilegym.backend.derivatives import Function
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import aligned
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.pytorch.matmul import FP8_DTYPES
from tilegym.ops.pytorch.matmul import check_operands

TILES_IN_SUM = 32
DTYPES = (torch.float16, torch.bfloat16, torch.float32, *FP8_DTYPES)


def load_tile(array, row, col, TILE_R: Int, TILE_C: Int, TRANSPOSED: Bool, USE_TMA: Bool):
    """Tile (row, col) of ``array``, or of its transpose. Zeros stand for what lies outside: they add nothing."""
    order = (1, 0) if TRANSPOSED else (0, 1)
    zero = ct.PaddingMode.ZERO
    return ct.load(array, (row, col), (TILE_R, TILE_C), order=order, padding_mode=zero, allow_tma=USE_TMA)


def multiply_tiles(
    a, b, m, n, k_tiles, TILE_M: Int, TILE_N: Int, TILE_K: Int, TRANS_A: Bool, TRANS_B: Bool, TF32: Bool, USE_TMA: Bool
):
    """Tile (m, n) of op(A) @ op(B), in fp32."""
    acc = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    if a.dtype == ct.float32 and not TF32:
        # The error of a sum grows with its terms, and in fp32 it is all there is: sums of a few tiles are summed.
        for first in range(0, k_tiles, TILES_IN_SUM):
            part = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
            for k in range(first, min(first + TILES_IN_SUM, k_tiles)):
                a_tile = load_tile(a, m, k, TILE_M, TILE_K, TRANS_A, USE_TMA)
                part = ct.mma(a_tile, load_tile(b, k, n, TILE_K, TILE_N, TRANS_B, USE_TMA), part)
            acc = acc + part
    else:
        for k in range(k_tiles):
            a_tile = load_tile(a, m, k, TILE_M, TILE_K, TRANS_A, USE_TMA)
            b_tile = load_tile(b, k, n, TILE_K, TILE_N, TRANS_B, USE_TMA)
            if TF32:
                acc = ct.mma(a_tile.astype(ct.tfloat32), b_tile.astype(ct.tfloat32), acc)
            else:
                acc = ct.mma(a_tile, b_tile, acc)
    return acc


def tile_of_block(block, m_tiles, n_tiles, GROUP_M: Int):
    """Which tile of C block number ``block`` computes.

    Blocks that run at the same time take GROUP_M rows of tiles, column by column: they then need the same few tiles
    of A and B, which stay in the L2 cache.
    """
    group, within = block // (GROUP_M * n_tiles), block % (GROUP_M * n_tiles)
    rows = min(m_tiles - group * GROUP_M, GROUP_M)
    return group * GROUP_M + within % rows, within // rows


def load_bias(bias, n, TILE_N: Int):
    tile = ct.load(bias, (n,), (TILE_N,), padding_mode=ct.PaddingMode.ZERO)
    return tile.astype(ct.float32).reshape((1, TILE_N))


def output_tile(
    block,
    a,
    b,
    bias,
    c,
    TILE_M: Int,
    TILE_N: Int,
    TILE_K: Int,
    GROUP_M: Int,
    TRANS_A: Bool,
    TRANS_B: Bool,
    BIAS: Bool,
    TF32: Bool,
    USE_TMA: Bool,
):
    """Computes and stores one tile of C."""
    m, n = tile_of_block(block, ct.cdiv(c.shape[0], TILE_M), ct.cdiv(c.shape[1], TILE_N), GROUP_M)
    k_tiles = ct.cdiv(a.shape[0 if TRANS_A else 1], TILE_K)
    acc = multiply_tiles(a, b, m, n, k_tiles, TILE_M, TILE_N, TILE_K, TRANS_A, TRANS_B, TF32, USE_TMA)
    if BIAS:
        acc = acc + load_bias(bias, n, TILE_N)
    ct.store(c, (m, n), acc.astype(c.dtype))


@ct.kernel
def matmul_kernel(
    a,  # [M, K], or [K, M] if TRANS_A
    b,  # [K, N], or [N, K] if TRANS_B
    bias,  # [N] if BIAS, else 0
    c,  # [M, N]
    TILE_M: Int,
    TILE_N: Int,
    TILE_K: Int,
    GROUP_M: Int,
    TRANS_A: Bool,
    TRANS_B: Bool,
    BIAS: Bool,
    TF32: Bool,
    USE_TMA: Bool,
    PERSISTENT: Bool,
):
    tile = (TILE_M, TILE_N, TILE_K, GROUP_M, TRANS_A, TRANS_B, BIAS, TF32, USE_TMA)
    if PERSISTENT:
        # No more blocks than run at once: each takes every num_blocks-th tile, and stores one while it loads the next.
        tiles = ct.cdiv(c.shape[0], TILE_M) * ct.cdiv(c.shape[1], TILE_N)
        for block in range(ct.bid(0), tiles, ct.num_blocks(0)):
            output_tile(block, a, b, bias, c, *tile)
    else:
        output_tile(ct.bid(0), a, b, bias, c, *tile)


# Rows of tiles that blocks running at the same time share: here, and in other ops.
MATMUL_GROUP_M, GROUP_M = 16, 8


def _configs(arch: str) -> list[Config]:
    """Tiles of C, the step along K in bytes (128 are a row of shared memory), and hints; the best for most sizes first.

    Those for sm_90 were measured on an H200 in bf16, in TFLOP/s (cuBLAS in the same run), persistent where there are
    more tiles than multiprocessors: 8192^3 772, with steps of 64 bytes 795 (759), otherwise 750; 8192x6144x4096 771
    (801), otherwise 738; 8192x4096x14336 767 (757), otherwise 757; 512x14336x4096 514 (549), 128x4096x14336 with
    64 x 64 343 (327). 128 x 256 needs 8 warps: with 4 its accumulators spill, and it reaches 45. With 16 rows of tiles
    that share these are 0 to 6 % faster than with 8. The others follow from the sizes of the registers.
    """
    if arch == "cpu":
        return [Config(TILE_M=32, TILE_N=32, BYTES_K=64, PERSISTENT=False)]
    small = [
        Config(TILE_M=128, TILE_N=128, BYTES_K=128, PERSISTENT=True),
        Config(TILE_M=128, TILE_N=128, BYTES_K=128, PERSISTENT=False),
        Config(TILE_M=64, TILE_N=128, BYTES_K=128, PERSISTENT=False),
        Config(TILE_M=64, TILE_N=64, BYTES_K=256, PERSISTENT=False),
    ]
    if arch.startswith("sm_9"):
        return [
            Config(TILE_M=128, TILE_N=256, BYTES_K=128, PERSISTENT=True, num_worker_warps=8),
            Config(TILE_M=128, TILE_N=256, BYTES_K=64, PERSISTENT=True, num_worker_warps=8),
            Config(TILE_M=128, TILE_N=256, BYTES_K=128, PERSISTENT=False, num_worker_warps=8),
            *small,
        ]
    if arch.startswith("sm_10"):
        return [
            Config(TILE_M=256, TILE_N=256, BYTES_K=128, PERSISTENT=True, num_ctas=2, occupancy=1),
            Config(TILE_M=256, TILE_N=256, BYTES_K=128, PERSISTENT=False, num_ctas=2, occupancy=1),
            *small,
        ]
    return small


def _suits(a: torch.Tensor, c: torch.Tensor, cfg: Config, arch: str) -> bool:
    """Whether a configuration can be among the fastest.

    Larger tiles are faster, unless they leave the GPU idle; persistent blocks hide their stores, where they have more
    tiles than one. Sizes are rounded as for the keys of the tuning results, so that one row more does not tune again.
    """
    if arch == "cpu":
        return True
    m, n = bucket(c.shape[0]), bucket(c.shape[1])
    multiprocessors = sm_count(c.get_device())

    def waves(config: Config) -> int:
        return -(-(-(-m // config.TILE_M) * -(-n // config.TILE_N)) // multiprocessors)

    def time(config: Config) -> float:
        area = config.TILE_M * config.TILE_N
        # Relative speeds measured on an H200 follow this power of the operations for each byte that is loaded.
        return waves(config) * area / (area / (config.TILE_M + config.TILE_N)) ** 0.3

    if cfg.PERSISTENT and waves(cfg) < 2:
        return False
    # Without tensor cores (fp32) large accumulators only spill.
    candidates = [other for other in _configs(arch) if a.dtype != torch.float32 or other.TILE_M * other.TILE_N <= 16384]
    return cfg in candidates and time(cfg) <= 1.2 * min(map(time, candidates))


@autotune(search_space=SearchSpace(_configs, _suits))
def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    c: torch.Tensor,
    trans_a: bool,
    trans_b: bool,
    static_persistent: bool | None = None,
    use_tma: bool | None = None,
    autotuner=None,
) -> None:
    """Launches ``c = op(a) @ op(b) + bias``."""
    a, a_flipped = with_unit_stride(a)
    b, b_flipped = with_unit_stride(b)
    a, b = aligned(a), aligned(b)
    trans_a, trans_b = trans_a != a_flipped, trans_b != b_flipped
    (m, n), k = c.shape, a.shape[0 if trans_a else 1]
    device, dtype = c.get_device(), a.dtype
    flags = (trans_a, trans_b, bias is not None, uses_tf32(dtype), use_tma is not False)

    def persistent(cfg: Config) -> bool:
        return cfg.PERSISTENT if static_persistent is None else static_persistent

    def grid(args, cfg: Config) -> tuple[int]:
        tiles = -(-m // cfg.TILE_M) * -(-n // cfg.TILE_N)
        return (min(tiles, sm_count(device) // cfg.hints.get("num_ctas", 1)) if persistent(cfg) else tiles,)

    def arguments(cfg: Config) -> tuple:
        tile = (cfg.TILE_M, cfg.TILE_N, cfg.BYTES_K // dtype.itemsize, MATMUL_GROUP_M)
        return (a, b, 0 if bias is None else bias, c, *tile, *flags, persistent(cfg))

    autotuner(
        None,
        grid_fn=grid,
        kernel=matmul_kernel,
        args_fn=arguments,
        key=(m, n, k, dtype, device, flags, static_persistent),
    )


def uses_tf32(dtype: torch.dtype) -> bool:
    """Whether fp32 operands are rounded to tf32, as torch's own matmul would round them."""
    return dtype == torch.float32 and recording.ask(_fp32_precision) == "tf32"


def _fp32_precision() -> str:
    return torch.backends.cuda.matmul.fp32_precision


def with_unit_stride(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """``x``, its transpose, or a copy: a matrix with unit stride in its last dimension; and whether it is x.T."""
    rows, columns = x.stride()
    if columns == 1 and rows >= x.shape[1]:
        return x, False
    if rows == 1 and columns >= x.shape[0]:
        return x.t(), True
    return x.contiguous(), False


def _fake(a, b, trans_a, trans_b, static_persistent, use_tma):
    m, n = a.shape[1 if trans_a else 0], b.shape[0 if trans_b else 1]
    return a.new_empty(m, n, dtype=torch.float16) if a.dtype in FP8_DTYPES else a.new_empty(m, n)


@compilable(_fake)
def matmul_forward(
    a: torch.Tensor,
    b: torch.Tensor,
    trans_a: bool,
    trans_b: bool,
    static_persistent: bool | None,
    use_tma: bool | None,
) -> torch.Tensor:
    c = _fake(a, b, trans_a, trans_b, static_persistent, use_tma)
    if a.numel() == 0:
        return c.zero_()
    gemm(a, b, None, c, trans_a, trans_b, static_persistent, use_tma)
    return c


class Matmul(Function):
    """Both gradients are products of the same kind: dA = dC B^T and dB = A^T dC, transposed as the operands were."""

    @staticmethod
    def forward(ctx, a, b, trans_a, trans_b, static_persistent, use_tma):
        ctx.save_for_backward(a, b)
        ctx.options = trans_a, trans_b, static_persistent, use_tma
        return matmul_forward(a, b, trans_a, trans_b, static_persistent, use_tma)

    @staticmethod
    def backward(ctx, dc):
        a, b = ctx.saved_tensors
        trans_a, trans_b, *how = ctx.options
        da = db = None
        if ctx.needs_input_grad[0]:
            operands = (b, dc, trans_b, True) if trans_a else (dc, b, False, not trans_b)
            da = differentiable(*operands, *how)
        if ctx.needs_input_grad[1]:
            operands = (dc, a, True, trans_a) if trans_b else (a, dc, not trans_a, False)
            db = differentiable(*operands, *how)
        return da, db, None, None, None, None


def differentiable(
    a: torch.Tensor,
    b: torch.Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    static_persistent: bool | None = None,
    use_tma: bool | None = None,
) -> torch.Tensor:
    """op(a) @ op(b) of checked operands, recorded for autograd where that is needed."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return Matmul.apply(a, b, trans_a, trans_b, static_persistent, use_tma)
    return matmul_forward(a, b, trans_a, trans_b, static_persistent, use_tma)


def check_supported(x: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raises UnsupportedError for a dtype or a device that the kernels do not serve."""
    if x.dtype not in dtypes:
        raise UnsupportedError(f"it does not take {x.dtype}")
    if x.dtype in FP8_DTYPES and x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 9):
        raise UnsupportedError("fp8 needs compute capability 8.9 or later")


@register_impl("matmul", "cutile")
def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    trans_a: bool = False,
    trans_b: bool = False,
    static_persistent: bool | None = None,
    use_tma: bool | None = None,
) -> torch.Tensor:
    check_operands(a, b, trans_a, trans_b)
    check_supported(a, DTYPES)
    return differentiable(a, b, trans_a, trans_b, static_persistent, use_tma)

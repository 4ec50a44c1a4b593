"""``matmul`` in cuTile: the kernel to read first.

A block computes a TILE_M x TILE_N tile of C. It walks along K, loads a tile of A and one of B at each step, and lets
``ct.mma`` add their product to an fp32 accumulator on the tensor cores. Indices of ``ct.load`` and ``ct.store`` count
tiles, not elements; what sticks out of an array is read as zero and not written.
"""

import functools
from typing import NamedTuple

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.pytorch.matmul import FP8_DTYPES
from tilegym.ops.pytorch.matmul import check_operands

Bool = ct.Constant[bool]
Int = ct.Constant[int]

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


@ct.kernel
def matmul_kernel(
    a,  # [M, K], or [K, M] if TRANS_A
    b,  # [K, N], or [N, K] if TRANS_B
    c,  # [M, N]
    TILE_M: Int,
    TILE_N: Int,
    TILE_K: Int,
    GROUP_M: Int,
    TRANS_A: Bool,
    TRANS_B: Bool,
    TF32: Bool,
    USE_TMA: Bool,
):
    m, n = tile_of_block(ct.bid(0), ct.cdiv(c.shape[0], TILE_M), ct.cdiv(c.shape[1], TILE_N), GROUP_M)
    k_tiles = ct.cdiv(a.shape[0 if TRANS_A else 1], TILE_K)
    acc = multiply_tiles(a, b, m, n, k_tiles, TILE_M, TILE_N, TILE_K, TRANS_A, TRANS_B, TF32, USE_TMA)
    ct.store(c, (m, n), acc.astype(c.dtype))


@ct.kernel
def matmul_persistent_kernel(
    a,  # [M, K], or [K, M] if TRANS_A
    b,  # [K, N], or [N, K] if TRANS_B
    c,  # [M, N]
    TILE_M: Int,
    TILE_N: Int,
    TILE_K: Int,
    GROUP_M: Int,
    TRANS_A: Bool,
    TRANS_B: Bool,
    TF32: Bool,
    USE_TMA: Bool,
):
    # The grid has no more blocks than the GPU runs at once; each takes every num_blocks-th tile.
    m_tiles, n_tiles = ct.cdiv(c.shape[0], TILE_M), ct.cdiv(c.shape[1], TILE_N)
    k_tiles = ct.cdiv(a.shape[0 if TRANS_A else 1], TILE_K)
    for block in range(ct.bid(0), m_tiles * n_tiles, ct.num_blocks(0)):
        m, n = tile_of_block(block, m_tiles, n_tiles, GROUP_M)
        acc = multiply_tiles(a, b, m, n, k_tiles, TILE_M, TILE_N, TILE_K, TRANS_A, TRANS_B, TF32, USE_TMA)
        ct.store(c, (m, n), acc.astype(c.dtype))


class Config(NamedTuple):
    """How a product is cut up: the tile of C, the step along K, and the compiler's hints (None: its own choice)."""

    tile_m: int
    tile_n: int
    tile_k: int
    num_worker_warps: int | None = None
    occupancy: int | None = None
    num_ctas: int | None = None


# By compute capability and kind of element: configurations with the throughput of one multiprocessor while it computes
# such a tile, relative to the first. Hopper's were measured on an H200 (8192^3, bf16); the others follow from its.
_CONFIGS = {
    (9, 16): ((Config(128, 256, 64, 8), 1.0), (Config(128, 128, 64), 0.92), (Config(64, 128, 64), 0.7)),
    (9, 8): ((Config(128, 256, 128, 8), 1.0), (Config(128, 128, 128), 0.92), (Config(64, 128, 128), 0.7)),
    (10, 16): ((Config(256, 256, 64, None, 1, 2), 1.0), (Config(128, 128, 64), 0.8), (Config(64, 128, 64), 0.6)),
    (10, 8): ((Config(256, 256, 128, None, 1, 2), 1.0), (Config(128, 128, 128), 0.8), (Config(64, 128, 128), 0.6)),
    (0, 16): ((Config(128, 128, 32), 1.0), (Config(64, 128, 32), 0.8), (Config(64, 64, 64), 0.6)),
    (0, 8): ((Config(128, 128, 64), 1.0), (Config(64, 128, 64), 0.8), (Config(64, 64, 64), 0.6)),
    (0, 32): ((Config(128, 128, 32, 8), 1.0), (Config(64, 64, 32), 0.7)),
}
GROUP_M = 8  # rows of tiles that blocks running at the same time share
_INTERPRETED = Config(32, 32, 32)


@functools.cache
def _device(index: int) -> tuple[int, int]:
    """Major compute capability and number of multiprocessors; of the CPU (index -1) something small."""
    if index < 0:
        return 0, 2
    properties = torch.cuda.get_device_properties(index)
    return properties.major, properties.multi_processor_count


@functools.lru_cache(maxsize=4096)
def choose_config(m: int, n: int, bits: int, device_index: int) -> Config:
    """The configuration whose tiles fill the multiprocessors best: least waves x tile size / throughput."""
    if device_index < 0:
        return _INTERPRETED
    major, sms = _device(device_index)
    candidates = _CONFIGS.get((major, bits)) or _CONFIGS[0, bits]

    def time(candidate: tuple[Config, float]) -> float:
        config, throughput = candidate
        tiles = -(-m // config.tile_m) * -(-n // config.tile_n) * (config.num_ctas or 1)
        return -(-tiles // sms) * config.tile_m * config.tile_n / (config.num_ctas or 1) / throughput

    return min(candidates, key=time)[0]


@functools.cache
def hinted(kernel: ct.kernel, config: Config) -> ct.kernel:
    """The kernel with the configuration's hints; kept, because making it costs a hundred launches."""
    hints = {name: getattr(config, name) for name in ("num_worker_warps", "occupancy", "num_ctas")}
    return kernel.replace_hints(**{name: hint for name, hint in hints.items() if hint is not None})


def uses_tf32(dtype: torch.dtype) -> bool:
    """Whether fp32 operands are rounded to tf32, as torch's own matmul would round them."""
    return dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def with_unit_stride(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """``x``, its transpose, or a copy: a matrix with unit stride in its last dimension; and whether it is x.T."""
    rows, columns = x.stride()
    if columns == 1 and rows >= x.shape[1]:
        return x, False
    if rows == 1 and columns >= x.shape[0]:
        return x.t(), True
    return x.contiguous(), False


def _fake(a, b, trans_a, trans_b, static_persistent, use_tma):
    dtype = torch.float16 if a.dtype in FP8_DTYPES else a.dtype
    return a.new_empty((a.shape[1 if trans_a else 0], b.shape[0 if trans_b else 1]), dtype=dtype)


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
    m, n = c.shape
    if a.numel() == 0:
        return c.zero_()
    tf32 = uses_tf32(a.dtype)
    a, a_flipped = with_unit_stride(a)
    b, b_flipped = with_unit_stride(b)
    device_index = c.get_device()
    config = choose_config(m, n, a.dtype.itemsize * 8, device_index)
    blocks = -(-m // config.tile_m) * -(-n // config.tile_n)
    kernel = matmul_kernel
    if static_persistent:
        # On an H200 one block a tile is as fast or faster at every size that was tried: it is the default.
        kernel = matmul_persistent_kernel
        blocks = min(blocks, _device(device_index)[1] // (config.num_ctas or 1))
    launch(
        c,
        (blocks,),
        hinted(kernel, config),
        (
            a,
            b,
            c,
            config.tile_m,
            config.tile_n,
            config.tile_k,
            GROUP_M,
            trans_a != a_flipped,
            trans_b != b_flipped,
            tf32,
            use_tma is not False,
        ),
    )
    return c


class Matmul(torch.autograd.Function):
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

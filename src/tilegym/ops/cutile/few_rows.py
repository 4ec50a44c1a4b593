"""2 to 16 rows times a weight, on tensor cores: as fast as memory delivers the weight, which is all the work there is.

The weight is the left operand, whose tiles may be tall, and the rows of x, padded with zeros, are the few columns of
the right one.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.ops.cutile.early_weights import NOTHING
from tilegym.ops.cutile.early_weights import begin_early
from tilegym.ops.cutile.early_weights import early_columns
from tilegym.ops.cutile.matmul import load_bias
from tilegym.ops.cutile.matmul import uses_tf32
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import sm_count

MAX_ROWS = 16


def columns(x, n, TILE_N: Int, TILE_M: Int):
    """In a kernel: the n-th TILE_N columns of x, [M, N] or [M, 1, N], as [TILE_N, TILE_M]."""
    zero = ct.PaddingMode.ZERO
    if x.ndim == 2:
        tile = ct.load(x, (n, 0), (TILE_N, TILE_M), order=(1, 0), padding_mode=zero)
    else:
        tile = ct.load(x, (n, 0, 0), (TILE_N, 1, TILE_M), order=(2, 1, 0), padding_mode=zero)
        tile = tile.reshape((TILE_N, TILE_M))
    return tile


def put_columns(out, n, tile, TILE_N: Int, TILE_M: Int):
    """In a kernel: stores what :func:`columns` would load."""
    if out.ndim == 2:
        ct.store(out, (n, 0), tile, order=(1, 0))
    else:
        ct.store(out, (n, 0, 0), tile.reshape((TILE_N, 1, TILE_M)), order=(2, 1, 0))


def products(x, weights, n, TILE_M: Int, TILE_N: Int, TILE_K: Int, TF32: Bool):
    """In a kernel: the n-th TILE_N rows of each weight [N, K] times the rows of x, as [TILE_N, TILE_M] in fp32."""
    sums = ()
    for _ in ct.static_iter(weights):
        sums = (*sums, ct.zeros((TILE_N, TILE_M), dtype=ct.float32))
    for k in range(ct.cdiv(weights[0].shape[1], TILE_K)):
        x_tile, former, sums = columns(x, k, TILE_K, TILE_M), sums, ()
        for weight, acc in ct.static_iter(zip(weights, former, strict=True)):
            tile = ct.load(weight, (n, k), (TILE_N, TILE_K), padding_mode=ct.PaddingMode.ZERO)
            if TF32:
                acc = ct.mma(tile.astype(ct.tfloat32), x_tile.astype(ct.tfloat32), acc)
            else:
                acc = ct.mma(tile, x_tile, acc)
            sums = (*sums, acc)
    return sums


def put_product(
    x, weight, bias, residual, out, n, BIAS: Bool, ADD: Bool, TILE_M: Int, TILE_N: Int, TILE_K: Int, TF32: Bool
):  # fmt: skip
    """In a kernel: stores the n-th TILE_N columns of ``x @ weight.T + bias``, if ADD with the residual."""
    (y,) = products(x, (weight,), n, TILE_M, TILE_N, TILE_K, TF32)
    if BIAS:
        y = y + load_bias(bias, n, TILE_N).reshape((TILE_N, 1))
    y = y.astype(out.dtype)
    if ADD:
        y = (y.astype(ct.float32) + columns(residual, n, TILE_N, TILE_M).astype(ct.float32)).astype(out.dtype)
    put_columns(out, n, y, TILE_N, TILE_M)


@ct.kernel
def few_rows_kernel(
    x, weight, bias, residual, out, nothing, BIAS: Bool, ADD: Bool, TILE_M: Int, TILE_N: Int, TILE_K: Int, TF32: Bool,
    EARLY: Int, COLS: Int, OVERLAP: Bool,
):  # fmt: skip
    # x [M, K] with M <= TILE_M, weight [N, K], bias [N] if BIAS (else 0), residual [M, N] if ADD, out [M, N]; or
    # x [M, 1, K] and out [M, 1, N].
    n = ct.bid(0)
    begin_early((weight,), n, out, nothing, TILE_N, EARLY, COLS, OVERLAP)
    put_product(x, weight, bias, residual, out, n, BIAS, ADD, TILE_M, TILE_N, TILE_K, TF32)


def gpu_plan(n: int, k: int, bits: int, processors: int) -> tuple[int, int, int]:
    """TILE_N, TILE_K and the occupancy for n rows of weights of k elements, as measured on an H200 with bf16.

    In GB/s, cuBLAS in brackets: 14336x4096 2992 (2861), 6144x4096 2366 (2222), 128256x4096 4269 (4083), for up to 16
    rows alike. Smaller tiles have too little memory traffic under way, and larger ones spill, unless a block has a
    multiprocessor for itself, as where there are few: 16 rows of 2560x10240 take 18.9 us so (with half as wide a tile
    22.4; cuBLAS 20.6), of 4096x14336 32.4 (34.5; 34.5), of 2048x4096 10.6 (11.8; 11.8), of 6144x4096 the same.
    """
    blocks = ct.cdiv(n, 64)
    alone = 2 * blocks <= processors
    width = 4096 if alone or blocks > processors else 2048
    return 64, min(width // bits, max(32, next_power_of_2(k))), 1 if alone else 2


@functools.lru_cache(maxsize=1024)
def plan_of(n: int, k: int, bits: int, device_index: int) -> tuple[int, int, int]:
    return (32, 64, 2) if device_index < 0 else gpu_plan(n, k, bits, sm_count(device_index))


def sizes_of(
    rows: int, weight: torch.Tensor, plan: tuple[int, int, int], cols: int
) -> tuple[int, int, int, bool, int, int, bool]:
    """TILE_M, TILE_N, TILE_K, TF32, EARLY, COLS and OVERLAP of the kernels; ``cols`` is how much is read early.

    Only by launches that overlap: kernels for sm_90 that read early and do not wait then never end.
    """
    tile_n, tile_k, occupancy = plan
    index = weight.get_device()
    overlap = overlaps(index)
    cols = early_columns(weight, tile_n, cols) if cols and (overlap or index < 0) else 0
    # Of smaller tiles of the weight, 8 columns of the right operand go without tensor cores.
    tile_m = 8 if rows <= 8 and tile_n >= 64 else MAX_ROWS
    return tile_m, tile_n, tile_k, uses_tf32(weight.dtype), occupancy * sm_count(index), cols, overlap


def launch_few_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    early: bool = False,
) -> None:
    """Writes ``x @ weight.T + bias + residual`` to out; x [M, K] or [M, 1, K], residual [M, N], out as x.

    ``early``: arrays are of two dimensions, and this launch may mostly overlap that in front.
    """
    n, k = weight.shape
    has_bias, adds = bias is not None, residual is not None
    plan = plan_of(n, k, x.dtype.itemsize * 8, x.get_device())
    sizes = sizes_of(x.shape[0], weight, plan, 1024 if early else 0)
    arrays = (x, weight, bias if has_bias else 0, residual if adds else 0, out)
    kernel = hinted(few_rows_kernel, occupancy=plan[2])
    launch(out, (-(-n // plan[0]),), kernel, (*arrays, NOTHING, has_bias, adds, *sizes), sizes[-1])

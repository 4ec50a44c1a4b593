"""The linear layers behind a norm, for 2 to 16 rows, in one launch: q, k and v, or gate, up and the activation.

The norm is a launch of its own: of so many rows no block can hold all, and each would have to read them twice.
"""

import functools
import itertools

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.ops.cutile.few_rows import Plan
from tilegym.ops.cutile.few_rows import finished
from tilegym.ops.cutile.few_rows import products
from tilegym.ops.cutile.few_rows import put_columns
from tilegym.ops.cutile.few_rows import tile_m_of
from tilegym.ops.cutile.matmul import uses_tf32
from tilegym.ops.cutile.stream_gemv import activated
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps


def put_product(x, weight, bias, out, n, BIAS: Bool, TILE_M: Int, TILE_N: Int, TILE_K: Int, TF32: Bool):
    """In a kernel: stores the n-th TILE_N columns of ``x @ weight.T + bias``."""
    (acc,) = products(x, (weight,), n, 0, ct.cdiv(weight.shape[1], TILE_K), TILE_M, TILE_N, TILE_K, TF32)
    put_columns(out, n, finished(acc, bias, 0, out.dtype, n, BIAS, False, 1.0, TILE_M, TILE_N), TILE_N, TILE_M)


@ct.kernel
def few_rows_several_kernel(
    x, w1, w2, w3, w4, b1, b2, b3, b4, y1, y2, y3, y4, first, second, third, COUNT: Int, BIAS: Bool, TILE_M: Int,
    TILE_N: Int, TILE_K: Int, TF32: Bool, OVERLAP: Bool,
):  # fmt: skip
    # x [M, K] with M <= TILE_M; COUNT weights w_i [N_i, K], b_i [N_i] if BIAS, y_i [M, N_i], with blocks up to
    # ``first`` for the first one, up to ``second`` for the second and so on; what is missing is 0.
    begin(OVERLAP)
    n = ct.bid(0)
    if COUNT == 1 or n < first:
        put_product(x, w1, b1, y1, n, BIAS, TILE_M, TILE_N, TILE_K, TF32)
    elif COUNT > 1:
        if COUNT == 2 or n < second:
            put_product(x, w2, b2, y2, n - first, BIAS, TILE_M, TILE_N, TILE_K, TF32)
        elif COUNT > 2:
            if COUNT == 3 or n < third:
                put_product(x, w3, b3, y3, n - second, BIAS, TILE_M, TILE_N, TILE_K, TF32)
            elif COUNT > 3:
                put_product(x, w4, b4, y4, n - third, BIAS, TILE_M, TILE_N, TILE_K, TF32)


@ct.kernel
def few_rows_gated_kernel(
    x, gate, up, out, ACTIVATION: Int, TILE_M: Int, TILE_N: Int, TILE_K: Int, TF32: Bool, OVERLAP: Bool
):  # fmt: skip
    # x [M, K] with M <= TILE_M, gate and up [N, K], out [M, N]
    begin(OVERLAP)
    n, tiles = ct.bid(0), ct.cdiv(gate.shape[1], TILE_K)
    gates, ups = products(x, (gate, up), n, 0, tiles, TILE_M, TILE_N, TILE_K, TF32)
    put_columns(out, n, activated(gates.astype(out.dtype), ups.astype(out.dtype), ACTIVATION), TILE_N, TILE_M)


def gpu_plan(rows: int, k: int, bits: int, gated: bool) -> Plan:
    """As measured on an H200 with bf16, in graphs of layers of Llama-3.1-8B, Qwen3-8B and Llama-3.2-1B, 8 rows.

    q, k and v with tiles of the weight of 32 rows and 256 columns take 128.4, 118.4 and 51.7 us a layer, 128 columns
    128.5, 118.3 and 51.3 (but for 16 rows 4.7 us more in the first), 64 rows and 256 columns 133.7, 123.3 and 52.5,
    and 128 columns 143.1, 132.6 and 57.2: the three loops share the shared memory. Gate and up have one loop: with 64
    rows and 128 columns 144.8, 132.6 and 59.8, 64 columns 145.9, 133.7 and 59.6, 32 rows 152.7, 139.3 and 63.3.
    """
    tile_n, width = (64, 2048) if gated else (32, 4096)
    return Plan(tile_m_of(rows, tile_n), tile_n, min(width // bits, max(32, next_power_of_2(k))), 2)


@functools.lru_cache(maxsize=256)
def plan_of(rows: int, k: int, bits: int, gated: bool, device_index: int) -> Plan:
    return Plan(tile_m_of(rows, 64), 32, 64, 2) if device_index < 0 else gpu_plan(rows, k, bits, gated)


def _fake_several(x, weights, biases):
    return [x.new_empty(*x.shape[:-1], w.shape[0]) for w in weights]


@compilable(_fake_several)
def few_rows_several(x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> list[torch.Tensor]:
    """x [..., K] of 2 to 16 rows times each of up to four weights [N_i, K]: [..., N_i]. No biases: an empty list."""
    outs = _fake_several(x, weights, biases)
    k, absent = x.shape[-1], (0,) * (4 - len(weights))
    rows = x.view(-1, k)
    m = rows.shape[0]
    widths = [w.shape[0] for w in weights]
    overlap = overlaps(x.get_device())
    tile_m, tile_n, tile_k, occupancy, _ = plan_of(m, k, x.dtype.itemsize * 8, False, x.get_device())
    ends = list(itertools.accumulate(-(-n // tile_n) for n in widths))
    ys = [y.view(m, n) for y, n in zip(outs, widths, strict=True)]
    arrays = (rows, *weights, *absent, *(biases or (0,) * len(weights)), *absent, *ys, *absent, *ends[:3], *absent[1:])
    sizes = (len(weights), len(biases) > 0, tile_m, tile_n, tile_k, uses_tf32(x.dtype), overlap)
    launch(x, (ends[-1],), hinted(few_rows_several_kernel, occupancy=occupancy), (*arrays, *sizes), overlap)
    return outs


@compilable(lambda x, gate, up, activation: x.new_empty(*x.shape[:-1], gate.shape[0]))
def few_rows_gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    """``act(x @ gate.T) * (x @ up.T)`` for x [..., K] of 2 to 16 rows: [..., N]; ``activation``: its place."""
    n, k = gate.shape
    out, rows = x.new_empty(*x.shape[:-1], n), x.view(-1, k)
    m = rows.shape[0]
    overlap = overlaps(x.get_device())
    tile_m, tile_n, tile_k, occupancy, _ = plan_of(m, k, x.dtype.itemsize * 8, True, x.get_device())
    args = (rows, gate, up, out.view(m, n), activation, tile_m, tile_n, tile_k, uses_tf32(x.dtype), overlap)
    launch(x, (-(-n // tile_n),), hinted(few_rows_gated_kernel, occupancy=occupancy), args, overlap)
    return out

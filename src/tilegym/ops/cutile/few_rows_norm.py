"""The linear layers behind a norm, for 2 to 16 rows, in one launch: q, k and v, or gate, up and the activation.

The norm is a launch of its own: of so many rows no block can hold all, and each would have to read them twice.
"""

import itertools

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.ops.cutile.early_weights import NOTHING
from tilegym.ops.cutile.early_weights import begin_early
from tilegym.ops.cutile.few_rows import plan_of
from tilegym.ops.cutile.few_rows import products
from tilegym.ops.cutile.few_rows import put_columns
from tilegym.ops.cutile.few_rows import put_product
from tilegym.ops.cutile.few_rows import sizes_of
from tilegym.ops.cutile.stream_gemv import activated
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted


@ct.kernel
def few_rows_several_kernel(
    x, w1, w2, w3, w4, b1, b2, b3, b4, y1, y2, y3, y4, first, second, third, nothing, COUNT: Int, BIAS: Bool,
    TILE_M: Int, TILE_N: Int, TILE_K: Int, TF32: Bool, EARLY: Int, COLS: Int, OVERLAP: Bool,
):  # fmt: skip
    # x [M, K] with M <= TILE_M; COUNT weights w_i [N_i, K], b_i [N_i] if BIAS, y_i [M, N_i], with blocks up to
    # ``first`` for the first one, up to ``second`` for the second and so on; what is missing is 0.
    n = ct.bid(0)
    begin_early((w1,), n, y1, nothing, TILE_N, min(EARLY, first), COLS, OVERLAP)
    if COUNT == 1 or n < first:
        put_product(x, w1, b1, 0, y1, n, BIAS, False, TILE_M, TILE_N, TILE_K, TF32)
    elif COUNT > 1:
        if COUNT == 2 or n < second:
            put_product(x, w2, b2, 0, y2, n - first, BIAS, False, TILE_M, TILE_N, TILE_K, TF32)
        elif COUNT > 2:
            if COUNT == 3 or n < third:
                put_product(x, w3, b3, 0, y3, n - second, BIAS, False, TILE_M, TILE_N, TILE_K, TF32)
            elif COUNT > 3:
                put_product(x, w4, b4, 0, y4, n - third, BIAS, False, TILE_M, TILE_N, TILE_K, TF32)


@ct.kernel
def few_rows_gated_kernel(
    x, gate, up, out, nothing, ACTIVATION: Int, TILE_M: Int, TILE_N: Int, TILE_K: Int, TF32: Bool, EARLY: Int,
    COLS: Int, OVERLAP: Bool,
):  # fmt: skip
    # x [M, K] with M <= TILE_M, gate and up [N, K], out [M, N]
    n = ct.bid(0)
    begin_early((gate, up), n, out, nothing, TILE_N, EARLY, COLS, OVERLAP)
    gates, ups = products(x, (gate, up), n, TILE_M, TILE_N, TILE_K, TF32)
    put_columns(out, n, activated(gates.astype(out.dtype), ups.astype(out.dtype), ACTIVATION), TILE_N, TILE_M)


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
    plan = plan_of(sum(widths), k, x.dtype.itemsize * 8, x.get_device())
    ends = list(itertools.accumulate(-(-n // plan[0]) for n in widths))
    ys = [y.view(m, n) for y, n in zip(outs, widths, strict=True)]
    arrays = (rows, *weights, *absent, *(biases or (0,) * len(weights)), *absent, *ys, *absent, *ends[:3], *absent[1:])
    sizes = sizes_of(m, weights[0], plan, 1024)
    kernel = hinted(few_rows_several_kernel, occupancy=plan[2])
    launch(x, (ends[-1],), kernel, (*arrays, NOTHING, len(weights), len(biases) > 0, *sizes), sizes[-1])
    return outs


@compilable(lambda x, gate, up, activation: x.new_empty(*x.shape[:-1], gate.shape[0]))
def few_rows_gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    """``act(x @ gate.T) * (x @ up.T)`` for x [..., K] of 2 to 16 rows: [..., N]; ``activation``: its place."""
    n, k = gate.shape
    out, rows = x.new_empty(*x.shape[:-1], n), x.view(-1, k)
    m = rows.shape[0]
    plan = plan_of(2 * n, k, x.dtype.itemsize * 8, x.get_device())
    sizes = sizes_of(m, gate, plan, 512)
    args = (rows, gate, up, out.view(m, n), NOTHING, activation, *sizes)
    launch(x, (-(-n // plan[0]),), hinted(few_rows_gated_kernel, occupancy=plan[2]), args, sizes[-1])
    return out

"""``gated_delta_step`` of many states in cuTile: two launches, of which the second has a block for each head's state.

A state goes through the registers in tiles of columns, and several blocks share a multiprocessor, so that some read
while others compute. That is what a single launch has no room for, which computes the convolution as well.
"""

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.ops.cutile.causal_conv1d import conv_update
from tilegym.ops.cutile.gated_delta_rule import column
from tilegym.ops.cutile.gated_delta_rule import read_and_write
from tilegym.ops.cutile.pointwise import over_one_plus_exp
from tilegym.ops.cutile.row_norms import rstd_of
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import let_next_begin
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import span

# On an H200 64 sequences with 32 states of 128 x 128 take 83 us so, with 4096 elements and four blocks 88, with 8192
# and four, which spill, 103 (a copy of the states 66).
TILE, OCCUPANCY = 8192, 3  # elements of a state in the registers of a block, and blocks to a multiprocessor


def softplus(x):
    """In a kernel: ``log(1 + exp(x))`` of a tile in fp32, to its precision."""
    power = ct.exp(-ct.abs(x))
    total = 1.0 + power
    # log1p by Kahan: what the addition has rounded away is in both logarithm and quotient.
    small = ct.where(total == 1.0, power, ct.log(total) * (power / ct.where(total == 1.0, 1.0, total - 1.0)))
    return ct.maximum(x, 0.0) + small


def gates(a, b, a_log, dt_bias, batch, head):
    """In a kernel: by what a head's state decays, and how much of a token it takes, in fp32."""
    opening = ct.gather(b, (batch, 0, head)).astype(ct.float32)
    rate = over_one_plus_exp(1.0, opening, b.dtype).astype(b.dtype).astype(ct.float32)
    step = ct.gather(a, (batch, 0, head)).astype(ct.float32) + ct.gather(dt_bias, head).astype(ct.float32)
    return ct.exp(-ct.exp(ct.gather(a_log, head).astype(ct.float32)) * softplus(step)), rate


@ct.kernel
def delta_heads_kernel(
    q,  # [B, 1, Hk, DK], behind the convolution, as k and v
    k,
    v,  # [B, 1, Hv, DV]
    z,
    b,  # [B, 1, Hv]
    a,
    state,  # [B, Hv, DK, DV]
    a_log,  # [Hv]
    dt_bias,
    norm_weight,  # [DV]
    out,  # [B, 1, Hv, DV]
    scale,
    eps,
    GROUP: Int,
    DK: Int,
    DV: Int,
    TILE_V: Int,
    OVERLAP: Bool,
):
    let_next_begin(OVERLAP)
    batch, head = ct.bid(0) // v.shape[2], ct.bid(0) % v.shape[2]
    rows, cols = span(0, DK)[:, None], span(0, TILE_V)[None, :]
    # Of what comes before the convolution, whose launch waits for it, nothing is waited for.
    held = ct.gather(state, (batch, head, rows, cols))
    decay, rate = gates(a, b, a_log, dt_bias, batch, head)
    if OVERLAP:
        ct.grid_dependency_control_wait()
    kt, qt = column(k, batch, 0, head // GROUP, DK), column(q, batch, 0, head // GROUP, DK)
    reads, squares = (), ct.zeros((1, TILE_V), dtype=ct.float32)
    for c in ct.static_iter(range(DV // TILE_V)):
        at = cols + c * TILE_V
        if c > 0:
            held = ct.gather(state, (batch, head, rows, at))
        vt = ct.gather(v, (batch, 0, head, at)).astype(ct.float32)
        read, new = read_and_write(held.astype(ct.float32), qt, kt, vt, decay, rate, scale, True)
        ct.scatter(state, (batch, head, rows, at), new.astype(state.dtype))
        read = read.astype(out.dtype).astype(ct.float32)
        reads, squares = (*reads, read), squares + read * read
    rstd = rstd_of(squares, eps, DV)
    for c in ct.static_iter(range(DV // TILE_V)):
        at = cols + c * TILE_V
        normed = (reads[c] * rstd).astype(out.dtype).astype(ct.float32)
        normed = (normed * ct.gather(norm_weight, at).astype(ct.float32)).astype(out.dtype).astype(ct.float32)
        gate = ct.gather(z, (batch, 0, head, at)).astype(ct.float32)
        ct.scatter(out, (batch, 0, head, at), (normed * over_one_plus_exp(gate, gate, out.dtype)).astype(out.dtype))


def launch_heads(
    qkv, z, b, a, conv_state, state, conv_weight, conv_bias, a_log, dt_bias, norm_weight, eps: float
) -> torch.Tensor:
    """:func:`tilegym.ops.gated_delta_step` of checked arguments."""
    batch, heads, key_dim, value_dim = state.shape
    of_keys = (conv_weight.shape[0] - heads * value_dim) // 2
    mixed = conv_update(qkv.mT, conv_state, conv_weight, conv_bias, True).mT
    q, k, v = mixed.split((of_keys, of_keys, heads * value_dim), 2)
    q, k, v = (x.unflatten(2, (-1, dim)) for x, dim in ((q, key_dim), (k, key_dim), (v, value_dim)))
    gate, overlap = z.unflatten(2, (heads, value_dim)), overlaps(z.get_device())
    out = z.new_empty(batch, 1, heads, value_dim)
    arrays = (q, k, v, gate, b, a, state, a_log, dt_bias, norm_weight, out)
    tile_v = min(value_dim, TILE // key_dim)
    constants = (key_dim**-0.5, eps, heads * key_dim // of_keys, key_dim, value_dim, tile_v, overlap)
    kernel = hinted(delta_heads_kernel, occupancy=OCCUPANCY)
    launch(out, (batch * heads,), kernel, (*arrays, *constants), overlap)
    return out.view(z.shape)

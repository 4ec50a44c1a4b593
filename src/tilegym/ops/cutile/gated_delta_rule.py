"""The gated delta rule, token by token: for decoding.

A block holds a tile of columns of one head's state, [Dk, TILE_V], in registers, and goes through the tokens. The state
is read once and written once, which is all that a decoding step has to move.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.ops.cutile.gated_delta_rule_chunk import ChunkGatedDeltaRule
from tilegym.ops.cutile.gated_delta_rule_tiles import check_supported
from tilegym.ops.cutile.gated_delta_rule_tiles import trains
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.gated_delta_rule import NORM_EPS
from tilegym.ops.pytorch.gated_delta_rule import check_delta_rule

MAX_TILE = 8192  # elements of a state in the registers of a block


def _add_pairs(a, b, c, d):
    return a + c, b + d


def _add_triples(a, b, c, d, e, f):
    return a + d, b + e, c + f


def column(x, batch, token, head, TILE_K: Int):
    """A head's vector as a column, [TILE_K, 1]."""
    # As the sum of two, of which one is out of bounds: what is gathered has a thread for each element, and the state
    # would take on that layout, by way of shared memory, if it were a factor of it.
    places = span(0, TILE_K)[:, None] + ct.arange(2, dtype=ct.int32)[None, :] * x.shape[3]
    return ct.sum(ct.gather(x, (batch, token, head, places)).astype(ct.float32), axis=1, keepdims=True)


def read_and_write(state, q, k, v, decay, rate, scale, NORM: Bool):
    """In a kernel: what a token reads from a head's ``state`` [Dk, Dv], [1, Dv], and the state behind it, in fp32.

    q, k: [Dk, 1]; v: [1, Dv]. NORM: q and k are normalised first.
    """
    # Both readings from the old state, norms and decay as factors behind the sums: so all can be under way at once,
    # and those together for whose results the threads wait for each other.
    held, read = ct.reduce((state * k, state * q), 0, _add_pairs, (0.0, 0.0), keepdims=True)
    kk, qq, qk = ct.reduce((k * k, q * q, q * k), 0, _add_triples, (0.0, 0.0, 0.0), keepdims=True)
    of_k, of_q = (ct.rsqrt(kk + NORM_EPS), ct.rsqrt(qq + NORM_EPS)) if NORM else (1.0, 1.0)
    write = (v - held * (decay * of_k)) * (rate * of_k)
    return (read * decay + qk * write) * (of_q * scale), state * decay + k * write


@ct.kernel
def recurrent_kernel(
    q, k, v, g, beta, initial, out, final, scale, GROUP: Int, TILE_K: Int, TILE_V: Int, NORM: Bool, INITIAL: Bool,
    FINAL: Bool,
):  # fmt: skip
    """q, k: [B, T, Hk, Dk]; v, out: [B, T, Hv, Dv]; g, beta: [B, T, Hv]; initial, final: [B, Hv, Dk, Dv], used if said.

    Blocks: (batch and value heads, tiles of Dv). GROUP value heads share a key head.
    """
    heads = v.shape[2]
    batch, head = ct.bid(0) // heads, ct.bid(0) % heads
    rows, cols = span(0, TILE_K)[:, None], span(ct.bid(1), TILE_V)[None, :]
    at_state = (batch, head, rows, cols)
    state = ct.gather(initial, at_state).astype(ct.float32) if INITIAL else ct.zeros((TILE_K, TILE_V), ct.float32)
    for t in range(q.shape[1]):
        kt, qt = column(k, batch, t, head // GROUP, TILE_K), column(q, batch, t, head // GROUP, TILE_K)
        vt = ct.gather(v, (batch, t, head, cols)).astype(ct.float32)
        decay = ct.exp(ct.gather(g, (batch, t, head)).astype(ct.float32))
        rate = ct.gather(beta, (batch, t, head)).astype(ct.float32)
        read, state = read_and_write(state, qt, kt, vt, decay, rate, scale, NORM)
        ct.scatter(out, (batch, t, head, cols), read.astype(out.dtype))
    if FINAL:
        ct.scatter(final, at_state, state)


@functools.lru_cache(maxsize=1024)
def recurrent_tiles(states: int, key_dim: int, value_dim: int, device: int) -> tuple[int, int]:
    """(TILE_K, TILE_V) for so many states on CUDA device ``device`` (-1: CPU).

    Columns are split until every multiprocessor has a block, but not into less than the 64 bytes that it takes to
    read a row of a tile without waste. On an H200 a step of 32 states of 128 x 128 takes 7 us with 8 to 32 columns.
    """
    tile_k, tile_v = next_power_of_2(key_dim), next_power_of_2(value_dim)
    tile_v = min(tile_v, max(16, MAX_TILE // tile_k))
    while tile_v > 16 and states * ct.cdiv(value_dim, tile_v) < sm_count(device):
        tile_v //= 2
    return tile_k, tile_v


def recurrent_kernel_for(tiles: tuple[int, int]) -> ct.kernel:
    """The kernel with the hints for these tiles.

    Of the largest tiles four blocks have to share a multiprocessor: on an H200 a step of 2048 states of 128 x 128 then
    takes 75 us (3604 GB/s), without the hint 77. Smaller ones are a little faster without.
    """
    return hinted(recurrent_kernel, occupancy=4) if tiles[0] * tiles[1] >= MAX_TILE else recurrent_kernel


def _fake_recurrent(q, k, v, g, beta, initial, with_final, normalize):
    shape = (v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if with_final else (0,)
    return v.new_empty(v.shape), v.new_empty(shape, dtype=torch.float32)


@compilable(fake=_fake_recurrent)
def recurrent_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial: torch.Tensor | None,
    with_final: bool,
    normalize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the final state (empty if not asked for)."""
    batch, tokens, key_heads, key_dim = k.shape
    _, _, heads, value_dim = v.shape
    out = v.new_empty(batch, tokens, heads, value_dim)
    shape = (batch, heads, key_dim, value_dim) if with_final else (0,)
    final = v.new_empty(shape, dtype=torch.float32)
    tiles = recurrent_tiles(batch * heads, key_dim, value_dim, v.get_device())
    args = (q, k, v, g, beta, out if initial is None else initial, out, final if with_final else out)
    constants = (key_dim**-0.5, heads // key_heads, *tiles, normalize, initial is not None, with_final)
    grid = (batch * heads, ct.cdiv(value_dim, tiles[1]))
    launch(v, grid, recurrent_kernel_for(tiles), (*args, *constants))
    return out, final


@register_impl("recurrent_gated_delta_rule", "cutile")
def recurrent_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    check_delta_rule("recurrent_gated_delta_rule", query, key, value, g, beta, initial_state, cu_seqlens)
    check_supported(query, key, value, g, beta, initial_state, cu_seqlens)
    # The kernels in chunks compute the same, and have a backward pass.
    training = trains(query, key, value, g, beta, initial_state)
    run = ChunkGatedDeltaRule.apply if training else recurrent_forward
    out, final = run(query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel)
    return out, (final if output_final_state else None)

"""The gated delta rule in chunks of tokens: the forward kernels, autograd and registration.

With a chunk's tokens as the rows of q, k (normalised), v, out, and S the state before it, e_i the decay from the start
of the chunk to token i, f_i that from token i to its end, and D_ij that from j to i (0 for j > i)::

    P = scale * (q k^T) * D              what the tokens read of each other
    A = strictly_lower((k k^T) * D)      what a token's key finds of those that were written before it
    X = A (I + beta * A)^-1
    left = v - e * (k S)
    miss = (I - X beta) left             by how much what is held misses v: left - A new
    new = beta * miss                    what the tokens write: all updates of the chunk at once
    out = scale * e * (q S) + P new
    S = e_last * S + (f * k)^T new

Two kernels compute P, and X, of all chunks. The third goes through the chunks in order; its blocks share the columns of
S, which do not depend on each other. k and q enter it as they are in memory: what they are multiplied by, norms
included, multiplies rows of the products instead.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.ops.cutile.attention_common import tile_of
from tilegym.ops.cutile.attention_common import with_unit_stride
from tilegym.ops.cutile.gated_delta_rule_backward import backward_chunk_kernel
from tilegym.ops.cutile.gated_delta_rule_backward import backward_scan_kernel
from tilegym.ops.cutile.gated_delta_rule_solve import LEVELS
from tilegym.ops.cutile.gated_delta_rule_solve import chunk_solve_kernel
from tilegym.ops.cutile.gated_delta_rule_tiles import BF16_PAIR
from tilegym.ops.cutile.gated_delta_rule_tiles import BF16_SPLIT
from tilegym.ops.cutile.gated_delta_rule_tiles import CHUNK
from tilegym.ops.cutile.gated_delta_rule_tiles import DECAY
from tilegym.ops.cutile.gated_delta_rule_tiles import FACTORS
from tilegym.ops.cutile.gated_delta_rule_tiles import OF_HELD
from tilegym.ops.cutile.gated_delta_rule_tiles import OF_READ
from tilegym.ops.cutile.gated_delta_rule_tiles import OF_WRITE
from tilegym.ops.cutile.gated_delta_rule_tiles import RATE
from tilegym.ops.cutile.gated_delta_rule_tiles import TF32
from tilegym.ops.cutile.gated_delta_rule_tiles import TF32_SPLIT
from tilegym.ops.cutile.gated_delta_rule_tiles import check_supported
from tilegym.ops.cutile.gated_delta_rule_tiles import chunk_of
from tilegym.ops.cutile.gated_delta_rule_tiles import decay_sums
from tilegym.ops.cutile.gated_delta_rule_tiles import decays
from tilegym.ops.cutile.gated_delta_rule_tiles import decays_to_end
from tilegym.ops.cutile.gated_delta_rule_tiles import factors_of
from tilegym.ops.cutile.gated_delta_rule_tiles import grams
from tilegym.ops.cutile.gated_delta_rule_tiles import inverse_norms
from tilegym.ops.cutile.gated_delta_rule_tiles import key_tile
from tilegym.ops.cutile.gated_delta_rule_tiles import matrix_of
from tilegym.ops.cutile.gated_delta_rule_tiles import numbers_of
from tilegym.ops.cutile.gated_delta_rule_tiles import product
from tilegym.ops.cutile.gated_delta_rule_tiles import product_of
from tilegym.ops.cutile.gated_delta_rule_tiles import store_chunk
from tilegym.ops.cutile.gated_delta_rule_tiles import store_matrix
from tilegym.ops.cutile.gated_delta_rule_tiles import store_saved
from tilegym.ops.cutile.gated_delta_rule_tiles import store_system
from tilegym.ops.cutile.gated_delta_rule_tiles import strictly_lower
from tilegym.ops.cutile.gated_delta_rule_tiles import system_left
from tilegym.ops.cutile.gated_delta_rule_tiles import system_product
from tilegym.ops.cutile.gated_delta_rule_tiles import trains
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.pytorch.gated_delta_rule import NORM_EPS
from tilegym.ops.pytorch.gated_delta_rule import check_chunk
from tilegym.ops.pytorch.gated_delta_rule import check_delta_rule

PRECISIONS = {torch.float32: BF16_SPLIT, torch.float16: TF32_SPLIT, torch.bfloat16: BF16_PAIR}
# Of the systems' products none is summed along the sequence.
OF_SYSTEMS = PRECISIONS | {torch.bfloat16: TF32}


@ct.kernel
def chunk_matrices_kernel(
    q, k, g, beta, solved, scores, factors, scale, GROUP: Int, TILE_K: Int, NORM: Bool, PRECISION: Int
):
    """P and A, as ``store_system`` writes them, and the factors of the tokens: a chunk of all heads of a key head."""
    heads, chunks = g.shape[2], solved.shape[1]
    row, chunk = ct.bid(0) // chunks, ct.bid(0) % chunks
    batch, key_head = row // (heads // GROUP), row % (heads // GROUP)
    same_k, same_q, across = grams(q, k, batch, chunk, key_head, TILE_K, PRECISION)
    of_k = inverse_norms(same_k, 1, NORM_EPS, NORM)
    of_q = inverse_norms(same_q, 1, NORM_EPS, NORM) * scale
    norms = inverse_norms(same_k, 0, NORM_EPS, NORM)
    for head in range(key_head * GROUP, (key_head + 1) * GROUP):
        row = batch * heads + head
        rate = numbers_of(beta, batch, chunk, head)[:, None]
        high, low = decay_sums(g, batch, chunk, head)
        between = decays(high, low) * norms
        store_system(scores, row, chunk, across * between * of_q, True)
        store_system(solved, row, chunk, strictly_lower(same_k * between * of_k), True)
        decay = ct.exp(high)[:, None]
        rest = decays_to_end(high, low)[:, None]
        for which, column in ct.static_iter(
            ((OF_READ, decay * of_q), (OF_HELD, decay * of_k), (OF_WRITE, rest * of_k), (RATE, rate), (DECAY, decay))
        ):  # fmt: skip
            ct.store(factors, (row, chunk, which, 0), column.reshape((1, 1, 1, CHUNK)), allow_tma=False)


@ct.kernel
def chunk_scan_kernel(
    q, k, v, solved, scores, factors, initial, out, final, states, missed, GROUP: Int, TILE_K: Int, TILE_V: Int,
    INITIAL: Bool, FINAL: Bool, SAVE: Bool, PRECISION: Int,
):  # fmt: skip
    """Goes through the chunks with a tile of columns of a head's state, [Dk, TILE_V], in registers.

    For BF16_PAIR tensor cores take k, q, X and P as they are in memory, and the state and the updates as halves: on an
    H200 128 chunks take 290 us so, and 410 in tf32, which has to be converted and written transposed first.

    initial, final: [B, Hv, Dk, Dv]. If SAVE, instead of out, as ``store_saved`` writes them: states, [Dk, Dv] before
    each chunk, and missed, ``miss``, [CHUNK, Dv]. Blocks: (batch and value heads, tiles of Dv).
    """
    heads = v.shape[2]
    row, column = ct.bid(0), ct.bid(1)
    batch, head = row // heads, row % heads
    if INITIAL:
        state = matrix_of(initial, batch, head, column, TILE_K, TILE_V).astype(ct.float32)
    else:
        state = ct.zeros((TILE_K, TILE_V), ct.float32)
    rate, of_held, of_read, of_write, decay = factors_of(factors, row, 0)
    for chunk in range(solved.shape[1]):
        kt = chunk_of(k, batch, chunk, head // GROUP, 0, TILE_K)
        vt = chunk_of(v, batch, chunk, head, column, TILE_V).astype(ct.float32)
        left = vt - of_held * product_of(kt, state, PRECISION)
        miss = system_left(solved, row, chunk, rate, left, False, PRECISION)
        new = rate * miss
        if SAVE:
            store_saved(states, row, chunk, column, state)
            store_saved(missed, row, chunk, column, miss)
        else:
            qt = chunk_of(q, batch, chunk, head // GROUP, 0, TILE_K)
            read = of_read * product_of(qt, state, PRECISION)
            read = system_product(scores, row, chunk, new, read, False, PRECISION)
            store_chunk(out, batch, chunk, head, column, read)
        state = product(ct.transpose(kt), of_write * new, state * decay, PRECISION)
        rate, of_held, of_read, of_write, decay = factors_of(factors, row, chunk + 1)
    if FINAL:
        store_matrix(final, batch, head, column, state)


@functools.lru_cache(maxsize=1024)
def scan_tiles(states: int, key_dim: int, value_dim: int, device: int) -> tuple[int, int]:
    """(TILE_K, TILE_V) for so many states on CUDA device ``device`` (-1: CPU).

    The columns whose last wave of blocks ends first. On an H200 32 states of 128 x 128 and 8192 tokens take 288 us with
    32 columns a block and 391 with 64: what a block takes grows by its columns and as much again as 64 of them. Tiles
    of 16 columns take longer than those of 32, 857 us: the compiler has them wait for every product.
    """
    tile_k, widest = key_tile(key_dim), tile_of(value_dim)
    widest = min(widest, max(16, 8192 // tile_k))

    def time(tile_v: int) -> int:
        return ct.cdiv(states * ct.cdiv(value_dim, tile_v), sm_count(device)) * (tile_v + 64)

    return tile_k, min((n for n in (128, 64, 32, 16) if n == widest or 32 <= n <= widest), key=time)


def tile_in_chunk(tile_k: int, device: int) -> int:
    """The width of keys in ``backward_chunk_kernel``: for compute capability 8 tileiras 13.4 makes none of 64 ("Invalid
    use-def chain in schedule")."""
    return 128 if tile_k == 64 and device >= 0 and torch.cuda.get_device_capability(device)[0] == 8 else tile_k


def chunk_matrices(q, k, g, beta, normalize):
    """X, P and the factors of all chunks."""
    batch, tokens, key_heads, key_dim = k.shape
    heads, chunks = g.shape[2], -(-tokens // CHUNK)
    rows, precision = batch * heads, PRECISIONS[q.dtype]
    if precision == BF16_PAIR:
        solved = q.new_empty(rows, chunks, CHUNK, 2 * CHUNK)
    else:
        solved = q.new_empty(rows, chunks, CHUNK, CHUNK, dtype=torch.float32)
    scores = torch.empty_like(solved)
    factors = q.new_empty(rows, chunks, FACTORS, CHUNK, dtype=torch.float32)
    constants = (key_dim**-0.5, heads // key_heads, key_tile(key_dim), normalize, precision)
    # On an H200 8192 tokens of 32 heads, 16 of keys, take 93 us and 64; with two blocks on a multiprocessor 100 and 90.
    occupancy = 2 if q.dtype == torch.float32 else 4
    matrices, solve_all = (hinted(x, occupancy=occupancy) for x in (chunk_matrices_kernel, chunk_solve_kernel))
    launch(q, (batch * key_heads * chunks,), matrices, (q, k, g, beta, solved, scores, factors, *constants))
    launch(q, (rows * chunks,), solve_all, (solved, factors, LEVELS, OF_SYSTEMS[q.dtype]))
    return solved, scores, factors


def _fake_forward(q, k, v, g, beta, initial, with_final, normalize):
    shape = (v.shape[0], v.shape[2], k.shape[3], v.shape[3]) if with_final else (0,)
    return v.new_empty(v.shape), v.new_empty(shape, dtype=torch.float32)


@compilable(fake=_fake_forward)
def chunk_forward(
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
    q, k, v = with_unit_stride(q), with_unit_stride(k), with_unit_stride(v)
    batch, tokens, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[2:]
    out = v.new_empty(batch, tokens, heads, value_dim)
    final = v.new_empty((batch, heads, key_dim, value_dim) if with_final else (0,), dtype=torch.float32)
    solved, scores, factors = chunk_matrices(q, k, g, beta, normalize)
    tiles = scan_tiles(batch * heads, key_dim, value_dim, v.get_device())
    grid, precision = (batch * heads, ct.cdiv(value_dim, tiles[1])), PRECISIONS[q.dtype]
    before = out if initial is None else with_unit_stride(initial)
    args = (q, k, v, solved, scores, factors, before, out, final if with_final else out, factors, factors)
    constants = (heads // key_heads, *tiles, initial is not None, with_final, False, precision)
    launch(v, grid, chunk_scan_kernel, (*args, *constants))
    return out, final


def _fake_backward(dout, dfinal, q, k, v, g, beta, initial, normalize):
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        g.new_empty(g.shape),
        beta.new_empty(beta.shape),
        v.new_empty((0,) if initial is None else initial.shape, dtype=torch.float32),
    )


def sums_of_groups(x, out):
    """The sums of ``x``, [B, T, Hk, group, Dk], over a group. Of two heads in one launch, which reads no slower."""
    if x.shape[3] == 2:
        return torch.add(x[:, :, :, 0], x[:, :, :, 1], out=out)
    return out.copy_(x.sum(3))


@compilable(fake=_fake_backward)
def chunk_backward(
    dout: torch.Tensor,
    dfinal: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial: torch.Tensor | None,
    normalize: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k, v, g, beta, and in fp32 that of the initial state (empty without one)."""
    q, k, v, dout = with_unit_stride(q), with_unit_stride(k), with_unit_stride(v), with_unit_stride(dout)
    batch, tokens, heads, value_dim = v.shape
    key_heads, key_dim = k.shape[2:]
    group, precision = heads // key_heads, PRECISIONS[q.dtype]
    solved, scores, factors = chunk_matrices(q, k, g, beta, normalize)
    rows, chunks = solved.shape[:2]
    parts = 2 if precision == BF16_PAIR else 1
    states = solved.new_empty(rows, chunks, parts, key_dim, value_dim)
    missed = solved.new_empty(rows, chunks, parts, CHUNK, value_dim)
    dstates, dall = torch.empty_like(states), torch.empty_like(missed)
    dinitial = factors.new_empty((0,) if initial is None else initial.shape)
    tiles = scan_tiles(rows, key_dim, value_dim, v.get_device())
    if dfinal is not None and initial is not None:  # in wider tiles tileiras 13.4 crashes at the scan back for sm_120
        tiles = tiles[0], min(tiles[1], 32)
    grid, constants = (rows, ct.cdiv(value_dim, tiles[1])), (group, *tiles)
    before = factors if initial is None else with_unit_stride(initial)
    args = (q, k, v, solved, scores, factors, before, dout, dout, states, missed)
    launch(v, grid, chunk_scan_kernel, (*args, *constants, initial is not None, False, True, precision))
    after = factors if dfinal is None else with_unit_stride(dfinal)
    args = (q, k, dout, solved, scores, factors, after, factors if initial is None else dinitial, dstates, dall)
    launch(v, grid, backward_scan_kernel, (*args, *constants, dfinal is not None, initial is not None, precision))
    # Heads that share a key head have each its own gradient of it, in fp32 until they are added.
    dtype = q.dtype if group == 1 else torch.float32
    dq = q.new_empty(batch, tokens, heads, key_dim, dtype=dtype)
    dk, dv = torch.empty_like(dq), v.new_empty(v.shape)
    dg, dbeta = g.new_empty(g.shape), beta.new_empty(beta.shape)
    args = (q, k, g, beta, dout, states, missed, dstates, dall, dq, dk, dv, dg, dbeta, key_dim**-0.5)
    # Of its products none is summed along the sequence; on thirds tileiras 13.4 fails for sm_80.
    in_chunk = BF16_PAIR if precision == BF16_PAIR else TF32_SPLIT
    # On an H200 8192 tokens of 32 heads take 880 us with halves, with 16 columns 1010 and with 64 940. In tf32 with 16
    # they took 990, and 512 tokens 77 instead of 109 with 32.
    tile_v = 32 if precision == BF16_PAIR else 16
    tile_k = tile_in_chunk(tiles[0], v.get_device())
    constants = (ct.cdiv(value_dim, tile_v), group, tile_k, tile_v, normalize, in_chunk)
    launch(v, (rows * chunks,), hinted(backward_chunk_kernel, num_worker_warps=8), (*args, *constants))
    if group > 1:
        dq, dk = (sums_of_groups(x.unflatten(2, (key_heads, group)), q.new_empty(q.shape)) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta, dinitial


class ChunkGatedDeltaRule(Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial, with_final, normalize):
        ctx.save_for_backward(q, k, v, g, beta, initial)
        ctx.normalize, ctx.with_final = normalize, with_final
        ctx.set_materialize_grads(False)
        return chunk_forward(q, k, v, g, beta, initial, with_final, normalize)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dfinal):
        q, k, v, g, beta, initial = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(v)
        if not ctx.with_final:
            dfinal = None  # compiled code gives the gradient of what stands for no state
        *gradients, dinitial = chunk_backward(dout, dfinal, q, k, v, g, beta, initial, ctx.normalize)
        return *gradients, (None if initial is None else dinitial.to(initial.dtype)), None, None


@register_impl("chunk_gated_delta_rule", "cutile")
def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    check_delta_rule("chunk_gated_delta_rule", query, key, value, g, beta, initial_state, cu_seqlens)
    check_chunk(chunk_size)
    check_supported(query, key, value, g, beta, initial_state, cu_seqlens)
    run = ChunkGatedDeltaRule.apply if trains(query, key, value, g, beta, initial_state) else chunk_forward
    options = (output_final_state, use_qk_l2norm_in_kernel)
    out, final = run(query, key, value, g, beta, initial_state, *options)
    return out, (final if output_final_state else None)

"""The backward kernels of the chunked gated delta rule.

In the notation of ``gated_delta_rule_chunk``, with S the state before a chunk, S' that behind it, and dnew what comes
to ``new`` from behind it, dall with what comes through the tokens after it as well::

    dnew = P^T dout + f * (k dS')                   dall = (I - beta * X)^T dnew
    dS   = e_last * dS' + (scale * e * q)^T dout - (beta * e * k)^T dall

which is a scan like the forward one, from the last chunk to the first. What is left is independent in all chunks. With
``dP = dout new^T`` and ``dA = -strictly_lower(beta * (dall new^T))``::

    dq  = scale * (e * (dout S^T) + (dP * D) k)
    dk  = (dP * D)^T scale q + f * (new dS'^T) - beta * e * (dall S^T) + (B + B^T) k,  B = dA * D
    dv  = beta * dall                               dbeta = the sums of the rows of dall * miss

(to add up what comes to beta through v, S and A would cost digits where keys repeat and these cancel); and the decays'
gradients are the products of what they multiply with its gradient, summed from the end of the chunk.
Nothing but the inputs is kept for the backward pass: it computes S, miss, X and P again.
"""

import cuda.tile as ct

from tilegym.ops.cutile.gated_delta_rule_tiles import BF16_PAIR
from tilegym.ops.cutile.gated_delta_rule_tiles import CHUNK
from tilegym.ops.cutile.gated_delta_rule_tiles import chunk_of
from tilegym.ops.cutile.gated_delta_rule_tiles import decay_sums
from tilegym.ops.cutile.gated_delta_rule_tiles import decays
from tilegym.ops.cutile.gated_delta_rule_tiles import decays_to_end
from tilegym.ops.cutile.gated_delta_rule_tiles import factors_of
from tilegym.ops.cutile.gated_delta_rule_tiles import gram
from tilegym.ops.cutile.gated_delta_rule_tiles import inverse_norms
from tilegym.ops.cutile.gated_delta_rule_tiles import matrix_of
from tilegym.ops.cutile.gated_delta_rule_tiles import numbers_of
from tilegym.ops.cutile.gated_delta_rule_tiles import product
from tilegym.ops.cutile.gated_delta_rule_tiles import product_of
from tilegym.ops.cutile.gated_delta_rule_tiles import product_onto
from tilegym.ops.cutile.gated_delta_rule_tiles import product_transposed
from tilegym.ops.cutile.gated_delta_rule_tiles import saved
from tilegym.ops.cutile.gated_delta_rule_tiles import store_chunk
from tilegym.ops.cutile.gated_delta_rule_tiles import store_saved
from tilegym.ops.cutile.gated_delta_rule_tiles import strictly_lower
from tilegym.ops.cutile.gated_delta_rule_tiles import system_left
from tilegym.ops.cutile.gated_delta_rule_tiles import system_product
from tilegym.ops.cutile.gated_delta_rule_tiles import whole
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.gated_delta_rule import NORM_EPS


@ct.kernel
def backward_scan_kernel(
    q, k, dout, solved, scores, factors, dfinal, dinitial, dstates, dall, GROUP: Int, TILE_K: Int, TILE_V: Int,
    FINAL: Bool, INITIAL: Bool, PRECISION: Int,
):  # fmt: skip
    """dS' of every chunk, [Dk, Dv], and dall, [CHUNK, Dv], as ``store_saved`` writes them, from the last to the first.

    dfinal, dinitial: [B, Hv, Dk, Dv]. Blocks: (batch and value heads, tiles of Dv).
    """
    heads, chunks = dout.shape[2], solved.shape[1]
    row, column = ct.bid(0), ct.bid(1)
    batch, head = row // heads, row % heads
    if FINAL:
        dstate = matrix_of(dfinal, batch, head, column, TILE_K, TILE_V).astype(ct.float32)
    else:
        dstate = ct.zeros((TILE_K, TILE_V), ct.float32)
    rate, of_held, of_read, of_write, decay = factors_of(factors, row, chunks - 1)
    for step in range(chunks):
        chunk = chunks - 1 - step
        store_saved(dstates, row, chunk, column, dstate)
        qt = chunk_of(q, batch, chunk, head // GROUP, 0, TILE_K)
        kt = chunk_of(k, batch, chunk, head // GROUP, 0, TILE_K)
        up = chunk_of(dout, batch, chunk, head, column, TILE_V)
        dnew = of_write * product_of(kt, dstate, PRECISION)
        dnew = system_product(scores, row, chunk, up, dnew, True, PRECISION)
        da = system_left(solved, row, chunk, rate, dnew, True, PRECISION)
        store_saved(dall, row, chunk, column, da)
        dstate = product(ct.transpose(qt), of_read * up, dstate * decay, PRECISION)
        dstate = product(ct.transpose(kt), -of_held * rate * da, dstate, PRECISION)
        rate, of_held, of_read, of_write, decay = factors_of(factors, row, ct.maximum(chunk - 1, 0))
    if INITIAL:
        # With TMA tileiras 13.4 crashes for sm_90 in some dtypes.
        place, shape = (batch, head, 0, column), (1, 1, TILE_K, TILE_V)
        ct.store(dinitial, place, dstate.reshape(shape), allow_tma=False)


def _by_rows(a, b):
    return ct.sum(a * b, axis=1, keepdims=True)


def _normalised_back(dx, x, inverse_norm, NORM: Bool):
    """The gradient of rows before they were normalised to ``x``."""
    return inverse_norm * (dx - x * _by_rows(dx, x)) if NORM else dx


@ct.kernel
def backward_chunk_kernel(
    q, k, g, beta, dout, states, missed, dstates, dall, dq, dk, dv, dg, dbeta, scale, v_tiles, GROUP: Int,
    TILE_K: Int, TILE_V: Int, NORM: Bool, PRECISION: Int,
):  # fmt: skip
    """The gradients of one chunk of one value head: dq, dk [B, T, Hv, Dk], dv [B, T, Hv, Dv], dg, dbeta [B, T, Hv]."""
    heads, chunks = g.shape[2], states.shape[1]
    row, chunk = ct.bid(0) // chunks, ct.bid(0) % chunks
    batch, head = row // heads, row % heads
    rate = numbers_of(beta, batch, chunk, head)[:, None]
    high, low = decay_sums(g, batch, chunk, head)
    decay, rest = ct.exp(high)[:, None], decays_to_end(high, low)[:, None]
    last = ct.arange(CHUNK, dtype=ct.int32)[:, None] == CHUNK - 1
    qt = chunk_of(q, batch, chunk, head // GROUP, 0, TILE_K)
    kt = chunk_of(k, batch, chunk, head // GROUP, 0, TILE_K)
    same_k = gram(kt, kt, PRECISION)
    of_k = inverse_norms(same_k, 1, NORM_EPS, NORM)
    of_q = inverse_norms(gram(qt, qt, PRECISION), 1, NORM_EPS, NORM)

    norms_of_k = inverse_norms(same_k, 0, NORM_EPS, NORM)
    q_hat, k_hat = qt.astype(ct.float32) * of_q, kt.astype(ct.float32) * of_k
    between, later = decays(high, low), rest
    if PRECISION == BF16_PAIR:  # the halves of miss enter as they are in memory, in the place of new
        between, later = between * rate.reshape((1, CHUNK)), rest * rate

    # What comes through the states: sums over their columns, and so over tiles of Dv. That of q first, and then that of
    # k, for both of which the registers do not suffice.
    of_scores = ct.zeros((CHUNK, CHUNK), ct.float32)  # dP
    read = ct.zeros((CHUNK, TILE_K), ct.float32)  # dout S^T
    for column in range(v_tiles):
        up = (chunk_of(dout, batch, chunk, head, column, TILE_V),)
        miss = saved(missed, row, chunk, column, CHUNK, TILE_V)
        new = miss if PRECISION == BF16_PAIR else (rate * whole(miss),)
        of_scores = product_transposed(up, new, of_scores, PRECISION)
        read = product_transposed(up, saved(states, row, chunk, column, TILE_K, TILE_V), read, PRECISION)
    of_scores = of_scores * between
    # Where keys repeat, what is read of the chunk cancels what is read of the state: neither may be cut off. q and k
    # enter the products as they are in memory: their norms multiply the other side.
    dq_hat = scale * product(of_scores * norms_of_k, kt, decay * read, PRECISION)
    store_chunk(dq, batch, chunk, head, 0, _normalised_back(dq_hat, q_hat, of_q, NORM))
    scores = gram(qt, kt, PRECISION) * of_q * norms_of_k * scale  # without the decays
    products = of_scores * scores
    dtotal = scale * _by_rows(decay * read, q_hat)

    of_system = ct.zeros((CHUNK, CHUNK), ct.float32)  # -dA without beta
    held = ct.zeros((CHUNK, TILE_K), ct.float32)  # dall S^T
    wrote = ct.zeros((CHUNK, TILE_K), ct.float32)  # new dS'^T
    drate = ct.zeros((CHUNK, 1), ct.float32)
    kept = ct.zeros((1, 1), ct.float32)  # the sum of S * dS'
    for column in range(v_tiles):
        miss = saved(missed, row, chunk, column, CHUNK, TILE_V)
        new = miss if PRECISION == BF16_PAIR else (rate * whole(miss),)
        da = saved(dall, row, chunk, column, CHUNK, TILE_V)
        state = saved(states, row, chunk, column, TILE_K, TILE_V)
        dstate = saved(dstates, row, chunk, column, TILE_K, TILE_V)
        of_system = product_transposed(da, new, of_system, PRECISION)
        held = product_transposed(da, state, held, PRECISION)
        wrote = product_transposed(new, dstate, wrote, PRECISION)
        both = whole(state) * whole(dstate)
        kept = kept + ct.sum(ct.sum(both, axis=1, keepdims=True), axis=0, keepdims=True)
        all_ = whole(da)
        drate = drate + _by_rows(all_, whole(miss))
        store_chunk(dv, batch, chunk, head, column, rate * all_)
    of_system = strictly_lower(-of_system * between) * rate
    products = products + of_system * (same_k * of_k * norms_of_k)  # with dP * P + dA * A the decays' gradients
    wrote, held = later * wrote, -rate * decay * held
    norms_of_q = scale * of_q.reshape((1, CHUNK))
    of_system = (of_system + ct.transpose(of_system)) * norms_of_k
    dk_hat = product_onto(of_system, kt, ct.zeros((CHUNK, TILE_K), ct.float32), PRECISION)
    dk_hat = product_onto(ct.transpose(of_scores) * norms_of_q, qt, dk_hat, PRECISION) + (wrote + held)
    into = _by_rows(wrote, k_hat)
    passed = ct.sum(products, axis=1, keepdims=True) - ct.sum(products, axis=0, keepdims=True).reshape((CHUNK, 1))
    dtotal = passed + dtotal + _by_rows(held, k_hat) - into
    dtotal = dtotal + ct.where(last, ct.sum(into, axis=0, keepdims=True) + kept * decay, 0.0)
    tokens = span(chunk, CHUNK)
    dlog = ct.cumsum(dtotal.reshape((CHUNK,)), axis=0, reverse=True)
    ct.scatter(dg, (batch, tokens, head), dlog.astype(dg.dtype))
    ct.scatter(dbeta, (batch, tokens, head), drate.reshape((CHUNK,)).astype(dbeta.dtype))
    store_chunk(dk, batch, chunk, head, 0, _normalised_back(dk_hat, k_hat, of_k, NORM))

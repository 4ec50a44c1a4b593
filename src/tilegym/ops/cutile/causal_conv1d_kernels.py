"""Kernels of the causal convolution.

Where the channels of a token lie side by side, a thread has its channels, of SPAN tokens and those that the taps reach
back to. Backward it goes from token to token, a group of STEP tokens at a time, carrying the latter and dz, and writes
dx of the group before; groups are loaded as whole tiles, which on sm_90 other warps do ahead of it. Where the tokens of
a channel lie side by side, a block computes a tile of both: each tap is a gather of the same tile some tokens earlier,
which the first one has brought into the L1 cache. Negative tokens are out of bounds, which reads as zero.

Backward, with z the convolution's sums: ``dz = dy * act'(z)``, ``dx[t] = sum_j weight[K - 1 - j] * dz[t + j]``,
``dweight[i] = sum_t dz[t] * x[t - K + 1 + i]``. Each block sums dweight and dbias over tokens of its own; the sums are
added in a fixed order.

Constants of the kernels: BIAS, whether there is one; SILU, whether it is the activation; EVEN, whether all groups are
full; CHECK, whether bounds are checked: there are blocks with fewer than TILE_C channels, or fewer than SPAN tokens.
"""

import cuda.tile as ct

from tilegym.ops.cutile.pointwise import over_one_plus_exp
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import span


@ct.kernel
def transpose_kernel(x, y, TILE: Int):
    """x: [B, M, N]; y: [B, N, M]. Blocks: (batch and tiles of M, tiles of N)."""
    down = ct.cdiv(x.shape[1], TILE)
    batch, i, j = ct.bid(0) // down, ct.bid(0) % down, ct.bid(1)
    tile = ct.load(x, (batch, i, j), (1, TILE, TILE), padding_mode=ct.PaddingMode.ZERO)
    ct.store(y, (batch, j, i), ct.permute(tile, (0, 2, 1)))


def _load(x, batch, channels, tokens):
    return ct.gather(x, (batch, channels[:, None], tokens[None, :])).astype(ct.float32)


def _store(y, batch, channels, tokens, tile):
    ct.scatter(y, (batch, channels[:, None], tokens[None, :]), tile.astype(y.dtype))


def _filter(weight, channels, K: Int):
    """The taps, one vector of channels each, of weight [C, K]."""
    taps = ()
    for i in ct.static_iter(range(K)):
        taps = (*taps, ct.gather(weight, (channels, i)).astype(ct.float32))
    return taps


def _columns_of(tile, COUNT: Int):
    """The first columns of a ``tile``, vectors in fp32."""
    at, columns = ct.arange(tile.shape[1], dtype=ct.int32)[None, :], ()
    for i in ct.static_iter(range(COUNT)):
        columns = (*columns, ct.sum(ct.where(at == i, tile.astype(ct.float32), 0.0), axis=1))
    return columns


def _taps_of(tile, K: Int):
    """The first columns of a ``tile`` of 16-bit numbers, [TILE_C, up to 4], vectors in fp32."""
    # All of a channel as one number: it alone goes by way of shared memory to the threads that have the channel.
    places = ct.arange(tile.shape[1], dtype=ct.int64)[None, :] * 16
    packed, taps = ct.sum(ct.bitcast(tile, ct.uint16).astype(ct.int64) << places, axis=1), ()
    for i in ct.static_iter(range(K)):
        taps = (*taps, ct.bitcast((packed >> (16 * i)).astype(ct.uint16), tile.dtype).astype(ct.float32))
    return taps


def _filter_of_walk(weight, block, channels, K: Int):
    """The same where x is not to take on the layout of what is gathered; of a weight [C * K] with wide accesses."""
    # As columns of one tile: the layout of strided vectors would become that of x too, by way of shared memory.
    if weight.ndim == 1:
        tile = ct.gather(weight, span(block, channels.shape[0] * K)).reshape((channels.shape[0], K))
    else:
        at = ct.arange(ct.static_eval(next_power_of_2(K)), dtype=ct.int32)[None, :]
        tile = ct.gather(weight, (channels[:, None], at))
    return _columns_of(tile, K) if weight.dtype == ct.float32 else _taps_of(tile, K)


def _columns(vectors, K: Int):
    """To be broadcast along the tokens."""
    columns = ()
    for i in ct.static_iter(range(K)):
        columns = (*columns, vectors[i][:, None])
    return columns


def _bias(bias, channels, BIAS: Bool):
    return ct.gather(bias, channels).astype(ct.float32) if BIAS else ct.zeros(channels.shape, ct.float32)


def _through_silu(dy, z, dtype):
    if dtype == ct.float32:
        s = over_one_plus_exp(1.0, z, dtype)
        return dy * (s * (1.0 + z * (1.0 - s)))
    # Two of these share what is slow. The difference has lost bits where s is nearly 1, but no more than 16 bits show.
    scaled = over_one_plus_exp(dy, z, dtype)
    return scaled + scaled * (z - over_one_plus_exp(z, z, dtype))


def _sum_of_taps(taps, b, near, first: Int, K: Int):
    z = b
    for i in ct.static_iter(range(K)):
        z = z + taps[i] * near[first + i].astype(ct.float32)
    return z


def _tokens_before(x, batch, start, channels, K: Int):
    """The K - 1 tokens before ``start``, a vector of channels each, in fp32."""
    tokens = ()
    for i in ct.static_iter(range(K - 1)):
        tokens = (*tokens, ct.gather(x, (batch, start + (i - K + 1), channels)).astype(ct.float32))
    return tokens


def _tokens_of(x, batch, group, STEP: Int, TILE_C: Int):
    """Those of a group, a vector of this block's channels each, in fp32; 0 behind the last one."""
    tile = ct.load(x, (batch, group, ct.bid(1)), (1, STEP, TILE_C), padding_mode=ct.PaddingMode.ZERO)
    tile, tokens = tile.reshape((STEP, TILE_C)), ()
    for u in ct.static_iter(range(STEP)):
        tokens = (*tokens, ct.extract(tile, (u, 0), (1, TILE_C)).reshape((TILE_C,)).astype(ct.float32))
    return tokens


def _put_group(outs, batch, first, tokens, CHECK: Bool):
    """In a loop that counts ``first``: a full group."""
    for u in ct.static_iter(range(len(tokens))):
        row = tokens[u].astype(outs[u].dtype).reshape((1, 1, tokens[u].shape[0]))
        ct.store(outs[u], (batch, first, ct.bid(1)), row, check_bounds=CHECK, allow_tma=False)


def _put_last_group(y, batch, first, channels, tokens):
    for u in ct.static_iter(range(len(tokens))):
        ct.scatter(y, (batch, first + u, channels), tokens[u].astype(y.dtype))


def _tokens_near(x, batch, at, channels, SPAN: Int, K: Int, EVEN: Bool, CHECK: Bool):
    """Of each piece, whose first token is ``at``, its tokens and the K - 1 before it, [ROWS, TILE_C] each."""
    tokens = ()
    for u in ct.static_iter(range(1 - K, SPAN)):
        if u < 0 and not CHECK:
            there = at > 0 if EVEN else at + u >= 0
            tokens = (*tokens, ct.gather(x, (batch, at + u, channels), mask=there, check_bounds=False))
        else:
            tokens = (*tokens, ct.gather(x, (batch, at + u, channels), check_bounds=CHECK))
    return tokens


@ct.kernel
def conv_last_kernel(
    x, weight, bias, y, pieces, ROWS: Int, SPAN: Int, TILE_C: Int, K: Int, BIAS: Bool, SILU: Bool, EVEN: Bool,
    CHECK: Bool, FAR: Bool,
):  # fmt: skip
    """x, y: [B, T, C], the channels of a token side by side; weight: [C, K], or [C * K] if K is a power of two.

    Blocks: (1, channels, batch and groups of ROWS pieces of SPAN tokens), or FAR, so many that they go on along the
    first axis, where the last ones may have nothing to do.
    """
    # Along 1 and 2, where they come without a division.
    number = ct.bid(0) * ct.num_blocks(2) + ct.bid(2) if FAR else ct.bid(2)
    batch, across = number // pieces, span(ct.bid(1), TILE_C)
    first, channels = (number % pieces * ROWS + ct.arange(ROWS, dtype=ct.int32)[:, None]) * SPAN, across[None, :]
    # A piece that would go beyond the last token ends with it, and writes what no other piece does: a check of every
    # token takes 99 us for 8191 tokens of 8192 channels in bf16 on an H200, this 77.
    at = first if EVEN or CHECK else ct.minimum(first, x.shape[1] - SPAN)
    near = _tokens_near(x, batch, at, channels, SPAN, K, EVEN, CHECK)
    taps, b = _filter_of_walk(weight, ct.bid(1), across, K), _bias(bias, channels, BIAS)
    rows = ()
    for i in ct.static_iter(range(K)):
        rows = (*rows, taps[i][None, :])
    for u in ct.static_iter(range(SPAN)):
        z = _sum_of_taps(rows, b, near, u, K)
        if SILU:
            z = over_one_plus_exp(z, z, x.dtype)
        if EVEN or CHECK:
            ct.scatter(y, (batch, at + u, channels), z.astype(y.dtype), check_bounds=CHECK)
        else:
            ct.scatter(y, (batch, at + u, channels), z.astype(y.dtype), mask=u >= first - at, check_bounds=False)


@ct.kernel
def conv_kernel(x, weight, bias, y, TILE_C: Int, TILE_T: Int, K: Int, BIAS: Bool, SILU: Bool):
    """The same, the tokens of a channel side by side."""
    t_tiles = ct.cdiv(x.shape[2], TILE_T)
    batch, channels = ct.bid(0) // t_tiles, span(ct.bid(1), TILE_C)
    tokens = span(ct.bid(0) % t_tiles, TILE_T)
    taps = _columns(_filter(weight, channels, K), K)
    z = _bias(bias, channels, BIAS)[:, None]
    for i in ct.static_iter(range(K)):
        z = z + taps[i] * _load(x, batch, channels, tokens - (K - 1 - i))
    if SILU:
        z = over_one_plus_exp(z, z, y.dtype)
    _store(y, batch, channels, tokens, z)


def _dz_of(ups, near, taps, b, first, n_tokens, dtype, K: Int, SILU: Bool, EVEN: Bool):
    """Of the tokens of ``ups`` from ``first`` on; near: x from K - 1 tokens earlier on."""
    if not SILU:
        return ups
    dzs = ()
    for u in ct.static_iter(range(len(ups))):
        dz = _through_silu(ups[u], _sum_of_taps(taps, b, near, u, K), dtype)
        # Behind the last token z is of no meaning, and need not be finite.
        dzs = (*dzs, dz if EVEN else ct.where(first + u < n_tokens, dz, 0.0))
    return dzs


def _dx_of(dzs, taps, STEP: Int, K: Int):
    tokens = ()
    for u in ct.static_iter(range(STEP)):
        total = taps[K - 1] * dzs[u]
        for j in ct.static_iter(range(1, K)):
            total = total + taps[K - 1 - j] * dzs[u + j]
        tokens = (*tokens, total)
    return tokens


def _added(dw, db, dzs, near, K: Int):
    """The sums of dweight and dbias, and those over more tokens."""
    for u in ct.static_iter(range(len(dzs))):
        db, added = db + dzs[u], ()
        for i in ct.static_iter(range(K)):
            added = (*added, dw[i] + dzs[u] * near[u + i])
        dw = added
    return dw, db


@ct.kernel
def conv_last_backward_kernel(
    dy, x, weight, bias, dx0, dx1, dx2, dx3, dweight, dbias, splits, share, TILE_C: Int, STEP: Int, K: Int, BIAS: Bool,
    SILU: Bool, EVEN: Bool, CHECK: Bool,
):  # fmt: skip
    """As :func:`conv_backward_kernel`, with x, dy: [B, T, C], the channels of a token side by side; dx0 to dx3: dx [B,
    T, C] from its token 0, 1, 2, 3 on, of which the first STEP are written to; weight: [C, K], or [C * K] if K is a
    power of two.

    Blocks: (batch and splits, channels). A block walks along ``share`` groups. All dx are one array: stores into arrays
    of different names, at the number that a loop counts, are not ordered, which would take a barrier each.
    """
    batch, channels = ct.bid(0) // splits, span(ct.bid(1), TILE_C)
    n_tokens, start, outs = x.shape[1], ct.bid(0) % splits * share, (dx0, dx1, dx2, dx3)
    groups = ct.cdiv(n_tokens, STEP)
    end = min(start + share, groups)
    before = _tokens_before(x, batch, start * STEP, channels, K)
    b, taps = _bias(bias, channels, BIAS), _filter_of_walk(weight, ct.bid(1), channels, K)
    zero = ct.zeros((TILE_C,), ct.float32)
    zeros, owned = (), ()
    for _ in ct.static_iter(range(K)):
        zeros = (*zeros, zero)
    near = (*before, *_tokens_of(x, batch, start, STEP, TILE_C))
    ups = _tokens_of(dy, batch, start, STEP, TILE_C)
    dzs = _dz_of(ups, near, taps, b, start * STEP, n_tokens, x.dtype, K, SILU, EVEN)
    # Sums are over what is read in the loops; the first group of all is read before them.
    for u in ct.static_iter(range(STEP)):
        owned = (*owned, ct.where(start == 0, dzs[u], 0.0))
    dw, db = _added(zeros, zero, owned, near, K)
    before = near[STEP:]
    for token in range(start * STEP, min(end, groups - 1) * STEP, STEP):
        group = token // STEP + 1
        window = (*before, *_tokens_of(x, batch, group, STEP, TILE_C))
        ups = _tokens_of(dy, batch, group, STEP, TILE_C)
        after = _dz_of(ups, window, taps, b, token + STEP, n_tokens, x.dtype, K, SILU, EVEN)
        dw, db = _added(dw, db, after, window, K)
        _put_group(outs, batch, token, _dx_of((*dzs, *after), taps, STEP, K), CHECK)
        dzs, before = after, window[STEP:]
    if end == groups:
        _put_last_group(dx0, batch, (groups - 1) * STEP, channels, _dx_of((*dzs, *zeros), taps, STEP, K))
    for i in ct.static_iter(range(K)):
        ct.scatter(dweight, (ct.bid(0), i, channels), dw[i])
    if BIAS:
        ct.scatter(dbias, (ct.bid(0), channels), db)


@ct.kernel
def conv_backward_kernel(
    dy, x, weight, bias, dx, dweight, dbias, splits, TILE_C: Int, TILE_T: Int, K: Int, BIAS: Bool, SILU: Bool
):  # fmt: skip
    """dweight: [B * splits, K, C] and dbias: [B * splits, C], the sums over the tokens of each block, in fp32."""
    n_tokens = x.shape[2]
    batch, channels = ct.bid(0) // splits, span(ct.bid(1), TILE_C)
    taps, b = _columns(_filter(weight, channels, K), K), _bias(bias, channels, BIAS)[:, None]
    db = ct.zeros((TILE_C,), ct.float32)
    dw = ()
    for _ in ct.static_iter(range(K)):
        dw = (*dw, ct.zeros((TILE_C,), ct.float32))
    for tile in range(ct.bid(0) % splits, ct.cdiv(n_tokens, TILE_T), splits):
        tokens = span(tile, TILE_T)
        near = ()  # x from K - 1 tokens before to K - 1 behind
        for i in ct.static_iter(range(2 * K - 1)):
            near = (*near, _load(x, batch, channels, tokens + (i - K + 1)))
        sums = ct.zeros(near[0].shape, ct.float32)
        for j in ct.static_iter(range(K)):
            dz = _load(dy, batch, channels, tokens + j)
            if SILU:
                z = b
                for i in ct.static_iter(range(K)):
                    z = z + taps[i] * near[i + j]
                # Behind the last token z is of no meaning, and need not be finite.
                dz = ct.where((tokens + j < n_tokens)[None, :], _through_silu(dz, z, x.dtype), 0.0)
            sums = sums + taps[K - 1 - j] * dz
            if j == 0:
                db = db + ct.sum(dz, axis=1)
                updated = ()
                for i in ct.static_iter(range(K)):
                    updated = (*updated, dw[i] + ct.sum(dz * near[i], axis=1))
                dw = updated
        _store(dx, batch, channels, tokens, sums)
    for i in ct.static_iter(range(K)):
        ct.scatter(dweight, (ct.bid(0), i, channels), dw[i])
    if BIAS:
        ct.scatter(dbias, (ct.bid(0), channels), db)


@ct.kernel
def conv_update_kernel(
    x, state, weight, bias, y, TILE_C: Int, TILE_T: Int, TILE_L: Int, K: Int, BIAS: Bool, SILU: Bool
):  # fmt: skip
    """x, y: [B, C, T]; state: [B, C, L], changed in place. Blocks: (channels, batch)."""
    channels, batch = span(ct.bid(0), TILE_C), ct.bid(1)
    tokens, places = span(0, TILE_T), span(0, TILE_L)
    length, n_tokens = state.shape[2], x.shape[2]
    taps = _columns(_filter(weight, channels, K), K)
    z = _bias(bias, channels, BIAS)[:, None]
    for i in ct.static_iter(range(K)):
        # Either of the two is out of bounds, and 0.
        earlier = tokens - (K - 1 - i)
        z = z + taps[i] * (
            _load(x, batch, channels, earlier)
            + _load(state, batch, channels, ct.where(earlier < 0, earlier + length, -1))
        )
    kept = _load(state, batch, channels, places + n_tokens)
    kept = kept + _load(x, batch, channels, places + n_tokens - length)
    if SILU:
        z = over_one_plus_exp(z, z, y.dtype)
    _store(y, batch, channels, tokens, z)
    _store(state, batch, channels, places, kept)


@ct.kernel
def conv_step_kernel(x, state, weight, bias, y, TILE_C: Int, K: Int, BIAS: Bool, SILU: Bool):
    """A single token, and as many in the state as the filter has taps, a power of two: x, y: [B, C]; state: [B, C * K],
    changed in place; weight: [C * K]. Blocks: (channels, batch)."""
    channels, batch, flat = span(ct.bid(0), TILE_C), ct.bid(1), span(ct.bid(0), TILE_C * K)
    new = ct.gather(x, (batch, channels)).astype(ct.float32)
    taps = _columns_of(ct.gather(weight, flat).reshape((TILE_C, K)), K)
    window = (*_columns_of(ct.gather(state, (batch, flat)).reshape((TILE_C, K)), K)[1:], new)
    z = _sum_of_taps(taps, _bias(bias, channels, BIAS), window, 0, K)
    at, kept = ct.arange(K, dtype=ct.int32)[None, :], ct.zeros((TILE_C, K), ct.float32)
    for i in ct.static_iter(range(K)):
        kept = ct.where(at == i, window[i][:, None], kept)
    if SILU:
        z = over_one_plus_exp(z, z, y.dtype)
    ct.scatter(y, (batch, channels), z.astype(y.dtype))
    ct.scatter(state, (batch, flat), kept.reshape((TILE_C * K,)).astype(state.dtype))

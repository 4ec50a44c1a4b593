"""The causal convolution of linear attention: a filter of K taps for every channel, and SiLU.

Where the channels of a token lie side by side, a thread has its channels and goes from token to token. Where the tokens
of a channel do, a block computes a tile of both: each tap is a gather of the same tile some tokens earlier, which the
first one has brought into the L1 cache. Negative tokens are out of bounds, which reads as zero.

Backward, with z the convolution's sums: ``dz = dy * act'(z)``, ``dx[t] = sum_j weight[K - 1 - j] * dz[t + j]``,
``dweight[i] = sum_t dz[t] * x[t - K + 1 + i]``. Each block sums dweight and dbias over tokens of its own; the sums are
added in a fixed order.

Kernels take the filters as [K, C]. Their constants: BIAS, whether there is one; SILU, whether it is the activation.
"""

import functools
from collections.abc import Iterator

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.pointwise import over_one_plus_exp
from tilegym.ops.cutile.row_norms import add_rows
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import INT32_MAX
from tilegym.ops.cutile.tiling import SMALL
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.causal_conv1d import check_conv
from tilegym.ops.pytorch.causal_conv1d import check_state
from tilegym.ops.pytorch.checks import wants_gradient

MIN_TAPS, MAX_TAPS = 2, 4
MAX_NEW_TOKENS = 64


def _load(x, batch, channels, tokens):
    return ct.gather(x, (batch, channels[:, None], tokens[None, :])).astype(ct.float32)


def _store(y, batch, channels, tokens, tile):
    ct.scatter(y, (batch, channels[:, None], tokens[None, :]), tile.astype(y.dtype))


def _filter(weight, channels, K: Int):
    """The taps, one vector of channels each."""
    taps = ()
    for i in ct.static_iter(range(K)):
        taps = (*taps, ct.gather(weight, (i, channels)).astype(ct.float32))
    return taps


def _columns(vectors, K: Int):
    """To be broadcast along the tokens."""
    columns = ()
    for i in ct.static_iter(range(K)):
        columns = (*columns, vectors[i][:, None])
    return columns


def _bias(bias, channels, BIAS: Bool):
    return ct.gather(bias, channels).astype(ct.float32) if BIAS else ct.zeros(channels.shape, ct.float32)


def _through_silu(dy, z, dtype):
    s = over_one_plus_exp(1.0, z, dtype)
    return dy * s * (1.0 + z * (1.0 - s))


def _tokens_at(x, batch, channels, first, COUNT: Int):
    """COUNT tokens, a vector of channels each."""
    tokens = ()
    for i in ct.static_iter(range(COUNT)):
        tokens = (*tokens, ct.gather(x, (batch, channels, first + i)))
    return tokens


@ct.kernel
def conv_last_kernel(x, weight, bias, y, TILE_C: Int, TILE_T: Int, K: Int, BIAS: Bool, SILU: Bool):
    """x, y: [B, C, T], the channels of a token side by side; weight: [K, C]. Blocks: (batch and tokens, channels)."""
    t_tiles = ct.cdiv(x.shape[2], TILE_T)
    batch, channels = ct.bid(0) // t_tiles, span(ct.bid(1), TILE_C)
    first = ct.bid(0) % t_tiles * TILE_T
    near = _tokens_at(x, batch, channels, first - (K - 1), TILE_T + K - 1)
    taps, b = _filter(weight, channels, K), _bias(bias, channels, BIAS)
    for t in ct.static_iter(range(TILE_T)):
        z = b
        for i in ct.static_iter(range(K)):
            z = z + taps[i] * near[t + i].astype(ct.float32)
        if SILU:
            z = over_one_plus_exp(z, z, y.dtype)
        ct.scatter(y, (batch, channels, first + t), z.astype(y.dtype))


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


def _advance(
    dy, x, dx, batch, channels, first, start, end, taps, b, before, dz_before, dw, db, STEP: Int, K: Int, SILU: Bool,
    INSIDE: Bool,
):  # fmt: skip
    """STEP tokens from ``first`` on: what :func:`conv_last_backward_kernel` carries, behind them.

    Without INSIDE some may be at ``end`` or behind it: they count for dx of the tokens before ``end``, not for dw.
    """
    xs, ups = _tokens_at(x, batch, channels, first, STEP), _tokens_at(dy, batch, channels, first, STEP)
    for u in ct.static_iter(range(STEP)):
        token = first + u
        window = (*before, xs[u].astype(ct.float32))
        dz = ups[u].astype(ct.float32)
        if SILU:
            z = b
            for i in ct.static_iter(range(K)):
                z = z + taps[i] * window[i]
            dz = _through_silu(dz, z, x.dtype)
            if not INSIDE:
                # Behind the last token z is of no meaning, and need not be finite.
                dz = ct.where(token < x.shape[2], dz, 0.0)
        if INSIDE:
            added, added_b = dw, db + dz
            dw = ()
            for i in ct.static_iter(range(K)):
                dw = (*dw, added[i] + dz * window[i])
            db = added_b
        else:
            added = dw
            dw = ()
            for i in ct.static_iter(range(K)):
                dw = (*dw, ct.where(token < end, added[i] + dz * window[i], added[i]))
            db = ct.where(token < end, db + dz, db)
        dzs = (*dz_before, dz)
        total = taps[K - 1] * dzs[0]
        for j in ct.static_iter(range(1, K)):
            total = total + taps[K - 1 - j] * dzs[j]
        # -1 is out of bounds, and not stored.
        at = token - (K - 1)
        at = ct.where((at >= start) & (at < end), at, -1)
        ct.scatter(dx, (batch, channels, at), total.astype(dx.dtype))
        before, dz_before = window[1:], dzs[1:]
    return before, dz_before, dw, db


@ct.kernel
def conv_last_backward_kernel(
    dy, x, weight, bias, dx, dweight, dbias, splits, tokens, TILE_C: Int, STEP: Int, K: Int, BIAS: Bool, SILU: Bool,
):  # fmt: skip
    """As :func:`conv_backward_kernel`, the channels of a token side by side: a block walks along ``tokens`` tokens.

    It carries the last K - 1 of x and of dz, so that each is loaded and computed once.
    """
    batch, channels = ct.bid(0) // splits, span(ct.bid(1), TILE_C)
    start = ct.bid(0) % splits * tokens
    end = min(start + tokens, x.shape[2])
    taps, b = _filter(weight, channels, K), _bias(bias, channels, BIAS)
    db = ct.zeros((TILE_C,), ct.float32)
    before, dz_before, dw = (), (), (db,)
    for i in ct.static_iter(range(K - 1)):
        before = (*before, ct.gather(x, (batch, channels, start - (K - 1) + i)).astype(ct.float32))
        dz_before, dw = (*dz_before, db), (*dw, db)
    whole = start + (end - start) // STEP * STEP
    for first in range(start, whole, STEP):
        before, dz_before, dw, db = _advance(
            dy, x, dx, batch, channels, first, start, end, taps, b, before, dz_before, dw, db, STEP, K, SILU, True
        )
    for first in range(whole, end + K - 1, 4):
        before, dz_before, dw, db = _advance(
            dy, x, dx, batch, channels, first, start, end, taps, b, before, dz_before, dw, db, 4, K, SILU, False
        )
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


@functools.lru_cache(maxsize=1024)
def conv_tiles(batch: int, channels: int, tokens: int, channels_last: bool, device: int) -> tuple[int, int]:
    """(TILE_C, TILE_T) of the forward pass: 512 channels are 8 bytes for each thread; tokens are loaded all at once."""
    if channels_last:
        tile_c = min(512, next_power_of_2(channels))
        for tile_t in (16, 8):
            if batch * ct.cdiv(channels, tile_c) * ct.cdiv(tokens, tile_t) >= 2 * sm_count(device):
                return tile_c, min(tile_t, next_power_of_2(tokens))
        return tile_c, min(4, next_power_of_2(tokens))
    tile_t = min(256, next_power_of_2(tokens))
    return min(2048 // tile_t, next_power_of_2(channels)), tile_t


# Tokens that a block of the backward pass loads at once, and blocks to a multiprocessor, of which two run at a time.
STEP, BLOCKS = 8, 4


@functools.lru_cache(maxsize=1024)
def backward_tiles(batch: int, channels: int, tokens: int, device: int) -> tuple[int, int, int]:
    """(TILE_C, tokens of a block, splits) of the backward pass over channels that lie side by side."""
    tile_c = min(512, next_power_of_2(channels))
    splits = max(1, BLOCKS * sm_count(device) // max(1, batch * ct.cdiv(channels, tile_c)))
    share = ct.cdiv(ct.cdiv(tokens, splits), STEP) * STEP
    return tile_c, share, ct.cdiv(tokens, share)


def _taps(weight: torch.Tensor, elements: int) -> torch.Tensor:
    """``weight`` as [K, C]: for large inputs a copy, whose channels lie side by side as those of x do."""
    return weight.t() if elements <= SMALL else weight.t().contiguous()


def is_channels_last(x: torch.Tensor) -> bool:
    return x.stride(1) == 1 and x.shape[2] > 1


def entries_per_launch(*tensors: torch.Tensor) -> Iterator[tuple[slice, tuple[torch.Tensor, ...]]]:
    """Which entries of the batch each launch takes, and those of ``tensors`` [B, C, T]: all, if kernels can take them.

    An entry of more than 2^31 elements is further from the next than the kernels' 32-bit strides reach: then one by
    one, with another stride between those that are not there.
    """
    if all(t.stride(0) <= INT32_MAX for t in tensors):
        yield slice(None), tensors
        return
    for i in range(tensors[0].shape[0]):
        # A slice would keep the stride.
        entry = [
            t.as_strided((1, *t.shape[1:]), (t.shape[2], *t.stride()[1:]), t.storage_offset() + i * t.stride(0))
            for t in tensors
        ]
        yield slice(i, i + 1), tuple(entry)


def _fake_forward(x, *_):
    return torch.empty_like(x)


@compilable(fake=_fake_forward)
def conv_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> torch.Tensor:
    """y, with the strides of a dense x."""
    y = torch.empty_like(x)
    batch, channels, tokens = x.shape
    last = is_channels_last(x)
    tile_c, tile_t = conv_tiles(batch, channels, tokens, last, x.get_device())
    constants = (tile_c, tile_t, weight.shape[1], bias is not None, silu)
    kernel, filters = (conv_last_kernel if last else conv_kernel), _taps(weight, x.numel())
    for _, (some_x, some_y) in entries_per_launch(x, y):
        grid = (ct.cdiv(tokens, tile_t) * some_x.shape[0], ct.cdiv(channels, tile_c))
        launch(x, grid, kernel, (some_x, filters, weight if bias is None else bias, some_y, *constants))
    return y


def _fake_backward(dy, x, weight, bias, silu):
    dbias = weight.new_empty(0) if bias is None else torch.empty_like(bias, memory_format=torch.contiguous_format)
    return torch.empty_like(x), weight.new_empty(weight.shape[::-1]).t(), dbias


@compilable(fake=_fake_backward)
def conv_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, and the gradients of weight and bias, the last one empty without bias."""
    dx, dweight, dbias = _fake_backward(dy, x, weight, bias, silu)
    batch, channels, tokens = x.shape
    taps, device = weight.shape[1], x.get_device()
    options, filters = (taps, bias is not None, silu), _taps(weight, x.numel())
    if is_channels_last(x):
        tile_c, share, splits = backward_tiles(batch, channels, tokens, device)
        kernel, constants = conv_last_backward_kernel, (splits, share, tile_c, STEP, *options)
    else:
        tile_c, tile_t = conv_tiles(batch, channels, tokens, False, device)
        splits = 8 * sm_count(device) // max(1, batch * ct.cdiv(channels, tile_c))
        splits = max(1, min(ct.cdiv(tokens, tile_t), splits))
        kernel, constants = conv_backward_kernel, (splits, tile_c, tile_t, *options)
    dw = x.new_empty(batch, splits, taps, channels, dtype=torch.float32)
    db = dw if bias is None else x.new_empty(batch, splits, channels, dtype=torch.float32)
    for entries, (some_dy, some_x, some_dx) in entries_per_launch(dy, x, dx):
        sums = dw[entries].flatten(0, 1), db[entries].flatten(0, 1)
        args = (some_dy, some_x, filters, weight if bias is None else bias, some_dx, *sums, *constants)
        launch(x, (some_x.shape[0] * splits, ct.cdiv(channels, tile_c)), kernel, args)
    pairs = [(dw.view(batch * splits, taps * channels), dweight.t().view(-1))]
    if bias is not None:
        pairs.append((db.view(batch * splits, channels), dbias))
    add_rows(*pairs)
    return dx, dweight, dbias


@functools.lru_cache(maxsize=1024)
def update_tiles(channels: int, tokens: int, length: int) -> tuple[int, int, int]:
    """(TILE_C, TILE_T, TILE_L), of about as many elements as a block has threads: at one token time is latency."""
    tile_t, tile_l = next_power_of_2(tokens), next_power_of_2(length)
    return min(next_power_of_2(channels), max(8, 128 // tile_t)), tile_t, tile_l


def _fake_update(x, state, weight, bias, silu):
    return torch.empty_like(x)


@compilable(fake=_fake_update, mutates=("state",))
def conv_update(
    x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> torch.Tensor:
    y = torch.empty_like(x)
    batch, channels, tokens = x.shape
    tiles = update_tiles(channels, tokens, state.shape[2])
    args = (x, state, weight.t(), weight if bias is None else bias, y, *tiles, weight.shape[1], bias is not None, silu)
    launch(x, (ct.cdiv(channels, tiles[0]), batch), conv_update_kernel, args)
    return y


class CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, silu):
        ctx.save_for_backward(x, weight, bias)
        ctx.silu = silu
        return conv_forward(x, weight, bias, silu)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight, bias = ctx.saved_tensors
        dx, dw, db = conv_backward(dy, x, weight, bias, ctx.silu)
        return dx, dw, (None if bias is None else db), None


def _check_supported(x, weight, bias):
    if x.dtype not in FLOATS or weight.dtype not in FLOATS or (bias is not None and bias.dtype not in FLOATS):
        raise UnsupportedError("its tensors are not fp32, fp16 or bf16")
    if not MIN_TAPS <= weight.shape[1] <= MAX_TAPS:
        raise UnsupportedError(f"it takes from {MIN_TAPS} to {MAX_TAPS} taps")


@register_impl("causal_conv1d_fn", "cutile")
def causal_conv1d_fn(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    seq_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    check_conv("causal_conv1d_fn", hidden_states, weight, bias, activation)
    _check_supported(hidden_states, weight, bias)
    if seq_idx is not None:
        raise UnsupportedError("it does not take seq_idx")
    if wants_gradient(hidden_states, weight, bias):
        return CausalConv.apply(hidden_states, weight, bias, activation is not None)
    return conv_forward(hidden_states, weight, bias, activation is not None)


@register_impl("causal_conv1d_update", "cutile")
def causal_conv1d_update(
    hidden_states: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    check_conv("causal_conv1d_update", hidden_states, weight, bias, activation)
    check_state(hidden_states, conv_state, weight)
    _check_supported(hidden_states, weight, bias)
    if conv_state.dtype not in FLOATS:
        raise UnsupportedError("conv_state is not fp32, fp16 or bf16")
    if hidden_states.shape[2] > MAX_NEW_TOKENS:
        raise UnsupportedError(f"it takes up to {MAX_NEW_TOKENS} new tokens")
    if wants_gradient(hidden_states, weight, bias, conv_state):
        raise UnsupportedError("it has no backward kernel")
    return conv_update(hidden_states, conv_state, weight, bias, activation is not None)

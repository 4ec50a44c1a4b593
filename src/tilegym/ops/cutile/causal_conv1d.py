"""The causal convolution of linear attention: a filter of K taps for every channel, and SiLU.

A block computes a tile of channels and tokens. Each tap is a gather of the same tile some tokens earlier, which the
first one has brought into the L1 cache; negative tokens are out of bounds, which reads as zero.

Backward, with z the convolution's sums: ``dz = dy * act'(z)``, ``dx[t] = sum_j weight[K - 1 - j] * dz[t + j]``,
``dweight[i] = sum_t dz[t] * x[t - K + 1 + i]``. One kernel computes dz where it needs it, K times over, and keeps it in
registers. Each block sums dweight and dbias over tokens of its own; the sums are added in a fixed order.

Constants of the kernels: CHANNELS_LAST, whether tiles are [tokens, channels] or the other way, the last being those
that lie side by side in memory; BIAS, whether there is one; SILU, whether it is the activation.
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
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import INT32_MAX
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.causal_conv1d import check_conv
from tilegym.ops.pytorch.causal_conv1d import check_state

MIN_TAPS, MAX_TAPS = 2, 4
MAX_NEW_TOKENS = 64


def _load(x, batch, channels, tokens, CHANNELS_LAST: Bool):
    at = (batch, channels[None, :], tokens[:, None]) if CHANNELS_LAST else (batch, channels[:, None], tokens[None, :])
    return ct.gather(x, at).astype(ct.float32)


def _store(y, batch, channels, tokens, tile, CHANNELS_LAST: Bool):
    at = (batch, channels[None, :], tokens[:, None]) if CHANNELS_LAST else (batch, channels[:, None], tokens[None, :])
    ct.scatter(y, at, tile.astype(y.dtype))


def _across(vector, CHANNELS_LAST: Bool):
    """A value for each channel, to be broadcast along the tokens."""
    return vector[None, :] if CHANNELS_LAST else vector[:, None]


def _filter(weight, channels, K: Int, CHANNELS_LAST: Bool):
    """The taps, one tile of channels each."""
    taps = ()
    for i in ct.static_iter(range(K)):
        taps = (*taps, _across(ct.gather(weight, (channels, i)).astype(ct.float32), CHANNELS_LAST))
    return taps


def _bias(bias, channels, BIAS: Bool, CHANNELS_LAST: Bool):
    return _across(ct.gather(bias, channels).astype(ct.float32), CHANNELS_LAST) if BIAS else 0.0


@ct.kernel
def conv_kernel(
    x, weight, bias, y, TILE_C: Int, TILE_T: Int, K: Int, CHANNELS_LAST: Bool, BIAS: Bool, SILU: Bool
):  # fmt: skip
    """x, y: [B, C, T]; weight: [C, K]; bias: [C]. Blocks: (batch and tokens, channels)."""
    t_tiles = ct.cdiv(x.shape[2], TILE_T)
    batch, channels = ct.bid(0) // t_tiles, span(ct.bid(1), TILE_C)
    tokens = span(ct.bid(0) % t_tiles, TILE_T)
    taps = _filter(weight, channels, K, CHANNELS_LAST)
    z = _bias(bias, channels, BIAS, CHANNELS_LAST)
    for i in ct.static_iter(range(K)):
        z = z + taps[i] * _load(x, batch, channels, tokens - (K - 1 - i), CHANNELS_LAST)
    if SILU:
        z = over_one_plus_exp(z, z, y.dtype)
    _store(y, batch, channels, tokens, z, CHANNELS_LAST)


@ct.kernel
def conv_backward_kernel(
    dy, x, weight, bias, dx, dweight, dbias, splits, TILE_C: Int, TILE_T: Int, K: Int, CHANNELS_LAST: Bool, BIAS: Bool,
    SILU: Bool,
):  # fmt: skip
    """dweight: [B * splits, C, K] and dbias: [B * splits, C], the sums over the tokens of each block, in fp32."""
    n_tokens = x.shape[2]
    batch, channels = ct.bid(0) // splits, span(ct.bid(1), TILE_C)
    taps = _filter(weight, channels, K, CHANNELS_LAST)
    b = _bias(bias, channels, BIAS, CHANNELS_LAST)
    axis = ct.static_eval(0 if CHANNELS_LAST else 1)
    db = ct.zeros((TILE_C,), ct.float32)
    dw = ()
    for _ in ct.static_iter(range(K)):
        dw = (*dw, ct.zeros((TILE_C,), ct.float32))
    for tile in range(ct.bid(0) % splits, ct.cdiv(n_tokens, TILE_T), splits):
        tokens = span(tile, TILE_T)
        near = ()  # x from K - 1 tokens before to K - 1 behind
        for i in ct.static_iter(range(2 * K - 1)):
            near = (*near, _load(x, batch, channels, tokens + (i - K + 1), CHANNELS_LAST))
        sums = ct.zeros(near[0].shape, ct.float32)
        for j in ct.static_iter(range(K)):
            dz = _load(dy, batch, channels, tokens + j, CHANNELS_LAST)
            if SILU:
                z = b
                for i in ct.static_iter(range(K)):
                    z = z + taps[i] * near[i + j]
                s = 1.0 / (1.0 + ct.exp(-z))
                dz = dz * s * (1.0 + z * (1.0 - s))
                # Behind the last token z is of no meaning, and need not be finite.
                inside = tokens + j < n_tokens
                dz = ct.where(inside[:, None] if CHANNELS_LAST else inside[None, :], dz, 0.0)
            sums = sums + taps[K - 1 - j] * dz
            if j == 0:
                db = db + ct.sum(dz, axis=axis)
                updated = ()
                for i in ct.static_iter(range(K)):
                    updated = (*updated, dw[i] + ct.sum(dz * near[i], axis=axis))
                dw = updated
        _store(dx, batch, channels, tokens, sums, CHANNELS_LAST)
    for i in ct.static_iter(range(K)):
        ct.scatter(dweight, (ct.bid(0), channels, i), dw[i])
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
    taps = _filter(weight, channels, K, False)
    z = _bias(bias, channels, BIAS, False)
    for i in ct.static_iter(range(K)):
        # Either of the two is out of bounds, and 0.
        earlier = tokens - (K - 1 - i)
        z = z + taps[i] * (
            _load(x, batch, channels, earlier, False)
            + _load(state, batch, channels, ct.where(earlier < 0, earlier + length, -1), False)
        )
    kept = _load(state, batch, channels, places + n_tokens, False)
    kept = kept + _load(x, batch, channels, places + n_tokens - length, False)
    if SILU:
        z = over_one_plus_exp(z, z, y.dtype)
    _store(y, batch, channels, tokens, z, False)
    _store(state, batch, channels, places, kept, False)


@functools.lru_cache(maxsize=1024)
def conv_tiles(batch: int, channels: int, tokens: int, channels_last: bool, device: int) -> tuple[int, int]:
    """(TILE_C, TILE_T): 2048 elements, of which those in a row fill 16-byte accesses of a warp.

    Longer rows where enough blocks remain: on an H200 1 x 8192 x 512 takes 10.8 us with tiles of 512 x 16, 13.3 with
    128 x 16.
    """
    if channels_last:
        if batch * ct.cdiv(channels, 512) * ct.cdiv(tokens, 16) >= 2 * sm_count(device) > 2:
            return 512, 16
        tile_c = min(128, next_power_of_2(channels))
        return tile_c, min(2048 // tile_c, next_power_of_2(tokens))
    tile_t = min(256, next_power_of_2(tokens))
    return min(2048 // tile_t, next_power_of_2(channels)), tile_t


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
    constants = (tile_c, tile_t, weight.shape[1], last, bias is not None, silu)
    for _, (some_x, some_y) in entries_per_launch(x, y):
        grid = (ct.cdiv(tokens, tile_t) * some_x.shape[0], ct.cdiv(channels, tile_c))
        launch(x, grid, conv_kernel, (some_x, weight, weight if bias is None else bias, some_y, *constants))
    return y


def _fake_backward(dy, x, weight, bias, silu):
    return (
        torch.empty_like(x),
        weight.new_empty(weight.shape, dtype=torch.float32),
        weight.new_empty(0 if bias is None else weight.shape[0], dtype=torch.float32),
    )


@compilable(fake=_fake_backward)
def conv_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, and in fp32 the gradients of weight and bias, empty without bias."""
    dx = torch.empty_like(x)
    batch, channels, tokens = x.shape
    taps, last = weight.shape[1], is_channels_last(x)
    tile_c, tile_t = conv_tiles(batch, channels, tokens, last, x.get_device())
    if last:
        tile_c, tile_t = min(tile_c, 128), min(tile_t, 8)  # the tiles of 2 * K - 1 taps stay in registers
    c_tiles, t_tiles = ct.cdiv(channels, tile_c), ct.cdiv(tokens, tile_t)
    splits = max(1, min(t_tiles, 8 * sm_count(x.get_device()) // max(1, batch * c_tiles)))
    dw = x.new_empty(batch, splits, channels, taps, dtype=torch.float32)
    db = dw if bias is None else x.new_empty(batch, splits, channels, dtype=torch.float32)
    constants = (tile_c, tile_t, taps, last, bias is not None, silu)
    for entries, (some_dy, some_x, some_dx) in entries_per_launch(dy, x, dx):
        sums = dw[entries].flatten(0, 1), db[entries].flatten(0, 1)
        args = (some_dy, some_x, weight, weight if bias is None else bias, some_dx, *sums, splits, *constants)
        launch(x, (some_x.shape[0] * splits, c_tiles), conv_backward_kernel, args)
    dw, db = dw.flatten(0, 1), db.flatten(0, 1)
    return dx, dw.sum(0), (dw.new_empty(0) if bias is None else db.sum(0))


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
    args = (x, state, weight, weight if bias is None else bias, y, *tiles, weight.shape[1], bias is not None, silu)
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
        return dx, dw.to(weight.dtype), (None if bias is None else db.to(bias.dtype)), None


def _check_supported(x, weight, bias):
    if x.dtype not in FLOATS or weight.dtype not in FLOATS or (bias is not None and bias.dtype not in FLOATS):
        raise UnsupportedError("its tensors are not fp32, fp16 or bf16")
    if not MIN_TAPS <= weight.shape[1] <= MAX_TAPS:
        raise UnsupportedError(f"it takes from {MIN_TAPS} to {MAX_TAPS} taps")


def _wants_gradient(x, weight, bias):
    return torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )


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
    if _wants_gradient(hidden_states, weight, bias):
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
    if _wants_gradient(hidden_states, weight, bias) or (torch.is_grad_enabled() and conv_state.requires_grad):
        raise UnsupportedError("it has no backward kernel")
    return conv_update(hidden_states, conv_state, weight, bias, activation is not None)

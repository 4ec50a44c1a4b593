"""The causal convolution of linear attention: a filter of K taps for every channel, and SiLU."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.causal_conv1d_kernels import conv_backward_kernel
from tilegym.ops.cutile.causal_conv1d_kernels import conv_kernel
from tilegym.ops.cutile.causal_conv1d_kernels import conv_last_backward_kernel
from tilegym.ops.cutile.causal_conv1d_kernels import conv_last_kernel
from tilegym.ops.cutile.causal_conv1d_kernels import conv_step_kernel
from tilegym.ops.cutile.causal_conv1d_kernels import conv_update_kernel
from tilegym.ops.cutile.causal_conv1d_kernels import transpose_kernel
from tilegym.ops.cutile.row_norms import add_rows
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import INT32_MAX
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.pytorch.causal_conv1d import check_conv
from tilegym.ops.pytorch.causal_conv1d import check_state
from tilegym.ops.pytorch.checks import wants_gradient

MIN_TAPS, MAX_TAPS = 2, 4
MAX_NEW_TOKENS = 64
STEP = 256  # channels of a block for a single token
TURNED = 64  # rows and columns of a tile that is transposed


@functools.lru_cache(maxsize=1024)
def conv_tiles(channels: int, tokens: int) -> tuple[int, int]:
    """(TILE_C, TILE_T) where the tokens of a channel lie side by side."""
    tile_t = min(256, next_power_of_2(tokens))
    return min(2048 // tile_t, next_power_of_2(channels)), tile_t


# Pieces of a block side by side, tokens of each, bytes of a token, and blocks to a multiprocessor. On an H200 in bf16
# (a copy in brackets) 8192 tokens of 8192 channels take 73 us (68), 8x2048 of 6144 106 (98), 512 of 8192 10.4 (8.6).
ROWS, SPAN, WIDTH, OCCUPANCY = 4, 8, 512, 4
# Where that would make no more blocks than there are multiprocessors: 16 tokens of 8192 channels take 5.8 us instead of
# 7.9 (5.1), 100 tokens 6.7 instead of 8.6 (5.7).
SMALL_SPAN, SMALL_WIDTH = 4, 256
MAX_BLOCKS = 65535  # along axis 2


class Walk(NamedTuple):
    """Channels and tokens of the tiles that a block loads, and blocks to a multiprocessor."""

    channels: int
    step: int
    occupancy: int


# Backward, on an H200 in bf16 for 8192 tokens of 8192 channels: 112 us; three blocks leave too few registers for
# tiles to be loaded several groups ahead, and take 146, 256 channels by two to four blocks 117 to 148, 8 warps 116.
# The launch that adds the sums is not let begin early: first of all that changes nothing for many tokens, and takes
# 512 of 6144 channels a microsecond; behind the loop it breaks up the pipeline of the loads, and everything takes
# twice as long.
BACKWARD = Walk(512, 4, 2)
MAX_TURNS = 4  # of blocks, one after the other
BEGINNING = 6  # as many groups' time as a block takes before its loop: a guess


@functools.lru_cache(maxsize=1024)
def pieces_plan(
    batch: int, channels: int, tokens: int, itemsize: int, device: int
) -> tuple[ct.kernel, tuple[int, int, int], tuple[int, int, int, int], tuple[bool, bool, bool]]:
    """(kernel, grid, (groups of pieces of an entry, ROWS, SPAN, TILE_C), (EVEN, CHECK, FAR))."""
    for length, width in ((SPAN, WIDTH), (SMALL_SPAN, SMALL_WIDTH)):
        tile_c, pieces = min(width // itemsize, next_power_of_2(channels)), ct.cdiv(tokens, ROWS * length)
        if batch * pieces * ct.cdiv(channels, tile_c) > sm_count(device):
            break
    far = ct.cdiv(batch * pieces, MAX_BLOCKS)
    check = far > 1 or channels % tile_c != 0 or tokens < length
    kernel = hinted(conv_last_kernel, num_worker_warps=4, occupancy=OCCUPANCY)
    grid = far, ct.cdiv(channels, tile_c), min(batch * pieces, MAX_BLOCKS)
    return kernel, grid, (pieces, ROWS, length, tile_c), (tokens % (ROWS * length) == 0, check, far > 1)


@functools.lru_cache(maxsize=1024)
def walk_plan(
    walk: Walk, batch: int, channels: int, tokens: int, device: int
) -> tuple[ct.kernel, tuple[int, int, int, int], tuple[bool, bool]]:
    """(kernel, (splits, groups of a block, TILE_C, STEP), (EVEN, CHECK)): the splits that seem to take least time."""
    tile_c, groups = min(walk.channels, next_power_of_2(channels)), ct.cdiv(tokens, walk.step)
    columns, plans = max(1, batch * ct.cdiv(channels, tile_c)), []
    for turns in range(1, MAX_TURNS + 1):
        share = max(1, ct.cdiv(groups, max(1, turns * walk.occupancy * sm_count(device) // columns)))
        plans.append((turns * (share + BEGINNING), share))
    share = min(plans)[1]
    kernel = hinted(conv_last_backward_kernel, num_worker_warps=4, occupancy=walk.occupancy)
    tiles = ct.cdiv(groups, share), share, tile_c, walk.step
    return kernel, tiles, (tokens % walk.step == 0, channels % tile_c != 0)


def from_each(y: torch.Tensor) -> list[torch.Tensor]:
    """``y`` [B, C, T] as [B, T, C], from its token 0, 1, 2, 3 on: see :func:`conv_last_backward_kernel`."""
    y = y.mT
    return [y[:, u:] if u < y.shape[1] else y for u in range(4)]


def flat(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` [C, K] as [C * K], if K is a power of two."""
    return weight if weight.shape[1] == 3 else weight.reshape(-1)


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
        entry = []
        for t in tensors:
            # A slice would keep the stride. This one is divisible by as much as the others are.
            strides = max(t.stride()[1:]), *t.stride()[1:]
            entry.append(t.as_strided((1, *t.shape[1:]), strides, t.storage_offset() + i * t.stride(0)))
        yield slice(i, i + 1), tuple(entry)


def _not_expanded(x: torch.Tensor) -> torch.Tensor:
    """``x`` [B, C, T], or a copy with the channels of a token side by side: tiles of expanded memory are not loaded."""
    return x.mT.contiguous().mT if 0 in x.stride() and x.numel() else x


def _laid_out_as(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """``dy``, or a copy where ``x`` [B, C, T] has the channels of a token side by side, and ``dy`` the tokens of a
    channel, or the other way round: kernels would read it an element at a time."""
    last = is_channels_last(x)
    there = dy if last else dy.mT
    if there.stride(2) != 1 or there.stride(1) <= 1 or there.stride(0) > INT32_MAX or dy.shape[2] <= 1:
        return dy
    copy = dy.new_empty(there.mT.shape)
    grid = (dy.shape[0] * ct.cdiv(there.shape[1], TURNED), ct.cdiv(there.shape[2], TURNED))
    launch(x, grid, transpose_kernel, (there, copy, TURNED))
    return copy.mT if last else copy


def _fake_forward(x, *_):
    return torch.empty_like(x)


@compilable(fake=_fake_forward)
def conv_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> torch.Tensor:
    """y, with the strides of a dense x."""
    y = torch.empty_like(x)
    _, channels, tokens = x.shape
    options, b = (weight.shape[1], bias is not None, silu), weight if bias is None else bias
    last = is_channels_last(x)
    for _, (some_x, some_y) in entries_per_launch(_not_expanded(x) if last else x, y):
        if last:
            kernel, grid, tiles, exact = pieces_plan(
                some_x.shape[0], channels, tokens, x.element_size(), x.get_device()
            )
            launch(x, grid, kernel, (some_x.mT, flat(weight), b, some_y.mT, *tiles, *options, *exact))
        else:
            tile_c, tile_t = conv_tiles(channels, tokens)
            grid = (ct.cdiv(tokens, tile_t) * some_x.shape[0], ct.cdiv(channels, tile_c))
            launch(x, grid, conv_kernel, (some_x, weight, b, some_y, tile_c, tile_t, *options))
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
    dy = _laid_out_as(x, dy)
    batch, channels, tokens = x.shape
    taps, device = weight.shape[1], x.get_device()
    options, b = (taps, bias is not None, silu), weight if bias is None else bias
    last = is_channels_last(x)
    if last:
        dy, x = _not_expanded(dy), _not_expanded(x)
        kernel, tiles, exact = walk_plan(BACKWARD, batch, channels, tokens, device)
        splits, tile_c, constants = tiles[0], tiles[2], (*tiles, *options, *exact)
    else:
        tile_c, tile_t = conv_tiles(channels, tokens)
        splits = 8 * sm_count(device) // max(1, batch * ct.cdiv(channels, tile_c))
        splits = max(1, min(ct.cdiv(tokens, tile_t), splits))
        kernel, constants = conv_backward_kernel, (splits, tile_c, tile_t, *options)
    dw = x.new_empty(batch, splits, taps, channels, dtype=torch.float32)
    db = dw if bias is None else x.new_empty(batch, splits, channels, dtype=torch.float32)
    for entries, (some_dy, some_x, some_dx) in entries_per_launch(dy, x, dx):
        sums = dw[entries].flatten(0, 1), db[entries].flatten(0, 1)
        arrays = (some_dy, some_x, weight, b, some_dx)
        if last:
            arrays = (some_dy.mT, some_x.mT, flat(weight), b, *from_each(some_dx))
        launch(x, (some_x.shape[0] * splits, ct.cdiv(channels, tile_c)), kernel, (*arrays, *sums, *constants))
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
    taps, b, options = weight.shape[1], weight if bias is None else bias, (bias is not None, silu)
    if tokens == 1 and state.shape[2] == taps != 3 and state.stride()[1:] == (taps, 1) and weight.is_contiguous():
        arrays = (x[:, :, 0], state.view(batch, channels * taps), weight.view(-1), b, y[:, :, 0])
        launch(x, (ct.cdiv(channels, STEP), batch), conv_step_kernel, (*arrays, STEP, taps, *options))
        return y
    tiles = update_tiles(channels, tokens, state.shape[2])
    args = (x, state, weight, b, y, *tiles, taps, *options)
    launch(x, (ct.cdiv(channels, tiles[0]), batch), conv_update_kernel, args)
    return y


class CausalConv(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, silu):
        ctx.save_for_backward(x, weight, bias)
        ctx.silu = silu
        return conv_forward(x, weight, bias, silu)

    @staticmethod
    @once_differentiable
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

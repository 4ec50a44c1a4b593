"""Cross entropy of rows of logits, of any length, with ``p = softmax(x)`` and ``lse = log(sum(exp(x)))``:

``loss = (1 - s) * (lse - x[target]) + s * (lse - mean(x)) + z * lse^2``, s the label smoothing, z the weight of the
z-loss, x capped to ``c * tanh(x / c)`` first where there is a soft cap c.

The forward pass reads a row once. A long one is cut into parts, which as many blocks take: each computes its part's
maximum and sum (Milakov and Gimelshein 2018, arXiv:1805.02867), and a second launch puts them together. The backward
pass is elementwise:
``dx = p * (1 + 2 * z * lse) - (1 - s) * onehot - s / V``, times the cap's slope ``1 - (x / c)^2``. A row whose target
is ignored has the loss and the gradient 0, whatever its logits; one whose target is no class has NaN.
"""

import functools
import math
from collections.abc import Iterator

import cuda.tile as ct
import torch

from tilegym.backend import in_place
from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile import cross_entropy_ahead
from tilegym.ops.cutile import pointwise
from tilegym.ops.cutile.cross_entropy_ahead import CrossEntropyAhead
from tilegym.ops.cutile.cross_entropy_terms import above
from tilegym.ops.cutile.cross_entropy_terms import base_of
from tilegym.ops.cutile.cross_entropy_terms import capped
from tilegym.ops.cutile.cross_entropy_terms import power_of
from tilegym.ops.cutile.cross_entropy_terms import state_of
from tilegym.ops.cutile.cross_entropy_terms import unit_of
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import INT32_MAX
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.cross_entropy import check_cross_entropy


def _chosen(x, target, rows, SOFTCAP: Float):
    """The targets of rows, and the logits of those."""
    label = ct.gather(target, rows)
    return label, capped(ct.gather(x, (rows, label)).astype(ct.float32), SOFTCAP)


def _write_losses(
    x, label, chosen, losses, lses, ignore_index, rows, top, total, mean, SMOOTHING: Float, Z_LOSS: Float
):
    """From the maximum ``top`` of the row, the sum ``total`` of powers relative to it, and, as differences to it
    rounded as in that sum, the logit of the target and the mean: lse - x[target] would cancel."""
    is_class = (label == ignore_index) | ((label >= 0) & (label < x.shape[1]))
    log_sum = ct.where(is_class, ct.log(total), math.nan)
    loss = log_sum - chosen
    if SMOOTHING > 0.0:
        loss = (1.0 - SMOOTHING) * loss + SMOOTHING * (log_sum - mean)
    if Z_LOSS > 0.0:
        lse = top + log_sum
        loss = loss + Z_LOSS * lse * lse
    ct.scatter(losses, rows, ct.where(label == ignore_index, 0.0, loss))
    ct.scatter(lses, (rows, 0), top)
    ct.scatter(lses, (rows, 1), log_sum)


@ct.kernel
def cross_entropy_kernel(
    x, target, losses, lses, ignore_index, SOFTCAP: Float, SMOOTHING: Float, Z_LOSS: Float, TILE_M: Int, TILE_N: Int
):
    """x: [M, V]; target, losses: [M]; lses: [M, 2], the two terms of lse = max + log(sum(exp(x - max))), whose sum has
    fewer digits. Each block takes TILE_M whole rows."""
    rows, cols = span(ct.bid(0), TILE_M)[:, None], span(0, TILE_N)[None, :]
    inside, unit = cols < x.shape[1], unit_of(x.dtype)
    part = ct.gather(x, (rows, cols), padding_value=-math.inf)
    if SOFTCAP > 0.0:
        part = ct.where(inside, capped(part.astype(ct.float32), SOFTCAP), -math.inf)
    mean = 0.0
    if SMOOTHING > 0.0:
        mean = ct.sum(ct.where(inside, part.astype(ct.float32), 0.0), axis=1, keepdims=True) / x.shape[1]
    # In the dtype of x: two values of 16 bits are compared at once.
    top = base_of(ct.max(part, axis=1, keepdims=True).astype(ct.float32))
    total = ct.sum(power_of((part.astype(ct.float32) - top) * unit, x.dtype), axis=1, keepdims=True)
    label, logit = _chosen(x, target, rows, SOFTCAP)
    args = (x, label, logit - top, losses, lses, ignore_index, rows, top, total, mean - top)
    _write_losses(*args, SMOOTHING, Z_LOSS)


@ct.kernel
def cross_entropy_parts_kernel(
    x, target, states, ignore_index, SOFTCAP: Float, SMOOTHING: Float, TILE_N: Int, OVERLAP: Bool
):
    """states: [parts of all rows, 3], of TILE_N columns each: their maximum, the sum of their powers relative to it,
    and, with smoothing, their sum."""
    if OVERLAP:
        ct.grid_dependency_control_launch_dependents()
    row, place = ct.bid(2), ct.bid(2) * ct.num_blocks(1) + ct.bid(1)
    cols = span(ct.bid(1), TILE_N)
    # A row that is ignored is not read.
    inside = cols < ct.where(ct.gather(target, row) == ignore_index, 0, x.shape[1])
    part = ct.gather(x, (row, cols), mask=inside, padding_value=-math.inf)
    if SOFTCAP > 0.0:
        part = ct.where(inside, capped(part.astype(ct.float32), SOFTCAP), -math.inf)
    if SMOOTHING > 0.0:
        ct.scatter(states, (place, 2), ct.sum(ct.where(inside, part.astype(ct.float32), 0.0)))
    top, total = state_of(part, x.dtype)
    ct.scatter(states, (place, 0), top)
    ct.scatter(states, (place, 1), total)


@ct.kernel
def cross_entropy_finish_kernel(
    x, target, losses, lses, ignore_index, SOFTCAP: Float, SMOOTHING: Float, Z_LOSS: Float, states, TILE_N: Int,
    PARTS: Int, OVERLAP: Bool,
):  # fmt: skip
    """As :func:`cross_entropy_kernel`, one row a block, from the states of its parts, at most PARTS."""
    row, index, parts = ct.bid(0), ct.arange(PARTS, dtype=ct.int32), ct.cdiv(x.shape[1], TILE_N)
    if OVERLAP:
        ct.grid_dependency_control_launch_dependents()
    unit = unit_of(x.dtype)
    label, logit = _chosen(x, target, row, SOFTCAP)
    if OVERLAP:
        ct.grid_dependency_control_wait()
    place = ct.where(index < parts, row * parts + index, -1)
    tops = ct.gather(states, (place, 0), padding_value=-math.inf)
    base = base_of(ct.max(tops))
    total = ct.sum(ct.gather(states, (place, 1)) * power_of(tops - base, x.dtype))
    mean = 0.0
    if SMOOTHING > 0.0:
        mean = ct.sum(ct.gather(states, (place, 2))) / x.shape[1]
    top, per = base * (1.0 / unit), 1.0 / unit
    chosen, mean = above(logit, base, unit) * per, above(mean, base, unit) * per
    _write_losses(x, label, chosen, losses, lses, ignore_index, row, top, total, mean, SMOOTHING, Z_LOSS)


def _write_gradient(
    scale, number, x, target, lses, dx, ignore_index, rows, first, SOFTCAP: Float, SMOOTHING: Float, Z_LOSS: Float,
    TILE_M: Int, TILE_N: Int, MEAN: Bool, INPLACE: Bool, INSIDE: Bool,
):  # fmt: skip
    """Of the tile of ``rows`` [TILE_M, 1] and columns from ``first`` on; INSIDE: all of it lies in x."""
    index = ct.arange(TILE_N, dtype=ct.int32)[None, :]
    value = ct.gather(x, (rows, first + index), check_bounds=not INSIDE)
    label, top, log_sum = ct.gather(target, rows), ct.gather(lses, (rows, 0)), ct.gather(lses, (rows, 1))
    factor = ct.gather(scale, rows)
    if MEAN:
        if x.dtype == ct.float32:
            factor = factor / ct.gather(number, 0)
        else:
            # An exact one calls a function, before which nothing would be read of x.
            approximate = ct.RoundingMode.APPROX
            factor = ct.truediv(factor, ct.gather(number, 0), rounding_mode=approximate, flush_to_zero=True)
    value = capped(value.astype(ct.float32), SOFTCAP)
    unit = unit_of(x.dtype)
    power = power_of((value - top) * unit - log_sum * unit, x.dtype)
    if Z_LOSS > 0.0:
        power = power * (1.0 + 2.0 * Z_LOSS * (top + log_sum))
    if SMOOTHING > 0.0:
        power = power - SMOOTHING / x.shape[1]
    if SOFTCAP > 0.0:
        ratio = value / SOFTCAP
        factor = factor * (1.0 - ratio * ratio)
    # Comparisons with the target would be a third of all that is computed, and few tiles hold one.
    if TILE_M > 1:
        special = True
    else:
        at = label.item()
        special = (at == ignore_index) | ((at >= first) & (at < first + TILE_N))
    if special:
        chosen = index == (label - first).astype(ct.int32)
        grad = ct.where(label == ignore_index, 0.0, ct.where(chosen, power - (1.0 - SMOOTHING), power) * factor)
    else:
        grad = power * factor
    ct.scatter(x if INPLACE else dx, (rows, first + index), grad.astype(x.dtype), check_bounds=not INSIDE)


@ct.kernel
def cross_entropy_backward_kernel(
    scale, number, x, target, lses, dx, ignore_index, SOFTCAP: Float, SMOOTHING: Float, Z_LOSS: Float, TILE_M: Int,
    TILE_N: Int, MEAN: Bool, INPLACE: Bool, OVERLAP: Bool,
):  # fmt: skip
    """Writes ``scale`` [M] times the gradient into dx, over ``number`` [1] if MEAN; INPLACE: over x itself, dx standing
    for nothing. The last rows come first: the forward pass has left them in the cache (of 105.9 us that both passes
    take an H200 for 512 rows of 128256 in bf16, 1.5 less)."""
    begin(OVERLAP)
    down, first = ct.num_blocks(2) - 1 - ct.bid(2), (ct.num_blocks(1) - 1 - ct.bid(1)) * TILE_N
    args = (scale, number, x, target, lses, dx, ignore_index, span(down, TILE_M)[:, None], first)
    constants = (SOFTCAP, SMOOTHING, Z_LOSS, TILE_M, TILE_N, MEAN, INPLACE)
    if ((down + 1) * TILE_M <= x.shape[0]) & (first + TILE_N <= x.shape[1]):
        _write_gradient(*args, *constants, True)
    else:
        _write_gradient(*args, *constants, False)


@ct.kernel
def add_losses_kernel(losses, target, out, number, ignore_index, TILE: Int, MEAN: Bool, OVERLAP: Bool):
    """out: [1], the sum of losses [M], or their mean over the rows that are not ignored; number: [1], that of those."""
    begin(OVERLAP)
    sums = ct.zeros((TILE,), ct.float32)
    counts = ct.zeros((TILE,), ct.int32)
    for tile in range(ct.cdiv(target.shape[0], TILE)):
        rows = span(tile, TILE)
        sums = sums + ct.gather(losses, rows)
        counts = counts + ct.where(ct.gather(target, rows, padding_value=ignore_index) == ignore_index, 0, 1)
    total, count = ct.sum(sums), ct.sum(counts).astype(ct.float32)
    ct.scatter(out, 0, total / count if MEAN else total)
    ct.scatter(number, 0, count)


# Columns that a block takes at once, by the bytes of a value.
MOST_HELD = {2: 16384, 4: 8192}
MOST_PARTS = 16384  # of a row, whose states one block puts together
MAX_BLOCKS = 65535  # of one launch along the third axis


@functools.lru_cache(maxsize=1024)
def forward_plan(m: int, n: int, device: int, size: int) -> tuple[ct.kernel, int, int]:
    """(kernel, TILE_M, TILE_N) for logits [m, n] held in ``size`` bytes each on CUDA device ``device`` (-1: CPU).

    Parts, on an H200 in bf16, in us: of 8192 columns for 512 rows of 128256 38.1 (38.7 if a block looks first whether
    its row is ignored), for 16 9.6, for one 8.6; of 4096 columns 40.6, 9.7 and 8.1.
    """
    if n <= MOST_HELD[size]:
        # Short rows share a block, as long as there are blocks for every multiprocessor.
        tile_n = next_power_of_2(n)
        tile_m = max(1, min(4096 // tile_n, next_power_of_2(m // (4 * sm_count(device)))))
        warps = 8 if tile_n * size > 16384 else 4
        return hinted(cross_entropy_kernel, num_worker_warps=warps, occupancy=32 // warps), tile_m, tile_n
    few = m * ct.cdiv(n, 8192) < sm_count(device)
    kernel = hinted(cross_entropy_parts_kernel, num_worker_warps=4, occupancy=8)
    return kernel, 1, 4096 if few or size == 4 else 8192


def _pieces(blocks: int, tensors: tuple[torch.Tensor, ...], tile_m: int = 1) -> Iterator[tuple[int, tuple]]:
    """(blocks along the rows, what it is given of ``tensors`` [M, ...]) of each launch that takes all rows together."""
    if blocks <= MAX_BLOCKS:
        yield blocks, tensors
        return
    for some in zip(*(t.split(MAX_BLOCKS * tile_m) for t in tensors), strict=True):
        yield ct.cdiv(some[0].shape[0], tile_m), some


def _like_targets(logits, target, *_):
    new = functools.partial(target.new_empty, dtype=torch.float32)
    return new(target.shape), new((*target.shape, 2))


@compilable(fake=_like_targets)
def cross_entropy_forward(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, softcap: float, smoothing: float, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of every row, and the two terms of its lse, [*target.shape, 2], in fp32; softcap 0: none."""
    rows = rows_of(logits)
    losses, lse = _like_targets(logits, target)
    (m, n), device = rows.shape, logits.get_device()
    arrays = (rows, target, losses, lse)
    if target.dim() != 1:
        arrays = (rows, target.reshape(-1), losses.view(-1), lse.view(-1, 2))
    args = (*arrays, ignore_index, softcap, smoothing, z_loss)
    # What is capped is held in fp32.
    kernel, tile_m, tile_n = forward_plan(m, n, device, 4 if softcap else rows.element_size())
    if n <= tile_n:
        launch(logits, (ct.cdiv(m, tile_m),), kernel, (*args, tile_m, tile_n))
        return losses, lse
    parts, overlap = ct.cdiv(n, tile_n), overlaps(device)
    if parts > MOST_PARTS:
        raise UnsupportedError(f"the logits have more than {MOST_PARTS * tile_n} columns")
    states = losses.new_empty((m, parts, 3))
    for down, (some, labels, place) in _pieces(m, (rows, arrays[1], states)):
        tile = (place.view(-1, 3), ignore_index, softcap, smoothing, tile_n, overlap)
        launch(logits, (1, parts, down), kernel, (some, labels, *tile))
    tile = (states.view(-1, 3), tile_n, next_power_of_2(parts), overlap)
    launch(logits, (m,), cross_entropy_finish_kernel, (*args, *tile), overlap=overlap)
    return losses, lse


MOST_ADDED = 2**16  # losses that one block adds up; beyond it torch is faster


@compilable(fake=lambda losses, *_: (losses.new_empty(()), losses.new_empty(())))
def add_losses(
    losses: torch.Tensor, target: torch.Tensor, ignore_index: int, mean: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses, or their mean over the rows that are not ignored, and the number of those."""
    if losses.numel() > MOST_ADDED:
        number, total = (target != ignore_index).sum().to(losses.dtype), losses.sum()
        return (total / number if mean else total), number
    # In memory of their own: a user may change the loss in place, and backward needs the number.
    out, number = losses.new_empty(()), losses.new_empty(())
    if target.dim() != 1:
        losses, target = losses.view(-1), target.reshape(-1)
    overlap = overlaps(losses.get_device())
    args = (losses, target, out.view(1), number.view(1), ignore_index, 1024, mean, overlap)
    launch(losses, (1,), add_losses_kernel, args, overlap=overlap)
    return out, number


def _launch_backward(scale, rows, target, lse, dx, ignore_index, softcap, smoothing, z_loss, number) -> None:
    """Writes the gradient of logits ``rows`` [M, V] into dx [M, V], or over them if dx is None."""
    (m, n), device = rows.shape, rows.get_device()
    _, tile_m, tile_n = pointwise.plan(m, n, device)
    # A scale that is the same for all rows has stride 0, and stays so.
    scale = scale.flatten() if scale.dim() else scale.view(1)
    mean, overlap = number is not None, overlaps(device)
    tensors = (scale, rows, target.reshape(-1), lse.view(-1, 2), *(() if dx is None else (dx,)))
    options = (ignore_index, softcap, smoothing, z_loss, tile_m, tile_n, mean, dx is None, overlap)
    for down, (factors, some, labels, terms, *out) in _pieces(ct.cdiv(m, tile_m), tensors, tile_m):
        arrays = (factors, number.view(1) if mean else 0, some, labels, terms, *(out or (terms,)))
        grid = (1, ct.cdiv(n, tile_n), down)
        launch(rows, grid, cross_entropy_backward_kernel, (*arrays, *options), overlap=overlap)


def _like(scale, logits, *_):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@compilable(fake=_like)
def cross_entropy_backward(
    scale: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int,
    softcap: float,
    smoothing: float,
    z_loss: float,
    number: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of logits, from that of every row's loss: ``scale``, of the shape of target, in fp32, over
    ``number`` [] where that is given."""
    rows, dx = rows_of(logits), _like(scale, logits)
    options = (ignore_index, softcap, smoothing, z_loss, number)
    _launch_backward(scale, rows, target, lse, dx.view(rows.shape), *options)
    return dx


@compilable(fake=lambda *_: None, mutates=("logits",))
def cross_entropy_backward_in_place(
    scale: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    ignore_index: int,
    softcap: float,
    smoothing: float,
    z_loss: float,
    number: torch.Tensor | None = None,
) -> None:
    """As :func:`cross_entropy_backward`, over the logits, which are 2-D or contiguous."""
    options = (ignore_index, softcap, smoothing, z_loss, number)
    _launch_backward(scale, rows_of(logits), target, lse, None, *options)


class CrossEntropy(Function):
    @staticmethod
    def forward(ctx, logits, target, ignore_index, softcap, smoothing, z_loss, reduction):
        options = (ignore_index, softcap, smoothing, z_loss)
        losses, lse = cross_entropy_forward(logits, target, *options)
        loss, number = losses, None
        if reduction != "none":
            loss, number = add_losses(losses, target, ignore_index, reduction == "mean")
        ctx.save_for_backward(logits, target, lse, number if reduction == "mean" else None)
        ctx.options, ctx.in_place = options, in_place.wanted()
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        logits, target, lse, number = ctx.saved_tensors
        args = (dloss.expand(target.shape), logits, target, lse, *ctx.options, number)
        if ctx.in_place and in_place.may_overwrite(ctx.in_place, logits):
            cross_entropy_backward_in_place(*args)
            (dx,) = in_place.overwritten(logits)
        else:
            dx = cross_entropy_backward(*args)
        return dx, None, None, None, None, None, None


@register_impl("cross_entropy", "cutile")
def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    check_cross_entropy(logits, target, label_smoothing, softcap, reduction)
    if logits.dtype not in FLOATS:
        check_floating("cross_entropy", logits=logits)
        raise UnsupportedError("logits is not fp32, fp16 or bf16")
    if not -INT32_MAX <= ignore_index <= INT32_MAX:
        raise UnsupportedError("ignore_index does not fit 32 bits")
    if not z_loss >= 0.0:  # NaN, too
        raise UnsupportedError("z_loss is not 0 or larger")
    options = (ignore_index, softcap or 0.0, label_smoothing, z_loss)
    if torch.is_grad_enabled() and logits.requires_grad:
        if reduction == "mean" and options[1:] == (0.0, 0.0, 0.0) and cross_entropy_ahead.serves(logits):
            return CrossEntropyAhead.apply(logits, target, ignore_index)
        return CrossEntropy.apply(logits, target, *options, reduction)
    losses, _ = cross_entropy_forward(logits, target, *options)
    return losses if reduction == "none" else add_losses(losses, target, ignore_index, reduction == "mean")[0]

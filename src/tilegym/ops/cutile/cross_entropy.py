"""Cross entropy of rows of logits, of any length, with ``p = softmax(x)`` and ``lse = log(sum(exp(x)))``:

``loss = (1 - s) * (lse - x[target]) + s * (lse - mean(x)) + z * lse^2``, s the label smoothing, z the weight of the
z-loss, x capped to ``c * tanh(x / c)`` first where there is a soft cap c.

The forward pass reads a row once: its maximum and sum are computed together, tile by tile (Milakov and Gimelshein 2018,
arXiv:1805.02867). Fewer rows than there are multiprocessors are cut into parts, which many blocks take, and a second
launch puts together what they found. The backward pass is elementwise:
``dx = p * (1 + 2 * z * lse) - (1 - s) * onehot - s / V``, times the cap's slope ``1 - (x / c)^2``. A row whose target
is ignored has the loss and the gradient 0, whatever its logits; one whose target is no class has NaN.
"""

import functools
import math

import cuda.tile as ct
import torch

from tilegym.backend import in_place
from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile import pointwise
from tilegym.ops.cutile.pointwise import indices
from tilegym.ops.cutile.softmax import _exp
from tilegym.ops.cutile.tiling import FLOATS
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

LOG2E = math.log2(math.e)


def _capped(x, SOFTCAP: Float):
    return x if SOFTCAP == 0.0 else SOFTCAP * ct.tanh(x / SOFTCAP)


def _unit(dtype):
    """What a logit is multiplied with before its power is taken: that of 2 is the faster one, and exact enough for
    results that 16 bits determine."""
    return 1.0 if dtype == ct.float32 else LOG2E


def _power(x, dtype):
    return ct.exp(x) if dtype == ct.float32 else ct.exp2(x, flush_to_zero=True)


def _base(top):
    # While all seen so far is -inf, differences to it would be NaN.
    return ct.where(top == -math.inf, 0.0, top)


def _above(logit, base, unit):
    """``logit * unit - base`` in one rounding, as in the sum of powers; and zero for the maximum itself."""
    return ct.where(logit * unit >= base, 0.0, logit * unit - base)


def _chosen(x, target, rows):
    """The targets of rows, and the logits of those."""
    label = ct.gather(target, rows)
    return label, ct.gather(x, (rows, label))


def _write_losses(
    x, label, logit, losses, lses, ignore_index, rows, base, total, mean,
    SOFTCAP: Float, SMOOTHING: Float, Z_LOSS: Float,
):  # fmt: skip
    """From the sum ``total`` of the powers relative to ``base``, both in the kernel's unit, and the mean of the row."""
    unit, classes = _unit(x.dtype), x.shape[1]
    is_class = (label == ignore_index) | ((label >= 0) & (label < classes))
    log_sum = ct.where(is_class, ct.log(total), math.nan)
    chosen = _capped(logit.astype(ct.float32), SOFTCAP)
    # Differences to the maximum first, rounded as in the sum: lse - chosen would cancel.
    loss = log_sum - _above(chosen, base, unit) * (1.0 / unit)
    if SMOOTHING > 0.0:
        loss = (1.0 - SMOOTHING) * loss + SMOOTHING * (log_sum - _above(mean, base, unit) * (1.0 / unit))
    base = base * (1.0 / unit)
    if Z_LOSS > 0.0:
        lse = base + log_sum
        loss = loss + Z_LOSS * lse * lse
    ct.scatter(losses, rows, ct.where(label == ignore_index, 0.0, loss))
    ct.scatter(lses, (rows, 0), base)
    ct.scatter(lses, (rows, 1), log_sum)


@ct.kernel
def cross_entropy_kernel(
    x, target, losses, lses, ignore_index, SOFTCAP: Float, SMOOTHING: Float, Z_LOSS: Float, TILE_M: Int, TILE_N: Int
):
    """x: [M, V]; target, losses: [M]; lses: [M, 2], the two terms of lse = max + log(sum(exp(x - max))), whose sum has
    fewer digits. Each block takes TILE_M whole rows."""
    rows, cols = span(ct.bid(0), TILE_M)[:, None], span(0, TILE_N)[None, :]
    part = _capped(ct.gather(x, (rows, cols)).astype(ct.float32), SOFTCAP)
    mean = 0.0
    if SMOOTHING > 0.0:
        mean = ct.sum(ct.where(cols < x.shape[1], part, 0.0), axis=1, keepdims=True) / x.shape[1]
    part = ct.where(cols < x.shape[1], part, -math.inf) * _unit(x.dtype)
    base = _base(ct.max(part, axis=1, keepdims=True))
    total = ct.sum(_power(part - base, x.dtype), axis=1, keepdims=True)
    chosen = _chosen(x, target, rows)
    _write_losses(x, *chosen, losses, lses, ignore_index, rows, base, total, mean, SOFTCAP, SMOOTHING, Z_LOSS)


def _add(x, row, cols, top, sums, totals, SOFTCAP: Float, SMOOTHING: Float, INSIDE: Bool):
    """Adds the tile of columns ``cols``, [TILE_G, TILE_N], to the maxima and sums of its columns."""
    part = ct.gather(x, (row, cols), padding_value=-math.inf, check_bounds=not INSIDE).astype(ct.float32)
    part = _capped(part, SOFTCAP)
    if not INSIDE:
        part = ct.where(cols < x.shape[1], part, -math.inf)
    if SMOOTHING > 0.0:
        totals = totals + ct.sum(part if INSIDE else ct.where(cols < x.shape[1], part, 0.0), axis=0, keepdims=True)
    unit = _unit(x.dtype)
    new_top = ct.maximum(top, ct.max(part, axis=0, keepdims=True) * unit)
    base = _base(new_top)
    powers = ct.sum(_power(part * unit - base, x.dtype), axis=0, keepdims=True)
    return new_top, sums * _power(top - base, x.dtype) + powers, totals


@ct.kernel
def cross_entropy_wide_kernel(
    x, target, losses, lses, ignore_index, SOFTCAP: Float, SMOOTHING: Float, Z_LOSS: Float, TILE_G: Int, TILE_N: Int
):
    """As :func:`cross_entropy_kernel`, one row of any length a block. Each of TILE_N columns has a maximum and a sum of
    its own, which are put together in the end: on the way no thread waits for another."""
    row, classes, size = ct.bid(0), x.shape[1], ct.static_eval(TILE_G * TILE_N)
    inner = ct.arange(TILE_G, dtype=ct.int32)[:, None] * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
    # A row that is ignored is not read.
    end = ct.where(ct.gather(target, row) == ignore_index, 0, classes)
    top = ct.full((1, TILE_N), -math.inf, ct.float32)
    sums, totals = ct.zeros((1, TILE_N), ct.float32), ct.zeros((1, TILE_N), ct.float32)
    for tile in range(end // size):
        top, sums, totals = _add(x, row, tile * size + inner, top, sums, totals, SOFTCAP, SMOOTHING, True)
    for tile in range(end // size, ct.cdiv(end, size)):
        top, sums, totals = _add(x, row, tile * size + inner, top, sums, totals, SOFTCAP, SMOOTHING, False)
    base = _base(ct.max(top))
    total = ct.sum(sums * _power(top - base, x.dtype))
    mean = ct.sum(totals) / classes
    chosen = _chosen(x, target, row)
    _write_losses(x, *chosen, losses, lses, ignore_index, row, base, total, mean, SOFTCAP, SMOOTHING, Z_LOSS)


@ct.kernel
def cross_entropy_parts_kernel(x, states, SOFTCAP: Float, SMOOTHING: Float, TILE_N: Int, OVERLAP: Bool):
    """states: [parts of all rows, 3], of TILE_N columns each: their maximum, the sum of their powers relative to it,
    and, with smoothing, their sum."""
    if OVERLAP:
        ct.grid_dependency_control_launch_dependents()
    classes, parts = x.shape[1], ct.cdiv(x.shape[1], TILE_N)
    row, cols = ct.bid(0) // parts, span(ct.bid(0) % parts, TILE_N)
    part = _capped(ct.gather(x, (row, cols), padding_value=-math.inf).astype(ct.float32), SOFTCAP)
    if SMOOTHING > 0.0:
        ct.scatter(states, (ct.bid(0), 2), ct.sum(ct.where(cols < classes, part, 0.0)))
    part = ct.where(cols < classes, part, -math.inf) * _unit(x.dtype)
    top = ct.max(part)
    ct.scatter(states, (ct.bid(0), 0), top)
    ct.scatter(states, (ct.bid(0), 1), ct.sum(_power(part - _base(top), x.dtype)))


@ct.kernel
def cross_entropy_finish_kernel(
    x, target, losses, lses, ignore_index, SOFTCAP: Float, SMOOTHING: Float, Z_LOSS: Float, states, TILE_N: Int,
    PARTS: Int, OVERLAP: Bool,
):  # fmt: skip
    """As :func:`cross_entropy_kernel`, one row a block, from the states of its parts, at most PARTS."""
    row, index, parts = ct.bid(0), ct.arange(PARTS, dtype=ct.int32), ct.cdiv(x.shape[1], TILE_N)
    if OVERLAP:
        ct.grid_dependency_control_launch_dependents()
    chosen = _chosen(x, target, row)
    if OVERLAP:
        ct.grid_dependency_control_wait()
    place = ct.where(index < parts, row * parts + index, -1)
    tops = ct.gather(states, (place, 0), padding_value=-math.inf)
    base = _base(ct.max(tops))
    total = ct.sum(ct.gather(states, (place, 1)) * _power(tops - base, x.dtype))
    mean = 0.0
    if SMOOTHING > 0.0:
        mean = ct.sum(ct.gather(states, (place, 2))) / x.shape[1]
    _write_losses(x, *chosen, losses, lses, ignore_index, row, base, total, mean, SOFTCAP, SMOOTHING, Z_LOSS)


@ct.kernel
def cross_entropy_backward_kernel(
    scale, number, x, target, lses, dx, ignore_index, SOFTCAP: Float, SMOOTHING: Float, Z_LOSS: Float, TILE_M: Int,
    TILE_N: Int, MEAN: Bool, INPLACE: Bool,
):  # fmt: skip
    """Writes ``scale`` [M] times the gradient into dx, over ``number`` [1] if MEAN; INPLACE: over x itself, dx standing
    for nothing."""
    rows, cols = indices(x, TILE_M, TILE_N)
    value = _capped(ct.gather(x, (rows, cols)).astype(ct.float32), SOFTCAP)
    label, top, log_sum = ct.gather(target, rows), ct.gather(lses, (rows, 0)), ct.gather(lses, (rows, 1))
    power = _exp((value - top) - log_sum, x.dtype)
    if Z_LOSS > 0.0:
        power = power * (1.0 + 2.0 * Z_LOSS * (top + log_sum))
    grad = ct.where(cols == label, power - (1.0 - SMOOTHING), power)
    if SMOOTHING > 0.0:
        grad = grad - SMOOTHING / x.shape[1]
    if SOFTCAP > 0.0:
        ratio = value / SOFTCAP
        grad = grad * (1.0 - ratio * ratio)
    factor = ct.gather(scale, rows)
    if MEAN:
        factor = factor / ct.gather(number, 0)
    grad = ct.where(label == ignore_index, 0.0, grad * factor).astype(x.dtype)
    if INPLACE:
        ct.scatter(x, (rows, cols), grad)
    else:
        ct.scatter(dx, (rows, cols), grad)


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


@functools.lru_cache(maxsize=1024)
def forward_plan(m: int, n: int, device: int) -> tuple[ct.kernel, tuple[int], int, int]:
    """(kernel, grid, its tile) for logits [m, n] on CUDA device ``device`` (-1: CPU)."""
    if n <= 4096:
        tile_n, warps, occupancy = next_power_of_2(n), 4, 8
        # Short rows share a block, as long as there are blocks for every multiprocessor.
        tile_m = max(1, min(4096 // tile_n, next_power_of_2(m // (4 * sm_count(device)))))
        kernel = hinted(cross_entropy_kernel, num_worker_warps=warps, occupancy=occupancy)
        return kernel, (ct.cdiv(m, tile_m),), tile_m, tile_n
    return hinted(cross_entropy_wide_kernel, num_worker_warps=4, occupancy=3), (m,), 8, 1024


PART = 4096  # columns
MOST_PARTS = 1024  # of a row


@functools.lru_cache(maxsize=1024)
def parts_of(m: int, n: int, device: int) -> int:
    """Into how many parts each row of logits [m, n] is cut; 0: whole rows are enough work for all multiprocessors."""
    parts = ct.cdiv(n, PART)
    # Two parts are read at once by one block of the other kernel, whose launch is the only one. On an H200 in bf16 256
    # rows of 128256 columns take 26.5 us instead of 30.0, of 32768 12.4 instead of 13.0, 384 rows as long.
    most = 2 * sm_count(device) if parts >= 8 else sm_count(device) - 1
    return parts if m <= most and 2 < parts <= MOST_PARTS else 0


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
    if parts := parts_of(m, n, device):
        overlap, states = overlaps(device), losses.new_empty((m * parts, 3))
        kernel = hinted(cross_entropy_parts_kernel, num_worker_warps=4, occupancy=8)
        launch(logits, (m * parts,), kernel, (rows, states, softcap, smoothing, PART, overlap))
        tile = (states, PART, next_power_of_2(parts), overlap)
        launch(logits, (m,), cross_entropy_finish_kernel, (*args, *tile), overlap=overlap)
        return losses, lse
    kernel, grid, *tile = forward_plan(m, n, device)
    launch(logits, grid, kernel, (*args, *tile))
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
    grid, tile_m, tile_n = pointwise.plan(*rows.shape, rows.get_device())
    # A scale that is the same for all rows has stride 0, and stays so.
    scale = scale.flatten() if scale.dim() else scale.view(1)
    mean, lse = number is not None, lse.view(-1, 2)
    arrays = (scale, number.view(1) if mean else 0, rows, target.reshape(-1), lse, lse if dx is None else dx)
    options = (ignore_index, softcap, smoothing, z_loss, tile_m, tile_n, mean, dx is None)
    launch(rows, grid, cross_entropy_backward_kernel, (*arrays, *options))


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


class CrossEntropy(torch.autograd.Function):
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
    @torch.autograd.function.once_differentiable
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
    if z_loss < 0.0:
        raise UnsupportedError("z_loss is negative")
    options = (ignore_index, softcap or 0.0, label_smoothing, z_loss)
    if torch.is_grad_enabled() and logits.requires_grad:
        return CrossEntropy.apply(logits, target, *options, reduction)
    losses, _ = cross_entropy_forward(logits, target, *options)
    return losses if reduction == "none" else add_losses(losses, target, ignore_index, reduction == "mean")[0]

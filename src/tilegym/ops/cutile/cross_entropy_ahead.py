"""Cross entropy's mean over many long rows, whose forward pass writes the gradient, while a row is in registers.

A row is cut into parts, a block each, which exchange their maxima and sums (``parts.py``). The gradient depends on that
of the loss, which is taken to be what the last backward pass on the device was given, at first 1, if that was the same
twice. The backward pass then only looks: if it is given another one, it writes the gradient anew, bit for bit what the
forward pass would have written. So logits are read once, not twice: on an H200 in bf16 512x128256 takes 79 us instead
of 106 (where the guess is wrong 142, where none is made 119), 4096x128256 534 instead of 743.

Not of a sum of losses, which training divides by a number of tokens that may be another one in every step.

The loss is the mean of log(sum(exp(x))) - x[target], the gradient that of the loss times ``p - onehot`` over the number
of rows that are not ignored.
"""

import functools
import math

import cuda.tile as ct
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tilegym.backend import in_place
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.ops.cutile.cross_entropy_terms import above
from tilegym.ops.cutile.cross_entropy_terms import base_of
from tilegym.ops.cutile.cross_entropy_terms import power_of
from tilegym.ops.cutile.cross_entropy_terms import state_of
from tilegym.ops.cutile.cross_entropy_terms import unit_of
from tilegym.ops.cutile.parts import bits
from tilegym.ops.cutile.parts import clear_others
from tilegym.ops.cutile.parts import exchange
from tilegym.ops.cutile.parts import forward_tile
from tilegym.ops.cutile.parts import high
from tilegym.ops.cutile.parts import launch_parts
from tilegym.ops.cutile.parts import look
from tilegym.ops.cutile.parts import low
from tilegym.ops.cutile.parts import parts_of
from tilegym.ops.cutile.parts import publish
from tilegym.ops.cutile.parts import turn_of
from tilegym.ops.cutile.row_groups import group_size
from tilegym.ops.cutile.row_groups import load_groups
from tilegym.ops.cutile.row_groups import load_rest
from tilegym.ops.cutile.row_groups import parts_of_groups
from tilegym.ops.cutile.row_groups import store_part
from tilegym.ops.cutile.row_groups import store_rest
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import let_next_begin
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import rows_of
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span


@ct.kernel
def expect_kernel(target, expected, factors, ignore_index, TILE: Int, OVERLAP: Bool):
    """expected: [2], the last gradient of the loss, and 1 if the one before was the same. factors: [2], what
    ``p - onehot`` is multiplied with, and for which gradient of the loss; NaN if none is expected."""
    let_next_begin(OVERLAP)
    counts = ct.zeros((TILE,), ct.int32)
    for tile in range(ct.cdiv(target.shape[0], TILE)):
        label = ct.gather(target, span(tile, TILE), padding_value=ignore_index)
        counts = counts + ct.where(label == ignore_index, 0, 1)
    scale = ct.where(ct.gather(expected, 1) == 1.0, ct.gather(expected, 0), math.nan)
    ct.scatter(factors, 0, scale / ct.sum(counts).astype(ct.float32))
    ct.scatter(factors, 1, scale)


def _part(x, row, n, wanted, number, TILE_N: Int, V: Int):
    # A row that is ignored is not read.
    if V:
        part = load_groups(x, row, n, ct.where(wanted, n, 0), number, TILE_N, V, -math.inf)
    else:
        cols = span(number, TILE_N)
        # Of the shape it is known what divides it, not of n.
        inside = cols < ct.where(wanted, x.shape[1], 0)
        part = ct.gather(x, (row, cols), mask=inside, padding_value=-math.inf)
    return part


def _state(part):
    top, total = state_of(part, part.dtype)
    return (bits(top) << 32) | bits(total)


def _gradient(part, base, scale):
    """That of logits which are no target's."""
    return power_of(part.astype(ct.float32) * unit_of(part.dtype) - base, part.dtype) * scale


def _target_gradient(loss, factor):
    return (ct.exp(-loss) - 1.0) * factor


def _scale(n, label, ignore_index, factor, inverse):
    """What the powers of a row's n logits are multiplied with."""
    is_class = (label >= 0) & (label < n)
    return ct.where(label == ignore_index, 0.0, ct.where(is_class, factor * inverse, math.nan))


@ct.kernel
def gradient_kernel(
    x, target, factors, losses, terms, dx, n, ignore_index, states, patience, TILE_N: Int, PARTS: Int, EXTRA: Int,
    V: Int, OVERLAP: Bool, TURNS: Int,
):  # fmt: skip
    """x, dx: [M, n]; target, losses: [M]; terms: [M, 2], a row's maximum in units, and one over the sum of its powers
    relative to it. Each block takes a part of a row, TILE_N columns of at most PARTS times as many, and writes its
    gradient as if no logit were the target's. ``states``, ``patience``, EXTRA and V are those of softmax's kernels."""
    let_next_begin(OVERLAP)
    number, row, blocks = ct.bid(1), ct.bid(2), ct.num_blocks(1)
    parts = blocks + 1 if EXTRA else blocks
    label = ct.gather(target, row)
    wanted = label != ignore_index
    part = _part(x, row, n, wanted, number, TILE_N, V)
    count = parts * ct.num_blocks(2)
    turn = turn_of(states, count, TURNS)
    if OVERLAP:
        ct.grid_dependency_control_wait()
    first = row * parts + turn * count
    if EXTRA:
        if number == 0:
            # While the part is on its way.
            publish(states, first + blocks, _state(load_rest(x, row, n, blocks, wanted, TILE_N, EXTRA, V, -math.inf)))
    found, missing = exchange(states, first, number, parts, _state(part), patience, PARTS)
    if missing > 0:
        for i in range(blocks):
            publish(states, first + i, _state(_part(x, row, n, wanted, i, TILE_N, V)))
        if EXTRA:
            publish(states, first + blocks, _state(load_rest(x, row, n, blocks, wanted, TILE_N, EXTRA, V, -math.inf)))
        while missing > 0:
            found, missing = look(states, first, parts, PARTS)
        part = _part(x, row, n, wanted, number, TILE_N, V)  # which takes no registers until now
    there = ct.arange(PARTS, dtype=ct.int32) < parts
    tops = ct.where(there, high(found), -math.inf)
    base = base_of(ct.max(tops))
    total = ct.sum(ct.where(there, low(found) * power_of(tops - base, x.dtype), 0.0))
    inverse, factor = 1.0 / total, ct.gather(factors, 0)
    if factor == factor:
        scale = _scale(n, label, ignore_index, factor, inverse)
        store_part(dx, row, n, number, _gradient(part, base, scale), TILE_N, V)
        if EXTRA:
            if number == 0:
                out = _gradient(load_rest(x, row, n, blocks, wanted, TILE_N, EXTRA, V, -math.inf), base, scale)
                store_rest(dx, row, n, blocks, True, out, TILE_N, EXTRA, V)
    if number == 0:
        unit = unit_of(x.dtype)
        is_class = (label >= 0) & (label < n)
        place = row * n + ct.where(is_class, label, 0)
        logit = ct.gather(x, place if V else (row, label)).astype(ct.float32)
        loss = ct.where(is_class, ct.log(total), math.nan) - above(logit, base, unit) * (1.0 / unit)
        ct.scatter(losses, row, ct.where(wanted, loss, 0.0))
        ct.scatter(terms, (row, 0), base)
        ct.scatter(terms, (row, 1), inverse)
        if EXTRA:
            clear_others(states, turn, row * parts + blocks, count, TURNS)
    clear_others(states, turn, row * parts + number, count, TURNS)


@ct.kernel
def finish_kernel(losses, target, factors, dx, out, number, ignore_index, TILE: Int, OVERLAP: Bool):
    """out: [1], the mean of losses [M] over the rows that are not ignored; number: [1], that of those. Writes the
    gradients of the targets' own logits."""
    begin(OVERLAP)
    sums = ct.zeros((TILE,), ct.float32)
    counts = ct.zeros((TILE,), ct.int32)
    factor = ct.gather(factors, 0)
    for tile in range(ct.cdiv(target.shape[0], TILE)):
        rows = span(tile, TILE)
        loss, label = ct.gather(losses, rows), ct.gather(target, rows, padding_value=ignore_index)
        sums = sums + loss
        counts = counts + ct.where(label == ignore_index, 0, 1)
        place = ct.where((label == ignore_index) | (factor != factor), -1, label)
        ct.scatter(dx, (rows, place), _target_gradient(loss, factor).astype(dx.dtype))
    total, count = ct.sum(sums), ct.sum(counts).astype(ct.float32)
    ct.scatter(out, 0, total / count)
    ct.scatter(number, 0, count)


def _correct_tile(x, target, losses, terms, dx, ignore_index, factor, row, first, TILE_N: Int, INSIDE: Bool):
    index = ct.arange(TILE_N, dtype=ct.int32)
    part = ct.gather(x, (row, first + index), check_bounds=not INSIDE)
    label, base, inverse = ct.gather(target, row), ct.gather(terms, (row, 0)), ct.gather(terms, (row, 1))
    out = _gradient(part, base, _scale(x.shape[1], label, ignore_index, factor, inverse))
    if (label == ignore_index) | ((label >= first) & (label < first + TILE_N)):
        own = _target_gradient(ct.gather(losses, row), factor)
        chosen = index == (label - first).astype(ct.int32)
        out = ct.where(label == ignore_index, 0.0, ct.where(chosen, own, out))
    ct.scatter(dx, (row, first + index), out.astype(dx.dtype), check_bounds=not INSIDE)


@ct.kernel
def correct_kernel(
    dloss, number, x, target, factors, losses, terms, dx, expected, ignore_index, TILE_N: Int, ALWAYS: Bool,
    OVERLAP: Bool,
):  # fmt: skip
    """Writes dx, ALWAYS or if it was written for another gradient of the loss than ``dloss`` [1], which is expected
    from now on. As many blocks as run at once take the last rows first, which the cache may hold still."""
    begin(OVERLAP)
    scale, guess = ct.gather(dloss, 0), ct.gather(factors, 0)
    # A guess of 0 over no rows is NaN, for which none was written.
    if (scale != ct.gather(factors, 1)) | (guess != guess) | ALWAYS:
        factor = scale / ct.gather(number, 0)
        across = ct.cdiv(x.shape[1], TILE_N)
        count = x.shape[0] * across
        for i in range(ct.bid(0), count, ct.num_blocks(0)):
            row, first = (count - 1 - i) // across, ((count - 1 - i) % across) * TILE_N
            args = (x, target, losses, terms, dx, ignore_index, factor, row, first, TILE_N)
            if first + TILE_N <= x.shape[1]:
                _correct_tile(*args, True)
            else:
                _correct_tile(*args, False)
    if ct.bid(0) == 0:
        ct.scatter(expected, 1, ct.where(scale == ct.gather(expected, 0), 1.0, 0.0))
        ct.scatter(expected, 0, scale)


MAX_ROWS = 65535  # of one launch: blocks along axis 2


@functools.lru_cache(maxsize=1024)
def ahead_plan(m: int, n: int, device: int, size: int, v: int) -> tuple[ct.kernel, int, tuple[int, int]] | None:
    """(kernel, parts of a row, (TILE_N, EXTRA)) for logits [m, n] on CUDA device ``device`` (-1: CPU), in groups of
    ``v`` if that is not 0. None where not all parts of a row would run at the same time; for rows of one part; and for
    fewer blocks than run at once: in bf16 an H200 takes 20.9 us instead of 21.2 for 64x128256, 30.8 instead of 34.4 for
    128x128256, 50.5 instead of 59.5 for 2048x16384."""
    tile_n, warps, occupancy = forward_tile(n, size)
    parts, extra = parts_of_groups(n, tile_n, v) if v else parts_of(n, tile_n)
    processors = sm_count(device)
    several = parts + (extra > 0 and not v) > 1  # a row's edges are no part to speak of
    if not several or m > MAX_ROWS or parts > processors or m * parts < occupancy * processors:
        return None
    return hinted(gradient_kernel, num_worker_warps=warps, occupancy=occupancy), parts, (tile_n, extra)


def serves(logits: torch.Tensor) -> bool:
    """Whether :class:`CrossEntropyAhead` computes the loss of these logits. Not under hooks that save tensors, such as
    those of non-reentrant checkpointing, which know nothing of the gradient."""
    if torch.compiler.is_compiling() or in_place.wanted() or in_place.hooks_save():
        return False
    m, n = logits.shape[:-1].numel(), logits.shape[-1]
    return ahead_plan(m, n, logits.get_device(), logits.element_size(), group_size(n, logits)) is not None


@functools.cache
def _expected(device: int) -> torch.Tensor:
    # No result depends on what is in it.
    with _disable_current_modes():  # such as those that only follow shapes
        return torch.ones(2, dtype=torch.float32, device="cpu" if device < 0 else torch.device("cuda", device))


def _outputs(logits, target, *_):
    new = functools.partial(target.new_empty, dtype=torch.float32)
    m = target.numel()
    dx = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return new(()), new(()), dx, new(2), new(m), new((m, 2))


@compilable(fake=_outputs)
def cross_entropy_forward_ahead(
    logits: torch.Tensor, target: torch.Tensor, expected: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, the number of rows that are not ignored, the gradient of logits for that of the loss that ``expected``
    holds, and what :func:`cross_entropy_correct` needs of it: factors, losses, terms."""
    loss, number, dx, factors, losses, terms = outputs = _outputs(logits, target)
    rows, target = rows_of(logits), target.reshape(-1)
    (m, n), device = rows.shape, logits.get_device()
    overlap, tile = overlaps(device), min(1024, max(128, next_power_of_2(m)))
    v = group_size(n, logits)
    kernel, parts, (tile_n, extra) = ahead_plan(m, n, device, rows.element_size(), v)
    launch(logits, (1,), expect_kernel, (target, expected, factors, ignore_index, tile, overlap))
    gradient = dx.view(rows.shape)
    x, dx_of_x = (rows.view(-1), gradient.view(-1)) if v else (rows, gradient)
    arrays = (x, target, factors, losses, terms, dx_of_x, n, ignore_index)
    more = m if extra else 0
    tiles = (tile_n, next_power_of_2(parts + (extra > 0)), extra, v)
    launch_parts(logits, (1, parts, m), kernel, arrays, tiles, after_one=True, more=more)
    arrays = (losses, target, factors, gradient, loss.view(1), number.view(1), ignore_index)
    launch(logits, (1,), finish_kernel, (*arrays, tile, overlap), overlap=overlap)
    return outputs


@compilable(fake=lambda *_: None, mutates=("dx", "expected"))
def cross_entropy_correct(
    dloss: torch.Tensor,
    number: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    factors: torch.Tensor,
    losses: torch.Tensor,
    terms: torch.Tensor,
    dx: torch.Tensor,
    expected: torch.Tensor,
    ignore_index: int,
    always: bool,
) -> None:
    """Writes the gradient of logits into dx, which may hold it."""
    rows, device = rows_of(logits), logits.get_device()
    overlap = overlaps(device)
    arrays = (dloss.view(1), number.view(1), rows, target.reshape(-1), factors, losses, terms, dx.view(rows.shape))
    args = (*arrays, expected, ignore_index, 2048, always, overlap)
    launch(logits, (8 * sm_count(device),), hinted(correct_kernel, occupancy=8), args, overlap=overlap)


class CrossEntropyAhead(Function):
    @staticmethod
    def forward(ctx, logits, target, ignore_index):
        expected = _expected(logits.get_device())
        loss, number, dx, *kept = cross_entropy_forward_ahead(logits, target, expected, ignore_index)
        ctx.save_for_backward(number, logits, target, *kept)
        # Not saved: autograd takes what nobody else holds for the gradient of a leaf as it is.
        ctx.dx, ctx.ignore_index = dx, ignore_index
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        number, logits, *kept = ctx.saved_tensors
        dx, ctx.dx = ctx.dx, None
        always = dx is None  # the graph runs backward once more
        if always:
            dx = torch.empty_like(logits, memory_format=torch.contiguous_format)
        expected = _expected(logits.get_device())
        cross_entropy_correct(dloss, number, logits, *kept, dx, expected, ctx.ignore_index, always)
        return dx, None, None

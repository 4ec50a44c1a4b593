"""Cross entropy of a linear layer's outputs, of which only those for a chunk of tokens exist at a time.

For each chunk: the logits, one GEMM; their losses; their gradient, written over them; and with it the gradient of
hidden states, a GEMM. The gradient of weight then takes one GEMM over all tokens for each slice of the vocabulary, so
that it is summed in fp32 and rounded once. The GEMMs are torch's; a bias is added where the logits are read, in fp32.
With the reduction "mean" or "sum" all of this happens in the forward pass, for an upstream gradient of 1: the backward
pass only scales. With "none" each row has an upstream gradient of its own, and the backward pass computes the logits
again.

Where weight has a gradient the logits take no memory of their own: they are where that will be. The gradient [V, H] has
room for the logits of R <= H tokens, transposed: [V, R] from the start of its memory on. A chunk has so many tokens,
and the last chunk's gradients of logits stay there. Slices of weight's gradient are written over them from the last
class to the first: the logits of the classes before v end before row v of the gradient begins, so that what is still
to be read stays as it is. Where all tokens are stored, and fewer than there is room for, the logits of even more
classes end there: all but R / H of the classes are one slice, all but R / H of the others the next, and each is written
by one GEMM that reads its gradients of logits where they are. Before any other slice is written, the last few classes
or those of more tokens than R, its gradients of logits are copied to a small buffer. Those for the tokens of other
chunks are computed again into the same buffer, with the sums known. So there are 3 GEMMs for R tokens, and up to 4 for
more. In fp16, whose range sums over tokens may leave, weight's gradient is held in fp32, which gives room for twice the
tokens.
"""

import functools
import math

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.in_place import may_run_again
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile import pointwise
from tilegym.ops.cutile.cross_entropy import add_losses
from tilegym.ops.cutile.pointwise import indices
from tilegym.ops.cutile.softmax import _exp
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.fused_linear_cross_entropy import check_fused_linear_cross_entropy

# Shorter chunks leave a GPU's multiprocessors idle (hidden states' gradient, 1024x4096, is 128 tiles of 128x256); so
# many elements of logits are little beside a large model's other tensors.
FEWEST_ROWS, FEW_ELEMENTS = 1024, 2**26
# A slice that is copied has as many classes as make this many logits (of 8192 tokens: 2048, whose GEMMs are 256 tiles
# of 128x256), but no fewer than would leave multiprocessors idle.
SLICE_ELEMENTS, FEWEST_CLASSES = 2**24, 1024
CLASSES_OF_TILE = 128  # of a GEMM's result; slices are of whole tiles
MOST_PARTS = 64
# A chunk_size, the default, from which on a chunk has all tokens that there is room for: in memory that is taken anyway
# more cost nothing, and fewer logits are computed twice.
ALL_THERE_IS_ROOM_FOR = 4096
ALIGNMENT = 16  # of rows of logits, in elements, so that kernels access 16 bytes at a time


def _logits(x, bias, rows, tokens, classes, BIASED: Bool):
    """The logits of ``classes`` from what is stored of them, at ``rows`` and ``tokens`` of ``x``."""
    value = ct.gather(x, (rows, tokens)).astype(ct.float32)
    return value + ct.gather(bias, classes).astype(ct.float32) if BIASED else value


@ct.kernel
def partial_sums_kernel(x, bias, partials, tiles, TILE_V: Int, TILE_T: Int, BIASED: Bool):
    """x: [V, T], logits without ``bias`` [V], tokens beside each other. partials: [2, P, T], the maximum and the sum of
    exp(logit - maximum) of each of P parts of the vocabulary, ``tiles`` * TILE_V classes."""
    part, tokens, classes = ct.bid(1), span(ct.bid(0), TILE_T)[None, :], x.shape[0]
    top = ct.full((1, TILE_T), -math.inf, ct.float32)
    sums = ct.zeros((TILE_V, TILE_T), ct.float32)
    for tile in range(part * tiles, ct.minimum((part + 1) * tiles, ct.cdiv(classes, TILE_V))):
        rows = span(tile, TILE_V)[:, None]
        value = ct.where(rows < classes, _logits(x, bias, rows, tokens, rows, BIASED), -math.inf)
        new_top = ct.maximum(top, ct.max(value, axis=0, keepdims=True))
        # While all seen so far is -inf, differences to it would be NaN.
        base = ct.where(new_top == -math.inf, 0.0, new_top)
        sums = sums * _exp(top - base, x.dtype) + _exp(value - base, x.dtype)
        top = new_top
    ct.scatter(partials, (0, part, tokens), top)
    ct.scatter(partials, (1, part, tokens), ct.sum(sums, axis=0, keepdims=True))


@ct.kernel
def token_losses_kernel(x, bias, partials, target, losses, lses, ignore_index, PARTS: Int, TILE_T: Int, BIASED: Bool):
    """target, losses: [T]; lses: [2, T], the two terms of lse = max + log(sum(exp(x - max))), whose sum has fewer
    digits; PARTS: at least P."""
    tokens, parts, classes = span(ct.bid(0), TILE_T)[None, :], span(0, PARTS)[:, None], x.shape[0]
    tops = ct.where(parts < partials.shape[1], ct.gather(partials, (0, parts, tokens)), -math.inf)
    top = ct.max(tops, axis=0, keepdims=True)
    total = ct.sum(ct.gather(partials, (1, parts, tokens)) * _exp(tops - top, x.dtype), axis=0, keepdims=True)
    label = ct.gather(target, tokens)
    is_class = (label == ignore_index) | ((label >= 0) & (label < classes))
    log_sum = ct.where(is_class, ct.log(total), math.nan)
    # Differences to the maximum first: lse - x[target] would cancel.
    loss = log_sum - (_logits(x, bias, label, tokens, label, BIASED) - top)
    ct.scatter(losses, tokens, ct.where(label == ignore_index, 0.0, loss))
    ct.scatter(lses, (0, tokens), top)
    ct.scatter(lses, (1, tokens), log_sum)


@ct.kernel
def logits_gradient_kernel(x, bias, target, lses, scale, first, ignore_index, TILE_V: Int, TILE_T: Int, BIASED: Bool):
    """Writes the gradient over x [V, T], the logits of classes from ``first`` on without the whole ``bias``, for
    upstream gradients scale [T]."""
    rows, tokens = indices(x, TILE_V, TILE_T)
    label = ct.gather(target, tokens)
    value = _logits(x, bias, rows, tokens, rows + first, BIASED)
    power = _exp((value - ct.gather(lses, (0, tokens))) - ct.gather(lses, (1, tokens)), x.dtype)
    grad = ct.where(rows + first == label, power - 1.0, power) * ct.gather(scale, tokens)
    ct.scatter(x, (rows, tokens), ct.where(label == ignore_index, 0.0, grad).astype(x.dtype))


@ct.kernel
def scale_kernel(x, factor, TILE_M: Int, TILE_N: Int):
    """x [M, N] times factor [1], in place. Where that is 1, as it is unless the loss is scaled, x is not read."""
    number, across = ct.gather(factor, 0), ct.cdiv(x.shape[1], TILE_N)
    tiles = ct.where(number == 1.0, 0, ct.cdiv(x.shape[0], TILE_M) * across)
    for tile in range(ct.bid(0), tiles, ct.num_blocks(0)):
        at = span(tile // across, TILE_M)[:, None], span(tile % across, TILE_N)[None, :]
        ct.scatter(x, at, (ct.gather(x, at).astype(ct.float32) * number).astype(x.dtype))


def aligned(tokens: int) -> int:
    """How many elements a row of the logits of so many tokens takes."""
    return -(-tokens // ALIGNMENT) * ALIGNMENT


def rows_of_chunk(vocabulary: int, chunk_size: int) -> int:
    """How many tokens have logits at a time, in a buffer of their own: few, but not so few that the GEMMs suffer."""
    return min(chunk_size, max(FEWEST_ROWS, FEW_ELEMENTS // max(vocabulary, 1)))


def rows_stored(tokens: int, room: int, chunk_size: int) -> tuple[int, int]:
    """How many of ``tokens`` have logits at a time where there is room for so many, and what their rows take of it."""
    rows = min(tokens, room) if chunk_size >= ALL_THERE_IS_ROOM_FOR else min(tokens, room, chunk_size)
    if aligned(rows) <= room:
        return rows, aligned(rows)
    rows = room // ALIGNMENT * ALIGNMENT or rows
    return rows, rows


def classes_of_slice(tokens: int, vocabulary: int, chunk_size: int) -> int:
    """How many classes a slice that is copied has, whose logits for all tokens are to be no more than a chunk's."""
    classes = min(max(FEWEST_CLASSES, SLICE_ELEMENTS // tokens), max(1, chunk_size * vocabulary // tokens), vocabulary)
    return classes // CLASSES_OF_TILE * CLASSES_OF_TILE or classes


def direct_slices(vocabulary: int, width: int, room: int, classes: int) -> tuple[list[slice], int]:
    """Slices of weight's gradient, from the last class on, that are written without a copy; how many classes are left.

    A class takes ``width`` elements of the memory for the gradient of its logits, and ``room`` for that of weight. No
    slice lies over what it or a later one reads. So that there are no more GEMMs than with copies, a slice has no fewer
    ``classes`` than one that is copied. Where it has at least half of those that are left there are few slices anyway:
    there it may be as short as FEWEST_CLASSES, and the buffer is small.
    """
    fewest = min(classes, FEWEST_CLASSES) if 2 * width <= room else classes
    slices, end = [], vocabulary
    while True:
        start = -(-end * width // room)
        start = -(-start // CLASSES_OF_TILE) * CLASSES_OF_TILE
        if end - start < fewest:
            return slices, end
        slices.append(slice(start, end))
        end = start


@functools.lru_cache(maxsize=1024)
def losses_plan(classes: int, tokens: int, device: int) -> tuple[tuple[int, int], int, int, int]:
    """(grid, tiles of a part, TILE_V, TILE_T) for logits [classes, tokens] on CUDA device ``device`` (-1: CPU)."""
    tile_v, tile_t = tile_of(tokens)
    across, tiles = ct.cdiv(tokens, tile_t), ct.cdiv(classes, tile_v)
    parts = max(1, min(MOST_PARTS, tiles, 8 * sm_count(device) // across))
    each = ct.cdiv(tiles, parts)
    return (across, max(1, ct.cdiv(tiles, max(each, 1)))), each, tile_v, tile_t


def tile_of(tokens: int) -> tuple[int, int]:
    """(TILE_V, TILE_T) for logits of so many tokens."""
    tile_t = min(128, next_power_of_2(tokens))
    return 4096 // tile_t, tile_t


def _compute_losses(logits, bias, target, losses, lses, ignore_index):
    """Writes losses [T] and lses [2, T] of logits [V, >= T] without ``bias``."""
    device, width = logits.get_device(), logits.shape[1]
    grid, tiles, tile_v, tile_t = losses_plan(*logits.shape, device)
    partials = logits.new_empty((2, grid[1], width), dtype=torch.float32)
    biased, bias = bias is not None, 0 if bias is None else bias
    launch(logits, grid, partial_sums_kernel, (logits, bias, partials, tiles, tile_v, tile_t, biased))
    arrays = (logits, bias, partials, target, losses, lses)
    grid = (ct.cdiv(len(target), 32),)
    launch(logits, grid, token_losses_kernel, (*arrays, ignore_index, next_power_of_2(partials.shape[1]), 32, biased))


def _to_gradient(logits, bias, target, lses, scale, first, ignore_index):
    """Writes over logits [V, >= T], of classes from ``first`` on and without ``bias``, their gradient."""
    tile_v, tile_t = tile_of(logits.shape[1])
    grid = (ct.cdiv(logits.shape[0], tile_v) * ct.cdiv(logits.shape[1], tile_t),)
    arrays = (logits, 0 if bias is None else bias, target, lses, scale)
    launch(logits, grid, logits_gradient_kernel, (*arrays, first, ignore_index, tile_v, tile_t, bias is not None))


def _compute_logits(weight, hidden, out):
    """weight [V, H] @ hidden [T, H] transposed, into out [V, T].

    Without the bias: torch.addmm rounds to 16 bits before it adds that, and once more behind it.
    """
    torch.mm(weight, hidden.t(), out=out)


def _product(a, b, out):
    """a @ b into out, which may have fp32 for products in fp16 that leave its range."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _gradients(hidden, weight, dhidden, dweight, dbias):
    """Gradients to be written: of hidden and weight in their dtype, but of weight in fp32 for fp16; that of bias zeros
    in fp32."""
    dtype = torch.float32 if weight.dtype == torch.float16 else weight.dtype
    return (
        torch.empty_like(hidden, memory_format=torch.contiguous_format) if dhidden else hidden.new_empty(0),
        weight.new_empty(weight.shape if dweight else 0, dtype=dtype),
        weight.new_zeros(weight.shape[0] if dbias else 0, dtype=torch.float32),
    )


def _write_slices(stored, hidden, weight, bias, target, lses, scale, ignore_index, classes, dw):
    """Writes weight's gradient dw, of which a slice that is copied has ``classes``. In its memory, the gradients of
    logits of the first tokens are ``stored``, [V, R]; those of the others are computed."""
    tokens, first, left = len(target), stored.shape[1], len(weight)
    if first == tokens:
        room = dw.shape[1] * dw.itemsize // stored.itemsize
        direct, left = direct_slices(left, stored.stride(0), room, classes)
        for rows in direct:
            _product(stored[rows], hidden, dw[rows])
    buffer = hidden.new_empty(min(classes, left), aligned(tokens))
    for start in reversed(range(0, left, classes)):
        rows = slice(start, min(start + classes, left))
        part = buffer[: rows.stop - start]
        part[:, :first].copy_(stored[rows])
        if first < tokens:
            _compute_logits(weight[rows], hidden[first:], part[:, first:tokens])
            _to_gradient(part[:, first:], bias, target[first:], lses[:, first:], scale[first:], start, ignore_index)
        _product(part[:, :tokens], hidden, dw[rows])


def _fake(hidden, weight, bias, target, scale, ignore_index, chunk_size, dhidden, dweight, dbias):
    return target.new_empty(target.shape, dtype=torch.float32), *_gradients(hidden, weight, dhidden, dweight, dbias)


@compilable(fake=_fake)
def linear_cross_entropy_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    scale: torch.Tensor,
    ignore_index: int,
    chunk_size: int,
    dhidden: bool,
    dweight: bool,
    dbias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The losses of rows ``hidden`` [M, H], and the gradients that are asked for, the others empty.

    ``scale`` [M], fp32, is the upstream gradient of each loss.
    """
    losses, lses = (target.new_empty(shape, dtype=torch.float32) for shape in (target.shape, (2, *target.shape)))
    dh, dw, db = _gradients(hidden, weight, dhidden, dweight, dbias)
    tokens, vocabulary = len(hidden), len(weight)
    if tokens == 0:
        dw.zero_()
        return losses, dh, dw, db
    # So few logits that they fit into a slice's buffer are computed there.
    inside = dw.numel() > 0 and (tokens > chunk_size or tokens * vocabulary > SLICE_ELEMENTS)
    if inside:
        memory = dw.view(-1).view(hidden.dtype)
        rows, width = rows_stored(tokens, memory.numel() // vocabulary, chunk_size)
        buffer = memory[: vocabulary * width].view(vocabulary, width)
    else:
        rows = min(tokens, rows_of_chunk(vocabulary, chunk_size))
        buffer = hidden.new_empty(vocabulary, aligned(rows))
    # The operands have one dtype already; autocast would give the products another than their outputs'.
    with torch.autocast(hidden.device.type, enabled=False):
        # The first tokens come last: theirs are the gradients that stay.
        for start in (*range(rows, tokens, rows), 0):
            chunk = slice(start, min(start + rows, tokens))
            x, labels = hidden[chunk], target[chunk]
            wide = buffer[:, : aligned(len(x))]
            logits = buffer[:, : len(x)]
            _compute_logits(weight, x, logits)
            _compute_losses(wide, bias, labels, losses[chunk], lses[:, chunk], ignore_index)
            if dhidden or dbias or (dweight and start == 0):
                _to_gradient(wide, bias, labels, lses[:, chunk], scale[chunk], 0, ignore_index)
            if dhidden:
                torch.mm(logits.t(), weight, out=dh[chunk])
            if dbias:
                db += logits.sum(1, dtype=torch.float32)
        if inside:
            classes = classes_of_slice(tokens, vocabulary, chunk_size)
            _write_slices(logits, hidden, weight, bias, target, lses, scale, ignore_index, classes, dw)
        elif dw.numel():
            _product(logits, hidden, dw)
    return losses, dh, dw, db


def _scaled(gradient: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """gradient * scale in ``dtype``, computed in fp32 and rounded once: in place of what is saved, where it may be."""
    if scale is None:
        return gradient.to(dtype)
    if gradient.dtype != dtype or gradient.dim() != 2 or may_run_again():
        return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))
    device = gradient.get_device()
    (blocks,), *tiles = pointwise.plan(*gradient.shape, device)
    launch(gradient, (min(blocks, 8 * sm_count(device)),), scale_kernel, (gradient, scale.view(1), *tiles))
    return gradient


class FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, ignore_index, chunk_size, reduction):
        ctx.sizes, ctx.reduction = (ignore_index, chunk_size), reduction
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (hidden, weight, bias))
        once = reduction != "none"
        wanted = tuple(once and needed for needed in ctx.needs_input_grad[:3])
        scale = hidden.new_ones((), dtype=torch.float32)
        # In fp16 the backward pass divides: the gradients of means may be too small for it before a loss is scaled up.
        early = reduction == "mean" and hidden.dtype != torch.float16
        if early:
            scale = scale / (target != ignore_index).sum().clamp(min=1)
        losses, *gradients = linear_cross_entropy_chunks(
            hidden, weight, bias, target, scale.expand(target.shape), *ctx.sizes, *wanted
        )
        if not once:
            ctx.save_for_backward(target, hidden, weight, bias)
            return losses
        loss, number = add_losses(losses, target, ignore_index, reduction == "mean")
        ctx.save_for_backward(number if reduction == "mean" and not early else None, *gradients)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dloss):
        first, *saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if ctx.reduction == "none":
            _, *gradients = linear_cross_entropy_chunks(*saved, first, dloss.contiguous(), *ctx.sizes, *wanted)
            scale = None
        else:
            # Where every row is ignored the gradients are 0 already.
            gradients, scale = saved, dloss if first is None else dloss / first.clamp(min=1)
        results = (
            _scaled(gradient, scale, dtype) if needed else None
            for gradient, dtype, needed in zip(gradients, ctx.dtypes, wanted, strict=True)
        )
        return *results, None, None, None, None


@register_impl("fused_linear_cross_entropy", "cutile")
def fused_linear_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    chunk_size: int = 4096,
    reduction: str = "mean",
) -> torch.Tensor:
    check_fused_linear_cross_entropy(hidden_states, weight, target, bias, chunk_size, reduction)
    if hidden_states.dtype not in FLOATS:
        check_floating("fused_linear_cross_entropy", hidden_states=hidden_states)
        raise UnsupportedError("hidden_states is not fp32, fp16 or bf16")
    hidden, rows = hidden_states.reshape(-1, weight.shape[1]), target.reshape(-1)
    if torch.is_grad_enabled() and (
        hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        loss = FusedLinearCrossEntropy.apply(hidden, weight, bias, rows, ignore_index, chunk_size, reduction)
    else:
        # Without gradients the scale is not used.
        scale = hidden.new_empty(rows.shape, dtype=torch.float32)
        losses, *_ = linear_cross_entropy_chunks(
            hidden, weight, bias, rows, scale, ignore_index, chunk_size, False, False, False
        )
        loss = losses if reduction == "none" else add_losses(losses, rows, ignore_index, reduction == "mean")[0]
    return loss.view(target.shape) if reduction == "none" else loss

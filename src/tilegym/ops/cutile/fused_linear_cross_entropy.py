"""Cross entropy of a linear layer's outputs, of which only those for a chunk of tokens exist at a time.

For each chunk: the logits, one GEMM; their losses; their gradient, written over them; and with it the gradient of
hidden states, a GEMM. The gradient of weight then takes one GEMM over all tokens for each slice of the vocabulary, so
that it is summed in fp32 and rounded once. The GEMMs are torch's; a bias is added where the logits are read, in fp32.
With the reduction "mean" or "sum" all of this happens in the forward pass, for an upstream gradient of 1: the backward
pass only scales. With "none" each row has an upstream gradient of its own, and the backward pass computes the logits
again.

Where the logits are, and in which slices weight's gradient is written, says ``linear_cross_entropy_plan``.
"""

import functools
import math

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.backend.in_place import may_run_again
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile import linear_cross_entropy_plan as plan
from tilegym.ops.cutile import pointwise
from tilegym.ops.cutile.cross_entropy import add_losses
from tilegym.ops.cutile.pointwise import indices
from tilegym.ops.cutile.softmax_joint import exp_of
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import INT32_MAX
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.fused_linear_cross_entropy import check_fused_linear_cross_entropy

MOST_PARTS = 128
# Of how many strips a tile is, whose loads do not wait for each other: where logits are summed, and where their
# gradient is written.
STRIPS, GRADIENT_STRIPS = 4, 8
# Tokens whose hidden states' gradient is summed at a time, in fp32, where the logits are in two pieces.
ROWS_SUMMED = 2048


def _logits(x, bias, rows, tokens, classes, BIASED: Bool):
    """The logits of ``classes`` from what is stored of them, at ``rows`` and ``tokens`` of ``x``."""
    value = ct.gather(x, (rows, tokens)).astype(ct.float32)
    return value + ct.gather(bias, classes).astype(ct.float32) if BIASED else value


def _base(top):
    # While all seen so far is -inf, differences to it would be NaN.
    return ct.where(top == -math.inf, 0.0, top)


@ct.kernel
def partial_sums_kernel(x, bias, partials, tiles, TILE_V: Int, TILE_T: Int, BIASED: Bool):
    """x: [V, T], logits without ``bias`` [V], tokens beside each other. partials: [2, P, T], the maximum and the sum of
    exp(logit - maximum) of each of P parts of the vocabulary, ``tiles`` * STRIPS * TILE_V classes.

    Each place of a strip has a maximum of its own: no threads wait for each other before the end.
    """
    part, tokens, classes = ct.bid(1), span(ct.bid(0), TILE_T)[None, :], x.shape[0]
    top = ct.full((TILE_V, TILE_T), -math.inf, ct.float32)
    sums = ct.zeros((TILE_V, TILE_T), ct.float32)
    for tile in range(part * tiles, ct.minimum((part + 1) * tiles, ct.cdiv(classes, STRIPS * TILE_V))):
        values, new_top = (), top
        for strip in ct.static_iter(range(STRIPS)):
            rows = span(tile * STRIPS + strip, TILE_V)[:, None]
            value = ct.where(rows < classes, _logits(x, bias, rows, tokens, rows, BIASED), -math.inf)
            values, new_top = (*values, value), ct.maximum(new_top, value)
        base = _base(new_top)
        sums = sums * exp_of(top - base, x.dtype)
        for strip in ct.static_iter(range(STRIPS)):
            sums = sums + exp_of(values[strip] - base, x.dtype)
        top = new_top
    largest = ct.max(top, axis=0, keepdims=True)
    ct.scatter(partials, (0, part, tokens), largest)
    total = ct.sum(sums * exp_of(top - _base(largest), x.dtype), axis=0, keepdims=True)
    ct.scatter(partials, (1, part, tokens), total)


@ct.kernel
def token_losses_kernel(
    x, rest, bias, partials, target, losses, lses, ignore_index, PARTS: Int, TILE_T: Int, BIASED: Bool, SPLIT: Bool
):
    """target, losses: [T]; lses: [2, T], the two terms of lse = max + log(sum(exp(x - max))), whose sum has fewer
    digits; PARTS: at least P. ``rest``: the logits of the classes behind those in ``x`` if SPLIT, else 0."""
    tokens, parts, classes = span(ct.bid(0), TILE_T)[None, :], span(0, PARTS)[:, None], x.shape[0]
    if SPLIT:
        classes = classes + rest.shape[0]
    tops = ct.where(parts < partials.shape[1], ct.gather(partials, (0, parts, tokens)), -math.inf)
    top = ct.max(tops, axis=0, keepdims=True)
    total = ct.sum(ct.gather(partials, (1, parts, tokens)) * exp_of(tops - top, x.dtype), axis=0, keepdims=True)
    label = ct.gather(target, tokens)
    is_class = (label == ignore_index) | ((label >= 0) & (label < classes))
    log_sum = ct.where(is_class, ct.log(total), math.nan)
    # Differences to the maximum first: lse - x[target] would cancel.
    logit = _logits(x, bias, label, tokens, label, BIASED)
    if SPLIT:
        logit = ct.where(label < x.shape[0], logit, _logits(rest, bias, label - x.shape[0], tokens, label, BIASED))
    loss = log_sum - (logit - top)
    ct.scatter(losses, tokens, ct.where(label == ignore_index, 0.0, loss))
    ct.scatter(lses, (0, tokens), top)
    ct.scatter(lses, (1, tokens), log_sum)


@ct.kernel
def logits_gradient_kernel(x, bias, target, lses, scale, first, ignore_index, TILE_V: Int, TILE_T: Int, BIASED: Bool):
    """Writes the gradient over x [V, T], the logits of classes from ``first`` on without the whole ``bias``, for
    upstream gradients scale [T]. A block takes GRADIENT_STRIPS * TILE_V classes."""
    across = ct.cdiv(x.shape[1], TILE_T)
    tokens, start = span(ct.bid(0) % across, TILE_T)[None, :], ct.bid(0) // across * GRADIENT_STRIPS
    values = ()
    for strip in ct.static_iter(range(GRADIENT_STRIPS)):
        rows = span(start + strip, TILE_V)[:, None]
        values = (*values, _logits(x, bias, rows, tokens, rows + first, BIASED))
    label, upstream = ct.gather(target, tokens), ct.gather(scale, tokens)
    top, log_sum = ct.gather(lses, (0, tokens)), ct.gather(lses, (1, tokens))
    for strip in ct.static_iter(range(GRADIENT_STRIPS)):
        rows = span(start + strip, TILE_V)[:, None]
        power = exp_of((values[strip] - top) - log_sum, x.dtype)
        grad = ct.where(rows + first == label, power - 1.0, power) * upstream
        ct.scatter(x, (rows, tokens), ct.where(label == ignore_index, 0.0, grad).astype(x.dtype))


@ct.kernel
def copy_kernel(x, out, TILE_V: Int, TILE_T: Int):
    """x and out: [V, T], rows at any distance. PyTorch copies such rows element by element: on an H200 2048 of 4096 in
    bf16 in 22 us, where this takes 19 for rows of 8192."""
    at = indices(x, TILE_V, TILE_T)
    ct.scatter(out, at, ct.gather(x, at))


@ct.kernel
def scale_kernel(x, factor, TILE_M: Int, TILE_N: Int):
    """x [M, N] times factor [1], in place. Where that is 1, as it is unless the loss is scaled, x is not read."""
    number, across = ct.gather(factor, 0), ct.cdiv(x.shape[1], TILE_N)
    tiles = ct.where(number == 1.0, 0, ct.cdiv(x.shape[0], TILE_M) * across)
    for tile in range(ct.bid(0), tiles, ct.num_blocks(0)):
        at = span(tile // across, TILE_M)[:, None], span(tile % across, TILE_N)[None, :]
        ct.scatter(x, at, (ct.gather(x, at).astype(ct.float32) * number).astype(x.dtype))


@functools.lru_cache(maxsize=1024)
def losses_plan(classes: int, tokens: int, device: int) -> tuple[tuple[int, int], int, int, int]:
    """(grid, tiles of a part, TILE_V, TILE_T) for logits [classes, tokens] on CUDA device ``device`` (-1: CPU).

    Measured on an H200 in bf16, in us (with one maximum for a tile's classes): 128256 classes of 4096 tokens 276 (699),
    of 512 tokens 51 (115). The gradient 510 and 70, with tiles of 32 classes 561 and 76.
    """
    tile_v, tile_t = tile_of(tokens)
    across, tiles = ct.cdiv(tokens, tile_t), ct.cdiv(classes, STRIPS * tile_v)
    parts = max(1, min(MOST_PARTS, tiles, 12 * sm_count(device) // across))
    each = ct.cdiv(tiles, parts)
    return (across, max(1, ct.cdiv(tiles, max(each, 1)))), each, tile_v, tile_t


def tile_of(tokens: int) -> tuple[int, int]:
    """(TILE_V, TILE_T) of a strip of logits of so many tokens."""
    tile_t = min(128, next_power_of_2(tokens))
    return 1024 // tile_t, tile_t


def _compute_losses(pieces, bias, target, losses, lses, ignore_index):
    """Writes losses [T] and lses [2, T] of one or two pieces of logits [V, >= T] without ``bias``."""
    width, device = pieces[0].shape[1], pieces[0].get_device()
    plans = [losses_plan(*logits.shape, device) for logits in pieces]
    partials = pieces[0].new_empty((2, sum(grid[1] for grid, *_ in plans), width), dtype=torch.float32)
    biased, first, part = bias is not None, 0, 0
    for logits, (grid, *tiles) in zip(pieces, plans, strict=True):
        mine = partials[:, part : part + grid[1]]
        launch(logits, grid, partial_sums_kernel, (logits, bias[first:] if biased else 0, mine, *tiles, biased))
        first, part = first + len(logits), part + grid[1]
    split = len(pieces) == 2
    arrays = (pieces[0], pieces[1] if split else 0, bias if biased else 0, partials, target, losses, lses)
    sizes = (next_power_of_2(partials.shape[1]), 32)
    launch(losses, (ct.cdiv(len(target), 32),), token_losses_kernel, (*arrays, ignore_index, *sizes, biased, split))


def _copy(x, out):
    strip, tile_t = tile_of(x.shape[1])
    tile_v = 4 * strip
    launch(x, (ct.cdiv(x.shape[0], tile_v) * ct.cdiv(x.shape[1], tile_t),), copy_kernel, (x, out, tile_v, tile_t))


def _to_gradient(logits, bias, target, lses, scale, first, ignore_index):
    """Writes over logits [V, >= T], of classes from ``first`` on and without ``bias``, their gradient."""
    tile_v, tile_t = tile_of(logits.shape[1])
    grid = (ct.cdiv(logits.shape[0], GRADIENT_STRIPS * tile_v) * ct.cdiv(logits.shape[1], tile_t),)
    arrays = (logits, 0 if bias is None else bias, target, lses, scale)
    launch(logits, grid, logits_gradient_kernel, (*arrays, first, ignore_index, tile_v, tile_t, bias is not None))


def _compute_logits(weight, hidden, out):
    """weight [V, H] @ hidden [T, H] transposed, into out [V, T].

    Without the bias: torch.addmm rounds to 16 bits before it adds that, and once more behind it.
    """
    torch.mm(weight, hidden.t(), out=out)


def _product(a, b, out, add=False):
    """a @ b into out, or added to it, which may have fp32 for products of 16 bits."""
    if out.dtype != a.dtype and not a.is_cuda:
        a, b = a.to(out.dtype), b.to(out.dtype)
    dtype = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if add:
        torch.addmm(out, a, b, **dtype, out=out)
    else:
        torch.mm(a, b, **dtype, out=out)


def _hidden_gradient(pieces, weight, out):
    """The gradients of logits [V, T], in one or two pieces, transposed, times weight [V, H] into out [T, H]."""
    if len(pieces) == 1:
        torch.mm(pieces[0].t(), weight, out=out)
        return
    held = len(pieces[0])
    for start in range(0, len(out), ROWS_SUMMED):
        rows = slice(start, start + ROWS_SUMMED)
        total = torch.empty_like(out[rows], dtype=torch.float32)
        _product(pieces[0][:, rows].t(), weight[:held], total)
        _product(pieces[1][:, rows].t(), weight[held:], total, add=True)
        out[rows].copy_(total)


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
    """Writes weight's gradient dw, of which a slice that is copied has ``classes``. The gradients of logits of the
    first tokens are ``stored``, [V, R], in one or two pieces, of which the first is in dw's memory; those of the others
    are computed."""
    tokens, (held, first) = len(target), stored[0].shape
    room = dw.shape[1] * dw.itemsize // hidden.itemsize
    slices = plan.slices(len(weight), held, stored[0].stride(0), room, classes, first == tokens)
    most = max((rows.stop - rows.start for rows, direct in slices if not direct), default=0)
    buffer = hidden.new_empty(most, plan.aligned(tokens))
    others, arrays = hidden[first:], (target[first:], lses[:, first:], scale[first:])
    parts = {}  # of the buffer, by their number of classes: the host makes few, not some for each slice
    for rows, direct in slices:
        x = stored[0][rows] if rows.start < held else stored[1][rows.start - held : rows.stop - held]
        if not direct:
            count = rows.stop - rows.start
            if count not in parts:
                part = buffer[:count]
                parts[count] = part[:, :tokens], part[:, :first], part[:, first:tokens], part[:, first:]
            part, copied, computed, wide = parts[count]
            _copy(x, copied)
            if first < tokens:
                _compute_logits(weight[rows], others, computed)
                _to_gradient(wide, bias, *arrays, rows.start, ignore_index)
            x = part
        _product(x, hidden, dw[rows])


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
    inside = dw.numel() > 0 and (tokens > chunk_size or tokens * vocabulary > plan.SLICE_ELEMENTS)
    if inside:
        memory = dw.view(-1).view(hidden.dtype)
        room = memory.numel() // vocabulary
        rows, width = plan.rows_stored(tokens, vocabulary, room, chunk_size)
        held = plan.classes_held(vocabulary, room, width)
        buffers = [memory[: held * width].view(held, width)]
        if held < vocabulary:
            buffers.append(hidden.new_empty(vocabulary - held, width))
    else:
        rows = min(tokens, plan.rows_of_chunk(vocabulary, chunk_size))
        held, buffers = vocabulary, [hidden.new_empty(vocabulary, plan.aligned(rows))]
    pieces = (slice(0, held), slice(held, vocabulary))[: len(buffers)]
    # The operands have one dtype already; autocast would give the products another than their outputs'.
    with torch.autocast(hidden.device.type, enabled=False):
        # The first tokens come last: theirs are the gradients that stay.
        for start in (*range(rows, tokens, rows), 0):
            chunk = slice(start, min(start + rows, tokens))
            x, labels = hidden[chunk], target[chunk]
            wide = [buffer[:, : plan.aligned(len(x))] for buffer in buffers]
            logits = [buffer[:, : len(x)] for buffer in buffers]
            for classes, piece in zip(pieces, logits, strict=True):
                _compute_logits(weight[classes], x, piece)
            _compute_losses(wide, bias, labels, losses[chunk], lses[:, chunk], ignore_index)
            if dhidden or dbias or (dweight and start == 0):
                for classes, piece in zip(pieces, wide, strict=True):
                    _to_gradient(piece, bias, labels, lses[:, chunk], scale[chunk], classes.start, ignore_index)
            if dhidden:
                _hidden_gradient(logits, weight, dh[chunk])
            if dbias:
                for classes, piece in zip(pieces, logits, strict=True):
                    db[classes] += piece.sum(1, dtype=torch.float32)
        if inside:
            most = plan.classes_of_slice(tokens, vocabulary, chunk_size)
            _write_slices(logits, hidden, weight, bias, target, lses, scale, ignore_index, most, dw)
        elif dw.numel():
            _product(logits[0], hidden, dw)
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


class FusedLinearCrossEntropy(Function):
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
    @once_differentiable
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
    if not -INT32_MAX <= ignore_index <= INT32_MAX:
        raise UnsupportedError("ignore_index does not fit 32 bits")
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

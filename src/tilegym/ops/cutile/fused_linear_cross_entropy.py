"""Cross entropy of a linear layer's outputs, of which only a chunk of rows exists at a time.

For each chunk: the logits, one GEMM; their losses; their gradient, written over them; and with it the gradients of
hidden states and weight, two GEMMs. The GEMMs are torch's. With the reduction "mean" or "sum" all of this happens in
the forward pass, for an upstream gradient of 1: the backward pass only scales. With "none" each row has an upstream
gradient of its own, and the backward pass computes the logits again.

What is held beside the gradients is one chunk's logits. The gradient of weight is summed over the chunks in weight's
own dtype, a GEMM adding to what there is: then every chunk rounds the sum so far. Sums over n chunks that grow as a
random walk does are off by sqrt((n + 1) / 2) times what one rounding is off, 1.6 times with MOST_ROUNDED of them.
Where there are more, and in fp16, whose range sums may leave, they are added in fp32, which takes twice the memory.
"""

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile import pointwise
from tilegym.ops.cutile.cross_entropy import add_losses
from tilegym.ops.cutile.cross_entropy import cross_entropy_forward
from tilegym.ops.cutile.cross_entropy import launch_backward
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.fused_linear_cross_entropy import check_fused_linear_cross_entropy

NO_OPTIONS = (0.0, 0.0, 0.0)  # softcap, label smoothing, z-loss
MOST_ROUNDED = 4
PARTS = 8  # of a product that is added in fp32
# Shorter chunks leave a GPU's multiprocessors idle (hidden states' gradient, 1024x4096, is 128 tiles of 128x256); so
# many elements of logits are little beside a large model's other tensors.
FEWEST_ROWS, FEW_ELEMENTS = 1024, 2**26


@ct.kernel
def scale_kernel(x, factor, TILE_M: Int, TILE_N: Int):
    """x [M, N] times factor [1], in place. Where that is 1, as it is unless the loss is scaled, x is not read."""
    number, across = ct.gather(factor, 0), ct.cdiv(x.shape[1], TILE_N)
    tiles = ct.where(number == 1.0, 0, ct.cdiv(x.shape[0], TILE_M) * across)
    for tile in range(ct.bid(0), tiles, ct.num_blocks(0)):
        at = span(tile // across, TILE_M)[:, None], span(tile % across, TILE_N)[None, :]
        ct.scatter(x, at, (ct.gather(x, at).astype(ct.float32) * number).astype(x.dtype))


def rows_of_chunk(rows: int, vocabulary: int, chunk_size: int) -> int:
    """How many of ``rows`` tokens have logits at a time: few, but not so few that the GEMMs or the sums suffer."""
    few = -(-rows // MOST_ROUNDED)
    return min(chunk_size, max(FEWEST_ROWS, FEW_ELEMENTS // max(vocabulary, 1), -(-few // 128) * 128))


def _gradients(hidden, weight, dhidden, dweight, dbias, rounded=True):
    """Gradients to be written: of hidden and weight in their dtype, but of weight in fp32 for fp16 and unless
    ``rounded``; that of bias zeros in fp32."""
    dtype = weight.dtype if rounded and weight.dtype != torch.float16 else torch.float32
    return (
        torch.empty_like(hidden, memory_format=torch.contiguous_format) if dhidden else hidden.new_empty(0),
        weight.new_empty(weight.shape if dweight else 0, dtype=dtype),
        weight.new_zeros(weight.shape[0] if dbias else 0, dtype=torch.float32),
    )


def _add_product(total, a, b, first):
    """total [V, H] + a [M, V] transposed @ b [M, H] into total, which is empty before the first."""
    if total.dtype == a.dtype:
        total.addmm_(a.t(), b, beta=0 if first else 1)
        return
    if first:
        total.zero_()
    # In parts, so that the product in a's dtype is small.
    size = max(1, -(-a.shape[1] // PARTS))
    for part, columns in zip(total.split(size), a.split(size, dim=1), strict=True):
        part += columns.t() @ b


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
    losses = torch.empty(target.shape, dtype=torch.float32, device=target.device)
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    rows = rows_of_chunk(tokens, vocabulary, chunk_size)
    dh, dw, db = _gradients(hidden, weight, dhidden, dweight, dbias, tokens <= rows * MOST_ROUNDED)
    if tokens == 0:
        dw.zero_()
    buffer = hidden.new_empty(min(rows, tokens), vocabulary)
    # The operands have one dtype already; autocast would give the products another than their outputs'.
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, tokens, rows):
            chunk = slice(start, start + rows)
            x, labels = hidden[chunk], target[chunk]
            logits = buffer[: x.shape[0]]
            if bias is None:
                torch.mm(x, weight.t(), out=logits)
            else:
                torch.addmm(bias, x, weight.t(), out=logits)
            losses[chunk], lse = cross_entropy_forward(logits, labels, ignore_index, *NO_OPTIONS)
            if not (dhidden or dweight or dbias):
                continue
            launch_backward(scale[chunk], logits, labels, lse, None, ignore_index, *NO_OPTIONS)
            if dhidden:
                torch.mm(logits, weight, out=dh[chunk])
            if dweight:
                _add_product(dw, logits, x, start == 0)
            if dbias:
                db += logits.sum(0, dtype=torch.float32)
    if dw.dtype != torch.float32 or weight.dtype == torch.float16:
        return losses, dh, dw, db
    buffer = logits = None  # goes before the copy comes
    return losses, dh, dw.to(weight.dtype), db


def _may_run_again() -> bool:
    """Whether the graph that now runs backward may do so again, and what it saved has to stay as it is."""
    return torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()


def _scaled(gradient: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """gradient * scale in ``dtype``, computed in fp32 and rounded once: in place of what is saved, where it may be."""
    if scale is None:
        return gradient.to(dtype)
    if gradient.dtype != dtype or gradient.dim() != 2 or _may_run_again():
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

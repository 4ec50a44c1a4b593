"""Cross entropy of a linear layer's outputs, of which only a chunk of rows exists at a time.

For each chunk: the logits, one GEMM; their losses; their gradient, written over them; and with it the gradients of
hidden states and weight, two GEMMs. The GEMMs are torch's. With the reduction "mean" or "sum" all of this happens in
the forward pass, for an upstream gradient of 1: the backward pass only scales. With "none" each row has an upstream
gradient of its own, and the backward pass computes the logits again.
"""

import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.cross_entropy import add_losses
from tilegym.ops.cutile.cross_entropy import cross_entropy_forward
from tilegym.ops.cutile.cross_entropy import launch_backward
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.fused_linear_cross_entropy import check_fused_linear_cross_entropy

NO_OPTIONS = (0.0, 0.0, 0.0)  # softcap, label smoothing, z-loss


def _gradients(hidden, weight, dhidden, dweight, dbias):
    """Empty gradients: that of hidden in its dtype, the others, which are sums over chunks, in fp32."""
    return (
        torch.empty_like(hidden, memory_format=torch.contiguous_format) if dhidden else hidden.new_empty(0),
        weight.new_zeros(weight.shape if dweight else 0, dtype=torch.float32),
        weight.new_zeros(weight.shape[0] if dbias else 0, dtype=torch.float32),
    )


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
    dh, dw, db = _gradients(hidden, weight, dhidden, dweight, dbias)
    # The operands have one dtype already; autocast would give the products another than their outputs'.
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, hidden.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            logits = torch.nn.functional.linear(hidden[rows], weight, bias)
            losses[rows], lse = cross_entropy_forward(logits, target[rows], ignore_index, *NO_OPTIONS)
            if not (dhidden or dweight or dbias):
                continue
            launch_backward(scale[rows], logits, target[rows], lse, None, ignore_index, *NO_OPTIONS)
            if dhidden:
                torch.mm(logits, weight, out=dh[rows])
            if dweight:
                dw += logits.t() @ hidden[rows]
            if dbias:
                db += logits.sum(0, dtype=torch.float32)
    return losses, dh, dw, db


def _scaled(gradient: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """gradient * scale in ``dtype``, computed in fp32 and rounded once, without a copy in fp32."""
    if scale is None:
        return gradient.to(dtype)
    return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))


class FusedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, target, ignore_index, chunk_size, reduction):
        ctx.sizes, ctx.reduction = (ignore_index, chunk_size), reduction
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (hidden, weight, bias))
        once = reduction != "none"
        wanted = tuple(once and needed for needed in ctx.needs_input_grad[:3])
        ones = hidden.new_ones((), dtype=torch.float32).expand(target.shape)
        losses, *gradients = linear_cross_entropy_chunks(hidden, weight, bias, target, ones, *ctx.sizes, *wanted)
        if not once:
            ctx.save_for_backward(target, hidden, weight, bias)
            return losses
        loss, number = add_losses(losses, target, ignore_index, reduction == "mean")
        ctx.save_for_backward(number, *gradients)
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
            gradients, scale = saved, dloss
            if ctx.reduction == "mean":
                # Where every row is ignored the gradients are 0 already.
                scale = dloss / first.clamp(min=1)
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

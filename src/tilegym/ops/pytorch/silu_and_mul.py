"""The gate of a SwiGLU MLP on one packed tensor, in PyTorch."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import check_floating


def check_silu_and_mul(input: torch.Tensor, out: torch.Tensor | None) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    if input.dim() == 0 or input.shape[-1] % 2:
        raise ValueError(f"silu_and_mul: input has shape {tuple(input.shape)}, its last dimension must be even")
    if out is not None:
        shape = (*input.shape[:-1], input.shape[-1] // 2)
        if out.shape != shape:
            raise ValueError(f"silu_and_mul: out has shape {tuple(out.shape)}, it must be {shape}")
        if out.dtype != input.dtype:
            raise TypeError(f"silu_and_mul: out is {out.dtype}, input is {input.dtype}; they must be the same")


@register_impl("silu_and_mul", "pytorch")
def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    check_silu_and_mul(input, out)
    check_floating("silu_and_mul", input=input)
    gate, up = input.chunk(2, dim=-1)
    if out is None:
        return torch.nn.functional.silu(gate) * up
    with torch.no_grad():
        return torch.mul(torch.nn.functional.silu(gate), up, out=out)

"""A sigmoid gate in PyTorch, as the Hugging Face models compute it."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.checks import check_same_dtype


def check_sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    if gate.shape != x.shape and (gate.shape[:-1] != x.shape[:-1] or gate.shape[-1:] != (1,)):
        raise ValueError(
            f"sigmoid_mul: gate has shape {tuple(gate.shape)}, x has {tuple(x.shape)}; it must be x's, "
            "with a last dimension of 1 perhaps"
        )
    if gate.dtype != x.dtype:
        check_same_dtype("sigmoid_mul", x=x, gate=gate)


@register_impl("sigmoid_mul", "pytorch")
def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    check_sigmoid_mul(x, gate)
    check_floating("sigmoid_mul", x=x)
    return x * torch.sigmoid(gate)

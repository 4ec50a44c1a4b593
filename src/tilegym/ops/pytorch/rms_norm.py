"""RMS normalisation in PyTorch, cast by cast as the Hugging Face models compute it."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import CASTINGS
from tilegym.ops.pytorch.checks import check_floating
from tilegym.ops.pytorch.checks import check_option

MODES = (None, "static_persistent", "multi_wave_reload", "multi_wave_cached")


def check_rms_norm(
    input: torch.Tensor,
    normalized_shape: int | tuple[int, ...],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mode: str | None,
    casting: str,
) -> None:
    """Raises ValueError for arguments that no backend accepts."""
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if len(shape) != 1 or input.shape[-1:] != shape:
        raise ValueError(f"rms_norm: normalized_shape is {shape}, input's last dimension is {tuple(input.shape[-1:])}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"rms_norm: {name} has shape {tuple(tensor.shape)}, normalized_shape is {shape}")
    if mode not in MODES:
        check_option("rms_norm", "mode", mode, MODES)
    if casting not in CASTINGS:
        check_option("rms_norm", "casting", casting, CASTINGS)


@register_impl("rms_norm", "pytorch")
def rms_norm(
    input: torch.Tensor,
    normalized_shape: int | tuple[int, ...],
    weight: torch.Tensor | None,
    eps: float,
    bias: torch.Tensor | None = None,
    mode: str | None = None,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor:
    check_rms_norm(input, normalized_shape, weight, bias, mode, casting)
    check_floating("rms_norm", input=input)
    compute = torch.float64 if input.dtype == torch.float64 else torch.float32
    x = input.to(compute)
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if casting == "llama":
        y = y.to(input.dtype)
        if offset == 0.0 and bias is None and weight is not None and weight.dtype == input.dtype:
            return weight * y  # the model's own expression: one rounding, as below, in fewer steps
        y = y.to(compute)
    if weight is not None:
        y = y * (weight.to(compute) + offset)
    elif offset:
        y = y * (1.0 + offset)
    if bias is not None:
        y = y + bias.to(compute)
    return y.to(input.dtype)

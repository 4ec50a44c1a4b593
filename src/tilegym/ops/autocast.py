"""What ``torch.autocast`` asks of ops that it does not know."""

import torch
from torch.compiler import is_compiling


def is_autocast(x: torch.Tensor) -> bool:
    """Whether ``torch.autocast`` is on where ``x`` is. Which device that is takes the host longest to say."""
    if not is_compiling() and not torch._C._is_any_autocast_enabled():
        return False
    kind = x.device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def as_autocast_wants(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The operands of an attention in the dtype that it has under ``torch.autocast``; as they are where it is off.

    Autocast knows PyTorch's functions only. Beside linears that it casts, a norm or a rotation can give q and k in fp32
    while v is in bf16.
    """
    dtype = tensors[0].dtype
    mixed = dtype is torch.float32
    for t in tensors:
        mixed = mixed or t.dtype is not dtype
    if not mixed:
        return tensors
    if not is_autocast(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(t if t.dtype is torch.float64 else t.to(dtype) for t in tensors)

"""What ``torch.autocast`` asks of ops that it does not know."""

import torch


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
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t.dtype is torch.float64 else t.to(dtype) for t in tensors)

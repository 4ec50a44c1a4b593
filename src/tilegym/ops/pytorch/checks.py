"""Checks of arguments that many ops share."""

import torch

from tilegym.backend.wrapped import unreadable

CASTINGS = ("llama", "gemma")


def check_floating(op: str, **tensors: torch.Tensor | None) -> None:
    """Raises TypeError, naming op and argument, for a tensor that is not of floating point; None is passed over."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"{op}: {name} is {tensor.dtype}, it must be floating point")


def check_same_dtype(op: str, **tensors: torch.Tensor | None) -> None:
    """Raises TypeError, naming op and arguments, unless all tensors have the first one's dtype; None is passed over."""
    (first, of_first), *others = tensors.items()
    for name, tensor in others:
        if tensor is not None and tensor.dtype != of_first.dtype:
            raise TypeError(f"{op}: {first} is {of_first.dtype}, {name} is {tensor.dtype}; they must be the same")


def check_option(op: str, name: str, value: object, allowed: tuple) -> None:
    """Raises ValueError, naming op and argument, for a value that is not among ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{op}: {name} is {value!r}, allowed are {', '.join(map(repr, allowed))}")


def wants_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether a call with ``tensors`` is one of training: gradients are on, and one of these asks for its own."""
    if not torch.is_grad_enabled():
        return False
    for t in tensors:
        if t is not None and t.requires_grad:
            return True
    return False


def can_be_read(t: torch.Tensor) -> bool:
    """Whether the host may look at the values of ``t``: it has some, and no CUDA graph is being captured, which would
    replay what they were."""
    if t.is_meta:
        return False
    return torch.compiler.is_compiling() or not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def can_decide(t: torch.Tensor) -> bool:
    """Whether the host may branch on the values of ``t``: they can be read, and are those of every later run."""
    return has_address(t) and can_be_read(t)


def has_address(t: torch.Tensor) -> bool:
    """Whether ``t`` is in memory, and where is known now."""
    if torch.compiler.is_compiling() or type(t) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return not t.is_meta and unreadable((t,)) is None

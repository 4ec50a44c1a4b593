"""Arguments of a call: copies that keep strides and shared memory, in fp64 too, and such that ask for gradients."""

from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import torch

# What autograd knows of an argument, and what else uses it.
GRAPHS = ("leaf", "leaf", "leaf", "computed", "computed", "views", "sine before", "sine after", "kept", "twice")


def mapped(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with ``function`` of each tensor in the tensor's place."""
    if isinstance(value, list):
        return [mapped(function, v) for v in value]
    return function(value) if isinstance(value, torch.Tensor) else value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors that ``value`` is or holds."""
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_in(v)]
    return [value] if isinstance(value, torch.Tensor) else []


def named_tensors(args: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Every tensor among ``args`` and its name."""
    return [
        (f"{name}[{i}]" if isinstance(value, list) else name, t)
        for name, value in args.items()
        for i, t in enumerate(tensors_in(value))
    ]


def memory(t: torch.Tensor) -> int:
    """Where the memory of ``t`` begins; 0 if it has none."""
    return t.untyped_storage().data_ptr()


def whole_memory(t: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """All of the memory that ``t`` is a part of, as one row, in its dtype or in ``dtype``."""
    storage, dtype = t.untyped_storage(), dtype or t.dtype
    return torch.empty(0, dtype=dtype, device=t.device).set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))


def memory_bytes(t: torch.Tensor) -> torch.Tensor:
    """The bytes of all of the memory that ``t`` is a part of."""
    return whole_memory(t, torch.uint8)


def own_bytes(t: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements of ``t``, copied."""
    return t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _once(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """``function``, which gives the same result for the same tensor."""
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the tensors, too: an id is that of one that lives

    def call(t: torch.Tensor) -> torch.Tensor:
        if id(t) not in done:
            done[id(t)] = t, function(t)
        return done[id(t)][1]

    return call


def fresh(args: dict[str, Any]) -> dict[str, Any]:
    """Copies with the same strides and offsets, which share memory where ``args`` do."""
    copies: dict[int, torch.UntypedStorage] = {}

    def copy(t: torch.Tensor) -> torch.Tensor:
        if memory(t) == 0:
            return t.detach().clone() if t.is_contiguous() else t.detach()
        if memory(t) not in copies:
            copies[memory(t)] = t.untyped_storage().clone()
        copied = torch.empty(0, dtype=t.dtype, device=t.device)
        return copied.set_(copies[memory(t)], t.storage_offset(), t.shape, t.stride())

    copy = _once(copy)
    return {name: mapped(copy, value) for name, value in args.items()}


def widened(args: dict[str, Any]) -> dict[str, Any]:
    """Copies in fp64, with the same strides and offsets, which share memory where ``args`` do."""
    wide: dict[int, torch.Tensor] = {}

    def widen(t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point():
            return t.clone()
        if memory(t) == 0 or t.element_size() == 1:
            return t.detach().double()
        if memory(t) not in wide:
            wide[memory(t)] = whole_memory(t).double()
        return torch.as_strided(wide[memory(t)], t.shape, t.stride(), t.storage_offset())

    widen = _once(widen)
    return {name: mapped(widen, value) for name, value in args.items()}


def asking(args: dict[str, Any], wanted: Iterable[str], graph: str) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """``args`` of which those in ``wanted`` ask for gradients, and the leaves that these arrive at.

    By ``graph`` they are leaves, results of leaves, or views of one result where they share memory.
    """
    leaves: list[torch.Tensor] = []
    results: dict[int, torch.Tensor] = {}

    def leaf(t: torch.Tensor) -> torch.Tensor:
        leaves.append(t.detach().requires_grad_())
        return leaves[-1]

    def ask(t: torch.Tensor) -> torch.Tensor:
        if graph in ("leaf", "twice"):
            return leaf(t)
        if graph != "views" or not t.numel():
            return leaf(t) * 1.0
        if memory(t) not in results:
            results[memory(t)] = leaf(whole_memory(t)) * 1.0
        return torch.as_strided(results[memory(t)], t.shape, t.stride(), t.storage_offset())

    ask = _once(ask)
    return {name: mapped(ask, value) if name in wanted else value for name, value in args.items()}, leaves


def described(args: dict[str, Any]) -> str:
    """What a call is, on one line: dtypes, shapes and layouts of tensors, and other arguments."""
    return ", ".join(f"{name}={_described(value)}" for name, value in args.items() if value is not None)


def _described(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_described, value)) + "]"
    if not isinstance(value, torch.Tensor):
        return repr(value).removeprefix("torch.")
    text = str(value.dtype).removeprefix("torch.") + str(list(value.shape))
    if not value.is_contiguous():
        text += f"/strides{list(value.stride())}"
    if value.storage_offset():
        text += f"+{value.storage_offset()}"
    if not value.dtype.is_floating_point and value.dtype != torch.bool and value.numel() <= 8:
        text += f"={value.tolist()}"
    return text

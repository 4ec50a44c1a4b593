"""What candidates are judged on: recorded calls, and made-up ones of many sizes, strides and values."""

import itertools
import json
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilegym.autokernel import tensors
from tilegym.autokernel.profile import Recording
from tilegym.inventory import Definition

SIZES = (1, 7, 17, 1023)
WORKING_DTYPES = ("float32", "float16", "bfloat16")
# How many elements all inputs of a made-up call have at most.
MAX_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 27}
_MAX_KEPT = 256 << 20  # bytes of one recorded call; larger ones are made up again, with the same shapes


@dataclass(frozen=True)
class Call:
    """Inputs of one call by name, in order, on the CPU, and what is particular about them."""

    name: str
    inputs: dict[str, Any]

    @property
    def elements(self) -> int:
        """How many elements all tensors have together."""
        return sum(v.numel() for v in self.inputs.values() if isinstance(v, torch.Tensor))

    def cast(self, device: torch.device, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Copies on ``device``, floating-point tensors in ``dtype`` if it is given."""
        found = {}
        for name, value in self.inputs.items():
            if isinstance(value, torch.Tensor):
                value = value.to(device, dtype if value.is_floating_point() and dtype else value.dtype, copy=True)
            found[name] = value
        return found


def save_recording(path: Path, definition: Definition, recording: Recording) -> None:
    """Writes the recorded inputs of a region to ``path`` and its calls to the JSON file beside it."""
    flats, calls = {}, []
    for index, (signature, values) in enumerate(recording.inputs.items()):
        named = dict(zip(definition.inputs, values, strict=True))
        size = sum(v.numel() * v.itemsize for v in values if isinstance(v, torch.Tensor))
        packed, described = tensors.pack(named)
        if size <= _MAX_KEPT:
            flats |= {f"{index}.{name}": flat for name, flat in packed.items()}
        calls.append({"calls": recording.calls[signature], "inputs": described, "kept": size <= _MAX_KEPT})
    tensors.write(path, flats)
    path.with_suffix(".json").write_text(json.dumps(calls))


def recorded(path: Path, generator: torch.Generator) -> list[tuple[Call, int]]:
    """The calls that :func:`save_recording` wrote, and how often each was made; contents not kept are made up."""
    flats, found = tensors.read(path), []
    for index, call in enumerate(json.loads(path.with_suffix(".json").read_text())):
        inputs = {}
        for name, described in call["inputs"].items():
            if not isinstance(described, list):
                inputs[name] = described
                continue
            layout = tensors.layout_of(described)
            if call["kept"]:
                inputs[name] = layout.view(flats[f"{index}.{name}"])
            else:
                inputs[name] = _random(layout.shape, tensors.torch_dtype(layout.dtype), generator)
        found.append((Call(f"recorded call {index}", inputs), call["calls"]))
    return found


def _random(shape: Any, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(tuple(shape), generator=generator) < 0.5
    if not dtype.is_floating_point:
        return torch.randint(0, 8, tuple(shape), generator=generator, dtype=dtype)
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def made(
    definition: Definition, sizes: dict[str, int], numbers: dict[str, Any], generator: torch.Generator
) -> dict[str, Any]:
    """Random inputs for given sizes of the variable axes."""
    sizes = definition.const_axes | sizes
    found = {}
    for name, spec in definition.inputs.items():
        if spec.shape is None:
            found[name] = numbers[name]
        else:
            found[name] = _random([sizes[a] for a in spec.shape], tensors.torch_dtype(spec.dtype), generator)
    return found


def sweep(definition: Definition, numbers: dict[str, Any], device: str, generator: torch.Generator) -> Iterator[Call]:
    """Calls of many sizes: each variable axis takes each of :data:`SIZES`, the others being small."""
    axes = definition.var_axes
    if not axes:
        yield Call("the only size", made(definition, {}, numbers, generator))
    for axis, size in itertools.product(axes, SIZES):
        for others in (1, 3):
            sizes = {a: size if a == axis else others for a in axes}
            if _elements(definition, sizes) <= MAX_ELEMENTS[device]:
                name = ", ".join(f"{a}={s}" for a, s in sizes.items())
                yield Call(name, made(definition, sizes, numbers, generator))
            if len(axes) == 1:
                break


def _elements(definition: Definition, sizes: dict[str, int]) -> int:
    """How many elements the tensors with a variable axis have; those of the weights are what they are."""
    variable, sizes, total = set(sizes), definition.const_axes | sizes, 0
    for spec in (*definition.inputs.values(), *definition.outputs.values()):
        if variable & set(spec.shape or ()):
            total += torch.Size([sizes[a] for a in spec.shape]).numel()
    return total


def small(definition: Definition, numbers: dict[str, Any], generator: torch.Generator, size: int = 3) -> Call:
    """A call with all variable axes small."""
    return Call(f"size {size}", made(definition, dict.fromkeys(definition.var_axes, size), numbers, generator))


def other_dtypes(definition: Definition, call: Call) -> Iterator[Call]:
    """The call in the other working dtypes: what has the Definition's main floating-point dtype gets another one."""
    floats = [s.dtype for s in definition.inputs.values() if s.shape is not None and "float" in s.dtype]
    for dtype in WORKING_DTYPES if floats and floats[0] in WORKING_DTYPES else ():
        if dtype != floats[0]:
            chosen = [name for name, spec in definition.inputs.items() if spec.dtype == floats[0] and spec.shape]
            inputs = {n: v.to(tensors.torch_dtype(dtype)) if n in chosen else v for n, v in call.inputs.items()}
            yield Call(f"{call.name}, {dtype}", inputs)


def strided(call: Call) -> Iterator[Call]:
    """The same values in memory that is laid out in another way: with gaps between rows, and dimensions swapped."""
    yield Call(f"{call.name}, rows apart", {n: _apart(v) for n, v in call.inputs.items()})
    if any(isinstance(v, torch.Tensor) and v.ndim > 1 for v in call.inputs.values()):
        yield Call(f"{call.name}, transposed in memory", {n: _swapped(v) for n, v in call.inputs.items()})


def _apart(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    wide = value.new_empty((*value.shape[:-1], value.shape[-1] + 3))
    wide[..., : value.shape[-1]] = value
    return wide[..., : value.shape[-1]]


def _swapped(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.ndim < 2:
        return value
    return value.transpose(-1, -2).contiguous().transpose(-1, -2)


def extreme(definition: Definition, call: Call, generator: torch.Generator) -> Iterator[Call]:
    """The same shapes with values at the edges: zeros, tiny, huge, infinities, NaN.

    They stand in the inputs that have a variable axis, since tiny weights would hide tiny data; without any, in all.
    """
    variable = set(definition.var_axes)
    data = {name for name, spec in definition.inputs.items() if variable & set(spec.shape or ())} or set(call.inputs)

    def special(value: float) -> Callable:
        return lambda v: v.masked_fill(torch.rand(v.shape, generator=generator) < 0.02, value)

    changes = {
        "zeros": torch.zeros_like,
        "negative zeros": lambda v: -torch.zeros_like(v),
        "tiny values": lambda v: v * torch.finfo(v.dtype).tiny,
        "small values": lambda v: v * 1e-7,
        "large values": lambda v: v * 1000,
        "huge values": lambda v: v.sign() * (torch.finfo(v.dtype).max / 4),
        "some infinities": special(float("inf")),
        "some negative infinities": special(-float("inf")),
        "some NaN": special(float("nan")),
    }
    for what, change in changes.items():
        inputs = {
            name: change(v) if name in data and isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for name, v in call.inputs.items()
        }
        yield Call(what, inputs)

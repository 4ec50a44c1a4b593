"""What candidates are judged on: recorded calls, and made-up ones of many sizes, strides and values."""

import itertools
import json
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilegym.autokernel import tensors
from tilegym.autokernel.profile import Recording
from tilegym.inventory import Definition
from tilegym.inventory import reference

SIZES = (1, 7, 17, 1023)
_DRAWN = ((10, 64), (65, 2000))  # from where to where sizes are drawn
WORKING_DTYPES = ("float32", "float16", "bfloat16")
# How many elements all inputs of a made-up call have at most.
MAX_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 24}
# Operators that add elements up.
_SUMS = frozenset(
    "sum mean var std var_mean norm linalg_vector_norm cumsum native_layer_norm _fused_rms_norm mm addmm bmm baddbmm "
    "addmv mv dot convolution".split()
)
_LARGE = 1 << 19  # elements: making up more for every call would take most of the time
_HELD_PRODUCT = torch.finfo(torch.float32).max ** 0.5 / 8  # whose square is far from overflowing
_MAX_KEPT = 256 << 20  # bytes of one recorded tensor; larger ones are made up again, with the same shapes


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
                value = value.to(device, copy=True)  # converted there: half as much to move, and faster
                value = value.to(dtype) if value.is_floating_point() and dtype else value
            found[name] = value
        return found


def save_recording(path: Path, definition: Definition, recording: Recording) -> None:
    """Writes the recorded inputs of a region to ``path`` and its calls to the JSON file beside it."""
    flats, calls, places, layouts = {}, [], {}, {}
    for index, (signature, values) in enumerate(recording.inputs.items()):
        inputs, contents = {}, {}
        for name, value in zip(definition.inputs, values, strict=True):
            if not isinstance(value, torch.Tensor):
                inputs[name] = value
                continue
            place = places.setdefault((name, id(value)), f"{index}.{name}")  # the same weights come with every call
            if place not in layouts:
                packed, described = tensors.pack({place: value})
                layouts |= described
                flats |= packed if value.nbytes <= _MAX_KEPT else {}
            inputs[name], contents[name] = layouts[place], place
        calls.append({"calls": recording.calls[signature], "inputs": inputs, "contents": contents})
    tensors.write(path, flats)
    path.with_suffix(".json").write_text(json.dumps(calls))


def recorded(path: Path, generator: torch.Generator) -> list[tuple[Call, int]]:
    """The calls that :func:`save_recording` wrote, and how often each was made; contents not kept are made up."""
    flats, values, found = tensors.read(path), {}, []
    for index, call in enumerate(json.loads(path.with_suffix(".json").read_text())):
        for name, place in call["contents"].items():
            if place not in values:
                layout = tensors.layout_of(call["inputs"][name])
                if place in flats:
                    values[place] = layout.view(flats[place])
                else:
                    values[place] = _random(layout.shape, tensors.torch_dtype(layout.dtype), generator)
        inputs = {n: values[call["contents"][n]] if n in call["contents"] else v for n, v in call["inputs"].items()}
        found.append((Call(f"recorded call {index}", inputs), call["calls"]))
    return found


def _random(shape: Any, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(tuple(shape), generator=generator) < 0.5
    if not dtype.is_floating_point:
        return torch.randint(0, 8, tuple(shape), generator=generator, dtype=dtype)
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def made(
    definition: Definition,
    sizes: dict[str, int],
    numbers: dict[str, Any],
    generator: torch.Generator,
    weights: dict[str, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Random inputs for given sizes of the variable axes.

    Large inputs without such an axis are taken from ``weights``, and put there when they are first made.
    """
    variable, sizes = set(sizes), definition.const_axes | sizes
    found = {}
    for name, spec in definition.inputs.items():
        if spec.shape is None:
            found[name] = numbers[name]
            continue
        shape = torch.Size([sizes[a] for a in spec.shape])
        lasting = weights is not None and variable and not variable & set(spec.shape) and shape.numel() > _LARGE
        if lasting and name in weights:
            found[name] = weights[name]
            continue
        found[name] = _random(shape, tensors.torch_dtype(spec.dtype), generator)
        if lasting:
            weights[name] = found[name]
    return found


def sweep(
    definition: Definition,
    numbers: dict[str, Any],
    device: str,
    generator: torch.Generator,
    weights: dict[str, torch.Tensor] | None = None,
) -> Iterator[Call]:
    """Calls of many sizes: each variable axis takes each of :data:`SIZES`, the others being small.

    Besides, sizes that nobody knows before, drawn for each axis from small and from large ones.
    """
    axes = definition.var_axes
    if not axes:
        yield Call("the only size", made(definition, {}, numbers, generator))
    for axis, size in itertools.product(axes, SIZES):
        for others in (1, 3):
            sizes = {a: size if a == axis else others for a in axes}
            if _elements(definition, sizes) <= MAX_ELEMENTS[device]:
                name = ", ".join(f"{a}={s}" for a, s in sizes.items())
                yield Call(name, made(definition, sizes, numbers, generator, weights))
            if len(axes) == 1:
                break
    for axis, (least, most) in itertools.product(axes, _DRAWN):
        sizes = {a: _drawn(2, 9, generator) for a in axes}
        while most > least and _elements(definition, sizes | {axis: most}) > MAX_ELEMENTS[device]:
            most //= 2
        sizes[axis] = _drawn(min(least, most), most, generator)
        name = ", ".join(f"{a}={s}" for a, s in sizes.items())
        yield Call(name, made(definition, sizes, numbers, generator, weights))


def _drawn(least: int, most: int, generator: torch.Generator) -> int:
    return int(torch.randint(least, most + 1, (), generator=generator))


def _elements(definition: Definition, sizes: dict[str, int]) -> int:
    """How many elements the tensors with a variable axis have; those of the weights are what they are."""
    variable, sizes, total = set(sizes), definition.const_axes | sizes, 0
    for spec in (*definition.inputs.values(), *definition.outputs.values()):
        if variable & set(spec.shape or ()):
            total += torch.Size([sizes[a] for a in spec.shape]).numel()
    return total


def small(
    definition: Definition,
    numbers: dict[str, Any],
    generator: torch.Generator,
    size: int = 3,
    weights: dict[str, torch.Tensor] | None = None,
) -> Call:
    """A call with all variable axes small."""
    sizes = dict.fromkeys(definition.var_axes, size)
    return Call(f"size {size}", made(definition, sizes, numbers, generator, weights))


def other_contents(definition: Definition, call: Call) -> Call:
    """The call with the contents of its data, and of small weights, the other way round."""
    variable = set(definition.var_axes)

    def turned(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        if not variable & set(definition.inputs[name].shape) and value.numel() > _LARGE:
            return value  # a large weight stays where it is
        repeated = 0 in value.stride()
        other = (
            torch.empty(value.shape, dtype=value.dtype)
            if repeated
            else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        )
        return other.copy_(value.flip(tuple(range(value.ndim))))

    return Call(f"{call.name}, other contents", {n: turned(n, v) for n, v in call.inputs.items()})


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


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def adds_up(definition: Definition, call: Call) -> bool:
    """Whether the reference adds up elements of its inputs, so that results may depend on the order."""
    run = reference.load(definition.reference, definition.name)
    with torch.no_grad(), _Names() as seen:
        run(*call.cast(torch.device("meta")).values())
    return bool(seen.names & _SUMS)


class _InfiniteSums(TorchDispatchMode):
    """Notes whether two infinite values in fp32 are added: compilers make one of two products and their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("add", "sub", "rsub"):
            values = [a for a in args if isinstance(a, torch.Tensor) and a.dtype == torch.float32]
            self.seen |= len(values) == 2 and bool((values[0].isinf() & values[1].isinf()).any())
        return func(*args, **(kwargs or {}))


def adds_overflows(definition: Definition, call: Call) -> bool:
    """Whether the reference adds products in fp32 that overflow: that is NaN or infinite, as they are fused or not."""
    run = reference.load(definition.reference, definition.name)
    with torch.no_grad(), _InfiniteSums() as sums:
        run(*call.cast(torch.device("cpu")).values())
    return sums.seen


def extreme(definition: Definition, call: Call, generator: torch.Generator) -> Iterator[Call]:
    """The same shapes with values at the edges: zeros, tiny, huge, infinities, NaN.

    They stand in the inputs that have a variable axis, since tiny weights would hide tiny data; without any, in all.
    Huge values that are added up stay so small that no sum overflows in fp32, whatever its order: an order that does is
    no more wrong than PyTorch's own. Nor do products that are added in fp32.
    """
    variable = set(definition.var_axes)
    data = {name for name, spec in definition.inputs.items() if variable & set(spec.shape or ())} or set(call.inputs)
    longest = max((max(v.shape, default=1) for v in call.inputs.values() if isinstance(v, torch.Tensor)), default=1)
    held = torch.finfo(torch.float32).max / (32 * longest) if adds_up(definition, call) else float("inf")

    def special(value: float) -> Callable:
        return lambda v: v.masked_fill(torch.rand(v.shape, generator=generator) < 0.02, value)

    changes = {
        "zeros": torch.zeros_like,
        "negative zeros": lambda v: -torch.zeros_like(v),
        "tiny values": lambda v: v * torch.finfo(v.dtype).tiny,
        "small values": lambda v: v * 1e-7,
        "large values": lambda v: v * 1000,
        "huge values": lambda v: v.sign() * min(torch.finfo(v.dtype).max / 4, held),
        "some infinities": special(float("inf")),
        "some negative infinities": special(-float("inf")),
        "some NaN": special(float("nan")),
    }

    def changed(what: str, change: Callable) -> Call:
        inputs = {
            name: change(v) if name in data and isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for name, v in call.inputs.items()
        }
        return Call(what, inputs)

    for what, change in changes.items():
        made = changed(what, change)
        if what == "huge values" and adds_overflows(definition, made):
            made = changed(what, lambda v: v.sign() * min(torch.finfo(v.dtype).max / 4, _HELD_PRODUCT))
        yield made

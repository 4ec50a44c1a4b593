"""Traces a region with torch.export and reads its graph into the intermediate representation."""

import builtins
import contextlib
import inspect
import re
import types
import warnings
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch
from torch.export import Dim
from torch.export import ExportedProgram

from tilegym.autokernel.generate.errors import Unsupported
from tilegym.autokernel.generate.graph import INTEGERS
from tilegym.autokernel.generate.graph import Region
from tilegym.autokernel.generate.graph import structure
from tilegym.autokernel.generate.parts import read_program

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class _Call(torch.nn.Module):
    """A function of tensors and numbers as a module, which is what torch.export takes."""

    def __init__(self, function: Callable):
        super().__init__()
        if isinstance(function, types.FunctionType):
            # The tracer notes source lines, which names are taken from, for functions of this name.
            code, defaults = function.__code__.replace(co_name="forward"), function.__kwdefaults__
            function = types.FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)
            function.__kwdefaults__ = defaults
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def as_function(region: Callable | torch.nn.Module, inputs: Sequence[Any]) -> tuple[Callable, list[str], list[Any]]:
    """``region`` as a function of all that it works on, the names of its parameters, and their values.

    A module's own parameters and buffers follow its inputs.
    """
    target = region.forward if isinstance(region, torch.nn.Module) else region
    names = list(inspect.signature(target).bind(*inputs).arguments)
    if len(names) != len(inputs):  # *args
        names = [f"x{i}" for i in range(len(inputs))]
    names = [n if not hasattr(builtins, n) else "x" if "x" not in names else f"{n}_" for n in names]
    if not isinstance(region, torch.nn.Module):
        return region, names, list(inputs)
    state = dict(region.named_parameters()) | dict(region.named_buffers())

    def call(*args: Any) -> Any:
        own = dict(zip(state, args[len(inputs) :], strict=True))
        return torch.func.functional_call(region, own, args[: len(inputs)])

    flat = [re.sub(r"\W", "_", n) for n in state]
    taken = [n if n not in names else f"module_{n}" for n in flat]
    return call, names + taken, [*inputs, *(t.detach() for t in state.values())]


def export(function: Callable, inputs: Sequence[Any], dynamic_columns: bool = True) -> ExportedProgram:
    """The graph of ``function`` for any number of rows, and, if asked, of columns.

    Integers have none: they are positions, mostly, one a row.

    Raises:
        Unsupported: torch.export cannot trace it.
    """

    def dynamic(x: Any) -> dict[int, Any] | None:
        if not isinstance(x, torch.Tensor):
            return None
        dims = x.dim() if dynamic_columns or x.dtype in INTEGERS else x.dim() - 1
        return {i: Dim.AUTO if x.shape[i] != 1 else Dim.STATIC for i in range(dims)}

    shapes = (tuple(dynamic(x) for x in inputs),)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.export.export(_Call(function), tuple(inputs), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch.export raises many kinds
        raise Unsupported(f"torch.export: {str(error).strip().splitlines()[0][:200]}") from error


def _working_dtype(inputs: Sequence[Any]) -> torch.dtype:
    """The narrowest floating dtype of the inputs: activations have it, statistics may be wider."""
    found = {x.dtype for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()}
    narrow = found & {torch.bfloat16, torch.float16}
    if not found <= set(DTYPES) or len(narrow) > 1:
        raise Unsupported(f"inputs of dtypes {sorted(map(str, found))}")
    return narrow.pop() if narrow else torch.float32


def _cast(inputs: Sequence[Any], old: torch.dtype, new: torch.dtype) -> list[Any]:
    # Each a tensor of its own: torch.export takes two arguments for one if the same tensor is the example of both.
    tensors = (x.detach() if isinstance(x, torch.Tensor) else x for x in inputs)
    return [x.to(new) if isinstance(x, torch.Tensor) and x.dtype == old else x for x in tensors]


def _read(
    function: Callable, names: list[str], inputs: Sequence[Any], dtype: torch.dtype, name: str, modes: list[bool]
) -> Region:
    """The region, for every number of columns if it does not depend on it, else for the inputs'.

    ``modes``: whether to try the former, and whether the latter; where it depends on it, it does so in every dtype.
    """
    reason = None
    for dynamic_columns in tuple(modes):
        try:
            region = read_program(export(function, inputs, dynamic_columns), names, inputs, dtype, name)
        except Unsupported as error:
            reason = error
        else:
            modes[:] = [m for m in modes if m <= dynamic_columns]
            return region
    raise reason


def trace(region: Callable | torch.nn.Module, inputs: Sequence[Any], name: str) -> Region:
    """Reads ``region``, called with ``inputs`` as examples.

    It is traced in each working dtype; ``dtypes`` are those in which the same is computed as in the inputs'. From fp32
    alone the places where a narrower dtype rounds cannot be seen, so that bf16 is what is read.

    Raises:
        Unsupported: it is none that kernels are generated for.
    """
    function, names, values = as_function(region, inputs)
    given = _working_dtype(values)
    read: dict[torch.dtype, Region] = {}
    modes = [True, False]
    for dtype in DTYPES:
        # What cannot be traced in another dtype is not offered in it.
        with contextlib.nullcontext() if dtype == given else contextlib.suppress(Unsupported):
            read[dtype] = _read(function, names, _cast(values, given, dtype), dtype, name, modes)
    same = [d for d, r in read.items() if structure(r) == structure(read[given])]
    result = read[torch.bfloat16] if given == torch.float32 and torch.bfloat16 in same else read[given]
    result.dtypes = tuple(same)
    for part in result.different_parts or [result]:
        part.dtypes = result.dtypes
        if not part.linears and not any(v.dtype == part.dtype for v in (*part.inputs.values(), *part.outputs)):
            # Nothing is in the working dtype: a model's positions and frequencies are not.
            part.dtype, part.dtypes = torch.float32, (torch.float32,)
    return result

"""Writes out, as source text, the functions that run in every call of an op: its look at the arguments, its repetition.

As ``dataclasses`` write out their methods: to go over arguments, allocations and launches in loops takes the host
longer than all else that a repeated call does besides its launches.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import torch

from tilegym.backend import tensor_guards


def call_of(signature: inspect.Signature, name: str, names: dict[str, Any], of_gradients: bool = False) -> Callable:
    """A function with this signature that repeats a call's recording if there is one that still holds.

    ``names``: what it refers to. ``__module__.active``: none is repeated then. ``__known__``: from kind to
    ``__Recording__`` or else; what tells a call's kind is hashable. ``__latest__``: a dict, by a call's arguments that
    are no tensors, of the recordings used last: PyTorch tells in a fifth of the time whether tensors are like those.
    ``__still__``: whether its answers hold. ``__otherwise__``: serves all other calls, from kind (None if gradients are
    wanted or the arguments are not the op's), tensors, args and kwargs. With ``of_gradients`` calls that want gradients
    have a kind too, of which this is the last part.

    Tensors that no annotation announces become part of the kind.
    """
    # No parameters' names.
    names = names | {
        "__latest_of__": names["__latest__"].get,
        "__last__": [None],
        "__gradients__": torch.is_grad_enabled,
        "__transforms__": torch._C._are_functorch_transforms_active,
        "__several__": _several_tensors,
        "__errors__": (TypeError, AttributeError, RuntimeError),  # of arguments that the op does not take
    }
    parameters, gradients, kind, tensors, args, kwargs, keywords = [], [], [], [], [], [], []
    others, looked_at, lists = [], [], False
    device = "device"  # the first tensor's; for the others its index tells enough, and is faster to get
    for name_, parameter in signature.parameters.items():
        names[f"default_{name_}"] = parameter.default
        default = "" if parameter.default is parameter.empty else f"=default_{name_}"
        if parameter.kind is parameter.KEYWORD_ONLY:
            parameters += [] if kwargs else ["*"]
            kwargs.append(f"{name_!r}: {name_}")
            keywords.append(name_)
        else:
            args.append(name_)
        parameters.append(f"{name_}{default}")
        among = _alternatives(parameter)
        given = "" if type(None) not in among else f"None if {name_} is None else "
        if torch.Tensor in among:
            of = f"{name_}.__class__, {name_}.dtype, {name_}.shape, {name_}.{device}"
            of += f", {name_}.is_contiguous() or {name_}.stride(), {name_}.is_neg()"
            kind.append(f"{given}({of})" if given else of)
            names[f"nothing_{name_}"] = _NOTHING[len(tensors) % len(_NOTHING)]
            looked_at.append(f"nothing_{name_} if {name_} is None else {name_}" if given else name_)
            tensors.append(name_)
            gradients.append(f"({name_} is not None and {name_}.requires_grad)" if given else f"{name_}.requires_grad")
            device = device if given else "get_device()"
        elif "torch.Tensor" in str(parameter.annotation):
            lists = True
            kind.append(f"{given}__several__({name_})")
            tensors.append(f"*({name_} or ())")
            gradients.append(f"True in [__t__ is not None and __t__.requires_grad for __t__ in {name_} or ()]")
        else:
            kind.append(name_)
            others.append(name_)
    # Calls of several kinds in turn would look for nothing: a recording is kept when it is used twice in a row.
    look, keep = (_LOOK, _KEEP) if not lists else ("", "")
    look = look.format(others=several(others), alike=", ".join(looked_at))
    wanted = f"__gradients__() and ({' or '.join(gradients) or 'False'})"
    suited = "__transforms__()" if of_gradients else f"(__transforms__() or {wanted})"
    kind += [wanted] if of_gradients else []
    source = f"""\
def {name}({", ".join(parameters)}):
    __kind__ = __found__ = None
    try:
        if __module__.active is None:
            {look}
            if __found__ is None and not {suited}:
                __kind__ = {several(kind)}
                __found__ = __known__(__kind__)
    except __errors__:
        __kind__ = __found__ = None
    if __found__.__class__ is __Recording__:
        __repeat__, __answers__, __alike__, __wanted__ = __found__
        if not __answers__ or __still__(__answers__):
            {keep}
            return __repeat__({", ".join(tensors)})
        if __kind__ is None:
            __latest__.clear()
            return __again__({", ".join([*args, *(f"{n}={n}" for n in keywords)])})
    __tensors__ = () if __kind__ is None else {several(tensors)}
    return __otherwise__(__kind__, __tensors__, {several(args)}, {{{", ".join(kwargs)}}})
"""
    exec(source, names)
    names["__again__"] = names[name]
    return names[name]


_LOOK = """\
__others__ = {others}
            __found__ = __latest_of__(__others__)
            if __found__ is not None:
                __repeat__, __answers__, __alike__, __wanted__ = __found__
                if not __alike__({alike}) or (__wanted__ and __gradients__()):
                    __found__ = None"""
# Another thread may forget all recordings meanwhile, what is known before the latest ones.
_KEEP = """\
if __kind__ is not None and __alike__ is not None:
                if __last__[0] is __found__:
                    __latest__[__others__] = __found__
                    if __known__(__kind__) is not __found__:
                        __latest__.clear()
                __last__[0] = __found__"""


def _alternatives(parameter: inspect.Parameter) -> tuple:
    """The types that a parameter takes."""
    union = typing.get_origin(parameter.annotation) in (types.UnionType, typing.Union)
    return typing.get_args(parameter.annotation) if union else (parameter.annotation,)


def of_tensors(function: Callable, signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> Callable:
    """``function`` of a call's tensors alone, None for those not given, with its other arguments."""
    tensors = [name for name, parameter in signature.parameters.items() if torch.Tensor in _alternatives(parameter)]
    others = {k: v for k, v in signature.bind(*args, **kwargs).arguments.items() if k not in tensors}
    first = list(signature.parameters.values())[: len(tensors)]
    if [p.name for p in first if p.kind is p.POSITIONAL_OR_KEYWORD] == tensors:
        return functools.partial(function, **others)
    return lambda *values: function(**dict(zip(tensors, values, strict=True)), **others)


def has_lists(signature: inspect.Signature) -> bool:
    """Whether lists of tensors are among what a function of this signature takes."""
    return any(
        "torch.Tensor" in str(parameter.annotation) and torch.Tensor not in _alternatives(parameter)
        for parameter in signature.parameters.values()
    )


class _Nothing(torch.Tensor):
    """What stands for a tensor that is not given, where tensors are looked at."""


# One for each of an op's parameters: no two tensors may be the same.
_NOTHING = tuple(torch.empty(0, device="cpu").as_subclass(_Nothing) for _ in range(32))


def alike(tensors: Sequence[torch.Tensor | None]) -> tuple[Callable[..., bool] | None, bool]:
    """What tells whether tensors are as these, see :func:`tilegym.backend.tensor_guards.guard`, and whether one of
    these requires gradients, which theirs does then too."""
    given = [nothing if tensor is None else tensor for nothing, tensor in zip(_NOTHING, tensors, strict=False)]
    if len(given) < len(tensors):
        return None, False
    return tensor_guards.guard(given), any(tensor.requires_grad for tensor in given)


def _several_tensors(tensors: list[torch.Tensor | None]) -> tuple:
    """Of a list of tensors, its part of the kind."""
    if tensors.__class__ is not list and isinstance(tensors, torch.Tensor):
        raise TypeError  # one tensor, whose parts are others in every call: none of a kind
    return tuple(
        [
            None
            if t is None
            else (t.__class__, t.dtype, t.shape, t.device, t.is_contiguous() or t.stride(), t.is_neg())
            for t in tensors
        ]
    )


def several(names: list[str], kind: type = tuple) -> str:
    """A tuple or a list of these."""
    return f"[{', '.join(names)}]" if kind is list else f"({', '.join([*names, ''])})"


class Repeat:
    """A function of a call's tensors, ``t0`` and so on, that repeats what the call did; written step by step."""

    def __init__(self, inputs: int) -> None:
        self._parameters = [f"t{i}" for i in range(inputs)]
        self._constants: list[Any] = []
        self._looking: list[str] = []
        self._making: list[str] = []
        self._lending: list[str] = []
        self._launching: list[str] = []
        self._addresses: dict[str, str] = {}

    def constant(self, value: Any) -> str:
        """The name of a value that is the same in all calls."""
        self._constants.append(value)
        return f"c{len(self._constants) - 1}"

    def allocate(self, empty: Callable, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> str:
        """Allocates a tensor; its name."""
        name = f"m{len(self._making)}"
        how = ", ".join(map(self.constant, (shape, strides, dtype)))
        self._making.append(f"{name} = {self.constant(empty)}({how})")
        return name

    def make(self, source: str, make: Callable[[torch.Tensor], torch.Tensor]) -> str:
        """Makes a tensor of the one that is called ``source``; its name."""
        lines = self._lending if source[0] == "l" else self._making
        name = f"{'l' if lines is self._lending else 'm'}{len(lines)}"
        lines.append(f"{name} = {self.constant(make)}({source})")
        return name

    def lent(self, give: Callable[[], tuple[torch.Tensor, ...]], count: int) -> list[str]:
        """Takes so many tensors that are given, behind all allocation, for which memory may lack; their names."""
        names = [f"l{len(self._lending)}_{i}" for i in range(count)]
        self._lending.append(f"{several(names)} = {self.constant(give)}()")
        return names

    def address(self, tensor: str, ahead: int) -> str:
        """The address so many bytes behind that of the tensor of this name."""
        if tensor not in self._addresses:
            self._addresses[tensor] = name = f"a{len(self._addresses)}"
            lines = self._looking if tensor[0] == "t" else self._launching
            lines.append(f"{name} = {tensor}.data_ptr()")
        name = self._addresses[tensor]
        return f"{name} + {self.constant(ahead)}" if ahead else name

    def launch(
        self, submit: Callable, device: int, grid: tuple[int, ...], kernel: Any, args: list[str], overlap: bool
    ) -> None:
        """Launches a kernel with arguments of these names, behind all making."""
        where = [self.constant(value) for value in (device, grid, kernel)]
        last = self.constant(overlap)
        self._launching.append(f"{self.constant(submit)}({', '.join(where)}, {several(args)}, {last})")

    def launch_at(self, submit: Callable[..., int], addresses: list[str], otherwise: Callable | None) -> None:
        """Launches with tensors at these addresses, behind all making.

        Where ``submit`` does not return 0: ``otherwise`` does all that the function does, if this is the first launch;
        None, if it is not.
        """
        self._launching.append(f"error = {self.constant(submit)}({', '.join(addresses)})")
        if otherwise is not None:
            self._launching.append(f"if error: return {self.constant(otherwise)}({', '.join(self._parameters)})")
        else:
            self._launching.append(f"if error: {self.constant(_launch_failed)}(error)")

    def look(self, alignment: int, otherwise: Callable) -> None:
        """Leaves it to ``otherwise`` if an argument's address that was asked for is no multiple of ``alignment``."""
        if self._looking:
            addresses = " | ".join(line.split(" = ")[0] for line in self._looking)
            call = f"{self.constant(otherwise)}({', '.join(self._parameters)})"
            self._looking.append(f"if ({addresses}) & {alignment - 1}: return {call}")

    def returning(self, result: str) -> Callable[..., Any]:
        """The function, which returns this."""
        lines = [*self._looking, *self._making, *self._lending, *self._launching, f"return {result}"]
        return _bound(tuple(self._parameters), tuple(lines), len(self._constants))(*self._constants)


def _launch_failed(error: int) -> None:
    raise RuntimeError(f"The CUDA driver did not take a launch: error {error}")


@functools.cache
def _bound(parameters: tuple[str, ...], lines: tuple[str, ...], constants: int) -> Callable[..., Callable]:
    """From so many constants to the function of these parameters and lines: few differ in more than constants."""
    names: dict[str, Any] = {}
    body = "\n        ".join(lines)
    source = f"""\
def bound({", ".join(f"c{i}" for i in range(constants))}):
    def repeat({", ".join(parameters)}):
        {body}
    return repeat
"""
    exec(source, names)
    return names["bound"]

"""Calls of an op that look like earlier ones repeat what those did: they allocate the outputs and launch the kernels.

To check, choose and plan anew takes the host longer than the launch itself. What a call does depends on its kind: the
dtypes, shapes, strides and devices of its tensors, and its other arguments. The second call of a kind is recorded: what
it allocates, the views it takes, the kernels it launches. If it does nothing else, later calls of its kind do the same.

Not recorded are calls that want gradients, that compute with PyTorch in between, that pass a kernel anything else, or
that allocate so much that the GPU is at work for longer than the host. While torch.compile traces nothing is.
"""

import inspect
import operator
import threading
import types
import typing
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MAX_KINDS = 1024  # of calls of one op; lengths that grow by one, as in decoding, give a new kind each time
# That a call allocates: to write as much takes an H200 longer than a call takes the host. Repeated calls keep all that
# they allocate until their end.
MAX_BYTES = 2**26

_ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)

active: "Recorder | None" = None  # one at a time; meanwhile the calls of all threads run as if none were recorded
_lock = threading.Lock()
_all: list["Recordings"] = []
_version = 0  # grows when recordings are forgotten


class Launch(NamedTuple):
    """A launch of a recorded call."""

    submit: Callable[[int, tuple[int, ...], Any, tuple, bool], None]  # (device, grid, kernel, args, overlap)
    device: int
    grid: tuple[int, ...]
    kernel: Any
    arrays: Callable[[list], tuple]  # from the slots, the kernel's arguments up to the last array
    numbers: tuple  # those behind it
    overlap: bool


class Recording(NamedTuple):
    """What calls of one kind do. Their slots: their tensors, the values here, and what is made of those, in order."""

    values: tuple
    made: list[tuple[int, Callable[[torch.Tensor], torch.Tensor]]]  # of the tensor in which slot, and how
    launches: list[Launch]
    result: Callable[[list], Any]  # from the slots
    answers: tuple[tuple[Callable[[], Any], Any], ...]  # to what the call asked besides, see :func:`ask`

    def repeat(self, tensors: tuple) -> Any:
        """Does it for a call with these tensors."""
        slots = [*tensors, *self.values]
        for source, make in self.made:
            slots.append(make(slots[source]))
        for submit, device, grid, kernel, arrays, numbers, overlap in self.launches:
            submit(device, grid, kernel, arrays(slots) + numbers, overlap)
        return self.result(slots)


class Recordings:
    """``serve``, a function of this signature that calls an op, with recordings of its calls."""

    def __init__(self, signature: inspect.Signature, serve: Callable) -> None:
        self._signature = signature
        self._look = self._first_look
        self._serve = serve
        self.known: dict[Any, Recording | bool] = {}  # by kind; True: seen once, False: cannot be repeated
        _all.append(self)

    def _first_look(self, *args, **kwargs) -> tuple:
        self._look = _look_of(self._signature)  # not before it is wanted: all of them would slow the import
        return self._look(*args, **kwargs)

    def call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Serves a call, by its recording where there is one."""
        kind = found = None
        if active is None:
            try:
                kind, tensors = self._look(*args, **kwargs)
                found = self.known.get(kind)
            except (TypeError, AttributeError, RuntimeError):  # arguments that the op does not take: serve says so
                kind = None
        if found is True:
            return self._record(kind, tensors, args, kwargs)
        if found:
            if not found.answers or all([question() == answer for question, answer in found.answers]):
                return found.repeat(tensors)
            self.known[kind] = True
        elif found is None and kind is not None and not _has_tensors(kind):
            if len(self.known) >= MAX_KINDS:
                self.known.clear()
            self.known[kind] = True
        return self._serve(*args, **kwargs)

    def _record(self, kind: tuple, tensors: tuple, args: tuple, kwargs: dict) -> Any:
        global active
        given = [id(tensor) for tensor in tensors if tensor is not None]
        # One tensor for two parameters does not tell which of them it is for.
        if len(set(given)) < len(given) or not _lock.acquire(blocking=False):
            return self._serve(*args, **kwargs)
        try:
            version = _version
            active = recorder = Recorder(tensors)
            with recorder:
                result = self._serve(*args, **kwargs)
            if recorder.put_off or version != _version:
                self.known.pop(kind, None)
            else:
                self.known[kind] = recorder.recording(result) or False
            return result
        finally:
            active = None
            _lock.release()


def forget() -> None:
    """Forgets all recordings: something else than its kind has changed what a call does."""
    global _version
    _version += 1
    for recordings in _all:
        recordings.known.clear()


def ask(question: Callable[[], Any]) -> Any:
    """``question()``, for what a call depends on besides its kind: it is repeated for as long as the answer stays."""
    answer = question()
    recorder = active
    if recorder is not None and recorder.thread == threading.get_ident():
        recorder.answers.append((question, answer))
    return answer


def put_off() -> None:
    """Of the call that is being recorded, if any: what it does this time is not what later ones are to do."""
    recorder = active
    if recorder is not None and recorder.thread == threading.get_ident():
        recorder.refused = recorder.put_off = True


class _NotRepeatable(Exception):
    pass


class Recorder(TorchDispatchMode):
    """Watches what a call with ``tensors`` (None among them for those not given) does with memory."""

    def __init__(self, tensors: tuple) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.put_off = False
        self.answers: list[tuple[Callable, Any]] = []
        self._launches: list[tuple] = []
        self._inputs = tensors
        self.refused = False
        # By a tensor's id, itself (so that no other gets this id), and the input or allocation that it is part of.
        self._parts = {id(t): (t, t) for t in tensors if t is not None}
        self._bytes = 0
        self._values: list[Any] = []
        self._made: list[tuple[int, Callable]] = []
        self._memory = {id(t): (i, _geometry(t, t)) for i, t in enumerate(tensors) if t is not None}
        self._slots: dict[tuple, int] = {}  # of the tensor of a geometry in an input's or an allocation's memory

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self.refused:
            return result
        if function in _ALLOCATIONS:
            self._parts[id(result)] = result, result
            self._bytes += result.nbytes
        elif function.is_view and args and id(args[0]) in self._parts:
            root = self._parts[id(args[0])][1]
            for view in result if isinstance(result, list | tuple) else (result,):
                self._parts[id(view)] = view, root
                # Some make a copy where no view will do: reshape, in inference mode.
                self.refused |= view.untyped_storage()._cdata != root.untyped_storage()._cdata
        else:
            self.refused = True
        if self.refused or self._bytes > MAX_BYTES:
            self.refused = True
            self._parts.clear()
            self._launches.clear()
        return result

    def launch(self, submit: Callable, device: int, grid: tuple, kernel: Any, args: tuple, overlap: bool) -> None:
        """Has ``submit`` launch a kernel with the arguments behind it, and takes it down."""
        if self.thread != threading.get_ident():
            submit(device, grid, kernel, args, overlap)
            return
        self.__exit__(None, None, None)  # in the interpreter kernels compute with PyTorch
        try:
            submit(device, grid, kernel, args, overlap)
        finally:
            self.__enter__()
        if not self.refused:
            self._launches.append((submit, device, grid, kernel, args, overlap))

    def recording(self, result: Any) -> Recording | None:
        """Of the call, which has returned ``result``; None if it cannot be repeated."""
        if self.refused or not self._launches:
            return None
        outputs = result if type(result) in (tuple, list) else (result,)
        try:
            parts = [_split(launch[4]) for launch in self._launches]
            # Values have their slots in front of what is made, which may be any number.
            self._values = [value for leading, _ in parts for value in leading if not _is_array(value)]
            at = iter(range(len(self._inputs), len(self._inputs) + len(self._values)))
            self._values.append(None)
            # Outputs first: they shall be allocations themselves, and no views of some.
            returned = [self._slot(output) for output in outputs]
            launches = []
            for (*where, _, overlap), (leading, numbers) in zip(self._launches, parts, strict=True):
                slots = [self._slots_of(value) if _is_array(value) else next(at) for value in leading]
                launches.append(Launch(*where, _several(slots), numbers, overlap))
        except _NotRepeatable:
            return None
        give = _several(returned, type(result)) if outputs is result else operator.itemgetter(*returned)
        return Recording(tuple(self._values), self._made, launches, give, tuple(self.answers))

    def _slots_of(self, array: torch.Tensor | list[torch.Tensor]) -> int | list[int]:
        return [self._slot(tensor) for tensor in array] if isinstance(array, list) else self._slot(array)

    def _slot(self, tensor: Any) -> int:
        """Where a tensor of the call, or None, will be: it is an input, or made now."""
        if tensor is None:
            return len(self._inputs) + len(self._values) - 1
        if id(tensor) not in self._parts:
            raise _NotRepeatable
        root = self._parts[id(tensor)][1]
        wanted = _geometry(root, tensor)
        if (id(root), wanted) not in self._slots:
            if id(root) not in self._memory:
                self._memory[id(root)] = self._allocate(root, tensor)
            slot, geometry = self._memory[id(root)]
            if wanted != geometry:
                slot = self._make(slot, _view(geometry, wanted))
            self._slots[id(root), wanted] = slot
        return self._slots[id(root), wanted]

    def _allocate(self, root: torch.Tensor, tensor: torch.Tensor) -> tuple[int, tuple]:
        """Makes what ``root`` is, laid out as ``tensor``, its first use, where that is all of it; slot and geometry."""
        if root.dtype == tensor.dtype and _is_dense(tensor) and tensor.numel() == root.numel() and _is_dense(root):
            geometry = _geometry(root, tensor)
        else:
            geometry = _geometry(root, root)
        dtype, shape, strides, _ = geometry
        sources = [i for i, t in enumerate(self._inputs) if t is not None and t.device == root.device]
        same = [i for i in sources if self._inputs[i].dtype == dtype]
        for i in same:
            like = self._inputs[i]
            if like.shape == shape and like.stride() == strides and like.is_contiguous():
                return self._make(i, torch.empty_like), geometry
        if not sources:
            raise _NotRepeatable
        source, options = (same[0], {}) if same else (sources[0], {"dtype": dtype})
        return self._make(source, operator.methodcaller("new_empty_strided", shape, strides, **options)), geometry

    def _make(self, source: int, make: Callable) -> int:
        self._made.append((source, make))
        return len(self._inputs) + len(self._values) + len(self._made) - 1


def _geometry(root: torch.Tensor, tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset() - root.storage_offset()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor takes as many elements in memory as it has."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == 0 or last + 1 == tensor.numel()


def _view(of: tuple, wanted: tuple) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from a tensor of geometry ``of`` to its view of the other geometry."""
    dtype, shape, strides, offset = wanted
    if dtype.itemsize != of[0].itemsize:
        raise _NotRepeatable
    if dtype == of[0] and offset == of[3]:
        return operator.methodcaller("as_strided", shape, strides)
    ahead = offset - of[3]
    if dtype == of[0]:
        return lambda tensor: tensor.as_strided(shape, strides, tensor.storage_offset() + ahead)
    return lambda tensor: tensor.view(dtype).as_strided(shape, strides, tensor.storage_offset() + ahead)


def _split(args: tuple) -> tuple[tuple, tuple]:
    """A kernel's arguments up to the last array, and the numbers behind it."""
    arrays = [i for i, arg in enumerate(args) if _is_array(arg)]
    if not arrays or not all(_is_array(arg) or _is_plain(arg) for arg in args):
        raise _NotRepeatable
    return args[: arrays[-1] + 1], args[arrays[-1] + 1 :]


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (type(value) is list and all(isinstance(v, torch.Tensor) for v in value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _several(slots: list[int | list[int]], kind: type = tuple) -> Callable[[list], tuple | list]:
    """A function that picks these slots, as a tuple or a list, with lists of some in it."""
    if kind is tuple and len(slots) > 1 and list not in map(type, slots):
        return operator.itemgetter(*slots)
    return lambda values: kind([[values[i] for i in s] if type(s) is list else values[s] for s in slots])


def _look_of(signature: inspect.Signature) -> Callable[..., tuple]:
    """A function with this signature that returns the kind of a call, hashable, and its tensors; (None, ()) for a call
    that wants gradients.

    It is written out for the signature, as ``dataclasses`` write out their methods: to go over a call's arguments in a
    loop takes half as long again. Tensors that no annotation announces become part of the kind, see ``_has_tensors``.
    """
    parameters, gradients, kind, tensors = [], [], [], []
    names = {"__gradients__": torch.is_grad_enabled, "__several__": _several_tensors}  # no parameters' names
    device = "device"  # the first tensor's; for the others its index tells enough, and is faster to get
    for name, parameter in signature.parameters.items():
        keyword = "*, " if parameter.kind is parameter.KEYWORD_ONLY and "*, " not in "".join(parameters) else ""
        default = "" if parameter.default is parameter.empty else f"=default_{name}"
        names[f"default_{name}"] = parameter.default
        parameters.append(f"{keyword}{name}{default}")
        union = typing.get_origin(parameter.annotation) in (types.UnionType, typing.Union)
        among = typing.get_args(parameter.annotation) if union else (parameter.annotation,)
        given = "" if type(None) not in among else f"None if {name} is None else "
        if torch.Tensor in among:
            of = f"{name}.dtype, {name}.shape, {name}.{device}, {name}.is_contiguous() or {name}.stride()"
            kind.append(f"{given}({of})" if given else of)
            tensors.append(name)
            gradients.append(f"({name} is not None and {name}.requires_grad)" if given else f"{name}.requires_grad")
            device = device if given else "get_device()"
        elif "torch.Tensor" in str(parameter.annotation):
            kind.append(f"{given}__several__({name})")
            tensors.append(f"*({name} or ())")
            gradients.append(f"True in [t is not None and t.requires_grad for t in {name} or ()]")
        else:
            kind.append(name)
    source = f"""\
def look({", ".join(parameters)}):
    if __gradients__() and ({" or ".join(gradients) or "False"}):
        return None, ()
    return ({", ".join([*kind, ""])}), ({", ".join([*tensors, ""])})
"""
    exec(source, names)
    return names["look"]


def _several_tensors(tensors: list[torch.Tensor | None]) -> tuple:
    """Of a list of tensors, its part of the kind."""
    return tuple(
        [None if t is None else (t.dtype, t.shape, t.device, t.is_contiguous() or t.stride()) for t in tensors]
    )


def _has_tensors(kind: tuple) -> bool:
    """Whether there is a tensor among what tells a call's kind, as one that stands for a number."""
    return any(isinstance(part, torch.Tensor) or (isinstance(part, tuple) and _has_tensors(part)) for part in kind)

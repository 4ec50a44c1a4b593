"""Calls of an op that look like earlier ones repeat what those did: they allocate the outputs and launch the kernels.

To check, choose and plan anew takes the host longer than the launch itself. What a call does depends on its kind: the
dtypes, shapes, strides and devices of its tensors, and its other arguments. The second call of a kind is recorded: what
it allocates, the views it takes, the kernels it launches. If it does nothing else, later calls of its kind do the same.

Not recorded are calls that want gradients, that compute with PyTorch in between, that pass a kernel anything else, or
that allocate so much that the GPU is at work for longer than the host. While torch.compile traces nothing is.
"""

import inspect
import operator
import sys
import threading
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilegym.backend import allocation
from tilegym.backend import recording_source

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


class Recording(NamedTuple):
    """What calls of one kind do."""

    repeat: Callable[..., Any]  # does it for a call with these tensors
    answers: tuple[tuple[Callable[[], Any], Any], ...]  # to what the call asked besides, see :func:`ask`


class Recordings:
    """``serve``, a function of this signature that calls an op, with recordings of its calls."""

    def __init__(self, signature: inspect.Signature, serve: Callable, name: str = "call") -> None:
        self._signature, self._name = signature, name
        self._serve = serve
        self.known: dict[Any, Recording | bool] = {}  # by kind; True: seen once, False: cannot be repeated
        self.call = self._first_call
        _all.append(self)

    def _first_call(self, *args, **kwargs) -> Any:
        # Not written before it is wanted: all of them would slow the import.
        names = {
            "__module__": sys.modules[__name__],
            "__known__": self.known.get,
            "__Recording__": Recording,
            "__still__": _still,
            "__otherwise__": self._call_without_recording,
            "__name__": __name__,
        }
        self.call = recording_source.call_of(self._signature, self._name, names)
        return self.call(*args, **kwargs)

    def _call_without_recording(self, kind: tuple | None, tensors: tuple, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Serves a call that no recording repeats, of kind None if it cannot have one, and records it in time."""
        found = self.known.get(kind)
        if found is True:
            return self._record(kind, tensors, args, kwargs)
        if isinstance(found, Recording):
            self.known[kind] = True  # the answers have changed
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


def _still(answers: tuple[tuple[Callable[[], Any], Any], ...]) -> bool:
    """Whether these questions have the same answers as when they were recorded."""
    for question, answer in answers:
        if question() != answer:
            return False
    return True


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


def lent(give: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """``give()``: memory that outlives the call, for which a repeated one asks again."""
    recorder = active
    if recorder is None or recorder.thread != threading.get_ident():
        return give()
    return recorder.lent(give)


def put_off() -> None:
    """Of the call that is being recorded, if any: what it does this time is not what later ones are to do."""
    recorder = active
    if recorder is not None and recorder.thread == threading.get_ident():
        recorder.refused = recorder.put_off = True


def refuse() -> None:
    """Of the call that is being recorded, if any: what it does depends on more than its kind and answers."""
    recorder = active
    if recorder is not None and recorder.thread == threading.get_ident():
        recorder.refused = True


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
        self._source = recording_source.Repeat(len(tensors))
        self._memory = {id(t): (f"t{i}", _geometry(t, t)) for i, t in enumerate(tensors) if t is not None}
        self._slots: dict[tuple, str] = {}  # names, by the input or allocation that it is in and its geometry

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else PyTorch imports its compiler (a second) for the first operation that a recorder sees.
        return False

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

    def lent(self, give: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        """What ``give()`` returns, and takes down what it is."""
        self.__exit__(None, None, None)
        try:
            given = give()
        finally:
            self.__enter__()
        for tensor, name in zip(given, self._source.lent(give, len(given)), strict=True):
            self._parts[id(tensor)] = tensor, tensor
            self._memory[id(tensor)] = name, _geometry(tensor, tensor)
        return given

    def recording(self, result: Any) -> Recording | None:
        """Of the call, which has returned ``result``; None if it cannot be repeated."""
        if self.refused or not self._launches:
            return None
        source = self._source
        outputs = result if type(result) in (tuple, list) else (result,)
        try:
            # Outputs first: they shall be allocations themselves, and no views of some.
            returned = [self._slot(output) for output in outputs]
            for submit, device, grid, kernel, args, overlap in self._launches:
                names = [self._argument(arg) for arg in args]
                source.launch(submit, device, grid, kernel, names, overlap)
        except _NotRepeatable:
            return None
        text = recording_source.several(returned, type(result)) if outputs is result else returned[0]
        return Recording(source.returning(text), tuple(self.answers))

    def _argument(self, value: Any) -> str:
        """The name of an argument of a kernel."""
        if isinstance(value, torch.Tensor):
            return self._slot(value)
        if type(value) is list and all(isinstance(v, torch.Tensor) for v in value):
            return recording_source.several([self._slot(v) for v in value], list)
        if not _is_plain(value):
            raise _NotRepeatable
        return self._source.constant(value)

    def _slot(self, tensor: Any) -> str:
        """The name of what a tensor of the call, or None, will be: it is an input, or made now."""
        if tensor is None:
            return "None"
        if id(tensor) not in self._parts:
            raise _NotRepeatable
        root = self._parts[id(tensor)][1]
        wanted = _geometry(root, tensor)
        if (id(root), wanted) not in self._slots:
            if id(root) not in self._memory:
                self._memory[id(root)] = self._allocate(root, tensor)
            slot, geometry = self._memory[id(root)]
            if wanted != geometry:
                slot = self._source.make(slot, _view(geometry, wanted))
            self._slots[id(root), wanted] = slot
        return self._slots[id(root), wanted]

    def _allocate(self, root: torch.Tensor, tensor: torch.Tensor) -> tuple[str, tuple]:
        """Makes what ``root`` is, laid out as ``tensor``, its first use, where that is all of it; name and geometry."""
        if root.dtype == tensor.dtype and _is_dense(tensor) and tensor.numel() == root.numel() and _is_dense(root):
            geometry = _geometry(root, tensor)
        else:
            geometry = _geometry(root, root)
        if root.device not in [t.device for t in self._inputs if t is not None]:
            raise _NotRepeatable
        dtype, shape, strides, _ = geometry
        return self._source.allocate(allocation.empty_on(root.device), tuple(shape), strides, dtype), geometry


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


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _has_tensors(kind: tuple) -> bool:
    """Whether there is a tensor among what tells a call's kind, as one that stands for a number."""
    return any(isinstance(part, torch.Tensor) or (isinstance(part, tuple) and _has_tensors(part)) for part in kind)

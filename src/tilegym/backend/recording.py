"""Calls of an op that look like earlier ones repeat what those did: they allocate the outputs and launch the kernels.

To check, choose and plan anew takes the host longer than the launch itself. What a call does depends on its kind: the
dtypes, shapes, strides and devices of its tensors, and its other arguments. The second call of a kind is recorded: what
it allocates, the views it takes, the kernels it launches. If it does nothing else, later calls of its kind do the same.

Not recorded are calls that want gradients, that compute with PyTorch in between, that pass a kernel anything else, or
that allocate so much that the GPU is at work for longer than the host. While torch.compile traces nothing is. Of ops
that PyTorch serves faster in part, it is kept which function serves calls of a kind, of those that want gradients too.
"""

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilegym.backend import recording_source
from tilegym.backend.recording_writer import NotRepeatable
from tilegym.backend.recording_writer import Recorded
from tilegym.backend.recording_writer import Submission
from tilegym.backend.recording_writer import write

MAX_KINDS = 1024  # of calls of one op; lengths that grow by one, as in decoding, give a new kind each time
# That a call allocates: to write as much takes an H200 longer than a call takes the host. Repeated calls keep all that
# they allocate until their end.
MAX_BYTES = 2**28
# After so many repetitions a call is recorded again, and its launches prepared to go to the driver by addresses: that
# took an H100's host 0.2 to 0.4 ms a launch, and saves 0.5 to 2 us of each.
USES_BEFORE_ADDRESSES = 200

ALLOCATIONS = frozenset(
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
    alike: Callable[..., bool] | None  # tells of tensors whether they are like these, see recording_source.alike
    gradients: bool  # whether some of these require gradients


class _Often(NamedTuple):
    """Of calls of a kind that came so often: their recording, until one by addresses takes its place."""

    recording: Recording


class Recordings:
    """``serve``, a function of this signature that calls an op, with recordings of its calls.

    ``elsewhere``, of a call's args, kwargs and whether it wants gradients: the function, of the same arguments, that
    serves all calls of its kind instead; None if there is none. Given it, calls that want gradients have kinds too.
    """

    def __init__(
        self,
        signature: inspect.Signature,
        serve: Callable,
        name: str = "call",
        elsewhere: Callable[[tuple, dict[str, Any], bool], Callable | None] | None = None,
    ) -> None:
        self._signature, self._name = signature, name
        self._serve = serve
        self._elsewhere = None if recording_source.has_lists(signature) else elsewhere
        # By kind; True: seen once, False: cannot be repeated.
        self.known: dict[Any, Recording | _Often | bool] = {}
        self.latest: dict[tuple, Recording] = {}  # by the arguments that are no tensors
        self.call = self._first_call
        _all.append(self)

    def _first_call(self, *args, **kwargs) -> Any:
        # Not written before it is wanted: all of them would slow the import.
        names = {
            "__module__": sys.modules[__name__],
            "__known__": self.known.get,
            "__latest__": self.latest,
            "__Recording__": Recording,
            "__still__": _still,
            "__otherwise__": self._call_without_recording,
            "__name__": __name__,
        }
        self.call = recording_source.call_of(self._signature, self._name, names, self._elsewhere is not None)
        return self.call(*args, **kwargs)

    def _call_without_recording(self, kind: tuple | None, tensors: tuple, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Serves a call that no recording repeats, of kind None if it cannot have one, and records it in time."""
        found = self.known.get(kind)
        if found is True:
            if self._elsewhere is not None:
                other = self._served_elsewhere(kind, args, kwargs)
                if other is not None:
                    return other(*tensors)
                if kind[-1]:  # gradients are wanted
                    return self._serve(*args, **kwargs)
            return self._record(kind, tensors, args, kwargs)
        if isinstance(found, _Often):
            return self._record(kind, tensors, args, kwargs, found.recording)
        if isinstance(found, Recording):
            self.known[kind] = True  # the answers have changed
        elif found is None and kind is not None and not _has_tensors(kind):
            if len(self.known) >= MAX_KINDS:
                self.clear()
            self.known[kind] = True
        return self._serve(*args, **kwargs)

    def _served_elsewhere(self, kind: tuple, args: tuple, kwargs: dict) -> Callable | None:
        """The function of its tensors that serves such a call elsewhere, which is kept; None if there is none."""
        global active
        if not _lock.acquire(blocking=False):
            return None
        try:
            version = _version
            active = recorder = Recorder(())
            function = self._elsewhere(args, kwargs, kind[-1])
        finally:
            active = None
            _lock.release()
        if function is None:
            return None
        function = recording_source.of_tensors(function, self._signature, args, kwargs)
        if version == _version:
            self.known[kind] = Recording(function, tuple(recorder.answers), None, False)
        return function

    def _record(self, kind: tuple, tensors: tuple, args: tuple, kwargs: dict, former: Recording | None = None) -> Any:
        """Records a call: as it is made, or, if there is a ``former`` recording of its kind, by addresses."""
        global active
        given = [id(tensor) for tensor in tensors if tensor is not None]
        # One tensor for two parameters does not tell which of them it is for.
        if len(set(given)) < len(given) or not _lock.acquire(blocking=False):
            if former is not None and _still(former.answers):
                return former.repeat(*tensors)
            return self._serve(*args, **kwargs)
        try:
            version = _version
            active = recorder = Recorder(tensors)
            with recorder:
                result = self._serve(*args, **kwargs)
            if recorder.put_off or version != _version:
                self.known.pop(kind, None)
            else:
                made = recorder.recording(result, former is not None)
                if made is not None and former is None and recorder.has_addresses():
                    made = made._replace(repeat=_counted(made.repeat, functools.partial(self._often, kind)))
                self.known[kind] = made or False
            return result
        finally:
            active = None
            _lock.release()

    def _often(self, kind: tuple) -> None:
        found = self.known.get(kind)
        if isinstance(found, Recording):
            self.known[kind] = _Often(found)
            self.latest.clear()

    def clear(self) -> None:
        self.known.clear()
        self.latest.clear()


def _counted(repeat: Callable[..., Any], often: Callable[[], None]) -> Callable[..., Any]:
    """``repeat``, which calls ``often`` once, when it was called so often."""
    left = USES_BEFORE_ADDRESSES

    def counted(*tensors):
        nonlocal left
        left -= 1
        if left == 0:
            often()
        return repeat(*tensors)

    return counted


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
        recordings.clear()


@contextlib.contextmanager
def replaced_by(recorder: Any) -> Iterator[bool]:
    """Within the block nothing is recorded, and launches that no recording repeats go to ``recorder``, as a Recorder's.

    False, and nothing of it, where a call is being recorded.
    """
    global active
    if not _lock.acquire(blocking=False):
        yield False
        return
    active = recorder
    try:
        yield True
    finally:
        active = None
        _lock.release()


def is_replaced() -> bool:
    """Whether launches go elsewhere now: what runs meanwhile runs on zeros, and is neither to be timed nor kept."""
    return not isinstance(active, Recorder | None)


def ask(question: Callable[[], Any]) -> Any:
    """``question()``, for what a call depends on besides its kind: it is repeated for as long as the answer stays."""
    answer = question()
    recorder = active
    if recorder is not None and recorder.thread == threading.get_ident():
        recorder.answers.append((question, answer))
    return answer


def lent(give: Callable[[], tuple[torch.Tensor, ...]], varies: bool = False) -> tuple[torch.Tensor, ...]:
    """``give()``: memory that outlives the call, for which a repeated one asks again.

    ``varies``: the tensors are not always of the same shapes, so that addresses alone do not tell what they are.
    """
    recorder = active
    if recorder is None or recorder.thread != threading.get_ident():
        return give()
    return recorder.lent(give, varies)


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


class Recorder(TorchDispatchMode):
    """Watches what a call with ``tensors`` (None among them for those not given) does with memory."""

    def __init__(self, tensors: tuple) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.put_off = False
        self.answers: list[tuple[Callable, Any]] = []
        self.refused = False
        self._seen = Recorded(tensors)
        self._bytes = 0
        self._varies = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else PyTorch imports its compiler (a second) for the first operation that a recorder sees.
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self.refused:
            return result
        parts = self._seen.parts
        if function in ALLOCATIONS:
            parts[id(result)] = result, result
            self._bytes += result.nbytes
        elif function.is_view and args and id(args[0]) in parts:
            root = parts[id(args[0])][1]
            for view in result if isinstance(result, list | tuple) else (result,):
                parts[id(view)] = view, root
                # Some make a copy where no view will do: reshape, in inference mode.
                self.refused |= view.untyped_storage()._cdata != root.untyped_storage()._cdata
        else:
            self.refused = True
        if self.refused or self._bytes > MAX_BYTES:
            self.refused = True
            parts.clear()
            self._seen.launches.clear()
        return result

    def launch(self, how: Submission, device: int, grid: tuple, kernel: Any, args: tuple, overlap: bool) -> None:
        """Has ``how.submit`` launch a kernel with the arguments behind it, and takes it down."""
        if self.thread != threading.get_ident():
            how.submit(device, grid, kernel, args, overlap)
            return
        self.__exit__(None, None, None)  # in the interpreter kernels compute with PyTorch
        try:
            how.submit(device, grid, kernel, args, overlap)
        finally:
            self.__enter__()
        if not self.refused:
            self._seen.launches.append((how, device, grid, kernel, args, overlap))

    def lent(self, give: Callable[[], tuple[torch.Tensor, ...]], varies: bool) -> tuple[torch.Tensor, ...]:
        """What ``give()`` returns, and takes down what it is."""
        self._varies |= varies
        self.__exit__(None, None, None)
        try:
            given = give()
        finally:
            self.__enter__()
        self._seen.lent.append((give, given))
        for tensor in given:
            self._seen.parts[id(tensor)] = tensor, tensor
        return given

    def has_addresses(self) -> bool:
        """Whether there is a way to repeat all launches by the addresses of their tensors."""
        return not self._varies and all(how.prepare is not None for how, *_ in self._seen.launches)

    def recording(self, result: Any, by_address: bool) -> Recording | None:
        """Of the call, which has returned ``result``; None if it cannot be repeated."""
        if self.refused or not self._seen.launches:
            return None
        try:
            repeat = write(self._seen, result, by_address and not self._varies)
        except NotRepeatable:
            return None
        return Recording(repeat, tuple(self.answers), *recording_source.alike(self._seen.inputs))


def _has_tensors(kind: tuple) -> bool:
    """Whether there is a tensor among what tells a call's kind, as one that stands for a number."""
    return any(isinstance(part, torch.Tensor) or (isinstance(part, tuple) and _has_tensors(part)) for part in kind)

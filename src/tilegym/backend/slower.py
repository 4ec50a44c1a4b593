"""Calls that PyTorch serves faster than the cuTile kernels do, as measured, and which go to PyTorch therefore.

``cutile/slower/<gpu>.json``, or that of a GPU with the same chip (:mod:`tilegym.backend.same_chip`), lists them by op:
whether gradients are wanted, the tensor arguments with their sizes rounded to powers of two, and the options given.
Where calls of the same powers of two differ, it lists those of exact sizes, apart from rows.
``tests/benchmark/write_slower.py`` writes it from the results of ``tilegym bench``. Besides it says from how many rows
on PyTorch serves calls whatever their sizes are: in fp32, without tensor cores, those of matrix products, as
``tests/benchmark/sweep_float32.py`` measures; in bf16 those of matrix products but for the sizes that it lists as
exceptions, of linear layers as ``tests/benchmark/sweep_linear.py`` measures, and those that 16 bytes do not divide, for
which cuBLAS has slow kernels. Calls in fp16 count as those in bf16. Only calls that leave the choice of the backend to
TileGym are looked up, those of patched models among them, not those with ``backend=``. Of those that torch.compile
traces, whose sizes may vary, the number of rows decides alone. Ops without an entry are not touched.
"""

import contextlib
import functools
import inspect
import json
import math
import re
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from typing import NamedTuple

import torch

from tilegym import env
from tilegym.backend import recording
from tilegym.backend.same_chip import others_like
from tilegym.backend.selector import constant_while_compiling

FOLDER = Path(__file__).parent / "cutile" / "slower"
SCALES = ("scaling", "sm_scale")
_ignored = False


def file_of(gpu: str, folder: Path = FOLDER) -> Path:
    """The file for a GPU of this name."""
    return folder / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Within the block no call goes to PyTorch for being listed; for measurements, in all threads."""
    global _ignored
    before, _ignored = _ignored, True
    recording.forget()
    try:
        yield
    finally:
        _ignored = before
        recording.forget()


class Entries(NamedTuple):
    """Of one op: the calls that are listed, and by kind of call the number of rows from which on all of them are, but
    for the exceptions, calls of exact sizes."""

    calls: frozenset[str]
    from_rows: dict[str, int]
    exceptions: frozenset[str] = frozenset()


NOTHING = Entries(frozenset(), {})


@functools.cache
def _entries() -> dict[str, dict[str, Entries]]:
    """By the names of GPU and op, what is listed."""
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        calls, rows, kept = table["slower"], table.get("from_rows", {}), table.get("exceptions", {})
        found[table["gpu"]] = {
            op: Entries(frozenset(calls.get(op, ())), rows.get(op, {}), frozenset(kept.get(op, ())))
            for op in {*calls, *rows}
        }
    return found


def _entries_of(gpu: str) -> dict[str, Entries]:
    """What is listed for a GPU of this name or, if nothing is, for one with the same chip; of kinds of calls for which
    its own table has no number of rows, those of the other: tiles fill the multiprocessors of either alike. For others
    only the numbers of rows in fp32 count, as measured on an H200: nowhere are there tensor cores for it."""
    tables = _entries()
    own, *others = [tables[name] for name in (gpu, *others_like(gpu)) if name in tables] or [None]
    if own is None:
        return {
            op: Entries(frozenset(), {kind: n for kind, n in entries.from_rows.items() if not _on_tensor_cores(kind)})
            for op, entries in tables.get("NVIDIA H200", {}).items()
        }
    for other in others:
        own = own | {op: _with_rows_of(own.get(op, NOTHING), other[op]) for op in other}
    return own


def _with_rows_of(own: Entries, other: Entries) -> Entries:
    rows = {kind: n for kind, n in other.from_rows.items() if kind not in own.from_rows}
    kept = {call for call in other.exceptions if kind_of(call.removeprefix("exactly ")) in rows}
    return Entries(own.calls, own.from_rows | rows, own.exceptions | kept)


def _on_tensor_cores(kind: str) -> bool:
    return "tfloat32" in kind or "float16" in kind


def rows_to_pytorch(gpu: str | None) -> dict[str, dict[str, int]]:
    """By op and kind of call, see :func:`kind_of`, from how many rows on PyTorch serves it on a GPU of this name."""
    return {op: entries.from_rows for op, entries in _entries_of(gpu).items() if entries.from_rows} if gpu else {}


def describe(signature: inspect.Signature, args: tuple, kwargs: dict[str, Any], exactly: bool = False) -> str:
    """A call of an op of this signature as the files name it: ``gradients bfloat16[8192,4096] approximate=tanh``, in
    fp16 too.

    Sizes are rounded to powers of two, unless rows of a matrix do not begin at 16 bytes; ``exactly``, only those of the
    first tensor, but its last one: ``exactly bfloat16[512,10240] bfloat16[2560,10240]``.

    Leading dimensions of 1 do not count: models have batches of one, benchmarks none. Flags and names count unless they
    are the default; a number only by being given where the default is None, and a scale not at all.
    """
    bound = signature.bind(*args, **kwargs).arguments
    parts = ["exactly"] if exactly else []
    parts += ["gradients"] if _wants_gradients(bound.values()) else []
    first = next((id(tensor) for tensor in _tensors(bound.values())), None)
    for name, value in bound.items():
        default = signature.parameters[name].default
        if isinstance(value, torch.Tensor):
            parts.append(_described(value, exactly, id(value) == first))
        elif isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value):
            parts.append(f"[{' '.join(_described(v, exactly, id(v) == first) for v in value)}]")
        elif isinstance(value, bool | str):
            parts += [f"{name}={value}"] if value != default else []
        elif value is not None and default is None and name not in SCALES:
            parts.append(name)
    return " ".join(parts)


def kind_of(described: str, widths: bool = False) -> str:
    """A call that :func:`describe` named, without its sizes: ``float32 float32``; or with its tensors' last ones, as
    ``float32[128] float32[128]``. A list counts as a tensor of it. Which operand is transposed does not count."""
    kind = re.sub(r"(?<=\w)\[(?:\d+,)*(\d+)\]", r"[\1]" if widths else "", described)
    return re.sub(r"\[([^ ]+)(?: \1)*\]", r"[\1]", re.sub(r" trans(?:pose)?_[ab]=\w+", "", kind))


def rows_of(args: tuple, kwargs: dict[str, Any]) -> int:
    """How many rows a call's first tensor has, or all those of its first list of tensors."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.numel() // max(value.shape[-1], 1) if value.dim() else 1
        if isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value):
            return sum(rows_of((v,), {}) for v in value)
    return 0


def _described(tensor: torch.Tensor, exactly: bool, first: bool) -> str:
    from tilegym.backend.cutile.tuning_key import bucket  # here: it imports cuda.tile

    sizes = list(tensor.shape)
    while len(sizes) > 1 and sizes[0] == 1:
        del sizes[0]
    dtype = _name_of_dtype(tensor.dtype)
    rounded = (len(sizes) - 1 if first else 0) if exactly else len(sizes)  # how many, from the front
    for i, size in enumerate(sizes):
        counts_rows = first and i < len(sizes) - 1
        # Of matrices whose rows do not begin at 16 bytes there are other kernels, of either side.
        aligned = len(sizes) > 2 or counts_rows or size * tensor.element_size() % 16 == 0
        sizes[i] = bucket(size) if i < rounded and aligned else size
    return f"{dtype}[{','.join(map(str, sizes))}]"


def _name_of_dtype(dtype: torch.dtype) -> str:
    if dtype is torch.float16:
        return "bfloat16"  # as fast: of 425 linear layers with gradients the ratio of times differs by 1.3 % (median)
    if dtype is torch.float32 and _fp32_precision() == "tf32":
        return "tfloat32"  # other kernels, of either side
    return str(dtype).removeprefix("torch.")


def _fp32_precision() -> str:
    return torch.backends.cuda.matmul.fp32_precision


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _wants_gradients(values: Any) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(values))


class Lookup:
    """Whether PyTorch is the faster one for a call of one op, on the GPU that its tensors are on."""

    def __init__(self, op: str) -> None:
        self.op = op
        self._known: dict[tuple, bool] = {}

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        if _ignored:
            return False
        if torch.compiler.is_compiling():
            return _many_rows(self.op, args, kwargs)
        gradients = torch.is_grad_enabled()
        key = (gradients, *[_key(v, gradients) for v in args], *[(k, _key(v, gradients)) for k, v in kwargs.items()])
        if next((tensor.dtype for tensor in _tensors((*args, *kwargs.values()))), None) is torch.float32:
            key = (recording.ask(_fp32_precision), *key)
        known = self._known.get(key)
        if known is None:
            # Sizes that vary from call to call must not fill the memory.
            if len(self._known) >= 4096:
                self._known.clear()
            known = self._known[key] = self._listed(args, kwargs)
        # A graph cannot hold what PyTorch does there: the host looks at which experts were chosen.
        return known and not (self.op == "fused_moe" and recording.ask(_is_capturing))

    def _listed(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        from tilegym.backend import dispatcher  # here: it imports this module

        gpu = _gpu_of((*args, *kwargs.values()))
        entries = _entries_of(gpu).get(self.op) if gpu is not None else None
        if entries is None:
            return False
        signature = dispatcher._op(self.op).signature
        try:
            call, exact = (describe(signature, args, kwargs, exactly) for exactly in (False, True))
        except TypeError:  # arguments that the op does not take: the call itself says so
            return False
        kinds = (kind_of(call), kind_of(call, widths=True))
        least = [entries.from_rows[kind] for kind in kinds if kind in entries.from_rows]
        if call in entries.calls or exact in entries.calls:
            return True
        rows = rows_of(args, kwargs)
        if not least or rows < min(least) or _is_ragged((*args, *kwargs.values())):
            return False
        return _of_rows(exact, rows) not in entries.exceptions


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _many_rows(op: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call that torch.compile traces has so many rows that PyTorch serves it. What is listed by sizes does
    not count: it would have the code compiled anew for each of them."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    # Options make calls of another kind, but for a transposed operand.
    others = [value for value in args if not isinstance(value, torch.Tensor)]
    others += [v for k, v in kwargs.items() if not isinstance(v, torch.Tensor) and not k.startswith("trans")]
    if not tensors or any(value is not None and value is not False for value in others):
        return False
    gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    first = tensors[0]
    least = _rows_to_pytorch(op, first.get_device(), tuple(tensor.dtype for tensor in tensors), gradients)
    return least > 0 and math.prod(first.shape[:-1]) >= least and not _is_ragged(tensors)


@constant_while_compiling
def _rows_to_pytorch(op: str, device_index: int, dtypes: tuple[torch.dtype, ...], gradients: bool) -> int:
    """From how many rows on PyTorch serves calls of ``op`` with tensors of these dtypes; 0: it is not known."""
    entries = _entries_of(gpu).get(op) if (gpu := _name_of(device_index)) is not None else None
    kind = " ".join([*(("gradients",) if gradients else ()), *map(_name_of_dtype, dtypes)])
    return entries.from_rows.get(kind, 0) if entries is not None else 0


def _of_rows(exact: str, rows: int) -> str:
    """What :func:`describe` would say exactly if all rows of a call's first tensor stood in one matrix."""
    from tilegym.backend.cutile.tuning_key import bucket  # here: it imports cuda.tile

    return re.sub(r"\[(?:\d+,)*(\d+)\]", rf"[{bucket(rows)},\1]", exact, count=1)


def _is_ragged(values: Sequence) -> bool:
    """Whether these are matrices of 16 bits, of which 16 bytes do not divide a row or a column."""
    first, *others = _tensors(values)
    sizes = [first.shape[-1], *(size for tensor in others for size in tensor.shape[-2:])]
    return first.element_size() == 2 and any(size % 8 for size in sizes)


def _gpu_of(values: tuple) -> str | None:
    """The name of the GPU that the first tensor is on."""
    return _name_of(next((tensor.get_device() for tensor in _tensors(values)), -1))


def _name_of(device_index: int) -> str | None:
    return torch.cuda.get_device_name(device_index) if device_index >= 0 else None


def _key(value: Any, gradients: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.get_device(), gradients and value.requires_grad
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, list | tuple):
        return tuple([_key(v, gradients) for v in value])
    return type(value)


def lookup_of(op: str) -> Callable[[tuple, dict[str, Any]], bool] | None:
    """The look-up of op ``op``; None where no GPU has an entry for it, and under ``DISABLE_FALLBACK=1``."""
    if env.disable_fallback() or not any(op in ops for ops in _entries().values()):
        return None
    return Lookup(op)

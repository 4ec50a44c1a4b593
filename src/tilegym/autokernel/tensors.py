"""Tensors between the judge and its workers: files of plain bytes, which nothing can hide code in.

Every tensor travels as the flat memory that it lies in, with guard elements on both sides, so that whoever reads it
back sees every byte that was touched.
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save_file

GUARD_BYTES = 512  # on both sides; a multiple of every alignment that kernels ask for
GUARD = 0xA5
_LARGE = 1 << 20  # bytes


@dataclass(frozen=True)
class Layout:
    """Where a tensor lies in its flat memory: the elements before and behind it are guards."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    offset: int

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor in its memory."""
        return flat.as_strided(self.shape, self.strides, self.offset)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called ``name``; torch has it, since it came from a tensor."""
    return getattr(torch, name)


def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """How many elements of memory a tensor spans."""
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def guarded(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: Any = "cpu") -> tuple:
    """(flat memory full of the guard pattern, layout) for a tensor."""
    guard = GUARD_BYTES // dtype.itemsize
    count = extent(shape, strides) + 2 * guard
    flat = torch.full((count * dtype.itemsize,), GUARD, dtype=torch.uint8, device=device).view(dtype)
    return flat, Layout(tuple(shape), tuple(strides), str(dtype).removeprefix("torch."), guard)


def guards_hold(flat: torch.Tensor, layout: Layout) -> bool:
    """Whether nothing has been written before or behind the tensor."""
    data = flat.view(torch.uint8)
    end = (layout.offset + extent(layout.shape, layout.strides)) * flat.dtype.itemsize
    return bool((data[:GUARD_BYTES] == GUARD).all() and (data[end:] == GUARD).all())


def pack(values: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Copies of tensors in guarded memory by name, and what :func:`unpack` needs besides: layouts, and the numbers."""
    flats, described = {}, {}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            described[name] = value
            continue
        strides = value.stride()
        if 0 in strides and value.numel():  # expanded: such memory cannot be filled, only looked at
            strides = torch.empty(value.shape, device="meta").stride()
        flat, layout = guarded(tuple(value.shape), strides, value.dtype)
        layout.view(flat).copy_(value)
        flats[name] = flat
        described[name] = [list(layout.shape), list(layout.strides), layout.dtype, layout.offset]
    return flats, described


class Outbox:
    """Writes the inputs of calls to files in ``folder``; what is large, weights above all, once for all calls.

    No two files are called the same, of other outboxes for the folder either: a worker keeps what it has read, by name.
    """

    _numbers = itertools.count(1)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # With the tensors themselves, so that their ids stay their own.
        self._large: dict[tuple[str, int], tuple[torch.Tensor, str, list]] = {}

    def write(self, inputs: dict[str, Any]) -> tuple[list[str], str]:
        """(the files, what :func:`unpack` needs besides, as JSON) of one call's inputs, by name and in order."""
        files, own, described = [], {}, {}
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and value.nbytes > _LARGE:
                _, path, described[name] = self._large.get((name, id(value))) or self._keep(name, value)
                files.append(path)
            else:
                own[name], described[name] = value, None  # in its place
        flats, more = pack(own)
        if flats:
            files.append(self._file(flats))
        return files, json.dumps(described | more)

    def remove(self, files: list[str]) -> None:
        """Removes files of a call that is over, but for those that others share."""
        for file in set(files) - {path for _, path, _ in self._large.values()}:
            Path(file).unlink(missing_ok=True)

    def _keep(self, name: str, value: torch.Tensor) -> tuple[torch.Tensor, str, list]:
        flats, described = pack({name: value})
        self._large[name, id(value)] = value, self._file(flats), described[name]
        return self._large[name, id(value)]

    def _file(self, flats: dict[str, torch.Tensor]) -> str:
        path = self.folder / f"inputs{next(self._numbers)}.safetensors"
        write(path, flats)
        return str(path)


def layout_of(described: list) -> Layout:
    """The layout in what :func:`pack` described."""
    shape, strides, dtype, offset = described
    return Layout(tuple(shape), tuple(strides), dtype, offset)


def unpack(flats: dict[str, torch.Tensor], described: dict[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`pack`: views of ``flats``, and the numbers, in order."""
    return {name: layout_of(d).view(flats[name]) if isinstance(d, list) else d for name, d in described.items()}


def write(path: Path, values: dict[str, torch.Tensor]) -> None:
    """Writes tensors to a file."""
    save_file({name: value.detach().contiguous().cpu() for name, value in values.items()}, str(path))


def read(path: Path) -> dict[str, torch.Tensor]:
    """Reads what :func:`write` wrote.

    Raises:
        OSError, Exception of safetensors: there is no such file, or it is none of ours.
    """
    return load_file(str(path))

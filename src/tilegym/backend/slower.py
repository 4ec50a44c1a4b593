"""Calls that PyTorch serves faster than the cuTile kernels do, as measured, and which go to PyTorch therefore.

``cutile/slower/<gpu>.json`` lists them by op: gradients, dtype and sizes of the tensor arguments, each size rounded to
a power of two. ``tests/benchmark/write_slower.py`` writes it from the results of two runs of ``tilegym bench``. Only
calls that leave the choice of the backend to TileGym are looked up: not those with ``backend=``, nor those that
torch.compile traces, whose sizes may vary. Ops without an entry are not touched.
"""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tilegym import env

FOLDER = Path(__file__).parent / "cutile" / "slower"


def file_of(gpu: str, folder: Path = FOLDER) -> Path:
    """The file for a GPU of this name."""
    return folder / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json")


@functools.cache
def _entries() -> dict[str, dict[str, frozenset[str]]]:
    """By the names of GPU and op, the calls that are listed."""
    found = {}
    for path in sorted(FOLDER.glob("*.json")):
        table = json.loads(path.read_text(encoding="utf-8"))
        found[table["gpu"]] = {op: frozenset(calls) for op, calls in table["slower"].items()}
    return found


def describe(args: tuple, kwargs: dict[str, Any]) -> str:
    """A call as the files name it, ``gradients bfloat16[8192,4096] bfloat16[4096] True``: flags count, not numbers."""
    from tilegym.backend.cutile.tuning_key import bucket  # here: it imports cuda.tile

    values = (*args, *kwargs.values())
    parts = ["gradients"] if _wants_gradients(values) else []
    for value in values:
        if isinstance(value, torch.Tensor):
            sizes = ",".join(str(bucket(size)) for size in value.shape)
            parts.append(f"{str(value.dtype).removeprefix('torch.')}[{sizes}]")
        elif isinstance(value, bool | str):
            parts.append(str(value))
    return " ".join(parts)


def _wants_gradients(values: tuple) -> bool:
    return torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


class Lookup:
    """Whether PyTorch is the faster one for a call of one op, on the GPU that its tensors are on."""

    def __init__(self, op: str) -> None:
        self.op = op
        self._known: dict[tuple, bool] = {}

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        if torch.compiler.is_compiling():
            return False
        gradients = torch.is_grad_enabled()
        key = (gradients, *[_key(v, gradients) for v in args], *[_key(v, gradients) for v in kwargs.values()])
        known = self._known.get(key)
        if known is None:
            # Sizes that vary from call to call must not fill the memory.
            if len(self._known) >= 4096:
                self._known.clear()
            known = self._known[key] = self._listed(args, kwargs)
        return known

    def _listed(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        gpu = _gpu_of((*args, *kwargs.values()))
        calls = _entries().get(gpu, {}).get(self.op, ()) if gpu is not None else ()
        return bool(calls) and describe(args, kwargs) in calls


def _gpu_of(values: tuple) -> str | None:
    """The name of the GPU that the first tensor is on."""
    device = next((v.device for v in values if isinstance(v, torch.Tensor)), None)
    return torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else None


def _key(value: Any, gradients: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.get_device(), gradients and value.requires_grad
    return value if isinstance(value, bool | str) else None


def lookup_of(op: str) -> Callable[[tuple, dict[str, Any]], bool] | None:
    """The look-up of op ``op``; None where no GPU has an entry for it, and under ``DISABLE_FALLBACK=1``."""
    if env.disable_fallback() or not any(op in ops for ops in _entries().values()):
        return None
    return Lookup(op)

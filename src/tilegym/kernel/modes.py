"""What a kernel is used for, and on which kind of device: the vocabulary of ``kernels``, spelled as words.

``"inference"``, ``"train"`` and ``"compile"`` (inference under torch.compile) can be combined: ``"train+compile"``.
"""

from collections.abc import Iterable
from enum import Flag
from enum import auto
from typing import TYPE_CHECKING
from typing import Any
from typing import TypeAlias

import torch

from tilegym.errors import KernelError

if TYPE_CHECKING:
    import kernels

DEVICES = ("cpu", "cuda", "mps", "neuron", "npu", "rocm", "tpu", "xpu")


class Mode(Flag):
    """The members of ``kernels.Mode``, kept here so that local kernels work where that package is not installed."""

    FALLBACK = auto()
    TRAINING = auto()
    INFERENCE = auto()
    TORCH_COMPILE = auto()

    def __str__(self) -> str:
        return _WORDS[self]


_TRAIN_COMPILE = Mode.TRAINING | Mode.TORCH_COMPILE
_INFERENCE_COMPILE = Mode.INFERENCE | Mode.TORCH_COMPILE
_WORDS = {
    Mode.INFERENCE: "inference",
    Mode.TRAINING: "train",
    _INFERENCE_COMPILE: "compile",
    _TRAIN_COMPILE: "train+compile",
    Mode.FALLBACK: "any",
}
_PARTS = {"inference": Mode.INFERENCE, "train": Mode.TRAINING, "compile": Mode.TORCH_COMPILE}
# A training kernel serves inference and a compilable one serves eager code, never the other way round.
_CHAINS = {
    Mode.INFERENCE: (Mode.INFERENCE, _INFERENCE_COMPILE, Mode.TRAINING, _TRAIN_COMPILE, Mode.FALLBACK),
    Mode.TRAINING: (Mode.TRAINING, _TRAIN_COMPILE, Mode.FALLBACK),
    _INFERENCE_COMPILE: (_INFERENCE_COMPILE, _TRAIN_COMPILE, Mode.FALLBACK),
    _TRAIN_COMPILE: (_TRAIN_COMPILE, Mode.FALLBACK),
}

ModeLike: TypeAlias = "str | Iterable[str] | Mode | kernels.Mode | None"


def parse_mode(mode: Any, where: str = "mode") -> Mode:
    """Reads a mode: a word, words joined by ``+``, ``|`` or ``,``, an iterable of words, or a ``kernels.Mode`` or ours.

    ``"compile"`` alone means inference under torch.compile; None means any mode (``Mode.FALLBACK`` of ``kernels``).

    Raises:
        KernelError: an unknown word, or train together with inference, which ``kernels`` excludes.
    """
    if mode is None:
        return Mode.FALLBACK
    if isinstance(mode, Flag):
        words = [_FLAG_WORDS.get(name) for name in _flag_names(mode)]
        if words == [None]:
            return Mode.FALLBACK
    elif isinstance(mode, str):
        words = mode.replace("|", "+").replace(",", "+").split("+")
    elif isinstance(mode, Iterable):
        words = list(mode)
    else:
        words = [mode]
    words = [word.strip().lower() if isinstance(word, str) else word for word in words]
    unknown = [word for word in words if not isinstance(word, str) or word not in _PARTS]
    if unknown or not words:
        raise KernelError(
            f"{where}: unknown mode {mode!r}; use 'inference', 'train', 'compile' or combined, as in 'train+compile'"
        )
    if "train" in words and "inference" in words:
        raise KernelError(
            f"{where}: mode {mode!r} asks for train and inference at once; a training kernel serves inference too, "
            "else register or apply once for each"
        )
    union = Mode(0)
    for word in words:
        union |= _PARTS[word]
    return _INFERENCE_COMPILE if union == Mode.TORCH_COMPILE else union


_FLAG_WORDS = {"INFERENCE": "inference", "TRAINING": "train", "TORCH_COMPILE": "compile"}


def _flag_names(mode: Flag) -> list[str]:
    return [member.name for member in type(mode) if member.value and member in mode]


def to_kernels_mode(mode: Mode) -> "kernels.Mode":
    """The ``kernels.Mode`` that ``mode`` stands for."""
    import kernels

    union = None
    for name in _flag_names(mode):
        member = kernels.Mode[name]
        union = member if union is None else union | member
    return union


def fallback_chain(mode: Mode) -> tuple[Mode, ...]:
    """The registered modes that serve ``mode``, best first: the chains of ``kernels``.

    Raises:
        KernelError: ``mode`` is "any", which kernels are registered for but cannot be applied for.
    """
    if mode not in _CHAINS:
        raise KernelError("apply kernels for a mode: 'inference', 'train', 'compile' or 'train+compile'")
    return _CHAINS[mode]


def parse_device(device: Any, where: str = "device") -> str | None:
    """The kind of a device, as ``kernels`` names it; None stays None (any device).

    Raises:
        KernelError: ``kernels`` knows no such kind.
    """
    if device is None:
        return None
    kind = device.type if isinstance(device, torch.device) else device
    if isinstance(kind, str):
        kind = kind.strip().lower().partition(":")[0]
        if kind in DEVICES:
            return kind
    raise KernelError(f"{where}: unknown device {device!r}; use one of {', '.join(DEVICES)}")


def current_device(model: torch.nn.Module | None = None) -> str:
    """The kind of device that ``model``'s parameters are on, or, without any, of this machine's accelerator."""
    parameter = next(model.parameters(), None) if model is not None else None
    if parameter is not None:
        kind = parameter.device.type
    else:
        kind = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    # PyTorch built for ROCm calls its devices cuda; kernels for the two are different files.
    return "rocm" if kind == "cuda" and torch.version.hip else kind

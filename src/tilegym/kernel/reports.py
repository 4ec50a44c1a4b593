"""What kernelizing a model replaced, by what and from where, and what it did not replace and why."""

import logging
import re
import threading
import warnings
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace

from tilegym.errors import KernelError
from tilegym.errors import KernelWarning
from tilegym.transformers.patching import PatchSet

logger = logging.getLogger("tilegym.kernel")

NOTHING = (
    "no layer of the model is bound to a kernel and no function has one: see register_external_layer and "
    "register_function_kernel"
)
FUNCTION = "function"  # what a report gives as the original of a function


@dataclass(frozen=True)
class Replacement:
    """One line of a report.

    Attributes:
        name: the layer's path in the model, or the function's in Python.
        original: the layer's class, or "function".
        kernel: the name of the kernel; for a function what it is replaced by.
        source: where the kernel came from, "" if there was none.
        verified: whether it was compared with the original.
        why: why it was not replaced; "" if it was.
    """

    name: str
    original: str
    kernel: str
    source: str = ""
    verified: bool = False
    why: str = ""

    @property
    def by(self) -> str:
        """`` by 'kernel'``, for a message; empty if ``why`` names the kernel already."""
        return "" if not self.kernel or repr(self.kernel) in self.why else f" by {self.kernel!r}"


@dataclass(eq=False)
class Report:
    """The outcome of one ``kernelize_model``: ``replaced`` and ``skipped``; prints as a table.

    ``note`` says what concerns all of it, such as that kernels are switched off.
    """

    mode: str
    device: str
    replaced: list[Replacement] = field(default_factory=list)
    skipped: list[Replacement] = field(default_factory=list)
    note: str = ""
    patches: PatchSet | None = field(default=None, repr=False)

    def __str__(self) -> str:
        lines = [f"mode {self.mode}, device {self.device}: {len(self.replaced)} replaced, {len(self.skipped)} not"]
        if self.note:
            lines.append(self.note)
        rows = _rows(self.replaced, "replaced") + _rows(self.skipped, "not replaced")
        if rows:
            table = [("", "name", "original", "kernel", "from", "count", "why or check"), *rows]
            widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
            lines += ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table]
        return "\n".join(lines)

    def __getstate__(self) -> dict:
        """For copying and pickling: without the functions, which were patched for this model and not for its copy."""
        state = dict(vars(self))
        state["replaced"] = [entry for entry in self.replaced if entry.original != FUNCTION]
        if len(state["replaced"]) < len(self.replaced):
            state["note"] = "a copy: functions were replaced for the model that it was copied from"
        return state

    def raise_if_incomplete(self) -> None:
        """Raises KernelError, listing them, if anything was not replaced, or nothing was."""
        if self.skipped:
            listed = "".join(f"\n  {e.name} ({e.original}{e.by}): {e.why}" for e in self.skipped)
            raise KernelError(f"use_fallback=False, and these have no kernel; nothing was changed:{listed}")
        if not self.replaced:
            raise KernelError(f"use_fallback=False, and {NOTHING}")


def _rows(entries: list[Replacement], status: str) -> list[tuple[str, ...]]:
    """Table rows; layers that differ only in their number share one."""
    counts: dict[Replacement, int] = {}
    for entry in entries:
        group = replace(entry, name=re.sub(r"(?<![^.])\d+(?=\.|$)", "*", entry.name))
        counts[group] = counts.get(group, 0) + 1
    return [
        (status, e.name, e.original, e.kernel, e.source, str(n), e.why or ("verified" if e.verified else ""))
        for e, n in counts.items()
    ]


def log_disabled(what: str) -> str:
    """Logs that ``what`` did nothing because kernels are switched off, and returns the sentence."""
    message = f"{what} did nothing: kernels are switched off (TILEGYM_USE_KERNELS=0)"
    logger.warning(message)
    return message


_warned: set[str] = set()
_warned_lock = threading.Lock()


def warn_once(message: str, stacklevel: int = 3) -> None:
    """Gives a :class:`KernelWarning` the first time that ``message`` comes up in this process."""
    with _warned_lock:
        if message in _warned:
            return
        _warned.add(message)
    warnings.warn(message, KernelWarning, stacklevel=stacklevel)

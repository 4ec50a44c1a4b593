"""Reversible patches: every change to a class, module, model or registry goes through a :class:`PatchSet`.

A patch set remembers what stood where, so that it can put it back; patching the same thing twice changes nothing, and a
set that fails half-way (:meth:`PatchSet.all_or_nothing`) leaves nothing behind. Not safe against other threads that
patch the same things at the same time.
"""

import contextlib
import importlib
import re
import types
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

from torch import nn

from tilegym.errors import PatchError
from tilegym.transformers.configs import UseOfOwnConfigs
from tilegym.transformers.configs import configs_that_choose
from tilegym.transformers.forwards import bound
from tilegym.transformers.forwards import chain_of
from tilegym.transformers.forwards import describe
from tilegym.transformers.forwards import has_its_class_forward
from tilegym.transformers.forwards import is_bound
from tilegym.transformers.forwards import place_of_forward
from tilegym.transformers.forwards import replica
from tilegym.transformers.replacements import MISSING
from tilegym.transformers.replacements import Callback
from tilegym.transformers.replacements import Replacement
from tilegym.transformers.replacements import may_stay
from tilegym.transformers.replacements import read

ALREADY_PATCHED = "already patched"

# On a patched model: its patch sets. In the instance's own __dict__, so that a deepcopy or an unpickled model brings
# its own patch sets along and can be reverted by itself.
_SETS = "_tilegym_patch_sets"
_REPLICATE = "_replicate_for_data_parallel"  # what PyTorch calls


def require_switches(function: str, **switches: bool) -> None:
    """Raises TypeError unless all are True or False: a model that comes by position would count as True."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            remedy = "; give a model as model=" if isinstance(value, nn.Module) else ""
            raise TypeError(f"{function}: {name} takes True or False, not {type(value).__name__}{remedy}")


def is_foreign(module: nn.Module) -> bool:
    """Whether another library has put a forward on the instance; accelerate's hooks call what we put beneath them."""
    if is_bound(vars(module).get("forward")) or place_of_forward(module) != "forward":
        return False
    return not has_its_class_forward(module)


@dataclass(frozen=True)
class Entry:
    """One line of a report: what was patched or skipped, and why it was skipped."""

    module: str  # path in the model ("model.layers.0.mlp") or in Python ("transformers...LlamaMLP")
    compute: str  # "rms_norm", "rope", ...
    backend: str = ""
    why: str = ""


class PatchSet:
    """The patches of one call and the report on them.

    Attributes:
        patched: an :class:`Entry` for everything that runs other code now.
        skipped: an :class:`Entry`, with ``why``, for what was looked at and left as it was.

    Printing it gives a table. ``revert()`` undoes everything, in reverse order; as a context manager it does so at the
    end of the block. A set that has been reverted cannot be entered: nothing is patched in that block. ``model`` is the
    model that the set belongs to, None for process-wide patches; ``maker`` says who made the set.
    """

    process_wide: list["PatchSet"] = []

    def __init__(self, model: nn.Module | None = None, maker: str = "") -> None:
        self.patched: list[Entry] = []
        self.skipped: list[Entry] = []
        self.maker = maker
        self._undo: list[Replacement | UseOfOwnConfigs | Callback] = []
        self._model = model
        self._reverted = False

    @classmethod
    def active(cls, model: nn.Module | None = None) -> list["PatchSet"]:
        """The sets that are applied to ``model`` (None: process-wide), oldest first."""
        return list(cls.process_wide if model is None else vars(model).get(_SETS, ()))

    def replace_class(self, module: types.ModuleType | str, name: str, new: type, entry: Entry) -> bool:
        """Makes ``new`` the class called ``name`` in a Python module; instances made before keep theirs.

        Like all primitives it records ``entry``, and returns whether it changed anything.

        Raises:
            PatchError: the module has no class of that name.
        """
        return self._replace_global(module, name, new, entry, lambda value: isinstance(value, type), "class")

    def replace_function(self, module: types.ModuleType | str, name: str, new: Callable, entry: Entry) -> bool:
        """Makes ``new`` the function called ``name`` in a Python module, for every caller that looks it up there.

        Raises:
            PatchError: the module has no callable of that name.
        """
        return self._replace_global(module, name, new, entry, callable, "function")

    def _replace_global(self, module, name, new, entry, is_right, kind) -> bool:
        if isinstance(module, str):
            module = importlib.import_module(module)
        if not is_right(read(module, name)):
            raise PatchError(f"{module.__name__} has no {kind} {name!r} to replace")
        return self._replace(module, name, new, entry)

    def replace_method(self, cls: type, name: str, new: Callable, entry: Entry) -> bool:
        """Makes ``new`` the method ``name`` of ``cls``, for all its instances, also those that exist.

        A method that the class inherits is replaced in the class itself only, not in its base.

        Raises:
            PatchError: the class has no such method.
        """
        if not callable(getattr(cls, name, None)):
            raise PatchError(f"{describe(cls)} has no method {name!r} to replace")
        return self._replace(cls, name, new, entry)

    def replace_property(self, cls: type, name: str, new: property, entry: Entry) -> bool:
        """Makes ``new`` the property ``name`` of ``cls``, as :meth:`replace_method` does with methods.

        Raises:
            PatchError: the class has no such property.
        """
        if not isinstance(getattr(cls, name, None), property):
            raise PatchError(f"{describe(cls)} has no property {name!r} to replace")
        return self._replace(cls, name, new, entry)

    def replace_forward(self, module: nn.Module, function: Callable, entry: Entry) -> bool:
        """Makes ``function(module, ...)`` the forward of one instance; its class and its siblings stay as they are.

        Hooks, state_dict, isinstance and printing are not affected; a deepcopy or an unpickled module has the same
        forward, bound to itself, and so have the replicas of ``nn.DataParallel``. Under accelerate's hooks what the
        hook calls is replaced. A forward that another library has put on the instance is left alone and reported as
        skipped.
        """
        name = place_of_forward(module)
        current = vars(module).get(name)
        now = getattr(current, "__func__", current)
        if now is function or (may_stay(function) and function in chain_of(current)):
            return self.skip(entry, ALREADY_PATCHED)
        if is_foreign(module):
            return self.skip(entry, f"its forward has been replaced already, by {describe(current)}")
        return self._replace(module, name, bound(function, module), entry)

    def replace_instance_method(self, module: nn.Module, name: str, function: Callable, entry: Entry) -> bool:
        """Makes ``function(module, ...)`` the method ``name`` of one instance, as :meth:`replace_forward` does forward.

        Raises:
            PatchError: its class has no such method.
        """
        if not callable(getattr(type(module), name, None)):
            raise PatchError(f"{describe(type(module))} has no method {name!r} to replace")
        current = read(module, name)
        if is_bound(current) and current.__func__ is function:
            return self.skip(entry, ALREADY_PATCHED)
        return self._replace(module, name, bound(function, module), entry)

    def replace_attribute(self, module: nn.Module, name: str, new: Any, entry: Entry, own: bool = True) -> bool:
        """Makes ``new`` what one instance holds under ``name``, such as a function that its constructor stored there.

        Args:
            own: the instance itself has to hold something of that name; else it may have it from its class.

        Raises:
            PatchError: the instance holds nothing of that name, or a parameter, buffer or submodule.
        """
        if own and read(module, name) is MISSING:
            raise PatchError(f"{describe(type(module))} has no attribute {name!r} of its own to replace")
        return self._replace(module, name, new, entry)

    def register_attention(self, name: str, forward: Callable, mask: Callable, entry: Entry) -> bool:
        """Makes ``forward`` and ``mask`` the attention and mask functions that transformers knows as ``name``.

        Undoing it takes the name away if it was new: models that still use it cannot run then.
        """
        from transformers import AttentionInterface
        from transformers import AttentionMaskInterface

        tables = (AttentionInterface._global_mapping, forward), (AttentionMaskInterface._global_mapping, mask)
        if all(table.get(name) is function for table, function in tables):
            return self.skip(entry, ALREADY_PATCHED)
        for table, function in tables:
            self._put(table, name, function)
        self.patched.append(entry)
        return True

    def use_attention(self, model: nn.Module, name: str, entry: Entry) -> bool:
        """Lets ``model`` alone use the attention implementation ``name``, which transformers must know.

        transformers reads the name from the config, and models made from one config object share it: the model gets a
        copy of its own. Undoing gives it back what it had, in which then stands what was changed on purpose meanwhile.
        """
        return self._use(model, "_attn_implementation", name, entry)

    def support(self, owner: nn.Module | type, name: str, function: Callable) -> None:
        """Makes ``function`` the method ``name`` of a model or a class, if it has one, as a part of what an entry says
        already."""
        if callable(getattr(owner, name, None)):
            self._put(owner, name, bound(function, owner) if isinstance(owner, nn.Module) else function)

    def use_experts(self, model: nn.Module, name: str, entry: Entry) -> bool:
        """Lets ``model`` alone use the experts implementation ``name``, as :meth:`use_attention` does attention."""
        return self._use(model, "_experts_implementation", name, entry)

    def _use(self, model: nn.Module, setting: str, name: str, entry: Entry) -> bool:
        if getattr(model.config, setting) == name:
            return self.skip(entry, ALREADY_PATCHED)
        use = next((s for s in self._undo if isinstance(s, UseOfOwnConfigs) and s.model is model), None)
        if use is None:
            use = UseOfOwnConfigs(model)
            self._record(use)
        use.do()
        for part in configs_that_choose(model):
            if part is not model.config and getattr(part, setting) != name:
                self._put(part, f"{setting}_internal", name)
        return self._replace(model.config, f"{setting}_internal", name, entry)

    def skip(self, entry: Entry, why: str) -> bool:
        """Records that nothing was changed, and why; returns False."""
        self.skipped.append(replace(entry, why=why))
        return False

    def _replace(self, owner: Any, name: str, new: Any, entry: Entry) -> bool:
        if read(owner, name) is new:
            return self.skip(entry, ALREADY_PATCHED)
        self._put(owner, name, new)
        self.patched.append(entry)
        return True

    def _put(self, owner: Any, name: str, new: Any) -> None:
        step = Replacement(owner, name, new)
        self._record(step)  # first: an interrupt behind the change has to find it
        step.do()
        if is_bound(new) and _REPLICATE not in vars(owner):
            self._put(owner, _REPLICATE, bound(replica, owner))

    def on_revert(self, function: Callable[[], None]) -> None:
        """Calls ``function`` when its turn comes to undo; for what is no replacement."""
        self._record(Callback(function))

    def _record(self, step: Replacement | UseOfOwnConfigs | Callback) -> None:
        if not self._undo:
            (self.process_wide if self._model is None else vars(self._model).setdefault(_SETS, [])).append(self)
        self._undo.append(step)
        self._reverted = False

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator["PatchSet"]:
        """Undoes everything in the set if the block raises."""
        try:
            yield self
        except BaseException:
            self.revert()
            raise

    def revert(self) -> None:
        """Undoes everything, in reverse order; a second call does nothing.

        Raises:
            PatchError: something was replaced by others in the meantime and was left alone; the rest is undone.
        """
        steps, self._undo, self._reverted = self._undo, [], True
        foreign = [f"{describe(step.owner)}.{step.name}" for step in reversed(steps) if not step.undo()]
        if steps:
            self._forget()
        if foreign:
            raise PatchError(
                f"not reverted, since others have replaced them after TileGym: {', '.join(foreign)}. All else is as it "
                "was, and these are as the others left them: undo or set them there, if you want them otherwise"
            )

    def _forget(self) -> None:
        if self._model is None:
            self.process_wide.remove(self)
            return
        sets = vars(self._model).get(_SETS, [])
        sets.remove(self)
        if not sets:
            vars(self._model).pop(_SETS, None)

    def require_match(self, what: str) -> None:
        """Raises PatchError, with what was skipped and why, if nothing is patched by this set or was already."""
        if not self.patched and not any(entry.why == ALREADY_PATCHED for entry in self.skipped):
            reasons = "; ".join(dict.fromkeys(f"{e.compute} at {e.module}: {e.why}" for e in self.skipped))
            reasons = reasons or "no module matched, or no compute was asked for"
            raise PatchError(f"nothing was patched in {what}: {reasons}")

    def __enter__(self) -> "PatchSet":
        if self._reverted:
            raise PatchError("these patches have been reverted: patch again, and enter what that returns")
        return self

    def __exit__(self, *exc_info) -> None:
        self.revert()

    def __str__(self) -> str:
        rows = _rows(self.patched, "patched") + _rows(self.skipped, "skipped")
        if not rows:
            return "nothing patched"
        table = [("", "modules", "compute", "backend", "count", "why"), *rows]
        widths = [max(len(row[i]) for row in table) for i in range(6)]
        lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in table)
        return "\n".join(line.rstrip() for line in lines)

    def __repr__(self) -> str:
        return f"<PatchSet: {len(self.patched)} patched, {len(self.skipped)} skipped>"


def _rows(entries: list[Entry], status: str) -> list[tuple[str, ...]]:
    """Table rows, with the modules that differ only in layer numbers on one."""
    counts: dict[Entry, int] = {}
    for entry in entries:
        group = replace(entry, module=re.sub(r"(?<=\.)\d+(?=\.|$)", "*", entry.module))
        counts[group] = counts.get(group, 0) + 1
    return [(status, e.module, e.compute, e.backend, str(n), e.why) for e, n in counts.items()]

"""Puts kernels into a model of any family, by data: what of the model, which kernel, with which names and numbers.

What ``tilegym integrate`` writes, and what :func:`tilegym.apply` does in memory, is a list of :class:`Place`.
"""

import contextlib
import copy
import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable
from collections.abc import Collection
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import nn

from tilegym.backend import PREFER_CUTILE
from tilegym.backend import assert_backend_available
from tilegym.backend import name_of
from tilegym.errors import PatchError
from tilegym.transformers import general_kernels
from tilegym.transformers import loss
from tilegym.transformers import quantised_weights
from tilegym.transformers.forwards import describe
from tilegym.transformers.forwards import function_of_forward
from tilegym.transformers.forwards import held
from tilegym.transformers.forwards import names_of
from tilegym.transformers.forwards import unwrapped
from tilegym.transformers.forwards import with_globals
from tilegym.transformers.patching import ALREADY_PATCHED
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet


@dataclass(frozen=True)
class Place:
    """Where a kernel goes.

    Attributes:
        of: the qualified name of the class or function that it stands in for.
        kernel: a name in :data:`~tilegym.transformers.general_kernels.KERNELS`.
        options: the names and numbers that the kernel needs.
        put: "forward": into all modules of the class; "function": into all forwards that call the function by its
            name, and where a module holds it; "attention": as transformers' attention implementation; "loss": as the
            model's loss function.
    """

    of: str
    kernel: str
    options: dict[str, Any] = field(default_factory=dict)
    put: str = "forward"

    def replacement(self, backend: str | None) -> Callable:
        """What stands in for it."""
        return general_kernels.kernel(self.kernel, tuple(self.options.items()), backend)


def resolve(name: str) -> Any:
    """The class or function of a qualified name.

    Raises:
        PatchError: there is none, such as in another version of transformers.
    """
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:split])
        try:
            found = sys.modules.get(module) or importlib.import_module(module)
        except ImportError:
            continue
        try:
            return functools.reduce(getattr, parts[split:], found)
        except AttributeError:
            break
    raise PatchError(f"there is no {name} in what is installed: run `tilegym integrate` again for this version")


def put(
    model: nn.Module,
    compute: str,
    places: tuple[Place, ...],
    use_cutile: bool = False,
    patches: PatchSet | None = None,
    without: Collection[nn.Module] = (),
) -> PatchSet:
    """Puts the kernels of one compute into ``model``, and into nothing else in the process.

    Args:
        compute: its name in the report.
        use_cutile: on the ``cutile`` backend, but for calls that were measured to be faster in PyTorch; else on the
            one that is chosen when it runs.
        patches: the set to add to; None makes one.
        without: modules in it that are left as they are, and all that is in them.

    Returns:
        The report, with everything that was left as it was and why; ``revert()`` undoes it.

    Raises:
        PatchError: ``patches`` is None, and nothing could be patched.
        BackendError: cuTile is asked for and not installed.
    """
    if use_cutile:
        assert_backend_available("cutile")
    backend = PREFER_CUTILE if use_cutile else None
    mine = PatchSet(model, maker=__name__) if patches is None else patches
    with mine.all_or_nothing():
        for place in places:
            _PUT[place.put](mine, model, place, backend, Entry("", compute, name_of(backend)), without)
        # Of several places of one class each module needs one.
        done = {entry.module for entry in mine.patched if entry.compute == compute}
        mine.skipped = [e for e in mine.skipped if e.compute != compute or e.module not in done]
        if patches is None:
            mine.require_match(type(model).__name__)
    return mine


def _like(model: nn.Module, module: nn.Module | None = None) -> torch.Tensor:
    """A tensor of the dtype and device that ``module`` computes on."""
    first = next((p for m in (module, model) if m is not None for p in m.parameters()), None)
    device = "cpu" if first.is_meta else first.device  # hooks of accelerate's fetch weights that are elsewhere
    if not first.is_floating_point():  # quantised
        return torch.empty(0, dtype=getattr(model, "dtype", torch.float32), device=device)
    return torch.empty(0, dtype=getattr(model, "dtype", first.dtype), device=device)


@torch.no_grad()
def _with_numbers(module: nn.Module) -> nn.Module:
    """``module``, or, if its weights have no memory (the meta device), a copy on the CPU whose weights are random.

    A copy, too, of one with linear layers of other classes: bitsandbytes' change their weights in a call on a CPU.
    """
    if "_hf_hook" in vars(module):
        return module
    if not any(p.is_meta for p in module.parameters()):
        others = any(isinstance(m, nn.Linear) and type(m) is not nn.Linear for m in module.modules())
        with contextlib.suppress(RuntimeError):  # quanto's weights cannot be copied; its layers do not change
            return copy.deepcopy(module) if others else module
        return module
    twin, generator = copy.deepcopy(module).to_empty(device="cpu"), torch.Generator().manual_seed(0)
    for tensor in (*twin.parameters(), *twin.buffers()):
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5, generator=generator)
    return twin


def _misfit(place: Place, original: Callable, module: nn.Module, given: list[torch.Tensor]) -> str:
    """Why what stands in does not compute what ``original`` does of hidden states like those given; "" if it does."""
    found = (general_kernels.agrees(place.kernel, place.options, original, module, like) for like in given)
    return next(filter(None, found), "")


_NORMS = ("rms_norm", "layer_norm")


def _dtypes(model: nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in model.parameters() if p.is_floating_point() and p.itemsize > 1}


def _at(entry: Entry, path: str) -> Entry:
    return Entry(path, entry.compute, entry.backend)


def _served(patches: PatchSet, compute: str) -> set[str]:
    """The modules that are patched for a compute, now or by a set before."""
    before = (entry for entry in patches.skipped if entry.why == ALREADY_PATCHED)
    return {entry.module for entry in (*patches.patched, *before) if entry.compute == compute}


def _form(module: nn.Module) -> tuple:
    """What tells instances of a class apart that compute different things."""
    plain = tuple((n, v) for n, v in sorted(vars(module).items()) if isinstance(v, (str, bool, float)) and n[0] != "_")
    children = tuple((n, _form(m)) for n, m in module.named_children())
    return type(module), plain, children, tuple((n, p.shape) for n, p in module.named_parameters(recurse=False))


def _put_forward(
    patches: PatchSet, model: nn.Module, place: Place, backend: str | None, entry: Entry, without: Collection[nn.Module]
) -> None:
    cls = resolve(place.of)
    known: dict[tuple, str | Callable] = {}  # by form why nothing stands in, or what does
    served = _served(patches, entry.compute)  # by an earlier place: a norm without a bias is as one whose bias is None
    found = False
    for path, module in model.named_modules(memo=set(without)):
        if not isinstance(module, cls):
            continue
        found = True
        if path in served:
            continue
        if entry.compute == "linear" and quantised_weights.put(patches, module, backend, _at(entry, path), known):
            continue
        if type(module).forward is not cls.forward:
            patches.skip(_at(entry, path), f"it is a {describe(type(module))}, not a {cls.__name__}")
            continue
        form = _form(module)
        if form not in known:
            twin, given = _with_numbers(module), [_like(model, module)]
            if place.kernel in _NORMS:
                # Of a model in several dtypes hidden states may come in any: T5's in fp16 has fp32 behind its MLPs.
                others = [given[0].to(dtype) for dtype in _dtypes(model) - {given[0].dtype}]
                taken = functools.partial(general_kernels.takes, place.kernel, place.options, cls.forward, twin)
                given += filter(taken, others)
            why, chosen = _misfit(place, cls.forward, twin, given), place
            if why and place.kernel == "rms_norm":
                narrow = dataclasses.replace(place, options={**place.options, "narrow": True})
                if not _misfit(narrow, cls.forward, twin, given):
                    why, chosen = "", narrow
            known[form] = why or chosen.replacement(backend)
        if isinstance(known[form], str):
            patches.skip(_at(entry, path), known[form])
            continue
        patches.replace_forward(module, known[form], _at(entry, path))
    if not found:
        patches.skip(_at(entry, type(model).__name__), f"there is no {cls.__name__} in it")


def callers(
    model: nn.Module, function: Callable, without: Collection[nn.Module] = ()
) -> dict[str, tuple[nn.Module, str]]:
    """The modules whose forward knows ``function`` as a global, by path, and its name there."""
    found = {}
    for path, module in model.named_modules(memo=set(without)):
        names = getattr(unwrapped(type(module).forward), "__globals__", {})
        name = next((n for n, value in names.items() if value is function), None)
        if name is not None and name in names_of(type(module).forward):
            found[path] = module, name
    return found


def _put_function(
    patches: PatchSet, model: nn.Module, place: Place, backend: str | None, entry: Entry, without: Collection[nn.Module]
) -> None:
    function, new = resolve(place.of), place.replacement(backend)
    why = general_kernels.agrees(place.kernel, place.options, function, None, _like(model))
    using = callers(model, function, without)
    holding = [
        (path, module, name)
        for path, module in model.named_modules(memo=set(without))
        for name, value in vars(module).items()
        if value is function or value is held(new)
    ]
    for path, (module, name) in using.items():
        before = function_of_forward(module)
        if why:
            patches.skip(_at(entry, path), why)
        elif _sees(before, name, new):
            patches.skip(_at(entry, path), ALREADY_PATCHED)
        else:
            patches.replace_forward(module, with_globals(before, ((name, new),)), _at(entry, path))
    for path, module, name in holding:
        if why:
            patches.skip(_at(entry, path), why)
        else:
            patches.replace_attribute(module, name, held(new), _at(entry, path))
    if not using and not holding:
        patches.skip(_at(entry, type(model).__name__), f"no forward in it calls {function.__name__} by its name")


def _sees(forward: Callable, name: str, function: Callable) -> bool:
    """Whether ``forward``, which may have been given one global after another, calls ``function`` by ``name``."""
    while getattr(forward, "recipe", (None,))[0] is with_globals:
        forward, replacements = forward.recipe[1]
        if name in dict(replacements):
            return dict(replacements)[name] is function
    return False


def _put_attention(
    patches: PatchSet, model: nn.Module, place: Place, backend: str | None, entry: Entry, without: Collection[nn.Module]
) -> None:
    from tilegym.transformers import continuous_batching

    entry = _at(entry, type(model).__name__)
    if getattr(model.config, "output_attentions", False):
        patches.skip(entry, "its config asks for attention weights (output_attentions)")
    else:
        continuous_batching.use_attention(patches, backend, model, entry)


def _put_loss(
    patches: PatchSet, model: nn.Module, place: Place, backend: str | None, entry: Entry, without: Collection[nn.Module]
) -> None:
    entry, new = _at(entry, type(model).__name__), held(place.replacement(backend))
    if loss.put_loss_function(patches, model, new, resolve(place.of), entry):
        loss.put_late_logits(patches, model, entry)


_PUT = {"forward": _put_forward, "function": _put_function, "attention": _put_attention, "loss": _put_loss}

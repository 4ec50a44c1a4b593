"""``tilegym.apply``: kernels for a model of any family, in memory, by research instead of by its name."""

import contextlib
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace

import torch
from torch import nn

from tilegym.backend import PREFER_CUTILE
from tilegym.backend import assert_backend_available
from tilegym.backend import get_current_backend
from tilegym.bench.prompts import Batch
from tilegym.errors import ModelError
from tilegym.errors import PatchError
from tilegym.integrate.aggregate import GRAPH
from tilegym.integrate.capture import capture
from tilegym.integrate.exchange import decoding_misfit
from tilegym.integrate.inputs import continues_text
from tilegym.integrate.inputs import example
from tilegym.integrate.inputs import forward_inputs
from tilegym.integrate.inputs import main_input
from tilegym.integrate.inputs import mask_of
from tilegym.integrate.inputs import writes_about_images
from tilegym.integrate.plan import Item
from tilegym.integrate.plan import Plan
from tilegym.integrate.plan import make_plan
from tilegym.integrate.small_model import small_model
from tilegym.integrate.verify import verify as verify_place
from tilegym.transformers import computes
from tilegym.transformers import first_call
from tilegym.transformers import generated
from tilegym.transformers import monkey_patch
from tilegym.transformers import text_parts
from tilegym.transformers import token_layout
from tilegym.transformers.family import Family
from tilegym.transformers.family import model_in
from tilegym.transformers.general import Place
from tilegym.transformers.general import put
from tilegym.transformers.general_graph import put_forward_graph
from tilegym.transformers.general_graph import put_graph
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet
from tilegym.transformers.patching import require_switches

LAYOUT = "layout"  # of hidden states: a compute that has no places
PRODUCTS = "PyTorch is as fast at products of many rows; linear=True puts it in"
LEAST = 1 << 20  # elements of a weight, of which a product takes more than its launch
_OF_THE_WHOLE = ("attn", "graph", "loss")  # what no part for text is patched with


def apply(
    model: nn.Module,
    use_cutile: bool = True,
    verify: bool = False,
    by_hand: bool = True,
    trust_remote_code: bool = False,
    **flags: bool,
) -> PatchSet:
    """Puts TileGym's kernels into ``model``, whatever its family, and into nothing else in the process.

    A family that :mod:`tilegym.transformers.monkey_patch` knows, or that ``tilegym integrate`` has written a patch for,
    is patched by it. In every other, the model's parts are found out by running a small model of its kind; a kernel is
    put in where it computes the same, and compared with what it stands in for on a few numbers before. Decoding steps
    are replayed as CUDA graphs (``graph``) where a small model generates the same tokens so; of models that are run
    once, such as encoders, whole calls without gradients are, from the third of one shape on, and hidden states out of
    a convolution are laid out by tokens (``layout``). The parts by which a model that generates text reads images or
    sounds are served as such models; in one that continues text, also without an image, its part for text is by the
    patch of its family, if it has one.

    Args:
        model: of transformers, or of one's own: a language model, with images or sounds in its texts or without, one
            that writes about images or cuts out of them, a classifier, an encoder of text, images or sound, or one of
            an encoder and a decoder; or one of peft's around it, which is patched.
        use_cutile: run what is patched on the ``cutile`` backend, but for calls that were measured to be faster in
            PyTorch; else on the one that is chosen when it runs.
        verify: also run each kernel on tensors that are captured while the model generates, in prefill and decoding,
            or runs once; what is further off than the model's dtype explains is left out, and the report says so. A
            family's own patch, in which kernels are fused with each other, is left aside then.
        by_hand: False: find out everything, also in families that have a patch.
        trust_remote_code: whether code that came with the model's config may run to make the small model.
        flags: computes to leave out, such as ``rope=False``: any of any model; one that has none has nothing to leave
            out. ``use_attn`` is ``attn``. Products of models that are run once are left to PyTorch unless
            ``linear=True``.

    Returns:
        The report; ``revert()`` on it, or using it as a context manager, restores the model.

    Raises:
        ModelError: a model of its class cannot be made small and run.
        PatchError: nothing in the model could be patched, or a flag asks for what is not in it.
        FlagError: no model has a compute of a flag's name; a PatchError and a TypeError, too.
        BackendError: cuTile is asked for and not installed.
        TypeError: a flag is neither True nor False.
    """
    switches = {"use_cutile": use_cutile, "verify": verify, "by_hand": by_hand, "trust_remote_code": trust_remote_code}
    require_switches("apply", **switches, **flags)
    if use_cutile:
        assert_backend_available("cutile")
    model = model_in(model)
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type is None:
        raise ModelError(f"{type(model).__name__} has no config.model_type: give a model of transformers")
    if by_hand and not verify:
        if model_type in monkey_patch.FAMILIES or generated.find(model_type) is not None:
            return monkey_patch.apply(model, use_cutile=use_cutile, **flags)
    with torch.device("cpu"):  # whatever the default is, small models are there
        return _apply_what_is_found(model, _How(use_cutile, verify, trust_remote_code, flags), by_hand and not verify)


def _apply_what_is_found(model: nn.Module, how: "_How", texts_by_hand: bool) -> PatchSet:
    trust_remote_code, flags = how.trust_remote_code, how.flags
    try:
        plan = make_plan(model, trust_remote_code, look_up=False)
    except ModelError as error:
        held = [f"model.{path}" for path in _models_in(model, trust_remote_code)]
        remedy = f"; or give a part of it that is a model by itself: {', '.join(held)}" if held else ""
        raise ModelError(f"{error}{remedy}") from error
    parts = _parts(model, trust_remote_code)
    if texts_by_hand:
        parts += _texts(model)
    known = {*plan.computes, *(name for part in parts for name in part.computes)}
    monkey_patch.require_known("apply", flags, known)
    flags["attn"] = flags.get("attn", True) and flags.pop("use_attn", True)
    absent = sorted(name for name in set(flags) - known - {"attn", GRAPH, LAYOUT} if flags[name])
    if absent:
        raise PatchError(f"{model.config.model_type} has no compute {absent[0]!r}; it has {', '.join(sorted(known))}")
    patches = PatchSet(model, maker=__name__)
    with patches.all_or_nothing():
        for part in parts:
            with part.named(patches):
                _put_part(patches, part, how)
        _put_plan(patches, model, plan, how, [part for part in parts if not part.why])
        if any(entry.compute == GRAPH and entry.module == type(model).__name__ for entry in patches.patched):
            for part in parts:
                if part.family is not None and part.family.decode_step:
                    with part.named(patches):
                        computes.decode_steps_in_model(patches, part.family, how.preferred, part.model)
        patches.require_match(type(model).__name__)
        first_call.put(patches, model)
    return patches


@dataclass(frozen=True)
class _How:
    """What the caller of :func:`apply` has asked for."""

    use_cutile: bool
    verify: bool
    trust_remote_code: bool
    flags: dict[str, bool]

    @property
    def backend(self) -> str:
        return "cutile" if self.use_cutile else get_current_backend()

    @property
    def preferred(self) -> str | None:
        return PREFER_CUTILE if self.use_cutile else None


@dataclass(frozen=True)
class _Part:
    """A part of a model that is a model itself: one that is run once has a plan, or a reason why not; one for text that
    is as a language model with a patch by hand has that one's family."""

    path: str
    model: nn.Module
    plan: Plan | None = None
    family: Family | None = None
    why: str = ""

    @property
    def computes(self) -> set[str]:
        own = () if self.family is None else self.family.computes
        return {compute.name for compute in own}.union(() if self.plan is None else self.plan.computes)

    @contextlib.contextmanager
    def named(self, patches: PatchSet) -> Iterator[None]:
        """What is recorded within it of modules of the part is of modules of the whole behind it."""
        before = {id(entry): entry for entry in (*patches.patched, *patches.skipped)}
        yield
        for entries in patches.patched, patches.skipped:
            entries[:] = [entry if id(entry) in before else self._named(entry) for entry in entries]

    def _named(self, entry: Entry) -> Entry:
        whole = entry.module == type(self.model).__name__
        return replace(entry, module=self.path if whole else f"{self.path}.{entry.module}")

    def holds(self, module: str) -> bool:
        return module == self.path or module.startswith(f"{self.path}.")


def _parts(model: nn.Module, trust_remote_code: bool) -> list[_Part]:
    """The parts by which a model that generates text reads images or sound: run once, they are served as such."""
    kind = type(model), model.config
    if not (continues_text(*kind) or writes_about_images(*kind)):
        return []
    parts: list[_Part] = []
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        own = any(type(config) is type(part) for part in vars(model.config).values() if hasattr(part, "model_type"))
        if not own or not hasattr(module, "_from_config") or any(part.holds(path) for part in parts):
            continue
        if main_input(module) in ("input_ids", "inputs_embeds"):
            continue
        try:
            parts.append(_Part(path, module, make_plan(module, trust_remote_code, look_up=False)))
        except ModelError as error:
            parts.append(_Part(path, module, why=f"transformers' stays: {error}"))
    return parts


def _models_in(model: nn.Module, trust_remote_code: bool) -> list[str]:
    """The outermost parts of a model that are models with something to put a kernel into."""
    found: list[str] = []
    refused: set[type] = set()
    for path, module in model.named_modules():
        within = any(path.startswith(f"{held}.") for held in found)
        if not path or within or type(module) in refused or not hasattr(module, "_from_config"):
            continue
        try:
            plan = make_plan(module, trust_remote_code, look_up=False)
        except Exception:  # whatever its code does when it is run by itself
            refused.add(type(module))
        else:
            found += [path] if plan.computes else []
    return found


def _texts(model: nn.Module) -> list[_Part]:
    """The part for text of a model that reads more, where it is as a language model that has a patch by hand."""
    if not continues_text(type(model), model.config):
        return []
    text = model.config.get_text_config(decoder=True)
    family = (monkey_patch.FAMILIES | text_parts.FAMILIES).get(text.model_type)
    if family is None or any(compute.name == "moe" for compute in family.computes):  # experts are chosen by the whole
        return []
    kind = family.class_of("DecoderLayer")
    for path, module in model.named_modules():
        if type(getattr(module, "config", None)) is type(text) and hasattr(module, "_from_config") and path:
            if any(isinstance(layer, kind) for layer in module.modules()):
                return [_Part(path, module, family=family)]
    return []


def _put_part(patches: PatchSet, part: _Part, how: _How) -> None:
    if part.why:
        patches.skip(Entry(type(part.model).__name__, "attn", how.backend), part.why)
    elif part.plan is not None:
        _put_plan(patches, part.model, part.plan, how)
    else:
        for compute in part.family.computes:
            if compute.name not in _OF_THE_WHOLE and how.flags.get(compute.name, True):
                compute.in_model(patches, part.family, how.preferred, part.model)


def _put_plan(patches: PatchSet, model: nn.Module, plan: Plan, how: _How, parts: Sequence[_Part] = ()) -> None:
    """Puts into ``model``, but for its ``parts``, the kernels of its plan."""
    why: dict[str, str] = {}

    def is_outside(item: Item) -> bool:
        return item.compute in _OF_THE_WHOLE or any(_outside(item, parts))

    flags, at_once = how.flags, not continues_text(type(model), model.config)
    left: dict[str, nn.Module] = {}
    if at_once and "linear" not in flags:
        weights = ((p, m) for p, m in model.named_modules() if isinstance(getattr(m, "weight", None), torch.Tensor))
        left = {path: module for path, module in weights if _suits_pytorch(module.weight)}

    def is_wanted(item: Item) -> bool:
        return is_outside(item) and not (item.compute == "linear" and left.keys() >= set(item.requirement.modules))

    wanted = {
        name: mine
        for name, items in plan.computes.items()
        if flags.get(name, True) and (mine := [item for item in items if is_wanted(item)])
    }
    chosen = _verified(model, wanted, how.use_cutile, why, parts) if how.verify else _first(wanted)
    for compute, places in chosen.items():
        without = [part.model for part in parts]
        if compute == "linear":
            without += left.values()
        put(model, compute, places, how.use_cutile, patches, without)
    if flags.get(LAYOUT, True) and at_once:
        small = small_model(model.config, 0, how.trust_remote_code, type(model)).model
        path = token_layout.first_strided(small, forward_inputs(small))
        if path is not None:
            token_layout.put(patches, model, path, Entry(path, LAYOUT, how.backend))
    if flags.get(GRAPH, True) and at_once:
        if not writes_about_images(type(model), model.config):  # whose steps are others' than its forward passes
            put_forward_graph(model, how.use_cutile, patches)
    elif flags.get(GRAPH, True) and "attn" in chosen:
        _put_graph(model, how, patches)
    _report_rest(patches, plan, why, left, how.backend, parts)


def revert(model: nn.Module | None = None) -> None:
    """Undoes what :func:`apply` and ``monkey_patch`` have patched in ``model``, or, without one, in transformers."""
    makers = (__name__, "tilegym.transformers.", "tilegym_generated_")
    for patches in reversed(PatchSet.active(None if model is None else model_in(model))):
        if patches.maker.startswith(makers):
            patches.revert()


def _suits_pytorch(weight: torch.Tensor) -> bool:
    """Whether cuBLAS is as fast as the kernels at products of many rows with ``weight``.

    It is where rows begin at 16 bytes: on an H200 in bf16 it takes 0.23 ms for the products of a layer of ViT-L, 32
    images, and they 0.28. Elsewhere, 2048 rows of 768 numbers to 50257 take it 1679 us, the kernels 296; 4096 of 1280
    to 3420 170, 73, and back 197, 120.
    """
    return weight.numel() < LEAST or not any(size * weight.element_size() % 16 for size in weight.shape)


def _outside(item: Item, parts: Sequence[_Part]) -> Iterator[str]:
    """The modules of an item that are in none of the parts."""
    return (module for module in item.requirement.modules if not any(part.holds(module) for part in parts))


def _first(wanted: dict[str, list[Item]]) -> dict[str, tuple[Place, ...]]:
    """Every item's best candidate; whether it fits a module is looked at when it is put there."""
    return {
        compute: tuple({id(item): item.candidates[0].place for item in items}.values())
        for compute, items in wanted.items()
    }


def _verified(
    model: nn.Module, wanted: dict[str, list[Item]], use_cutile: bool, why: dict[str, str], parts: Sequence[_Part]
) -> dict[str, tuple[Place, ...]]:
    """Of every item the first candidate that gives the same on captured calls."""
    items = [item for found in wanted.values() for item in found]
    points = {
        item.key: (item.candidates[0].place, next(_outside(item, parts), item.requirement.modules[0])) for item in items
    }
    if continues_text(type(model), model.config):
        ids = example(model, batch=2, length=12)
        mask = mask_of(ids)
        batches = {"prompt": Batch(ids[:1], mask[:1]), "padded batch": Batch(ids, mask)}
    else:
        batches = {"forward": forward_inputs(model), "padded batch": forward_inputs(model, padded=True)}
    calls = capture(model, points, batches)
    backend = "cutile" if use_cutile else get_current_backend()
    chosen: dict[str, tuple[Place, ...]] = {}
    for item in items:
        for candidate in item.candidates:
            check = verify_place(model, candidate.place, points[item.key][1], calls[item.key], backend)
            if check.passed:
                chosen[item.compute] = (*chosen.get(item.compute, ()), candidate.place)
                break
            why[item.key] = check.why
    return chosen


def _put_graph(model: nn.Module, how: _How, patches: PatchSet) -> None:
    """Lets ``model`` replay its decoding steps, if a small one of its kind generates the same tokens so."""
    why = decoding_misfit(small_model(model.config, 0, how.trust_remote_code, type(model)).model)
    if not why:
        put_graph(model, how.use_cutile, patches)
    else:
        patches.skip(Entry(type(model).__name__, GRAPH, how.backend), why)


def _report_rest(
    patches: PatchSet, plan: Plan, why: dict[str, str], products: Collection[str], backend: str, parts: Sequence[_Part]
) -> None:
    """Says of everything that was found outside of the parts and not patched why not; ``products``: left to PyTorch."""
    left = [
        (
            module or plan.research.architecture,
            item.requirement.kind,
            PRODUCTS if item.compute == "linear" and module in products else why.get(item.key) or item.why,
        )
        for item in plan.items
        for module in item.requirement.modules
    ]
    left += [
        (module, missed.resembles or "unrecognised", missed.why)
        for missed in plan.research.unrecognised
        for module in missed.modules
    ]
    for module, kind, reason in left:
        if reason and not any(part.holds(module) for part in parts):
            patches.skip(Entry(module, kind, backend), reason)

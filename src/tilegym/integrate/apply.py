"""``tilegym.apply``: kernels for a model of any family, in memory, by research instead of by its name."""

from torch import nn

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
from tilegym.integrate.inputs import mask_of
from tilegym.integrate.plan import Item
from tilegym.integrate.plan import Plan
from tilegym.integrate.plan import make_plan
from tilegym.integrate.small_model import small_model
from tilegym.integrate.verify import verify as verify_place
from tilegym.transformers import generated
from tilegym.transformers import monkey_patch
from tilegym.transformers.family import model_in
from tilegym.transformers.general import Place
from tilegym.transformers.general import put
from tilegym.transformers.general_graph import put_forward_graph
from tilegym.transformers.general_graph import put_graph
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet
from tilegym.transformers.patching import require_switches


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
    once, such as encoders, whole calls without gradients are, from the third of one shape on.

    Args:
        model: of transformers, or of one's own: a language model, a classifier, an encoder of text, images or sound, or
            one of an encoder and a decoder; or one of peft's around it, which is patched.
        use_cutile: run what is patched on the ``cutile`` backend, but for calls that were measured to be faster in
            PyTorch; else on the one that is chosen when it runs.
        verify: also run each kernel on tensors that are captured while the model generates, in prefill and decoding,
            or runs once; what is further off than the model's dtype explains is left out, and the report says so. A
            family's own patch, in which kernels are fused with each other, is left aside then.
        by_hand: False: find out everything, also in families that have a patch.
        trust_remote_code: whether code that came with the model's config may run to make the small model.
        flags: computes to leave out, such as ``rope=False``; of a family with a patch, all arguments of its function.
            Products of models that are run once are left to PyTorch unless ``linear=True``.

    Returns:
        The report; ``revert()`` on it, or using it as a context manager, restores the model.

    Raises:
        ModelError: a model of its class cannot be made small and run.
        PatchError: nothing in the model could be patched, or a flag is of no compute in it.
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
        if model_type in monkey_patch.FAMILIES:
            named = {"use_attn" if name == "attn" else name: value for name, value in flags.items()}
            return monkey_patch.apply(model, use_cutile=use_cutile, **named)
        aggregate = generated.find(model_type)
        if aggregate is not None:
            return aggregate(model=model, use_cutile=use_cutile, **flags)
    plan = make_plan(model, trust_remote_code, look_up=False)
    unknown = sorted(set(flags) - set(plan.computes) - {"attn", GRAPH})  # a model may have no attention
    if unknown:
        raise PatchError(f"{model_type} has no compute {unknown[0]!r}; it has {', '.join(plan.computes)}")
    why: dict[str, str] = {}
    at_once = not continues_text(type(model), model.config)
    if at_once and "linear" not in flags:
        # On an H200 in bf16 cuBLAS takes 0.23 ms for the products of a layer of ViT-L, 32 images; the kernels 0.28.
        flags |= {"linear": False}
        items = plan.computes.get("linear", ())
        why |= {item.key: "PyTorch is as fast at products of many rows; linear=True puts it in" for item in items}
    wanted = {name: items for name, items in plan.computes.items() if flags.get(name, True)}
    chosen = _verified(model, wanted, use_cutile, why) if verify else _first(wanted)
    patches = PatchSet(model, maker=__name__)
    with patches.all_or_nothing():
        for compute, places in chosen.items():
            put(model, compute, places, use_cutile, patches)
        if flags.get(GRAPH, True) and at_once:
            put_forward_graph(model, use_cutile, patches)
        elif flags.get(GRAPH, True) and "attn" in chosen:
            _put_graph(model, use_cutile, patches, trust_remote_code)
        _report_rest(patches, plan, why, use_cutile)
        patches.require_match(type(model).__name__)
    return patches


def revert(model: nn.Module | None = None) -> None:
    """Undoes what :func:`apply` and ``monkey_patch`` have patched in ``model``, or, without one, in transformers."""
    makers = (__name__, "tilegym.transformers.", "tilegym_generated_")
    for patches in reversed(PatchSet.active(None if model is None else model_in(model))):
        if patches.maker.startswith(makers):
            patches.revert()


def _first(wanted: dict[str, list[Item]]) -> dict[str, tuple[Place, ...]]:
    """Every item's best candidate; whether it fits a module is looked at when it is put there."""
    return {
        compute: tuple({id(item): item.candidates[0].place for item in items}.values())
        for compute, items in wanted.items()
    }


def _verified(
    model: nn.Module, wanted: dict[str, list[Item]], use_cutile: bool, why: dict[str, str]
) -> dict[str, tuple[Place, ...]]:
    """Of every item the first candidate that gives the same on captured calls."""
    items = [item for found in wanted.values() for item in found]
    points = {item.key: (item.candidates[0].place, item.requirement.modules[0]) for item in items}
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


def _put_graph(model: nn.Module, use_cutile: bool, patches: PatchSet, trust_remote_code: bool) -> None:
    """Lets ``model`` replay its decoding steps, if a small one of its kind generates the same tokens so."""
    why = decoding_misfit(small_model(model.config, 0, trust_remote_code, type(model)).model)
    if not why:
        put_graph(model, use_cutile, patches)
    else:
        patches.skip(Entry(type(model).__name__, GRAPH, "cutile" if use_cutile else get_current_backend()), why)


def _report_rest(patches: PatchSet, plan: Plan, why: dict[str, str], use_cutile: bool) -> None:
    """Says of everything that was found and not patched why not."""
    backend = "cutile" if use_cutile else get_current_backend()
    for item in plan.items:
        reason = why.get(item.key) or item.why
        if reason:
            for module in item.requirement.modules:
                patches.skip(Entry(module or plan.research.architecture, item.requirement.kind, backend), reason)
    for missed in plan.research.unrecognised:
        for module in missed.modules:
            patches.skip(Entry(module, missed.resembles or "unrecognised", backend), missed.why)

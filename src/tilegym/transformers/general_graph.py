"""CUDA graphs for a model of any family, of its decoding or of whole calls: one more compute beside :mod:`.general`."""

from torch import nn

from tilegym.backend import PREFER_CUTILE
from tilegym.transformers import computes
from tilegym.transformers import forward_graph
from tilegym.transformers.family import Family
from tilegym.transformers.patching import PatchSet

_ANY = Family("", "", (computes.GRAPH,))


def put_graph(model: nn.Module, use_cutile: bool = False, patches: PatchSet | None = None) -> PatchSet:
    """Lets ``generate`` of ``model`` replay its decoding steps; its attention has to be TileGym's already.

    Args:
        use_cutile: which backend the report names; a step runs what the model's modules run.
        patches: the set to add to; None makes one.

    Returns:
        The report, with the reason where the steps of this model cannot be captured; ``revert()`` undoes it.

    Raises:
        PatchError: ``patches`` is None, and the steps cannot be captured.
    """
    mine = PatchSet(model, maker=__name__) if patches is None else patches
    with mine.all_or_nothing():
        computes.GRAPH.in_model(mine, _ANY, PREFER_CUTILE if use_cutile else None, model)
        if patches is None:
            mine.require_match(type(model).__name__)
    return mine


def put_forward_graph(model: nn.Module, use_cutile: bool, patches: PatchSet) -> None:
    """Lets calls of ``model``, which is run once and not token by token, be replayed, where they take no gradients.

    Of a model of an encoder and a decoder those of its encoder.
    """
    target, path = model, type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        target = getattr(model, "get_encoder", lambda: model)()
        path = next((name for name, module in model.named_modules() if module is target and name), path)
    where = computes.entry(path, "graph", PREFER_CUTILE if use_cutile else None)
    if not hasattr(target, "config") or (target is model and getattr(model.config, "is_encoder_decoder", False)):
        patches.skip(where, "it has no encoder with a config of its own")
        return
    forward_graph.put(patches, target, where)

"""Configs of one model alone, in which patches say what attention and what experts it uses.

transformers reads that from the config, and models made from one config object share it.
"""

import copy
from typing import TYPE_CHECKING
from typing import Any

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def configs_that_choose(model: nn.Module) -> "list[PreTrainedConfig]":
    """The configs by which the parts of a model choose: its own, and, of one that continues text, the text's; of
    others, such as CLIP, those of all parts."""
    from transformers import PreTrainedConfig

    continues = hasattr(model, "can_generate") and model.can_generate()
    text = model.config.get_text_config(decoder=True) if continues else None
    parts = [part for part in vars(model.config).values() if isinstance(part, PreTrainedConfig)]
    return [model.config, *(part for part in parts if not continues or part is text)]


def own_config(model: nn.Module, private: bool) -> "PreTrainedConfig":
    """The config of ``model``, which its parts have from now on too: a copy unless it is ``private`` already, with
    copies of those parts of it that :func:`configs_that_choose` names."""
    shared, parts = model.config, configs_that_choose(model)[1:]
    own = shared if private else copy.copy(shared)
    pairs = [(shared, own)]
    for name, part in vars(shared).items():
        if any(part is chosen for chosen in parts):
            pairs.append((part, part if private else copy.copy(part)))
            setattr(own, name, pairs[-1][1])
    # A part that was patched by itself has a copy, too.
    held = {id(module.config): module.config for module in model.modules() if "config" in vars(module)}
    for config, new in pairs:
        same = {key for key, other in held.items() if other is config or _says_the_same(other, config)}
        for module in model.modules():
            if id(vars(module).get("config")) in same:
                module.config = new
    return own


def _says_the_same(a: Any, b: Any) -> bool:
    """Whether two configs do, but for what patches change in them."""
    if type(a) is not type(b):
        return False
    changed = dict.fromkeys(("_attn_implementation_internal", "_experts_implementation_internal"))
    return vars(a) | changed == vars(b) | changed

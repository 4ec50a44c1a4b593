"""Configs of one model alone, in which patches say what attention and what experts it uses.

transformers reads that from the config, and models made from one config object share it.
"""

import copy
from typing import TYPE_CHECKING
from typing import Any

from torch import nn

from tilegym.transformers.replacements import Replacement

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_OWN = "_tilegym_config"  # in a patched model's __dict__, so that a copy of it can be reverted by itself


def configs_that_choose(model: nn.Module) -> "list[PreTrainedConfig]":
    """The configs by which the parts of a model choose: its own, and, of one that continues text, the text's; of
    others, such as CLIP, those of all parts."""
    from transformers import PreTrainedConfig

    continues = hasattr(model, "can_generate") and model.can_generate()
    text = model.config.get_text_config(decoder=True) if continues else None
    parts = [part for part in vars(model.config).values() if isinstance(part, PreTrainedConfig)]
    return [model.config, *(part for part in parts if not continues or part is text)]


class UseOfOwnConfigs:
    """That a patch set needs ``model`` to have configs of its own.

    With the last of them that is undone it has those back that it shares, in which then stands what was changed in its
    own meanwhile, but for what patches have changed and undone.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def do(self) -> None:
        own = vars(self.model).setdefault(_OWN, _OwnConfigs())
        if self not in own.uses:
            own.uses.append(self)
        own.take(self.model)

    def undo(self) -> bool:
        own = vars(self.model).get(_OWN)
        if own is not None:
            own.uses = [use for use in own.uses if use is not self]
            if not own.uses:
                own.give_back()
                vars(self.model).pop(_OWN)
        return True


class _OwnConfigs:
    """The configs that a model has got for itself: a copy of its own, with copies of those parts of it that
    :func:`configs_that_choose` names."""

    def __init__(self) -> None:
        self.uses: list[UseOfOwnConfigs] = []
        self._steps: list[_Exchange] = []

    def take(self, model: nn.Module) -> None:
        """Gives them to all modules of ``model`` that hold what they are copies of; also to those that do by now."""
        shared, parts = model.config, configs_that_choose(model)[1:]
        private = any(step.new is shared for step in self._steps)
        own = shared if private else copy.copy(shared)
        pairs = []
        for name, part in vars(shared).items():
            if any(part is chosen for chosen in parts):
                pairs.append((part, part if private else copy.copy(part)))
                self._exchange(own, name, pairs[-1][1])
        pairs.insert(0, (shared, own))
        # A part that was patched by itself has a copy, too.
        held = {id(module.config): module.config for module in model.modules() if "config" in vars(module)}
        for config, new in pairs:
            same = {key for key, other in held.items() if other is config or _says_the_same(other, config)}
            for module in model.modules():
                if id(vars(module).get("config")) in same:
                    self._exchange(module, "config", new)

    def _exchange(self, owner: Any, name: str, new: Any) -> None:
        if vars(owner)[name] is not new:
            known = (step.before for step in self._steps if step.new is new)
            self._steps.append(_Exchange(owner, name, new, next(known, None)))
            self._steps[-1].do()

    def give_back(self) -> None:
        for step in reversed(self._steps):
            step.undo()


class _Exchange(Replacement):
    """A config in another's place, of which it was a copy with ``before`` in it."""

    def __init__(self, owner: Any, name: str, new: Any, before: dict[str, Any] | None) -> None:
        super().__init__(owner, name, new)
        self.before = dict(vars(new)) if before is None else before

    def undo(self) -> bool:
        now, former = vars(self.new), vars(self.former)
        former.update({n: v for n, v in now.items() if n not in self.before or self.before[n] is not v})
        for name in self.before.keys() - now.keys():
            former.pop(name, None)
        return super().undo()


def _says_the_same(a: Any, b: Any) -> bool:
    """Whether two configs do, but for what patches change in them."""
    if type(a) is not type(b):
        return False
    changed = dict.fromkeys(("_attn_implementation_internal", "_experts_implementation_internal"))
    return vars(a) | changed == vars(b) | changed

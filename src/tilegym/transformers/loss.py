"""The loss of a causal language model, from its hidden states instead of its logits.

The loss function is exchanged, and in the model's forward the output layer gives :class:`.late_logits.LateLogits`, from
which this function takes hidden states and weight. What transformers does in between stays as it is.
"""

import dis
import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tilegym.transformers import general_kernels
from tilegym.transformers import late_logits
from tilegym.transformers.forwards import HeldFunction
from tilegym.transformers.forwards import describe
from tilegym.transformers.forwards import held
from tilegym.transformers.forwards import reproducible
from tilegym.transformers.patching import ALREADY_PATCHED
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet


def loss_function(backend: str | None) -> HeldFunction:
    """Stands in for transformers' ``ForCausalLMLoss``."""
    return held(general_kernels.kernel("cross_entropy", (), backend))


def _is_ours(function: Any) -> bool:
    recipe = getattr(getattr(function, "function", None), "recipe", (None, ()))
    return recipe[0] is general_kernels.kernel and recipe[1][0] == "cross_entropy"


@functools.cache
def computes_causal_lm_loss(function: Callable) -> bool:
    """Whether ``function`` computes what :func:`loss_function` gives."""
    logits = 3 * torch.sin(torch.arange(1.0, 36, dtype=torch.float32, device="cpu")).view(1, 5, 7)
    labels = torch.tensor([[3, 1, -100, 6, 2]], device="cpu")
    ours = loss_function("pytorch")
    items, ones = torch.tensor(3, device="cpu"), {"ignore_index": 1, "shift_labels": labels.abs() % 7}
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return all(
                torch.allclose(function(logits, labels, 7, **o), ours(logits, labels, 7, **o), rtol=1e-5, atol=0)
                for o in ({}, {"num_items_in_batch": items}, ones)
            )
    except Exception:  # whatever it does with these arguments, it is not the formula
        return False


@reproducible
def forward_with_late_logits(original: Callable) -> Callable:
    """``original``, a model's forward, in which the output layer gives late logits if the loss is to be computed.

    The forward runs on a twin of the model: nothing of the model itself changes meanwhile, whatever threads it runs in.
    """
    position = list(inspect.signature(original).parameters).index("labels") - 1

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        labels = args[position] if len(args) > position else kwargs.get("labels")
        if labels is None or torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        name, head = output_layer(self)
        if not late_logits.is_plain(head) or not _is_ours(self.loss_function):
            return original(self, *args, **kwargs)
        given = []

        def late_linear(hidden):
            given.append(late_logits.late_linear(head, hidden))
            return given[-1]

        twin = late_logits.twin_of(
            self, _modules={**self._modules, name: late_logits.twin_of(head, forward=late_linear)}
        )
        outputs = original(twin, *args, **kwargs)
        for logits in given:
            if isinstance(logits, late_logits.LateLogits):
                logits.set_returned()
        return outputs

    forward.may_stay = True  # with another loss function it is the original
    return forward


def output_layer(model: nn.Module) -> tuple[str, nn.Module | None]:
    """A model's attribute that is its output layer, and that layer; None if there is none."""
    head = model.get_output_embeddings()
    return next(((name, m) for name, m in model._modules.items() if m is head and m is not None), ("", None))


def put_late_logits(patches: PatchSet, model: nn.Module, entry: Entry) -> None:
    """Lets the forward of ``model``, a causal language model, give late logits to its loss function."""
    name, head = output_layer(model)
    forward = type(model).forward
    if head is None:
        why = "it has no output layer of its own"
    elif not late_logits.is_plain(head):
        why = f"its logits are computed: {name} is a {describe(type(head))}"
        why += ", with hooks or another forward" if type(head) is nn.Linear else ""
    elif getattr(model.config, "final_logit_softcapping", None):
        why = "its logits are computed, to be capped (final_logit_softcapping)"
    elif "labels" not in inspect.signature(forward).parameters:
        why = "its forward takes no labels"
    elif any(step.opname == "STORE_ATTR" for step in dis.get_instructions(inspect.unwrap(forward))):
        why = "its forward keeps something in the model"  # and would in the twin
    else:
        patches.replace_forward(model, forward_with_late_logits(_original(forward)), entry)
        return
    patches.skip(entry, why)


def _original(forward: Callable) -> Callable:
    make, arguments = getattr(forward, "recipe", (None, ()))
    return arguments[0] if make is forward_with_late_logits else forward


def put_loss_function(patches: PatchSet, model: nn.Module, new: HeldFunction, expected: Callable, entry: Entry) -> bool:
    """Makes ``new`` the loss function of ``model`` if that is ``expected``; returns whether it is now."""
    current, entry = model.loss_function, _of_function(entry)
    if current is not expected and not _is_ours(current):
        return patches.skip(entry, f"its loss is {describe(current)}")
    patches.replace_attribute(model, "_loss_function", new, entry, own=False)
    return True


def _of_function(entry: Entry) -> Entry:
    return replace(entry, module=f"{entry.module}.loss_function")


class _LossProperty(property):
    """A class's ``loss_function``: ``new`` for models whose loss is ``expected``, for others what it is."""

    def __init__(self, original: property, new: HeldFunction, expected: Callable) -> None:
        def loss_function(model):
            found = original.fget(model)
            return new if found is expected else found

        super().__init__(loss_function, original.fset, original.fdel, original.__doc__)
        self.original, self.new = original, new


def put_in_class(patches: PatchSet, cls: type, backend: str | None, expected: Callable, entry: Entry) -> None:
    """Both for a class of causal language models; whether the output layer is a linear layer shows when it runs."""
    current, new = cls.loss_function, loss_function(backend)
    if isinstance(current, _LossProperty):
        if current.new is new:
            patches.skip(entry, ALREADY_PATCHED)
            return
        current = current.original
    patches.replace_property(cls, "loss_function", _LossProperty(current, new, expected), _of_function(entry))
    patches.replace_method(cls, "forward", forward_with_late_logits(_original(cls.forward)), entry)

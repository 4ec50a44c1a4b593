"""What tests of the loss have in common."""

from tiny_models import computes

from tilegym.transformers import monkey_patch
from tilegym.transformers.late_logits import LateLogits

FUSED, WHOLE = "fused_linear_cross_entropy", "cross_entropy"


def only_loss(family, model=None, use_cutile=False):
    """Patches the loss and nothing else."""
    off = dict.fromkeys(computes(family) - {"loss"}, False)
    return getattr(monkey_patch, f"apply_tilegym_kernel_to_{family}")(model=model, use_cutile=use_cutile, **off)


def losses_of(calls):
    """The ops among those of ``observed()`` that compute losses."""
    return {op for op, _ in calls if op in (FUSED, WHOLE)}


def count_whole(monkeypatch):
    """A list that gets the shape of late logits that are computed after all."""
    shapes, original = [], LateLogits.whole

    def whole(self):
        if not self.is_whole:
            shapes.append(tuple(self.shape))
        return original(self)

    monkeypatch.setattr(LateLogits, "whole", whole)
    return shapes

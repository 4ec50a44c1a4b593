"""Patched models are as exact in bf16 as they were."""

import torch
from tiny_models import backends
from tiny_models import families
from tiny_models import make_model
from tiny_models import tokens

from tilegym.transformers import monkey_patch


def logits_and_choices(model, ids):
    """The logits, and of each router in order its scores [T, E] and the experts [T, k] that it chose."""
    choices = []

    def keep(module, args, outputs):
        choices.append((outputs[0].float(), outputs[2].sort(-1).values))

    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    handles = [router.register_forward_hook(keep) for router in routers]
    with torch.no_grad():
        result = model(ids).logits.float()
    for handle in handles:
        handle.remove()
    return result, choices


def assert_as_exact(error, of_the_unpatched):
    # Both round a few hundred times on the way: the mean tells, the maximum of so few numbers scatters more.
    assert error.mean() <= 1.5 * of_the_unpatched.mean() and error.max() <= 2 * of_the_unpatched.max()


@families
@backends
def test_bf16_is_as_exact_as_the_unpatched_model(family, backend):
    """Up to where a rounding has sent a token to another expert, as it may where two have nearly the same score.

    What such a token and those behind it give tells nothing of the rounding: with one of them more than the unpatched
    model has, the mean error of all logits is half as large again. So the routers' scores are compared like the logits,
    a choice may differ only by what they differ, and from there on its sequence is left out.
    """
    ids, model = tokens(8, 11), make_model(family, torch.bfloat16)
    exact, exactly = logits_and_choices(make_model(family), ids)
    expected, as_expected = logits_and_choices(model, ids)
    with monkey_patch.apply(model, use_cutile=backend == "cutile"):
        got, chosen = logits_and_choices(model, ids)
    compared = torch.ones_like(ids, dtype=torch.bool)
    for (exact_scores, exact_ids), (unpatched_scores, unpatched_ids), (scores, experts) in zip(
        exactly, as_expected, chosen, strict=True
    ):
        rows, top = compared.view(-1), exact_scores.sort(-1, descending=True).values
        error = (scores - exact_scores).abs()[rows]
        assert_as_exact(error, (unpatched_scores - exact_scores).abs()[rows])
        differs, k = (experts != exact_ids).any(-1), experts.shape[-1]
        margin = top[:, k - 1] - top[:, k]
        assert (margin[rows & differs] <= 2 * error.max()).all()
        differs |= (unpatched_ids != exact_ids).any(-1)
        compared &= differs.view_as(ids).cumsum(1) == 0
    assert compared.float().mean() > 0.5
    assert_as_exact((got - exact).abs()[compared], (expected - exact).abs()[compared])

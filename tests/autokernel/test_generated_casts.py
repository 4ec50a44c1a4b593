"""Casts, logical operations and dropout in generated kernels: the right numbers, or a refusal."""

import pytest
import torch
import torch.nn.functional as F
from common import randn
from test_generated_kernels import loaded

from tilegym.autokernel.generate import Unsupported
from tilegym.autokernel.generate import generate


def integers():
    return torch.arange(4 * 64, device=randn(1).device).reshape(4, 64) % 3


def mask(x, i):
    return x * i.bool()


def truth_as_numbers(x):
    return x.bool().to(x.dtype) * 2


def truth_of_numbers(x):
    return torch.where((x - x.abs()).type(torch.bool), x, 0.5)


def dropout_that_does_nothing(x):
    return F.dropout(x, 0.5, training=False) * 2


def dropout_of_nothing(x):
    return F.dropout(x, 0.0, training=True) * 2


def both_comparisons(x):
    return torch.where((x > -0.4) & (x < 0.7) | (x > 1.5), x, -x)


@pytest.mark.parametrize(
    "region",
    [mask, both_comparisons, truth_as_numbers, truth_of_numbers, dropout_that_does_nothing, dropout_of_nothing],
)
def test_casts(region):
    x = randn(4, 64).clamp(min=-0.5)
    x[:, ::5] = 0.0
    given = [x, integers()][: 2 if region is mask else 1]
    kernel = generate(region, given)
    torch.testing.assert_close(loaded(kernel)(*given), region(*given))


REFUSED = {
    "integer of a number": (lambda x, i: (i.float() * 0.5).long() * i, "cut off"),
    "integer among numbers": (lambda x, i: x * (i * 0.5).to(torch.int64), "cut off"),
    "truth as an integer": (lambda x, i: i.bool().to(torch.int64) + i, "cut off"),
    "both numbers": (lambda x, i: torch.logical_and(x, x) * x + i, "of numbers"),
    "not a number": (lambda x, i: torch.logical_not(x) * x + i, "of numbers"),
    "dropout": (lambda x, i: F.dropout(x, 0.5, training=True) * i, "random"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_compute_something_else_is_refused(what):
    region, why = REFUSED[what]
    with pytest.raises(Unsupported, match=why):
        generate(region, [randn(4, 64), integers()], "region")

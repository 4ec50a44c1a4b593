"""Rotary functions of any family, in the forms of calls that few families have."""

import pytest
import torch

from tilegym.transformers.general_rope import rope

PARAMETERS = ("q", "k", "cos", "sin", "unsqueeze_dim")
ROLES = tuple((name, name) for name in PARAMETERS[:4])


def reference(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    """transformers' function of Qwen4-Exp."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]

    def rotated(x):
        a, b = x[..., :width].chunk(2, -1)
        return torch.cat((x[..., :width] * cos + torch.cat((-b, a), -1) * sin, x[..., width:]), -1)

    return rotated(q) if k is None else (rotated(q), rotated(k))


def angles(*shape):
    table = torch.arange(float(torch.Size(shape).numel())).view(shape)
    table = torch.cat((table, table), -1)
    return {"cos": table.cos(), "sin": table.sin()}


@pytest.mark.parametrize("backend", ["pytorch", "cutile"])
@pytest.mark.parametrize("call", [{"k": None}, {}], ids=["no keys", "keys left out"])
@pytest.mark.parametrize(
    ("shape", "dim", "given"),
    [
        ((2, 5, 3, 20), 2, (2, 5, 8)),
        ((2, 3, 5, 20), 1, (2, 5, 8)),
        ((5, 3, 20), 1, (5, 8)),  # of no batch
        ((3, 5, 20), 0, (5, 8)),
        ((5, 3, 16), -2, (5, 8)),
    ],
    ids=str,
)
def test_queries_alone(shape, dim, given, call, backend):
    q, table = torch.randn(shape), angles(*given)
    got = rope(PARAMETERS, ROLES, backend=backend)(q, unsqueeze_dim=dim, **table, **call)
    torch.testing.assert_close(got, reference(q, unsqueeze_dim=dim, **table))


@pytest.mark.parametrize(("parameters", "dim"), [(PARAMETERS, 1), (PARAMETERS[:4], 1), (PARAMETERS[:4], 2)], ids=str)
def test_both_of_no_batch(parameters, dim):
    """Where angles are put beside heads by ``unsqueeze(-2)``, their dimension of a batch's heads is 2."""
    q, k, table = torch.randn(5, 4, 16), torch.randn(5, 1, 16), angles(5, 8)
    got = rope(parameters, ROLES, heads_dim=dim)(q, k, **table)
    torch.testing.assert_close(got, reference(q, k, **table))

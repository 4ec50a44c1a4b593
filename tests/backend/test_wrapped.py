"""Tensors that stand for others, such as DTensors, are PyTorch's: a kernel would read what is not there."""

import pytest
import torch
from recording_fakes import served_op
from recording_fakes import x
from torch.testing._internal.two_tensor import TwoTensor

from tilegym import ops
from tilegym.backend.wrapped import any_wrapped
from tilegym.errors import FallbackWarning
from tilegym.errors import UnsupportedError


@pytest.fixture
def served(monkeypatch):
    monkeypatch.delenv("DISABLE_FALLBACK", raising=False)
    with served_op() as op:
        yield op


class Negative(torch.Tensor):
    """The numbers of ``held``, with the other sign."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*(-a.held if isinstance(a, cls) else a for a in args), **(kwargs or {}))


def wrapped(seed: int = 0) -> torch.Tensor:
    return TwoTensor(x(seed=seed), x(seed=seed + 100))


def test_what_is_wrapped():
    plain = (x(), torch.nn.Parameter(x()), 1, 2.0, None, "a", [x()], torch.float32, (3, x()))
    assert not any_wrapped(plain)
    for value in (wrapped(), torch.nn.Parameter(wrapped()), [x(), wrapped()], Negative(x())):
        assert any_wrapped((*plain, value))


def test_pytorch_serves_them(served):
    with pytest.warns(FallbackWarning, match="stands for others"):
        result = served(wrapped())
    assert served.calls == 0 and isinstance(result, TwoTensor)
    assert torch.equal(result.a, x() + 1.5) and torch.equal(result.b, x(seed=100) + 1.5)


def test_also_those_that_cannot_be_taken_apart(served):
    with pytest.warns(FallbackWarning, match="stands for others"):
        assert torch.equal(served(Negative(x())), -x() + 1.5)
    assert served.calls == 0


def test_no_recording_of_plain_tensors_serves_them(served):
    assert served.calls_of(*((x(seed=seed),) for seed in range(3))) == [1, 2, 2]
    with pytest.warns(FallbackWarning):
        result = served(wrapped())
    assert served.calls == 2 and torch.equal(result.b, x(seed=100) + 1.5)
    assert served.calls_of((x(seed=4),)) == [2]


def test_none_is_served_where_nothing_may_fall_back(served, monkeypatch):
    monkeypatch.setenv("DISABLE_FALLBACK", "1")
    with pytest.raises(UnsupportedError, match="stands for others"):
        served(wrapped())


def test_a_wrapped_weight_with_gradients():
    weight = torch.nn.Parameter(TwoTensor(torch.ones(8), torch.full((8,), 2.0)))
    given = TwoTensor(torch.randn(4, 8), torch.randn(4, 8)).requires_grad_()
    with pytest.warns(FallbackWarning):
        y = ops.rms_norm(given, (8,), weight, 1e-5, backend="cutile")
    y.sum().backward()
    for part in ("a", "b"):
        leaf, scale = getattr(given, part).detach().requires_grad_(), getattr(weight, part).detach().requires_grad_()
        expected = torch.nn.functional.rms_norm(leaf, (8,), scale, 1e-5)
        expected.sum().backward()
        torch.testing.assert_close(getattr(y, part), expected)
        torch.testing.assert_close(getattr(given.grad, part), leaf.grad)
        torch.testing.assert_close(getattr(weight.grad, part), scale.grad)

"""Tensors that kernels cannot read as they are, such as DTensors, are PyTorch's: they would read what is not there."""

import warnings

import pytest
import torch
from recording_fakes import served_op
from recording_fakes import x
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

from tilegym import ops
from tilegym.backend.wrapped import unreadable
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


class Several(list):
    """A list of a library's own."""


def wrapped(seed: int = 0) -> torch.Tensor:
    return TwoTensor(x(seed=seed), x(seed=seed + 100))


def test_what_is_wrapped():
    plain = (x(), torch.nn.Parameter(x()), 1, 2.0, None, "a", [x()], torch.float32, (3, x()))
    assert unreadable(plain) is None
    for value in (wrapped(), torch.nn.Parameter(wrapped()), [x(), wrapped()], Several([wrapped()]), Negative(x())):
        assert "stands for others" in str(unreadable((*plain, value)))


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


def negative(seed: int = 0) -> torch.Tensor:
    """x, of which memory holds -x."""
    turned = torch.complex(x(), -x(seed=seed)).conj().imag
    assert turned.is_neg() and torch.equal(turned, x(seed=seed))
    return turned


@pytest.mark.parametrize("seen", [0, 2, 6])
def test_a_sign_that_is_to_be_turned(served, seen):
    for seed in range(seen):
        strided = torch.empty_strided((8,), (2,)).copy_(x(seed=seed))
        assert torch.equal(served(strided), strided + 0.5 + 1)
    calls = served.calls
    with pytest.warns(FallbackWarning, match="resolve_neg"):
        assert torch.equal(served(negative()), x() + 0.5 + 1)
    assert torch.equal(served(x(), several=[negative()]), x() + 0.5 + 1)
    assert served.calls == calls


@pytest.mark.parametrize("seen", [0, 2, 6], ids="calls_before={}".format)
def test_transforms(served, seen):
    served.calls_of(*((x(seed=seed),) for seed in range(seen)))
    calls = served.calls
    with pytest.warns(FallbackWarning, match="transforms"):
        assert torch.equal(torch.func.vmap(served)(x(3, 8)), x(3, 8) + 0.5 + 1)
    assert torch.equal(torch.func.grad(lambda x: served(x).square().sum())(x()), 2 * (x() + 0.5 + 1))
    assert torch.equal(torch.func.jvp(served, (x(),), (x(seed=1),))[1], x(seed=1))
    both = torch.func.vmap(torch.func.grad(lambda x: served(x).square().sum()))
    assert torch.equal(both(x(3, 8)), 2 * (x(3, 8) + 0.5 + 1))
    assert served.calls == calls


@pytest.mark.parametrize("seen", [0, 2, 6], ids="calls_before={}".format)
def test_tangents(served, seen):
    served.calls_of(*((x(seed=seed),) for seed in range(seen)))
    calls = served.calls
    with forward_ad.dual_level():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(served(x()), x() + 0.5 + 1)  # has none
        assert served.calls == calls + 1
        with pytest.warns(FallbackWarning, match="tangent"):
            value, tangent = forward_ad.unpack_dual(served(forward_ad.make_dual(x(), x(seed=1))))
        assert torch.equal(value, x() + 0.5 + 1) and torch.equal(tangent, x(seed=1))
        served(x(), several=[forward_ad.make_dual(x(), x(seed=1))])
    assert served.calls == calls + 1


def silu_and_mul(weight: torch.Tensor) -> torch.Tensor:
    return ops.silu_and_mul(weight, backend="cutile")


def test_upstream_gradients_whose_sign_is_to_be_turned():
    """As complex numbers leave behind."""
    gradients = []
    for op in (silu_and_mul, lambda w: torch.nn.functional.silu(w[:, :8]) * w[:, 8:]):
        leaf = x(4, 16).requires_grad_()
        y = op(leaf)
        torch.complex(x(4, 8, seed=1), y).conj().sum().abs().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0].any()


def test_several_backward_passes_at_a_time():
    leaf = x(4, 16).requires_grad_()
    y = silu_and_mul(leaf)
    with pytest.raises(UnsupportedError, match='SiluAndMul: .*transforms.*backend="pytorch"'):
        torch.autograd.grad(y, leaf, torch.ones(3, *y.shape), is_grads_batched=True, retain_graph=True)
    y.sum().backward()
    y = ops.silu_and_mul(leaf, backend="pytorch")
    torch.testing.assert_close(
        torch.autograd.grad(y, leaf, torch.ones(3, *y.shape), is_grads_batched=True)[0][2], leaf.grad
    )


def test_an_upstream_tangent():
    leaf = x(4, 16).requires_grad_()
    y = silu_and_mul(leaf)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match='SiluAndMul: .*tangent.*backend="pytorch"'):
        torch.autograd.grad(y, leaf, forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def norm(rows: torch.Tensor, backend: str = "cutile") -> torch.Tensor:
    return ops.rms_norm(rows, (16,), torch.ones(16), eps=1e-5, backend=backend)


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.vmap,
        lambda f: torch.func.grad(lambda x: f(x).square().sum()),
        lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    ],
    ids=["vmap", "grad", "jvp"],
)
def test_compiled_transforms(transform):
    given, plain = x(4, 16), torch.rsqrt(x(4, 16).square().mean(-1, keepdim=True) + 1e-5) * x(4, 16)
    call = compiled(lambda x: (norm(x), transform(norm)(x)))
    got = call(given)
    torch.testing.assert_close(got[0], plain)
    torch.testing.assert_close(got[1], transform(lambda x: norm(x, "pytorch"))(given))


def test_compiled_tangents():
    call, given = compiled(norm), x(4, 16)
    call(given)  # traced without one
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(given, torch.ones_like(given))
        try:
            compiled(torch.sin)(dual)
        except torch._dynamo.exc.Unsupported:
            pytest.skip("PyTorch compiles nothing that gets a tangent, from 2.15 on")
        expected, tangent = (forward_ad.unpack_dual(f(dual)).tangent for f in (lambda x: norm(x, "pytorch"), call))
    torch.testing.assert_close(tangent, expected)


@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
def test_what_a_transform_has_left_behind(gradients):
    """A tensor that its function has put elsewhere, and in which the plain one still is."""
    left = []

    def square(t):
        left.append(t)
        return t.square().sum()

    plain, weight = torch.randn(4, 16), torch.rand(16).requires_grad_(gradients)
    torch.func.grad(square)(plain)
    for _ in range(4):
        y = ops.rms_norm(left[0], 16, weight, 1e-6, backend="cutile")
        assert torch.equal(y, ops.rms_norm(plain.clone(), 16, weight, 1e-6, backend="cutile"))
        if gradients:
            assert torch.autograd.grad(y.sum(), weight)[0].shape == (16,)
            weight = weight.detach().requires_grad_()

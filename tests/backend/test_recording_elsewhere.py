"""Which function serves calls of a kind is found out once: PyTorch's, and the kernels' where gradients are wanted."""

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from tilegym import backend
from tilegym.backend import dispatcher
from tilegym.backend import recording
from tilegym.backend import recording_source
from tilegym.backend import slower
from tilegym.errors import FallbackWarning
from tilegym.errors import UnsupportedError


class Product:
    """An op that PyTorch serves faster from 8 rows on; notes the rows that are looked up, and who served calls."""

    def __init__(self) -> None:
        self.looked_up, self.served, self.errors = [], [], []

        @backend.dispatch("elsewhere_for_test")
        def op(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None, times: float = 1.0) -> Tensor:
            """times * x @ weight.T"""

        op.op.is_slower = self.is_slower

        @backend.register_impl("elsewhere_for_test", "pytorch")
        def _(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None, times: float = 1.0) -> Tensor:
            self.served.append("pytorch")
            return (times * F.linear(x, weight)).to(dtype or x.dtype)

        @backend.register_impl("elsewhere_for_test", "cutile")
        def _(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None, times: float = 1.0) -> Tensor:
            self.served.append("cutile")
            if self.errors:
                raise self.errors.pop(0)
            return (times * F.linear(x, weight)).to(dtype or x.dtype)

        self.op = op

    def is_slower(self, args, kwargs):
        self.looked_up.append(slower.rows_of(args, kwargs))
        return self.looked_up[-1] >= 8 and not slower._ignored


@pytest.fixture
def product(monkeypatch):
    monkeypatch.delenv("DISABLE_FALLBACK", raising=False)
    monkeypatch.setattr(slower, "_ignored", False)  # as outside of tests
    recording.forget()
    try:
        with backend.use_backend("cutile"):
            yield Product()
    finally:
        dispatcher._ops.pop("elsewhere_for_test")
        dispatcher._warned.clear()
        recording.forget()


WEIGHT = torch.randn(12, 16)


@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
def test_pytorchs(product, gradients):
    weight = WEIGHT.clone().requires_grad_(gradients)
    for n in range(6):
        x = torch.randn(2, 4, 16)
        dtype = torch.bfloat16 if n % 2 else None
        y = product.op(x, weight, dtype=dtype)
        assert torch.equal(y, F.linear(x, WEIGHT).to(dtype or torch.float32)) and y.requires_grad is gradients
        if gradients:
            (grad,) = torch.autograd.grad(y.float().sum(), weight)
            torch.testing.assert_close(grad, x.sum((0, 1)).expand(12, 16))
    assert product.served == ["pytorch"] * 6 and product.looked_up == [8] * 4, "twice for each dtype"
    with torch.set_grad_enabled(False):
        product.op(torch.randn(2, 4, 16), WEIGHT.clone().requires_grad_())
    assert product.looked_up == [8] * (5 if gradients else 4), "of which nothing is known, if others wanted gradients"
    with slower.ignored():
        product.op(torch.randn(2, 4, 16), weight)
    assert product.served[6:] == ["pytorch", "cutile"]


def test_kernels_where_gradients_are_wanted(product):
    weight = WEIGHT.clone().requires_grad_()
    for _ in range(5):
        x = torch.randn(4, 16)
        (grad,) = torch.autograd.grad(product.op(x, weight).sum(), weight)
        torch.testing.assert_close(grad, x.sum(0).expand(12, 16))
    assert product.served == ["cutile"] * 5 and product.looked_up == [4, 4]
    # Kernels alone are recorded, and these calls have none.
    for _ in range(5):
        product.op(torch.randn(4, 16), WEIGHT)
    assert product.looked_up[2:] == [4] * 6


def test_errors_take_the_way_of_all_calls(product):
    x, weight = torch.randn(4, 16), WEIGHT.clone().requires_grad_()
    for _ in range(3):
        product.op(x, weight)
    product.errors = [UnsupportedError("not today")]
    with pytest.warns(FallbackWarning, match="not today") as caught:
        assert torch.equal(product.op(x, weight), F.linear(x, weight))
    assert caught[0].filename == __file__ and product.served[3:] == ["cutile", "pytorch"]
    product.errors = [ZeroDivisionError()]
    with pytest.raises(ZeroDivisionError):
        product.op(x, weight)
    assert torch.equal(product.op(x, weight), F.linear(x, weight)) and product.served[5:] == ["cutile"] * 2


@pytest.mark.parametrize("plain_first", [False, True])
def test_tensors_that_no_kernel_can_read(product, plain_first):
    """Nor after calls with plain tensors of their sizes."""
    x, plain = torch.randn(4, 16), WEIGHT.clone().requires_grad_()
    if plain_first:
        for _ in range(3):
            product.op(x, plain)
        product.served.clear()
    for _ in range(4):
        weight = TwoTensor(WEIGHT.clone(), 2 * WEIGHT).requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            y = product.op(x, weight)
        assert torch.equal(y.b, 2 * F.linear(x, WEIGHT))
    assert product.served == ["pytorch"] * 4


def test_errors_of_numbers_that_are_none(product):
    """As serving all calls does: they become numbers."""
    x, weight = torch.randn(4, 16), WEIGHT.clone().requires_grad_()
    for _ in range(3):
        product.errors = [TypeError()]
        y = product.op(x, weight, times=torch.tensor(2.0).numpy()[()])
        assert torch.equal(y, 2 * F.linear(x, weight))
    assert product.served == ["cutile"] * 6


def test_a_question_with_another_answer(product, monkeypatch):
    answers, ask = [1], recording.ask
    plain = product.is_slower
    product.op.op.is_slower = lambda *call: ask(lambda: answers[-1]) > 0 and plain(*call)
    for answer in (1, 1, 1, 0, 0, 0, 1, 1):
        answers.append(answer)
        product.op(torch.randn(8, 16), WEIGHT)
    assert product.served == ["pytorch"] * 3 + ["cutile"] * 3 + ["pytorch"] * 2


def test_of_tensors():
    def leading(a: Tensor, b: Tensor | None = None, n: int = 1, name: str = "x"):
        return a, b, n, name

    def among(n: int, a: Tensor, name: str = "x", *, b: Tensor | None = None):
        return a, b, n, name

    a, b = torch.zeros(1), torch.ones(1)
    for function, args, kwargs in (
        (leading, (a, b, 3), {"name": "y"}), (leading, (a,), {"n": 3, "name": "y", "b": b}),
        (among, (3, a), {"name": "y", "b": b}), (among, (3, a, "y"), {}),
    ):  # fmt: skip
        alone = recording_source.of_tensors(function, inspect.signature(function), args, kwargs)
        assert alone(b, None) == (b, None, 3, "y")
        assert alone(a, b) == (a, b, 3, "y")
    assert not recording_source.has_lists(inspect.signature(among))

    def several(a: Tensor, b: list[Tensor] | None = None):
        pass

    assert recording_source.has_lists(inspect.signature(several))

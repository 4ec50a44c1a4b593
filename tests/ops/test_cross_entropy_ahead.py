import functools

import pytest
import torch
from common import ARCHITECTURES
from common import HAS_GPU
from common import PyTestCase
from common import assert_compiles
from common import device
from common import dtypes
from common import gpu
from common import randn
from common import recorded_launches
from common import some

from tilegym import interpreter
from tilegym import set_gradients_in_place
from tilegym.ops import cross_entropy
from tilegym.ops.cutile import cross_entropy_ahead as ahead
from tilegym.ops.cutile import parts
from tilegym.ops.cutile.cross_entropy_ahead import cross_entropy_correct
from tilegym.ops.cutile.cross_entropy_ahead import cross_entropy_forward_ahead
from tilegym.ops.pytorch.cross_entropy import cross_entropy as reference

M, V = 13, 33001
NAN, INF = float("nan"), float("inf")


def arguments(*shape, dtype=torch.bfloat16, **options):
    """Logits, and targets of which every third is ignored."""
    target = (randn(*shape[:-1], seed=1).abs() * 1e4).long() % shape[-1]
    target.view(-1)[1::3] = -100
    return dict(logits=randn(*shape, dtype=dtype) * 3, target=target) | options


def gradients(kwargs, *scales):
    """Those of the logits for these gradients of the loss, one step after the other."""
    found = []
    for scale in scales:
        logits = kwargs["logits"].detach().requires_grad_()
        loss = cross_entropy(**kwargs | {"logits": logits}, backend="cutile")
        assert type(loss.grad_fn).__name__ == "CrossEntropyAheadBackward"
        found += torch.autograd.grad(loss, logits, torch.as_tensor(scale, device=logits.device))
    return found


class Test_CrossEntropyAhead(PyTestCase):
    @pytest.fixture(autouse=True)
    def few_multiprocessors(self, monkeypatch):
        """So many that few long rows keep them busy; and a new process's expectations."""
        monkeypatch.setattr(ahead, "sm_count", lambda device: 5)
        monkeypatch.setattr(ahead, "ahead_plan", ahead.ahead_plan.__wrapped__)
        monkeypatch.setattr(ahead, "_expected", functools.cache(ahead._expected.__wrapped__))
        if not HAS_GPU:
            monkeypatch.setattr(parts, "PATIENCE", 0)  # blocks run one after the other

    @dtypes()
    @pytest.mark.parametrize("shape", [(M, V), (16, V), (2, 4, 40000)], ids=str)
    def test_op(self, shape, dtype):
        """With a gradient of the loss that is not the expected one."""
        kwargs = arguments(*shape, dtype=dtype)
        kwargs["logits"][..., 0, :20000] = -INF  # a whole part without a maximum
        with recorded_launches(run=True) as launches:
            self.assertCorrectness(cross_entropy, reference, kwargs, {"backend": "cutile"}, gradient=True)
        if not HAS_GPU:
            names = [kernel._pyfunc.__name__ for kernel, _ in launches]
            assert names == ["expect_kernel", "clear_kernel", "gradient_kernel", "finish_kernel", "correct_kernel"]

    @pytest.mark.skipif(HAS_GPU, reason="chooses the order of the interpreter's blocks")
    @pytest.mark.parametrize("order", ["shuffled", "threads"])
    def test_blocks_that_wait_for_others(self, order, monkeypatch):
        options = {"sanitize": False} if order == "threads" else {"seed": 1}
        monkeypatch.setattr(interpreter, "launch", functools.partial(interpreter.launch, order=order, **options))
        monkeypatch.setattr(parts, "PATIENCE", 2**30 if order == "threads" else 0)
        number = torch.get_num_threads()
        torch.set_num_threads(16)
        kwargs = arguments(M, V)
        self.assertCorrectness(cross_entropy, reference, kwargs, {"backend": "cutile"}, gradient=True)
        torch.set_num_threads(number)

    @dtypes(*some((torch.float32, torch.float16, torch.bfloat16), torch.bfloat16))
    def test_what_is_expected_changes_no_bit(self, dtype):
        kwargs = arguments(M, V, dtype=dtype)
        kwargs["logits"][0, kwargs["target"][0]] = 20.0
        first, once, twice, thrice, back = gradients(kwargs, 1.0, 0.5, 0.5, 0.5, 1.0)
        assert torch.equal(first, back) and torch.equal(once, twice) and torch.equal(once, thrice)
        logits = kwargs["logits"].double().requires_grad_()
        loss = reference(logits, kwargs["target"])
        (expected,) = torch.autograd.grad(loss, logits, torch.tensor(0.5, device=logits.device).double())
        assert (once - expected).norm() < 4e-3 * expected.norm()

    def test_the_forward_pass_writes_the_gradient(self):
        kwargs = arguments(M, V)
        (grad,) = gradients(kwargs, 1.0)
        expected = ahead._expected(grad.get_device())
        assert torch.equal(cross_entropy_forward_ahead(*kwargs.values(), expected, -100)[2], grad)

    def test_what_is_expected(self):
        """What the backward pass before was given, if it was given it twice; at first 1."""
        kwargs = arguments(M, V)
        for scale, same in ((1.0, True), (1.0, True), (0.5, False), (0.5, True), (1.0, False)):
            gradients(kwargs, scale)
            assert ahead._expected(kwargs["logits"].get_device()).tolist() == [scale, same]

    def test_the_graph_runs_backward_again(self):
        kwargs = arguments(M, V)
        logits = kwargs["logits"].requires_grad_()
        loss = cross_entropy(**kwargs, backend="cutile")
        first, again = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
        kept = first.clone()
        first.zero_()
        assert torch.equal(again, kept) and again.any()

    def test_special_values(self):
        kwargs = arguments(M, V)
        x = kwargs["logits"]
        kwargs["target"][1] = -100
        kwargs["target"][2] = V
        x[0], x[1], x[3, 5], x[6, 7] = -INF, NAN, NAN, INF
        (grad,) = gradients(kwargs, 1.0)
        assert not grad[[1, 4, 7]].any() and grad[5].isfinite().all() and grad[5].any()
        assert grad[[0, 2, 3]].isnan().all() and grad[6, 7].isnan()

    def test_sure_predictions_cost_nothing(self):
        logits = torch.full((16, V), -1e4, dtype=torch.bfloat16, device=device())
        logits[:, 7] = torch.linspace(-300, 300, 16)
        target = torch.full((16,), 7, device=device())
        logits.requires_grad_()
        loss = cross_entropy(logits, target, backend="cutile")
        loss.backward()
        assert loss == 0 and not logits.grad.any()

    def test_everything_ignored(self):
        kwargs = arguments(M, V)
        kwargs["target"].fill_(-100)
        self.assertCorrectness(cross_entropy, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_everything_ignored_where_a_gradient_of_0_is_expected(self):
        """Over no rows that is NaN, as if nothing was expected."""
        logits, target = arguments(M, V).values()
        target.fill_(-100)
        expected = torch.tensor([0.0, 1.0], device=logits.device)
        loss, number, dx, *kept = cross_entropy_forward_ahead(logits, target, expected, -100)
        dx.fill_(7.0)  # whatever was in its memory
        cross_entropy_correct(torch.zeros_like(loss), number, logits, target, *kept, dx, expected, -100, False)
        assert not dx.any()

    @dtypes(torch.float64, torch.bfloat16)
    def test_another_default_dtype(self, dtype):
        kwargs, before = arguments(M, V), torch.get_default_dtype()
        (expected,) = gradients(kwargs, 0.3)
        ahead._expected.cache_clear()
        torch.set_default_dtype(dtype)
        try:
            (grad,) = gradients(kwargs, torch.tensor(0.3, dtype=torch.float32))
        finally:
            torch.set_default_dtype(before)
        assert torch.equal(grad, expected)

    def test_where_not(self, monkeypatch):
        logits = randn(M, V, dtype=torch.bfloat16).requires_grad_()
        assert ahead.serves(logits)
        for options in ({"reduction": "sum"}, {"label_smoothing": 0.1}, {"softcap": 30.0}, {"z_loss": 0.1}):
            loss = cross_entropy(**arguments(M, V, **options) | {"logits": logits}, backend="cutile")
            assert type(loss.grad_fn).__name__ == "CrossEntropyBackward"
        with set_gradients_in_place(True):
            assert not ahead.serves(logits)
        with torch.autograd.graph.save_on_cpu():
            assert not ahead.serves(logits)
        assert not ahead.serves(logits[:2]) and not ahead.serves(logits[:, :16000])
        monkeypatch.setattr(ahead, "sm_count", lambda device: 1)  # not all parts of a row at once
        assert not ahead.serves(logits)

    def test_operators(self):
        logits, target = arguments(M, V).values()
        expected = torch.ones(2, device=logits.device)
        args = (logits, target, expected, -100)
        torch.library.opcheck(cross_entropy_forward_ahead.operator, args)
        loss, number, dx, *kept = cross_entropy_forward_ahead(*args)
        args = (torch.full_like(loss, 0.5), number, logits, target, *kept, dx, expected, -100, False)
        torch.library.opcheck(cross_entropy_correct.operator, args)

    @pytest.mark.parametrize(
        ("dtype", "overlap", "architectures"),
        [(torch.bfloat16, False, ARCHITECTURES), (torch.bfloat16, True, ("sm_90",)), (torch.float32, True, ("sm_90",))],
    )
    def test_compiles(self, dtype, overlap, architectures, monkeypatch):
        """Launches overlap on compute capability 9.0."""
        for module in (ahead, parts):
            monkeypatch.setattr(module, "overlaps", lambda device: overlap)
        x, target, expected = torch.empty(M, 40000, dtype=dtype), torch.zeros(M, dtype=torch.int64), torch.ones(2)
        with recorded_launches() as launches:
            loss, number, dx, *kept = cross_entropy_forward_ahead(x, target, expected, -100)
            cross_entropy_correct(loss, number, x, target, *kept, dx, expected, -100, False)
        for kernel, args in launches:
            assert_compiles(kernel, args, architectures)

    @gpu
    def test_graph_capture(self):
        target = torch.arange(M, device="cuda")

        def step(x):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(cross_entropy(x, target, backend="cutile"), x)

        self.assertCaptures(step, randn(M, V, dtype=torch.bfloat16))

"""Logits that are computed when somebody reads them: what is answered without, and that all else sees the logits."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from common import HAS_GPU
from tiny_models import assert_close
from tiny_models import computes
from tiny_models import make_model
from tiny_models import tokens
from torch import nn

from tilegym import ops
from tilegym.errors import LateLogitsError
from tilegym.transformers import monkey_patch
from tilegym.transformers.late_logits import LateLogits


@pytest.fixture(params=["llama", "granite"])
def run(request):
    """(the model, what its logits are, a function that gives them late); Granite's have a factor behind them."""
    model, ids = make_model(request.param).train(), tokens(2, 8)
    off = dict.fromkeys(computes(request.param) - {"loss"}, False)
    expected = model(ids).logits
    patch = getattr(monkey_patch, f"apply_tilegym_kernel_to_{request.param}")
    with patch(model=model, **off):
        yield model, expected, lambda: model(ids, labels=ids).logits


def weight_gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return model.lm_head.weight.grad.clone()


def test_what_is_answered_without_them(run):
    _, expected, late = run
    x = late()
    for ask in (
        lambda t: t.shape,
        lambda t: t.size(),
        lambda t: t.stride(),
        lambda t: t.dtype,
        lambda t: t.device,
        lambda t: t.layout,
        lambda t: t.dim(),
        lambda t: t.numel(),
        lambda t: t.nbytes,
        lambda t: t.is_contiguous(),
        lambda t: t.is_floating_point(),
        lambda t: t.requires_grad,
        lambda t: t.is_leaf,
        lambda t: t.grad_fn is None,
        lambda t: torch.is_tensor(t),
        len,
    ):
        assert ask(x) == ask(expected)
    assert not x.is_whole and isinstance(x, torch.Tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_stays_late(dtype):
    model, ids = make_model("llama", dtype), tokens(2, 8)
    expected = model(ids).logits
    with monkey_patch.apply_tilegym_kernel_to_llama(model=model, linear=False):
        x = model(ids, labels=ids).logits
    steps = (
        lambda t: t.float(),
        lambda t: t.to(torch.float32),
        lambda t: t.detach(),
        lambda t: t.data,
        lambda t: t.clone(),
        lambda t: t.contiguous(),
        lambda t: t / 3.0,
        lambda t: t * 5,
        lambda t: (t / 4.0).float() * 2,
    )
    for step in steps:
        got = step(x)
        assert isinstance(got, LateLogits) and not got.is_whole and not x.is_whole
        assert got.dtype is step(expected).dtype and got.requires_grad == step(expected).requires_grad
    for step in steps:
        assert_close(step(x).sin(), step(expected).sin(), "cutile")


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t.log_softmax(-1).square().sum(),
        lambda t: (t.tanh() * t).sum(),
        lambda t: t[:, :-1].reshape(-1, t.shape[-1]).exp().sum(),
        lambda t: torch.cat((t, t.double())).sum(),
        lambda t: t.to(torch.float16).float().square().sum(),
        lambda t: torch.nn.functional.cross_entropy(t.view(-1, t.shape[-1]), torch.arange(16, device=t.device)),
        lambda t: Doubled.apply(t).square().sum(),
        lambda t: ops.softmax(t).square().sum(),
        lambda t: torch.autograd.grad(t.square().sum(), t, create_graph=True)[0].square().sum(),
        lambda t: torch.compile(lambda x: x.exp().sum(), backend="eager")(t),
    ],
)
def test_functions_of_them_and_their_gradients(run, function):
    model, expected, late = run
    reference = function(expected)
    wanted = weight_gradient(model, reference)
    got = function(late())
    assert_close(got, reference)
    assert_close(weight_gradient(model, got), wanted)


@pytest.mark.parametrize("scale", [None, 2.0])
@pytest.mark.parametrize("cut", ["detach", "data", "no_grad", "no_grad_forward"])
def test_a_loss_of_detached_logits_has_no_gradient_beyond_them(run, cut, scale):
    model, _, late = run
    with torch.set_grad_enabled(cut != "no_grad_forward"):
        x = late()
    if cut in ("detach", "data"):
        x = x.detach() if cut == "detach" else x.data
    elif cut == "no_grad":
        with torch.no_grad():
            x = x.float() * 1.0
    ids, before = tokens(2, 8), {n: p.grad for n, p in model.named_parameters()}
    assert isinstance(x, LateLogits) and not x.is_whole and not x.requires_grad

    def loss_of(x):
        return model.loss_function(x if scale is None else x * scale, ids, x.shape[-1])

    plain = loss_of(x)
    assert not plain.requires_grad and not x.is_whole
    leaf = x.requires_grad_()
    loss = loss_of(leaf)
    loss.backward()
    expected = x.whole().clone().requires_grad_()
    reference = loss_of(expected)
    reference.backward()
    assert_close(loss, reference)
    assert_close(plain, reference.detach())
    assert_close(leaf.grad, expected.grad)
    assert before == {n: p.grad for n, p in model.named_parameters()}


def test_detached_logits_do_not_hold_the_graph(run):
    """Kept from step to step they would hold the activations of all layers."""
    model, expected, _ = run
    ids = tokens(2, 8)
    out = model(ids, labels=ids, output_hidden_states=True)
    saved, kept = weakref.ref(out.hidden_states[0]), out.logits.detach()
    del out
    gc.collect()
    assert saved() is None and not kept.is_whole
    assert_close(kept, expected)


def test_a_second_loss_gives_the_logits_a_gradient(run):
    model, expected, late = run
    ids, x = tokens(2, 8), late()
    loss, reference = (model.loss_function(t, ids, t.shape[-1]) for t in (x, expected))
    assert_close(torch.autograd.grad(loss, x)[0], torch.autograd.grad(reference, expected, retain_graph=True)[0])
    gradient = weight_gradient(model, 0.5 * reference)
    x = late()
    x.register_hook(lambda gradient: 0.5 * gradient)
    assert_close(weight_gradient(model, model.loss_function(x, ids, x.shape[-1])), gradient)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_plain_logits(run):
    """For compiled functions that must not break their graphs."""
    _, expected, late = run
    x = late()[:]
    assert type(x) is torch.Tensor
    assert_close(torch.compile(lambda x: x.exp().sum(), fullgraph=True, backend="eager")(x), expected.exp().sum())


def test_second_derivatives(run):
    model, expected, late = run

    def second(x):
        [first] = torch.autograd.grad(x.square().sum(), model.lm_head.weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), model.lm_head.weight)[0]

    assert_close(second(late()), second(expected))


def test_what_is_written_into_them_stays(run):
    model, expected, late = run

    def write(x):
        x[:, 3:] = -1.0
        x.mul_(2)
        x[:, 0].add_(3)
        return x

    got, wanted = write(late()), write(expected.clone())
    assert_close(got, wanted)
    assert_close(weight_gradient(model, got.square().sum()), weight_gradient(model, wanted.square().sum()))
    x = late()
    other = x.detach()
    other.zero_()
    assert not x.any()  # they share memory
    x = late()
    other = x.clone()
    other.detach().zero_()
    assert_close(x, expected)


def test_reading_memory(run):
    _, expected, late = run
    wanted = expected.detach().cpu()
    error, why = (TypeError, "to numpy") if wanted.device != expected.device else (RuntimeError, "requires grad")
    with pytest.raises(error, match=why):
        late().numpy()
    assert_close(torch.tensor(late().detach().cpu().numpy()), wanted)
    assert_close(torch.from_numpy(late().numpy(force=True)), wanted)
    assert_close(torch.tensor(late().tolist()), wanted)
    assert_close(torch.from_dlpack(late().detach()).cpu(), wanted)
    assert late()[0, 0, 0].item() == expected[0, 0, 0].item()
    x = late()
    assert x.data_ptr() == x.whole().data_ptr() and x.untyped_storage().nbytes() == x.nbytes
    assert repr(late().detach()) == repr(expected.detach())


def test_copies_and_files(run):
    _, expected, late = run
    file = io.BytesIO()
    torch.save(late(), file)
    file.seek(0)
    for got in (torch.load(file), pickle.loads(pickle.dumps(late()))):
        assert type(got) is torch.Tensor and got.requires_grad
        assert_close(got, expected)
    got = copy.deepcopy(late().detach())
    assert type(got) is torch.Tensor
    assert_close(got, expected.detach())
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(late())


def test_hooks_see_the_gradient_of_what_is_made_of_them(run):
    """As FSDP's, which only wait for the backward pass."""
    _, _, late = run
    seen, x = [], late()
    x.register_hook(lambda grad: seen.append(grad.shape))
    x.sum().backward()
    assert seen == [x.shape]
    with pytest.raises(LateLogitsError, match="loss=False"):
        late().retain_grad()


@pytest.mark.parametrize(
    "step",
    [
        lambda p: torch.optim.AdamW(p, fused=True).step(),  # counts in no version
        lambda p: torch.optim.SGD(p, lr=0.1).step(),
        lambda p: p[-1].detach().mul_(2),
        lambda p: setattr(p[-1], "data", 2 * p[-1].data),
    ],
)
def test_other_weights_by_now(run, step):
    """It would be the logits of other weights."""
    model, expected, late = run
    x, read = late(), late()
    read.sum().backward()
    step([model.lm_head.weight])
    with pytest.raises(LateLogitsError, match="Read outputs.logits before that, or patch the model with loss=False"):
        x.argmax(-1)
    assert_close(read + 0.0, expected)  # has been computed
    model.lm_head.weight.requires_grad_(False)  # no optimizer changes that one
    x = late()
    other = torch.nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    torch.optim.SGD([other], lr=0.1).step()
    x.argmax(-1)


def test_weights_that_are_frozen_meanwhile(run):
    model, expected, late = run
    x = late()
    model.requires_grad_(False)
    assert_close(x, expected)
    model.requires_grad_(True)


def test_another_models_step_before_the_backward_pass(run):
    model, expected, late = run
    gradient = weight_gradient(model, expected.square().mean())
    loss, other = late().square().mean(), nn.Linear(2, 2)
    other(torch.ones(2)).sum().backward()
    torch.optim.SGD(other.parameters()).step()
    assert_close(weight_gradient(model, loss), gradient)


def test_hidden_states_that_have_changed(run):
    _, _, late = run
    x = late()
    x._product.given[0].detach().zero_()
    with pytest.raises(LateLogitsError):
        x.argmax(-1)


def test_a_compiled_optimizer_is_compiled_once():
    from torch._dynamo.testing import CompileCounter

    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer, counter = torch.optim.SGD([parameter], lr=0.1), CompileCounter()
    compiled = torch.compile(lambda: optimizer.step(), backend=counter)
    for _ in range(4):
        compiled()
    assert counter.frame_count == 1


@pytest.mark.skipif(HAS_GPU, reason="the kernels run in the interpreter")
def test_kernels_read_them(run):
    _, expected, late = run
    for _ in range(3):  # the second call is recorded, and repeated
        assert_close(ops.softmax(late(), backend="cutile"), expected.softmax(-1))
        assert torch.equal(ops.argmax(late().detach()[0], backend="cutile"), expected[0].argmax(-1))

"""rms_norm, layer_norm and fused_add_rms_norm with gradients that are written over what they belong to."""

import functools

import pytest
import torch
from common import HAS_GPU
from common import assert_launches_compile
from common import dtypes
from common import randn
from common import recorded_launches
from common import sanitized
from peak_memory import PeakMemory

import tilegym
from tilegym import interpreter
from tilegym import ops
from tilegym.ops.cutile.row_norms import MAX_CACHED_BACKWARD
from tilegym.ops.cutile.row_norms_backward import LEAST_COLUMNS
from tilegym.ops.cutile.row_norms_backward import MOST_ROWS
from tilegym.ops.cutile.row_norms_backward import norm_backward_in_place
from tilegym.ops.cutile.tiling import sm_count

CALLS = {
    "rms_norm": lambda x, w, b: ops.rms_norm(x, x.shape[-1], w, 1e-6, bias=b, backend="cutile"),
    "layer_norm": lambda x, w, b: ops.layer_norm(x, x.shape[-1], w, b, backend="cutile"),
    "fused_add_rms_norm": lambda x, w, b: ops.fused_add_rms_norm(x, b.expand_as(x), w, 1e-6, backend="cutile"),
}
# Rows that share a tile, whole rows in one or in several tiles, some of which are ragged, and rows of any length.
SHAPES = [(1, 64), (33, 64), (2, 9, 100), (3, 1024), (9, 2048), (9, 2500), (5, 2560), (5, 4096), (5, 8192), (6, 8200)]
if HAS_GPU:  # many rows, each plan of its own
    SHAPES += [(9000, n) for n in (512, 768, 1536, 2048, 2560, 2880, 4096, 5000, 5120, 8192, 9000)] + [(2000, 4096)]
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def leaves(*shape, dtype=torch.bfloat16):
    tensors = randn(*shape, dtype=dtype), *(randn(shape[-1], dtype=dtype, seed=i) for i in (1, 2))
    return [t.requires_grad_() for t in tensors]


def normed(call, x, w, b, on=True):
    """The outputs, gradients for them, and what their gradient may be written over."""
    with tilegym.set_gradients_in_place(on):
        out = call(x, w, b)
    out = out if isinstance(out, tuple) else (out,)
    upstream = [randn(*t.shape, dtype=t.dtype, seed=5 + i) for i, t in enumerate(out)]
    return out, upstream, out[1] if len(out) == 2 else x


def assert_left_alone(call, x, leaves, **options):
    out, upstream, target = normed(call, x, *leaves[1:])
    before, version = target.detach().clone(), target._version
    got = torch.autograd.grad(out, leaves, upstream, **options)
    assert torch.equal(target, before)
    assert target._version == version
    out, upstream, _ = normed(call, x, *leaves[1:], on=False)
    for gradient, expected in zip(got, torch.autograd.grad(out, leaves, upstream), strict=True):
        assert torch.equal(gradient, expected)


@dtypes(torch.float32, torch.bfloat16)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_call
def test_equals_gradients_elsewhere(call, shape, dtype):
    parameters, runs = leaves(*shape, dtype=dtype), []
    for on in (False, True):
        x = parameters[0].clone()
        with sanitized():
            out, upstream, target = normed(call, x, *parameters[1:], on)
            before, version = target.detach().clone(), target._version
            runs.append(torch.autograd.grad(out, [x, *parameters[1:]], upstream))
        assert (runs[-1][0].untyped_storage().data_ptr() == target.untyped_storage().data_ptr()) == on
        assert torch.equal(target, before) != on
        assert (target._version > version) == on
    rows, n = parameters[0].shape[:-1].numel(), shape[-1]
    for one, other in zip(*runs, strict=True):
        # Of few rows in other tiles, whose sums round otherwise.
        if LEAST_COLUMNS <= n <= MAX_CACHED_BACKWARD and 1 < rows <= MOST_ROWS * sm_count(parameters[0].get_device()):
            ulps = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-9}
            torch.testing.assert_close(one, other, **ulps)
        else:
            assert torch.equal(one, other)


@pytest.mark.skipif(HAS_GPU, reason="chooses the interpreter's order")
@pytest.mark.parametrize("order", ["shuffled", "threads"])
@pytest.mark.parametrize("shape", [(3, 1024), (37, 2048), (20, 8200)], ids=str)
@every_call
def test_blocks_in_any_order(call, shape, order, monkeypatch):
    """No block reads what another overwrites."""
    parameters = leaves(*shape, dtype=torch.float32)
    out, upstream, _ = normed(call, parameters[0], *parameters[1:], on=False)
    expected = torch.autograd.grad(out, parameters, upstream)
    run = functools.partial(interpreter.launch, order=order, sanitize=False, seed=1)
    monkeypatch.setattr(interpreter, "launch", run)
    out, upstream, _ = normed(call, parameters[0].clone(), *parameters[1:])
    for gradient, other in zip(torch.autograd.grad(out, parameters, upstream), expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5)


@every_call
def test_of_a_retained_graph(call):
    parameters = leaves(6, 64)
    assert_left_alone(call, parameters[0].clone(), parameters, retain_graph=True)


@pytest.mark.parametrize(
    "made", [lambda x: x, lambda x: x.view(2, 3, 64), lambda x: x[1:]], ids=["leaf", "view", "part"]
)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_of_leaves(name, made):
    parameters = leaves(6, 64)
    assert_left_alone(CALLS[name], made(parameters[0]), parameters)


@pytest.mark.parametrize(
    "made", [lambda x: x.clone()[:1].expand(5, 64), lambda x: x.clone()[:, ::2], lambda x: x.clone().t()],
    ids=["shared", "every other", "transposed"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_of_memory_that_is_laid_out_otherwise(name, made):
    x, *_ = parameters = leaves(64, 64)
    x = made(x)
    parameters[1:] = [t.detach()[: x.shape[-1]].requires_grad_() for t in parameters[1:]]
    assert_left_alone(CALLS[name], x, parameters)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_of_what_another_op_has_saved(name):
    """What ran before runs its backward pass after; what ran later has run its own by then."""
    parameters = leaves(6, 64, dtype=torch.float32)
    for early in (True, False):
        results = []
        for on in (False, True):
            x = parameters[0].clone()
            before = x.sin() if early else None
            (out,), _, _ = normed(CALLS[name], x, *parameters[1:], on)
            results.append(torch.autograd.grad((out * (before if early else x.sin())).sum(), parameters))
        assert all(map(torch.equal, *results))


def test_sum_that_is_used_further():
    """Norms in a row, as layers have them: the gradient of one sum lies where the sum was, and goes into the next."""
    parameters, results = leaves(6, 64, dtype=torch.float32), []
    for on in (False, True):
        x, w, b = parameters
        with tilegym.set_gradients_in_place(on):
            total = x.clone()
            y = ops.rms_norm(total, 64, w, 1e-6, backend="cutile")
            for _ in range(3):
                y, total = ops.fused_add_rms_norm(y * b, total, w, 1e-6, backend="cutile")
            y = ops.layer_norm(y + total, 64, w, b, backend="cutile")
        results.append(torch.autograd.grad(y.square().sum(), parameters))
    assert all(map(torch.equal, *results))


def test_sum_that_nothing_else_uses():
    parameters = leaves(6, 64)
    (y, _), (upstream, _), total = normed(CALLS["fused_add_rms_norm"], parameters[0].clone(), *parameters[1:])
    before = total.detach().clone()
    torch.autograd.grad(y, parameters, upstream)
    assert not torch.equal(total, before)


def test_normed_sum_that_nothing_uses():
    parameters = leaves(6, 64)
    (_, total), (_, upstream), _ = normed(CALLS["fused_add_rms_norm"], parameters[0].clone(), *parameters[1:])
    before = total.detach().clone()
    gradient, weights, _ = torch.autograd.grad(total, parameters, upstream, materialize_grads=True)
    assert torch.equal(gradient, upstream) and not weights.any()
    assert torch.equal(total, before)


@pytest.mark.skipif(HAS_GPU, reason="counts what is allocated on a CPU")
@pytest.mark.parametrize("n", [512, 16384])
@every_call
def test_memory(call, n, monkeypatch):
    """Nothing but outputs, statistics and sums over the rows of a few blocks."""
    monkeypatch.setattr(interpreter, "launch", lambda *_: None)  # kernels allocate nothing
    parameters = leaves(2**17 // n * 8, n)
    x = parameters[0].clone()
    upstream = [torch.empty_like(x) for _ in range(2)]
    with PeakMemory() as memory:
        with tilegym.set_gradients_in_place(True):
            out = call(x, *parameters[1:])
        out = out if isinstance(out, tuple) else (out,)
        torch.autograd.grad(out, [x, *parameters[1:]], upstream[: len(out)])
    assert memory.peak < (len(out) + 0.2) * x.nbytes
    assert (out[1] if len(out) == 2 else x)._version  # autograd is told of what a kernel has written


@pytest.mark.skipif(HAS_GPU, reason="looks at launches on the CPU")
def test_few_rows_are_no_exception():
    """Where blocks that sum up read all rows, others would have overwritten some."""
    x, w, rstd = randn(4, 1024), randn(1024), torch.ones(4)
    with recorded_launches() as launches:
        norm_backward_in_place(x.clone(), x, None, w, None, rstd, 0.0, 1, True, False, torch.float32)
    assert [kernel._pyfunc.__name__ for kernel, _ in launches] == ["backward_kernel"]


def test_operator():
    dy, x, w, rstd = randn(6, 48), randn(6, 48, seed=1), randn(48), randn(6).abs()
    args = dy, x, None, w, None, rstd, 0.0, 1, True, False, torch.float32
    torch.library.opcheck(norm_backward_in_place.operator, args)


@pytest.mark.parametrize(("n", "center"), [(2048, False), (8192, True), (10000, False)])
def test_compiles_for_every_architecture(n, center):
    x, w, rstd = torch.empty(64, n, dtype=torch.bfloat16), torch.empty(n), torch.empty(64)
    dy, mean = torch.empty_like(x), torch.empty(64) if center else None
    args = dy, x, None, w, mean, rstd, 0.0, 1, True, center, torch.bfloat16
    assert_launches_compile(lambda: norm_backward_in_place(*args))


@pytest.mark.parametrize("saves_its_result", [torch.exp, torch.sigmoid])
def test_an_operation_that_saved_its_own_result_says_that_it_has_changed(saves_its_result):
    x = torch.randn(8, 64, requires_grad=True)
    with tilegym.set_gradients_in_place(True):
        y = ops.rms_norm(saves_its_result(x), 64, torch.ones(64), 1e-6, backend="cutile")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.square().sum().backward()
    assert x.grad is None

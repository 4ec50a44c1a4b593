"""set_gradients_in_place with the elementwise ops: the same gradients, over the activations that they are for."""

import contextlib

import pytest
import torch
from common import HAS_GPU
from common import assert_launches_compile
from common import dtypes
from common import randn
from common import sanitized
from in_place_calls import CALLS
from in_place_calls import activations_of
from in_place_calls import angles
from in_place_calls import assert_equal
from in_place_calls import backward
from in_place_calls import backward_calls
from in_place_calls import calls
from in_place_calls import leaves_of
from in_place_calls import one_each
from in_place_calls import rope
from in_place_calls import step
from in_place_calls import swiglu
from in_place_calls import tuple_of
from peak_memory import PeakMemory

import tilegym
from tilegym import interpreter
from tilegym import ops
from tilegym.backend import in_place
from tilegym.ops.cutile.cross_entropy import cross_entropy_backward_in_place
from tilegym.ops.cutile.geglu import geglu_backward_in_place
from tilegym.ops.cutile.rope import rope_in_place
from tilegym.ops.cutile.silu_and_mul import silu_and_mul_backward_in_place
from tilegym.ops.cutile.swiglu import swiglu_backward_in_place


@pytest.fixture
def written(monkeypatch):
    """The tensors that are overwritten."""
    tensors, original = [], in_place.overwritten
    monkeypatch.setattr(in_place, "overwritten", lambda *ts: tensors.extend(ts) or original(*ts))
    return tensors


@dtypes(torch.float32, torch.bfloat16)
@calls
def test_the_same_gradients(call, shapes, dtype, written):
    leaves = leaves_of(shapes, dtype)
    with sanitized():
        _, *expected = step(call, leaves)
        assert not written
        with tilegym.set_gradients_in_place(True):
            _, *got = step(call, leaves)
    assert len(written) == len(shapes)
    assert_equal([*got[0], *got[1]], [*expected[0], *expected[1]])


@backward_calls
def test_gradients_lie_where_the_activations_were(call, shapes):
    given = activations_of(leaves_of(shapes))
    with tilegym.set_gradients_in_place(True):
        outputs = tuple_of(call(*given))
        assert [t._version for t in given] == [0] * len(given)
        gradients = backward(outputs, given)
    for activation, gradient in zip(given, gradients, strict=True):
        assert gradient.data_ptr() == activation.data_ptr() and gradient.stride() == activation.stride()
        assert activation._version > 0 and not gradient.requires_grad


def test_rope_rotates_where_q_and_k_are():
    leaves = leaves_of([(2, 4, 9, 64), (2, 2, 9, 64)])
    given = activations_of(leaves)
    with tilegym.set_gradients_in_place(True):
        rotated = rope(*given)
        again = rope(*rotated)  # an activation too
    for t, once, twice in zip(given, rotated, again, strict=True):
        assert t.data_ptr() == once.data_ptr() == twice.data_ptr() and t.stride() == twice.stride()
        assert t._version > 0 and "RoPE" in type(twice.grad_fn).__name__
    gradients = backward(again, leaves)
    assert all(g.data_ptr() != t.data_ptr() for g, t in zip(gradients, given, strict=True))


def test_heads_of_a_projection():
    """q and k as attention has them: views of what linears gave."""
    x, weights = randn(2, 9, 32), [randn(64, 32, seed=1).requires_grad_(), randn(32, 32, seed=2).requires_grad_()]

    def gradients():
        heads = [torch.nn.functional.linear(x, w).view(2, 9, -1, 16).transpose(1, 2) for w in weights]
        rotated = rope(*heads)
        assert (rotated[0].data_ptr() == heads[0].data_ptr()) is (in_place.wanted() == in_place.ALWAYS)
        return backward(rotated, weights)

    expected = gradients()
    with tilegym.set_gradients_in_place(True):
        assert_equal(gradients(), expected)


def transposed(leaves):
    return [(leaf * 1.5).t() for leaf in leaves]


def batch_last(leaves):
    return [(leaf * 1.5).permute(1, 0, 2) for leaf in leaves]


def with_gaps(leaves):
    return [(leaf * 1.5)[..., ::2] for leaf in leaves]


@pytest.mark.parametrize(
    ("make", "shape", "writes"),
    [(transposed, (6, 40), True), (batch_last, (3, 4, 40), False), (with_gaps, (4, 40), False)],
    ids=["transposed", "batch last", "gaps"],
)
@pytest.mark.parametrize("name", ["swiglu", "geglu", "silu_and_mul", "cross_entropy"])
def test_layouts(name, make, shape, writes, written):
    call, shapes = CALLS[name]
    leaves = leaves_of([shape] * len(shapes))
    expected = step(call, leaves, make)
    with tilegym.set_gradients_in_place(True):
        got = step(call, leaves, make)
    assert_equal(got[2], expected[2])
    assert bool(written) is writes


@pytest.mark.parametrize("shape", [(2, 3, 1000), (3, 130)], ids=str)
@pytest.mark.parametrize("name", ["swiglu", "geglu", "silu_and_mul"])
def test_large_inputs_become_one_row(name, shape, monkeypatch, written):
    call, shapes = CALLS[name]
    leaves = leaves_of([shape] * len(shapes))
    expected = step(call, leaves)
    monkeypatch.setattr("tilegym.ops.cutile.tiling.SMALL", 0)
    with tilegym.set_gradients_in_place(True):
        assert_equal(step(call, leaves)[2], expected[2])
    assert written


def views(leaves):
    return [leaf.view(-1, leaf.shape[-1]).view(leaf.shape) for leaf in leaves]


def chunks(leaves):
    return (torch.stack(leaves) * 1.5).unbind()


def one_without_gradient(leaves):
    return [leaves[0] * 1.5, leaves[1].detach() * 1.5]


@pytest.mark.parametrize(
    "make", [list, views, chunks, one_without_gradient], ids=lambda m: getattr(m, "__name__", "leaves")
)
@one_each
def test_left_alone(call, shapes, make, written):
    """Leaves, views of leaves, shared memory, and what needs no gradient."""
    if make in (chunks, one_without_gradient) and len(shapes) == 1:
        pytest.skip("has one input")
    leaves = leaves_of([shapes[-1]] * len(shapes))
    wanted = leaves[:1] if make is one_without_gradient else leaves

    def run():
        given = make(leaves)
        before = [t.detach().clone() for t in given]
        gradients = backward(tuple_of(call(*given)), wanted)
        assert_equal([t.detach() for t in given], before)
        return gradients

    expected = run()
    with tilegym.set_gradients_in_place(True):
        assert_equal(run(), expected)
    assert not written


def test_twice_the_same(written):
    x = randn(3, 8).requires_grad_()
    with tilegym.set_gradients_in_place(True):
        a = x * 1.5
        (gradient,) = backward((swiglu(a, a),), (x,))
    b = (x.detach() * 1.5).requires_grad_()
    torch.testing.assert_close(gradient, 1.5 * backward((swiglu(b, b),), (b,))[0])
    assert not written


@backward_calls
def test_retained_graph(call, shapes, written):
    leaves = leaves_of(shapes)
    with tilegym.set_gradients_in_place(True):
        given = activations_of(leaves)
        outputs = tuple_of(call(*given))
        first = backward(outputs, leaves, retain_graph=True)
        assert not written
        second = backward(outputs, leaves)
    assert_equal(second, first)
    assert len(written) == len(shapes)


@pytest.mark.parametrize("save", [torch.sin, lambda t: t.view(-1).sin()], ids=["itself", "a view"])
@backward_calls
def test_what_another_operation_saved(call, shapes, save, written):
    """What ran before runs its backward pass after; what ran later has run its own by then."""
    leaves = leaves_of(shapes)

    def run(early):
        given = activations_of(leaves)
        total = sum(save(t).sum() for t in given) if early else 0.0
        total = total + sum(o.sum() for o in tuple_of(call(*given)))
        total = total if early else total + sum(save(t).sum() for t in given)
        return torch.autograd.grad(total, leaves)

    for early in (True, False):
        expected = run(early)
        with tilegym.set_gradients_in_place(True):
            assert_equal(run(early), expected)
        assert len(written) == (0 if early else len(shapes))


def test_an_error_where_another_operation_saved_what_is_rotated():
    leaves = leaves_of([(2, 4, 9, 64), (2, 2, 9, 64)])
    with tilegym.set_gradients_in_place(True):
        q, k = activations_of(leaves)
        other = k.sin().sum()
        total = other + sum(t.sum() for t in rope(q, k))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()


@one_each
def test_nothing_without_gradients(call, shapes, written):
    with tilegym.set_gradients_in_place(True):
        with torch.no_grad():
            given = activations_of(leaves_of(shapes))
            before = [t.clone() for t in given]
            call(*given)
        given[0].requires_grad_()
        call(*given)
    assert_equal([t.detach() for t in given], before)
    assert not written


def test_the_switch_has_three_positions():
    for mode in ("no", 1, 0):
        with pytest.raises(TypeError, match="mode must be True, False or None"):
            tilegym.set_gradients_in_place(mode)
    assert in_place._mode is None


def test_the_switch():
    assert not in_place.wanted()
    with tilegym.set_gradients_in_place(True):
        assert in_place.wanted()
        with tilegym.set_gradients_in_place(False):
            assert not in_place.wanted()
            with contextlib.suppress(KeyError), tilegym.set_gradients_in_place(True):
                assert in_place.wanted()
                raise KeyError
            assert not in_place.wanted()
        assert in_place.wanted()
    assert not in_place.wanted()
    try:
        tilegym.set_gradients_in_place(True)
        assert in_place.wanted()
        with tilegym.set_gradients_in_place(False):
            assert not in_place.wanted()
        assert in_place.wanted()
        tilegym.set_gradients_in_place(False)
        assert not in_place.wanted(in_place.UNSEEN)
    finally:
        tilegym.set_gradients_in_place(None)
    assert not in_place.wanted() and in_place.wanted(in_place.UNSEEN) == in_place.UNSEEN


def test_what_held_in_the_forward_pass_holds(written):
    leaves = leaves_of([(3, 8), (3, 8)])
    with tilegym.set_gradients_in_place(True):
        later = swiglu(*activations_of(leaves))
    backward((later,), leaves)
    assert len(written) == 2
    with tilegym.set_gradients_in_place(False):
        later = swiglu(*activations_of(leaves))
    with tilegym.set_gradients_in_place(True):
        backward((later,), leaves)
    assert len(written) == 2


@one_each
def test_compiled(call, shapes, written):
    leaves = leaves_of(shapes)
    expected = step(call, leaves)
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with tilegym.set_gradients_in_place(True):
        given, *got = step(compiled, leaves)
    assert_equal([*got[0], *got[1]], [*expected[1], *expected[2]])
    assert_equal([t.detach() for t in given], [t.detach() for t in expected[0]])
    assert not written


M, N = 256, 512
PART = M * N * 2 // 8  # of statistics of rows
TABLE = angles(M, 64).cos().bfloat16()
# The call, what it overwrites, and which share of that it allocates: rope makes the gradients of q and k.
MEMORY = {
    "swiglu": (CALLS["swiglu"][0], [(M, N), (M, N)], 0),
    "geglu": (CALLS["geglu"][0], [(M, N), (M, N)], 0),
    "silu_and_mul": (CALLS["silu_and_mul"][0], [(M, 2 * N)], 0),
    "cross_entropy": (CALLS["cross_entropy"][0], [(M, N)], 0),
    "rope": (lambda q, k: ops.apply_rope_base(q, k, TABLE, TABLE, backend="cutile"), [(1, 8, M, 64), (1, 2, M, 64)], 1),
}


def bytes_of(tensors):
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.skipif(HAS_GPU, reason="counts what is allocated on a CPU")
@pytest.mark.parametrize(("call", "shapes", "share"), MEMORY.values(), ids=MEMORY)
def test_peak_memory(call, shapes, share, monkeypatch):
    """Allocated are the outputs that lie elsewhere; in the backward pass nothing, or the gradients of q and k."""
    monkeypatch.setattr(interpreter, "launch", lambda *_: None)  # kernels allocate nothing
    peaks = {}
    for mode in (False, True):
        given = [leaf * 1.5 for leaf in leaves_of(shapes, torch.bfloat16)]
        with tilegym.set_gradients_in_place(mode), PeakMemory() as memory:
            outputs = tuple_of(call(*given))
            forward = memory.peak
            upstream = [torch.empty_like(o) for o in outputs]
            torch.autograd.grad(outputs, given, upstream)
        peaks[mode] = memory.peak
        elsewhere = 0 if mode and share else bytes_of(outputs)
        assert forward <= elsewhere + PART
    most = elsewhere + bytes_of(upstream) + share * bytes_of(given) + PART
    assert peaks[True] <= most and peaks[True] <= peaks[False] - bytes_of(given) + PART
    assert [t._version for t in given] == [1] * len(given)  # autograd has been told, though nothing was launched


def test_operators():
    a, b, dy = (randn(3, 2, 48, seed=i) for i in range(3))
    torch.library.opcheck(swiglu_backward_in_place.operator, (dy, a, b))
    torch.library.opcheck(geglu_backward_in_place.operator, (dy, a, b, True))
    torch.library.opcheck(silu_and_mul_backward_in_place.operator, (dy[..., :24], a))
    target, lse = torch.zeros(3, 2, dtype=torch.int64, device=a.device), randn(3, 2, 2)
    torch.library.opcheck(cross_entropy_backward_in_place.operator, (dy[..., 0], a, target, lse, -100, 0.0, 0.0, 0.0))
    q, k = randn(2, 4, 9, 16), randn(2, 2, 9, 16)
    torch.library.opcheck(rope_in_place.operator, (q, k, angles(9, 16).cos(), angles(9, 16).sin(), 16))


def test_kernels_compile():
    a, b, dy = (torch.empty(64, 4096, dtype=torch.bfloat16) for _ in range(3))
    q, k, table = (torch.empty(1, h, 4, d, dtype=torch.bfloat16) for h, d in ((8, 80), (2, 80), (1, 20)))
    target, lse = torch.zeros(64, dtype=torch.int64), torch.empty(64, 2)

    def launches():
        swiglu_backward_in_place(dy, a, b)
        geglu_backward_in_place(dy, a, b, True)
        silu_and_mul_backward_in_place(dy[:, :2048], a)
        cross_entropy_backward_in_place(lse[:, 0], a, target, lse, -100, 0.0, 0.0, 0.0)
        rope_in_place(q, k, table[0], table[0].clone(), 20)

    assert_launches_compile(launches)

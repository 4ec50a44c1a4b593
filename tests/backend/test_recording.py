"""Which calls are recorded, and what a repeated one does."""

import typing
import weakref

import cuda.tile as ct
import pytest
import torch
from recording_fakes import Served
from recording_fakes import add
from recording_fakes import served_op
from recording_fakes import x

from tilegym import backend
from tilegym.backend import allocation
from tilegym.backend import dispatcher
from tilegym.backend import recording
from tilegym.backend.cutile.launch import launch

Tensor = torch.Tensor


@pytest.fixture
def served(monkeypatch):
    monkeypatch.delenv("DISABLE_FALLBACK", raising=False)
    with served_op() as op:
        yield op


def test_the_third_call_of_a_kind_is_not_served_anew(served):
    assert served.calls_of((x(seed=1),), (x(seed=2),), (x(seed=3),), (x(seed=4),)) == [1, 2, 2, 2]


def test_kinds_are_told_apart(served):
    served.calls_of(*[(x(),)] * 3)
    others = [(x().double(),), (x(16),), (x(16)[::2],), (x(24)[::3],), (x(), 2.0), (x(), 0.5, x())]
    for n, args in enumerate(others, start=3):
        assert served.calls_of(args) == [n]
    assert served.calls_of((x(), 0.5)) == [8], "a default given by the caller"
    served.calls_of(*[(x(16)[::2],)] * 2)
    assert served.calls_of((x(24)[::3],)) == [10]


def test_results_are_memory_of_their_own(served):
    first, second, third, fourth = (served(x(seed=n)) for n in range(4))
    assert torch.equal(third, x(seed=2) + 0.5 + 1) and torch.equal(fourth, x(seed=3) + 0.5 + 1)
    assert not third._is_view() and third.data_ptr() != fourth.data_ptr()


def test_no_tensor_is_kept(served):
    def serve(x, by, other, several):
        whole = torch.empty(2, x.shape[0])
        add(x, whole[1], by)
        return whole[1]

    served.serve = serve
    kept = []
    for n in range(4):
        given = x(seed=n)
        result = served(given)
        kept += [weakref.ref(given), weakref.ref(result), weakref.ref(result.untyped_storage())]
    del given, result
    assert served.calls == 2
    assert [ref() for ref in kept] == [None] * 12


def test_views_are_taken_anew(served):
    def serve(x, by, other, several):
        whole = torch.empty(2, x.shape[0] + 4)
        add(x[4:], whole[1, 4:-4], by)
        add(x.view(2, -1)[0], whole.view(-1)[:4], by)
        return whole[:, :4], None, whole[1, 4:-4].view(torch.int32)

    served.serve = serve
    for n in range(4):
        a, nothing, b = served(x(seed=n)[:8])
        assert torch.equal(a[0], x(seed=n)[:4] + 0.5 + 1) and torch.equal(
            b.view(torch.float32), x(seed=n)[4:] + 0.5 + 1
        )
        assert nothing is None
    assert served.calls == 2
    large = x(24, seed=9)
    a, _, b = served(large[8:16])
    assert torch.equal(a[0], large[8:12] + 0.5 + 1) and torch.equal(b.view(torch.float32), large[12:16] + 0.5 + 1)
    assert served.calls == 2


def test_arguments_changed_in_place_and_returned(served):
    def serve(x, by, other, several):
        add(x, other, by)
        return [other]

    served.serve = serve
    for n in range(4):
        out = torch.zeros(8)
        (result,) = served(x(seed=n), 0.5, out)
        assert result is out and torch.equal(out, x(seed=n) + 0.5 + 1)
    assert served.calls == 2


def test_lists_of_tensors(served):
    def serve(x, by, other, several):
        y = torch.empty_like(x)
        add(several[-1], y, by)
        return y

    served.serve = serve
    for n in range(4):
        assert torch.equal(served(x(), several=[x(), x(seed=n)]), x(seed=n) + 0.5 + 1)
    assert served.calls == 2
    served(x(), several=[x(), x(), x()])
    assert served.calls == 3
    served(x(), several=[x(), x().requires_grad_()])
    assert served.calls == 4


KEPT = torch.zeros(8)


def copies(x, by, other, several):
    y = torch.empty_like(x)
    add(x[::2].contiguous(), y[:4], by)
    return y


def fills(x, by, other, several):
    y = torch.empty_like(x).fill_(by)
    add(x, y, by)
    return y


def reads(x, by, other, several):
    y = torch.empty_like(x)
    add(x, y, float(x[0]))
    return y


def keeps(x, by, other, several):
    y = torch.empty_like(x)
    add(KEPT, y, by)
    return y


def launches_nothing(x, by, other, several):
    return torch.empty_like(x)


def returns_a_number(x, by, other, several):
    add(x, torch.empty_like(x), by)
    return 3


def reshapes(x, by, other, several):
    y = torch.empty_like(x)
    add(x.view(4, 2).t().reshape(-1), y, by)
    return y


@ct.kernel
def add_lists_kernel(arrays, y, TILE: ct.Constant[int]):
    ct.store(y, (ct.bid(0),), ct.load(arrays[0], (ct.bid(0),), (TILE,)) + 1)


@pytest.mark.parametrize("serve", [copies, fills, reads, keeps, launches_nothing, returns_a_number, reshapes])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_cannot_be_repeated_is_served(served, serve, mode):
    served.serve = serve
    with mode():
        for _ in range(4):
            served(x())
    assert served.calls == 4


def test_kernels_of_lists(served):
    def serve(x, by, other, several):
        y = torch.empty_like(x)
        launch(x, (2,), add_lists_kernel, ([several[1], x], y, 4))
        return y

    served.serve = serve
    for n in range(4):
        assert torch.equal(served(x(), several=[x(), x(seed=n)]), x(seed=n) + 1)
    assert served.calls == 2


def test_memory_that_is_lent_is_asked_for_again(served):
    memory = [torch.zeros(2, 8), torch.zeros(2, 8)]

    def serve(x, by, other, several):
        y = torch.empty_like(x)
        rows, kept = recording.lent(lambda: (memory[0], memory[-1]))
        add(x, rows[1], by)
        add(rows[1], y, -1.0)
        add(rows[1], kept[0], 0.0)
        return y

    served.serve = serve
    assert served.calls_of(*[(x(),)] * 3) == [1, 2, 2]
    memory[:] = [torch.zeros(2, 8), torch.zeros(2, 8)]
    assert served.calls_of((x(seed=1),)) == [2]
    assert torch.equal(memory[0][1], x(seed=1) + 0.5 + 1) and torch.equal(memory[1][0], memory[0][1] + 1)


def test_memory_is_lent_when_all_is_allocated(served, monkeypatch):
    lent, lacks = [], []

    def empty(shape, strides, dtype):
        if lacks:
            raise MemoryError
        return torch.empty_strided(shape, strides, dtype=dtype)

    def give():
        lent.append(torch.zeros(2, 8))
        return (lent[-1],)

    def serve(x, by, other, several):
        (kept,) = recording.lent(give)
        y = torch.empty_like(x)
        add(x, kept[1], by)
        add(kept[1], y, 0.0)
        return y

    monkeypatch.setattr(allocation, "empty_on", lambda device: empty)
    served.serve = serve
    for n in range(1, 4):
        assert torch.equal(served(x()), x() + 2.5)
        assert len(lent) == n
    lacks.append(True)
    with pytest.raises(MemoryError):
        served(x())
    assert served.calls == 2 and len(lent) == 3


def test_what_a_call_asks_for_is_asked_again(served):
    answer = [1]

    def serve(x, by, other, several):
        return Served.plain(x, by * recording.ask(lambda: answer[0]), other, several)

    served.serve = serve
    assert served.calls_of(*[(x(),)] * 4) == [1, 2, 2, 2]
    answer[0] = 4
    for calls in (3, 4, 4):
        assert torch.equal(served(x()), x() + 2.0 + 1)
        assert served.calls == calls


def test_a_copy_that_one_layout_needs_is_none_of_another(served):
    """The copy is made in a call that looks otherwise."""

    def serve(x, by, other, several):
        return Served.plain(x.contiguous(), by, other, several)

    served.serve = serve
    assert served.calls_of(*[(x(),)] * 3, *[(x(16)[::2],)] * 3) == [1, 2, 2, 3, 4, 5]


def test_one_tensor_for_two_parameters(served):
    """Which of them a kernel gets cannot be told from such a call, but from another one it can."""

    def serve(x, by, other, several):
        y = torch.empty_like(x)
        add(other, y, by)
        return y

    served.serve = serve
    same = x()
    for n in range(1, 4):
        assert torch.equal(served(same, 0.5, same), same + 0.5 + 1)
        assert served.calls == n
    served(x(), 0.5, x())
    for n in range(3):
        assert torch.equal(served(x(), 0.5, x(seed=n)), x(seed=n) + 0.5 + 1)
    assert served.calls == 4
    assert torch.equal(served(same, 0.5, same), same + 0.5 + 1)


def test_calls_that_want_gradients_are_served(served):
    served.calls_of(*[(x(),)] * 3)
    served(x().requires_grad_())
    assert served.calls == 3
    with torch.no_grad():
        served(x().requires_grad_())
    assert served.calls == 3


def test_much_memory_is_not_kept_for_long(served, monkeypatch):
    monkeypatch.setattr(recording, "MAX_BYTES", 32)
    assert served.calls_of(*[(x(8),)] * 3) == [1, 2, 2]
    assert served.calls_of(*[(x(16),)] * 3) == [3, 4, 5]


def test_old_kinds_make_room(served, monkeypatch):
    monkeypatch.setattr(recording, "MAX_KINDS", 2)
    (recordings,) = served.op.op.named_recordings.values()
    for n in range(1, 6):
        served.calls_of(*[(x(4 * n),)] * 3)
        assert len(recordings.known) <= 2


def test_what_is_not_hashable_is_served(served):
    served.serve = lambda x, by, other, several: Served.plain(x, by[0], other, several)
    for n in range(1, 4):
        assert torch.equal(served(x(), [0.5]), x() + 0.5 + 1)
        assert served.calls == n


def test_tensors_where_numbers_are_announced(served):
    """They are in no way kept, and read in every call."""
    served.serve = lambda x, by, other, several: Served.plain(x, by.item(), other, several)
    for n in range(3):
        assert torch.equal(served(x(), torch.tensor(0.5 + n)), x() + (0.5 + n) + 1)
    assert served.calls == 3
    assert not any(recordings.known for recordings in recording._all)


@pytest.mark.parametrize("optional", [None, typing.Optional[Tensor], "Tensor | None"])  # noqa: UP045
def test_other_annotations(monkeypatch, optional):
    """Also of ops from outside this project: none, those of typing, and text."""

    def declaration(x, other=None):
        """x + 1.5, or other + 1.5."""

    def impl(x, other=None):
        calls.append(1)
        return Served.plain(x if other is None else other, 0.5, None, ())

    for function in (declaration, impl) if optional else ():
        function.__annotations__ = {"x": Tensor if optional != "Tensor | None" else "Tensor", "other": optional}
    calls = []
    op = backend.dispatch("annotated_for_test")(declaration)
    backend.register_impl("annotated_for_test", "cutile")(impl)
    try:
        for n in range(4):
            assert torch.equal(op(x(seed=n), backend="cutile"), x(seed=n) + 0.5 + 1)
            assert torch.equal(op(x(), x(seed=n), backend="cutile"), x(seed=n) + 0.5 + 1)
        assert len(calls) == (4 if optional == typing.Optional[Tensor] else 8)  # noqa: UP045
        assert not any(map(recording._has_tensors, (k for r in recording._all for k in r.known)))
    finally:
        dispatcher._ops.pop("annotated_for_test")


def test_calls_that_the_op_does_not_take(served):
    served.calls_of(*[(x(),)] * 3)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        served()
    with pytest.raises(TypeError, match="unexpected keyword"):
        served(x(), to=3)
    with pytest.raises(TypeError, match="recorded_for_test: x must be a tensor, it is 3"):
        served(3)
    assert served.calls_of((x(), 0.5, None, x())) == [4]

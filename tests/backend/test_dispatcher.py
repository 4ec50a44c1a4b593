"""Dispatch: registration, the call to the chosen implementation, and falling back."""

import contextlib
import time
import timeit
import warnings

import pytest
import torch

from tilegym import backend
from tilegym import ops
from tilegym.backend import dispatcher
from tilegym.backend import selector
from tilegym.errors import BackendError
from tilegym.errors import FallbackWarning
from tilegym.errors import RegistrationError
from tilegym.errors import UnsupportedError


@pytest.fixture
def shift(monkeypatch):
    """An op with a pytorch implementation (adds 1) and a third backend's (adds 2), removed again afterwards."""
    monkeypatch.delenv("DISABLE_FALLBACK", raising=False)

    @backend.dispatch("shift_for_test")
    def shift(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        """Adds ``by``, more or less."""

    @backend.register_impl("shift_for_test", "pytorch")
    def _(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        return x + by

    @backend.register_impl("shift_for_test", "third")
    def _(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise UnsupportedError("dtype float64 is not supported")
        return x + 2 * by

    backend.set_backend("pytorch")
    yield shift
    dispatcher._ops.pop("shift_for_test")
    dispatcher._warned.clear()
    backend.set_backend(None)
    selector._probes.pop("third", None)
    selector.unavailable_reason.cache_clear()
    torch.compiler.reset()


X = torch.zeros(2)


def test_third_backend_from_outside(shift):
    assert "third" in backend.get_available_backends()
    assert shift(X).tolist() == [1, 1]
    assert shift(X, backend="third").tolist() == [2, 2]
    assert shift(x=X, by=3.0, backend="third").tolist() == [6, 6]
    with backend.use_backend("third"):
        assert shift(X).tolist() == [2, 2]
        assert shift(X, backend="pytorch").tolist() == [1, 1]
    backend.set_backend("third")
    assert shift(X).tolist() == [2, 2]


def test_public_function_documents_itself(shift):
    assert shift.__doc__ == "Adds ``by``, more or less." and shift.__name__ == "shift"
    assert list(shift.__signature__.parameters) == ["x", "by", "backend"]


def test_registry_queries(shift):
    assert backend.get_available_backends_for_op("shift_for_test") == ["pytorch", "third"]
    assert backend.has_backend_impl("shift_for_test", "third")
    assert not backend.has_backend_impl("shift_for_test", "cutile")
    info = backend.get_registry_info()["shift_for_test"]
    assert list(info) == ["pytorch", "third"] and all(__name__ in name for name in info.values())
    for query in (backend.get_available_backends_for_op, lambda n: backend.has_backend_impl(n, "pytorch")):
        with pytest.raises(BackendError, match="no op is called 'nothing'"):
            query("nothing")


def test_print_registry_info(shift, capsys):
    backend.print_registry_info()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["shift_for_test", "pytorch,", "third"] for line in lines)
    assert len(lines) == len(backend.get_registry_info())


def test_implementation_with_another_signature_is_refused(shift):
    wrong = {
        "a name": lambda y, by=1.0: y,
        "a default": lambda x, by=2.0: x,
        "the order": lambda by, x=1.0: x,
        "one too few": lambda x: x,
        "one too many": lambda x, by=1.0, more=None: x,
        "a kind": lambda x, *, by=1.0: x,
    }
    for what, impl in wrong.items():
        with pytest.raises(RegistrationError, match="shift_for_test") as error:
            backend.register_impl("shift_for_test", "fourth")(impl)
        assert "by" in str(error.value), what
    assert not backend.has_backend_impl("shift_for_test", "fourth")
    assert "fourth" not in selector.known_backends()


def test_declaring_twice_or_implementing_what_is_not_declared(shift):
    with pytest.raises(RegistrationError, match="declared already"):
        backend.dispatch("shift_for_test")(lambda x: x)
    with pytest.raises(RegistrationError, match="no op is called 'nothing'"):
        backend.register_impl("nothing", "pytorch")(lambda x: x)


def test_fallback_without_an_implementation_warns_once(shift):
    with pytest.warns(FallbackWarning, match="'shift_for_test': pytorch instead of cutile: it has no impl") as caught:
        assert shift(X, backend="cutile").tolist() == [1, 1]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shift(X, backend="cutile").tolist() == [1, 1]


def test_fallback_names_what_an_absent_backend_lacks(shift, monkeypatch):
    monkeypatch.setitem(selector._probes, "cutile", lambda: "the package cuda-tile is not installed")
    selector.unavailable_reason.cache_clear()
    with pytest.warns(FallbackWarning, match="pytorch instead of cutile: the package cuda-tile is not installed"):
        shift(X, backend="cutile")


def test_call_that_names_a_backend_that_cannot_run_here(shift, monkeypatch):
    backend.register_backend("third", lambda: "its device is missing: plug one in")
    for call in (shift, torch.compile(shift, fullgraph=True, backend="eager")):
        dispatcher._warned.clear()
        with pytest.warns(FallbackWarning, match="pytorch instead of third: its device is missing: plug one in"):
            assert call(X, backend="third").tolist() == [1, 1]
    monkeypatch.setenv("DISABLE_FALLBACK", "1")
    with pytest.raises(UnsupportedError, match="on backend 'third': its device is missing"):
        shift(X, backend="third")


def test_refusal_without_words(shift, monkeypatch):
    def refuse(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        raise UnsupportedError

    monkeypatch.setitem(shift.op.impls, "third", refuse)
    with pytest.warns(FallbackWarning, match="pytorch instead of third: it does not support this call"):
        assert shift(X, backend="third").tolist() == [1, 1]


def test_fallback_of_one_call_with_its_reason(shift):
    with pytest.warns(FallbackWarning, match="pytorch instead of third: dtype float64 is not supported"):
        assert shift(X.double(), backend="third").tolist() == [1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shift(X.double(), backend="third").tolist() == [1, 1]
        assert shift(X, backend="third").tolist() == [2, 2]  # the next call is served again


def test_disable_fallback(shift, monkeypatch):
    monkeypatch.setenv("DISABLE_FALLBACK", "1")
    with pytest.raises(UnsupportedError, match="'shift_for_test' on backend 'cutile'.*unset DISABLE_FALLBACK"):
        shift(X, backend="cutile")
    with pytest.raises(UnsupportedError, match="'third': dtype float64 is not supported; unset DISABLE_FALLBACK"):
        shift(X.double(), backend="third")
    assert shift(X, backend="third").tolist() == [2, 2]


def test_unknown_backend_is_an_error_and_no_fallback(shift):
    with pytest.raises(BackendError, match="no backend is called 'triton'; there are cutile, pytorch, third"):
        shift(X, backend="triton")


def test_what_pytorch_does_not_serve_is_an_error(shift):
    del shift.op.impls["pytorch"]
    with pytest.raises(UnsupportedError, match="'cutile': it has no implementation.*implemented for third"):
        shift(X, backend="cutile")


def test_other_errors_are_passed_on(shift):
    with pytest.raises(TypeError, match="unexpected keyword"):
        shift(X, to=3, backend="third")


def test_arguments_of_wrong_types_are_named(shift):
    for wrong, message in (
        (([0.0],), "x must be a tensor, it is a list"),
        ((X, None), "by must be a number, it is None"),
        ((X, "2"), "by must be a number, it is '2'"),
        ((X, (2, 3)), "by must be a number, it is a tuple"),
    ):
        with pytest.raises(TypeError, match=f"^shift_for_test: {message}$"):
            shift(*wrong)


def test_observer_sees_calls_and_backends(shift):
    seen = []

    @contextlib.contextmanager
    def observer(op, chosen):
        seen.append((op, chosen))
        yield

    with backend.observe_calls(observer):
        shift(X)
        shift(X, backend="third")
    shift(X)
    assert seen == [("shift_for_test", "pytorch"), ("shift_for_test", "third")]


def test_compiled_code_follows_the_backend(shift):
    compiled = torch.compile(lambda x: shift(x) * 10, fullgraph=True, backend="eager")
    backend.set_backend("pytorch")
    assert compiled(X).tolist() == [10, 10]
    backend.set_backend("third")
    assert compiled(X).tolist() == [20, 20]
    with backend.use_backend("pytorch"):
        assert compiled(X).tolist() == [10, 10]
    assert compiled(X).tolist() == [20, 20]


def test_compiled_code_with_backend_argument_and_fallback(shift):
    backend.set_backend("pytorch")
    explicit = torch.compile(lambda x: shift(x, backend="third"), fullgraph=True, backend="eager")
    assert explicit(X).tolist() == [2, 2]
    falling = torch.compile(lambda x: shift(x, backend="cutile"), fullgraph=True, backend="eager")
    with pytest.warns(FallbackWarning, match="shift_for_test"):
        assert falling(X).tolist() == [1, 1]


def test_dispatch_is_cheap():
    """Well below the budget of ten microseconds for an op's host time, which is that of ten of PyTorch's additions on
    any machine; in CPU time, since it may be busy."""

    def microseconds(function) -> float:
        return min(timeit.repeat(function, timer=time.thread_time, number=200, repeat=30)) / 200 * 1e6

    backend.register_backend("for_test")
    ops.rms_norm.op.impls["for_test"] = lambda *args: None
    x = torch.ones(1, 8)
    try:
        with_backend = microseconds(lambda: ops.rms_norm(x, (8,), None, 1e-6, backend="for_test"))
    finally:
        del ops.rms_norm.op.impls["for_test"]
        selector._probes.pop("for_test")
        selector.unavailable_reason.cache_clear()
    addition = microseconds(lambda: x + x)
    assert with_backend < 4 * addition
    assert microseconds(backend.get_current_backend) < 2 * addition

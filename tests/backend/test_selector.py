"""Which backend serves a call: the order of choices, threads, and what is said of a backend that cannot run."""

import os
import subprocess
import sys
import threading

import pytest

from tilegym import backend
from tilegym.backend import selector
from tilegym.errors import BackendError


@pytest.fixture
def third_backend():
    backend.register_backend("third")
    yield "third"
    selector._probes.pop("third")
    selector.unavailable_reason.cache_clear()


@pytest.fixture(autouse=True)
def no_choice_left():
    yield
    backend.set_backend(None)


def test_choice_order(third_backend):
    assert backend.get_current_backend() == selector.default_backend()[0]
    backend.set_backend("cutile")
    assert backend.get_current_backend() == "cutile"
    with backend.use_backend("third"):
        assert backend.get_current_backend() == "third"
        backend.set_backend("pytorch")
        assert backend.get_current_backend() == "third"
        with backend.use_backend("cutile"):
            assert backend.get_current_backend() == "cutile"
        assert backend.get_current_backend() == "third"
    assert backend.get_current_backend() == "pytorch"
    backend.set_backend(None)
    assert backend.get_current_backend() == selector.default_backend()[0]


def test_use_backend_is_undone_after_an_exception(third_backend):
    with pytest.raises(KeyError), backend.use_backend("third"):
        raise KeyError
    assert backend.get_current_backend() == selector.default_backend()[0]


def test_use_backend_holds_for_its_own_thread_alone(third_backend):
    inside, leave = threading.Event(), threading.Event()
    seen = {}

    def other():
        with backend.use_backend("third"):
            inside.set()
            leave.wait(10)
            seen["other"] = backend.get_current_backend()

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    seen["here"] = backend.get_current_backend()
    leave.set()
    thread.join()
    assert seen == {"here": selector.default_backend()[0], "other": "third"}


def _python(code: str, **environment: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k not in ("TILEGYM_BACKEND", "DISABLE_FALLBACK")}
    return subprocess.run([sys.executable, "-c", code], env=env | environment, capture_output=True, text=True)


def test_environment_variable_is_weaker_than_set_backend():
    code = (
        "from tilegym import backend as b; first = b.get_current_backend(); b.set_backend('pytorch');"
        "print(first, b.get_current_backend()); b.set_backend(None); print(b.get_current_backend())"
    )
    assert _python(code, TILEGYM_BACKEND="cutile").stdout.split() == ["cutile", "pytorch", "cutile"]


def test_environment_variable_with_an_unknown_backend_is_an_error_at_the_call():
    code = (
        "import torch, tilegym\n"
        "try: tilegym.ops.softmax(torch.ones(1, 2))\n"
        "except tilegym.errors.BackendError as e: print(e)"
    )
    out = _python(code, TILEGYM_BACKEND="cuda").stdout
    assert "'cuda'" in out and "cutile, pytorch" in out


def test_default_without_a_gpu(monkeypatch):
    selector.default_backend.cache_clear()
    selector._cutile_gpu_missing.cache_clear()
    monkeypatch.setattr(selector.torch.cuda, "is_available", lambda: False)
    try:
        assert selector.default_backend() == ("pytorch", "no NVIDIA GPU is visible")
    finally:
        selector.default_backend.cache_clear()
        selector._cutile_gpu_missing.cache_clear()


@pytest.mark.parametrize("capability, default", [((7, 5), "pytorch"), ((8, 0), "cutile"), ((12, 0), "cutile")])
def test_default_with_a_gpu(monkeypatch, capability, default):
    selector.default_backend.cache_clear()
    selector._cutile_gpu_missing.cache_clear()
    monkeypatch.setattr(selector.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(selector.torch.cuda, "get_device_capability", lambda *_: capability)
    try:
        assert selector.default_backend()[0] == default
        if default == "pytorch":
            assert "7.5" in selector.default_backend()[1] and "8.0" in selector.default_backend()[1]
    finally:
        selector.default_backend.cache_clear()
        selector._cutile_gpu_missing.cache_clear()


def test_availability(third_backend):
    assert {"cutile", "pytorch", "third"} <= set(backend.get_available_backends())
    assert backend.is_backend_available("pytorch") and backend.is_backend_available("third")
    assert not backend.is_backend_available("triton")
    backend.assert_backend_available("pytorch")


def test_unavailable_backends_are_refused_with_the_reason():
    for refuse in (backend.assert_backend_available, backend.set_backend, lambda n: backend.use_backend(n).__enter__()):
        with pytest.raises(BackendError, match="no backend is called 'triton'"):
            refuse("triton")
    backend.register_backend("broken", lambda: "its library is too old: pip install -U library")
    try:
        assert "broken" not in backend.get_available_backends()
        assert "broken" in selector.known_backends()
        with pytest.raises(BackendError, match="'broken' cannot be used: its library is too old: pip install"):
            backend.set_backend("broken")
    finally:
        selector._probes.pop("broken")
        selector.unavailable_reason.cache_clear()

"""``import tilegym`` is silent and quick, and works without cuTile, transformers and the optional packages."""

import subprocess
import sys
import textwrap

OPTIONAL = ("transformers", "pydantic", "typer", "rich", "matplotlib", "pandas", "kernels", "safetensors")


def _python(code: str) -> str:
    """What a fresh interpreter prints; nothing may appear on its standard error."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


def _blocking(*packages: str) -> str:
    """Code after which ``packages`` cannot be imported or found, as if they were not installed."""
    return f"import sys; sys.modules.update(dict.fromkeys({packages!r}))\n"


def test_import_is_silent_light_and_quick():
    code = """
        import sys, time
        start = time.process_time()
        import torch
        before = time.process_time()
        import tilegym
        print(time.process_time() - before, before - start, *(name for name in OPTIONAL if name in sys.modules))
        """
    printed = [_python(code.replace("OPTIONAL", repr(OPTIONAL))).split() for _ in range(3)]
    assert all(len(line) == 2 for line in printed), f"imported besides: {printed}"
    # Half a second of CPU time is the promise, where torch itself takes 0.7; a core that is shared slows both alike.
    seconds = min(float(own) / max(1.0, float(torchs) / 0.7) for own, torchs in printed)
    assert seconds < 0.5, printed


def test_import_without_cutile():
    code = _blocking("cuda") + textwrap.dedent("""
        import torch, tilegym
        from tilegym import backend
        x = torch.randn(2, 8)
        assert torch.allclose(tilegym.ops.softmax(x), x.softmax(-1))
        assert backend.get_current_backend() == "pytorch" and not backend.is_backend_available("cutile")
        try:
            backend.set_backend("cutile")
        except tilegym.errors.BackendError as error:
            print(error)
        """)
    assert "cuda-tile is not installed: pip install" in _python(code)


def test_import_without_optional_packages():
    code = _blocking(*OPTIONAL) + textwrap.dedent("""
        import torch, tilegym
        x = torch.randn(2, 8)
        for backend in tilegym.backend.get_available_backends():
            y = tilegym.ops.softmax(x, backend=backend)
            assert torch.allclose(y, x.softmax(-1), atol=1e-6)
            print(backend)
        """)
    assert _python(code).split() == ["cutile", "pytorch"]


def test_import_without_torchs_compiler():
    """torch._dynamo takes a second to import; nothing but compiling may do so."""
    code = "import sys, tilegym; print('torch._dynamo' in sys.modules, 'tilegym.interpreter' in sys.modules)"
    assert _python(code).split() == ["False", "False"]


def test_calls_without_torchs_compiler():
    """Recorded ones too."""
    code = """
        import sys, torch
        from tilegym import ops
        x = torch.ones(4)
        for _ in range(3):
            ops.relu(x, backend="cutile")
        (recordings,) = ops.relu.op.named_recordings.values()
        print(*[type(known).__name__ for known in recordings.known.values()], "torch._dynamo" in sys.modules)
        """
    assert _python(code).split() == ["Recording", "False"]

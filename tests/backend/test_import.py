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
        import torch
        before = time.process_time()
        import tilegym
        seconds = time.process_time() - before
        print(round(seconds, 3), *(name for name in OPTIONAL if name in sys.modules))
        """
    printed = [_python(code.replace("OPTIONAL", repr(OPTIONAL))).split() for _ in range(3)]
    assert all(len(line) == 1 for line in printed), f"imported besides: {printed}"
    # Half a second is the promise; CPU time, the best of three, so that a busy machine does not count.
    assert min(float(line[0]) for line in printed) < 0.5


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

"""The tutorials: run as a reader runs them, free of what the sanitizer finds, and their kernels fit for every GPU."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import cuda.tile as ct
import pytest
import torch
from common import ARCHITECTURES
from common import assert_compiles
from common import some

from tilegym import interpreter

FOLDER = Path(__file__).parents[2] / "examples" / "tutorials"
SCRIPTS = sorted(FOLDER.glob("[0-9]*.py"))
tutorials = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)

# Checks against torch that each prints: fewer, and a part of it did not run.
CHECKS = {
    "01_vector_add": 3,
    "02_softmax": 4,
    "03_rms_norm": 7,
    "04_matmul": 4,
    "05_flash_attention": 3,
    "06_autotuning": 2,
    "07_kernel_to_model": 6,
}


def _run(path: Path, cwd: Path, *options: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TILEGYM_CACHE_DIR": str(cwd)}
    command = [sys.executable, *options, path]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def _without_gpu(path: Path, monkeypatch: pytest.MonkeyPatch):
    """The tutorial as a module, which runs on the CPU wherever the test does."""
    monkeypatch.syspath_prepend(FOLDER)
    lesson = importlib.import_module("lesson")
    monkeypatch.setattr(lesson, "ON_GPU", False)
    monkeypatch.setattr(lesson, "DEVICE", "cpu")
    spec = importlib.util.spec_from_file_location(f"tutorial_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_none_is_forgotten():
    assert [path.stem for path in SCRIPTS] == list(CHECKS)
    index = (FOLDER / "README.md").read_text()
    for path in SCRIPTS:
        assert f"]({path.name})" in index
        assert path.name in path.read_text().split('"""')[1], "says how to run it"


@tutorials
def test_runs_as_a_script(path, tmp_path):
    result = _run(path, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert len(re.findall(r"^ok ", result.stdout, re.M)) >= CHECKS[path.stem]
    assert "WRONG" not in result.stdout
    on_cpu = "Running on the CPU" in result.stdout
    assert on_cpu != bool(re.search(r"\d (GB/s|TFLOP/s|tokens/s)", result.stdout)), "speeds on a GPU, and only there"
    assert max(map(len, result.stdout.splitlines())) <= 400


@pytest.mark.parametrize("path", some([SCRIPTS[0], SCRIPTS[-1]], SCRIPTS[0]), ids=lambda path: path.stem)
def test_runs_under_the_interpreters_command(path, tmp_path):
    """Where torch.cuda says that there is a GPU, and there is none: no speed is printed."""
    result = _run(path, tmp_path, "-m", "tilegym.interpreter")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Running on the CPU" in result.stdout


def test_a_wrong_result_ends_the_script(tmp_path):
    """The checks of the tutorials are worth something."""
    lesson, script = (FOLDER / "lesson.py").read_text(), (FOLDER / "02_softmax.py").read_text()
    assert "PaddingMode.NEG_INF" in script
    (tmp_path / "lesson.py").write_text(lesson)
    (tmp_path / "wrong.py").write_text(script.replace("PaddingMode.NEG_INF", "PaddingMode.ZERO"))
    result = _run(tmp_path / "wrong.py", tmp_path)
    assert result.returncode == 1
    assert "WRONG fp32" in result.stdout


@pytest.mark.parametrize("value", [float("nan"), 1.01])
def test_check_refuses(value, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    lesson = importlib.import_module("lesson")
    exact = torch.ones(3, dtype=torch.float64)
    lesson.check("right", exact.float(), exact.float(), exact)
    with pytest.raises(SystemExit):
        lesson.check("wrong", torch.tensor([1.0, 1.0, value]), exact.float(), exact)
    assert capsys.readouterr().out.split()[:2] == ["ok", "right:"]


@tutorials
def test_kernels_are_sane_and_compile(path, monkeypatch):
    """Runs all of a tutorial under the sanitizer, then compiles each of its kernels as it was launched first."""
    module = _without_gpu(path, monkeypatch)
    own = {kernel for kernel in vars(module).values() if isinstance(kernel, ct.kernel)}
    launches, launch = {}, interpreter.launch

    def record(grid, kernel, args, **options):
        launches.setdefault(kernel, args)
        launch(grid, kernel, args, **options)

    monkeypatch.setattr(interpreter, "launch", record)
    with interpreter.sanitize():
        if hasattr(module, "relu_squared"):  # its main registers kernels for this whole process
            module.relu_squared(torch.randn(3, 1000), backend="cutile")
        else:
            module.main()
    assert own <= launches.keys()
    # Matrix products take seconds for each architecture.
    slow = "attention" in path.stem or "matmul" in path.stem
    architectures = ("sm_90", "sm_120") if slow else ARCHITECTURES
    for kernel in own:
        assert_compiles(kernel, launches[kernel], architectures)

"""``tilegym doctor``: each line, its remedy, and the exit status."""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from tilegym import doctor
from tilegym.backend import selector
from tilegym.errors import BackendError
from tilegym_command import build_app

HAS_GPU = torch.cuda.is_available()
without_gpu = pytest.mark.skipif(HAS_GPU, reason="describes a machine without a GPU")


def by_name(checks) -> dict:
    return {check.name: check for check in checks}


def run(*arguments: str):
    return CliRunner().invoke(build_app("doctor"), ["doctor", *arguments])


@without_gpu
def test_machine_without_a_gpu_is_fine():
    result = run()
    assert result.exit_code == 0, result.output
    assert "pytorch: no NVIDIA GPU is visible" in result.output
    assert "rms_norm agrees with PyTorch on cpu" in result.output
    assert "TileGym can run here." in result.output and "FAIL" not in result.output


def test_json():
    result = run("--json")
    found = json.loads(result.stdout)
    assert found["ok"] is (result.exit_code == 0)
    checks = {check["name"]: check for check in found["checks"]}
    wanted = {"TileGym", "Python", "PyTorch", "driver", "cuTile", "tileiras", "backend", "tuning results"}
    assert wanted | {"compiled kernels", "backend runs"} <= checks.keys()
    assert set(checks["backend"]) == {"name", "status", "found", "remedy"}
    assert checks["cuTile"]["found"].startswith("1.7")


@pytest.mark.parametrize(
    ("package", "name", "version", "status"),
    [
        ("transformers", "transformers", "5.10.0rc1", "ok"),
        ("transformers", "transformers", "4.57.3", "fail"),
        ("transformers", "transformers", "5.23.1", "ok"),
        ("transformers", "transformers", "5.24.0", "ok"),
        ("transformers", "transformers", "6.0.0", "fail"),
        ("cuda-tile", "cuTile", "1.7rc1", "ok"),
        ("cuda-tile", "cuTile", "1.10.0", "fail"),
        ("cuda-tile", "cuTile", "unknown", "fail"),
    ],
)
def test_versions(monkeypatch, package, name, version, status):
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda asked: version if asked == package else real(asked))
    check = by_name(doctor.run_checks())[name]
    assert check.status == status and version in check.found and (check.remedy is None) == (status == "ok")


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    ("printed", "found", "fits"),
    [
        ("Cuda compilation tools, release 13.4, V13.4.92", "13.4.92 in", True),
        ("Cuda compilation tools, release 13.10, V13.10.1", "13.10.1 in", True),
        ("Cuda compilation tools, release 13.2, V13.2.51", "13.2.51 in", False),
        ("?", "of an unknown version in", False),
    ],
)
def test_release_of_the_compiler(monkeypatch, printed, found, fits, gpu):
    monkeypatch.setattr(doctor, "find_tileiras", lambda: "/bin/tileiras")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *args, **kwargs: SimpleNamespace(stdout=printed))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    check = by_name(doctor._cutile())["tileiras"]
    assert check.found.startswith(found)
    assert check.status == (doctor.OK if fits else doctor.FAIL if gpu else doctor.INFO)
    assert fits or "nvidia-cuda-tileiras>=13.4,<13.5" in check.remedy


def test_packages_of_two_releases_are_no_compiler(monkeypatch, tmp_path):
    """cuTile passes them by."""
    compiler = tmp_path / "nvidia/cu13/bin/tileiras"
    compiler.parent.mkdir(parents=True)
    compiler.touch(0o755)
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: package)
    monkeypatch.setenv("PATH", str(tmp_path))
    releases = dict.fromkeys(doctor._TILEIRAS_PACKAGES, "13.4.92")
    monkeypatch.setattr(doctor, "_version", releases.get)
    assert doctor.find_tileiras() == str(compiler)
    releases["nvidia-nvvm"] = "13.5.37"
    assert doctor.find_tileiras() != str(compiler)


def test_the_extra_installs_what_the_remedy_names():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (extra,) = re.findall(r"^tileiras = \[(.*)\]$", project, re.MULTILINE)
    assert doctor._INSTALL_TILEIRAS == "pip install " + extra.replace('"', "'").replace(",", "").replace("<", ",<")


def test_an_old_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
    check = by_name(doctor._software())["PyTorch"]
    assert check.status == "fail" and check.remedy == "pip install 'torch>=2.9'"


def test_every_failure_has_a_remedy(monkeypatch):
    """On a machine on which everything is wrong."""
    monkeypatch.setattr(doctor.sys, "version_info", (3, 9, 1))
    monkeypatch.setattr(doctor, "_version", lambda package: {"cuda-tile": "1.3.0"}.get(package))
    monkeypatch.setattr(doctor, "find_tileiras", lambda: None)
    monkeypatch.setattr(doctor, "_driver_version", lambda: "535.104")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    turing = SimpleNamespace(name="T4", major=7, minor=5, total_memory=2**34, multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: turing)
    monkeypatch.setattr(doctor, "_device", lambda: "cpu")
    monkeypatch.setenv("TILEGYM_CACHE_DIR", "/proc/nowhere")
    monkeypatch.setenv("CUDA_TILE_CACHE_DIR", "/proc/nowhere")
    checks = by_name(doctor.run_checks())
    for name in ("Python", "driver", "GPU 0", "cuTile", "tileiras"):
        assert checks[name].status == doctor.FAIL and checks[name].remedy, name
    for name in ("tuning results", "compiled kernels"):  # it runs all the same
        assert checks[name].status == doctor.WARN and checks[name].remedy, name
    assert checks["tuned for"].found.startswith("T4: nothing was measured")
    assert "7.5" in checks["GPU 0"].found and "8.0" in checks["GPU 0"].remedy
    assert "580" in checks["driver"].remedy and "1.3.0" in checks["cuTile"].found


def test_settings_that_no_run_could_use(monkeypatch):
    assert "settings" not in by_name(doctor.run_checks())
    monkeypatch.setenv("TILEGYM_TUNE_TIMEOUT", "a minute")
    check = by_name(doctor.run_checks())["settings"]
    assert check.status == doctor.FAIL and "'a minute'" in check.found and "TILEGYM_TUNE_TIMEOUT" in check.remedy
    assert not doctor.backend_can_run(doctor.run_checks())


@pytest.mark.parametrize("folder", [None, "kept", "", "off", " None "])
def test_folder_of_compiled_kernels_is_cutiles(monkeypatch, tmp_path, folder):
    from cutile_cache import _env

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_TILE_CACHE_DIR", raising=False)
    if folder is not None:
        monkeypatch.setenv("CUDA_TILE_CACHE_DIR", folder)
    used = _env.get_cache_dir_from_env()
    check = by_name(doctor._caches())["compiled kernels"]
    assert (check.status, check.found) == ((doctor.INFO, "not kept") if used is None else (doctor.OK, used))


def test_a_user_without_a_home(monkeypatch, tmp_path):
    for name in ("CUDA_TILE_CACHE_DIR", "XDG_CACHE_HOME", "TILEGYM_CACHE_DIR", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert by_name(doctor._caches())["tuning results"].found == str(tmp_path / "tilegym")


@pytest.mark.parametrize("build, remedy", [(None, "CUDA build of torch"), ("13.0", "CUDA_VISIBLE_DEVICES")])
def test_gpu_that_pytorch_does_not_see(monkeypatch, build, remedy):
    monkeypatch.setattr(doctor, "_driver_version", lambda: "580.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    checks = by_name(doctor._gpu())
    assert checks["driver"].status == doctor.OK
    assert checks["GPU"].status == doctor.FAIL and remedy in checks["GPU"].remedy


@pytest.fixture
def backend_from_environment(monkeypatch):
    def choose(name):
        monkeypatch.setenv("TILEGYM_BACKEND", name)
        selector._environment_or_default.cache_clear()

    yield choose
    monkeypatch.undo()
    selector._environment_or_default.cache_clear()


def test_backend_that_does_not_exist(backend_from_environment):
    backend_from_environment("cuda")
    result = run()
    assert result.exit_code == 1
    assert "TILEGYM_BACKEND=cuda" in result.output and "unset TILEGYM_BACKEND" in result.output
    assert "TileGym cannot run here" in result.output


def test_cutile_backend_really_runs(backend_from_environment):
    """On a CPU in the interpreter, on a GPU for real."""
    backend_from_environment("cutile")
    result = run()
    assert result.exit_code == 0, result.output
    assert "cutile: TILEGYM_BACKEND; the default of this machine is" in result.output


@pytest.mark.parametrize(
    "impl, reason",
    [
        (lambda x, *_: x, "BackendError: rms_norm is off by"),
        (lambda *_: (_ for _ in ()).throw(RuntimeError("CUDA_ERROR_NO_BINARY\nmore")), "RuntimeError: CUDA_ERROR_NO"),
    ],
)
def test_backend_that_fails(monkeypatch, backend_from_environment, impl, reason):
    monkeypatch.setitem(doctor.tilegym.ops.rms_norm.op.impls, "cutile", impl)
    backend_from_environment("cutile")
    result = run()
    assert result.exit_code == 1
    assert reason in result.output and "TILEGYM_BACKEND=pytorch" in result.output
    assert "more" not in result.output.split("backend runs")[1].split("\n")[0]


def test_driver_version(monkeypatch):
    def answers(output=None, error=None):
        def run(*_, **__):
            if error:
                raise error
            return SimpleNamespace(stdout=output)

        monkeypatch.setattr(doctor.subprocess, "run", run)
        return doctor._driver_version()

    assert answers("580.65.06\n580.65.06\n") == "580.65.06"
    assert answers("") is None
    assert answers(error=FileNotFoundError()) is None
    assert answers(error=subprocess.TimeoutExpired("nvidia-smi", 30)) is None


def test_op_that_a_backend_lacks():
    with pytest.raises(BackendError, match="no implementation of rms_norm"):
        doctor._rms_norm_of("third")

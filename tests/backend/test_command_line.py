"""The command line: what it lists, what it loads, and how errors look."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

import tilegym_command
from tilegym import __version__
from tilegym import cli
from tilegym import env
from tilegym.backend.cutile import tuning_cache
from tilegym.backend.cutile.tuning_cache import TuningCache
from tilegym.backend.cutile.tuning_cache import TuningKey
from tilegym.backend.cutile.tuning_cache import TuningResult
from tilegym_command import COMMANDS
from tilegym_command import build_app


def tilegym(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "tilegym", *arguments], capture_output=True, text=True)


def run(*arguments: str):
    return CliRunner().invoke(build_app(arguments[0]), list(arguments))


def test_help_lists_all_commands():
    result = tilegym("--help")
    assert result.returncode == 0
    for name, command in COMMANDS.items():
        assert name in result.stdout
        assert command.help.split(".")[0] in " ".join(result.stdout.split())


def test_version():
    assert tilegym("--version").stdout.strip() == f"tilegym {__version__}"


@pytest.mark.parametrize(
    "arguments, printed", [(("--help",), "inventory"), (("--version",), __version__), (("knit",), "No such command")]
)
def test_what_runs_nothing_does_not_wait_for_pytorch(arguments, printed):
    code = "import atexit, sys, tilegym_command\natexit.register(lambda: print('torch' in sys.modules))\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "tilegym_command.main()", *arguments], capture_output=True, text=True
    )
    assert printed in done.stdout + done.stderr and done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_of_its_own(name):
    result = run(name, "--help")
    assert result.exit_code == 0 and "--help" in result.output and f"{name}" in result.output


def test_other_commands_are_not_loaded():
    code = (
        "import sys; from tilegym_command import COMMANDS, build_app; build_app('tune');"
        "print(*(c.module for c in COMMANDS.values() if c.module in sys.modules), 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tilegym.tune", "False"]


def test_unknown_command():
    result = tilegym("knit")
    assert result.returncode == 2 and "No such command 'knit'" in result.stderr and "Traceback" not in result.stderr


def test_own_errors_are_one_line():
    result = tilegym("tune", "--list", "--clear")
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr == "error: --list, --clear and --export exclude each other\n"


def test_corrupt_results_are_a_warning_of_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEGYM_CACHE_DIR", str(tmp_path))
    (tmp_path / "tuning.sqlite").write_text("no database " * 100)
    result = tilegym("tune")
    assert result.returncode == 0 and result.stdout.startswith("No tuning results")
    (line,) = result.stderr.splitlines()
    assert line.startswith("warning: the tuning results in") and "is corrupt" in line and ".unusable" in line


def test_missing_package_is_named(monkeypatch, capsys):
    def import_module(name):
        raise ModuleNotFoundError("No module named 'matplotlib.pyplot'", name="matplotlib.pyplot")

    monkeypatch.setattr(tilegym_command.importlib, "import_module", import_module)
    monkeypatch.setattr(sys, "argv", ["tilegym", "doctor"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    assert "`tilegym doctor` needs a package that is not installed: matplotlib.pyplot" in capsys.readouterr().err


@pytest.fixture
def results(tmp_path, monkeypatch) -> TuningCache:
    monkeypatch.setenv("TILEGYM_CACHE_DIR", str(tmp_path))
    cache = TuningCache()
    for gpu in ("NVIDIA H200", "NVIDIA L4"):
        key = TuningKey(gpu, "module.kernel", "abc", "def", "x=float32[8]")
        cache.put(TuningResult(key, {"TILE": 64, "occupancy": 2}, 12.34))
    return cache


def test_tune_list(results):
    for output in (run("tune").output, run("tune", "--list").output):
        assert "NVIDIA H200" in output and "NVIDIA L4" in output
        assert "module.kernel  x=float32[8]" in output and "12.3 us  TILE=64 occupancy=2" in output
    assert "NVIDIA L4" not in run("tune", "--gpu", "NVIDIA H200").output


def test_tune_clear(results):
    assert "Deleted 2 results" in run("tune", "--clear").output
    assert results.all() == []
    assert "No tuning results" in run("tune").output


def test_tune_export_writes_what_is_shipped(results, tmp_path):
    file = tmp_path / "out" / "x.json"
    result = run("tune", "--gpu", "NVIDIA H200", "--export", str(file))
    assert result.exit_code == 0 and "Wrote 1 results" in result.output
    (loaded,) = tuning_cache.load_results(file)
    assert loaded.config == {"TILE": 64, "occupancy": 2} and loaded.key.gpu == "NVIDIA H200"


def test_tune_export_of_several_gpus_asks_for_one(results, tmp_path):
    result = run("tune", "--export", str(tmp_path / "x.json"))
    assert result.exit_code == 1
    assert "NVIDIA H200, NVIDIA L4" in str(result.exception) and "--gpu NAME" in str(result.exception)
    assert not (tmp_path / "x.json").exists()


def test_tune_export_of_nothing_says_so(results, tmp_path):
    for options in ((), ("--export", str(tmp_path / "x.json"))):
        result = run("tune", "--gpu", "NVIDIA H100", *options)
        assert result.exit_code == 1 and str(tmp_path) in str(result.exception)
        assert str(result.exception).startswith("no tuning results of 'NVIDIA H100' in ")
        assert str(result.exception).endswith(", only of 'NVIDIA H200', 'NVIDIA L4'")
    results.clear()
    result = run("tune", "--export", str(tmp_path / "x.json"))
    assert result.exit_code == 1 and str(result.exception).startswith("nothing to export: no tuning results in ")


def test_tune_export_to_no_file(results, tmp_path):
    (tmp_path / "file").touch()
    result = run("tune", "--gpu", "NVIDIA L4", "--export", str(tmp_path / "file" / "x.json"))
    assert result.exit_code == 1 and str(result.exception).endswith("file/x.json cannot be written: File exists")


@pytest.mark.parametrize("value", ["a minute", "nan", "inf", "0", "-1"])
def test_time_limit_that_is_no_number_of_seconds(monkeypatch, value):
    monkeypatch.setenv("TILEGYM_TUNE_TIMEOUT", value)
    with pytest.raises(ValueError, match=f"TILEGYM_TUNE_TIMEOUT is '{value}'; it has to be a number of seconds"):
        env.tune_timeout()


def test_ctrl_c_while_a_command_is_imported_is_a_word(monkeypatch, capsys):
    def stop(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "build_app", stop)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130 and capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_while_pytorch_is_imported_is_a_word(tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    program = "import sys; sys.path.insert(0, sys.argv.pop(1)); import tilegym_command; tilegym_command.main()"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path), "doctor"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")

"""What holds for the project as a whole."""

import ast
import inspect
import re
import subprocess
from pathlib import Path

import pytest

import tilegym
from tilegym.backend import dispatcher

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
OPS = sorted(name for name, op in dispatcher._ops.items() if op.declaration.__module__ == "tilegym.ops.ops")
MAX_LINES = 450


def _tracked_files() -> list[Path]:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def _tracked_text() -> list[tuple[Path, str]]:
    texts = []
    for path in _tracked_files():
        try:
            texts.append((path, path.read_text()))
        except UnicodeDecodeError:
            pass
    return texts


@pytest.mark.parametrize("name", OPS)
def test_implementations_have_the_declared_signature(name):
    op = dispatcher._ops[name]
    declared = [(p.name, p.kind, p.default) for p in op.signature.parameters.values()]
    for backend, impl in op.impls.items():
        signature = inspect.signature(impl)
        assert [(p.name, p.kind, p.default) for p in signature.parameters.values()] == declared, backend


@pytest.mark.parametrize("name", OPS)
def test_ops_are_documented_implemented_and_public(name):
    op = dispatcher._ops[name]
    assert {"pytorch", "cutile"} <= op.impls.keys()
    assert getattr(tilegym.ops, name).op is op
    documentation = inspect.getdoc(op.declaration)
    for word in ("Args:", "Returns:"):
        assert word in documentation
    for parameter in op.signature.parameters:
        assert re.search(rf"\b{parameter}\b", documentation), f"{parameter} is not documented"


@pytest.mark.parametrize("name", OPS)
def test_ops_are_listed_in_the_readme(name):
    assert f"`{name}`" in (ROOT / "README.md").read_text()


def test_there_are_ops():
    assert len(OPS) >= 9


def _environment_reads(path: Path) -> set[str]:
    """The names in ``os.environ["X"]``, ``os.environ.get("X")``, ``setdefault`` and ``os.getenv("X")``."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        arguments = []
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            arguments = [node.slice]
        elif isinstance(node, ast.Call) and re.fullmatch(r"os\.(environ\.\w+|getenv)", ast.unparse(node.func)):
            arguments = node.args[:1]
        names |= {a.value for a in arguments if isinstance(a, ast.Constant)}
    return names


def _own_variables(path: Path) -> set[str]:
    return set(re.findall(r"\b(?:TILEGYM_[A-Z_]*[A-Z]|DISABLE_FALLBACK)\b", path.read_text()))


def test_own_environment_variables_are_read_in_one_place():
    env = ROOT / "src/tilegym/env.py"
    known = _own_variables(env)
    getters = [n for n in ast.parse(env.read_text()).body if isinstance(n, ast.FunctionDef) and n.name[0] != "_"]
    assert len(getters) == len(known), "one getter a variable"
    for path in SOURCES:
        assert _own_variables(path) <= known, f"{path.relative_to(ROOT)} names a variable that env.py does not"
    # The interpreter, the pytest plugin and what runs at Python's start stand below env.py and read their switch
    # themselves; a benchmark sets one for the time of a run.
    allowed = {
        "src/tilegym/env.py",
        "src/tilegym/interpreter/install.py",
        "src/tilegym_pytest_plugin.py",
        "src/tilegym_startup.py",
        "src/tilegym/bench/runner.py",
    }
    for path in SOURCES:
        if str(path.relative_to(ROOT)) not in allowed:
            assert not _environment_reads(path) & known, f"{path.relative_to(ROOT)} reads its variables past env.py"


def test_environment_variables_are_documented():
    documented = (ROOT / "docs/environment-variables.md").read_text()
    rows = set(re.findall(r"`([A-Z][A-Z_]+)`", documented))
    own = _own_variables(ROOT / "src/tilegym/env.py")
    assert own <= rows
    assert {name for name in rows if name.startswith("TILEGYM_")} <= own, "documented, but there is no such variable"
    for path in SOURCES:
        missing = _environment_reads(path) - rows
        assert not missing, f"{path.relative_to(ROOT)} reads {missing}"


def test_files_stay_short():
    long = {}
    for path, text in _tracked_text():
        if path.suffix in (".py", ".sh") and len(text.splitlines()) > MAX_LINES:
            long[str(path.relative_to(ROOT))] = len(text.splitlines())
    assert not long


def test_no_file_names_a_place_on_one_machine():
    home = re.compile(r"(?<![\w./:<>*-])/(?:home|root|Users|work|mnt|data)/\w[^\s`'\")]*")
    found = {
        str(path.relative_to(ROOT)): match.group()
        for path, text in _tracked_text()
        if path.name != "text.txt" and (match := home.search(text))
    }
    assert not found


def test_no_file_names_a_package_index():
    index = re.compile(r"(?:index-url|find-links)[= ]+\S+|https?://(?:[\w-]+\.)*(?:pypi|pythonhosted)\.\w+|/whl/cpu")
    found = {
        str(path.relative_to(ROOT)): match.group()
        for path, text in _tracked_text()
        if path != Path(__file__) and (match := index.search(text))
    }
    assert not found


def test_packaging():
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{tilegym.__version__}"' in project
    assert (ROOT / "src/tilegym/py.typed").is_file()
    assert (ROOT / "LICENSE").read_text().startswith("MIT License")
    for name in ("README.md", "CLAUDE.md", "Makefile", ".ci/run"):
        assert (ROOT / name).is_file(), name
    assert (ROOT / ".ci/run").stat().st_mode & 0o111, "has to be executable"


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


# A part of the package: what it may import of the others, besides env and errors, which know nobody.
MAY_IMPORT = {
    "interpreter": set(),
    "backend": {"interpreter"},
    "ops": {"backend", "interpreter"},
    "inventory": {"backend", "interpreter", "ops"},
    "transformers": {"backend", "interpreter", "ops"},
    "kernel": {"backend", "interpreter", "ops", "transformers"},
}


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_run_downward(part):
    allowed = MAY_IMPORT[part] | {part, "env", "errors"}
    for path in (ROOT / "src/tilegym" / part).rglob("*.py"):
        if path.name.startswith("test_"):  # beside a patch that `tilegym integrate` has written
            continue
        for name in _imports(path):
            if name.startswith("tilegym."):
                assert name.split(".")[1] in allowed, f"{path.relative_to(ROOT)} imports {name}"
            if part == "interpreter":
                assert not name.startswith("tilegym.") or name.startswith("tilegym.interpreter"), path


def test_nothing_imports_the_command_line():
    for path in SOURCES:
        if path.name not in ("__main__.py", "cli.py", "tilegym_command.py"):
            assert not any(name.startswith(("tilegym.cli", "tilegym_command")) for name in _imports(path)), path

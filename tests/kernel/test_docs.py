"""docs/kernel-registry.md: every snippet runs, in the order of the page, and prints what the page says."""

import re
import sys
from pathlib import Path

from .fakes import run_offline

PAGE = Path(__file__).parents[2] / "docs/kernel-registry.md"


def test_every_snippet_runs_and_prints_what_it_says(hub_cache, tmp_path, monkeypatch):
    blocks = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 9 and {kind for kind, _ in blocks} == {"python", "text"}
    code = []
    expected = []
    for kind, text in blocks:
        file = re.match(r"# (\S+\.py)\n", text)
        if kind == "text":
            expected += text.splitlines()
        elif file:
            (tmp_path / file[1]).parent.mkdir()
            (tmp_path / file[1]).write_text(text)
        else:
            code.append(text)
    monkeypatch.chdir(tmp_path)
    out = run_offline("\n".join(code), hub_cache, PYTHONWARNINGS="error::UserWarning:tilegym")
    assert [line.rstrip() for line in out.splitlines()] == expected


def test_the_tables_name_what_there_is():
    from tilegym.kernel import registry

    page = PAGE.read_text()
    for name in {k.name for k in registry.list_layer_kernels()} | set(registry.list_named_functions()):
        assert f"`{name}`" in page
    for name in re.findall(r"`(list_\w+|find_\w+)`", page):
        assert callable(getattr(registry, name))
    assert "tilegym.kernel" in sys.modules

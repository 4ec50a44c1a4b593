"""docs/autokernel.md is filled from ledgers, and from what bench_generated.py wrote."""

import json

import pytest
from test_autokernel_loop import loop
from test_autokernel_loop import repository

from tilegym.autokernel import docs
from tilegym.errors import AutokernelError

__all__ = ["repository"]
ROW = {"region": "a_norm", "tokens": 1, "pass": "forward", "generated_us": 2.0, "compile_us": 3.0, "ratio": 1.5}
FOUND = {
    "machine": {"device_name": "a GPU", "date": "2026-01-02T03:04:05", "torch": "2.11"},
    "means": {"all": 1.5, "backward": None},
    "rows": [ROW | {"correct": True}, ROW | {"region": "wrong", "correct": False}, {"region": "broken", "failed": "x"}],
}


def test_runs_and_figures_are_put_between_the_marks(repository, tmp_path):
    made = loop(repository, tmp_path / "out", experiments=9)
    made.run()
    page, generated = tmp_path / "page.md", tmp_path / "generated.json"
    page.write_text(f"before\n{docs.BEGIN}\noutdated\n{docs.END}\nafter\n")
    generated.write_text(json.dumps(FOUND))
    docs.write(page, [tmp_path / "out"], generated)
    once = page.read_text()
    assert once.startswith("before\n") and once.endswith("\nafter\n") and "outdated" not in once
    rows = [line for line in once.splitlines() if line.startswith("| ") and "keep" in line]
    assert len(rows) == len(made.ledger.kept()) > 0
    assert f"{made.ledger.fact('machine')['date'][:10]}: bfloat16" in once  # without the hour
    assert f"{made.coverage():.1%}" in once and "| 0 | the unpatched model |" in once
    assert "| a_norm | 1 | forward | 2.0 | 3.0 | 1.50 |" in once and "wrong" not in once and "1 of 3 figures" in once
    docs.write(page, [tmp_path / "out"], generated)
    assert page.read_text() == once


def test_the_page_has_its_place(tmp_path):
    text = docs.PAGE.read_text()
    assert text.count(docs.BEGIN) == text.count(docs.END) == 1
    (tmp_path / "page.md").write_text("nothing")
    with pytest.raises(AutokernelError, match="no place"):
        docs.write(tmp_path / "page.md", [], None)
    with pytest.raises(AutokernelError, match="no ledger"):
        docs.run_section(tmp_path)

"""The shipped inventory: it keeps the rules, it is complete, and every Solution computes what its Definition says."""

import pytest
from common import sanitized

from tilegym.backend import dispatcher
from tilegym.inventory import loading
from tilegym.inventory import reference
from tilegym.inventory.inputs import cases
from tilegym.inventory.rules import validate
from tilegym.inventory.verify import check_solution

CATALOG = loading.load()
SOLUTIONS = sorted(CATALOG.solutions)


def test_the_rules_are_kept():
    assert not validate(), "\n".join(map(str, validate()))


def test_every_op_has_an_entry():
    covered = {tag.removeprefix("op:") for d in CATALOG.definitions.values() for tag in d.tags if tag.startswith("op:")}
    ops = {name for name, op in dispatcher._ops.items() if op.declaration.__module__.startswith("tilegym.ops.")}
    assert sorted(ops - covered) == [], "no Definition carries the tag 'op:<name>' for these"
    assert sorted(covered - ops) == [], "tags of ops that there are not"


def test_every_definition_has_a_solution_in_cutile():
    for name in CATALOG.definitions:
        assert any(s.spec.language == "cuda-tile" for s in CATALOG.solutions_of(name)), name


@pytest.mark.parametrize("name", SOLUTIONS)
def test_solutions_compute_their_definitions(name, monkeypatch):
    monkeypatch.setenv("DISABLE_FALLBACK", "1")  # the kernels themselves, or an error
    solution = CATALOG.solutions[name]
    definition = CATALOG.definitions[solution.definition]
    wrong = check_solution(definition, solution, context=sanitized)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", sorted(CATALOG.definitions))
def test_solutions_are_tried_with_odd_sizes(name):
    """Of every axis that no constraint makes even, or a function of others."""
    definition = CATALOG.definitions[name]
    tried = list(cases(definition))
    for axis in definition.var_axes:
        if not any(c.startswith((f"{axis} % 2 == 0", f"{axis} == ")) for c in definition.constraints):
            assert any(case.axes[axis] % 2 and case.axes[axis] > 1 for case in tried), axis


@pytest.mark.parametrize("name", sorted(CATALOG.definitions))
def test_references_stand_by_themselves(name):
    """They run with torch and the standard library alone, and name where they come from."""
    definition = CATALOG.definitions[name]
    assert "tilegym" not in definition.reference and "import transformers" not in definition.reference
    for url in reference.sources(definition.reference):
        first, _, last = url.partition("#L")[2].partition("-L")
        assert int(first) <= int(last or first)


def test_the_catalog_that_is_loaded_is_the_callers_own():
    mine = loading.load()
    mine.definitions.clear()
    assert loading.load().definitions

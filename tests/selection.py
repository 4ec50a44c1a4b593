"""Which tests run unless ``--all`` asks for every one: those that are not slow, with each value of each parameter.

A test whose parameters are given in several lists runs for all that they can be combined to, of which there are
hundreds where half a dozen lists meet. Here it runs as often as it takes for every entry of every list to be met.
"""

from collections.abc import Iterable

import pytest


def met(item: pytest.Item) -> set[tuple]:
    """The entries of its lists of parameters that a test runs with."""
    params, entries = dict(item.callspec.params), set()
    for number, mark in enumerate(item.iter_markers("parametrize")):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        entries.add((number, *(id(params.pop(name)) for name in names if name in params)))
    return entries | {(name, id(value)) for name, value in params.items()}  # of fixtures, and of hooks


def fewest(items: list[pytest.Item]) -> list[pytest.Item]:
    """As many of one test's ``items``, from its first on, as meet all entries."""
    entries = [met(item) for item in items]
    missing = set().union(*entries)
    chosen = set()
    while missing:
        best = max(range(len(items)), key=lambda i: (len(entries[i] & missing), -i))
        chosen.add(best)
        missing -= entries[best]
    return [item for i, item in enumerate(items) if i in chosen]


def quick(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Those of ``items`` that run without ``--all``."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {one for same in tests.values() for one in (fewest(same) if hasattr(same[0], "callspec") else same)}


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="run every test, slow ones and all combinations of parameters")


@pytest.hookimpl(trylast=True)  # among those that -m has left
def pytest_collection_modifyitems(config, items):
    """Whoever names a test or a part of their names gets all of those."""
    if config.getoption("all") or config.option.keyword or any("::" in arg for arg in config.args):
        return
    kept = quick(items)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]

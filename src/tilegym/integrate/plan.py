"""The plan: for each thing that a model computes the kernels that may serve it, best match first."""

import functools
import json
import re
from dataclasses import asdict
from dataclasses import dataclass
from typing import Any

from torch import nn

from tilegym.errors import InventoryError
from tilegym.integrate.recipes import compute_of
from tilegym.integrate.recipes import ways
from tilegym.integrate.requirement import Requirement
from tilegym.integrate.requirement import Research
from tilegym.integrate.research import research
from tilegym.transformers.general import Place

EXACT, COMPATIBLE, PART = "exact", "compatible", "part"
_RANK = {EXACT: 0, COMPATIBLE: 1, PART: 2}


@dataclass(frozen=True)
class Candidate:
    """A kernel that may serve a requirement.

    Attributes:
        op: the op of TileGym.
        place: where it goes, and how it is called there.
        solution: the inventory's name of the kernel; "" where no Definition is the whole of the requirement.
        fit: "exact" or "compatible", as the inventory matches them; "part": the op computes the middle of it, and what
            stands around stays PyTorch's.
        steps: what lies between the requirement and the kernel, in words.
    """

    op: str
    place: Place
    solution: str = ""
    fit: str = PART
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """One requirement, its compute's name, its candidates, and why there are none."""

    key: str
    compute: str
    requirement: Requirement
    candidates: tuple[Candidate, ...]
    why: str = ""


@dataclass(frozen=True)
class Plan:
    """All of a model's requirements. ``by_hand``: TileGym has a patch for the family already."""

    family: str
    research: Research
    items: tuple[Item, ...]
    by_hand: bool

    @property
    def computes(self) -> dict[str, list[Item]]:
        """The items that have candidates, by compute."""
        found: dict[str, list[Item]] = {}
        for item in self.items:
            if item.candidates:
                found.setdefault(item.compute, []).append(item)
        return found

    def summary(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "family": self.family,
            "architecture": self.research.architecture,
            "transformers": self.research.transformers,
            "patched_by_hand": self.by_hand,
            "items": [
                {
                    "key": item.key,
                    "compute": item.compute,
                    "kind": item.requirement.kind,
                    "implementation": item.requirement.implementation,
                    "modules": len(item.requirement.modules),
                    "places": list(item.requirement.layers),
                    "source": item.requirement.source.url if item.requirement.source else "",
                    "candidates": [asdict(candidate) for candidate in item.candidates],
                    "why": item.why,
                }
                for item in self.items
            ],
            "unrecognised": [asdict(missed) for missed in self.research.unrecognised],
        }


def family_of(model_type: str) -> str:
    """The name of a family in Python: that of its folder and its patch."""
    return re.sub(r"\W", "_", model_type).lower()


def make_plan(model: nn.Module, trust_remote_code: bool = False, look_up: bool = True) -> Plan:
    """Finds out what ``model`` computes and which kernels may serve it; its weights are neither read nor run.

    Args:
        model: of transformers, or of one's own; one without memory (on the meta device) will do.
        look_up: match the drafts with the inventory too: the kernels' names, how they fit, and their order.

    Raises:
        ModelError: it cannot be made small.
    """
    found = research(model, trust_remote_code)
    items, keys = [], set()
    for requirement in found.requirements:
        compute = compute_of(requirement)
        candidates, why = _candidates(requirement, model, look_up)
        if found.attention and any(candidate.place.put == "attention" for candidate in candidates):
            candidates, why = (), found.attention
        key, count = compute, 1
        while key in keys:
            count += 1
            key = f"{compute}_{count}"
        keys.add(key)
        items.append(Item(key, compute, requirement, candidates, why))
    return Plan(family_of(found.model_type), found, tuple(items), is_patched_by_hand(found.model_type))


def is_patched_by_hand(model_type: str) -> bool:
    """Whether ``monkey_patch`` knows the family."""
    from tilegym.transformers import monkey_patch

    return model_type in monkey_patch.FAMILIES


def _candidates(requirement: Requirement, model: nn.Module, look_up: bool) -> tuple[tuple[Candidate, ...], str]:
    places, why = ways(requirement, model)
    found = [Candidate(op, place) for op, place in places]
    if found and look_up:
        found = _looked_up(requirement, found)
    return tuple(found), why


@functools.lru_cache(maxsize=256)
def _matches(definition: str) -> list:
    from tilegym import inventory

    try:
        return inventory.match(inventory.Definition.model_validate_json(definition))
    except InventoryError:  # a draft whose constraints do not say all: then the op by itself
        return []


def _looked_up(requirement: Requirement, candidates: list[Candidate]) -> list[Candidate]:
    matches, found = _matches(json.dumps(requirement.definition)), []
    for candidate in candidates:
        # A second candidate of one op takes what the first has left.
        taken = {c.solution for c in found}
        best = next(
            (m for m in matches if f"op:{candidate.op}" in m.target.tags and m.solution.name not in taken), None
        )
        if best is not None:
            candidate = Candidate(candidate.op, candidate.place, best.solution.name, best.kind, best.steps)
        found.append(candidate)
    return sorted(found, key=lambda c: _RANK[c.fit])

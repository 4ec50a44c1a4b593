"""The kernels that autokernel kept, below the model families: beyond what holds for every Solution of the catalog."""

from collections.abc import Callable

import pytest
import torch
from common import assert_launches_compile
from common import randn
from common import sanitized

from tilegym.autokernel import Task
from tilegym.autokernel.proposers import Reuse
from tilegym.autokernel.proposers import reuse
from tilegym.autokernel.repository import write_proposal
from tilegym.autokernel.static_checks import check
from tilegym.autokernel.static_checks import check_source
from tilegym.errors import UnsupportedError
from tilegym.inventory import AxisConst
from tilegym.inventory import Solution
from tilegym.inventory import load
from tilegym.inventory import load_solution
from tilegym.inventory import reference
from tilegym.inventory.loading import FAMILIES
from tilegym.inventory.verify import difference
from tilegym.inventory.verify import outputs_of

CATALOG = load()
# The sizes that were measured, and small ones for the interpreter: several tiles of 32 rows and columns, and a rest.
MEASURED = {
    "llama_add_rms_norm_gate_up": {"H": 4096, "I": 14336},
    "llama_rope_query_key": {"N": 32, "G": 8},
    "qwen3_5_add_rms_norm_gate_up": {"H": 1024, "I": 3584},
    "qwen3_5_delta_rule_gates": {"N": 16},
}
SMALL = {"H": 72, "I": 40, "N": 4, "G": 2, "D": 128}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def arguments(name: str, sizes: dict[str, int], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [
        randn(*(sizes[axis] for axis in spec.shape), dtype=dtype) for spec in CATALOG.definition(name).inputs.values()
    ]


def of(name: str) -> Solution:
    (solution,) = CATALOG.solutions_of(name)
    return solution


def entry_point(name: str) -> Callable:
    return load_solution(of(name))


def test_these_are_all_there_are():
    assert sorted(MEASURED) == sorted(file.stem for file in FAMILIES.glob("*/kernels/*.py"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch, positions", [(1, 1), (2, 1), (2, 33)])
@pytest.mark.parametrize("name", MEASURED)
def test_tokens_and_dtypes(name, batch, positions, dtype):
    """One token, several sequences of one, and more rows than a tile has."""
    definition = CATALOG.definition(name)
    inputs = arguments(name, {**SMALL, "B": batch, "S": positions}, dtype)
    with sanitized():
        got = entry_point(name)(*inputs)
    run = reference.load(definition.reference, name)
    expected = run(*inputs), run(*(x.double() for x in inputs))
    for values in zip(*(outputs_of(definition, r) for r in (got, *expected)), strict=True):
        assert values[0].dtype == values[1].dtype
        assert difference(*values) is None


@pytest.mark.parametrize("name", MEASURED)
def test_what_they_are_not_for_is_refused(name):
    inputs = arguments(name, {**SMALL, "B": 2, "S": 3})
    for wrong in (
        [inputs[0].requires_grad_(), *inputs[1:]],
        [*inputs[:-1], inputs[-1].float()],
        [*inputs[:-1], inputs[-1][..., :-1]],
    ):
        with pytest.raises(UnsupportedError):
            entry_point(name)(*wrong)
        inputs[0].requires_grad_(False)


@pytest.mark.parametrize("name", MEASURED)
def test_the_next_run_of_autokernel_finds_them(name, tmp_path, monkeypatch):
    """A region names its tensors after the model, and the sizes of weights are constants in it."""
    monkeypatch.setattr(reuse, "_SECONDS", 300.0)  # it is not about a machine that other tests keep busy
    definition = CATALOG.definition(name)
    axes = {**definition.axes, **{axis: AxisConst(value=value) for axis, value in MEASURED[name].items()}}
    region = definition.model_copy(update={"name": "a_region", "axes": axes})
    task = Task(region, "region", (), (), ("sm_90",), "kernels_of/model", trains=False)
    proposal = Reuse().propose(task)
    assert f"{name}_cutile" in proposal.rationale
    write_proposal(tmp_path, task, proposal)
    assert check(task, proposal, tmp_path) == []
    inputs = arguments(name, {**SMALL, "B": 2, "S": 3})
    got, expected = (load_solution(*which)(*inputs) for which in ((proposal.solution, tmp_path), (of(name),)))
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@pytest.mark.parametrize("module", ["llama.kernels.no_such", "llama.kernels", "patching", "llama", "qwen3_5.attention"])
def test_nothing_else_of_the_families_may_be_imported(module):
    assert check_source("from tilegym.transformers.llama.kernels.llama_rope_query_key import llama_rope_one") == []
    (said,) = check_source(f"import tilegym.transformers.{module}")
    assert "is not allowed" in said


@pytest.mark.parametrize("positions", (1, 17))
@pytest.mark.parametrize("name", MEASURED)
def test_they_compile(name, positions):
    """For the oldest GPUs that they are for, and for those that they were measured on."""
    if positions == 1 and "gate_up" not in name:
        pytest.skip("the same kernels as for more")
    # On the CPU also where there is a GPU, which would run them.
    inputs = [x.cpu() for x in arguments(name, {**SMALL, **MEASURED[name], "B": 1, "S": positions})]
    assert_launches_compile(lambda: entry_point(name)(*inputs), ("sm_80", "sm_90"))

"""The models read FlashInfer-Bench's JSON strictly, and its own models read theirs; nothing is lost on the way."""

import json
import math
import subprocess
import sys

import pydantic
import pytest
from inventory.flashinfer_models import real_models

from tilegym.errors import InventoryError
from tilegym.inventory import Definition
from tilegym.inventory import Solution
from tilegym.inventory import Trace
from tilegym.inventory import Workload
from tilegym.inventory.sources import read_source
from tilegym.inventory.sources import repository_path
from tilegym.inventory.sources import source_path

DEFINITION = {
    "name": "scale",
    "op_type": "pointwise",
    "axes": {"N": {"type": "var", "description": "elements"}, "K": {"type": "const", "value": 4}},
    "inputs": {"x": {"shape": ["N", "K"], "dtype": "bfloat16"}, "factor": {"shape": None, "dtype": "float32"}},
    "outputs": {"y": {"shape": ["N", "K"], "dtype": "bfloat16", "description": "scaled"}},
    "reference": "# Source: somewhere\ndef run(x, factor):\n    return x * factor\n",
    "tags": ["stage:test"],
    "description": "x times a number",
    "constraints": ["N >= 2"],
}
SOLUTION = {
    "name": "scale_tile",
    "definition": "scale",
    "author": "tilegym",
    "spec": {
        "language": "cuda-tile",
        "target_hardware": ["NVIDIA H200", "cpu"],
        "entry_point": "src/tilegym/errors.py::run",
        "dependencies": ["torch", "cuda-tile"],
        "destination_passing_style": False,
    },
    "sources": [{"path": "src/tilegym/errors.py"}, {"path": "elsewhere.py", "content": "x = 1\n"}],
    "description": "a text with ü",
}
WORKLOAD = {
    "axes": {"N": 5},
    "inputs": {
        "x": {"type": "random"},
        "factor": {"type": "scalar", "value": 2.5},
        "flag": {"type": "scalar", "value": True},
        "kept": {"type": "safetensors", "path": "blobs/a.safetensors", "tensor_key": "x"},
    },
    "uuid": "b7",
}
EVALUATION = {
    "status": "PASSED",
    "environment": {"hardware": "NVIDIA_H200", "libs": {"torch": "2.13"}},
    "timestamp": "2026-01-01T00:00:00",
    "log": "",
    "correctness": {"max_relative_error": 0.25, "max_absolute_error": 0.5, "extra": {"rows": [1, 2]}},
    "performance": {"latency_ms": 0.5, "reference_latency_ms": 1.0, "speedup_factor": 2.0},
}
TRACE = {"definition": "scale", "workload": WORKLOAD, "solution": "scale_tile", "evaluation": EVALUATION}


@pytest.mark.parametrize(
    "model, data", [(Definition, DEFINITION), (Solution, SOLUTION), (Workload, WORKLOAD), (Trace, TRACE)]
)
def test_json_and_back(model, data):
    read = model.from_json(json.dumps(data))
    assert model.from_json(read.to_json()) == read
    assert read.to_json().endswith("}\n") and max(map(len, read.to_json().splitlines())) < 200
    # Every field that was given is there again, the number's None shape included.
    assert json.loads(read.to_json()) == data | {k: v for k, v in json.loads(read.to_json()).items() if k not in data}
    if model is not Solution:  # its sources are embedded
        assert model.from_flashinfer_bench(read.to_flashinfer_bench()) == read


@pytest.mark.parametrize(
    "model, data", [("Definition", DEFINITION), ("Workload", WORKLOAD), ("Trace", TRACE), ("Solution", SOLUTION)]
)
def test_the_real_models_take_it_and_give_it_back(model, data):
    real, own = getattr(real_models(), model), {"Definition": Definition, "Workload": Workload, "Trace": Trace}
    own = own.get(model, Solution)
    mine = own.from_json(json.dumps(data))
    theirs = real.model_validate(mine.to_flashinfer_bench())
    assert own.from_flashinfer_bench(theirs) == mine
    again = real.model_validate(own.from_flashinfer_bench(theirs).to_flashinfer_bench())
    assert again.model_dump() == theirs.model_dump()


def test_a_real_solution_is_plain_python_with_its_sources_inside():
    theirs = real_models().Solution.model_validate(Solution.from_json(json.dumps(SOLUTION)).to_flashinfer_bench())
    assert theirs.spec.language == "python"
    assert theirs.get_entry_source().content == read_source("src/tilegym/errors.py")


def test_files_written_by_the_real_package_are_read(tmp_path):
    models = real_models()
    trace = models.Trace.model_validate(TRACE)
    models.save_json_file(trace, tmp_path / "trace.json")
    assert Trace.from_json((tmp_path / "trace.json").read_text()) == Trace.from_json(json.dumps(TRACE))


def test_errors_that_are_not_finite_survive():
    data = json.loads(json.dumps(TRACE))
    data["evaluation"] |= {"status": "INCORRECT_NUMERICAL"}
    del data["evaluation"]["performance"]
    data["evaluation"]["correctness"] |= {"max_relative_error": "NaN", "max_absolute_error": "Infinity"}
    read = Trace.from_json(json.dumps(data))
    assert math.isnan(read.evaluation.correctness.max_relative_error)
    assert Trace.from_json(read.to_json()) == read
    theirs = real_models().Trace.model_validate(read.to_flashinfer_bench())
    assert theirs.evaluation.correctness.max_absolute_error == math.inf
    assert Trace.from_flashinfer_bench(theirs) == read


def _changed(data: dict, path: str, value: object) -> str:
    changed = json.loads(json.dumps(data))
    *parents, last = path.split(".")
    inner = changed
    for part in parents:
        inner = inner[part]
    inner[last] = value
    return json.dumps(changed)


@pytest.mark.parametrize(
    "model, data, path, value, word",
    [
        (Definition, DEFINITION, "extra", 1, "extra"),
        (Definition, DEFINITION, "axes.K.size", 3, "size"),
        (Definition, DEFINITION, "axes.K.value", "4", "integer"),
        (Definition, DEFINITION, "axes.K.type", "fixed", "'const'"),
        (Definition, DEFINITION, "inputs.x.dtype", "bf16", "bfloat16"),
        (Definition, DEFINITION, "inputs.x.strides", [1], "strides"),
        (Definition, DEFINITION, "name", "", "name"),
        (Solution, SOLUTION, "spec.language", "cutile", "cuda-tile"),
        (Solution, SOLUTION, "spec.language", "python", "dependencies"),
        (Solution, SOLUTION, "spec.dependencies", ["torch"], "dependencies"),
        (Solution, SOLUTION, "spec.entry_point", "errors.py", "file::function"),
        (Solution, SOLUTION, "spec.target_hardware", [], "target_hardware"),
        (Solution, SOLUTION, "sources", [], "sources"),
        (Workload, WORKLOAD, "axes.N", -1, "greater than or equal"),
        (Workload, WORKLOAD, "inputs.x.type", "ones", "random"),
        (Trace, TRACE, "evaluation.correctness", None, "PASSED"),
        (Trace, TRACE, "evaluation.status", "TIMEOUT", "TIMEOUT"),
        (Trace, TRACE, "evaluation.correctness.max_absolute_error", -1.0, "negative"),
    ],
)
def test_what_is_refused(model, data, path, value, word):
    with pytest.raises(pydantic.ValidationError, match=word):
        model.from_json(_changed(data, path, value))


@pytest.mark.parametrize("path", ["/etc/passwd", "../errors.py", "src/../../errors.py", "src\\tilegym\\errors.py"])
def test_sources_stay_in_the_repository(path, tmp_path):
    assert source_path(path) is None and source_path(path, tmp_path) is None
    with pytest.raises(InventoryError, match="relative"):
        read_source(path)


def test_source_paths_and_back(tmp_path):
    assert repository_path(source_path("src/tilegym/errors.py")) == "src/tilegym/errors.py"
    assert repository_path(source_path("a/b.py", tmp_path), tmp_path) == "a/b.py"
    with pytest.raises(InventoryError, match="cannot be read"):
        read_source("src/tilegym/nothing.py")


def test_pydantic_is_imported_with_the_inventory_alone():
    loaded = "print('pydantic' in sys.modules)"
    code = f"import sys, tilegym; {loaded}; import tilegym.inventory; {loaded}"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["False", "True"]

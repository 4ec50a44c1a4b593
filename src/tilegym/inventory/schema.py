"""Definition, Solution, Workload and Trace: the JSON of FlashInfer-Bench, read strictly.

A Definition says what is computed: shapes over named axes, dtypes, and a reference in PyTorch. A Solution says which
code computes it. A Workload is one set of sizes and inputs of a Definition, a Trace what running a Solution on it gave.
FlashInfer-Bench ignores keys that it does not know and converts values; here both are errors. Two things are added to
its Solution: the language ``cuda-tile``, and sources that are named by their path in the repository and not copied.
"""

import json
import math
from pathlib import Path
from typing import Annotated
from typing import Any
from typing import Literal
from typing import TypeVar

import pydantic
from pydantic import BaseModel
from pydantic import BeforeValidator
from pydantic import Field
from pydantic import NonNegativeInt
from pydantic import model_validator

from tilegym.inventory.sources import read_source
from tilegym.inventory.sources import source_path

Text = Annotated[str, Field(min_length=1)]
DType = Literal[
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float4_e2m1",
    "int64",
    "int32",
    "int16",
    "int8",
    "bool",
]
CUDA_TILE = "cuda-tile"
Language = Literal["cuda-tile", "python", "triton", "cpp", "cuda", "tilelang"]
Status = Literal[
    "PASSED",
    "INCORRECT_SHAPE",
    "INCORRECT_NUMERICAL",
    "INCORRECT_DTYPE",
    "RUNTIME_ERROR",
    "COMPILE_ERROR",
    "TIMEOUT",
]
_Model = TypeVar("_Model", bound="Model")


class Model(BaseModel):
    """Base of all: unknown keys are refused, values not converted, fields not assigned to."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, ser_json_inf_nan="strings")

    @classmethod
    def from_json(cls: type[_Model], text: str | bytes) -> _Model:
        """The model in ``text``.

        Raises:
            pydantic.ValidationError: the text is not JSON, or not this model.
        """
        return cls.model_validate_json(text)

    def to_json(self) -> str:
        """The model as JSON laid out to be read, which ends in a newline; fields that are None are left out."""
        return _laid_out(_plain(self)) + "\n"

    def to_flashinfer_bench(self) -> dict[str, Any]:
        """This model as plain data that FlashInfer-Bench's class of the same name validates."""
        return _plain(self)

    @classmethod
    def from_flashinfer_bench(cls: type[_Model], data: Any) -> _Model:
        """The inverse of :meth:`to_flashinfer_bench`; ``data`` is plain data or one of FlashInfer-Bench's models.

        Raises:
            pydantic.ValidationError: the data is not this model.
        """
        return cls.model_validate_json(json.dumps(_plain(data)))


def _plain(data: Any) -> Any:
    """``data`` as what JSON can hold: a model's fields but those that are None; NaN as a string."""
    return _without_none(json.loads(data.model_dump_json() if isinstance(data, BaseModel) else json.dumps(data)))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        # A shape of None means a scalar, and has to be written.
        return {k: _without_none(v) for k, v in value.items() if v is not None or k == "shape"}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _laid_out(value: Any, indent: int = 0) -> str:
    """JSON in which what fits into a line stands in one."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or (indent and indent + len(line) <= 110):
        return line
    space = " " * (indent + 2)
    if isinstance(value, list):
        items = [space + _laid_out(item, indent + 2) for item in value]
    else:
        items = [f"{space}{json.dumps(key)}: {_laid_out(item, indent + 2)}" for key, item in value.items()]
    opening, closing = "[]" if isinstance(value, list) else "{}"
    return f"{opening}\n" + ",\n".join(items) + f"\n{' ' * indent}{closing}"


class AxisConst(Model):
    """An axis of one size."""

    type: Literal["const"] = "const"
    value: NonNegativeInt
    description: str | None = None


class AxisVar(Model):
    """An axis whose size the inputs give."""

    type: Literal["var"] = "var"
    description: str | None = None


Axis = Annotated[AxisConst | AxisVar, Field(discriminator="type")]


class TensorSpec(Model):
    """A tensor over named axes, or, with a shape of None, a Python number."""

    shape: list[Text] | None
    dtype: DType
    description: str | None = None


class Definition(Model):
    """What is computed: ``run`` in ``reference`` takes the inputs in order and returns the outputs in order.

    ``constraints`` are Python expressions over axes and inputs, each of which holds for every call. A comparison with a
    tensor holds if it does for all its elements: ``0 <= target < V``.
    """

    name: Text
    op_type: Text
    axes: dict[Text, Axis]
    inputs: dict[Text, TensorSpec]
    outputs: dict[Text, TensorSpec]
    reference: Text
    tags: list[Text] = []
    description: str | None = None
    constraints: list[Text] = []

    @property
    def const_axes(self) -> dict[str, int]:
        """The sizes of the constant axes, by name."""
        return {name: axis.value for name, axis in self.axes.items() if isinstance(axis, AxisConst)}

    @property
    def var_axes(self) -> list[str]:
        """The names of the variable axes."""
        return [name for name, axis in self.axes.items() if isinstance(axis, AxisVar)]


class SourceFile(Model):
    """A file of a Solution: ``path`` in the repository; ``content`` only for a file that is not in this repository."""

    path: Text
    content: Text | None = None


class BuildSpec(Model):
    """How a Solution is called: ``entry_point`` is ``file::function``.

    With destination_passing_style (FlashInfer-Bench's default) the function takes the outputs as its last arguments and
    fills them; without, it returns them.
    """

    language: Language
    target_hardware: list[Text] = Field(min_length=1)
    entry_point: Text
    dependencies: list[Text] = []
    destination_passing_style: bool = True
    binding: Literal["tvm-ffi", "torch"] | None = None

    @model_validator(mode="after")
    def _check(self) -> "BuildSpec":
        file, separator, function = self.entry_point.partition("::")
        if not (separator and file and function.isidentifier()):
            raise ValueError(f"entry_point is {self.entry_point!r}, it must be 'file::function'")
        # FlashInfer-Bench has no language for cuTile; the dependency is what tells it from other Python there.
        if (self.language == CUDA_TILE) != (CUDA_TILE in self.dependencies and self.language in (CUDA_TILE, "python")):
            raise ValueError(
                f"language is {self.language!r}, dependencies are {self.dependencies}: the language is {CUDA_TILE!r} "
                f"where {CUDA_TILE!r} is among the dependencies, and nowhere else"
            )
        return self

    @property
    def entry_file(self) -> str:
        """The file of the entry point, as it stands among the sources."""
        return self.entry_point.partition("::")[0]

    @property
    def entry_function(self) -> str:
        """The name of the entry point's function."""
        return self.entry_point.partition("::")[2]


class Solution(Model):
    """Code that computes a Definition."""

    name: Text
    definition: Text
    author: Text
    spec: BuildSpec
    sources: list[SourceFile] = Field(min_length=1)
    description: str | None = None

    def to_flashinfer_bench(self, root: Path | None = None) -> dict[str, Any]:
        """Plain data for FlashInfer-Bench: sources embedded, ``cuda-tile`` as ``python``.

        Args:
            root: where the sources' paths begin; None for the repository of this package.

        Raises:
            InventoryError: a source cannot be read.
        """
        data = super().to_flashinfer_bench()
        if self.spec.language == CUDA_TILE:
            data["spec"]["language"] = "python"
        for source in data["sources"]:
            if "content" not in source:
                source["content"] = read_source(source["path"], root)
        return data

    @classmethod
    def from_flashinfer_bench(cls, data: Any, root: Path | None = None) -> "Solution":
        """The inverse of :meth:`to_flashinfer_bench`: a source that equals the file at its path keeps the path alone.

        Raises:
            pydantic.ValidationError: the data is not a Solution.
        """
        data = _plain(data)
        spec = data.get("spec")
        if isinstance(spec, dict) and spec.get("language") == "python" and CUDA_TILE in spec.get("dependencies", []):
            spec["language"] = CUDA_TILE
        for source in data.get("sources", []):
            if isinstance(source, dict) and isinstance(source.get("path"), str) and "content" in source:
                file = source_path(source["path"], root)
                if file is not None and file.is_file() and file.read_text() == source["content"]:
                    del source["content"]
        return cls.model_validate_json(json.dumps(data))


class RandomInput(Model):
    """An input of random numbers."""

    type: Literal["random"] = "random"


class ScalarInput(Model):
    """An input that is a number."""

    type: Literal["scalar"] = "scalar"
    value: bool | int | float


class SafetensorsInput(Model):
    """An input that lies in a file, whose path begins at the root of the data set."""

    type: Literal["safetensors"] = "safetensors"
    path: Text
    tensor_key: Text


class Workload(Model):
    """Sizes for the variable axes of a Definition, and where its inputs come from."""

    axes: dict[str, NonNegativeInt]
    inputs: dict[str, Annotated[RandomInput | SafetensorsInput | ScalarInput, Field(discriminator="type")]]
    uuid: Text


def _not_finite(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _error(value: float) -> float:
    if value < 0:
        raise ValueError("an error is not negative")
    return value


Error = Annotated[float, BeforeValidator(_not_finite), pydantic.AfterValidator(_error)]
NonNegative = Annotated[float, Field(ge=0)]


class Correctness(Model):
    """How far a Solution's outputs were from the reference's; NaN and infinity occur."""

    max_relative_error: Error = 0.0
    max_absolute_error: Error = 0.0
    extra: dict[str, Any] | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Correctness):
            return NotImplemented
        pairs = zip(
            (self.max_relative_error, self.max_absolute_error),
            (other.max_relative_error, other.max_absolute_error),
            strict=True,
        )
        return self.extra == other.extra and all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


class Performance(Model):
    """Times in milliseconds, and their ratio, reference / solution."""

    latency_ms: NonNegative = 0.0
    reference_latency_ms: NonNegative = 0.0
    speedup_factor: NonNegative = 0.0


class Environment(Model):
    """Where a Trace was made: the hardware, and versions by library."""

    hardware: Text
    libs: dict[str, str] = {}


class Evaluation(Model):
    """What running a Solution gave; correctness and performance are there as the status implies."""

    status: Status
    environment: Environment
    timestamp: Text
    log: str = ""
    correctness: Correctness | None = None
    performance: Performance | None = None

    @model_validator(mode="after")
    def _check(self) -> "Evaluation":
        for field, statuses in (
            ("correctness", ("PASSED", "INCORRECT_NUMERICAL")),
            ("performance", ("PASSED",)),
        ):
            if (getattr(self, field) is not None) != (self.status in statuses):
                raise ValueError(
                    f"{field} is {'missing' if self.status in statuses else 'given'} for status {self.status}; "
                    f"it belongs to {' and '.join(statuses)} alone"
                )
        return self


class Trace(Model):
    """A Workload of a Definition; with a Solution and its Evaluation, or without both."""

    definition: Text
    workload: Workload
    solution: str | None = None
    evaluation: Evaluation | None = None

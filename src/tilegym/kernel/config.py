"""The batch configuration of ``register_kernels``: validated as a whole before anything is registered."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic

from tilegym.errors import KernelError
from tilegym.kernel import function
from tilegym.kernel import layer
from tilegym.kernel import registry


class _Entry(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True, strict=True)

    repo_id: str | None = None
    version: int | str | None = None
    revision: str | None = None
    device: Any = None
    mode: Any = None
    repo: Any = None
    trust_remote_code: bool | list[str] = False

    def arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.model_fields_set}


class LayerEntry(_Entry):
    """One entry of ``layers``: the arguments of ``register_layer_kernel`` besides its name."""

    repo_path: str | Path | None = None
    package_name: str | None = None
    layer_name: str | None = None
    layer_class: Any = None


class FunctionEntry(_Entry):
    """One entry of ``functions``: the arguments of ``register_function_kernel``; its key is ``func_name``."""

    target_module: str
    func_name: str | None = None
    func_impl: Any = None


class Config(pydantic.BaseModel):
    """The whole configuration."""

    model_config = pydantic.ConfigDict(extra="forbid")

    layers: dict[str, LayerEntry] = {}
    functions: dict[str, FunctionEntry] = {}


def records(config: Mapping[str, Any], who: str) -> list[registry.Record]:
    """The records that ``config`` describes; ``config`` itself is left as it is.

    Raises:
        KernelError: something in it is wrong; lists every problem with its place.
    """
    if not isinstance(config, Mapping):
        raise KernelError(f"{who}: expected a dict with 'layers' and 'functions', got {type(config).__name__}")
    try:
        parsed = Config.model_validate(dict(config))
    except pydantic.ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in error.errors()]
        raise _refused(who, problems) from error
    found: list[registry.Record] = []
    problems = []
    for name, entry in parsed.layers.items():
        try:
            found.append(layer.make_layer_kernel(name, **entry.arguments()))
        except KernelError as error:
            problems.append(f"layers.{name}: {error}")
    for name, entry in parsed.functions.items():
        try:
            found.append(function.make_function_kernel(**{"func_name": name, **entry.arguments()}))
        except KernelError as error:
            problems.append(f"functions.{name}: {error}")
    if problems:
        raise _refused(who, problems)
    return found


def _refused(who: str, problems: list[str]) -> KernelError:
    return KernelError(f"{who}: nothing was registered:" + "".join(f"\n  {problem}" for problem in problems))

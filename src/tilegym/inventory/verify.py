"""Runs a Solution beside its Definition's reference, and says where they part."""

import contextlib
import importlib
import importlib.util
import inspect
import sys
import tempfile
from collections.abc import Callable
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tilegym.errors import InventoryError
from tilegym.inventory import reference
from tilegym.inventory.inputs import Case
from tilegym.inventory.inputs import cases
from tilegym.inventory.inputs import torch_dtype
from tilegym.inventory.schema import Definition
from tilegym.inventory.schema import Solution
from tilegym.inventory.sources import PACKAGE
from tilegym.inventory.sources import source_path

# A kernel may be as many times as far from the fp64 result as the reference is in the working dtype.
RATIO = 2.0
MUTATES = "mutates:"  # a tag: the input behind it is written to


def load_solution(solution: Solution, root: Path | None = None) -> Callable:
    """The function at the Solution's entry point.

    Args:
        root: where the sources' paths begin; None for this package's repository.

    Raises:
        InventoryError: the file or the function is not there, or importing the file fails.
    """
    name, function = solution.spec.entry_file, solution.spec.entry_function
    embedded = {source.path: source.content for source in solution.sources if source.content is not None}
    try:
        if name in embedded:
            module = _import_embedded(embedded, name)
        else:
            file = source_path(name, root)
            if file is None or not file.is_file():
                raise InventoryError(f"Solution {solution.name!r}: there is no file {name!r}")
            module = _import(file)
    except InventoryError:
        raise
    except Exception as error:
        raise InventoryError(f"Solution {solution.name!r}: importing {name!r} failed: {error!r}") from error
    if not callable(getattr(module, function, None)):
        raise InventoryError(f"Solution {solution.name!r}: {name!r} has no function {function!r}")
    return getattr(module, function)


def _import(file: Path) -> Any:
    if file.is_relative_to(PACKAGE):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        return importlib.import_module(".".join((PACKAGE.name, *parts)))
    spec = importlib.util.spec_from_file_location(f"_solution_{abs(hash(file))}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import_embedded(contents: dict[str, str], name: str) -> Any:
    """Imports ``name`` out of a folder that holds ``contents``; what it imports of them is loaded now, too."""
    with tempfile.TemporaryDirectory() as folder:
        for path, content in contents.items():
            file = source_path(path, Path(folder))
            if file is None:
                raise InventoryError(f"source {path!r} is not a path relative to the repository")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        sys.path.insert(0, folder)
        try:
            return _import(Path(folder) / name)
        finally:
            sys.path.remove(folder)


def outputs_of(definition: Definition, result: Any) -> tuple[Any, ...]:
    """What a ``run`` returned, as one value for each output.

    Raises:
        InventoryError: it returned another number of values.
    """
    values = tuple(result) if isinstance(result, tuple | list) else (result,)
    if len(values) != len(definition.outputs):
        raise InventoryError(f"{len(values)} values were returned, {definition.name!r} has {len(definition.outputs)}")
    return values


def call_solution(definition: Definition, solution: Solution, function: Callable, case: Case) -> tuple[Any, ...]:
    """The outputs of a Solution's function, whichever way it hands them over."""
    if not solution.spec.destination_passing_style:
        return outputs_of(definition, function(*case.inputs.values()))
    device = next((v.device for v in case.inputs.values() if isinstance(v, torch.Tensor)), None)
    outputs = tuple(
        torch.empty([case.axes[a] for a in spec.shape or ()], dtype=torch_dtype(spec.dtype), device=device)
        for spec in definition.outputs.values()
    )
    function(*case.inputs.values(), *outputs)
    return outputs


def compare(definition: Definition, solution: Solution, function: Callable, case: Case) -> str | None:
    """What is wrong with a Solution's outputs for one call, or None.

    Shapes and dtypes have to be the reference's. Values may be twice as far from the reference in fp64 as the reference
    in the call's own dtype is, and half a unit in the last place besides; integers have to be equal. No input may be
    changed but those that the Definition's tags name, which end as the reference leaves them.
    """
    run = reference.load(definition.reference, definition.name)
    own, after, after_exact = Case(case.axes, case.copies()), case.copies(), case.copies(torch.float64)
    expected = outputs_of(definition, run(*after.values()))
    exact = outputs_of(definition, run(*after_exact.values()))
    try:
        got = call_solution(definition, solution, function, own)
    except Exception as error:
        return f"it raised {type(error).__name__}: {error}"
    for name, value, should, oracle in zip(definition.outputs, got, expected, exact, strict=True):
        wrong = difference(value, should, oracle)
        if wrong is not None:
            return f"output {name!r}: {wrong}"
    changed = {tag.removeprefix(MUTATES) for tag in definition.tags if tag.startswith(MUTATES)}
    for name, before in case.inputs.items():
        if name in changed:
            wrong = difference(own.inputs[name], after[name], after_exact[name])
            if wrong is not None:
                return f"input {name!r}, which is changed: {wrong}"
        elif isinstance(before, torch.Tensor) and not _same(before, own.inputs[name]):
            return f"input {name!r} was changed; say so with the tag '{MUTATES}{name}', or leave it alone"
    return None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num()) if one.is_floating_point() else torch.equal(one, other)


def difference(got: Any, expected: Any, oracle: Any) -> str | None:
    """How ``got`` differs from ``expected`` by more than rounding explains, given the same thing in fp64; or None."""
    if not isinstance(expected, torch.Tensor):
        return None if got == expected else f"it is {got}, the reference's is {expected}"
    if not isinstance(got, torch.Tensor):
        return f"it is a {type(got).__name__}, the reference's is a tensor"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return (
            f"it is {list(got.shape)} {_name(got.dtype)}, the reference's is {list(expected.shape)} "
            f"{_name(expected.dtype)}"
        )
    got, expected, oracle = got.detach().cpu(), expected.detach().cpu(), oracle.detach().cpu()
    if not got.is_floating_point():
        return None if torch.equal(got, expected) else f"{int((got != expected).sum())} of {got.numel()} values differ"
    finite = expected.isfinite() & oracle.isfinite()
    if not torch.equal(got[~finite].nan_to_num(), expected[~finite].nan_to_num()):
        return "it is not finite where the reference is, or the reverse"
    if not finite.any():
        return None
    exact = oracle[finite].double()
    error = (got[finite].double() - exact).abs()
    own = (expected[finite].double() - exact).abs()
    # What rounding a correct result costs; fp32 steps lead to it even where the reference had none to do.
    floor = torch.finfo(got.dtype).eps / 2 + 2 * torch.finfo(torch.float32).eps
    for norm, of in (("largest", torch.max), ("root mean square", lambda t: t.square().mean().sqrt())):
        limit = RATIO * of(own) + floor * of(exact.abs())
        if not of(error) <= limit:
            return f"{norm} error {of(error):.2e}, allowed {limit:.2e} (the reference's own {of(own):.2e})"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_solution(
    definition: Definition,
    solution: Solution,
    root: Path | None = None,
    given: Iterable[Case] | None = None,
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> list[str]:
    """Runs ``solution`` on made-up inputs of ``definition``; returns what is wrong, one line a call that failed.

    Args:
        root: where the sources' paths begin; None for this package's repository.
        given: the calls; by default small ones that take every branch, in the declared dtypes.
        context: what each call of the Solution runs in.
    """
    function = load_solution(solution, root)
    expected, got = list(definition.inputs), list(inspect.signature(function).parameters)
    if solution.spec.destination_passing_style:
        expected += definition.outputs
    if got != expected:
        return [f"{solution.spec.entry_point} takes {got}, the reference {expected}"]
    wrong = []
    for case in cases(definition) if given is None else given:
        with context():
            why = compare(definition, solution, function, case)
        if why is not None:
            wrong.append(f"{case}: {why}")
    return wrong

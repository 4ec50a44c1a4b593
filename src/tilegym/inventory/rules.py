"""The rules of the inventory, and what breaks them."""

import ast
import keyword
from collections.abc import Iterable
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pydantic

from tilegym.errors import InventoryError
from tilegym.inventory import constraints
from tilegym.inventory import reference
from tilegym.inventory.inputs import cases
from tilegym.inventory.loading import Folder
from tilegym.inventory.loading import faults_of
from tilegym.inventory.loading import json_files
from tilegym.inventory.loading import parse
from tilegym.inventory.loading import shipped_folders
from tilegym.inventory.schema import Definition
from tilegym.inventory.schema import Solution
from tilegym.inventory.sources import repository_path
from tilegym.inventory.sources import source_path
from tilegym.inventory.verify import MUTATES


class Problem(NamedTuple):
    """A broken rule: where, what is wrong, and what to do about it."""

    file: str
    field: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.file}: {self.field}: {self.message}\n  remedy: {self.remedy}"


_Found = Iterator[tuple[str, str, str]]


def validate(folders: Iterable[Folder] | None = None, root: Path | None = None) -> list[Problem]:
    """Every broken rule in ``folders`` (by default the shipped ones), in the order of the files.

    Args:
        root: where the paths of sources begin; None for this package's repository.
    """
    folders = shipped_folders() if folders is None else list(folders)
    problems: list[Problem] = []
    definitions: dict[str, Definition] = {}
    solutions: dict[str, Solution] = {}
    unread: set[str] = set()
    for model, table, files in (
        (Definition, definitions, [f for folder in folders for f in json_files(folder.definitions)]),
        (Solution, solutions, [f for folder in folders for f in json_files(folder.solutions)]),
    ):
        places: dict[str, Path] = {}
        for file in files:
            shown = repository_path(file, root)
            try:
                entry = parse(model, file.read_bytes(), root)
            except OSError as error:
                remedy = "make it a file that can be read, or remove it"
                problems.append(Problem(shown, "file", f"it cannot be read: {error.strerror}", remedy))
                unread.add(file.stem)
                continue
            except pydantic.ValidationError as error:
                problems += [Problem(shown, path or "file", m, _remedy_of(m, model)) for path, m in faults_of(error)]
                unread.add(file.stem)
                continue
            found = check_definition(entry) if model is Definition else check_solution(entry, definitions, root)
            if model is Solution and entry.definition in unread:  # it is there, and its own faults have been said
                found = [fault for fault in found if fault[0] != "definition"]
            if entry.name in table:
                other = repository_path(places[entry.name], root)
                found = [*found, ("name", f"{entry.name!r} is the name of {other} too", "rename one of the two")]
            table.setdefault(entry.name, entry)
            places.setdefault(entry.name, file)
            if file.stem != entry.name:
                problems.append(
                    Problem(shown, "name", f"it is {entry.name!r}, the file is {file.name}", "give both the same name")
                )
            problems += [Problem(shown, *p) for p in found]
    for folder in folders:
        problems += _check_kernels(folder, definitions, solutions, root)
    return problems


def _remedy_of(message: str, model: type) -> str:
    if "Extra inputs" in message:
        return f"remove it; the fields of a {model.__name__} are {', '.join(model.model_fields)}"
    if "Field required" in message:
        return "add it"
    if "Invalid JSON" in message:
        return "correct the text there, or write the file anew: JSON in UTF-8"
    return "write what is expected there; docs/inventory.md describes every field"


def check_definition(definition: Definition) -> list[tuple[str, str, str]]:
    """The rules that ``definition`` breaks: (field, what is wrong, remedy)."""
    found = [*_check_names(definition), *_check_tags(definition)]
    if found:  # the rest would only say the same in other words
        return found
    return [*_check_reference(definition), *_check_constraints(definition)]


def _check_names(definition: Definition) -> _Found:
    tensors = {**definition.inputs, **definition.outputs}
    for kind, specs in (("inputs", definition.inputs), ("outputs", definition.outputs)):
        if not specs:
            yield kind, "there are none", f"declare what run {'takes' if kind == 'inputs' else 'returns'}"
        for name, spec in specs.items():
            for axis in spec.shape or ():
                if axis not in definition.axes:
                    yield f"{kind}.{name}.shape", f"axis {axis!r} is not declared", f"add {axis!r} to axes"
    used = {axis for spec in tensors.values() for axis in spec.shape or ()}
    for axis in definition.axes:
        if axis not in used and not any(axis in _names(c) for c in definition.constraints):
            yield f"axes.{axis}", "no tensor and no constraint uses it", "remove it"
    for where, one, other, kinds in (
        ("outputs", definition.inputs, definition.outputs, "an input and an output"),
        ("axes", definition.axes, tensors, "an axis and a tensor"),
    ):
        for name in [name for name in one if name in other]:
            yield where, f"{name!r} is the name of {kinds}", "rename one of the two"
    for kind, table in (("axes", definition.axes), ("inputs", definition.inputs), ("outputs", definition.outputs)):
        for name in table:
            if not name.isidentifier() or keyword.iskeyword(name):
                yield f"{kind}.{name}", "it is not a Python name", "use letters, digits and underscores; no keyword"


def _names(constraint: str) -> frozenset[str]:
    try:
        return constraints.names(constraint)
    except SyntaxError:
        return frozenset()


def _check_tags(definition: Definition) -> _Found:
    for tag in definition.tags:
        if tag.startswith(MUTATES) and tag.removeprefix(MUTATES) not in definition.inputs:
            yield "tags", f"{tag!r} names no input", f"name one of {', '.join(definition.inputs)}, or remove the tag"


def _check_reference(definition: Definition) -> _Found:
    text = definition.reference
    urls = reference.sources(text)
    if not urls:
        yield (
            "reference",
            "it does not begin with a '# Source:' line",
            f"begin with '# Source: {reference.PERMALINK_FORM}'",
        )
    if reference.has_sources_below(text):
        yield "reference", "it has '# Source:' lines that do not stand at its beginning", "put them all there"
    for url in urls:
        if not reference.is_permalink(url):
            yield (
                "reference",
                f"source {url} is not a permalink to lines of a commit",
                f"write {reference.PERMALINK_FORM}; for a draft `tilegym integrate MODEL --resolve-commits` does",
            )
    try:
        functions = reference.run_functions(text)
    except SyntaxError as error:
        yield "reference", f"line {error.lineno or 1} is not Python: {error.msg}", "correct it"
        return
    if len(functions) != 1:
        yield "reference", f"it defines {len(functions)} functions 'run'", "define exactly one, at the top level"
        return
    takes, inputs, outputs = reference.parameters(functions[0]), list(definition.inputs), list(definition.outputs)
    if takes != inputs:
        yield (
            "reference",
            f"run takes {'parameters of other kinds' if takes is None else takes}, the inputs are {inputs}",
            f"write def run({', '.join(inputs)})",
        )
    given = reference.returns(functions[0])
    if not given or any(names != outputs for names in given):
        bad = next((names for names in given if names != outputs), "nothing")
        yield (
            "reference",
            f"run returns {'expressions' if bad is None else bad}, the outputs are {outputs}",
            f"end it with: return {', '.join(outputs)}",
        )
        return
    try:
        reference.load(text, definition.name)
    except InventoryError as error:
        yield "reference", str(error), "make it run by itself, with torch and the standard library alone"


def _check_constraints(definition: Definition) -> _Found:
    known = {*definition.axes, *definition.inputs}
    broken = False
    for index, constraint in enumerate(definition.constraints):
        where = f"constraints.{index}"
        try:
            unknown = constraints.names(constraint) - known
        except SyntaxError as error:
            yield (
                where,
                f"{constraint!r} is not an expression: {error.msg}",
                "write a Python expression that is true or false",
            )
            broken = True
            continue
        if unknown:
            yield where, f"{constraint!r} uses {', '.join(sorted(unknown))}", "use axes and inputs alone"
            broken = True
    if broken:
        return
    try:
        list(cases(definition, count=1))
    except InventoryError as error:
        yield "constraints", str(error), "correct them; they have to hold for some small sizes, up to 17"


def check_solution(
    solution: Solution, definitions: dict[str, Definition], root: Path | None = None
) -> list[tuple[str, str, str]]:
    """The rules that ``solution`` breaks, given the Definitions there are: (field, what is wrong, remedy)."""
    return [*_check_sources(solution, root), *_check_entry_point(solution, definitions, root)]


def _check_sources(solution: Solution, root: Path | None) -> _Found:
    seen = set()
    for index, source in enumerate(solution.sources):
        where, file = f"sources.{index}.path", source_path(source.path, root)
        if file is None:
            yield where, f"{source.path!r} leads out of the repository", "write it relative to the root, without '..'"
        elif source.content is None and not file.is_file():
            yield where, f"there is no file {source.path!r}", "correct the path, or embed the file as 'content'"
        if source.path in seen:
            yield where, f"{source.path!r} is named twice", "remove one"
        seen.add(source.path)
    if solution.spec.entry_file not in seen:
        yield (
            "spec.entry_point",
            f"its file {solution.spec.entry_file!r} is not among the sources",
            "add it to sources, or correct the entry point",
        )


def _check_entry_point(solution: Solution, definitions: dict[str, Definition], root: Path | None) -> _Found:
    definition = definitions.get(solution.definition)
    if definition is None:
        yield "definition", f"there is no Definition {solution.definition!r}", "write it, or correct the name"
        return
    text = _text_of(solution, root)
    if text is None:
        return  # said above
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield (
            "spec.entry_point",
            f"line {error.lineno or 1} of {solution.spec.entry_file} is not Python",
            "correct the file",
        )
        return
    name = solution.spec.entry_function
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    expected = list(definition.inputs)
    if solution.spec.destination_passing_style:
        expected += definition.outputs
    if not functions:
        yield (
            "spec.entry_point",
            f"{solution.spec.entry_file} defines no function {name!r}",
            "define it at the top level",
        )
    elif reference.parameters(functions[-1]) != expected:
        takes = reference.parameters(functions[-1])
        yield (
            "spec.entry_point",
            f"{name} takes {'parameters of other kinds' if takes is None else takes}, the reference's are {expected}",
            f"write def {name}({', '.join(expected)})",
        )


def _text_of(solution: Solution, root: Path | None) -> str | None:
    """The text of the entry point's file, if it is Python that can be read."""
    for source in solution.sources:
        if source.path == solution.spec.entry_file and source.path.endswith(".py"):
            file = source_path(source.path, root)
            if source.content is not None:
                return source.content
            return file.read_text() if file is not None and file.is_file() else None
    return None


def _check_kernels(
    folder: Folder, definitions: dict[str, Definition], solutions: dict[str, Solution], root: Path | None
) -> Iterator[Problem]:
    """Every file of a family's ``kernels`` is a source of a Solution of that family."""
    if folder.kernels is None:
        return
    for file in sorted(folder.kernels.glob("*.py")):
        if file.name.startswith("_"):
            continue
        path = repository_path(file, root)
        used = [s for s in solutions.values() if any(source.path == path for source in s.sources)]
        if not used:
            yield Problem(
                path,
                "kernel",
                "no Solution names it among its sources",
                f"write kernel_solutions/{file.stem}.json with {path!r} among its sources",
            )
        if (
            not any(s.definition in definitions for s in used)
            and not (folder.definitions / f"{file.stem}.json").exists()
        ):
            yield Problem(path, "kernel", "it has no Definition", f"write kernel_definitions/{file.stem}.json")

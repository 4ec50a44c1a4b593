"""``tilegym inventory``: what kernels there are, what each computes, and which of them compute what is needed."""

import json
import sys
from pathlib import Path
from typing import Any

import typer

from tilegym import inventory
from tilegym.errors import InventoryError
from tilegym.inventory import loading
from tilegym.inventory import reference
from tilegym.inventory.schema import Definition
from tilegym.inventory.schema import Solution
from tilegym.inventory.sources import repository_path

app = typer.Typer(
    help="List, show, check, match and export the Definitions and Solutions of the kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_FOLDERS = typer.Option(
    None, "--path", metavar="FOLDER", help="Another inventory instead of the shipped one; may be given several times."
)
_JSON = typer.Option(False, "--json", help="Print JSON.")


def _folders(paths: list[Path] | None) -> list[loading.Folder] | None:
    return [folder for path in paths for folder in loading.folders_in(path)] if paths else None


@app.command("list")
def list_entries(
    op_type: str | None = typer.Option(None, help="Only Definitions of this op_type."),
    tag: str | None = typer.Option(None, help="Only Definitions with this tag, such as op:rms_norm or model:llama."),
    paths: list[Path] | None = _FOLDERS,
    as_json: bool = _JSON,
) -> None:
    """Lists the Definitions with their Solutions."""
    catalog = inventory.load(_folders(paths))
    chosen = [
        d
        for d in sorted(catalog.definitions.values(), key=lambda d: (d.op_type, d.name))
        if (op_type is None or d.op_type == op_type) and (tag is None or tag in d.tags)
    ]
    if as_json:
        _print_json([_summary(d, catalog) for d in chosen])
        return
    if not chosen:
        known = catalog.definitions.values()
        there = f"the op_types are {', '.join(sorted({d.op_type for d in known}))}"
        if tag is not None:
            there = f"the tags are {', '.join(sorted({t for d in known for t in d.tags}))}; {there}"
        raise InventoryError(f"no Definition has what was asked for; {there}")
    width = max(len(d.name) for d in chosen)
    for kind in dict.fromkeys(d.op_type for d in chosen):
        print(kind)
        for d in chosen:
            if d.op_type == kind:
                print(f"  {d.name:{width}}  {d.description or ''}")
    solutions = sum(len(catalog.solutions_of(d.name)) for d in chosen)
    print(f"{len(chosen)} Definitions, {solutions} Solutions. `tilegym inventory show NAME` shows one.")


def _summary(definition: Definition, catalog: loading.Catalog) -> dict[str, Any]:
    return {
        "name": definition.name,
        "op_type": definition.op_type,
        "description": definition.description,
        "tags": definition.tags,
        "file": repository_path(catalog.files[Definition, definition.name]),
        "solutions": [s.name for s in catalog.solutions_of(definition.name)],
    }


@app.command("show")
def show(
    name: str = typer.Argument(help="Of a Definition or a Solution."),
    paths: list[Path] | None = _FOLDERS,
    as_json: bool = _JSON,
) -> None:
    """Shows one Definition, or one Solution."""
    catalog = inventory.load(_folders(paths))
    if name in catalog.solutions:
        solution = catalog.solutions[name]
        print(solution.to_json(), end="") if as_json else _show_solution(solution, catalog)
    else:
        definition = catalog.definition(name)
        print(definition.to_json(), end="") if as_json else _show_definition(definition, catalog)


def _show_definition(definition: Definition, catalog: loading.Catalog) -> None:
    print(f"{definition.name} ({definition.op_type}): {definition.description or ''}")
    print(f"  file         {repository_path(catalog.files[Definition, definition.name])}")
    print(f"  tags         {', '.join(definition.tags) or 'none'}")
    for label, tensors in (("inputs", definition.inputs), ("outputs", definition.outputs)):
        for index, (name, spec) in enumerate(tensors.items()):
            shape = "number" if spec.shape is None else f"[{', '.join(spec.shape)}]"
            print(f"  {label if index == 0 else '':12} {name}: {shape} {spec.dtype}")
    for index, (name, axis) in enumerate(definition.axes.items()):
        size = "" if axis.type == "var" else f" = {axis.value}"
        print(f"  {'axes' if index == 0 else '':12} {name}{size}{f': {axis.description}' if axis.description else ''}")
    for index, constraint in enumerate(definition.constraints):
        print(f"  {'constraints' if index == 0 else '':12} {constraint}")
    solutions = ", ".join(s.name for s in catalog.solutions_of(definition.name))
    print(f"  solutions    {solutions or 'none'}")
    print("\n" + definition.reference, end="")


def _show_solution(solution: Solution, catalog: loading.Catalog) -> None:
    print(f"{solution.name}: computes {solution.definition}, in {solution.spec.language}, by {solution.author}")
    if solution.description:
        print(f"  {solution.description}")
    print(f"  file         {repository_path(catalog.files[Solution, solution.name])}")
    print(f"  entry point  {solution.spec.entry_point}")
    print(f"  runs on      {', '.join(solution.spec.target_hardware)}")
    print(f"  needs        {', '.join(solution.spec.dependencies) or 'nothing'}")
    for index, source in enumerate(solution.sources):
        print(f"  {'sources' if index == 0 else '':12} {source.path}{' (embedded)' if source.content else ''}")


@app.command("validate")
def validate(
    paths: list[Path] | None = typer.Argument(None, metavar="[FOLDER]...", help="By default the shipped inventory."),
    root: Path | None = typer.Option(None, help="Where the paths of sources begin; by default this repository."),
    run: bool = typer.Option(False, "--run", help="Also run every Solution beside its reference on random inputs."),
    as_json: bool = _JSON,
) -> None:
    """Checks that the rules of the inventory are kept; exits with 1 if not."""
    folders = _folders(paths)
    problems = inventory.validate(folders, root)
    if run and not problems:
        problems = _run_all(inventory.load(folders), root)
    if as_json:
        _print_json({"ok": not problems, "problems": [problem._asdict() for problem in problems]})
    else:
        for problem in problems:
            print(problem)
        count = sum(1 for f in folders or loading.shipped_folders() for _ in loading.json_files(f.definitions))
        if problems:
            print(f"{len(problems)} problem{'s' * (len(problems) != 1)}.")
        else:
            print(f"All {count} Definitions and their Solutions keep the rules.")
    if problems:
        raise typer.Exit(1)


def _run_all(catalog: loading.Catalog, root: Path | None) -> list[inventory.Problem]:
    problems = []
    for solution in catalog.solutions.values():
        print(f"running {solution.name}", file=sys.stderr)
        file = repository_path(catalog.files[Solution, solution.name], root)
        try:
            wrong = inventory.check_solution(catalog.definitions[solution.definition], solution, root)
        except InventoryError as error:
            wrong = [str(error)]
        problems += [inventory.Problem(file, "sources", w, "correct the code, or the reference") for w in wrong]
    return problems


@app.command("match")
def match(
    file: Path = typer.Argument(metavar="DEFINITION", help="A Definition's JSON file, or the name of a shipped one."),
    paths: list[Path] | None = _FOLDERS,
    as_json: bool = _JSON,
) -> None:
    """Finds the Solutions that compute a Definition, the best first; exits with 1 if there are none."""
    named = file.suffix != ".json" and not file.exists()
    definition = inventory.load().definition(str(file)) if named else loading.read(Definition, file)
    found = inventory.match(definition, inventory.load(_folders(paths)))
    if as_json:
        _print_json([_match_data(m) for m in found])
    elif not found:
        urls = reference.sources(definition.reference)
        print(f"No Solution computes {definition.name}{f' ({urls[0]})' if urls else ''}.")
    for m in found if not as_json else ():
        print(f"{m.solution.name}: {m.kind}")
        for step in m.steps:
            print(f"  {step}")
        for assumed in m.assumes:
            print(f"  if {assumed}, which {definition.name} does not promise")
    if not found:
        raise typer.Exit(1)


def _match_data(m: inventory.Match) -> dict[str, Any]:
    return {
        "solution": m.solution.name,
        "definition": m.target.name,
        "kind": m.kind,
        "entry_point": m.solution.spec.entry_point,
        "steps": list(m.steps),
        "same_rounding": m.same_rounding,
        "assumes": list(m.assumes),
    }


@app.command("export")
def export(
    folder: Path = typer.Argument(help="Where to; made if it is not there."),
    names: list[str] | None = typer.Argument(None, help="Of Definitions; by default all."),
    paths: list[Path] | None = _FOLDERS,
    as_json: bool = _JSON,
) -> None:
    """Writes Definitions and their Solutions as FlashInfer-Bench reads them, sources embedded."""
    catalog = inventory.load(_folders(paths))
    chosen = [catalog.definition(name) for name in names] if names else list(catalog.definitions.values())
    written = []
    for definition in chosen:
        target = folder / "definitions" / definition.op_type / f"{definition.name}.json"
        written.append(_write(target, definition.to_flashinfer_bench()))
        for solution in catalog.solutions_of(definition.name):
            parts = (solution.author, definition.op_type, definition.name, f"{solution.name}.json")
            written.append(_write(folder.joinpath("solutions", *parts), solution.to_flashinfer_bench()))
    if as_json:
        _print_json([str(path) for path in written])
    else:
        print(f"Wrote {len(chosen)} Definitions and {len(written) - len(chosen)} Solutions to {folder}.")


def _write(path: Path, data: dict[str, Any]) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise InventoryError(f"cannot write {path}: {error.strerror}; choose another folder") from error
    return path


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))

"""Writes what integration found: one patch and one test a compute, and the function that applies them all."""

import ast
import errno
import json
import os
from pathlib import Path
from typing import Any

from tilegym.errors import ModelError
from tilegym.integrate.aggregate import GRAPH
from tilegym.integrate.state import FOLDER as STATE
from tilegym.transformers.general import Place

CONFIG = "config.json"
WIDTH = 120

_PATCH = '''"""{compute} in {architecture} and its like.

Written and verified by `tilegym integrate`.
"""

from torch import nn

from tilegym.transformers.general import Place
from tilegym.transformers.general import put
from tilegym.transformers.patching import PatchSet

PLACES = {places}


{signature}
    """Puts {kernels} into ``model``, as :func:`tilegym.transformers.general.put` does."""
    return put(model, "{compute}", PLACES, use_cutile, patches)
'''

_GRAPH = '''"""Decoding of {architecture} and its like as CUDA graphs: written and verified by `tilegym integrate`."""

from torch import nn

from tilegym.transformers.general_graph import put_graph
from tilegym.transformers.patching import PatchSet


def monkey_patch_graph(model: nn.Module, use_cutile: bool = False, patches: PatchSet | None = None) -> PatchSet:
    """Lets ``generate`` replay its steps, by :func:`tilegym.transformers.general_graph.put_graph`; patch attn first."""
    return put_graph(model, use_cutile, patches)
'''

_GRAPH_TEST = '''"""What monkey_patch_graph puts into a model generates the same tokens."""
{imports}
from tilegym.integrate.check import check_decoding

from .monkey_patch_attn import PLACES


def test_monkey_patch_graph():
    check_decoding(PLACES, {config})
'''

_TEST = '''"""What monkey_patch_{compute} puts into a model gives what it stands in for."""
{imports}
from tilegym.integrate.check import check_patch

from .monkey_patch_{compute} import PLACES


def test_monkey_patch_{compute}():
    check_patch(PLACES, {config})
'''

_AGGREGATE = '''"""TileGym's kernels for {architecture} and its like: written and verified by `tilegym integrate`."""

from torch import nn

from tilegym.transformers.patching import PatchSet

{imports}

MODEL_TYPE = "{model_type}"


def apply_tilegym_kernel_to_{family}(
    {flags}
    model: nn.Module | None = None,
    use_cutile: bool = False,
) -> PatchSet:
    """Puts TileGym's kernels into ``model``, and into nothing else in the process; one flag a compute.

    Returns the report, whose ``revert()`` undoes it. ``use_cutile``: on the ``cutile`` backend, else on the one that is
    chosen when it runs.

    Raises:
        PatchError: there is no model, or nothing in it could be patched.
    """
    wanted = {wanted}
    return apply_all(model, wanted, use_cutile, __name__)
'''


def places_text(places: tuple[Place, ...]) -> str:
    """Places as Python source: a tuple at the left margin."""
    written = []
    for place in places:
        arguments = [_source(place.of), _source(place.kernel)]
        if place.options:
            arguments.append(_source(place.options, 8))
        if place.put != "forward":
            arguments.append(f"put={_source(place.put)}")
        written.append(_layout("Place(", arguments, ")", 4))
    # With one item a tuple needs its comma.
    return _layout("(", written, ")" if len(written) > 1 else ",)", 0, len("PLACES = "))


def _source(value: Any, indent: int = 0, before: int = 0) -> str:
    """A constant as Python source, formatted; ``before``: how much stands before it in its line."""
    if isinstance(value, str):
        return repr(value) if '"' in value and "'" not in value else json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        keys = {_source(k): v for k, v in value.items()}
        items = [f"{k}: {_source(v, indent + 4, len(k) + 2)}" for k, v in keys.items()]
        return _layout("{", items, "}", indent, before)
    if isinstance(value, tuple | list):
        head, tail = "()" if isinstance(value, tuple) else "[]"
        items = [_source(item, indent + 4) for item in value]
        return _layout(head, items, f",{tail}" if head == "(" and len(items) == 1 else tail, indent, before)
    return repr(value)


def _layout(head: str, items: list[str], tail: str, indent: int, before: int = 0) -> str:
    """On one line where that fits, with a comma behind it, else one item a line."""
    line = head + ", ".join(items) + tail
    if indent + before + len(line) < WIDTH and "\n" not in line:
        return line
    margin = " " * indent
    return head + "\n" + "".join(f"{margin}    {item},\n" for item in items) + margin + tail.lstrip(",")


def patch_text(compute: str, architecture: str, places: tuple[Place, ...]) -> str:
    """The module that patches one compute."""
    kernels = " and ".join(dict.fromkeys(place.kernel for place in places))
    arguments = ["model: nn.Module", "use_cutile: bool = False", "patches: PatchSet | None = None"]
    signature = _layout(f"def monkey_patch_{compute}(", arguments, ") -> PatchSet:", 0)
    return _PATCH.format(
        compute=compute, architecture=architecture, places=places_text(places), kernels=kernels, signature=signature
    )


def graph_text(architecture: str) -> str:
    """The module that lets ``generate`` replay its steps."""
    return _GRAPH.format(architecture=architecture)


def test_text(compute: str, remote: str = "") -> str:
    """The test of one compute. ``remote``: the id of a model that brings code of its own."""
    config = _source(remote) if remote else f'Path(__file__).with_name("{CONFIG}")'
    template = _GRAPH_TEST if compute == GRAPH else _TEST
    return template.format(compute=compute, config=config, imports="" if remote else "\nfrom pathlib import Path\n")


def aggregate_text(family: str, model_type: str, architecture: str, computes: list[str]) -> str:
    """The package's ``__init__``, with one flag a compute."""
    names = sorted(computes)
    imports = [f"from .monkey_patch_{name} import monkey_patch_{name}" for name in names]
    imports.insert(0, "from tilegym.transformers.generated import apply_all\n")
    text = _AGGREGATE.format(
        architecture=architecture,
        imports="\n".join(imports),
        model_type=model_type,
        family=family,
        flags="\n    ".join(f"{name}: bool = True," for name in computes),
        wanted=_layout("{", [f"monkey_patch_{name}: {name}" for name in computes], "}", 4, len("wanted = ")),
    )
    # Imports of the package stand together.
    text = text.replace(
        "from tilegym.transformers.patching import PatchSet\n\nfrom tilegym.transformers.generated import apply_all\n",
        "from tilegym.transformers.generated import apply_all\nfrom tilegym.transformers.patching import PatchSet\n",
    )
    return text


def write(folder: Path, files: dict[str, str]) -> list[Path]:
    """Writes files.

    Raises:
        ModelError: the folder cannot be written.
    """
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):  # said before the hours that a run may take
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        for name, text in files.items():
            if name.endswith(".py"):
                ast.parse(text)  # never leave a file behind that Python cannot read
            path = folder / name
            path.write_text(text, encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise ModelError(f"{folder} cannot be written ({error.strerror}): name another folder with --output") from error
    return written


def refuse_what_is_not_ours(folder: Path) -> None:
    """Raises ModelError where a run would write over files that none has written, such as the model's own config."""
    init = folder / "__init__.py"
    written = init.is_file() and "`tilegym integrate`" in init.read_text(encoding="utf-8", errors="replace")
    if written or (folder / STATE).is_dir():
        return
    for name in (CONFIG, init.name, "report.json", "report.md", "report.html"):
        if (folder / name).exists():
            raise ModelError(f"{folder} holds a {name} of something else: name another folder with --output")


def write_drafts(folder: Path, drafts: list[dict[str, Any]]) -> None:
    """Writes draft Definitions where ``tilegym inventory validate FOLDER`` looks for them.

    Raises:
        ModelError: the folder cannot be written.
    """
    from tilegym.inventory import Definition

    for file in (folder / "definitions").glob("*.json"):  # of an earlier run
        if '"stage:draft"' in file.read_text(encoding="utf-8", errors="replace"):
            file.unlink()
    texts = {f"{draft['name']}.json": Definition.model_validate(draft).to_json() for draft in drafts}
    write(folder / "definitions", texts)


def remove(folder: Path, computes: list[str]) -> None:
    """Takes the files of computes away that turned out not to do."""
    for compute in computes:
        for name in (f"monkey_patch_{compute}.py", f"test_monkey_patch_{compute}.py"):
            (folder / name).unlink(missing_ok=True)


def config_text(config: Any) -> str:
    """The config that the tests make their small model from."""
    return config.to_json_string(use_diff=True)

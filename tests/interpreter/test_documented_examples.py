"""Every example in the docstrings of the installed cuda.tile prints in the interpreter what its documentation says."""

import ast
import contextlib
import importlib.util
import inspect
import io
import re
import textwrap

import cuda.tile as ct
import pytest
from cuda.tile import _stub

from tilegym import interpreter
from tilegym.interpreter.cuda_on_cpu import redirect

SETUP = "import math\nimport numpy as np\nimport torch\nimport cuda.tile as ct\nstream = torch.cuda.current_stream()\n"


def documented_objects():
    """(name, docstring) of every function and method of the language."""
    tree = ast.parse(inspect.getsource(_stub))
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, ast.get_docstring(node)
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield f"{node.name}.{member.name}", ast.get_docstring(member)


def blocks(doc: str):
    """(kind, options, text) of the code and output blocks of a docstring, in order."""
    lines = doc.splitlines()
    position = 0
    while position < len(lines):
        match = re.match(r"( *)\.\. (testcode|testoutput)::", lines[position])
        position += 1
        if not match:
            continue
        indent, options, body = len(match.group(1)), [], []
        while position < len(lines) and (not lines[position].strip() or lines[position].startswith(" " * (indent + 1))):
            body.append(lines[position])
            position += 1
        while body and (option := re.match(r" *:(\w+): ?(.*)", body[0])):
            options.append((option.group(1), option.group(2)))
            body.pop(0)
        yield match.group(2), dict(options), textwrap.dedent("\n".join(body)).strip("\n")


def examples():
    found = []
    for name, doc in documented_objects():
        parts = list(blocks(doc or ""))
        for number, (kind, options, text) in enumerate(parts):
            if kind != "testcode":
                continue
            following = parts[number + 1] if number + 1 < len(parts) else ("", {}, "")
            output = following[2] if following[0] == "testoutput" else None
            found.append(pytest.param(options.get("template"), text, output, id=f"{name}-{number}"))
    return found


def as_script(template: str | None, text: str) -> str:
    if template == "kernel_wrapper.py":
        body = textwrap.indent(text, "    ")
        text = f"@ct.kernel\ndef kernel():\n{body}\n\nct.launch(stream, (1,), kernel, ())\n"
    return SETUP + text


def run(path) -> str:
    """What the script prints in the interpreter, or the error that it ends with."""
    spec = importlib.util.spec_from_file_location("documented_example", path)
    module = importlib.util.module_from_spec(spec)
    printed = io.StringIO()
    interpreter.install()
    try:
        with redirect(), contextlib.redirect_stdout(printed):
            spec.loader.exec_module(module)
    except ct.TileError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        interpreter.uninstall()
    return printed.getvalue()


def matches(printed: str, expected: str) -> bool:
    """Whether the words printed are those documented, or the error is of the documented kind."""
    if expected.startswith("Traceback"):
        return printed.split(":")[0] == expected.splitlines()[-1].split(":")[0]
    return printed.split() == expected.split()


@pytest.mark.parametrize("template, text, output", examples())
def test_example(template, text, output, tmp_path):
    path = tmp_path / "example.py"
    path.write_text(as_script(template, text))
    printed = run(path)
    if output is not None:
        assert matches(printed, output), f"printed {printed!r} instead of {output!r}"


def test_examples_are_found():
    assert len(examples()) > 100

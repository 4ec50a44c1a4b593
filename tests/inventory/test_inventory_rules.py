"""Every rule of the inventory: an entry that breaks it is found, with file, field and remedy."""

import json

import pytest
from inventory.flashinfer_models import real_models
from typer.testing import CliRunner

from tilegym.errors import InventoryError
from tilegym.inventory import Definition
from tilegym.inventory import Solution
from tilegym.inventory import check_solution
from tilegym.inventory import folders_in
from tilegym.inventory import load
from tilegym.inventory import validate
from tilegym.inventory_cli import app

LINK = "https://github.com/huggingface/transformers/blob/16b6c53c8ec3a720bd45c1c377bf94e1d01249c5/a/b.py#L3-L9"
REFERENCE = f"# Source: {LINK}\nimport torch\n\n\ndef run(x, factor):\n    y = x * factor\n    return y\n"
KERNEL = "def scale(x, factor):\n    return x * factor\n"
PATH = "kernels/scale.py"


def definition(**changes) -> dict:
    return {
        "name": "scale",
        "op_type": "pointwise",
        "axes": {"N": {"type": "var"}},
        "inputs": {"x": {"shape": ["N"], "dtype": "float32"}, "factor": {"shape": None, "dtype": "float32"}},
        "outputs": {"y": {"shape": ["N"], "dtype": "float32"}},
        "reference": REFERENCE,
    } | changes


def solution(**changes) -> dict:
    spec = {"language": "python", "target_hardware": ["cpu"], "entry_point": f"{PATH}::scale"}
    return {
        "name": "scale_python",
        "definition": "scale",
        "author": "a test",
        "spec": spec | {"destination_passing_style": False} | changes.pop("spec", {}),
        "sources": [{"path": PATH}],
    } | changes


@pytest.fixture
def family(tmp_path):
    """Writes a model family's folder, in which everything is as it should be but for what is given."""

    def write(d: dict | None = None, s: dict | None = None, kernel: str = KERNEL, names=("scale", "scale_python")):
        for folder in ("kernels", "kernel_definitions", "kernel_solutions"):
            (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / PATH).write_text(kernel)
        if d != {}:
            (tmp_path / "kernel_definitions" / f"{names[0]}.json").write_text(json.dumps(d or definition()))
        if s != {}:
            (tmp_path / "kernel_solutions" / f"{names[1]}.json").write_text(json.dumps(s or solution()))
        return tmp_path

    return write


def test_nothing_is_wrong_with_a_family_as_it_should_be(family):
    root = family()
    assert validate(folders_in(root), root) == []
    catalog = load(folders_in(root))
    assert check_solution(catalog.definitions["scale"], catalog.solutions["scale_python"], root) == []


def with_run(text: str) -> dict:
    return definition(reference=f"# Source: {LINK}\n{text}")


NUMBER = {"shape": None, "dtype": "float32"}
WRONG_DEFINITIONS = {
    "unknown key": (definition(shape=1), "shape", "Extra inputs"),
    "no name": ({k: v for k, v in definition().items() if k != "name"}, "name", "Field required"),
    "stem": (definition(name="scaled"), "name", "the file is scale.json"),
    "axis": (definition(outputs={"y": {"shape": ["M"], "dtype": "float32"}}), "outputs.y.shape", "'M' is not declared"),
    "unused axis": (definition(axes={"N": {"type": "var"}, "M": {"type": "var"}}), "axes.M", "uses it"),
    "input and output": (definition(outputs={"x": {"shape": ["N"], "dtype": "float32"}}), "outputs", "'x' is the name"),
    "axis and input": (
        definition(inputs={"N": {"shape": ["N"], "dtype": "float32"}, "factor": NUMBER}),
        "axes",
        "'N' is the name of an axis and a tensor",
    ),
    "no outputs": (definition(outputs={}), "outputs", "there are none"),
    "no source": (definition(reference=REFERENCE.partition("\n")[2]), "reference", "does not begin with"),
    "source at a tag": (
        definition(reference=REFERENCE.replace(LINK.split("/")[6], "v5.23.0")),
        "reference",
        "permalink",
    ),
    "source without lines": (definition(reference=REFERENCE.replace("#L3-L9", "")), "reference", "permalink"),
    "lines backwards": (definition(reference=REFERENCE.replace("#L3-L9", "#L9-L3")), "reference", "permalink"),
    "source below": (definition(reference=f"{REFERENCE}# Source: {LINK}\n"), "reference", "at its beginning"),
    "keyword": (definition(axes={"N": {"type": "var"}, "if": {"type": "var"}}), "axes.if", "not a Python name"),
    "exits": (
        with_run("raise SystemExit\n\ndef run(x, factor):\n    y = x\n    return y\n"),
        "reference",
        "SystemExit",
    ),
    "not Python": (with_run("def run(x, factor:\n"), "reference", "line 2 is not Python"),
    "no run": (with_run("def go(x, factor):\n    return x\n"), "reference", "0 functions 'run'"),
    "two runs": (with_run("def run(x, factor):\n    return y\n" * 2), "reference", "2 functions 'run'"),
    "parameters": (
        with_run("def run(factor, x):\n    y = x\n    return y\n"),
        "reference",
        "run takes ['factor', 'x']",
    ),
    "default": (with_run("def run(x, factor=1):\n    y = x\n    return y\n"), "reference", "other kinds"),
    "returns": (with_run("def run(x, factor):\n    z = x\n    return z\n"), "reference", "run returns ['z']"),
    "returns nothing": (with_run("def run(x, factor):\n    y = x\n"), "reference", "run returns nothing"),
    "expression": (with_run("def run(x, factor):\n    return x * factor\n"), "reference", "run returns expressions"),
    "does not load": (
        with_run("import no_such_module\n\ndef run(x, factor):\n    y = x\n    return y\n"),
        "reference",
        "no_such",
    ),
    "constraint": (definition(constraints=["N >"]), "constraints.0", "is not an expression"),
    "unknown in constraint": (definition(constraints=["N > M"]), "constraints.0", "uses M"),
    "impossible": (definition(constraints=["N > 3", "N < 2"]), "constraints", "no sizes were found"),
    "impossible branch": (definition(constraints=["N > 3", "N > 4 or N == 2"]), "constraints", "and N == 2"),
    "mutates": (definition(tags=["mutates:z"]), "tags", "names no input"),
}


@pytest.mark.parametrize("name", WRONG_DEFINITIONS)
def test_wrong_definitions(family, name):
    data, field, message = WRONG_DEFINITIONS[name]
    root = family(data)
    problems = [p for p in validate(folders_in(root), root) if p.file == "kernel_definitions/scale.json"]
    assert any(p.field == field and message in p.message and p.remedy for p in problems), problems


WRONG_SOLUTIONS = {
    "unknown key": (solution(version=1), "version", "Extra inputs"),
    "definition": (solution(definition="scales"), "definition", "there is no Definition 'scales'"),
    "missing source": (solution(sources=[{"path": PATH}, {"path": "kernels/x.py"}]), "sources.1.path", "no file"),
    "absolute": (solution(sources=[{"path": PATH}, {"path": "/x.py"}]), "sources.1.path", "leads out"),
    "parent": (solution(sources=[{"path": PATH}, {"path": "a/../../x.py"}]), "sources.1.path", "leads out"),
    "twice": (solution(sources=[{"path": PATH}, {"path": PATH}]), "sources.1.path", "named twice"),
    "entry file": (solution(spec={"entry_point": "a.py::scale"}), "spec.entry_point", "not among the sources"),
    "entry function": (solution(spec={"entry_point": f"{PATH}::run"}), "spec.entry_point", "no function 'run'"),
    "signature": (solution(spec={"destination_passing_style": True}), "spec.entry_point", "['x', 'factor', 'y']"),
    "stem": (solution(name="other"), "name", "the file is scale_python.json"),
}


@pytest.mark.parametrize("name", WRONG_SOLUTIONS)
def test_wrong_solutions(family, name):
    data, field, message = WRONG_SOLUTIONS[name]
    root = family(s=data)
    problems = [p for p in validate(folders_in(root), root) if p.file == "kernel_solutions/scale_python.json"]
    assert any(p.field == field and message in p.message and p.remedy for p in problems), problems


def test_a_kernel_needs_both_files(family):
    root = family(d={}, s={})
    problems = validate(folders_in(root), root)
    assert [(p.file, p.message) for p in problems] == [
        (PATH, "no Solution names it among its sources"),
        (PATH, "it has no Definition"),
    ]


def test_names_are_unique(family):
    root = family()
    (root / "kernel_definitions" / "more").mkdir()
    (root / "kernel_definitions" / "more" / "scale.json").write_text(json.dumps(definition()))
    assert any("is the name of" in p.message for p in validate(folders_in(root), root))
    with pytest.raises(InventoryError, match="is defined in"):
        load(folders_in(root))


RUNS = {
    "wrong values": ("def scale(x, factor):\n    return x * factor + 0.01\n", "allowed"),
    "wrong shape": ("def scale(x, factor):\n    return x[:, None] * factor\n", "the reference's is"),
    "wrong dtype": ("def scale(x, factor):\n    return (x * factor).double()\n", "float64, the reference's is"),
    "mutation": ("def scale(x, factor):\n    y = x * factor\n    x.zero_()\n    return y\n", "input 'x' was changed"),
    "exception": ("def scale(x, factor):\n    raise ValueError('no')\n", "it raised ValueError: no"),
    "signature": ("def scale(x):\n    return x\n", "takes ['x']"),
}


@pytest.mark.parametrize("name", RUNS)
def test_solutions_that_compute_something_else(family, name):
    kernel, message = RUNS[name]
    root = family(kernel=kernel)
    catalog = load(folders_in(root))
    wrong = check_solution(catalog.definitions["scale"], catalog.solutions["scale_python"], root)
    assert wrong and message in wrong[0]


def test_declared_mutation_and_destination_passing(family):
    kernel = "def scale(x, factor, y):\n    y.copy_(x * factor)\n    x.zero_()\n"
    text = REFERENCE.replace("    return y", "    x.zero_()\n    return y")
    d = Definition.model_validate(definition(tags=["mutates:x"], reference=text))
    s = Solution.model_validate(solution(spec={"destination_passing_style": True}))
    assert check_solution(d, s, family(kernel=kernel)) == []
    assert "input 'x', which is changed" in check_solution(d, s, family(kernel=kernel.replace("zero_", "neg_")))[0]


def test_every_branch_is_run(family):
    """A Solution that is wrong in one branch of a boolean, or of a constraint, is found."""
    text = REFERENCE.replace("x, factor", "x, negate").replace("x * factor", "-x if negate else x")
    flag = {"x": {"shape": ["N"], "dtype": "float32"}, "negate": {"shape": None, "dtype": "bool"}}
    d = Definition.model_validate(definition(inputs=flag, reference=text, constraints=["N >= 7 or N == 1"]))
    s = Solution.model_validate(solution())
    for body in ("return -x", "return x", "return x if len(x) > 1 else -x", "return x if len(x) == 1 else -x"):
        wrong = check_solution(d, s, family(kernel=f"def scale(x, negate):\n    {body}\n"))
        assert wrong, body


def _run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_validate_command(family):
    root = family(s=solution(definition="scales"))
    done = _run("validate", str(root), "--root", str(root))
    assert done.exit_code == 1
    assert "kernel_solutions/scale_python.json: definition: there is no Definition 'scales'\n  remedy:" in done.stdout
    data = json.loads(_run("validate", str(root), "--root", str(root), "--json").stdout)
    assert not data["ok"] and data["problems"][0]["field"] == "definition"
    root = family()
    assert _run("validate", str(root), "--root", str(root), "--run").exit_code == 0
    root = family(kernel=RUNS["wrong values"][0])
    assert "allowed" in _run("validate", str(root), "--root", str(root), "--run").stdout


def test_list_show_and_match_commands():
    assert "swiglu" in _run("list", "--tag", "op:swiglu").stdout
    listed = json.loads(_run("list", "--op-type", "rope", "--json").stdout)
    assert {"rope", "rope_partial"} <= {entry["name"] for entry in listed}
    assert Definition.from_json(_run("show", "rope", "--json").stdout) == load().definitions["rope"]
    assert "entry point" in _run("show", "rope_cutile").stdout
    found = json.loads(_run("match", "swiglu", "--json").stdout)
    assert (found[0]["solution"], found[0]["kind"]) == ("swiglu_cutile", "exact")
    for arguments in (("show", "swigl"), ("match", "swigl"), ("match", "swigl.json"), ("list", "--tag", "none")):
        assert isinstance(_run(*arguments).exception, InventoryError)
    assert "the tags are model:" in str(_run("list", "--tag", "none").exception)


def test_match_command_without_a_match(tmp_path):
    (tmp_path / "scale.json").write_text(json.dumps(definition()))
    done = _run("match", str(tmp_path / "scale.json"))
    assert done.exit_code == 1 and f"No Solution computes scale ({LINK})." in done.stdout


def test_export_command_writes_what_the_real_package_reads(tmp_path):
    models = real_models()
    assert _run("export", str(tmp_path), "swiglu").exit_code == 0
    theirs = models.load_json_file(models.Solution, next(tmp_path.rglob("swiglu_cutile.json")))
    assert theirs.spec.language == "python" and "def swiglu(gate, up)" in theirs.get_entry_source().content
    assert Solution.from_flashinfer_bench(theirs) == load().solutions["swiglu_cutile"]
    their_set = models.TraceSet.from_path(str(tmp_path))
    assert "swiglu" in their_set.definitions


def test_an_exported_set_is_an_inventory(tmp_path):
    assert _run("export", str(tmp_path), "swiglu", "rope").exit_code == 0
    done = _run("validate", str(tmp_path))
    assert done.exit_code == 0 and "All 2 Definitions" in done.stdout, done.stdout
    mine, theirs = load(), load(folders_in(tmp_path))
    assert theirs.definitions == {name: mine.definitions[name] for name in ("swiglu", "rope")}
    assert theirs.solutions == {name: mine.solutions[name] for name in ("swiglu_cutile", "rope_cutile")}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00"], ids=["empty", "cut off", "list", "binary"])
def test_what_is_no_json_is_said_once(content, tmp_path):
    """The file is named with a remedy, and not its Solutions besides; other commands end with one sentence."""
    assert _run("export", str(tmp_path), "swiglu").exit_code == 0
    file = next(tmp_path.rglob("swiglu.json"))
    file.write_bytes(content)
    problems = json.loads(_run("validate", str(tmp_path), "--json").stdout)["problems"]
    assert [(p["file"], p["field"]) for p in problems] == [(str(file), "file")] and problems[0]["remedy"]
    error = _run("list", "--path", str(tmp_path)).exception
    assert isinstance(error, InventoryError) and "tilegym inventory validate" in str(error) and "\n" not in str(error)


def test_what_cannot_be_read_is_said(family):
    root = family()
    (root / "kernel_definitions" / "folder.json").mkdir()
    (root / "kernel_definitions" / "link.json").symlink_to("nowhere.json")
    problems = validate(folders_in(root), root)
    assert [(p.file, p.field) for p in problems] == [
        ("kernel_definitions/folder.json", "file"),
        ("kernel_definitions/link.json", "file"),
    ]
    assert all("it cannot be read" in p.message and p.remedy for p in problems)


@pytest.mark.parametrize("name", sorted(load().solutions))
def test_every_shipped_entry_survives_the_real_package(name):
    models, catalog = real_models(), load()
    mine = catalog.solutions[name]
    theirs = models.Solution.model_validate(mine.to_flashinfer_bench())
    assert Solution.from_flashinfer_bench(theirs) == mine
    own = catalog.definitions[mine.definition]
    assert Definition.from_flashinfer_bench(models.Definition.model_validate(own.to_flashinfer_bench())) == own


def test_an_exported_solution_runs_from_its_embedded_sources():
    mine = load().solutions["swiglu_cutile"]
    alone = json.loads(json.dumps(mine.to_flashinfer_bench()))
    alone["sources"] = [s | {"path": s["path"].removeprefix("src/tilegym/")} for s in alone["sources"]]
    alone["spec"]["entry_point"] = alone["spec"]["entry_point"].removeprefix("src/tilegym/")
    embedded = Solution.from_flashinfer_bench(alone)
    assert all(source.content for source in embedded.sources)
    assert check_solution(load().definitions["swiglu"], embedded) == []

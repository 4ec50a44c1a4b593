"""What pages for agents, on Docker and on training say is true: commands, options, paths, names, keys, snippets."""

import ast
import contextlib
import importlib
import json
import re
import shlex
import shutil
import sys
import tempfile
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import typer

from tilegym_command import COMMANDS
from tilegym_command import build_app

ROOT = Path(__file__).parents[1]
SKILL = ROOT / "skills/monkey-patch-kernels-to-transformers"
GUIDE = ROOT / "docs/docker-gpu-guide.md"
PAGES = [SKILL / "SKILL.md", *sorted((SKILL / "references").glob("*.md")), GUIDE, ROOT / "docs/training.md"]
INTEGRATION, AUTOKERNEL = (SKILL / "references" / name for name in ("integration.md", "auto-kernelize.md"))
TINY = "examples/models/tiny-llama"
NEMOTRON = {
    "model_type": "nemotron",
    "architectures": ["NemotronForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a language, indented ones too."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(text) for _, text in found]


def spans(page: Path) -> list[str]:
    """What stands in backquotes outside of blocks, each on one line."""
    text = re.sub(r"^( *)```\w*\n.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not [line for line in text.splitlines() if line.count("`") % 2]
    return re.findall(r"`([^`\n]+)`", text)


def shell_lines(page: Path) -> list[list[str]]:
    """The words of each command in the page's shell blocks."""
    text = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    lines = (shlex.split(line.split(">")[0], comments=True) for line in text.splitlines() if "()" not in line)
    return [words for words in lines if words]


def parse(words: list[str], whole: bool) -> None:
    """Parses a command as the program would; raises for what it does not know.

    Args:
        whole: whether arguments that the command needs have to be there.
    """
    command = typer.main.get_command(build_app(words[0] if words else None))
    words = list(words)
    while words and hasattr(command, "commands"):
        assert words[0] in command.commands, f"there is no tilegym {words[0]}"
        command = command.commands[words.pop(0)]
    try:
        if not hasattr(command, "commands"):
            command.make_context(command.name, words)
    except Exception as error:  # of click's or typer's own copy of it
        kind = type(error).__name__
        if not (kind == "Exit" or (kind == "MissingParameter" and not whole)):
            raise AssertionError(f"tilegym {command.name} {' '.join(words)}: {kind}: {error}") from error


def options() -> set[str]:
    found = set()
    for name in COMMANDS:
        commands = [typer.main.get_command(build_app(name)).commands[name]]
        commands += getattr(commands[0], "commands", {}).values()
        found |= {opt for c in commands for p in c.params for opt in (*p.opts, *p.secondary_opts)}
    return found | {"--help"}


def test_there_are_pages():
    names = {"environment.md", "integration.md", "auto-kernelize.md", "inventory-schema.md"}
    assert {page.name for page in PAGES[1:-2]} == names
    head = re.match(r"---\nname: (\S+)\ndescription: (.+)\n---\n", PAGES[0].read_text())
    assert head and head[1] == SKILL.name and len(head[2]) < 1024


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page, capsys):
    lines = [words[words.index("tilegym") + 1 :] for words in shell_lines(page) if "tilegym" in words]
    for words in lines:
        parse(words, whole=True)
    for text in spans(page):
        if text.startswith("tilegym "):
            parse(shlex.split(text)[1:], whole=False)
    others = {"--build-arg", "--no-cache", "--porcelain", "--gpus"}
    named = {o for text in spans(page) for o in re.findall(r"(?<!\S)--[A-Za-z][\w-]*", text)}
    assert named <= options() | others, named - options() - others
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in shell_lines(page) + [shlex.split(t) for t in spans(page) if t.startswith("make ")]:
        assert words[0] != "make" or words[1] in targets, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_links_exist(page):
    folders = tuple(f"{p.name}/" for p in ROOT.iterdir() if p.is_dir() and p.name not in ("out", "build"))
    words = [w for text in spans(page) for w in text.split()] + [w for line in shell_lines(page) for w in line]
    words += re.findall(r'"([^"\s]+)"', "\n".join(blocks(page, "json")))
    for word in words:
        word = word.partition("::")[0].rstrip(",.;:")
        if word.startswith(folders):
            known = re.split(r"[<{*]", word)[0]
            assert (ROOT / known).exists(), word
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert link.startswith("https://") or (page.parent / link).is_file(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_names_exist(page):
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                for alias in node.names:
                    owner = importlib.import_module(node.module)
                    if not hasattr(owner, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")
    for name in spans(page):
        if re.fullmatch(r"(tilegym|torch)(\.\w+)+", name):
            resolve(name)


def resolve(name: str) -> object:
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        with contextlib.suppress(ImportError):
            found = importlib.import_module(".".join(parts[:split]))
            for part in parts[split:]:
                found = getattr(found, part)
            return found
    raise AssertionError(f"there is no {name}")


def json_of(*words: str) -> object:
    """What a command prints with --json."""
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as told:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told):
            status = typer.main.get_command(build_app(words[0]))([*words, "--json"], standalone_mode=False)
        for file in (printed, told):
            file.seek(0)
        assert not status, told.read()
        return json.load(printed)


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory):
    path = tmp_path_factory.mktemp("nemotron") / "config.json"
    path.write_text(json.dumps(NEMOTRON))
    return path


def task() -> dict:
    from tilegym.autokernel import Attempt
    from tilegym.autokernel import Sample
    from tilegym.autokernel import Task
    from tilegym.inventory import Definition

    definition = Definition.from_json(json.dumps(json_of("inventory", "show", "rms_norm")))
    history = (Attempt("generate", "G1", "crash", "log"),)
    made = Task(definition, "region", ("model.norm",), (Sample({}, {}),), ("sm_90",), "folder", history=history)
    return json.loads(made.to_json())


def integrated(config: Path, monkeypatch) -> dict:
    """The JSON of a run in which only the rotation is looked at; nothing is compiled."""
    from tilegym.integrate import recipes
    from tilegym.integrate import steps

    monkeypatch.setattr(recipes, "_WAYS", {"rope": recipes._WAYS["rope"]})
    monkeypatch.setattr(steps, "compiled", lambda launches, done, notices, binding: ({"rope_kernel sm_90": ""}, ""))
    folder = config.parent / "out"
    found = json_of(
        "integrate", str(config), "--random_weights", "--output", str(folder), "--output_length", "2", "--num_runs", "1"
    )
    assert found == json.loads((folder / "report.json").read_text())
    return found


def validated(folder: Path) -> object:
    (folder / "definitions").mkdir()
    (folder / "solutions").mkdir()
    shutil.copy(ROOT / "src/tilegym/inventory/catalog/definitions/rms_norm.json", folder / "definitions")
    return json_of("inventory", "validate", str(folder))


def sample(name: str, nemotron: Path, monkeypatch) -> object:
    from tilegym.inventory import Definition
    from tilegym.inventory import Solution

    tiny = f"--model_id {TINY} --compare --report_kernel_coverage --output_length 2 --num_runs 1"
    monkeypatch.chdir(ROOT)
    return {
        "`tilegym doctor --json`": lambda: json_of("doctor"),
        "`tilegym integrate --json`": lambda: integrated(nemotron, monkeypatch),
        "`tilegym infer --json`": lambda: json_of("infer", *tiny.split(), "--warmup_runs", "0"),
        "`tilegym inventory match --json`": lambda: json_of("inventory", "match", "swiglu"),
        "`tilegym inventory validate --json`": lambda: validated(nemotron.parent),
        "a Definition": lambda: dict.fromkeys(Definition.model_fields) | json_of("inventory", "show", "rms_norm"),
        "a Solution": lambda: dict.fromkeys(Solution.model_fields) | json_of("inventory", "show", "rms_norm_cutile"),
        "`task.json`": task,
    }[name]()


def kinds_of_lists() -> dict:
    """The classes of what stands in lists that are empty in the samples."""
    from tilegym.integrate.requirement import Unrecognised
    from tilegym.inventory.rules import Problem
    from tilegym.transformers.patching import Entry

    return {
        "plan.unrecognised[]": {f.name for f in fields(Unrecognised)},
        "skipped_modules[]": {f.name for f in fields(Entry)},
        "problems[]": set(Problem._fields),
    }


def assert_has(data: object, path: str) -> None:
    """``a.b[].c``: every step leads somewhere; "*" stands for all keys of a dictionary."""
    values, gone = [data], ""
    for step in re.findall(r"\[\]|\*|\w+", path):
        if step == "[]":
            values, gone = [item for value in values for item in value], f"{gone}[]"
        elif step == "*":
            values, gone = [item for value in values for item in value.values()], f"{gone}.*"
        elif not values:
            assert step in kinds_of_lists()[gone.lstrip(".")], path
        else:
            assert any(isinstance(value, dict) and step in value for value in values), f"{path}: no {step}"
            values = [value[step] for value in values if isinstance(value, dict) and step in value]
            gone = f"{gone}.{step}"


def key_tables() -> dict[str, list[str]]:
    """By the sample's name the keys in the first columns of tables whose head is "key of ..."."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for name, rows in re.findall(r"^\| key of (.+?) \|.*\n\|[-|]+\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE):
            keys = [key for row in rows.splitlines() for key in re.findall(r"`([^`]+)`", row.split("|")[1])]
            found.setdefault(name, []).extend(keys)
    return found


@pytest.mark.parametrize("name", key_tables())
def test_json_keys_exist(name, nemotron, monkeypatch):
    data = sample(name, nemotron, monkeypatch)
    keys = key_tables()[name]
    assert keys
    for key in keys:
        assert_has(data, key)


def test_every_json_output_is_described():
    assert set(key_tables()) >= {f"`tilegym {c} --json`" for c in ("doctor", "integrate", "infer", "inventory match")}


def test_the_hand_written_patch_works_and_its_test_would_find_a_mistake(nemotron):
    _, patch, test, _ = blocks(INTEGRATION, "python")
    package = nemotron.parent / "by_hand"
    (package / "kernels").mkdir(parents=True)
    for folder in (package, package / "kernels"):
        (folder / "__init__.py").write_text("")
    (package / "config.json").write_text(nemotron.read_text())
    (package / "monkey_patch_relu_squared.py").write_text(patch)
    (package / "test_monkey_patch_relu_squared.py").write_text(test)
    kernel = "from tilegym import ops\n\n\ndef relu_squared(x):\n    return ops.relu(x, backend='cutile').square()"
    (package / "kernels/relu_squared.py").write_text(kernel)
    sys.path.insert(0, str(package.parent))
    try:
        module = importlib.import_module("by_hand.test_monkey_patch_relu_squared")
        module.test_monkey_patch_relu_squared()
        apply = importlib.import_module("by_hand.monkey_patch_relu_squared").monkey_patch_relu_squared
        from tilegym.integrate.small_model import small_model

        report = apply(small_model("nemotron").model)
        assert report.patched and {entry.compute for entry in report.patched} == {"relu_squared"}
        kernels = importlib.import_module("by_hand.monkey_patch_relu_squared")
        kernels.relu_squared = lambda x: 1.05 * x.relu().square()
        with pytest.raises(AssertionError):
            module.test_monkey_patch_relu_squared()
    finally:
        sys.path.remove(str(package.parent))


def test_the_snippets_for_drafts_and_measurement_run(nemotron, capsys):
    from tilegym.bench import models
    from tilegym.bench import prompts

    draft, _, _, whole = blocks(INTEGRATION, "python")
    exec(compile(draft.replace("MODEL", str(nemotron.parent)), "draft", "exec"), {})
    assert '"name": "nemotron_mlp_relu2' in capsys.readouterr().out
    loaded = models.load(str(ROOT / TINY), torch.float32, torch.device("cpu"), False)
    batches = prompts.make_batches(["The capital of France is"], loaded.tokenizer, loaded.model.config, None, None)
    names = {"model": loaded.model, "batches": batches}
    for word, shorter in (("32, 5", "2, 1"), ("32", "2"), ("apply(model)", "apply(model, False)")):
        assert word in whole
        whole = whole.replace(word, shorter)
    exec(compile(whole, "whole", "exec"), names)
    assert "'passed': True" in capsys.readouterr().out
    assert names["after"]["throughput_tokens_per_second"] > 0 and "coverage_percent" in names["before"]


def test_what_is_said_of_the_loop():
    from tilegym.autokernel import judge
    from tilegym.autokernel import ledger
    from tilegym.autokernel import loop
    from tilegym.autokernel import report
    from tilegym.autokernel import static_checks

    text = AUTOKERNEL.read_text()
    first = [re.findall(r"`([^`]+)`", line.split("|")[1]) for line in text.splitlines() if line.startswith("| `")]
    words = {word for cell in first for word in cell}
    assert set(ledger.STATUSES) | set(judge.GATES) <= words
    assert ", ".join(f"`{name}`" for name in report._HEADER) in text
    assert f"at most {static_checks.MAX_FILES} files" in text
    assert {1: "one", 5: "five"}[loop.MAX_ATTEMPTS] + " attempts" in text
    for module in static_checks.IMPORTS:
        assert module in text


def test_the_snippet_that_installs_a_kernel_runs():
    from tilegym.bench import models

    (text,) = blocks(AUTOKERNEL, "python")
    text = text.replace("SOLUTION", "linear_cutile").replace("REGION", "torch.nn.Linear@0")
    names = {"model": models.load(str(ROOT / TINY), torch.float32, torch.device("cpu"), False).model}
    exec(compile(text, "install", "exec"), names)
    assert {entry.compute for entry in names["patches"].patched} == {"torch.nn.Linear@0"}


def test_the_agents_config_is_one(tmp_path):
    from tilegym.autokernel.proposers import AgentConfig

    (example,) = blocks(AUTOKERNEL, "json")
    (tmp_path / "agent.json").write_text(example)
    config = AgentConfig.from_file(tmp_path / "agent.json")
    assert (ROOT / config.skill) == AUTOKERNEL and set(json.loads(example)) == {f.name for f in fields(AgentConfig)}

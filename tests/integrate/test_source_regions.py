"""Links to the lines of transformers: by the commit where it is known, and what validation says where it is not."""

import importlib.metadata
import importlib.util
import json
import sys

import pytest

from tilegym import inventory
from tilegym.integrate import emit
from tilegym.integrate import source_regions
from tilegym.integrate.research import research
from tilegym.inventory import loading
from tilegym.inventory.reference import is_permalink

TAG, COMMIT = "1" * 40, "2" * 40
VERSION = importlib.metadata.version("transformers")


@pytest.fixture(autouse=True)
def forgotten(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEGYM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(source_regions, "_RELEASES", {})
    source_regions._revision.cache_clear()
    source_regions.source_of.cache_clear()
    yield
    source_regions._revision.cache_clear()
    source_regions.source_of.cache_clear()


def github(answer):
    """In place of git: what it is asked is checked, ``answer`` is what it says."""

    def git(*arguments):
        assert arguments[:2] == ("ls-remote", source_regions.REPOSITORY)
        assert arguments[2:] == (f"refs/tags/v{VERSION}", f"refs/tags/v{VERSION}^{{}}")
        return answer

    return git


def drafts(folder):
    emit.write_drafts(folder, [r.definition for r in research("llama").requirements])
    return inventory.validate(loading.folders_in(folder))


def test_without_the_commit_drafts_are_flagged_and_refused_with_the_remedy(tmp_path):
    problems = drafts(tmp_path)
    tags = [json.loads(p.read_text())["tags"] for p in (tmp_path / "definitions").iterdir()]
    flagged = ["source:not-a-commit" in found for found in tags]
    assert len(problems) == sum(flagged) == len(tags) - 1, "torch's own source has a commit"
    for problem in problems:
        assert f"/blob/v{VERSION}/" in problem.message and "--resolve-commits" in problem.remedy


def test_once_looked_up_drafts_are_valid(tmp_path, monkeypatch):
    monkeypatch.setattr(
        source_regions, "_git", github(f"{TAG}\trefs/tags/v{VERSION}\n{COMMIT}\trefs/tags/v{VERSION}^{{}}\n")
    )
    assert source_regions.look_up_commit() == COMMIT
    assert drafts(tmp_path) == []
    monkeypatch.setattr(source_regions, "_git", github(""))
    source_regions._revision.cache_clear()
    assert source_regions.transformers_revision() == (COMMIT, True)  # from the disk


def test_without_a_network_it_stays_the_tag(monkeypatch):
    monkeypatch.setattr(source_regions, "_git", github(""))
    assert source_regions.look_up_commit() == ""
    assert source_regions.transformers_revision() == (f"v{VERSION}", False)


def test_some_releases_are_known_without_asking(tmp_path, monkeypatch):
    monkeypatch.setattr(source_regions, "_RELEASES", {VERSION: COMMIT})
    monkeypatch.setattr(source_regions, "_git", lambda *arguments: pytest.fail("it asked"))
    assert source_regions.look_up_commit() == COMMIT
    assert drafts(tmp_path) == []


@pytest.mark.parametrize(
    "folder, link",
    [
        (f"owner/a_hyphen_model_hyphen_1_dot_5/{COMMIT}", f"owner/a-model-1.5/blob/{COMMIT}"),
        (f"_01_hyphen_ai/_7b/{COMMIT}", f"01-ai/7b/blob/{COMMIT}"),
        (f"model/{COMMIT[:16]}", ""),  # a local folder's
    ],
)
def test_code_from_the_hub_has_its_commit(folder, link, tmp_path, monkeypatch):
    package = tmp_path / "transformers_modules" / folder
    package.mkdir(parents=True)
    file, name = package / "modeling_it.py", f"transformers_modules.{folder.replace('/', '.')}.modeling_it"
    file.write_text("import torch\n\n\nclass It(torch.nn.Module):\n    pass\n")
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    source = source_regions.source_of(module.It)
    assert source.url == (f"https://huggingface.co/{link}/modeling_it.py#L4-L5" if link else "")
    assert source.immutable == is_permalink(source.url) == bool(link)

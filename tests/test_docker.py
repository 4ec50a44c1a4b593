"""The Dockerfile, the script that builds it and the guide, as far as they can be checked without Docker."""

import re
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs/docker-gpu-guide.md"
DOCKER = ROOT / "modeling/transformers"


def instructions() -> list[list[str]]:
    text = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines() if line and not line.startswith("#")]


def test_dockerfile():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    copied = [word for words in instructions() if words[0] == "COPY" for word in words[1:-1]]
    assert copied and {"src", "pyproject.toml", "README.md", "LICENSE"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists(), name
        assert not tracked or any(path == name or path.startswith(f"{name}/") for path in tracked), name
    runs = [words[1:] for words in instructions() if words[0] == "RUN"]
    assert ["tilegym", "doctor"] in [words[:2] for words in runs]
    extras = re.findall(r"\.\[(\w+)\]", " ".join(w for words in runs for w in words))
    assert extras and all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)
    (base,) = [w.partition("=")[2] for words in instructions() for w in words if w.startswith("BASE_IMAGE=")]
    assert re.fullmatch(r"(nvidia/cuda|pytorch/pytorch):[\w.-]+", base)
    assert ["FROM", "${BASE_IMAGE}"] in instructions()


def test_build_script_builds_from_the_root_of_the_checkout(tmp_path):
    script = DOCKER / "build_docker.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\npwd\nfor word in "$@"; do echo "$word"; done\n')
    docker.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "IMAGE": "name"}
    command = [str(script), "--build-arg", "TORCH=torch==2.11.*"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    where, *words = done.stdout.splitlines()
    assert Path(where) == ROOT and words[0] == "build" and words[-1] == "."
    assert words[words.index("--tag") + 1] == "name" and "TORCH=torch==2.11.*" in words
    assert ROOT / words[words.index("--file") + 1] == DOCKER / "Dockerfile"


def test_the_guide_runs_on_one_gpu_by_uuid():
    text = GUIDE.read_text()
    assert "--gpus all" not in text and text.count("docker run") == text.count('--gpus "device=$GPU"') == 1
    mounts = set(re.findall(r":(/[\w/]+)\"", text))
    made = " ".join(word for words in instructions() for word in words)
    assert mounts == {"/cache", "/cache/huggingface", "/workspace", "/opt/tilegym"}
    assert all(f"{mount.removesuffix('/huggingface')}" in made for mount in mounts)

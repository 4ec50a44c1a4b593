"""Layers, kernels and repositories that the kernel registry's tests use."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import torch
from torch import nn

COMMIT = "0123456789abcdef0123456789abcdef01234567"

MY_KERNELS_LAYERS = """
import torch
import torch.nn as nn


class Qwen2MLPTrainingKernel(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        up = self.up_proj(x)
        return self.down_proj(self.act_fn(gate) * up)
"""

HUB_INIT = """
import torch

from . import layers


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(x1) * x2


def relu(x: torch.Tensor) -> torch.Tensor:
    return torch.clamp(x, min=0)


__all__ = ["layers", "relu", "silu_and_mul"]
"""

HUB_LAYERS = """
import torch
import torch.nn as nn


class SiluAndMul(nn.Module):
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return nn.functional.silu(x[..., :half]) * x[..., half:]
"""


def lay_out_hub_cache(cache: Path, repo_id: str, files: dict[str, str], refs: tuple[str, ...]) -> None:
    """Writes a kernel repository as huggingface_hub's cache holds it: blobs, a snapshot of links to them, refs."""
    repo = cache / f"kernels--{repo_id.replace('/', '--')}"
    (repo / "blobs").mkdir(parents=True)
    (repo / "refs").mkdir()
    for ref in refs:
        (repo / "refs" / ref).write_text(COMMIT)
    for backend in ("cpu", "cuda"):  # `kernels` takes the variant of the PyTorch that is installed
        name = repo_id.partition("/")[2]
        metadata = {
            "id": f"{name}_{backend}_1",
            "name": name,
            "version": 1,
            "license": "MIT",
            "python-depends": [],
            "backend": {"type": backend},
        }
        for file, text in {**files, "metadata.json": json.dumps(metadata)}.items():
            blob = repo / "blobs" / f"{backend}-{file}"
            blob.write_text(text)
            link = repo / "snapshots" / COMMIT / "build" / f"torch-{backend}" / file
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))


def run_offline(code: str, cache: Path, **environment: str) -> str:
    """Runs code in a Python of its own with Hub access off and ``cache`` as kernels' cache; returns what it prints."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "KERNELS_CACHE": str(cache), "TILEGYM_BACKEND": "pytorch"}
    # No GPU: models without parameters count as on the CPU.
    env.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", **environment)
    paths = (environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH"))
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Norm(nn.Module):
    """A custom model's RMS norm."""

    def __init__(self, n: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, n))
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Scale(nn.Module):
    """A layer that is easily replaced."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def scales(*classes: type[nn.Module]) -> nn.Sequential:
    """A layer of each class; two Scales if none is named."""
    return nn.Sequential(*(cls() for cls in classes or (Scale, Scale)))


class ScaleKernel(nn.Module):
    """Computes what Scale does, and counts in ``calls`` that it was used."""

    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        calls.append("ScaleKernel")
        return torch.mul(x, self.factor)


class WrongKernel(nn.Module):
    """Computes something else than Scale."""

    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + 1


calls: list[str] = []

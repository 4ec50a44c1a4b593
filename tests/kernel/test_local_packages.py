import json
import sys

import kernels
import pytest
import torch
from torch import nn

from tilegym.errors import KernelError
from tilegym.kernel import kernelize_model
from tilegym.kernel import register_external_layer
from tilegym.kernel import register_layer_kernel
from tilegym.kernel import report

RELU = "import torch.nn as nn\n\n\nclass Relu(nn.Module):\n    def forward(self, input):\n        return input * {}\n"
x = torch.tensor([1.0, 2.0])


def run(**arguments) -> torch.Tensor:
    register_layer_kernel("Relu", device="cpu", **arguments)
    register_external_layer(nn.ReLU, "Relu")
    return kernelize_model(nn.Sequential(nn.ReLU()), use_fallback=False)(x)


def write(folder, factor, **files):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "layers.py").write_text(RELU.format(factor))
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_only_layers_py(tmp_path):
    write(tmp_path / "repo" / "pkg", 3)
    path = list(sys.path)
    assert torch.equal(run(repo_path=tmp_path / "repo", package_name="pkg"), x * 3)
    assert sys.path == path and "pkg" not in sys.modules


def test_repo_path_is_the_package(tmp_path):
    write(tmp_path / "pkg", 4)
    assert torch.equal(run(repo_path=tmp_path / "pkg", package_name="pkg"), x * 4)
    assert torch.equal(run(repo_path=str(tmp_path / "pkg")), x * 4)


def test_layer_name_is_the_kernels_name_by_default(tmp_path):
    write(tmp_path / "pkg", 5)
    register_layer_kernel("Relu", repo_path=tmp_path, package_name="pkg", device="cpu")
    register_layer_kernel("Other", repo_path=tmp_path, package_name="pkg", layer_name="Relu", device="cpu")
    for name in ("Relu", "Other"):
        register_external_layer(nn.ReLU, name)
        assert torch.equal(kernelize_model(nn.Sequential(nn.ReLU()), use_fallback=False)(x), x * 5)


def test_two_packages_of_one_name(tmp_path):
    for factor in (6, 7):
        write(tmp_path / str(factor) / "pkg", factor, __init__="from . import layers")
        assert torch.equal(run(repo_path=tmp_path / str(factor), package_name="pkg"), x * factor)


def test_relative_imports(tmp_path):
    folder = write(tmp_path / "pkg", "FACTOR", constants="FACTOR = 8", __init__="from . import layers")
    (folder / "layers.py").write_text("from .constants import FACTOR\n" + RELU.format("FACTOR"))
    assert torch.equal(run(repo_path=tmp_path, package_name="pkg"), x * 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"repo_path": "/no/such/folder", "package_name": "pkg"}, "repo_path '/no/such/folder' is not a folder"),
        ({"repo_path": "/no/such/folder"}, "repo_path '/no/such/folder' is not a folder"),
        ({"package_name": "other"}, "package 'other' was not found in .*there is no .*other/layers.py"),
        ({}, "holds neither a layers.py nor a kernel built for this system; .* give package_name"),
        ({"package_name": "pkg", "layer_name": "Gelu"}, "there is no 'Gelu'; the repository has Relu"),
        ({"package_name": "broken"}, "'Relu' could not be loaded .*NameError: name 'oops' is not defined"),
    ],
)
def test_what_can_be_wrong(tmp_path, arguments, message):
    write(tmp_path / "pkg", 1)
    write(tmp_path / "broken", 1, __init__="oops")
    for _ in range(2):  # a failed import leaves nothing behind
        with pytest.raises(KernelError, match=message):
            run(**{"repo_path": tmp_path, **arguments})


def test_kernel_as_kernel_builder_lays_it_out(tmp_path):
    """A build folder for this system, read by `kernels`; by its path or as a repository object."""
    for backend in ("cpu", "cuda"):
        variant = write(tmp_path / "build" / f"torch-{backend}", 9, __init__="from . import layers")
        metadata = {"id": f"relu_{backend}", "name": "relu", "version": 1, "license": "MIT", "python-depends": []}
        (variant / "metadata.json").write_text(json.dumps({**metadata, "backend": {"type": backend}}))
    assert torch.equal(run(repo_path=tmp_path), x * 9)
    repo = kernels.LocalLayerRepository(tmp_path, layer_name="Relu")
    assert torch.equal(run(repo=repo), x * 9)
    model = kernelize_model(nn.Sequential(nn.ReLU()))
    assert report(model).replaced[0].source == "repository LocalLayerRepository"

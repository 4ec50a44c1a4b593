import copy
import dataclasses

import kernels
import pytest
import torch
from torch import nn

from tilegym.errors import KernelError
from tilegym.kernel import register_external_layer
from tilegym.kernel import register_kernels
from tilegym.kernel import register_layer_kernel
from tilegym.kernel import registry
from tilegym.kernel.function import FuncRepositoryProtocol
from tilegym.kernel.function import register_function_batch
from tilegym.kernel.function import register_function_kernel
from tilegym.kernel.layer import register_layer_batch

from .fakes import Norm
from .fakes import Scale
from .fakes import ScaleKernel
from .fakes import WrongKernel


def test_listing_and_lookup():
    register_layer_kernel("K", repo_id="org/repo", version=1, device="cuda", mode="train")
    register_layer_kernel("K", layer_class=ScaleKernel, device="cpu")
    register_external_layer(Scale, "K")
    register_function_kernel(func_name="f", target_module="pkg.mod", func_impl=torch.relu, device="npu")

    assert [(k.device, str(k.mode)) for k in registry.list_layer_kernels("K")] == [("cuda", "train"), ("cpu", "any")]
    assert {k.name for k in registry.list_layer_kernels()} >= {"K", "TileGymRMSNorm"}
    assert str(registry.find_layer_kernel("K", "cuda", "inference").source) == "hub org/repo@v1:K"
    assert registry.find_layer_kernel("K", "cuda", "compile") is None
    assert registry.find_layer_kernel("K", "npu", "train") is None
    assert registry.find_layer_kernel("nothing", "cpu", "train") is None
    assert registry.find_external_layer(Scale).kernel_name == "K"
    assert registry.find_external_layer(Norm) is None
    assert [k.target for k in registry.list_function_kernels("pkg.mod")] == ["pkg.mod.f"]
    assert registry.list_function_kernels("pkg") == []
    assert registry.find_function_kernel("pkg.mod.f").device == "npu"
    assert registry.find_function_kernel("pkg.mod.f", "cuda") is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        registry.find_layer_kernel("K", "cpu").name = "other"


def test_clearing_keeps_our_own():
    own = registry.list_layer_kernels()
    register_layer_kernel("K", layer_class=ScaleKernel)
    register_external_layer(Scale, "K")
    register_function_kernel(func_name="f", target_module="pkg.mod", func_impl=torch.relu)
    registry.clear()
    assert registry.list_layer_kernels() == own and own
    assert registry.list_external_layers() == registry.list_function_kernels() == []


def test_registering_one_mode_again_keeps_the_others():
    """The mapping of `kernels` replaces all modes of a device; here only the one that is registered again."""
    for mode in ("train", "inference", "compile", None):
        register_layer_kernel("K", repo_id="org/old", revision="main", mode=mode)
    register_layer_kernel("K", repo_id="org/new", revision="main", mode="train")
    found = {str(k.mode): k.source.repo_id for k in registry.list_layer_kernels("K")}
    assert found == {"train": "org/new", "inference": "org/old", "compile": "org/old", "any": "org/old"}


def test_device_of_a_kernel_comes_before_any_device():
    register_layer_kernel("K", layer_class=WrongKernel, device=None, mode="inference")
    register_layer_kernel("K", layer_class=ScaleKernel, device="cpu")
    assert registry.find_layer_kernel("K", "cpu", "inference").source.kernel is ScaleKernel
    assert registry.find_layer_kernel("K", "npu", "inference").source.kernel is WrongKernel


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give exactly one of repo_id, repo_path, layer_class, repo .got none"),
        ({"repo_id": "a/b", "repo_path": "/x"}, "exactly one of .* .got repo_id, repo_path"),
        ({"repo_id": "a/b", "version": 1, "revision": "main"}, "give version or revision, not both"),
        ({"repo_id": "a", "version": 1}, "repo_id 'a' is not of the form 'owner/name'"),
        ({"repo_id": 5}, "repo_id 5 is not of the form 'owner/name'"),
        ({"repo_id": "a/b", "version": ">=1"}, "version '>=1' is neither a number .1. nor a release"),
        ({"repo_id": "a/b", "version": 1.5}, "version 1.5 is neither a number .1. nor a release"),
        ({"repo_id": "a/b", "version": -1}, "version -1 is neither a number .1. nor a release"),
        ({"repo_id": "a/b", "version": True}, "version True is neither a number .1. nor a release"),
        ({"repo_id": "a/b", "revision": ""}, "revision '' is not the name of a branch, tag or commit"),
        ({"repo_id": "a/b", "revision": 5}, "revision 5 is not the name of a branch, tag or commit"),
        ({"repo_path": "/x", "version": 1}, "version and revision belong to repo_id"),
        ({"repo_id": "a/b", "version": 1, "package_name": "p"}, "package_name belongs to repo_path"),
        ({"repo": object()}, "repo must be an object with a method load"),
        ({"layer_class": torch.relu}, "a layer kernel is a subclass of torch.nn.Module"),
    ],
)
def test_sources_of_layers(arguments, message):
    with pytest.raises(KernelError, match=f"layer kernel 'K': .*{message}"):
        register_layer_kernel("K", **arguments)
    assert registry.list_layer_kernels("K") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give exactly one of func_impl, repo, repo_id .got none"),
        ({"func_impl": torch.relu, "repo_id": "a/b"}, "exactly one of .* .got func_impl, repo_id"),
        ({"func_impl": torch.relu, "revision": "main"}, "version and revision belong to repo_id"),
        ({"repo_id": "a/b", "version": 1, "revision": "main"}, "give version or revision, not both"),
        ({"func_impl": 3}, "func_impl must be a callable or the name of one"),
        ({"func_impl": "NoSuch"}, "no function kernel is named 'NoSuch'; there are TileGymAttention, TileGymRoPE"),
        ({"repo": torch.relu}, "repo must be an object with a method load"),
        ({"func_impl": torch.relu, "device": "gpu"}, "unknown device 'gpu'"),
        ({"func_impl": torch.relu, "mode": "fast"}, "unknown mode 'fast'"),
    ],
)
def test_sources_of_functions(arguments, message):
    with pytest.raises(KernelError, match=message):
        register_function_kernel(func_name="f", target_module="pkg.mod", **arguments)
    assert registry.list_function_kernels() == []


def test_names_of_functions():
    for name, module in (("f()", "m"), ("", "m"), ("f", ""), (None, "m")):
        with pytest.raises(KernelError, match="func_name must be the name of a function"):
            register_function_kernel(func_name=name, target_module=module, func_impl=torch.relu)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"version": 1}, "org/repo@v1"),
        ({"version": "2"}, "org/repo@v2"),
        ({"version": "0.1.0"}, "org/repo@v0.1.0"),
        ({"revision": "abc"}, "org/repo@abc"),
        ({}, "org/repo@main"),
    ],
)
def test_version_or_revision(given, expected):
    register_layer_kernel("K", repo_id="org/repo", layer_name="L", **given)
    assert str(registry.find_layer_kernel("K", "cuda").source) == f"hub {expected}:L"


def test_func_repository_protocol():
    assert isinstance(kernels.LayerRepository("a/b", layer_name="L", version=1), FuncRepositoryProtocol)
    assert not isinstance(torch.relu, FuncRepositoryProtocol)


@pytest.mark.parametrize("layer_class", [torch.relu, nn.Linear(2, 2), int, None])
def test_only_module_classes_are_bound(layer_class):
    with pytest.raises(KernelError, match="binds torch.nn.Module classes"):
        register_external_layer(layer_class, "K")


def test_binding_does_not_change_the_class():
    before = dict(vars(Scale))
    register_external_layer(Scale, "K")
    assert dict(vars(Scale)) == before


def batch():
    return {
        "layers": {"K": {"layer_class": ScaleKernel, "mode": ["train", "compile"], "device": "cpu"}},
        "functions": {
            "f": {"target_module": "pkg.mod", "func_impl": torch.relu},
            "g": {"target_module": "pkg.mod", "repo_id": "org/repo", "version": 1},
            "other f": {"target_module": "pkg.other", "func_name": "f", "func_impl": torch.relu},
        },
    }


def test_batch():
    register_kernels(batch())
    assert registry.find_layer_kernel("K", "cpu", "train").source.kernel is ScaleKernel
    assert {k.target for k in registry.list_function_kernels()} == {"pkg.mod.f", "pkg.mod.g", "pkg.other.f"}


def test_batch_does_not_change_the_callers_dict():
    config, untouched = batch(), batch()
    shallow = copy.copy(config["layers"]["K"])
    register_kernels(config)
    assert config == untouched
    assert config["layers"]["K"]["mode"] is shallow["mode"]


def test_batches_of_one_kind():
    register_layer_batch(batch()["layers"])
    assert registry.list_layer_kernels("K") and not registry.list_function_kernels()
    register_function_batch(batch()["functions"])
    assert len(registry.list_function_kernels()) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["layers"]["K"].update(mod="train"), "layers.K.mod: Extra inputs"),
        (lambda c: c["layers"]["K"].update(mode="fast"), "layers.K: layer kernel 'K': unknown mode 'fast'"),
        (lambda c: c["layers"]["K"].update(device="gpu"), "layers.K: .*unknown device 'gpu'"),
        (lambda c: c["layers"]["K"].update(repo_id="a/b"), "layers.K: .*exactly one of"),
        (lambda c: c["functions"]["f"].pop("target_module"), "functions.f.target_module: Field required"),
        (lambda c: c["functions"]["g"].update(version=1.5), "functions.g.version.*valid"),
        (lambda c: c["functions"]["g"].update(revision="main"), "functions.g: .*not both"),
        (lambda c: c.update(layer={}), "layer: Extra inputs"),
        (lambda c: c.update(layers=[ScaleKernel]), "layers: .*dictionary"),
    ],
)
def test_batch_registers_all_or_nothing(change, message):
    config = batch()
    change(config)
    with pytest.raises(KernelError, match=f"(?s)register_kernels: nothing was registered:.*{message}"):
        register_kernels(config)
    assert registry.list_layer_kernels("K") == registry.list_function_kernels() == []


def test_batch_lists_every_problem():
    config = batch()
    config["layers"]["K"]["mode"] = "fast"
    config["functions"]["g"]["device"] = "gpu"
    with pytest.raises(KernelError, match="(?s)layers.K: .*\n.*functions.g: "):
        register_kernels(config)
    with pytest.raises(KernelError, match="expected a dict with 'layers' and 'functions', got list"):
        register_kernels([])

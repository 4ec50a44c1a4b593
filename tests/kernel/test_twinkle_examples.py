"""The examples that users of Twinkle's kernel module know, line for line, with ``tilegym.kernel`` in its place."""

import json

import pytest
import torch
import torch.nn as nn

from tilegym.errors import KernelWarning
from tilegym.kernel import registry
from tilegym.kernel import report

from .fakes import run_offline

HUB_EXAMPLE = """
    import json
    import torch
    import torch.nn as nn
    from tilegym.kernel import (
        kernelize_model,
        register_layer_kernel,
        register_external_layer,
    )

    # 1) Define the custom layer
    class SiluAndMul(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x1, x2 = x.chunk(2, dim=-1)
            return nn.functional.silu(x1) * x2

    # 2) Register the Hub kernel and bind the layer
    register_layer_kernel(
        kernel_name="SiluAndMulKernel",
        repo_id="kernels-community/activation",
        layer_name="SiluAndMul",
        device="cuda",
        mode="train",
    )
    register_external_layer(SiluAndMul, "SiluAndMulKernel")

    # 3) Apply to a model
    class SimpleModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.activation = SiluAndMul()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.activation(x)

    model = SimpleModel()
    model = kernelize_model(model, mode="train", device="cuda", use_fallback=True)

    from tilegym.kernel import report
    x = torch.randn(3, 8, requires_grad=True)
    y = model(x)
    y.sum().backward()
    print(json.dumps({
        "replaced": [(e.name, e.source) for e in report(model).replaced],
        "forward": model.activation.forward.__func__.__globals__["__file__"],
        "equal": torch.equal(y, SiluAndMul()(x)),
        "gradient": x.grad is not None,
    }))
"""


def test_local_kernel_repo(local_repo):
    from transformers import Qwen2Config
    from transformers import Qwen2ForCausalLM
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    from tilegym.kernel import kernelize_model
    from tilegym.kernel import register_external_layer
    from tilegym.kernel import register_layer_kernel

    register_layer_kernel(
        kernel_name="MyAwesomeMLP",
        repo_path=str(local_repo),
        package_name="my_kernels",
        layer_name="Qwen2MLPTrainingKernel",
        device="cuda",
        mode="train",
    )
    register_external_layer(Qwen2MLP, "MyAwesomeMLP")
    config = Qwen2Config(
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=256,
        use_cache=False,
        vocab_size=500,
    )
    model = Qwen2ForCausalLM(config)
    before = model(torch.arange(8)[None]).logits

    model = kernelize_model(model, mode="train", device="cuda", use_fallback=True)

    (entry,) = report(model).replaced
    assert (entry.name, entry.original, entry.kernel) == ("model.layers.0.mlp", "Qwen2MLP", "MyAwesomeMLP")
    assert entry.source == f"{local_repo / 'my_kernels'}:Qwen2MLPTrainingKernel"
    assert model.model.layers[0].mlp.forward.__func__.__globals__["__file__"] == str(
        local_repo / "my_kernels/layers.py"
    )
    assert type(model.model.layers[0].mlp) is Qwen2MLP
    assert torch.equal(model(torch.arange(8)[None]).logits, before)


def test_hub_kernel_repo(hub_cache):
    """Through the loader of `kernels`, from a cache laid out as huggingface_hub lays it out."""
    found = json.loads(run_offline(HUB_EXAMPLE, hub_cache))
    assert found["replaced"] == [["activation", "hub kernels-community/activation@main:SiluAndMul"]]
    assert found["forward"].startswith(str(hub_cache)) and found["forward"].endswith("/layers.py")
    assert found["equal"] and found["gradient"]


def test_function_batch(math_ops):
    from tilegym.kernel import kernelize_model
    from tilegym.kernel import register_kernels

    config = {
        "functions": {
            "add": {
                "target_module": "my_pkg.math_ops",
                "func_impl": lambda x, y: x + y + 1,
                "device": "cuda",
                "mode": "inference",
            },
        },
    }
    register_kernels(config)
    assert kernelize_model(model=None, mode="inference", device="cuda", use_fallback=True) is None

    assert math_ops.add(1, 2) == 4
    assert [entry.name for entry in report(None).replaced] == ["my_pkg.math_ops.add"]


def test_function_sources(math_ops, capsys):
    from tilegym.kernel import kernelize_model
    from tilegym.kernel.function import apply_function_kernel
    from tilegym.kernel.function import register_function_kernel

    TARGET_MODULE = "my_pkg.math_ops"

    # 1) Direct implementation
    def fast_add(x, y):
        return x + y + 1

    register_function_kernel(
        func_name="add",
        target_module=TARGET_MODULE,
        func_impl=fast_add,
        device="cuda",
        mode="inference",
    )

    # 2) Repo object (FuncRepositoryProtocol)
    class MyFuncRepo:
        def load(self):
            return MyKernelFunc

    class MyKernelFunc(nn.Module):
        def forward(self, x, y):
            return x * y

    register_function_kernel(
        func_name="mul",
        target_module=TARGET_MODULE,
        repo=MyFuncRepo(),
        device="cuda",
        mode="compile",
    )

    # 3) Hub repo
    register_function_kernel(
        func_name="silu_and_mul",
        target_module="my_pkg.activations",
        repo_id="kernels-community/activation",
        revision="main",  # or version="0.1.0"
        device="cuda",
        mode="inference",
    )

    # 4) Apply function kernels. MyKernelFunc does not say that it can be compiled, which it is registered for.
    with pytest.warns(KernelWarning, match="MyKernelFunc does not say that torch.compile can trace it"):
        applied = apply_function_kernel(
            target_module=TARGET_MODULE,
            device="cuda",
            mode="inference",
            strict=False,
        )
    print("patched:", applied)
    assert capsys.readouterr().out == "patched: ['my_pkg.math_ops.add']\n"
    assert math_ops.add is fast_add and math_ops.mul(2, 3) == 6

    # 5) Optional: unified entry via kernelize_model
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.warns(KernelWarning, match="there is no module 'my_pkg.activations' to patch"):
        kernelize_model(model=model, mode="inference", device="cuda", use_fallback=True)

    assert [entry.name for entry in report(model).replaced] == ["my_pkg.math_ops.add"]
    assert math_ops.add(1, 2) == 4

    # A compiled kernel is one for eager inference too, once it says so.
    MyKernelFunc.can_torch_compile = True
    applied = apply_function_kernel(target_module=TARGET_MODULE, device="cuda", mode="inference", strict=False)
    assert applied == ["my_pkg.math_ops.add", "my_pkg.math_ops.mul"]
    assert math_ops.mul.__self__.__class__ is MyKernelFunc


UNIFIED_EXAMPLE = """
    import json
    import torch.nn as nn
    from tilegym.kernel import register_kernels, kernelize_model, report

    # 1) Register layer + function kernels
    config = {
        "layers": {
            "linear": {
                "repo_id": "kernels-community/linear",
                "layer_name": "Linear",
                "version": "0.1.0",
                "device": "cuda",
                "mode": "train",
            },
            "conv2d": {
                "repo_path": "/path/to/local/repo",
                "package_name": "my_kernels",
                "layer_name": "Conv2d",
                "device": "cuda",
            },
        },
        "functions": {
            "add": {
                "target_module": "my_pkg.math_ops",
                "func_impl": lambda x, y: x + y + 1,
                "device": "cuda",
                "mode": "inference",
            },
            "relu": {
                "target_module": "my_pkg.activations",
                "repo_id": "kernels-community/activation",
                "revision": "main",
                "device": "cuda",
            },
        },
    }
    register_kernels(config)

    # 2) Apply via kernelize_model
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    kernelize_model(model=model, mode="train", device="cuda", use_fallback=True)

    import my_pkg.activations
    from tilegym.kernel import registry
    print(json.dumps({
        "replaced": [(e.name, e.source) for e in report(model).replaced],
        "skipped": [(e.name, e.why) for e in report(model).skipped],
        "layers": [(k.name, k.device, str(k.mode), str(k.source)) for k in registry.list_layer_kernels()][-2:],
        "relu": my_pkg.activations.relu.__code__.co_filename,
    }))
"""


def test_unified_batch(hub_cache, package, tmp_path):
    package("my_pkg.math_ops", "def add(x, y):\n    return x + y\n")
    package("my_pkg.activations", "def relu(x):\n    return x.relu()\n")
    found = json.loads(run_offline(UNIFIED_EXAMPLE, hub_cache, PYTHONPATH=str(tmp_path)))
    assert found["replaced"] == [["my_pkg.activations.relu", "hub kernels-community/activation@main:relu"]]
    assert found["skipped"] == [
        [
            "my_pkg.math_ops.add",
            "no kernel for device cuda and mode train; it is registered for cuda/inference",
        ]
    ]
    assert found["layers"] == [
        ["linear", "cuda", "train", "hub kernels-community/linear@v0.1.0:Linear"],
        ["conv2d", "cuda", "any", "/path/to/local/repo/my_kernels:Conv2d"],
    ]
    assert found["relu"].startswith(str(hub_cache))


def test_nothing_is_left_behind():
    assert not registry.list_function_kernels() and not registry.list_external_layers()

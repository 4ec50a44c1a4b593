import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tilegym.kernel import kernelize_model
from tilegym.kernel import register_external_layer
from tilegym.kernel import register_kernels
from tilegym.kernel import register_layer_kernel
from tilegym.kernel import registry
from tilegym.kernel import report
from tilegym.kernel import unkernelize_model
from tilegym.kernel.function import register_function_kernel

from .fakes import Scale
from .fakes import ScaleKernel

THREADS = 8


@pytest.fixture(autouse=True)
def switch_often():
    import sys

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(work) -> list:
    """Runs ``work(i)`` in all threads at once."""
    barrier = threading.Barrier(THREADS)

    def start(i):
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(start, range(THREADS)))


def test_registering_loses_nothing():
    def work(i):
        for j in range(40):
            register_layer_kernel(f"kernel {j}", layer_class=ScaleKernel, device="cpu", mode=None if i % 2 else "train")
            register_kernels({"functions": {f"f{i}_{j}": {"target_module": "pkg.mod", "func_impl": torch.relu}}})
            registry.list_layer_kernels()
            registry.list_function_kernels()

    in_threads(work)
    assert sum(len(registry.list_layer_kernels(f"kernel {j}")) for j in range(40)) == 80
    assert len(registry.list_function_kernels()) == THREADS * 40


def test_a_batch_is_seen_whole():
    def work(i):
        for j in range(60):
            if i % 2:
                names = [f"f{i}_{j}_{k}" for k in range(10)]
                functions = {n: {"target_module": "pkg.mod", "func_impl": torch.relu} for n in names}
                register_kernels({"functions": functions})
            else:
                assert len(registry.list_function_kernels()) % 10 == 0

    in_threads(work)
    assert len(registry.list_function_kernels()) == THREADS // 2 * 600


def test_kernelizing_many_models(math_ops, local_repo):
    """Layers, a package that all threads want to import first, and one function that all of them claim."""
    layers = local_repo / "my_kernels/layers.py"
    layers.write_text(
        "import torch.nn as nn\nclass Relu(nn.Module):\n    def forward(self, input):\n        return input * 3\n"
    )
    register_layer_kernel("Scale", layer_class=ScaleKernel, device="cpu")
    register_layer_kernel("Relu", repo_path=local_repo, package_name="my_kernels", device="cpu")
    register_external_layer(Scale, "Scale")
    register_external_layer(nn.ReLU, "Relu")
    register_function_kernel(func_name="add", target_module="my_pkg.math_ops", func_impl=lambda x, y: x - y)
    original = math_ops.add

    def work(i):
        model = nn.Sequential(*(Scale() for _ in range(10)), nn.ReLU())
        for _ in range(5):
            kernelize_model(model, ("train", "inference")[i % 2], use_fallback=False)
            assert len(report(model).replaced) == 12
            assert model(torch.ones(1)) == 3 * 2**10 and math_ops.add(1, 2) == -1
            unkernelize_model(model)
        return kernelize_model(model)

    models = in_threads(work)
    assert math_ops.add is not original
    for model in models:
        assert len(report(model).replaced) == 12
    in_threads(lambda i: unkernelize_model(models[i]))
    assert math_ops.add is original
    assert all("forward" not in vars(layer) for model in models for layer in model)


def test_one_model_in_many_threads():
    register_layer_kernel("Scale", layer_class=ScaleKernel, device="cpu")
    register_external_layer(Scale, "Scale")
    model = nn.Sequential(*(Scale() for _ in range(20)))
    in_threads(lambda i: [kernelize_model(model, use_fallback=False) for _ in range(10)])
    assert len(report(model).replaced) == 20
    unkernelize_model(model)
    assert not [name for layer in model.modules() for name in vars(layer) if name == "forward" or "tilegym" in name]

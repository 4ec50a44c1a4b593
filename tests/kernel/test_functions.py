import copy
import gc
import importlib
import sys

import pytest
import torch
from torch import nn

from tilegym.errors import KernelError
from tilegym.errors import KernelWarning
from tilegym.kernel import kernelize_model
from tilegym.kernel import registry
from tilegym.kernel import report
from tilegym.kernel import unkernelize_model
from tilegym.kernel.function import apply_function_kernel
from tilegym.kernel.function import register_function_kernel
from tilegym.transformers.patching import PatchSet

TARGET = "my_pkg.math_ops"


def other(x, y):
    return x - y


def third(x, y):
    return x + 10 * y


def register(name="add", implementation=other, **arguments):
    register_function_kernel(**{"func_name": name, "target_module": TARGET, "func_impl": implementation, **arguments})


def test_direct_implementation(math_ops):
    register()
    assert apply_function_kernel() == [f"{TARGET}.add"]
    assert math_ops.add is other
    unkernelize_model(None)
    assert math_ops.add(1, 2) == 3


def test_each_function_is_named_once(math_ops):
    for device in ("cpu", "cuda", None):
        for mode in ("inference", "train", None):
            register(device=device, mode=mode)
    register("mul")
    assert apply_function_kernel(device="cpu", mode="train") == [f"{TARGET}.add", f"{TARGET}.mul"]
    assert apply_function_kernel(device="cpu", mode="train") == [f"{TARGET}.add", f"{TARGET}.mul"]


def test_the_nearest_kernel_is_taken(math_ops):
    register(implementation=third)
    register(implementation=other, device="cuda", mode="train")
    apply_function_kernel(device="cuda", mode="inference")  # a training kernel for the device
    assert math_ops.add is other
    apply_function_kernel(device="cpu", mode="train")
    assert math_ops.add is third
    unkernelize_model(None)
    assert math_ops.add(1, 2) == 3


@pytest.mark.parametrize(
    ("registered", "applied"),
    [
        ({"device": "npu"}, {"device": "cuda"}),
        ({"mode": "inference"}, {"mode": "train"}),
        ({"mode": "train"}, {"mode": "compile"}),
        ({"device": "cpu", "mode": "inference"}, {"device": "cpu", "mode": "train"}),
        ({}, {"target_module": "my_pkg.other"}),
    ],
)
def test_filters_filter(math_ops, registered, applied):
    register(**registered)
    with pytest.warns(KernelWarning, match="no registered function kernel matches") as warned:
        assert apply_function_kernel(**applied) == []
        assert apply_function_kernel(**applied) == []
    assert len(warned) == 1
    assert math_ops.add(1, 2) == 3
    with pytest.raises(KernelError, match="nothing was patched: no registered function kernel matches"):
        apply_function_kernel(**applied, strict=True)
    assert apply_function_kernel(strict=True) == [f"{TARGET}.add"]


def test_missing_module(math_ops):
    register("add", target_module="my_pkg.nothing")
    register()
    with pytest.warns(KernelWarning) as warned:
        for _ in range(2):
            assert apply_function_kernel() == [f"{TARGET}.add"]
    assert [str(w.message) for w in warned] == [
        "my_pkg.nothing.add was not replaced: there is no module 'my_pkg.nothing' to patch"
    ]
    unkernelize_model(None)
    with pytest.raises(KernelError, match="there is no module 'my_pkg.nothing' to patch"):
        apply_function_kernel(strict=True)
    assert math_ops.add(1, 2) == 3, "strict patches all or nothing"


def test_missing_attribute_is_never_created(math_ops):
    register("sub")
    with pytest.warns(KernelWarning, match=f"'{TARGET}' has no function 'sub', and none is created"):
        assert apply_function_kernel() == []
    with pytest.raises(KernelError, match="has no function 'sub'"):
        apply_function_kernel(strict=True)
    assert not hasattr(math_ops, "sub")


def test_a_module_that_fails_to_import_says_why(package):
    package("my_pkg.math_ops", "def add(x, y):\n    return x\n")
    with pytest.raises(ModuleNotFoundError):
        package("my_pkg.broken", "import no_such_package\n")
    register("add", target_module="my_pkg.broken")
    with pytest.raises(KernelError, match="ModuleNotFoundError: No module named 'no_such_package'"):
        apply_function_kernel(strict=True)


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        (lambda x: x, r"its signature \(x\) does not fit my_pkg.math_ops.add\(x, y\): it takes no 'y'"),
        (lambda y, x: x, r"its parameters are in another order"),
        (3, r"load\(\) gave 3, which cannot be called"),
        (type("Stateful", (nn.Linear,), {}), "Stateful is stateful: it has a constructor"),
    ],
)
def test_unfit_kernels(math_ops, loaded, message):
    class Repo:
        def load(self):
            return loaded

    register(func_impl=None, repo=Repo())
    with pytest.raises(KernelError, match=f"{TARGET}.add was not replaced: .*{message}"):
        apply_function_kernel(strict=True)
    with pytest.warns(KernelWarning, match=message):
        assert apply_function_kernel() == []
    assert math_ops.add(1, 2) == 3


def test_mode_that_a_function_lacks(math_ops):
    def forward_only(x, y):
        return x

    forward_only.has_backward = False
    with pytest.raises(
        KernelError, match="function kernel for my_pkg.math_ops.add, registered for mode train: .* no ba"
    ):
        register(implementation=forward_only, mode="train")
    register(implementation=forward_only)
    with pytest.raises(KernelError, match="forward_only has no backward"):
        apply_function_kernel(mode="train", strict=True)
    with pytest.raises(KernelError, match="set can_torch_compile = True"):
        apply_function_kernel(mode="compile", strict=True)
    assert apply_function_kernel(mode="inference", strict=True)


def test_arguments_of_other_names(math_ops):
    register(implementation=lambda left, right: left * 100 + right)
    apply_function_kernel()
    assert math_ops.add(1, 2) == math_ops.add(1, y=2) == math_ops.add(y=2, x=1) == 102
    with pytest.raises(TypeError):
        math_ops.add(1, z=2)


MODEL = """
    import torch
    from torch import nn

    from my_pkg.math_ops import add
    from my_pkg.math_ops import add as plus
    from my_pkg import math_ops


    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.combine = plus

        def forward(self, x):
            return torch.stack([add(x, 1), plus(x, 1), math_ops.add(x, 1), self.combine(x, 1)])
"""


def test_reaches_what_the_models_modules_imported_by_name(math_ops, package):
    module = package("my_pkg.modeling", MODEL)
    elsewhere = package("other_pkg.user", "from my_pkg.math_ops import add\n")
    original = math_ops.add
    register()
    model = nn.Sequential(module.Layer())
    untouched = module.Layer()
    kernelize_model(model)
    assert torch.equal(model(torch.zeros(1)), torch.tensor([[-1.0]] * 4))
    assert module.add is module.plus is math_ops.add is other
    assert untouched.combine is original, "another instance's attributes are its own"
    assert elsewhere.add is original, "not a module of the model"
    assert [e.name for e in report(model).replaced] == [f"{TARGET}.add"]

    unkernelize_model(model)
    assert module.add is module.plus is math_ops.add is model[0].combine is original


def test_reaches_names_also_where_the_function_was_applied_before(math_ops, package):
    module = package("my_pkg.modeling", MODEL)
    original = math_ops.add
    register()
    apply_function_kernel()
    assert math_ops.add is other and module.add is original
    model = kernelize_model(module.Layer())
    assert module.add is model.combine is other
    unkernelize_model(model)
    assert math_ops.add is other, "what was applied without the model stays"
    unkernelize_model(None)
    assert math_ops.add is module.add is original


def test_a_function_stays_while_a_model_needs_it(math_ops):
    register()
    register(implementation=third, mode="train")
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    kernelize_model(first, "train")
    assert math_ops.add is third
    kernelize_model(second, "inference")
    assert math_ops.add is third, "a training kernel serves inference"
    unkernelize_model(first)
    assert math_ops.add is third
    unkernelize_model(second)
    assert math_ops.add(1, 2) == 3


def test_the_latest_kernel_is_in_force(math_ops):
    register(device="cpu")
    register(implementation=third, device="cuda")
    first = kernelize_model(nn.Linear(2, 2), device="cpu")
    second = kernelize_model(nn.Linear(2, 2), device="cuda")
    assert math_ops.add is third
    unkernelize_model(second)
    assert math_ops.add is other
    kernelize_model(first, device="cuda")
    assert math_ops.add is third
    kernelize_model(None, device="cpu")
    assert math_ops.add is other
    unkernelize_model(None)
    assert math_ops.add is third


def test_a_function_outlives_its_model(math_ops):
    register()
    model = kernelize_model(nn.Linear(2, 2))
    del model
    gc.collect()
    assert math_ops.add is other
    unkernelize_model(None)
    assert math_ops.add(1, 2) == 3


def test_a_module_that_is_imported_anew(math_ops, package):
    register()
    apply_function_kernel()
    del sys.modules[TARGET]
    again = importlib.import_module(TARGET)
    assert again.add(1, 2) == 3 and again is not math_ops
    assert apply_function_kernel(strict=True) == [f"{TARGET}.add"]
    assert again.add is other and math_ops.add(1, 2) == 3
    unkernelize_model(None)
    assert again.add(1, 2) == 3


def test_the_same_kernel_for_another_model_changes_nothing(math_ops):
    register(implementation=lambda left, right: left * 100 + right)
    first = kernelize_model(nn.Linear(2, 2))
    in_force = math_ops.add
    second = kernelize_model(nn.Linear(2, 2))
    assert math_ops.add is in_force
    unkernelize_model(first)
    assert math_ops.add is in_force
    unkernelize_model(second)
    assert math_ops.add(1, 2) == 3


def test_a_copy_has_no_claim(math_ops):
    register()
    model = kernelize_model(nn.Linear(2, 2))
    twin = copy.deepcopy(model)
    assert not report(twin).replaced and "copied" in report(twin).note
    unkernelize_model(twin)
    assert math_ops.add is other
    unkernelize_model(model)
    assert math_ops.add(1, 2) == 3


def test_without_fallback(math_ops):
    register(device="npu")
    register("mul")
    with pytest.raises(
        KernelError, match="my_pkg.math_ops.add .function.: no kernel for device cpu and mode inference"
    ):
        kernelize_model(nn.Linear(2, 2), use_fallback=False)
    assert math_ops.mul(2, 3) == 6
    assert kernelize_model(None, device="npu", use_fallback=False) is None
    assert math_ops.add is math_ops.mul is other


def test_a_function_that_cannot_be_put_there_leaves_none_behind(math_ops, monkeypatch):
    add, mul = math_ops.add, math_ops.mul
    replace_function = PatchSet.replace_function

    def refuses_mul(patches, module, name, *args):
        if name == "mul":
            raise RuntimeError("mul stays")
        return replace_function(patches, module, name, *args)

    register()
    register("mul")
    model, earlier = nn.Linear(2, 2), None
    for expected in (add, third):
        with monkeypatch.context() as m:
            m.setattr(PatchSet, "replace_function", refuses_mul)
            with pytest.raises(RuntimeError, match="mul stays"):
                kernelize_model(model)
            with pytest.raises(RuntimeError, match="mul stays"):
                apply_function_kernel()
            assert (math_ops.add, math_ops.mul) == (expected, mul)
            with pytest.raises(KernelError, match="not kernelized"):
                report(model)
            if earlier is None:  # and once more with a function in force
                registry.clear()
                register(implementation=third)
                earlier = kernelize_model(nn.Linear(2, 2))
                register()
                register("mul")
    unkernelize_model(earlier)
    assert math_ops.add is add


def test_kernels_for_other_uses_are_in_the_report_without_a_warning(math_ops, recwarn):
    register(device="npu", mode="train")
    model = kernelize_model(nn.Linear(2, 2))
    assert report(model).skipped[0].why == (
        "no kernel for device cpu and mode inference; it is registered for npu/train"
    )
    assert not [w for w in recwarn if issubclass(w.category, KernelWarning)]


def test_a_function_module_of_kernels(package):
    """`use_kernel_forward_from_hub` turns a function into a module; its forward's signature counts."""
    module = package(
        TARGET,
        """
        from kernels import use_kernel_forward_from_hub

        @use_kernel_forward_from_hub("Add")
        def add(x, y=2):
            return x + y
        """,
    )
    register(implementation=lambda a, b=2: a - b)
    assert apply_function_kernel(strict=True) == [f"{TARGET}.add"]
    assert module.add(3) == module.add(x=3) == 1
    unkernelize_model(None)
    assert isinstance(module.add, nn.Module) and module.add(3) == 5
    register(implementation=lambda a, b=3: a - b)
    with pytest.raises(KernelError, match="its 'b' defaults to 3, the original's to 2"):
        apply_function_kernel(strict=True)


def test_builtin_functions(package):
    module = package(TARGET, "from torch import relu\n")
    register("relu", implementation=torch.tanh)
    apply_function_kernel(strict=True)
    assert module.relu is torch.tanh and torch.relu is not torch.tanh


def test_switched_off(math_ops, monkeypatch, caplog):
    monkeypatch.setenv("TILEGYM_USE_KERNELS", "0")
    register()
    assert apply_function_kernel(strict=True) == []
    assert "apply_function_kernel did nothing: kernels are switched off" in caplog.text
    kernelize_model(None)
    assert math_ops.add(1, 2) == 3
    monkeypatch.setenv("TILEGYM_USE_KERNELS", "1")
    assert apply_function_kernel(strict=True)


def test_report_without_a_model(math_ops):
    with pytest.raises(KernelError, match="no function was kernelized without a model: there is no report"):
        report()
    register()
    kernelize_model(None, mode="train", device="npu")
    assert report().mode == "train" and report().device == "npu"
    assert report().replaced[0].source == f"{__name__}.other"


def test_registry_keeps_target_modules_unimported():
    register_function_kernel(func_name="f", target_module="antigravity", func_impl=other)
    assert "antigravity" not in sys.modules
    registry.clear()

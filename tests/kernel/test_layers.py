import copy
import pickle
import subprocess
import sys

import kernels
import pytest
import torch
from torch import nn

from tilegym.errors import KernelError
from tilegym.errors import KernelWarning
from tilegym.kernel import apply_layer_kernel
from tilegym.kernel import kernelize_model
from tilegym.kernel import register_external_layer
from tilegym.kernel import register_layer_kernel
from tilegym.kernel import report
from tilegym.kernel import unkernelize_model

from .fakes import Scale
from .fakes import ScaleKernel
from .fakes import WrongKernel
from .fakes import calls
from .fakes import scales


class Same(Scale):
    """Inherits its forward."""


class Own(Scale):
    def forward(self, x):
        return x * self.factor * 3


class Raises:
    def load(self):
        raise OSError("the disk is gone")


@pytest.fixture
def scale_kernel():
    register_layer_kernel("Kernel", layer_class=ScaleKernel, device="cpu")
    register_external_layer(Scale, "Kernel")


x = torch.arange(4.0)


def test_exact_type_by_default(scale_kernel):
    model = scales(Scale, Same, Own)
    with pytest.warns(KernelWarning, match="by 'Kernel': a subclass of Scale, which alone is bound") as warned:
        kernelize_model(model)
        kernelize_model(model)
    assert [str(w.message).split()[0] for w in warned] == ["Same", "Own"]
    assert torch.equal(model(x), x * 2 * 2 * 2 * 3)
    assert calls == ["ScaleKernel"]
    assert [e.name for e in report(model).replaced] == ["0"]
    assert [(e.name, e.original) for e in report(model).skipped] == [("1", "Same"), ("2", "Own")]


def test_subclasses_on_request():
    register_layer_kernel("Kernel", layer_class=ScaleKernel, device="cpu")
    register_external_layer(Scale, "Kernel", subclasses=True)
    model = kernelize_model(scales(Scale, Same, Own))
    assert [e.original for e in report(model).replaced] == ["Scale", "Same", "Own"]


def test_a_binding_of_its_own_comes_first():
    register_layer_kernel("Kernel", layer_class=ScaleKernel, device="cpu")
    register_layer_kernel("Other", layer_class=WrongKernel, device="cpu")
    register_external_layer(Scale, "Kernel", subclasses=True)
    register_external_layer(Own, "Other")
    model = kernelize_model(scales(Scale, Own))
    assert [e.kernel for e in report(model).replaced] == ["Kernel", "Other"]


def test_classes_prepared_for_kernels():
    """`use_kernel_forward_from_hub` is obeyed, and not inherited by a subclass with its own forward."""

    @kernels.use_kernel_forward_from_hub("Kernel")
    class Prepared(Scale):
        def forward(self, x):
            return x * self.factor

    class Heir(Prepared):
        pass

    class Changed(Prepared):
        def forward(self, x):
            return x

    class Conditional(Scale):
        def forward(self, x):
            return x * self.factor

    kernels.replace_kernel_forward_from_hub(Conditional, "Kernel", condition=lambda layer: bool(layer.factor > 5))
    model = nn.Sequential(Prepared(), Heir(), Changed(), Conditional(2.0), Conditional(6.0))
    with pytest.warns(KernelWarning, match="replaced nothing"):
        assert kernelize_model(model) is model

    register_layer_kernel("Kernel", layer_class=ScaleKernel, device="cpu")
    with pytest.warns(KernelWarning):
        kernelize_model(model)
    assert [e.name for e in report(model).replaced] == ["0", "1", "4"]
    assert {e.name: e.why for e in report(model).skipped} == {
        "2": "a subclass of Prepared with its own forward; bind it with register_external_layer",
        "3": "its kernel_condition says no",
    }


def test_only_the_given_instance_changes(scale_kernel):
    model, other = scales(), scales()
    kernelize_model(model)
    other(x)
    assert not calls and "forward" not in vars(other[0]) and "forward" in vars(model[0])
    assert "kernel_layer_name" not in vars(Scale)
    model(x)
    assert len(calls) == 2


def test_the_model_stays_usable(scale_kernel):
    model = scales()
    plain = copy.deepcopy(model)
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    kernelize_model(model, "train")

    assert type(model) is nn.Sequential and type(model[0]) is Scale and isinstance(model[0], nn.Module)
    assert print_of(model) == print_of(plain)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    model.load_state_dict({"0.factor": torch.tensor(3.0), "1.factor": torch.tensor(1.0)})
    assert torch.equal(model(x), x * 3) and torch.equal(seen[0], x * 3)
    model.to(torch.float64)
    assert model(x.double()).dtype is torch.float64


def print_of(model) -> str:
    return repr(model) + str(model)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_is_kernelized_by_itself(scale_kernel, duplicate):
    model = kernelize_model(scales())
    twin = duplicate(model)
    with torch.no_grad():
        twin[0].factor.fill_(5.0)
    assert torch.equal(twin(x), x * 10) and torch.equal(model(x), x * 4)
    assert len(calls) == 4
    assert [e.name for e in report(twin).replaced] == ["0", "1"]

    unkernelize_model(twin)
    twin(x)
    assert len(calls) == 4
    assert not [name for name in (*vars(twin), *vars(twin[0])) if "tilegym" in name or name == "forward"]
    model(x)
    assert len(calls) == 6


def test_pickle_in_another_process(tmp_path):
    """The kernel comes along where its package can be loaded; where not, the layer computes as its class does."""
    code = "import pickle, sys, torch\n"
    for name in ("there", "gone"):
        layers = tmp_path / name / "layers.py"
        layers.parent.mkdir()
        layers.write_text(
            "import torch.nn as nn\nclass Relu(nn.Module):\n    def forward(self, input):\n        return input * 7\n"
        )
        register_layer_kernel(name, repo_path=layers.parent, layer_name="Relu", device="cpu")
        register_external_layer(nn.ReLU, name)
        model = kernelize_model(nn.Sequential(nn.ReLU()), use_fallback=False)
        (tmp_path / f"{name}.pickle").write_bytes(pickle.dumps(model))
        code += f"model = pickle.load(open({str(tmp_path / name) + '.pickle'!r}, 'rb'))\n"
        code += "print(model(torch.tensor([-1.0, 2.0])).tolist())\n"
    layers.unlink()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[-7.0, 14.0]\n[0.0, 2.0]\n"
    assert "kernel 'gone' of a pickled ReLU could not be loaded" in done.stderr


def test_pickle_of_a_kernel_that_cannot_be_pickled():
    class Local(nn.Module):
        def forward(self, x):
            return x * self.factor * 5

    class Repo:
        loads = 0

        def load(self):
            Repo.loads += 1
            return Local

    for source in ({"layer_class": Local}, {"repo": Repo()}):
        register_layer_kernel("Kernel", device="cpu", **source)
        register_external_layer(Scale, "Kernel")
        model = kernelize_model(scales())
        assert torch.equal(copy.deepcopy(model)(x), x * 100)
        with pytest.warns(KernelWarning, match="'Kernel' of a pickled Scale could not be loaded, .* cannot be pickled"):
            twin = pickle.loads(pickle.dumps(model))
        assert torch.equal(twin(x), x * 4)
    assert Repo.loads == 1, "a copy has the function that its original has"


def test_unkernelize(scale_kernel):
    model = scales()
    before = [dict(vars(m)) for m in model.modules()]
    kernelize_model(model)
    assert unkernelize_model(model) is model
    assert [dict(vars(m)) for m in model.modules()] == before
    model(x)
    assert not calls
    with pytest.raises(KernelError, match="this Sequential is not kernelized: there is no report"):
        report(model)
    unkernelize_model(model)
    for function in (report, unkernelize_model):
        with pytest.raises(KernelError, match="a torch.nn.Module, or None for the functions: this is str"):
            function("model")


def test_kernelizing_again_replaces_what_was_there():
    register_layer_kernel("Kernel", layer_class=ScaleKernel, device="cpu", mode="inference")
    register_layer_kernel("Kernel", layer_class=WrongKernel, device="cpu", mode="train+compile")
    register_external_layer(Scale, "Kernel")
    model = kernelize_model(scales(), "inference")
    assert report(model).replaced[0].source.endswith("ScaleKernel")
    kernelize_model(model, "train")
    assert report(model).replaced[0].source.endswith("WrongKernel")
    with pytest.warns(KernelWarning, match="no kernel 'Kernel' for device npu"):
        kernelize_model(model, "train", device="npu")
    assert "forward" not in vars(model[0])
    assert "it is registered for cpu/inference, cpu/train+compile" in report(model).skipped[0].why


@pytest.mark.parametrize(
    ("applied", "kernel"),
    [
        ("inference", "inference"),
        ("train", "train+compile"),
        ("compile", "compile"),
        ("train+compile", "train+compile"),
    ],
)
def test_modes_of_a_kernel(applied, kernel):
    """Of kernels registered for every mode the nearest is taken, by the chains of `kernels`."""
    sources = {}
    for mode in ("inference", "compile", "train+compile"):
        sources[mode] = type(f"For_{mode.replace('+', '_')}", (ScaleKernel,), {})
        register_layer_kernel("Kernel", layer_class=sources[mode], device="cpu", mode=mode)
    register_external_layer(Scale, "Kernel")
    model = kernelize_model(scales(), applied)
    assert report(model).replaced[0].source.endswith(sources[kernel].__qualname__)


def test_device_of_the_parameters_by_default():
    register_layer_kernel("Kernel", layer_class=ScaleKernel)  # for cuda
    register_external_layer(Scale, "Kernel")
    model = scales()
    with pytest.warns(KernelWarning, match="no kernel 'Kernel' for device cpu and mode inference; .* cuda/any"):
        kernelize_model(model)
    assert report(model).device == "cpu" and not report(model).replaced
    assert report(kernelize_model(model, device="cuda:0")).device == "cuda"
    assert len(report(model).replaced) == 2


def test_report_is_a_table(scale_kernel):
    model = nn.Sequential(scales(), Own())
    with pytest.warns(KernelWarning):
        kernelize_model(model, "train")
    lines = str(report(model)).splitlines()
    assert lines[0] == "mode train, device cpu: 2 replaced, 1 not"
    assert lines[1].split() == "name original kernel from count why or check".split()
    assert lines[2].split()[:6] == ["replaced", "*.*", "Scale", "Kernel", "kernel.fakes.ScaleKernel", "2"]
    assert lines[3].startswith("not replaced  *     Own       Kernel") and lines[3].endswith("pass subclasses=True")


def test_a_mistyped_name_is_met_by_the_names_like_it(scale_kernel):
    register_layer_kernel("ScaledLayers", layer_class=ScaleKernel)
    register_external_layer(nn.ReLU, "ScaledLyers")
    with pytest.raises(KernelError, match=r"no kernel 'ScaledLyers' .*; is it one of ScaledLayers\?"):
        kernelize_model(nn.Sequential(Scale(), nn.ReLU()), use_fallback=False)


def test_without_fallback_everything_missing_is_listed(scale_kernel):
    register_external_layer(nn.ReLU, "Nothing")
    register_layer_kernel("Npu", layer_class=ScaleKernel, device="npu")
    register_external_layer(Same, "Npu")
    model = nn.Sequential(Scale(), nn.ReLU(), Same())
    with pytest.raises(KernelError) as caught:
        kernelize_model(model, use_fallback=False)
    assert str(caught.value).splitlines() == [
        "use_fallback=False, and these have no kernel; nothing was changed:",
        "  1 (ReLU): no kernel 'Nothing' for device cpu and mode inference; register one with register_layer_kernel",
        "  2 (Same): no kernel 'Npu' for device cpu and mode inference; it is registered for npu/any",
    ]
    assert "forward" not in vars(model[0])
    with pytest.raises(KernelError, match="no layer of the model is bound to a kernel and no function has one"):
        kernelize_model(nn.Sequential(nn.Tanh()), use_fallback=False)
    assert report(kernelize_model(scales(), use_fallback=False)).replaced


@pytest.mark.parametrize("apply", [kernelize_model, apply_layer_kernel])
def test_only_models_are_kernelized(apply):
    with pytest.raises(KernelError, match="kernels are applied to a torch.nn.Module.*, this is 'model'"):
        apply("model")
    with pytest.raises(KernelError, match="there is none: pass the model|applied to a torch.nn.Module, this is None"):
        apply(None, verify=True)


def test_nothing_to_replace():
    with pytest.warns(KernelWarning, match="kernelize_model replaced nothing: no layer of the model is bound"):
        model = kernelize_model(scales())
    assert "register_external_layer" in str(report(model))


def test_failed_call_leaves_an_earlier_one_in_force(scale_kernel):
    model = kernelize_model(scales())
    before = report(model)
    with pytest.raises(KernelError):
        kernelize_model(model, device="npu", use_fallback=False)
    assert report(model) is before and "forward" in vars(model[0])


def test_an_error_in_one_kernel_is_reported(scale_kernel):
    register_layer_kernel("Broken", repo=Raises(), device="cpu")
    register_external_layer(nn.ReLU, "Broken")
    model = nn.Sequential(Scale(), nn.ReLU())
    why = "kernel 'Broken' could not be loaded from repository Raises: OSError: the disk is gone"
    with pytest.warns(KernelWarning, match=f"ReLU was not replaced: {why}"):
        kernelize_model(model)
    assert torch.equal(model(x), x * 2) and calls == ["ScaleKernel"]
    assert "forward" not in vars(model[1])
    assert [(e.name, e.why) for e in report(model).skipped] == [("1", why)]
    with pytest.raises(KernelError, match="the disk is gone"):
        kernelize_model(model, use_fallback=False)


def test_forward_of_another_library_is_left_alone(scale_kernel):
    model = scales()
    model[0].forward = lambda x: x * 100
    with pytest.warns(KernelWarning, match="its forward has been replaced already, by .*lambda"):
        kernelize_model(model)
    assert torch.equal(model(x), x * 200)
    unkernelize_model(model)
    assert torch.equal(model(x), x * 200)


def test_after_kernelize_of_kernels(scale_kernel):
    """Where `kernels` found nothing it leaves the class's forward on the instance; that is not in the way."""

    @kernels.use_kernel_forward_from_hub("Unmapped")
    class Prepared(Scale):
        def forward(self, x):
            return x * self.factor

    register_external_layer(Prepared, "Kernel")
    model = kernels.kernelize(nn.Sequential(Prepared()), mode=kernels.Mode.INFERENCE, device="cpu")
    assert "forward" in vars(model[0])
    kernelize_model(model, use_fallback=False)
    model(x)
    assert calls == ["ScaleKernel"]
    unkernelize_model(model)
    assert torch.equal(model(x), x * 2) and len(calls) == 1


def test_root_of_the_model(scale_kernel):
    model = kernelize_model(Scale(), use_fallback=False)
    model(x)
    assert calls and report(model).replaced[0].name == "(the model)"


def test_apply_layer_kernel_leaves_functions(scale_kernel, math_ops):
    from tilegym.kernel.function import register_function_kernel

    register_function_kernel(func_name="add", target_module="my_pkg.math_ops", func_impl=lambda x, y: 0)
    model = scales()
    assert apply_layer_kernel(model, "train") is model
    assert len(report(model).replaced) == 2 and math_ops.add(1, 2) == 3


def test_switched_off(scale_kernel, monkeypatch, caplog):
    kernelized = kernelize_model(scales())
    monkeypatch.setenv("TILEGYM_USE_KERNELS", "0")
    model = scales()
    assert kernelize_model(model, use_fallback=False) is model
    assert "kernelize_model did nothing: kernels are switched off (TILEGYM_USE_KERNELS=0)" in caplog.text
    assert not report(model).replaced and "TILEGYM_USE_KERNELS=0" in str(report(model))
    model(x)
    assert not calls
    assert kernelize_model(kernelized, "train") is kernelized and report(kernelized).mode == "inference"
    unkernelize_model(kernelized)
    assert "forward" not in vars(kernelized[0])
    with pytest.raises(KernelError, match="unknown mode"):
        kernelize_model(model, mode="fast")

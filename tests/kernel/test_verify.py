import pytest
import torch
from torch import nn

from tilegym.errors import KernelError
from tilegym.errors import KernelWarning
from tilegym.kernel import kernelize_model
from tilegym.kernel import register_external_layer
from tilegym.kernel import register_layer_kernel
from tilegym.kernel import report
from tilegym.kernel import verify

from .fakes import Norm
from .fakes import Scale
from .fakes import ScaleKernel
from .fakes import WrongKernel


class WrongGradient(nn.Module):
    def forward(self, x):
        return x * self.factor + (x - x.detach()) * 0.1


class NoParameterGradient(nn.Module):
    def forward(self, x):
        return x * self.factor.detach()


class HalfExact(nn.Module):
    """Rounds to bfloat16 on the way."""

    def forward(self, x):
        return (x.bfloat16() * self.factor.bfloat16()).to(x.dtype)


class WritesItsInput(nn.Module):
    def forward(self, x):
        return x.mul_(self.factor)


class OtherShape(nn.Module):
    def forward(self, x):
        return (x * self.factor)[None]


class NotANumber(nn.Module):
    def forward(self, x):
        return (x * self.factor).masked_fill(x > 0.9, float("nan"))


class Fails(nn.Module):
    def forward(self, x):
        raise RuntimeError("no such kernel image")


class TwoScales(nn.Module):
    def __init__(self):
        super().__init__()
        self.good = Scale()
        self.bad = Norm()
        self.unused = Scale()

    def forward(self, x, shift=0.0):
        return self.bad(self.good(x)) + shift


x = torch.linspace(-1, 1, 32).view(4, 8)


def bind(kernel, layer=Scale):
    register_layer_kernel(layer.__name__, layer_class=kernel, device="cpu")
    register_external_layer(layer, layer.__name__)


def test_right_kernels_stay_and_wrong_ones_do_not():
    bind(ScaleKernel)
    register_layer_kernel(
        "Wrong", layer_class=type("WrongNorm", (nn.Module,), {"forward": lambda self, x: x}), device="cpu"
    )
    register_external_layer(Norm, "Wrong")
    model = TwoScales()
    before = model(x)
    with pytest.warns(KernelWarning) as warned:
        kernelize_model(model, verify=True, sample_inputs=x)
    message = "Norm was not replaced by 'Wrong': differs from the original: output: off by"
    assert any(message in str(w.message) for w in warned)
    assert torch.equal(model(x), before)
    assert [(e.name, e.verified) for e in report(model).replaced] == [("good", True)]
    skipped = {e.name: e.why for e in report(model).skipped}
    assert set(skipped) == {"bad", "unused"}
    assert skipped["unused"] == "not verified: the forward of the sample inputs did not reach it"
    assert "verified" in str(report(model))
    with pytest.raises(
        KernelError, match="(?s)bad .Norm by 'Wrong'.: differs .*unused .Scale by 'Scale'.: not verified"
    ):
        kernelize_model(model, verify=True, sample_inputs=x, use_fallback=False)


@pytest.mark.parametrize(
    ("kernel", "mode", "message"),
    [
        (WrongKernel, "inference", "output: off by"),
        (HalfExact, "inference", "output: off by"),
        (WritesItsInput, "inference", "input 0 afterwards: off by"),
        (OtherShape, "inference", r"it returns output \(1, 4, 8\) torch.float32, .* the original output \(4, 8\)"),
        (NotANumber, "inference", "output: infinities or NaNs in other places"),
        (Fails, "inference", "RuntimeError: no such kernel image"),
        (WrongGradient, "train", "gradient of input 0: off by"),
        (NoParameterGradient, "train", "the original .* gradient of factor"),
    ],
)
def test_differences(kernel, mode, message):
    bind(kernel)
    model = nn.Sequential(Scale(1.7))
    with pytest.warns(KernelWarning, match=f"Scale was not replaced by 'Scale': differs from .*{message}"):
        kernelize_model(model, mode, verify=True, sample_inputs=x)
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("kernel", [WrongGradient, NoParameterGradient])
def test_gradients_count_in_train_mode_only(kernel):
    bind(kernel)
    assert report(kernelize_model(nn.Sequential(Scale()), verify=True, sample_inputs=x)).replaced


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_rounding_is_no_difference(dtype, mode):
    register_external_layer(Norm, "TileGymRMSNorm")
    model = nn.Sequential(Norm(), Norm()).to(dtype)
    kernelize_model(model, mode, verify=True, sample_inputs=x.to(dtype), use_fallback=False)
    assert [e.verified for e in report(model).replaced] == [True, True]


class InFp32(nn.Module):
    """Loses digits in fp32, whatever it is given."""

    def forward(self, x):
        return (x.to(torch.float32) + 1e4).float() - 1e4


def test_float64_is_not_rounded_on_the_way():
    def exact(layer, x):
        return x.clone()

    found = verify.deviations(InFp32(), InFp32.forward, exact, ((x,), {}), gradients=False)["output"]
    assert not found.problem and found.error < 1e-6 < found.allowed


class Sum(nn.Module):
    def forward(self, x):
        return x.float().sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("off", [1e-4, 2e-2])
def test_a_result_in_fp32_is_as_exact_as_its_inputs(dtype, off):
    def kernel(layer, x):
        return x.float().sum(-1) * (1 + off)

    call = ((torch.rand(4, 8, generator=torch.Generator().manual_seed(0)).to(dtype),), {})
    found = verify.deviations(Sum(), Sum.forward, kernel, call, gradients=False)["output"]
    assert bool(found.problem) == (dtype is torch.float32 or off > 1e-3)


@pytest.mark.parametrize(
    "inputs", [x, (x,), [x, 1.0], {"x": x}, {"x": x, "shift": 2.0}], ids=["tensor", "tuple", "list", "dict", "more"]
)
def test_sample_inputs(inputs):
    bind(ScaleKernel)
    with pytest.warns(KernelWarning, match="did not reach it"):
        model = kernelize_model(TwoScales(), verify=True, sample_inputs=inputs)
    assert [e.name for e in report(model).replaced] == ["good"]


def test_inputs_are_needed():
    bind(ScaleKernel)
    with pytest.raises(
        KernelError, match="verify=True runs Sequential once and needs inputs for it: pass sample_inputs="
    ):
        kernelize_model(nn.Sequential(Scale()), verify=True)


def test_the_model_is_left_as_it_was():
    """Training flags, buffers, gradients, random numbers and hooks are what they were before verifying."""
    bind(ScaleKernel)
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), Scale())
    model[1].eval()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    kernelize_model(model, "train", verify=True, sample_inputs=x, use_fallback=False)
    assert torch.equal(torch.rand(3), expected)
    assert [m.training for m in model] == [True, False, True]
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and not x.requires_grad
    assert not model[2]._forward_pre_hooks


class Counter(nn.Module):
    """Adds up what it was given, and returns the sum."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(8))
        self.register_buffer("ids", torch.arange(8).expand(2, 8), persistent=False)

    def forward(self, x):
        self.total += x.sum(0)
        return x + self.total


class CounterKernel(nn.Module):
    def forward(self, x):
        self.total = self.total + x.sum(0)
        return x + self.total


class ForgetfulKernel(nn.Module):
    def forward(self, x):
        return x + (self.total + x.sum(0))


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize(("kernel", "why"), [(CounterKernel, ""), (ForgetfulKernel, "buffer total afterwards: off by")])
def test_buffers_are_compared_and_left_as_they_were(kernel, mode, why):
    register_layer_kernel("Counter", layer_class=kernel, device="cpu")
    register_external_layer(Counter, "Counter")
    model = nn.Sequential(Counter())
    total = model[0].total
    kernelize_model(model, mode=mode, verify=True, sample_inputs=torch.rand(4, 8))
    assert model[0].total is total and not total.any()
    (entry,) = report(model).skipped if why else report(model).replaced
    assert why in (entry.why or "")

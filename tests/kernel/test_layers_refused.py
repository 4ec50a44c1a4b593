"""Layer kernels that are refused: stateful ones, other signatures, modes that they lack."""

import pytest
from torch import nn

from tilegym.errors import KernelError
from tilegym.errors import KernelWarning
from tilegym.kernel import kernelize_model
from tilegym.kernel import register_external_layer
from tilegym.kernel import register_layer_kernel
from tilegym.kernel import report

from .fakes import Scale
from .fakes import scales


class NoBackward(nn.Module):
    has_backward = False

    def forward(self, x):
        return x * self.factor


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = 1

    def forward(self, x):
        return x


class Helper(nn.Module):
    def forward(self, x):
        return self.helper(x)

    def helper(self, x):
        return x


class TwoArguments(nn.Module):
    def forward(self, x, y):
        return x


class Nothing(nn.Module):
    pass


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (Stateful, "Stateful is stateful: it has a constructor"),
        (Helper, "Helper is stateful: it defines helper"),
        (Nothing, "Nothing defines no forward"),
    ],
)
def test_stateful_kernels_are_refused(kernel, message):
    with pytest.raises(KernelError, match=f"layer kernel 'Kernel': .*{message}"):
        register_layer_kernel("Kernel", layer_class=kernel)

    class Repo:
        def load(self):
            return kernel

    register_layer_kernel("Kernel", repo=Repo(), device="cpu")
    register_external_layer(Scale, "Kernel")
    with pytest.raises(KernelError, match=f"0 .Scale.: kernel 'Kernel' from repository .*Repo: .*{message}"):
        kernelize_model(scales(), use_fallback=False)


def test_signature_that_does_not_fit():
    register_layer_kernel("Kernel", layer_class=TwoArguments, device="cpu")
    message = (
        r"kernel 'Kernel' for layer Scale: its signature \(self, x, y\) does not fit Scale.forward.*: "
        "it needs 'y', which the original does not take; give it the same signature"
    )
    with pytest.raises(KernelError, match=message):
        register_external_layer(Scale, "Kernel")

    class Repo:
        def load(self):
            return TwoArguments

    register_layer_kernel("Kernel", repo=Repo(), device="cpu", mode="inference")
    register_layer_kernel("Other", repo=Repo(), device="cpu", mode="inference")
    register_external_layer(Scale, "Other")
    with pytest.raises(KernelError, match=message.replace("'Kernel'", "'Other'")):
        kernelize_model(scales(), use_fallback=False)


def test_mode_that_a_kernel_lacks():
    with pytest.raises(KernelError, match="layer kernel 'K', registered for mode train: NoBackward has no backward"):
        register_layer_kernel("K", layer_class=NoBackward, mode="train")
    with pytest.raises(KernelError, match="registered for mode compile: NoBackward .*set can_torch_compile = True"):
        register_layer_kernel("K", layer_class=NoBackward, mode="compile")

    register_layer_kernel("K", layer_class=NoBackward, device="cpu")
    register_external_layer(Scale, "K")
    assert report(kernelize_model(scales(), "inference")).replaced
    for mode, lacks in (("train", "has no backward"), ("compile", "does not say that torch.compile can trace it")):
        model = scales()
        with pytest.raises(KernelError, match=f"kernel 'K' .* for layer Scale in mode {mode}: NoBackward {lacks}"):
            kernelize_model(model, mode, use_fallback=False)
        with pytest.warns(KernelWarning, match=lacks):
            kernelize_model(model, mode)
        assert "forward" not in vars(model[0])


def test_registered_for_a_mode_that_the_loaded_kernel_lacks():
    class Repo:
        def load(self):
            return NoBackward

    register_layer_kernel("K", repo=Repo(), device="cpu", mode="compile")
    register_external_layer(Scale, "K")
    with pytest.raises(KernelError, match="in mode inference: .*can_torch_compile"):
        kernelize_model(scales(), "inference", use_fallback=False)

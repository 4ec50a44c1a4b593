import inspect

import pytest

from tilegym.errors import KernelError
from tilegym.kernel.checks import fit
from tilegym.kernel.checks import fitted


def signature(text: str) -> inspect.Signature:
    return inspect.signature(eval(f"lambda {text}: None"))


FITS = [
    ("x", "x"),
    ("x, y=1", "x, y=1"),
    ("x", "x, y=1"),
    ("x", "x, *, y=None"),
    ("x, y", "*args, **kwargs"),
    ("x, *args", "x, *args"),
    ("x, **kwargs", "x, **kwargs"),
    ("x, **kwargs", "x, scale=1, **kwargs"),
    ("x, *, y", "x, y"),
    ("x, *, y=1", "x, **kwargs"),
    ("x, /", "y, /"),
    ("hidden_states", "x"),
    ("x, y=1", "a, b=1"),
]

DOES_NOT_FIT = [
    ("x", "", "it takes no 'x'"),
    ("x, y", "x", "it takes no 'y'"),
    ("x", "x, y", "it needs 'y', which the original does not take"),
    ("x", "x, *, y", "it needs 'y'"),
    ("x, y=1", "x, y", "it requires 'y', which is optional in the original"),
    ("x, y=1", "x, y=2", "its 'y' defaults to 2, the original's to 1"),
    ("x, *, y=1", "x, *, y=2", "its 'y' defaults to 2"),
    ("x, *, y", "x", "it takes no 'y'"),
    ("x, y", "y, x", "its parameters are in another order"),
    ("x, y", "x, *args", "it does not take 'y' by keyword"),
    ("x", "y, /", "it does not take 'x' by keyword"),
    ("x", "*args", "it does not take 'x' by keyword"),
    ("x, *args", "x", r"it does not take \*args"),
    ("x, **kwargs", "x", r"it does not take \*\*kwargs"),
]


@pytest.mark.parametrize(("original", "kernel"), FITS)
def test_fits(original, kernel):
    assert fit(signature(kernel), signature(original))[0] is None


@pytest.mark.parametrize(("original", "kernel", "reason"), DOES_NOT_FIT)
def test_does_not_fit(original, kernel, reason):
    found, renamed = fit(signature(kernel), signature(original))
    assert found is not None and not renamed
    with pytest.raises(KernelError, match=f"the kernel: its signature .* does not fit the layer.*: {reason}"):
        fitted(eval(f"lambda {kernel}: None"), eval(f"lambda {original}: None"), "the kernel", "the layer")


def test_other_names_are_translated():
    def original(x, y=1, *, z):
        return x, y, z

    def kernel(a, b=1, *, z):
        return a, b, z

    call = fitted(kernel, original, "", "")
    assert call(1, z=3) == call(x=1, z=3) == (1, 1, 3)
    assert call(1, y=2, z=3) == call(1, 2, z=3) == (1, 2, 3)
    assert inspect.signature(call) == inspect.signature(original)
    assert fitted(original, original, "", "") is original


def test_defaults_without_a_truth_value():
    import torch

    zeros = torch.zeros(2)
    same = inspect.signature(eval("lambda x=zeros: None", {"zeros": zeros}))
    assert fit(same, same)[0] is None
    assert "defaults" in fit(inspect.signature(eval("lambda x=z: None", {"z": torch.zeros(2)})), same)[0]

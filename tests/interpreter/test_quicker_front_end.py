"""What of cuTile's front end is replaced by something quicker gives the same bytecode and the same errors."""

import cuda.tile as ct
import pytest
import torch
from common import HAS_GPU
from common import distinct
from common import randn
from common import recorded_launches

from tilegym import ops
from tilegym.interpreter import _cutile
from tilegym.interpreter import _cutile_quicker
from tilegym.interpreter.signature import kernel_signature


@pytest.fixture
def as_cutile_has_it(monkeypatch):
    def restore():
        for owner, name, original in _cutile_quicker.ORIGINALS:
            monkeypatch.setattr(owner, name, original)

    return restore


def bytecode(kernel, args) -> bytes:
    result = _cutile.compile_tile(
        kernel._annotated_function,
        [kernel_signature(kernel, args)],
        _cutile.FRONT_END_ARCH,
        bytecode_version=_cutile.FRONT_END_BYTECODE,
        return_bytecode=True,
        return_cubin=False,
    )
    return bytes(result.bytecode)


def attention():
    q, k, v = (randn(1, 4, 40, 32, dtype=torch.bfloat16, seed=s).requires_grad_() for s in range(3))
    ops.fmha(q, k, v, backend="cutile").sum().backward()


def norm():
    x, weight = randn(5, 70).requires_grad_(), randn(70).requires_grad_()
    ops.rms_norm(x, (70,), weight, 1e-6, backend="cutile").sum().backward()


def recurrence():
    q, k, v = (randn(1, 70, 2, 32, dtype=torch.bfloat16, seed=s) for s in range(3))
    ops.chunk_gated_delta_rule(q, k, v, randn(1, 70, 2), randn(1, 70, 2).sigmoid(), backend="cutile")


def losses():
    ops.cross_entropy(randn(5, 70), torch.arange(5), backend="cutile")
    ops.argmax(randn(5, 70), backend="cutile")


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
@pytest.mark.parametrize("call", [attention, norm, recurrence, losses])
def test_same_bytecode(call, as_cutile_has_it):
    with recorded_launches() as launches:
        call()
    kernels = distinct(launches)
    assert kernels
    quicker = [bytecode(*launch) for launch in kernels]
    as_cutile_has_it()
    differing = [k for (k, args), code in zip(kernels, quicker, strict=True) if bytecode(k, args) != code]
    assert not differing


def product(a, b=3):
    return a * b


def undefined_on_a_path(x):
    if ct.bid(0) > 0:
        y = 1
    product(y)


def undefined_and_unused(x):
    if ct.bid(0) > 0:
        y = 1
    z = y  # noqa: F841


def undefined_name(x):
    product(nothing)  # noqa: F821


def undefined_local(x):
    for i in range(0):
        y = i
    product(y)


def too_many_arguments(x):
    product(1, 2, 3)


def unknown_option(x):
    product(c=1)


def missing_argument(x):
    ct.load(x)


def unpacked_number(x):
    product(*1)


def unknown_attribute(x):
    product(x.nothing)


def wrong_operands(x):
    product(x + 1)


def other_types(x):
    if ct.bid(0) > 0:
        y = 1
    else:
        y = 2.0
    product(y)


def wrong_shape(x):
    ct.load(x, (0,), (15,))


def endless(x):
    def again(n):
        return again(n)

    again(1)


@pytest.mark.parametrize(
    "function",
    [
        undefined_on_a_path,
        undefined_and_unused,
        undefined_name,
        undefined_local,
        too_many_arguments,
        unknown_option,
        missing_argument,
        unpacked_number,
        unknown_attribute,
        wrong_operands,
        other_types,
        wrong_shape,
        endless,
    ],
)
def test_same_errors(function, as_cutile_has_it):
    errors = []
    for prepare in (lambda: None, as_cutile_has_it):
        prepare()
        with pytest.raises(Exception) as error:  # noqa: B017, PT011 (which, is compared)
            bytecode(ct.kernel(function), (torch.zeros(32),))
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]
    assert function.__name__ in errors[0][1]

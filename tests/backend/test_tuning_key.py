"""What tuning results are remembered under."""

import importlib.util

import cuda.tile as ct
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilegym.backend.cutile import tuning_key


@given(st.integers(1, 2**40))
def test_bucket_is_the_nearest_power_of_two(size):
    power = tuning_key.bucket(size)
    assert power & (power - 1) == 0
    assert power / 2**0.5 <= size * 1.0000001 and size <= power * 2**0.5 * 1.0000001
    assert tuning_key.bucket(size) <= tuning_key.bucket(size + 1)


@pytest.mark.parametrize("k", range(4, 20))
def test_common_lengths_are_not_at_a_border(k):
    assert len({tuning_key.bucket(2**k + d) for d in (-2, -1, 0, 1, 2)}) == 1
    assert tuning_key.bucket(3 * 2**k) == tuning_key.bucket(3 * 2**k + 1)


def test_bucket_of_small_sizes():
    assert [tuning_key.bucket(n) for n in range(10)] == [0, 1, 2, 4, 4, 4, 8, 8, 8, 8]


@ct.kernel
def kernel(x, arrays, n, scale, TILE: ct.Constant[int]):
    pass


def test_describe():
    x = torch.zeros(100, 33, dtype=torch.bfloat16)
    a = torch.zeros(5)
    assert tuning_key.describe(kernel, (x, [a, a, a], 100, 0.5, 96)) == (
        "x=bfloat16[128,32] arrays=4*float32[4] n=128 scale=float TILE=96"
    )
    assert tuning_key.describe(kernel, (x.T, (a, True), 0, None, 96)) == (
        "x=bfloat16[32,128]@1,0 arrays=(float32[4],True) n=0 scale=None TILE=96"
    )


def test_call_apart_from_its_sizes():
    key = (724, 64, torch.float16, True, torch.Size([1, 724]), None, (False, 3))
    call = tuning_key.Call.of_key(key)
    assert call.sizes == (724, 64, 1, 724, 3)
    assert (
        call.form == tuning_key.Call.of_key((725, 64, torch.float16, True, torch.Size([1, 725]), None, (False, 3))).form
    )
    assert (
        call.form
        != tuning_key.Call.of_key((724, 64, torch.float16, False, torch.Size([1, 724]), None, (False, 3))).form
    )
    x = torch.zeros(100, 33)
    assert tuning_key.Call.of_arguments(kernel, (x, [x, x], 100, 0.5, 96)) == (
        "x=float32[#,#] arrays=#*float32[#,#] n=# scale=float TILE=96",
        (100, 33, 2, 100, 33, 100),
    )


@given(st.integers(2, 2**40))
def test_one_more_is_near(size):
    assert tuning_key.near((size, 64), (size + 1, 64)) and tuning_key.near((size + 1, 64), (size, 64))


def test_near():
    assert tuning_key.near((724, 64, 1), (725, 64, 1)) and tuning_key.near((800,), (900,))
    for other in ((800, 72, 1), (815, 64, 1), (724, 64, 2), (724, 64, 0), (724, 64)):
        assert not tuning_key.near((724, 63, 1), other), other
    assert not tuning_key.near((1000,), (1126,))


def _kernel(source: str, folder) -> ct.kernel:
    """A kernel from a module in a file, so that its source can be read back."""
    path = folder / f"module_{len(list(folder.iterdir()))}.py"
    path.write_text("import cuda.tile as ct\n" + source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.k


BASE = """
SIZE = 4
def helper(x):
    return x * SIZE

def deeper(x):
    return x - 1

@ct.kernel
def k(x):
    def inner(y):
        return deeper(y)
    ct.store(x, (0,), inner(helper(ct.load(x, (0,), (4,)))))
"""


@pytest.mark.parametrize(
    "change, same",
    [
        (("x * SIZE", "x * SIZE  # a comment"), True),
        (("def helper(x):", 'def helper(x):\n    """A docstring."""'), True),
        (("def k(x):", "def k( x ) :"), True),
        (("x * SIZE", "x + SIZE"), False),
        (("SIZE = 4", "SIZE = 8"), False),
        (("x - 1", "x - 2"), False),
        (("(4,)", "(8,)"), False),
        (("def helper", "UNUSED = 3\ndef unused(x): pass\ndef helper"), True),
    ],
)
def test_kernel_fingerprint(tmp_path, change, same):
    before = tuning_key.kernel_fingerprint(_kernel(BASE, tmp_path))
    after = tuning_key.kernel_fingerprint(_kernel(BASE.replace(*change), tmp_path))
    assert (before == after) is same


def test_kernel_without_source_has_a_fingerprint_too():
    space = {"ct": ct}
    exec("def f(x): ct.store(x, (0,), 1)\ndef g(x): ct.store(x, (0,), 2)", space)
    first, second = (tuning_key.kernel_fingerprint(ct.kernel(space[name])) for name in "fg")
    assert first != second


def test_space_fingerprint():
    assert tuning_key.space_fingerprint(["a", "b", "c"]) == tuning_key.space_fingerprint(["a", "c", "b"])
    assert tuning_key.space_fingerprint(["a", "b", "c"]) != tuning_key.space_fingerprint(["b", "a", "c"])
    assert tuning_key.space_fingerprint(["a", "b"]) != tuning_key.space_fingerprint(["a"])

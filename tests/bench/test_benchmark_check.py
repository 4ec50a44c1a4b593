"""The check without which no figure is printed."""

import pytest
import torch

from tilegym.bench.check import Judge


def judge(dtype=torch.bfloat16):
    exact = torch.randn(64, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return exact, Judge.of((exact,), (exact.to(dtype),), dtype)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_one_rounding_is_right(dtype):
    exact, it = judge(dtype)
    own, wrong = it.check((exact.to(dtype),))
    assert wrong is None
    assert 0 < own.rms < torch.finfo(dtype).eps / 2


def test_an_error_throughout_is_wrong():
    exact, it = judge()
    assert "error 1.0e-02 rms" in it.check((1.01 * exact,))[1]


@pytest.mark.parametrize("value", (float("nan"), float("inf"), 0.5))
def test_a_single_wrong_element_is_wrong(value):
    exact, it = judge()
    got = exact.to(torch.bfloat16)
    got[3, 7] += value
    own, wrong = it.check((got,))
    assert wrong is not None
    assert value == 0.5 or own.largest == float("inf")


def test_one_wrong_row_is_wrong():
    exact, it = judge()
    got = exact.to(torch.bfloat16)
    got[-1] = got[0]
    assert it.check((got,))[1] is not None


def test_another_shape_or_number_of_tensors_is_wrong():
    exact, it = judge()
    assert it.check((exact[:-1],))[1] is not None
    assert it.check((exact, exact))[1] == "2 tensors instead of 1"


def test_every_tensor_is_checked():
    exact, _ = judge()
    it = Judge.of((exact, exact), (exact.bfloat16(), exact.bfloat16()), torch.bfloat16)
    assert it.check((exact.bfloat16(), exact.bfloat16()))[1] is None
    assert it.check((exact.bfloat16(), 1.01 * exact))[1].startswith("result 1:")


def test_a_baseline_that_is_not_the_oracle_is_refused():
    exact, _ = judge()
    with pytest.raises(ValueError, match="own error"):
        Judge.of((exact,), (exact.flip(0).bfloat16(),), torch.bfloat16)

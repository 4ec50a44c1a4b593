"""The check without which no figure is printed."""

import pytest
import torch

from tilegym.bench import check
from tilegym.bench.check import Judge


def judge(dtype=torch.bfloat16):
    exact = torch.randn(64, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return exact, Judge.of((exact,), (exact.to(dtype),), dtype)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_one_rounding_is_right(dtype):
    exact, it = judge(dtype)
    verdict = it.check((exact.to(dtype),))
    assert verdict.wrong is None
    assert 0 < verdict.worst.rms < torch.finfo(dtype).eps / 2


def test_an_error_throughout_is_wrong():
    exact, it = judge()
    verdict = it.check((1.01 * exact,))
    assert "error 1.0e-02 rms" in verdict.wrong and not verdict.near


@pytest.mark.parametrize("value", (float("nan"), float("inf"), 0.5))
def test_a_single_wrong_element_is_wrong(value):
    exact, it = judge()
    got = exact.to(torch.bfloat16)
    got[3, 7] += value
    verdict = it.check((got,))
    assert verdict.wrong is not None and not verdict.near
    assert value == 0.5 or verdict.worst.largest == float("inf")


def test_single_elements_that_are_a_little_too_far_off_are_near():
    exact, it = judge()
    got = exact.to(torch.bfloat16)
    index = int(exact.abs().argmin())
    got.view(-1)[index] += 2 * it.allowed[0].largest
    verdict = it.check((got,))
    assert verdict.wrong is not None and verdict.near
    got.view(-1)[index] += 4 * it.allowed[0].largest
    assert not it.check((got,)).near


def test_one_wrong_row_is_wrong():
    exact, it = judge()
    got = exact.to(torch.bfloat16)
    got[-1] = got[0]
    assert it.check((got,)).wrong is not None


def test_another_shape_or_number_of_tensors_is_wrong():
    exact, it = judge()
    assert it.check((exact[:-1],)).wrong is not None
    assert it.check((exact, exact)).wrong == "2 tensors instead of 1"


def test_every_tensor_is_checked():
    exact, _ = judge()
    it = Judge.of((exact, exact), (exact.bfloat16(), exact.bfloat16()), torch.bfloat16)
    assert it.check((exact.bfloat16(), exact.bfloat16())).wrong is None
    assert it.check((exact.bfloat16(), 1.01 * exact)).wrong.startswith("result 1:")


def test_a_baseline_that_is_not_the_oracle_is_refused():
    exact, _ = judge()
    with pytest.raises(ValueError, match="own error"):
        Judge.of((exact,), (exact.flip(0).bfloat16(),), torch.bfloat16)


def test_large_tensors_are_compared_in_parts(monkeypatch):
    exact, it = judge()
    got = exact.to(torch.bfloat16)
    got[17, 5] += 0.5
    whole = it.check((got.t().contiguous().t(),)), check.deviation(got, exact)
    monkeypatch.setattr(check, "CHUNK", 1000)
    parts = judge()[1].check((got,)), check.deviation(got, exact)
    assert parts[1].rms == pytest.approx(whole[1].rms, rel=1e-12) and parts[1].largest == whole[1].largest
    assert parts[0].wrong is not None and whole[0].wrong is not None
    got[63, 511] = float("nan")
    assert check.deviation(got, exact).largest == float("inf")


def test_where_all_is_zero_roundings_may_stay():
    exact = torch.zeros(8, dtype=torch.float64)
    it = Judge.of((exact,), (torch.full((8,), 1e-3),), torch.bfloat16)
    assert it.check((torch.full((8,), 2e-3),)).wrong is None and it.check((torch.zeros(8),)).worst.rms == 0
    assert it.check((torch.full((8,), 0.1),)).wrong

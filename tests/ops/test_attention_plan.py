"""What ``fmha`` keeps of earlier calls is for calls of the same kind only."""

import pytest
import torch
from common import PyTestCase
from common import device
from common import randn

from tilegym.ops import fmha
from tilegym.ops.cutile import attention_plan
from tilegym.ops.cutile.attention import _autotuner
from tilegym.ops.pytorch.attention import fmha as reference


@pytest.fixture(autouse=True)
def no_plans(monkeypatch):
    monkeypatch.setattr(attention_plan, "_plans", {})


def tensors(keys=20, dtype=torch.float32):
    return {name: randn(1, 2, n, 16, dtype=dtype, seed=n) for name, n in (("q", 9), ("k", keys), ("v", keys))}


def changed():
    kv_len = torch.tensor([13], dtype=torch.int32, device=device())
    return {
        "nothing": tensors(),
        "values": {name: 2 * t for name, t in tensors().items()},
        "strides": {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in tensors().items()},
        "dtype": tensors(dtype=torch.float16),
        "keys": tensors(33),
        "scale": tensors() | {"scaling": 0.5},
        "full": tensors() | {"is_causal": False},
        "window": tensors() | {"window_size": 7},
        "soft cap": tensors() | {"soft_cap": 1.5},
        "sinks": tensors() | {"sinks": randn(2)},
        "lengths": tensors() | {"kv_len": kv_len},
        "mask": tensors() | {"attention_mask": randn(20) > 0},
        "additive mask": tensors() | {"attention_mask": randn(2, 9, 20)},
    }


class Test_Plans(PyTestCase):
    @pytest.mark.parametrize("change", changed())
    def test_calls_after_another(self, change):
        fmha(**tensors(), backend="cutile")
        for _ in range(2):
            self.assertCorrectness(fmha, reference, changed()[change], {"backend": "cutile"})
        assert len(attention_plan._plans) == (1 if change in ("nothing", "values", "strides") else 2)

    def test_gradients_after_a_plan(self):
        fmha(**tensors(), backend="cutile")
        self.assertCorrectness(fmha, reference, tensors(), {"backend": "cutile"}, gradient=True)

    def test_wrong_arguments_after_a_plan(self):
        fmha(**tensors(), backend="cutile")
        with pytest.raises(TypeError, match="one dtype"):
            fmha(**tensors() | {"v": tensors()["v"].half()}, backend="cutile")
        with pytest.raises(ValueError, match="expected q"):
            fmha(**tensors() | {"v": tensors(33)["v"]}, backend="cutile")

    def test_forgotten_results(self, monkeypatch):
        launched = []
        monkeypatch.setattr(attention_plan, "launch", lambda *args: launched.append(args))
        fmha(**tensors(), backend="cutile")
        fmha(**tensors(), backend="cutile")
        assert len(launched) == 1
        _autotuner(16, True).forget()
        fmha(**tensors(), backend="cutile")
        assert len(launched) == 1

    def test_old_plans_make_room(self, monkeypatch):
        monkeypatch.setattr(attention_plan, "MAX_PLANS", 2)
        for keys in range(9, 15):
            torch.testing.assert_close(fmha(**tensors(keys), backend="cutile"), reference(**tensors(keys)))
            assert len(attention_plan._plans) <= 2

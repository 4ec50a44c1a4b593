"""The backward pass of ``fmha`` where columns come in two tiles: 80 as 64 and 16."""

import pytest
import torch
from common import PyTestCase
from common import assert_launches_compile
from common import recorded_launches
from common import some
from test_attention import OPTIONS
from test_attention import tensors
from test_attention_backward import QKV
from test_attention_backward import gradients
from test_attention_backward import named
from test_attention_backward import with_sinks_of
from test_attention_backward_fused import backward_kernels

from tilegym.ops import fmha
from tilegym.ops.cutile import attention_backward
from tilegym.ops.cutile.attention_backward import width_of
from tilegym.ops.cutile.attention_backward_kernels import attention_dkdv_kernel
from tilegym.ops.cutile.attention_backward_kernels import attention_dq_kernel
from tilegym.ops.pytorch.attention import fmha as reference

TWO = [attention_dq_kernel, attention_dkdv_kernel]
WIDTHS = [(72, 72), (80, 80), (96, 72), (40, 96), (96, 128), (128, 80), (144, 144)]  # of queries and of values


@pytest.fixture(autouse=True)
def as_on_hopper(monkeypatch):
    monkeypatch.setenv("DISABLE_FALLBACK", "1")
    monkeypatch.setattr(attention_backward, "SHORT", 0)
    monkeypatch.setattr(attention_backward, "_is_hopper", lambda device: True)


def with_widths(columns, columns_dv, dtype=torch.bfloat16):
    return tensors(2, 4, 2, 37, 50, columns, columns_dv, dtype=dtype)


class Test_FMHA_Backward_In_Two_Tiles(PyTestCase):
    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("widths", some(WIDTHS, (72, 72), (40, 96), (128, 80), (144, 144)), ids=str)
    def test_op(self, widths, is_causal):
        kwargs = with_widths(*widths) | {"is_causal": is_causal}
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)
        assert backward_kernels(kwargs) == TWO

    @pytest.mark.parametrize(
        "name",
        some(
            ["window", "window, not causal", "soft cap", "padding mask", "lengths", "sinks"],
            *("window", "padding mask", "sinks"),
        ),
    )
    @pytest.mark.parametrize("widths", [(72, 72), (80, 96)], ids=str)
    def test_options(self, widths, name):
        kwargs = with_widths(*widths, dtype=torch.float16) | with_sinks_of(torch.float16, OPTIONS[name])
        names = (*QKV, "sinks") if name == "sinks" else QKV
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=names)
        assert backward_kernels(kwargs) == TWO

    def test_parts_of_a_group(self, monkeypatch):
        """Sums in fp32 of a head of a group each, where keys are few."""
        monkeypatch.setattr(attention_backward, "sm_count", lambda device: 132)
        kwargs = with_widths(80, 96)
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_columns(self, dtype):
        """In fp32 there is one tile."""
        kwargs = {k: t.cpu() for k, t in with_widths(80, 96, dtype).items()}
        with recorded_launches(run=True) as launches:
            gradients(kwargs, backend="cutile")
        for kernel, args in launches:
            if kernel in TWO:
                args = named(kernel, args)
                found = args["TILE_P"] * args["PARTS"], args["TILE_R"], args["TILE_DV"], args["TILE_RV"]
                assert found == ((64, 16, 64, 32) if dtype == torch.bfloat16 else (128, 0, 128, 0))

    def test_compiles(self):
        kwargs = {k: t.half().cpu() for k, t in with_widths(80, 96).items()}
        assert_launches_compile(lambda: gradients(kwargs, backend="cutile"))

    @pytest.mark.parametrize("widths", [(80, 128), (128, 80)], ids=str)
    def test_one_kernel_for_all(self, widths, monkeypatch):
        """Values in two tiles, but not queries: what it adds to dq is one."""
        monkeypatch.setattr(attention_backward, "FUSED", {(128, True): 0})
        monkeypatch.setattr(attention_backward, "sm_count", lambda device: 0)
        kwargs = with_widths(*widths) | {"is_causal": True}
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)
        assert (backward_kernels(kwargs) == TWO) == (widths[0] == 80)


def test_width():
    """What tiles are chosen for."""
    assert width_of(48, 64, False) == width_of(16, 64, False) == 64
    assert width_of(80, 64, True) == width_of(64, 80, False) == 80 and width_of(80, 64, False) == 128
    assert width_of(192, 128, False) == 192 and width_of(192, 256, False) == width_of(300, 64, False) == 256

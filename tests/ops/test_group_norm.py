import functools

import pytest
import torch
from common import ARCHITECTURES
from common import HAS_GPU
from common import PyTestCase
from common import assert_launches_compile
from common import backends
from common import dtypes
from common import gpu
from common import randn

from tilegym import interpreter
from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.ops import group_norm
from tilegym.ops.cutile import group_norm as kernels
from tilegym.ops.cutile import parts
from tilegym.ops.cutile import workspace
from tilegym.ops.cutile.group_norm import group_norm_backward
from tilegym.ops.cutile.group_norm import group_norm_forward
from tilegym.ops.pytorch.group_norm import group_norm as reference

# [B, C, ...] and groups: one channel a group, all in one, no positions, more of them than a tile holds.
SHAPES = [((1, 4, 2), 1), ((2, 12, 5, 7), 3), ((3, 6, 37), 6), ((5, 24), 4), ((2, 4, 4099), 2), ((2, 40, 9), 1)]
GPU_SHAPES = [((2, 320, 128, 128), 32), ((2, 1280, 16, 16), 32), ((16, 4096), 32)]


def arguments(shape, num_groups, dtype=torch.float32, **options):
    return dict(
        input=randn(*shape, dtype=dtype),
        num_groups=num_groups,
        weight=randn(shape[1], dtype=dtype, seed=1),
        bias=randn(shape[1], dtype=dtype, seed=2),
    ) | options  # fmt: skip


class Test_GroupNorm(PyTestCase):
    @backends("group_norm")
    @dtypes()
    @pytest.mark.parametrize(("shape", "num_groups"), SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape, num_groups):
        kwargs = arguments(shape, num_groups, dtype=dtype)
        self.assertCorrectness(group_norm, reference, kwargs, {"backend": backend}, gradient=True)

    @pytest.fixture(params=["parts", "given up", "two kernels"])
    def cut(self, request, monkeypatch):
        """As groups are cut that are larger than a block, by blocks that wait, or soon compute what they wait for."""
        monkeypatch.setattr(kernels, "PARTS", dict.fromkeys((True, False), (((64, 4, 1, 0),),) * 2))
        monkeypatch.setattr(kernels, "parts_plan", kernels.parts_plan.__wrapped__)
        monkeypatch.setattr(kernels, "sm_count", lambda device: 0 if request.param == "two kernels" else 1000)
        if request.param != "parts":
            monkeypatch.setattr(parts, "PATIENCE", 2)
        elif not HAS_GPU:
            at_once = functools.partial(interpreter.launch, order="threads", sanitize=False)
            monkeypatch.setattr(interpreter, "launch", at_once)
            threads = torch.get_num_threads()
            torch.set_num_threads(32)
            request.addfinalizer(lambda: torch.set_num_threads(threads))

    @dtypes()
    @pytest.mark.parametrize(("shape", "num_groups"), [((2, 12, 5, 7), 3), ((1, 6, 150), 2), ((2, 40, 9), 2)], ids=str)
    def test_groups_of_several_blocks(self, shape, num_groups, dtype, cut):
        kwargs = arguments(shape, num_groups, dtype=dtype)
        kwargs["input"] += 10.0
        self.assertCorrectness(group_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @dtypes()
    def test_parts_of_one_row(self, dtype, cut, monkeypatch):
        """Whose sums are over each thread's values first in bf16."""
        monkeypatch.setattr(kernels, "PARTS", dict.fromkeys((True, False), (((2048, 4, 1, 0),),) * 2))
        kwargs = arguments((1, 4, 4096), 2, dtype=dtype)
        kwargs["input"] += 10.0
        self.assertCorrectness(group_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_launches_in_turns(self, cut, monkeypatch):
        monkeypatch.setattr(workspace, "_turns", {})
        if not HAS_GPU:
            monkeypatch.setattr(parts, "shared_states", lambda like, number: workspace._next_turn(-1, number))
        for seed, batch in enumerate((2, 1, 2, 2, 2, 2, 1, 2)):
            kwargs = arguments((batch, 6, 50), 3)
            kwargs["input"] = kwargs["input"] * (seed + 1) + seed
            self.assertCorrectness(group_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_more_groups_than_a_launch_takes(self, cut, monkeypatch):
        monkeypatch.setattr(kernels, "MAX_GROUPS", 5)
        kwargs = arguments((2, 6, 50), 3)
        self.assertCorrectness(group_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("missing", [("bias",), ("weight",)], ids="+".join)
    def test_groups_of_several_blocks_without(self, missing, cut):
        kwargs = arguments((2, 6, 50), 3) | dict.fromkeys(missing)
        self.assertCorrectness(group_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("value", [float("nan"), 0.0], ids=str)
    def test_special_values_in_several_blocks(self, value, cut):
        kwargs = arguments((2, 6, 50), 3, dtype=torch.bfloat16)
        kwargs["input"][0, 1, 3] = value
        kwargs["input"][1] = value
        self.assertCorrectness(group_norm, reference, kwargs, {"backend": "cutile"})

    @pytest.mark.parametrize("shape", [(2, 12, 80), (2, 4, 5000)], ids=str)
    def test_a_large_mean_does_not_cancel(self, shape):
        kwargs = arguments(shape, 2)
        kwargs["input"] += 1000.0
        self.assertCorrectness(group_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_channels_far_from_each_other(self):
        kwargs = arguments((2, 12, 33), 3)
        kwargs["input"] += 100.0 * torch.arange(12, device=kwargs["input"].device)[:, None]
        self.assertCorrectness(group_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("missing", [("bias",), ("weight",), ("weight", "bias")], ids="+".join)
    def test_without(self, missing):
        kwargs = arguments((2, 12, 7), 3) | dict.fromkeys(missing)
        self.assertCorrectness(group_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("frozen", ["input", "weight", "bias"])
    def test_gradients_of_some(self, frozen):
        wanted = tuple({"input", "weight", "bias"} - {frozen})
        self.assertCorrectness(group_norm, reference, arguments((2, 6, 9), 3), {"backend": "cutile"}, gradient=wanted)

    def test_weight_of_another_dtype(self):
        kwargs = arguments((2, 12, 7), 3, dtype=torch.bfloat16)
        kwargs["weight"] = kwargs["weight"].float()
        self.assertCorrectness(group_norm, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_not_contiguous(self):
        kwargs = arguments((2, 12, 6, 8), 3, dtype=torch.bfloat16)
        x = kwargs["input"]
        for view in (
            x.to(memory_format=torch.channels_last),
            x[..., ::2],
            x.transpose(2, 3),
            x[:1].expand(3, 12, 6, 8),
        ):
            self.assertCorrectness(
                group_norm, reference, kwargs | {"input": view}, {"backend": "cutile"}, gradient=True
            )

    @pytest.mark.parametrize("shape", [(0, 4, 3), (0, 4)], ids=str)
    def test_empty(self, shape):
        self.assertCorrectness(group_norm, reference, arguments(shape, 2), {"backend": "cutile"}, gradient=True)

    @backends("group_norm")
    @pytest.mark.parametrize("shape", [(2, 4, 0), (0, 4, 3, 2), (2, 0, 3)], ids=str)
    def test_no_elements(self, shape, backend):
        kwargs = arguments(shape, 2)
        given = [kwargs[name].requires_grad_() for name in ("input", "weight", "bias")]
        y = group_norm(**kwargs, backend=backend)
        assert y.shape == shape
        for tensor, gradient in zip(given, torch.autograd.grad(y.sum(), given), strict=True):
            assert gradient.shape == tensor.shape and not gradient.any()

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0], ids=str)
    def test_special_values(self, value):
        kwargs = arguments((2, 6, 9), 3, dtype=torch.bfloat16)
        kwargs["input"][0, 1, 3] = value
        kwargs["input"][1] = value
        self.assertCorrectness(group_norm, reference, kwargs, {"backend": "cutile"})

    def test_falls_back(self):
        for kwargs, why in (
            (arguments((2, 6, 3), 3, dtype=torch.float64), "not fp32, fp16 or bf16"),
            (arguments((1, 9000, 1), 1), "more than 8192 channels"),
        ):
            with use_backend("cutile"), pytest.warns(FallbackWarning, match=why):
                y = group_norm(**kwargs)
            assert torch.equal(y, reference(**kwargs))

    @backends("group_norm")
    def test_wrong_arguments(self, backend):
        for error, message, wrong in (
            (ValueError, "input has shape", {"input": randn(6)}),
            (ValueError, "num_groups is 4", {"num_groups": 4}),
            (ValueError, "num_groups is 0", {"num_groups": 0}),
            (ValueError, "weight has shape", {"weight": randn(7)}),
            (TypeError, "input is torch.int32", {"input": torch.ones(2, 6, 3, dtype=torch.int32)}),
        ):
            with pytest.raises(error, match=f"group_norm: {message}"):
                group_norm(**arguments((2, 6, 3), 3) | wrong, backend=backend)

    @pytest.mark.parametrize(("multiprocessors", "architectures"), [(0, ("sm_90",)), (132, ARCHITECTURES)])
    def test_compiles_for_every_architecture(self, multiprocessors, architectures, monkeypatch):
        monkeypatch.setattr(kernels, "parts_plan", kernels.parts_plan.__wrapped__)
        monkeypatch.setattr(kernels, "sm_count", lambda device: multiprocessors)
        x, dy = (torch.empty(2, 320, 4096, dtype=torch.bfloat16) for _ in range(2))
        w, statistics = torch.empty(320, dtype=torch.bfloat16), torch.empty(2 * 32, 3)
        assert_launches_compile(lambda: group_norm_forward(x, 32, w, w.clone(), 1e-5), architectures)
        arrays = dy, x, statistics
        assert_launches_compile(lambda: group_norm_backward(*arrays, 32, w, True, True, torch.bfloat16), architectures)

    @gpu
    def test_more_than_32_bits_of_elements(self):
        self.assertLargeInput(lambda x: group_norm(x, 8, backend="cutile"), 2**14 + 5, 32, 2**12)

import importlib
import inspect

import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import assert_launches_compile
from common import backends
from common import device
from common import dtypes
from common import gpu
from common import randn

from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.ops import rms_norm_gated
from tilegym.ops.cutile import rms_norm_gated as kernels
from tilegym.ops.cutile.rms_norm_gated import rms_norm_gated_backward
from tilegym.ops.cutile.rms_norm_gated import rms_norm_gated_forward
from tilegym.ops.cutile.tiling import sm_count
from tilegym.ops.pytorch.rms_norm_gated import rms_norm_gated as reference

SHAPES = [(1, 4), (37, 128), (2, 7, 96), (3, 4099)]
GPU_SHAPES = [(8192, 128), (65536, 128), (300, 5120), (33, 16000)]


def arguments(*shape, dtype=torch.float32, **options):
    return dict(
        x=randn(*shape, dtype=dtype),
        gate=randn(*shape, dtype=dtype, seed=1),
        weight=randn(shape[-1], dtype=dtype, seed=2),
        eps=1e-6,
    ) | options  # fmt: skip


class Test_RMSNormGated(PyTestCase):
    @backends("rms_norm_gated")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    @pytest.mark.parametrize("norm_before_gate", [True, False])
    def test_op(self, backend, dtype, shape, norm_before_gate):
        kwargs = arguments(*shape, dtype=dtype, norm_before_gate=norm_before_gate)
        self.assertCorrectness(rms_norm_gated, reference, kwargs, {"backend": backend}, gradient=True)

    @pytest.mark.parametrize("group_size", [96, 32, 12, 1])
    @pytest.mark.parametrize("norm_before_gate", [True, False])
    @pytest.mark.parametrize("activation", ["silu", "sigmoid"])
    @pytest.mark.parametrize("casting", ["llama", "gemma"])
    def test_options(self, group_size, norm_before_gate, activation, casting):
        options = dict(norm_before_gate=norm_before_gate, activation=activation, casting=casting)
        kwargs = arguments(7, 96, dtype=torch.bfloat16, group_size=group_size, **options)
        self.assertCorrectness(rms_norm_gated, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize(
        ("model", "name", "sizes", "options"),
        [
            ("qwen3_next", "Qwen3NextRMSNormGated", (96,), {}),
            ("mamba2", "MambaRMSNormGated", (96, 24), {"norm_before_gate": False, "group_size": 24}),
            ("kimi_linear", "KimiLinearRMSNormGated", (96,), {"activation": "sigmoid", "casting": "gemma"}),
        ],
        ids=["qwen3_next", "mamba2", "kimi_linear"],
    )  # fmt: skip
    @dtypes(torch.float32, torch.bfloat16)
    def test_reference_is_the_models(self, model, name, sizes, options, dtype):
        try:
            module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        except ImportError:
            pytest.skip(f"this transformers has no {model}")
        norm_type = getattr(module, name)
        if "group_size" not in inspect.signature(norm_type).parameters:
            # Before transformers had groups: one of all columns.
            sizes, options = sizes[:1], {key: value for key, value in options.items() if key != "group_size"}
        norm = norm_type(*sizes, eps=1e-6).to(device(), dtype)
        kwargs = arguments(7, 96, dtype=dtype, **options)
        norm.weight.data.copy_(kwargs["weight"])
        torch.testing.assert_close(reference(**kwargs), norm(kwargs["x"], kwargs["gate"]), rtol=0, atol=0)

    @dtypes(torch.bfloat16)
    def test_rounds_as_the_reference(self, dtype):
        """Rounding once more or less would change the last bit of a quarter of the values."""
        kwargs = arguments(64, 256, dtype=dtype)
        assert (rms_norm_gated(**kwargs, backend="cutile") == reference(**kwargs)).float().mean() > 0.99

    def test_without_weight(self):
        kwargs = arguments(6, 80) | {"weight": None}
        self.assertCorrectness(rms_norm_gated, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("norm_before_gate", [True, False])
    def test_without_eps(self, norm_before_gate):
        """Tiles that are not full have rows of zeros besides, of which rstd is infinite."""
        device = 0 if HAS_GPU else -1
        kwargs = arguments(16 * sm_count(device) + 1, 4, norm_before_gate=norm_before_gate, eps=0.0)
        assert len(kwargs["x"]) % kernels.backward_plan(len(kwargs["x"]), 1, 4, device)[2]
        self.assertCorrectness(rms_norm_gated, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("wanted", ["x", "gate", "weight"])
    def test_gradient_of_one(self, wanted):
        self.assertCorrectness(rms_norm_gated, reference, arguments(5, 24), {"backend": "cutile"}, gradient=(wanted,))

    def test_dtypes_of_their_own(self):
        """As under autocast: a gate from a linear layer beside a norm kept in fp32."""
        kwargs = arguments(4, 40, dtype=torch.bfloat16)
        kwargs |= {"gate": kwargs["gate"].float(), "weight": kwargs["weight"].float()}
        self.assertCorrectness(rms_norm_gated, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize(
        "view",
        [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[::2, :32], lambda x: x[:1].expand(5, 64)],
        ids=["transposed", "every_other_column", "slice", "expanded"],
    )
    @pytest.mark.parametrize("group_size", [None, 16])
    def test_not_contiguous(self, view, group_size):
        kwargs = arguments(64, 64, dtype=torch.bfloat16, group_size=group_size)
        kwargs |= {name: view(kwargs[name]) for name in ("x", "gate")}
        kwargs["weight"] = kwargs["weight"][: kwargs["x"].shape[-1]]
        self.assertCorrectness(rms_norm_gated, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=str)
    @pytest.mark.parametrize("group_size", [None, 2])
    def test_empty(self, shape, group_size):
        kwargs = arguments(*shape) | {"group_size": group_size}
        self.assertCorrectness(rms_norm_gated, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.0], ids=str)
    @pytest.mark.parametrize("norm_before_gate", [True, False])
    def test_special_values(self, value, norm_before_gate):
        kwargs = arguments(4, 40, dtype=torch.bfloat16, norm_before_gate=norm_before_gate)
        kwargs["x"][1, 3] = value
        kwargs["gate"][2] = value
        self.assertCorrectness(rms_norm_gated, reference, kwargs, {"backend": "cutile"})

    def test_falls_back(self):
        for kwargs, why in (
            (arguments(2, 8, dtype=torch.float64), "not fp32, fp16 or bf16"),
            (arguments(1, 17000), "a group is longer than 16384"),
        ):
            with use_backend("cutile"), pytest.warns(FallbackWarning, match=why):
                y = rms_norm_gated(**kwargs)
            assert torch.equal(y, reference(**kwargs))

    @backends("rms_norm_gated")
    def test_wrong_arguments(self, backend):
        for error, message, wrong in (
            (ValueError, "x has shape", {"gate": randn(8)}),
            (ValueError, "weight has shape", {"weight": randn(7)}),
            (ValueError, "group_size is 3", {"group_size": 3}),
            (ValueError, "activation is 'relu'", {"activation": "relu"}),
            (ValueError, "casting is 'qwen'", {"casting": "qwen"}),
            (TypeError, "x is torch.int32", {"x": torch.ones(2, 8, dtype=torch.int32)}),
        ):
            with pytest.raises(error, match=f"rms_norm_gated: {message}"):
                rms_norm_gated(**arguments(2, 8) | wrong, backend=backend)

    @pytest.mark.parametrize(
        ("rows", "groups", "blocks"),
        [(0, 1, 0), (512, 1, 512), (4096, 1, 512), (16384, 1, 512), (262144, 1, 1024), (16384, 2048, 1)],
    )
    def test_blocks_of_the_backward_pass(self, rows, groups, blocks, monkeypatch):
        """As many as run at once, or half of them, so that each has up to four tiles; all have as many."""
        monkeypatch.setattr(kernels, "sm_count", lambda device: 132)
        assert kernels.backward_plan.__wrapped__(rows, groups, 128, 0)[1] == (blocks, groups)

    @pytest.mark.parametrize("n", [128, 4096])
    def test_compiles_for_every_architecture(self, n):
        x, gate, dy = (torch.empty(64, 4096, dtype=torch.bfloat16) for _ in range(3))
        w = torch.empty(4096, dtype=torch.bfloat16)
        assert_launches_compile(lambda: rms_norm_gated_forward(x, gate, w, 1e-6, True, n, True, True))
        assert_launches_compile(lambda: rms_norm_gated_backward(dy, x, gate, w, 1e-6, n > 128, n, True, True))

    @gpu
    def test_more_than_32_bits_of_elements(self):
        row = randn(1, 4096, dtype=torch.bfloat16)
        self.assertLargeInput(
            lambda x: rms_norm_gated(x, row.expand_as(x), None, 1e-6, group_size=128, backend="cutile"),
            2**19 + 5, 4096,
        )  # fmt: skip

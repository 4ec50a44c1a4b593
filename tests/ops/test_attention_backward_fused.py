"""The backward pass of ``fmha`` by one kernel that adds to dq atomically."""

import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import assert_compiles
from common import gpu
from common import recorded_launches
from common import some
from test_attention import GPU_SHAPES
from test_attention import OPTIONS
from test_attention import SHAPES
from test_attention import tensors
from test_attention_backward import QKV
from test_attention_backward import gradients
from test_attention_backward import named
from test_attention_backward import tile_constants
from test_attention_backward import with_sinks_of
from test_mla import SHAPES as LATENT_SHAPES
from test_mla import tensors as latent_tensors

from tilegym.ops import fmha
from tilegym.ops import mla
from tilegym.ops.cutile import attention_backward
from tilegym.ops.cutile.attention_backward_configs import fused_configs
from tilegym.ops.cutile.attention_backward_kernels import attention_dkdv_kernel
from tilegym.ops.cutile.attention_backward_rows import finish_fused_kernel
from tilegym.ops.cutile.attention_backward_rows import prepare_fused_kernel
from tilegym.ops.cutile.attention_common import tile_of
from tilegym.ops.pytorch.attention import fmha as reference
from tilegym.ops.pytorch.mla import mla as latent_reference

FUSED = [prepare_fused_kernel, attention_dkdv_kernel, finish_fused_kernel]
MEASURED = attention_backward.FUSED
SHAPE = (2, 4, 2, 17, 50, 100, 100)  # in one tile of 128 columns


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    monkeypatch.setenv("DISABLE_FALLBACK", "1")
    monkeypatch.setattr(attention_backward, "FUSED", {(d, c): 0 for d in (64, 128, 192, 256) for c in (True, False)})
    monkeypatch.setattr(attention_backward, "SHORT", 0)
    monkeypatch.setattr(attention_backward, "sm_count", lambda device: 0)
    monkeypatch.setattr(attention_backward, "_is_hopper", lambda device: True)


def backward_kernels(kwargs, names=QKV, function=fmha):
    kwargs = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    with recorded_launches(run=True) as launches:
        gradients(kwargs, names, function, backend="cutile")
    return [kernel for kernel, _ in launches[1:]]


class Test_FMHA_Fused_Backward(PyTestCase):
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("shape", [*SHAPES[:3], SHAPE] + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, dtype, is_causal, shape):
        kwargs = tensors(*shape, dtype=dtype) | {"is_causal": is_causal}
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)

    @pytest.mark.parametrize(
        "name",
        some(["scaling", "window", "window, not causal", "soft cap", "soft cap, full"], "window", "soft cap, full"),
    )
    def test_options(self, name):
        shape = (1, 4, 2, 17, 50, 144, 144) if name == "window" else SHAPE
        kwargs = tensors(*shape, dtype=torch.bfloat16) | OPTIONS[name]
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)
        assert backward_kernels(kwargs) == FUSED

    @pytest.mark.parametrize(
        "options", [{}, {"is_causal": False}, {"is_causal": False, "window_size": 20}, {"soft_cap": 2.0}], ids=str
    )
    def test_serves(self, options):
        assert backward_kernels(tensors(*SHAPE, dtype=torch.bfloat16) | options) == FUSED

    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("shape", [(1, 12, 2, 40, 50, 16, 16), (2, 6, 2, 33, 17, 40, 24)], ids=str)
    def test_parts_of_a_group(self, is_causal, shape, monkeypatch):
        """Where keys are few, the blocks of one take some heads of a group each, and the last launch adds up."""
        blocks = shape[0] * 2
        monkeypatch.setattr(attention_backward, "sm_count", lambda device: blocks * (1.6 if is_causal else 3.2))
        kwargs = tensors(*shape, dtype=torch.bfloat16) | {"is_causal": is_causal}
        kwargs = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
        with recorded_launches(run=True) as launches:
            gradients(kwargs, backend="cutile")
        assert [kernel for kernel, _ in launches[1:]] == FUSED
        assert named(*launches[-1])["dk_parts"].shape[1] == 6
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)

    def test_shares(self, monkeypatch):
        """What an H200 computes by one kernel, and in how many parts of a group: few blocks of unequal length would be
        waited for.
        """
        monkeypatch.setattr(attention_backward, "FUSED", MEASURED)
        monkeypatch.setattr(attention_backward, "sm_count", lambda device: 132)

        def shares(width, is_causal, shape, windowed=False):
            batch, heads, kv_heads, tokens = shape
            return attention_backward._shares(0, width, is_causal, windowed, batch, heads, kv_heads, tokens, tokens)

        for shape in ((1, 32, 4, 8192), (1, 32, 8, 4096), (4, 32, 8, 4096), (1, 16, 16, 2048), (4, 32, 8, 1024)):
            assert shares(128, True, shape) == 1
        assert shares(128, True, (1, 32, 8, 2048)) == shares(64, True, (1, 64, 8, 2048)) == 2
        assert shares(128, True, (1, 32, 4, 4096)) == shares(128, True, (1, 64, 8, 2048)) == 2
        assert shares(128, True, (1, 32, 4, 2048)) == shares(128, True, (1, 32, 8, 1024)) == 4
        assert shares(128, True, (1, 32, 8, 512)) == shares(128, True, (1, 8, 1, 2048)) == 0
        assert shares(64, True, (1, 64, 8, 1024)) == 4 and shares(64, True, (1, 64, 8, 512)) == 0
        assert shares(128, True, (4, 32, 8, 4096), windowed=True) == 0
        assert shares(128, False, (1, 32, 8, 1024)) == 2 and shares(128, False, (4, 32, 8, 4096)) == 1
        assert shares(128, False, (1, 1, 1, 1024), windowed=True) == shares(256, True, (1, 8, 4, 1024), True) == 1
        assert shares(256, True, (1, 8, 4, 4096)) == 1 and shares(256, True, (1, 8, 4, 2048)) == 0
        assert shares(256, False, (1, 8, 4, 2048)) == 1 and shares(256, False, (1, 8, 4, 1024)) == 0

    @pytest.mark.parametrize(("is_causal", "columns", "ndim"), [(True, 40, 5), (True, 32, 4), (False, 64, 4)])
    def test_dq_by_columns(self, is_causal, columns, ndim):
        """What a head dimension of 64 adds to dq is transposed in memory."""
        kwargs = tensors(2, 4, 2, 131, 70, columns, columns, dtype=torch.bfloat16) | {"is_causal": is_causal}
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)
        kwargs = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
        with recorded_launches(run=True) as launches:
            gradients(kwargs, backend="cutile")
        total = named(*launches[2])["dq"]
        assert total.ndim == ndim and total.shape[-1] == (132 if ndim == 5 else columns)

    def test_all_heads_take_turns_where_keys_are_few(self, monkeypatch):
        def turns(kwargs):
            kwargs = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
            with recorded_launches(run=True) as launches:
                gradients(kwargs, backend="cutile")
            return named(*launches[2])["INTERLEAVE"]

        monkeypatch.setattr(attention_backward, "ALL_IN_TURNS", 48)
        assert turns(tensors(1, 4, 2, 17, 48, 16, 16, dtype=torch.bfloat16)) == 0
        assert turns(tensors(1, 4, 2, 17, 49, 16, 16, dtype=torch.bfloat16)) == 8
        assert turns(tensors(1, 4, 2, 17, 48, 16, 16, dtype=torch.bfloat16) | {"is_causal": False}) == 1
        assert turns(tensors(1, 4, 2, 17, 50, 128, 128, dtype=torch.bfloat16)) == 4
        monkeypatch.setattr(attention_backward, "sm_count", lambda device: 5)
        assert turns(tensors(4, 4, 4, 17, 50, 128, 128, dtype=torch.bfloat16)) == 8

    @pytest.mark.parametrize(
        ("kv_heads", "group", "keys", "turns"),
        [(32, 4, 4096, 1), (8, 4, 8192, 1), (16, 2, 4096, 2), (8, 2, 8192, 2), (32, 2, 2048, 4), (4, 2, 4096, 8)],
    )
    def test_as_many_heads_take_turns_as_the_cache_holds(self, kv_heads, group, keys, turns, monkeypatch):
        """Of D 256; where there are few blocks, the last head's longest one would run alone."""
        monkeypatch.setattr(attention_backward, "sm_count", lambda device: 132)
        assert attention_backward._turns(0, 256, keys, 64, kv_heads, group) == turns
        assert attention_backward._turns(0, 64, keys, 128, kv_heads, group) == 8

    @pytest.mark.parametrize(
        ("keys", "is_causal", "parts"),
        [(128, False, 1), pytest.param(130, False, 2, marks=pytest.mark.slow), (128, True, 2)],
    )
    def test_dq_in_one_part(self, keys, is_causal, parts, monkeypatch):
        """Where no tile is masked in part, and in any case with D 128, dv is computed behind the first part of dq."""
        monkeypatch.setattr(attention_backward, "FEW_KEYS", 127)

        def constants(columns):
            kwargs = tensors(2, 4, 2, 37, keys, columns, columns, dtype=torch.bfloat16) | {"is_causal": is_causal}
            self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)
            kwargs = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
            with recorded_launches(run=True) as launches:
                gradients(kwargs, backend="cutile")
            return named(*launches[2])

        if not HAS_GPU:
            found = constants(24)
            assert found["PARTS_DQ"] == parts and found["DV_LAST"] == (parts == 1)
        found = constants(100)
        assert found["DV_LAST"] and (found["PARTS_DQ"] == 1) == (parts == 1)

    def test_heads_of_a_group_take_turns(self):
        """All heads of a group see their queries in the same order, in parts of a group too."""
        for group in (1, 3):
            kwargs = tensors(2, 2 * group, 2, 50, 50, 16, 16, dtype=torch.bfloat16)
            with recorded_launches(run=True) as launches:
                gradients(
                    {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}, backend="cutile"
                )
            assert named(*launches[2])["GROUP"] == group
            self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)

    @pytest.mark.parametrize(
        "name",
        some(
            ["padding mask", "mask of heads", "additive mask", "sinks", "lengths"], "padding mask", "sinks", "lengths"
        ),
    )
    def test_leaves_to_two_kernels(self, name):
        kwargs = tensors(*SHAPE, dtype=torch.bfloat16) | with_sinks_of(torch.bfloat16, OPTIONS[name])
        names = (*QKV, "sinks") if name == "sinks" else QKV
        assert not set(FUSED[::2]) & set(backward_kernels(kwargs, names))

    def test_sinks_without_gradient(self):
        kwargs = tensors(*SHAPE, dtype=torch.bfloat16) | with_sinks_of(torch.bfloat16, OPTIONS["sinks"])
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)
        assert backward_kernels(kwargs) == FUSED

    def test_leaves_fp32_to_two_kernels(self):
        assert not set(FUSED[::2]) & set(backward_kernels(tensors(*SHAPE)))

    @pytest.mark.parametrize("multiprocessors", [0, 2], ids=["whole groups", "parts of groups"])
    def test_deterministic_on_request(self, multiprocessors, monkeypatch):
        monkeypatch.setattr(attention_backward, "sm_count", lambda device: multiprocessors)
        kwargs = tensors(1, 4, 1, 17, 50, 16, 16, dtype=torch.bfloat16)
        torch.use_deterministic_algorithms(True)
        try:
            assert not set(FUSED[::2]) & set(backward_kernels(kwargs))
        finally:
            torch.use_deterministic_algorithms(False)
        assert backward_kernels(kwargs) == FUSED

    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    def test_what_is_behind_the_last_key_does_not_count(self, is_causal):
        """Scores so low that a key of zeros, as the tile has behind the last one, would have an infinite P."""
        kwargs = tensors(1, 2, 1, 40, 50, 16, 16, dtype=torch.bfloat16) | {"is_causal": is_causal, "scaling": 1.0}
        kwargs["q"], kwargs["k"] = kwargs["q"] * 0.1 + 8, kwargs["k"] * 0.1 - 8
        assert all(gradient.isfinite().all() for gradient in gradients(kwargs, backend="cutile"))
        self.assertCorrectness(fmha, reference, kwargs, {"backend": "cutile"}, gradient=QKV)

    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("shape", LATENT_SHAPES, ids=str)
    def test_latent_attention(self, shape, is_causal):
        kwargs = latent_tensors(*shape, dtype=torch.bfloat16) | {"is_causal": is_causal}
        names = (*QKV, "qpe", "kpe")
        self.assertCorrectness(mla, latent_reference, kwargs, {"backend": "cutile"}, gradient=names)
        assert backward_kernels(kwargs, names, mla) == FUSED

    def test_latent_attention_keeps_groups_whole(self, monkeypatch):
        monkeypatch.setattr(attention_backward, "sm_count", lambda device: 10**6)
        kwargs = latent_tensors(2, 4, 2, 17, 50, 40, 24, 20, dtype=torch.bfloat16) | {"is_causal": False}
        assert kwargs["q"].shape[1] > kwargs["k"].shape[1]
        names = (*QKV, "qpe", "kpe")
        assert backward_kernels(kwargs, names, mla) == FUSED
        self.assertCorrectness(mla, latent_reference, kwargs, {"backend": "cutile"}, gradient=names)

    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize(("head_dim", "parts"), [(64, 1), (64, 2), (128, 1), (128, 2), (256, 1)])
    def test_compiles(self, head_dim, parts, is_causal):
        q, k, v, do, out, dk, dv, dq = (
            torch.empty(2, h, 128, head_dim, dtype=torch.bfloat16) for h in (4, 2, 2, 4, 4, 2 * parts, 2 * parts, 4)
        )
        if parts > 1:
            dk, dv = dk.float(), dv.float()
        lse, delta = torch.empty(1, 2, 4, 128), torch.empty(1, 2, 4, 128)
        total = torch.empty((1, 2, 4, 64, 128) if head_dim == 64 and is_causal else q.shape)
        config = fused_configs("sm_90", head_dim, not is_causal)[0]
        tiles, whole = tile_constants(config, head_dim), tile_of(head_dim)
        tile_dq = min(vars(config).get("TILE_DQ", tiles[2]), tiles[2])
        constants = (
            *tiles,
            is_causal,
            False,
            False,
            0,
            1,
            False,
            False,
            is_causal,
            config.TWO_LOOPS,
            False,
            8,
            tile_dq,
            tiles[2] * tiles[3] // tile_dq,
            2 // parts,
            vars(config).get("DV_LAST", False),
        )
        kernel = attention_dkdv_kernel.replace_hints(**config.hints)
        arrays = (q, k, v, do, lse, delta, 0, 0, dk, dv, total, 0, 0, 0, 0)
        assert_compiles(kernel, (*arrays, 0.1, 1.0, 0, *constants), ("sm_90",))
        rows, small = attention_backward.ROWS, attention_backward.PREPARED // whole
        zeros = torch.empty(q.shape)
        assert_compiles(prepare_fused_kernel, (out, do, delta, zeros, 0, small, whole, 0, whole), ("sm_90",))
        sums = (dk, dv, k, v) if parts > 1 else (0, 0, 0, 0)
        tiles = (rows, whole, 0, attention_backward.SUM_ROWS, whole, parts)
        assert_compiles(finish_fused_kernel, (total, dq, 0, 0, *sums, 0.1, *tiles), ("sm_90",))

    @gpu
    def test_graph_capture(self):
        kwargs = tensors(2, 8, 2, 300, 500, 128, 128, dtype=torch.bfloat16)

        def call(q, k, v):
            inputs = [t.requires_grad_() for t in (q.detach(), k.detach(), v.detach())]
            return torch.autograd.grad(fmha(*inputs, backend="cutile").square().sum(), inputs)[1:]

        self.assertCaptures(call, *kwargs.values())

"""The backward pass of ``mla``: its operator, its kernels in every configuration, and what it keeps in memory."""

import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import assert_compiles
from common import assert_launches_compile
from common import device
from test_attention_backward import QKV
from test_attention_backward import gradients
from test_attention_backward_fused import backward_kernels
from test_mla import GPU_SHAPES
from test_mla import SHAPES
from test_mla import lengths
from test_mla import tensors

from tilegym.ops import mla
from tilegym.ops.cutile import attention_backward
from tilegym.ops.cutile.attention_backward_kernels import attention_dkdv_kernel
from tilegym.ops.cutile.attention_backward_kernels import attention_dq_kernel
from tilegym.ops.cutile.attention_common import KEY_MASK
from tilegym.ops.cutile.attention_common import NO_MASK
from tilegym.ops.cutile.mla import mla_backward
from tilegym.ops.cutile.mla import mla_forward_lse
from tilegym.ops.pytorch.mla import mla as reference

NAMES = (*QKV, "qpe", "kpe")
KINDS = {
    "dq": attention_backward.dq_configs,
    "dkdv": attention_backward.dkdv_configs,
    "fused": attention_backward.fused_configs,
}


class Test_MLA_Backward(PyTestCase):
    @pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
    @pytest.mark.parametrize("shape", [*SHAPES[::2], *(GPU_SHAPES if HAS_GPU else [])], ids=str)
    def test_op(self, is_causal, shape):
        kwargs = tensors(*shape, dtype=torch.bfloat16) | {"is_causal": is_causal}
        self.assertCorrectness(mla, reference, kwargs, {"backend": "cutile"}, gradient=NAMES)

    def test_two_kernels(self):
        kernels = backward_kernels(tensors(*SHAPES[1], dtype=torch.bfloat16), NAMES, mla)
        assert kernels == [attention_dq_kernel, attention_dkdv_kernel]

    def test_operators(self):
        q, k, v, qpe, kpe = tensors(1, 2, 1, 9, 12, 16, 16, 16, dtype=torch.bfloat16).values()
        options = (0.25, True, None, lengths(11))
        torch.library.opcheck(mla_forward_lse.operator, (q, k, v, qpe, kpe, *options))
        out, lse = mla_forward_lse(q, k, v, qpe, kpe, *options)
        torch.library.opcheck(mla_backward.operator, (out, q, k, v, qpe, kpe, out, lse, *options))

    @pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 4, 4), (1, 0, 4), (1, 4, 0)])
    def test_empty(self, batch, queries, keys):
        kwargs = tensors(batch, 2, 1, queries, keys, 16, 8, 16)
        for name, gradient in zip(NAMES, gradients(kwargs, NAMES, mla, backend="cutile"), strict=True):
            assert gradient.shape == kwargs[name].shape and not gradient.any()

    def test_what_lies_behind_the_last_key_does_not_matter(self):
        kwargs = tensors(*SHAPES[1]) | {"kv_len": lengths(20, 41)}
        expected = gradients(kwargs, NAMES, reference)
        for b, length in enumerate((20, 41)):
            for name in ("k", "v", "kpe"):
                kwargs[name][b, :, length:] = torch.nan
        for got, want in zip(gradients(kwargs, NAMES, mla, backend="cutile"), expected, strict=True):
            torch.testing.assert_close(got, want)

    @pytest.mark.parametrize(
        ("kind", "n", "padding"),
        [
            (kind, n, padding)
            for kind, configs in KINDS.items()
            for n in range(len(configs("sm_90", 192)))
            for padding in (False, True)
            # Of dq's the second is the first, with its heads in turns.
            if (kind, n) != ("dq", 1) and (kind, padding) != ("fused", True)
        ],
    )
    def test_compiles(self, kind, n, padding):
        def empty(*shape, dtype=torch.bfloat16):
            return torch.empty(2, *shape, dtype=dtype)

        config, fused = KINDS[kind]("sm_90", 192)[n], kind == "fused"
        q, k, v, out, do = empty(4, 48, 128), empty(4, 48, 128), empty(4, 48, 128), empty(4, 48, 128), empty(4, 48, 128)
        lse, delta = torch.empty(1, 2, 4, 48), torch.empty(1, 2, 4, 48)
        qpe, kpe = empty(4, 48, 64), empty(1, 48, 64)
        total, total_pe = (empty(4, 48, d, dtype=torch.float32) if fused else 0 for d in (128, 64))
        mask, mask_kind = (torch.empty(2, 1, 1, 48).bool(), KEY_MASK) if padding else (0, NO_MASK)
        tile = (config.TILE_M, config.TILE_N, config.TILE_P, 128 // config.TILE_P, 64, 128, 0)
        constants = (*tile, True, False, False, mask_kind, 1, False, False, True, config.TWO_LOOPS, False, 1)
        parts_of_dq = (config.TILE_P, 128 // config.TILE_P) if fused else (0, 0)
        more = (False,) if kind == "dq" else (*parts_of_dq, 0, False)
        if kind == "dq":
            kernel = attention_dq_kernel
            arrays = (q, k, v, out, do, lse, mask, 0, empty(4, 48, 128), delta, qpe, kpe, empty(4, 48, 64))
        else:
            kernel = attention_dkdv_kernel
            dk, dv, dkpe = empty(4, 48, 128), empty(4, 48, 128), empty(4, 48, 64)
            arrays = (q, k, v, do, lse, delta, mask, 0, dk, dv, total, qpe, kpe, dkpe, total_pe)
        assert_compiles(kernel.replace_hints(**config.hints), (*arrays, 0.1, 1.0, 0, *constants, *more), ("sm_90",))

    def test_compiles_without_copy_engine(self):
        kwargs = {name: t.half().cpu() for name, t in tensors(1, 2, 1, 20, 24, 32, 16, 32).items()}
        assert_launches_compile(lambda: gradients(kwargs, NAMES, mla, backend="cutile"), ("sm_80",))

    def test_joined_columns_are_not_padded_to_a_power_of_two(self):
        """A head dimension of 192 that comes in one piece takes three parts of 64 columns, not two of 128."""
        q = torch.empty(1, 1, 64, 192, device=device())
        suited = [c for c in attention_backward.dq_configs("sm_90", 192) if attention_backward._suits_queries(q, c)]
        assert suited and all(config.TILE_P == 64 for config in suited)

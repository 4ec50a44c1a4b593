import math

import pytest
import torch
from common import ARCHITECTURES
from common import HAS_GPU
from common import PyTestCase
from common import assert_compiles
from common import backends
from common import device
from common import dtypes
from common import gpu
from common import of_plain_sdpa
from common import randn
from common import recorded_launches
from common import registers_of
from common import sanitized
from torch.utils._python_dispatch import TorchDispatchMode

from tilegym import interpreter
from tilegym.backend import dispatcher
from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.errors import UnsupportedError
from tilegym.ops import fmha_decode
from tilegym.ops import mla_decoding
from tilegym.ops import mla_decoding_split_kv
from tilegym.ops.cutile import mla_decoding as implementation
from tilegym.ops.cutile.mla_decoding import mla_decoding_forward
from tilegym.ops.cutile.mla_decoding import plan
from tilegym.ops.cutile.mla_decoding_kernels import merge_kernel
from tilegym.ops.cutile.mla_decoding_kernels import mla_decoding_kernel
from tilegym.ops.cutile.splitk_reduce import STATE_COLUMNS
from tilegym.ops.pytorch.mla_decoding import mla_decoding as reference
from tilegym.ops.pytorch.mla_decoding import mla_decoding_split_kv as split_reference

# B, H, S, D, Dr: one tile of heads; several, ragged, nothing a power of two; one key.
SHAPES = [(2, 16, 150, 64, 16), (1, 70, 33, 40, 24), (2, 4, 1, 32, 16)]
GPU_SHAPES = [(4, 16, 8192, 512, 64), (1, 128, 4097, 512, 64), (3, 40, 700, 512, 64), (64, 16, 1000, 512, 64)]


def tensors(batch, heads, keys, dim, rope_dim, dtype=torch.float32):
    # As a model has them: a cache of latents beside one of keys; the absorbed queries come from a product over heads.
    return dict(
        q=randn(heads, batch, dim, dtype=dtype).transpose(0, 1),
        qpe=randn(batch, heads, rope_dim, dtype=dtype, seed=1),
        kv=randn(batch, keys, dim, dtype=dtype, seed=2),
        kpe=randn(batch, keys, rope_dim, dtype=dtype, seed=3),
        sm_scale=0.2,
    )


def doubles(kwargs):
    return {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()}


def boolean(*shape):
    return randn(*shape, seed=4) > -0.5


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32, device=device())


OPTIONS = {
    "scale": dict(sm_scale=0.1),
    "lengths": dict(kv_len=lengths(150, 31)),
    "lengths beyond the ends": dict(kv_len=lengths(0, 999)),
    "padding mask": dict(attention_mask=boolean(2, 1, 1, 150)),
    "mask of heads": dict(attention_mask=boolean(2, 16, 1, 150)),
    "all masked": dict(attention_mask=torch.zeros(150, dtype=torch.bool, device=device())),
    "additive mask": dict(attention_mask=randn(1, 16, 1, 150, seed=5).masked_fill(~boolean(150), -math.inf)),
    "mask and lengths": dict(attention_mask=boolean(2, 1, 1, 150), kv_len=lengths(140, 60)),
}


def in_its_dtype(**kwargs):
    """``reference`` with the log-sums of scores in the inputs' dtype, as PyTorch's own attention has them.

    The reference widens 16 bits to fp32 for them. The tensor cores take 16 bits as they are, and cut off what they add.
    """
    out, lse = reference(**kwargs)
    q, qpe, kv, kpe, sm_scale = (kwargs[name] for name in ("q", "qpe", "kv", "kpe", "sm_scale"))
    if q.dtype in (torch.float16, torch.bfloat16):
        scores = torch.cat((q, qpe), -1) @ torch.cat((kv, kpe), -1).mT
        lse = (scores.float() * sm_scale).logsumexp(-1)
    return out, lse


class Largest(TorchDispatchMode):
    """How many elements the largest tensor has that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple) else (result,):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return result


class Test_MLA_Decoding(PyTestCase):
    @backends("mla_decoding")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        kwargs = tensors(*shape, dtype=dtype)
        self.assertCorrectness(mla_decoding, in_its_dtype, kwargs, {"backend": backend})
        if dtype != torch.float32:  # far more exact than that: to some roundings of fp32
            lse, exact = mla_decoding(**kwargs, backend=backend)[1], reference(**doubles(kwargs))[1]
            assert (lse.double() - exact).abs().max() <= 12 * torch.finfo(torch.float32).eps * exact.abs().max()

    @dtypes(torch.float32, torch.bfloat16)
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_options(self, dtype, options):
        kwargs = tensors(*SHAPES[0], dtype=dtype) | options
        self.assertCorrectness(mla_decoding, reference, kwargs, {"backend": "cutile"})

    @pytest.mark.parametrize("name", ["lengths", "mask of heads", "additive mask"])
    @pytest.mark.parametrize("transpose", [True, False], ids=["keys left", "heads left"])
    def test_layouts_of_the_scores(self, name, transpose):
        kwargs = tensors(*SHAPES[0]) | OPTIONS[name]
        with recorded_launches(run=True) as launches:
            self.assertCorrectness(mla_decoding, reference, kwargs, {"backend": "cutile", "transpose": transpose})
        if not HAS_GPU:
            assert launches[0][1][14] is transpose

    @backends("mla_decoding")
    def test_is_the_definition(self, backend):
        kwargs = tensors(*SHAPES[0])
        q, qpe, kv, kpe = (kwargs[name].double() for name in ("q", "qpe", "kv", "kpe"))
        scores = (q @ kv.mT + qpe @ kpe.mT) * 0.2
        with sanitized():
            out, lse = mla_decoding(**kwargs, backend=backend)
        torch.testing.assert_close(out, (scores.softmax(-1) @ kv).float())
        torch.testing.assert_close(lse, scores.logsumexp(-1).float())

    @pytest.mark.parametrize("options", [{}, OPTIONS["mask of heads"]], ids=["plain", "mask"])
    def test_no_head_has_keys_of_its_own(self, options):
        """PyTorch's own attention with a head of keys for each of queries would write them out; nothing that is written
        is larger than the latents."""
        kwargs = tensors(*SHAPES[0]) | options
        with Largest() as largest:
            mla_decoding(**kwargs, backend="pytorch")
        assert largest.elements == kwargs["kv"].numel()

    @backends("mla_decoding")
    def test_is_attention_with_one_kv_head(self, backend):
        kwargs = tensors(*SHAPES[0])
        q, k = torch.cat((kwargs["q"], kwargs["qpe"]), -1), torch.cat((kwargs["kv"], kwargs["kpe"]), -1)
        expected = fmha_decode(q[:, :, None], k[:, None], kwargs["kv"][:, None], 0.2, backend=backend)[:, :, 0]
        torch.testing.assert_close(mla_decoding(**kwargs, backend=backend)[0], expected)

    @backends("mla_decoding")
    def test_lse_merges_parts_of_the_keys(self, backend):
        kwargs = tensors(*SHAPES[0])
        whole, lse = mla_decoding(**kwargs, backend=backend)
        parts = []
        for share in (slice(0, 70), slice(70, 150)):
            part = kwargs | {name: kwargs[name][:, share] for name in ("kv", "kpe")}
            parts.append(mla_decoding(**part, backend=backend))
        outs, logs = (torch.stack(t) for t in zip(*parts, strict=True))
        torch.testing.assert_close(logs.logsumexp(0), lse)
        torch.testing.assert_close((logs.softmax(0)[..., None] * outs).sum(0), whole)

    @pytest.mark.parametrize("kv_len_per_split", [None, 1, 37, 1000])
    @dtypes(torch.float32, torch.bfloat16)
    def test_splits(self, dtype, kv_len_per_split):
        kwargs = tensors(*SHAPES[0], dtype=dtype) | {"kv_len_per_split": kv_len_per_split, "kv_len": lengths(150, 3)}
        self.assertCorrectness(mla_decoding_split_kv, split_reference, kwargs, {"backend": "cutile"})

    # Blocks that merge have 256 columns each: a part of them, two blocks' and those of a second that are not all there.
    @pytest.mark.parametrize("keys, dim", [(700, 64), (80, 512), (300, 300)])
    def test_splits_are_merged_in_turns_and_columns(self, keys, dim):
        kwargs = tensors(1, 4, keys, dim, 16, dtype=torch.bfloat16) | {"kv_len_per_split": 16}
        self.assertCorrectness(mla_decoding_split_kv, split_reference, kwargs, {"backend": "cutile"})

    def test_splits_do_not_depend_on_lengths(self):
        """A captured graph replays with other lengths: the grid must be that of the cache."""
        kwargs = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in tensors(*SHAPES[0]).items()}
        shapes = []
        for kv_len in ([1, 1], [150, 150]):
            with recorded_launches() as launches:
                mla_decoding(**kwargs, kv_len=torch.tensor(kv_len), backend="cutile")
            shapes.append([args[4].shape for _, args in launches[:1]] + [len(launches)])
        assert shapes[0] == shapes[1] and shapes[0][1] == 2

    @backends("mla_decoding_split_kv")
    @pytest.mark.parametrize("kv_len_per_split", [None, 1000])
    def test_what_lies_behind_the_last_key_does_not_matter(self, backend, kv_len_per_split):
        kwargs = tensors(*SHAPES[0]) | {"kv_len": lengths(20, 100), "kv_len_per_split": kv_len_per_split}
        expected = split_reference(**kwargs)
        for b, length in enumerate((20, 100)):
            kwargs["kv"][b, length:] = math.nan
            kwargs["kpe"][b, length:] = math.inf
        with sanitized():
            torch.testing.assert_close(mla_decoding_split_kv(**kwargs, backend=backend), expected)

    @backends("mla_decoding")
    @dtypes()
    def test_mask_in_fp64(self, backend, dtype):
        kwargs = tensors(2, 4, 20, 32, 16, dtype=dtype) | {"attention_mask": randn(20)}
        got = mla_decoding(**kwargs | {"attention_mask": kwargs["attention_mask"].double()}, backend=backend)
        torch.testing.assert_close(got, mla_decoding(**kwargs, backend=backend))

    @pytest.mark.parametrize("where", ["q", "qpe", "kv", "kpe"])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_nan_and_infinity(self, where, value):
        kwargs = tensors(1, 16, 60, 32, 16)
        kwargs[where][0, 1, 3] = value
        self.assertCorrectness(mla_decoding_split_kv, of_plain_sdpa(split_reference), kwargs, {"backend": "cutile"})

    @backends("mla_decoding")
    @pytest.mark.parametrize(("batch", "keys"), [(0, 4), (1, 0)])
    def test_empty(self, backend, batch, keys):
        for kv_len in (None, lengths(*[keys] * batch)):
            out, lse = mla_decoding(**tensors(batch, 4, keys, 32, 16), kv_len=kv_len, backend=backend)
            assert out.shape == (batch, 4, 32) and not out.any()
            assert lse.shape == (batch, 4) and (lse == -math.inf).all()

    def test_strides(self):
        """Latents and rotated keys as parts of one cache, [B, S, D + Dr], and every other row of it."""
        kwargs = tensors(*SHAPES[0])
        cache = torch.cat((kwargs["kv"], kwargs["kpe"]), -1).repeat_interleave(2, 1)[:, ::2]
        kwargs["kv"], kwargs["kpe"] = cache.split((64, 16), -1)
        kwargs["qpe"] = kwargs["qpe"].mT.contiguous().mT
        self.assertCorrectness(mla_decoding, reference, kwargs, {"backend": "cutile"})

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda a: a | {"kv": a["kv"].requires_grad_()}, "no backward kernel"),
            (lambda a: {n: t.double() if isinstance(t, torch.Tensor) else t for n, t in a.items()}, "fp32, fp16"),
            (lambda a: tensors(1, 4, 5, 520, 16), "latents up to 512"),
            (lambda a: a | {"sm_scale": -1.0}, "positive scales"),
        ],
        ids=["gradient", "fp64", "wide latents", "negative scale"],
    )
    def test_unsupported_falls_back(self, change, reason, monkeypatch):
        kwargs = change(tensors(1, 4, 5, 32, 16))
        dispatcher._warned.clear()
        with use_backend("cutile"), pytest.warns(FallbackWarning, match=reason):
            torch.testing.assert_close(mla_decoding(**kwargs), reference(**kwargs), rtol=0, atol=0)
        monkeypatch.setenv("DISABLE_FALLBACK", "1")
        for op in (mla_decoding, mla_decoding_split_kv):
            with pytest.raises(UnsupportedError, match=reason):
                op(**kwargs, backend="cutile")

    @backends("mla_decoding")
    @pytest.mark.parametrize(
        ("wrong", "error", "message"),
        [
            (dict(q=randn(1, 4, 1, 32)), ValueError, "three dimensions"),
            (dict(q=randn(1, 4, 16)), ValueError, "expected q \\[B, H, D\\]"),
            (dict(kpe=randn(1, 4, 16)), ValueError, "kpe \\[B, S, Dr\\]"),
            (dict(kpe=randn(1, 5, 16).half()), TypeError, "one dtype"),
            (dict(kv_len=lengths(1, 2)), ValueError, "kv_len must be \\[1\\]"),
            (dict(kv_len=randn(1)), TypeError, "kv_len must be of integers"),
            (dict(kv_len=[3]), TypeError, "kv_len must be a tensor or None, it is a list"),
            (dict(sm_scale=None), TypeError, "sm_scale must be a number, it is None"),
            (dict(attention_mask=boolean(1, 1, 1, 6)), ValueError, "cannot be broadcast"),
        ],
        ids=lambda p: "" if not isinstance(p, dict) else next(iter(p)),
    )
    def test_wrong_arguments(self, backend, wrong, error, message):
        for op in (mla_decoding, mla_decoding_split_kv):
            with pytest.raises(error, match=f"{op.op.name}: .*{message}"):
                op(**tensors(1, 4, 5, 32, 16) | wrong, backend=backend)
        with pytest.raises(ValueError, match="kv_len_per_split must be at least 1"):
            mla_decoding_split_kv(**tensors(1, 4, 5, 32, 16), kv_len_per_split=0, backend=backend)

    def test_compiled(self):
        kwargs = tensors(*SHAPES[0]) | OPTIONS["mask and lengths"]

        def call(q, qpe, kv, kpe, kv_len):
            changed = {"q": q * 2, "qpe": qpe, "kv": kv, "kpe": kpe, "kv_len": kv_len}
            out, lse = mla_decoding(**kwargs | changed, backend="cutile")
            return out.relu() + lse[..., None]

        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True, backend="inductor" if HAS_GPU else "aot_eager")
        for kv_len in (kwargs["kv_len"], lengths(9, 150)):
            inputs = (*(kwargs[name] for name in ("q", "qpe", "kv", "kpe")), kv_len)
            torch.testing.assert_close(compiled(*inputs), call(*inputs), rtol=0, atol=0)

    def test_operator(self):
        *inputs, scale = tensors(*SHAPES[0]).values()
        torch.library.opcheck(mla_decoding_forward.operator, (*inputs, scale, None, None, None, None))
        options = (True, 40, lengths(9, 150), boolean(2, 1, 1, 150))
        torch.library.opcheck(mla_decoding_forward.operator, (*inputs, scale, *options))

    @pytest.mark.parametrize("arch", ARCHITECTURES)
    @pytest.mark.parametrize("heads", [16, 128])
    def test_real_tiles_compile(self, arch, heads, monkeypatch):
        monkeypatch.setattr(implementation, "fits_wide", lambda index: arch in ("sm_90", "sm_100"))
        q, qpe = torch.empty(2, heads, 512, dtype=torch.bfloat16), torch.empty(2, heads, 64, dtype=torch.bfloat16)
        kv, kpe = torch.empty(2, 4096, 512, dtype=torch.bfloat16), torch.empty(2, 4096, 64, dtype=torch.bfloat16)
        partial, kv_len = torch.empty(2, heads, 8, 512 + STATE_COLUMNS), torch.empty(2, dtype=torch.int32)
        for shape in implementation.shapes_for(heads, 2, 0):
            kernel = (
                mla_decoding_kernel.replace_hints(num_worker_warps=shape.warps) if shape.warps else mla_decoding_kernel
            )
            tiles = (shape.heads, shape.keys, shape.part, 512 // shape.part, 64, shape.keys_left)
            args = (q, qpe, kv, kpe, partial, 0, 0, kv_len, 0.1, *tiles, 0, 1, True, False, False, arch == "sm_90")
            assert_compiles(kernel, args, (arch,))

    @pytest.mark.parametrize("name", ["all masked", "additive mask"])
    def test_everything_compiles(self, name, monkeypatch):
        monkeypatch.setattr(implementation, "fits_wide", lambda index: True)
        monkeypatch.setattr(implementation, "sm_count", lambda index: 132)
        monkeypatch.setattr(implementation, "plan", lambda *a: plan.__wrapped__(*a[:-1], 0))  # that of a GPU
        kwargs = {k: v.cpu().half() if isinstance(v, torch.Tensor) else v for k, v in tensors(*SHAPES[0]).items()}
        with recorded_launches() as launches:
            mla_decoding_split_kv(
                **kwargs, attention_mask=OPTIONS[name]["attention_mask"].cpu(), kv_len_per_split=64, backend="cutile"
            )
        assert [kernel._pyfunc.__name__ for kernel, _ in launches] == ["mla_decoding_kernel", "merge_kernel"]
        for kernel, args in launches:
            assert_compiles(kernel, args, ARCHITECTURES if kernel is merge_kernel else ("sm_90",))

    @pytest.mark.parametrize("dim, splits, registers", [(512, 4, 64), (512, 16, 168), (512, 40, 168), (400, 40, 255)])
    def test_merges_leave_registers_to_many_blocks(self, dim, splits, registers):
        partial, out = torch.empty(2, 128, splits, dim + STATE_COLUMNS), torch.empty(2, 128, dim, dtype=torch.bfloat16)
        options = (min(splits, 16), 512, splits > 16, dim == 512, True)
        args = (partial, out, torch.empty(2, 128), 0.1, *options)
        assert registers_of(interpreter.compile_kernel(merge_kernel, args, "sm_90")) <= registers

    @gpu
    def test_more_than_2_to_the_31_elements(self):
        kv = torch.empty(66, 65536, 512, device=device(), dtype=torch.bfloat16).normal_()
        kpe = torch.empty(66, 65536, 64, device=device(), dtype=torch.bfloat16).normal_()
        q, qpe = randn(66, 16, 512, dtype=torch.bfloat16), randn(66, 16, 64, dtype=torch.bfloat16)
        out, lse = mla_decoding(q, qpe, kv, kpe, 0.05, backend="cutile")
        last = reference(q[-1:], qpe[-1:], kv[-1:], kpe[-1:], 0.05)
        torch.testing.assert_close((out[-1:], lse[-1:]), last, rtol=2e-2, atol=2e-2)

    @gpu
    @pytest.mark.parametrize("heads", [16, 128])
    def test_graph_replays_with_new_inputs_and_lengths(self, heads):
        kwargs = tensors(2, heads, 2048, 512, 64, dtype=torch.bfloat16) | {"kv_len": lengths(2048, 20)}
        kwargs["q"] = kwargs["q"].contiguous()
        mla_decoding(**kwargs, backend="cutile")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = mla_decoding(**kwargs, backend="cutile")
        for values in ((1, 1), (700, 2000)):
            kwargs["kv_len"].copy_(lengths(*values))
            kwargs["q"].copy_(randn(*kwargs["q"].shape, dtype=torch.bfloat16, seed=values[0]))
            graph.replay()
            torch.testing.assert_close(captured, mla_decoding(**kwargs, backend="cutile"), rtol=0, atol=0)
            torch.testing.assert_close(captured, reference(**kwargs), rtol=2e-2, atol=2e-2)


class Test_Plan:
    @pytest.fixture(autouse=True)
    def hopper(self, monkeypatch):
        monkeypatch.setattr(implementation, "sm_count", lambda index: 132)
        monkeypatch.setattr(implementation, "fits_wide", lambda index: True)
        plan.cache_clear()
        yield
        plan.cache_clear()

    @staticmethod
    def planned(batch, heads, keys):
        (blocks, splits), (tile_h, tile_n, *_), _ = plan(batch, heads, keys, 512, 64, 2, None, None, 0)
        assert blocks == batch * -(-heads // tile_h)
        return tile_h, tile_n, blocks, splits

    # What was the fastest of all on an H200, or at most 6 % slower.
    @pytest.mark.parametrize(
        "batch, heads, keys, tile_h, tile_n, splits",
        [
            (1, 128, 512, 16, 64, 8),
            (1, 128, 2048, 16, 128, 16),
            (1, 128, 8192, 32, 128, 32),
            (1, 128, 32768, 32, 128, 32),
            (4, 128, 2048, 32, 128, 8),
            (16, 128, 512, 16, 128, 1),
            (16, 128, 8192, 64, 64, 4),
            (64, 128, 512, 64, 64, 1),
            (64, 128, 8192, 64, 64, 1),
            (1, 16, 512, 16, 64, 8),
            (1, 16, 8192, 16, 128, 64),
            (1, 16, 32768, 16, 128, 64),
            (16, 16, 512, 16, 128, 4),
            (16, 16, 8192, 16, 128, 8),
            (64, 16, 8192, 16, 128, 2),
            (16, 64, 8192, 64, 64, 8),
            (64, 64, 2048, 64, 64, 2),
        ],
    )
    def test_measured(self, batch, heads, keys, tile_h, tile_n, splits):
        assert self.planned(batch, heads, keys)[::3] == (tile_h, splits)
        assert self.planned(batch, heads, keys)[1] == tile_n

    def test_waves_are_full(self):
        """What 96 or 200 blocks take alone is less than two waves."""
        for batch in (48, 100):
            _, _, blocks, splits = self.planned(batch, 128, 8192)
            waves = blocks * splits / 132
            assert splits > 1 and waves / math.ceil(waves) > 0.85

    def test_no_more_splits_than_pay(self):
        assert self.planned(1, 16, 1)[3] == 1
        assert self.planned(132, 16, 8192)[3] == 1
        assert self.planned(10**6, 128, 8192)[3] == 1
        assert self.planned(0, 128, 8192)[3] >= 1
        assert 100 <= self.planned(1, 16, 10**6)[3] <= 256

    def test_splits_that_are_asked_for(self):
        assert plan(1, 128, 1000, 512, 64, 2, None, 100, 0)[0][1] == 10
        assert plan(1, 128, 10**6, 512, 64, 2, None, 1, 0)[0][1] == 256

    def test_tiles(self):
        for heads in (1, 16, 20, 64, 128):
            for transpose in (None, True, False):
                _, tiles, _ = plan(2, heads, 4096, 512, 64, 2, transpose, None, 0)
                tile_h, tile_n, part, parts, tile_r, keys_left = tiles
                assert 16 <= tile_h <= 64 and part * parts == 512 and tile_r == 64
                if transpose is None:
                    assert (tile_n if keys_left else tile_h) >= 64
                else:
                    assert keys_left == transpose
        assert plan(2, 16, 4096, 300, 64, 2, None, None, 0)[1][2:4] == (128, 3)
        assert plan(2, 128, 4096, 130, 24, 2, None, None, 0)[1][2:5] == (128, 2, 32)

    def test_where_shared_memory_is_small(self, monkeypatch):
        monkeypatch.setattr(implementation, "fits_wide", lambda index: False)
        for heads in (16, 32, 128):
            assert self.planned(4, heads, 4096)[1] == 64

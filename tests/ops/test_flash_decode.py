import math

import pytest
import torch
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
from common import sanitized

from tilegym.backend import dispatcher
from tilegym.backend import recording
from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.ops import fmha
from tilegym.ops import fmha_decode
from tilegym.ops import splitk_reduce
from tilegym.ops.cutile import flash_decode_plan
from tilegym.ops.cutile.flash_decode import decode_forward
from tilegym.ops.cutile.flash_decode import decode_kernel
from tilegym.ops.cutile.flash_decode_fp32 import decode_rows_kernel
from tilegym.ops.cutile.flash_decode_plan import LAST_BLOCK
from tilegym.ops.cutile.flash_decode_plan import NEXT_LAUNCH
from tilegym.ops.cutile.flash_decode_plan import ONE_SPLIT
from tilegym.ops.cutile.flash_decode_plan import choose_merge
from tilegym.ops.cutile.flash_decode_plan import choose_splits
from tilegym.ops.cutile.flash_decode_plan import choose_tiles
from tilegym.ops.cutile.flash_decode_plan import max_splits
from tilegym.ops.cutile.splitk_reduce import AT_ONCE
from tilegym.ops.cutile.splitk_reduce import IN_ORDER
from tilegym.ops.cutile.splitk_reduce import IN_TURNS
from tilegym.ops.cutile.splitk_reduce import STATE_COLUMNS
from tilegym.ops.cutile.splitk_reduce import splitk_reduce_forward
from tilegym.ops.cutile.workspace import COUNTERS
from tilegym.ops.pytorch.flash_decode import fmha_decode as reference
from tilegym.ops.pytorch.splitk_reduce import splitk_reduce as splitk_reference

# B, Hq, Hkv, Skv, D, Dv: groups of one, a few, more than sixteen; one key and many.
SHAPES = [(2, 8, 2, 150, 80, 80), (1, 2, 2, 33, 32, 16), (1, 20, 1, 70, 16, 16), (2, 6, 2, 1, 64, 64)]
GPU_SHAPES = [
    (8, 32, 8, 8192, 128, 128),
    (1, 32, 8, 1000, 128, 128),
    (3, 16, 2, 4097, 256, 256),
    (1, 71, 1, 600, 64, 64),
    (6, 71, 1, 3000, 64, 64),
]


def tensors(batch, heads, kv_heads, keys, head_dim, v_dim, dtype=torch.float32):
    # The cache as a model may have it: [B, S, H, D] transposed.
    return dict(
        q=randn(batch, heads, 1, head_dim, dtype=dtype),
        k=randn(batch, kv_heads, keys, head_dim, dtype=dtype, seed=1),
        v=randn(batch, keys, kv_heads, v_dim, dtype=dtype, seed=2).transpose(1, 2),
    )


def boolean(*shape):
    return randn(*shape, seed=3) > -0.5


def lowest_numbers():
    """A mask as transformers' eager attention has it; in the first row it masks every key, which then count alike."""
    mask = torch.zeros(2, 1, 1, 150, device=device())
    mask[0] = torch.finfo(torch.float32).min
    return mask.masked_fill(~boolean(150), torch.finfo(torch.float32).min)


def lengths(*values):
    return torch.tensor(values, dtype=torch.int32, device=device())


OPTIONS = {
    "scale": dict(sm_scale=0.6),
    "one split": dict(kv_len_per_split=1000),
    "a split for each key": dict(kv_len_per_split=1),
    "splits that do not divide": dict(kv_len_per_split=37),
    "lengths": dict(kv_len=lengths(150, 31)),
    "lengths, one split": dict(kv_len=lengths(17, 149), kv_len_per_split=1000),
    "lengths beyond the ends": dict(kv_len=lengths(0, 999)),
    "window": dict(window_size=40),
    "window of one": dict(window_size=1),
    "window beyond 32 bits": dict(window_size=2**40),
    "window and lengths": dict(window_size=21, kv_len=lengths(150, 33)),
    "soft cap": dict(soft_cap=1.5),
    "sinks": dict(sinks=randn(8, seed=5)),
    "sinks, one split": dict(sinks=randn(8, seed=5), kv_len_per_split=1000),
    "sinks and no keys": dict(sinks=randn(8, seed=5), kv_len=lengths(0, 3)),
    "padding mask": dict(attention_mask=boolean(2, 1, 1, 150)),
    "mask of heads": dict(attention_mask=boolean(2, 8, 1, 150)),
    "all masked": dict(attention_mask=torch.zeros(150, dtype=torch.bool, device=device())),
    "additive mask": dict(attention_mask=randn(1, 8, 1, 150, seed=4).masked_fill(~boolean(150), -math.inf)),
    "lowest number as mask": dict(attention_mask=lowest_numbers()),
    "lowest number as mask, one split": dict(attention_mask=lowest_numbers(), kv_len_per_split=1000),
    "all": dict(
        sm_scale=0.3,
        kv_len=lengths(140, 60),
        window_size=90,
        soft_cap=2.0,
        sinks=randn(8, seed=5),
        attention_mask=boolean(2, 1, 1, 150),
    ),
}


class Test_FlashDecode(PyTestCase):
    @backends("fmha_decode")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        self.assertCorrectness(fmha_decode, reference, tensors(*shape, dtype=dtype), {"backend": backend})

    @dtypes(torch.float32, torch.bfloat16)
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_options(self, dtype, options):
        kwargs = tensors(*SHAPES[0], dtype=dtype) | options
        self.assertCorrectness(fmha_decode, reference, kwargs, {"backend": "cutile"})

    @backends("fmha_decode")
    @pytest.mark.parametrize("kv_len_per_split", [1000, 40])
    def test_what_lies_behind_the_last_key_does_not_matter(self, backend, kv_len_per_split):
        kwargs = tensors(*SHAPES[0]) | {"kv_len": lengths(20, 100)}
        expected = reference(**kwargs)
        for b, length in enumerate((20, 100)):
            kwargs["k"][b, :, length:] = math.nan
            kwargs["v"][b, :, length:] = math.inf
        with sanitized():
            got = fmha_decode(**kwargs, kv_len_per_split=kv_len_per_split, backend=backend)
        torch.testing.assert_close(got, expected)

    @pytest.mark.parametrize("where", ["q", "k", "v"])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_nan_and_infinity(self, where, value):
        kwargs = tensors(1, 4, 2, 60, 16, 16)
        kwargs[where][0, 1, 0, 3] = value
        self.assertCorrectness(fmha_decode, of_plain_sdpa(reference), kwargs, {"backend": "cutile"})

    @backends("fmha_decode")
    def test_agrees_with_prefill(self, backend):
        """The last query of a causal prefill sees what a decoding step sees."""
        kwargs = tensors(*SHAPES[0])
        queries = torch.cat((randn(2, 8, 5, 80, seed=9), kwargs["q"]), dim=2)
        options = dict(window_size=30, soft_cap=2.0, sinks=randn(8, seed=5), kv_len=lengths(140, 60))
        prefill = fmha(queries, kwargs["k"], kwargs["v"], **options, backend=backend)
        torch.testing.assert_close(fmha_decode(**kwargs, **options, backend=backend), prefill[:, :, -1:])

    def test_splits_do_not_depend_on_lengths(self):
        """A captured graph replays with other lengths: the grid must be that of the cache."""
        grids = []
        kwargs = {k: v.cpu() for k, v in tensors(*SHAPES[0], dtype=torch.bfloat16).items()}
        for kv_len in ([1, 1], [150, 150]):
            with recorded_launches() as launches:
                fmha_decode(**kwargs, kv_len=torch.tensor(kv_len), backend="cutile")
            ((_, args),) = launches
            grids.append((args[4].shape, args[-2]))
        assert grids[0] == grids[1]

    def test_ways_to_merge_splits(self, monkeypatch):
        """By another launch, in turns, at once or in order, and by the last block, in order too."""
        given = tensors(*SHAPES[0], dtype=torch.bfloat16) | OPTIONS["lengths beyond the ends"]
        kwargs = {k: v.cpu() for k, v in given.items()}
        scaling, results, ways = 80**-0.5, [], []
        for at_once, in_order in ((0, 0), (64, 0), (64, 32)):
            monkeypatch.setattr(flash_decode_plan, "MERGED_AT_ONCE", at_once)
            monkeypatch.setattr(flash_decode_plan, "MERGED_IN_ORDER", in_order)
            monkeypatch.setattr(flash_decode_plan, "MERGED_BY_LAST", 2**14)
            recording.forget()
            options = (scaling, 7, kwargs["kv_len"], None, None, None, None)
            with sanitized(), recorded_launches(run=True) as launches:
                results.append(decode_forward(*(kwargs[name] for name in "qkv"), *options))
            ways.append(launches[1][1][-2])
        assert ways == [IN_TURNS, AT_ONCE, IN_ORDER]
        with sanitized(), recorded_launches(run=True) as launches:
            last = fmha_decode(**kwargs, kv_len_per_split=7, backend="cutile")
        assert len(launches) == 1
        assert torch.equal(last, results[-1])
        for result in results:
            torch.testing.assert_close(result, results[0])
            torch.testing.assert_close(result, reference(**kwargs), rtol=1e-2, atol=1e-2)

    def test_the_last_block_leaves_its_counters_at_zero(self):
        kwargs = {k: v.cpu() for k, v in tensors(*SHAPES[0], dtype=torch.bfloat16).items()}
        with recorded_launches(run=True) as launches:
            fmha_decode(**kwargs, backend="cutile")
        ((_, args),) = launches
        assert args[4].shape[2] > 1 and args[5].dtype == torch.int32 and not args[5].any()

    @gpu
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize(
        "sizes", [(8, 32, 8, 8192), (1, 32, 8, 640), (1, 32, 8, 1024), (1, 8, 8, 2048), (2, 16, 2, 513)], ids=str
    )
    def test_graphs_and_eager_calls_give_the_same_bits(self, sizes, dtype):
        kwargs = tensors(*sizes, 128, 128, dtype=dtype)
        fmha_decode(**kwargs, backend="cutile")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = fmha_decode(**kwargs, backend="cutile")
        graph.replay()
        torch.testing.assert_close(captured, reference(**kwargs), rtol=2e-2, atol=2e-2)
        flush = torch.empty(2**26, device=device())
        for n in range(1000):
            if n % 10 == 0:
                flush.zero_()
            assert torch.equal(fmha_decode(**kwargs, backend="cutile"), captured)

    def test_enough_blocks_for_the_gpu(self, monkeypatch):
        monkeypatch.setattr("tilegym.ops.cutile.flash_decode_plan.sm_count", lambda index: 132)
        max_splits.cache_clear()
        assert choose_splits(8, 64, None, 0) == choose_splits(8, 512, None, 0) == 1
        assert choose_splits(8, 8192, None, 0) * 8 >= 128
        assert choose_splits(10**6, 8192, None, 0) == 1
        assert choose_splits(0, 8192, None, 0) >= 1
        assert choose_splits(1, 10**7, None, 0) <= 256
        assert choose_splits(1, 1000, 100, 0) == 10
        # As they were measured on an H200: B8 T8192, B1 T8192, B1 T1024, B32 T2048, with 8 kv heads each.
        measured = ((64, 8192), (8, 8192), (8, 1024), (256, 2048))
        assert [choose_splits(*sizes, None, 0) for sizes in measured] == [4, 16, 8, 1]
        assert (tiles := choose_tiles(4, 128, 128, 2, 0)) == (8, 128, 128, 128)
        measured = ((640, 8), (2048, 8), (8192, 8), (8192, 64))
        for (keys, heads), merge in zip(measured, [LAST_BLOCK, LAST_BLOCK, NEXT_LAUNCH, LAST_BLOCK], strict=True):
            assert choose_merge(heads, 4, keys, choose_splits(heads, keys, None, 0), tiles, 0) == merge
        assert choose_merge(8, 4, 512, 1, tiles, 0) == ONE_SPLIT
        assert choose_merge(4, 8, 2048, 16, tiles, 0) == choose_merge(1, 4, 9000, 17, tiles, 0) == NEXT_LAUNCH
        max_splits.cache_clear()

    def test_gradients_come_from_pytorch(self):
        kwargs = tensors(*SHAPES[1])
        dispatcher._warned.clear()
        with pytest.warns(FallbackWarning, match="no backward kernel"):
            self.assertCorrectness(fmha_decode, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @backends("fmha_decode")
    def test_wrong_arguments(self, backend):
        kwargs = tensors(*SHAPES[1])
        with pytest.raises(ValueError, match="fmha_decode: q must be \\[B, Hq, 1, D\\]"):
            fmha_decode(**kwargs | {"q": randn(1, 2, 3, 32)}, backend=backend)
        with pytest.raises(ValueError, match="kv_len_per_split"):
            fmha_decode(**kwargs, kv_len_per_split=0, backend=backend)
        with pytest.raises(ValueError, match="fmha_decode: kv_len must be \\[1\\]"):
            fmha_decode(**kwargs, kv_len=lengths(3, 4), backend=backend)

    @backends("fmha_decode")
    @pytest.mark.parametrize(("batch", "keys"), [(0, 4), (1, 0)])
    def test_empty(self, backend, batch, keys):
        out = fmha_decode(**tensors(batch, 2, 1, keys, 16, 16), backend=backend)
        assert out.shape == (batch, 2, 1, 16) and not out.any()

    def test_compiled(self):
        kwargs = tensors(*SHAPES[0]) | OPTIONS["all"]

        def call(q, k, v, kv_len):
            return fmha_decode(**kwargs | {"q": q * 2, "k": k, "v": v, "kv_len": kv_len}, backend="cutile").relu()

        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True, backend="inductor" if HAS_GPU else "aot_eager")
        for kv_len in (kwargs["kv_len"], lengths(9, 150)):
            inputs = (*(kwargs[name] for name in "qkv"), kv_len)
            torch.testing.assert_close(compiled(*inputs), call(*inputs), rtol=0, atol=0)

    def test_operator(self):
        q, k, v = tensors(*SHAPES[0]).values()
        torch.library.opcheck(decode_forward.operator, (q, k, v, 0.25, None, None, None, None, None, None))
        options = (40, lengths(9, 150), 33, 2.0, randn(8), boolean(2, 1, 1, 150))
        torch.library.opcheck(decode_forward.operator, (q, k, v, 0.25, *options))

    @pytest.mark.parametrize("name", ["lengths", "all"])
    def test_compiles_for_every_architecture(self, name, monkeypatch):
        options = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in OPTIONS[name].items()}
        kwargs = {k: v.cpu() for k, v in tensors(2, 8, 2, 150, 128, 128, dtype=torch.bfloat16).items()}
        with recorded_launches() as launches:
            fmha_decode(**kwargs, **options, backend="cutile")
            monkeypatch.setattr(flash_decode_plan, "MERGED_BY_LAST", 0)
            fmha_decode(**kwargs, **options, backend="cutile")
        names = [kernel._pyfunc.__name__ for kernel, _ in launches]
        assert names == ["decode_kernel", "decode_kernel", "merge_kernel"]
        for n, (kernel, args) in enumerate(launches):
            every = name == "lengths" and n != 1  # which has less to compile than the first
            assert_compiles(kernel, args, ("sm_80", "sm_90", "sm_100", "sm_120") if every else ("sm_90",))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("head_dim, splits", [(128, 16), (256, 8)])
    def test_real_tiles_compile(self, dtype, head_dim, splits):
        q, k, v = (torch.empty(2, n, s, head_dim, dtype=dtype) for n, s in ((32, 1), (8, 4096), (8, 4096)))
        partial, out = torch.empty(2, 32, splits, head_dim + STATE_COLUMNS), torch.empty_like(q)
        counters, kv_len = torch.empty(COUNTERS, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
        sizes = (*choose_tiles(4, head_dim, head_dim, dtype.itemsize, 0), head_dim, 4)
        flags = (False, False, 0, 1, False, True, dtype == torch.float32, LAST_BLOCK, splits, True)
        arrays = (q, k, v, out, partial, counters, 0, 0, kv_len)
        assert_compiles(decode_kernel, (*arrays, 0.1, 1.0, 0, *sizes, *flags), ("sm_90",))

    @pytest.mark.parametrize("head_dim, group", [(128, 4), (256, 4), (128, 1), (64, 8)])
    def test_real_tiles_of_fp32_compile(self, head_dim, group, monkeypatch):
        monkeypatch.setattr(flash_decode_plan, "choose_tiles", lambda *a: choose_tiles(*a[:-1], 0))  # those of a GPU
        q, k = torch.empty(1, 2 * group, 1, head_dim), torch.empty(1, 2, 600, head_dim)
        with recorded_launches() as launches:
            fmha_decode(q, k, k, kv_len_per_split=128, kv_len=torch.tensor([500]), backend="cutile")
        (kernel, args), _ = launches
        assert kernel is decode_rows_kernel
        assert_compiles(kernel, args, ("sm_80", "sm_90"))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_many_heads_on_one_kv_head_compile(self, dtype, monkeypatch):
        monkeypatch.setattr(flash_decode_plan, "choose_tiles", lambda *a: choose_tiles(*a[:-1], 0))  # those of a GPU
        q, k = torch.empty(1, 71, 1, 64, dtype=dtype), torch.empty(1, 1, 600, 64, dtype=dtype)
        with recorded_launches() as launches:
            fmha_decode(q, k, k, kv_len_per_split=128, backend="cutile")
        (kernel, args), _ = launches
        assert (8, 32 if dtype == torch.float32 else 128) == args[12:14]
        assert_compiles(kernel, args, ("sm_80", "sm_90"))

    @gpu
    def test_streams_share_nothing(self):
        """Launches on two streams at once: each counts by itself."""
        calls = [tensors(1, 32, 8, 4096 + n, 128, 128, dtype=torch.bfloat16) for n in range(2)]
        expected = [fmha_decode(**kwargs, backend="cutile") for kwargs in calls]
        streams = [torch.cuda.Stream() for _ in calls]
        torch.cuda.synchronize()
        got = []
        for _ in range(50):
            for stream, kwargs in zip(streams, calls, strict=True):
                with torch.cuda.stream(stream):
                    got.append(fmha_decode(**kwargs, backend="cutile"))
        torch.cuda.synchronize()
        for i, out in enumerate(got):
            assert torch.equal(out, expected[i % 2])

    @gpu
    def test_more_than_2_to_the_31_elements(self):
        k = torch.empty(66, 8, 32768, 128, device=device(), dtype=torch.bfloat16).normal_()
        q = randn(66, 8, 1, 128, dtype=torch.bfloat16)
        out = fmha_decode(q, k, k, backend="cutile")
        torch.testing.assert_close(out[-1:], reference(q[-1:], k[-1:], k[-1:]), rtol=2e-2, atol=2e-2)

    @gpu
    def test_graphs_replay_beside_each_other(self):
        kwargs = tensors(1, 32, 8, 4096, 128, 128, dtype=torch.bfloat16)
        expected = fmha_decode(**kwargs, backend="cutile")
        graphs, outs = [torch.cuda.CUDAGraph() for _ in range(2)], []
        for graph in graphs:
            with torch.cuda.graph(graph):
                outs.append([fmha_decode(**kwargs, backend="cutile") for _ in range(4)])
        streams = [torch.cuda.Stream() for _ in graphs]
        torch.cuda.synchronize()
        for _ in range(20):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            assert torch.equal(fmha_decode(**kwargs, backend="cutile"), expected)
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outs[0] + outs[1])

    @gpu
    def test_graph_replays_with_new_inputs_and_lengths(self):
        kwargs = tensors(2, 32, 8, 2048, 128, 128, dtype=torch.bfloat16) | {"kv_len": lengths(2048, 20)}
        fmha_decode(**kwargs, backend="cutile")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fmha_decode(**kwargs, backend="cutile")
        for values in ((1, 1), (700, 2000)):
            kwargs["kv_len"].copy_(lengths(*values))
            kwargs["q"].copy_(randn(*kwargs["q"].shape, dtype=torch.bfloat16, seed=values[0]))
            graph.replay()
            torch.testing.assert_close(out, fmha_decode(**kwargs, backend="cutile"), rtol=0, atol=0)
            torch.testing.assert_close(out, reference(**kwargs), rtol=2e-2, atol=2e-2)


class Test_SplitK_Reduce(PyTestCase):
    @staticmethod
    def arguments(batch, heads, splits, head_dim, sinks=False, dtype=torch.float32):
        kwargs = dict(partial=randn(batch, heads, splits, head_dim), lse=3 * randn(batch, heads, splits), dtype=dtype)
        return kwargs | ({"sinks": randn(heads, seed=5)} if sinks else {})

    @backends("splitk_reduce")
    @dtypes()
    @pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
    @pytest.mark.parametrize(
        "shape", [(1, 1, 1, 16), (2, 3, 7, 80), (1, 2, 33, 64), (2, 2, 100, 128), (2, 3, 4, 0)], ids=str
    )
    def test_op(self, backend, dtype, sinks, shape):
        kwargs = self.arguments(*shape, sinks, dtype)
        with sanitized():
            got = splitk_reduce(**kwargs, backend=backend)
        double = {k: v.double() for k, v in kwargs.items() if isinstance(v, torch.Tensor)}
        exact = splitk_reference(**double, dtype=torch.float64)
        self.assertClose("out", got, splitk_reference(**kwargs), exact)

    @backends("splitk_reduce")
    @pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
    def test_splits_that_saw_nothing(self, backend, sinks):
        kwargs = self.arguments(2, 3, 20, 16, sinks)
        kwargs["lse"][0, 1, 4:9] = -math.inf
        kwargs["partial"][0, 1, 4:9] = math.nan
        kwargs["lse"][1, 2] = -math.inf
        with sanitized():
            got = splitk_reduce(**kwargs, backend=backend)
        kept = [s for s in range(20) if not 4 <= s < 9]
        few = kwargs | {"partial": kwargs["partial"][:, :, kept], "lse": kwargs["lse"][:, :, kept]}
        torch.testing.assert_close(got[0, 1], splitk_reference(**few)[0, 1])
        assert not got[1, 2].any()

    @backends("splitk_reduce")
    def test_of_parts_of_a_softmax(self, backend):
        """Attention over all keys is the merge of attention over shares of them."""
        kwargs = tensors(1, 4, 4, 60, 16, 16)
        shares = [slice(0, 20), slice(20, 21), slice(21, 60)]
        scores = (kwargs["q"] @ kwargs["k"].mT)[:, :, 0] / 4
        lse = torch.stack([scores[..., share].logsumexp(-1) for share in shares], dim=-1)
        weights = [scores[..., None, share].softmax(-1) for share in shares]
        values = [kwargs["v"][:, :, share] for share in shares]
        partial = torch.cat([w @ v for w, v in zip(weights, values, strict=True)], dim=2)
        torch.testing.assert_close(splitk_reduce(partial, lse, torch.float32, backend=backend), reference(**kwargs))

    @backends("splitk_reduce")
    def test_nan_spreads(self, backend):
        kwargs = self.arguments(1, 2, 5, 16)
        kwargs["lse"][0, 1, 2] = math.nan
        out = splitk_reduce(**kwargs, backend=backend)
        assert out[0, 1].isnan().all() and out[0, 0].isfinite().all()

    @backends("splitk_reduce")
    def test_wrong_arguments(self, backend):
        kwargs = self.arguments(1, 2, 5, 16)
        with pytest.raises(ValueError, match="splitk_reduce: expected partial"):
            splitk_reduce(**kwargs | {"lse": kwargs["lse"][..., :4]}, backend=backend)
        with pytest.raises(TypeError, match="splitk_reduce: .* must be fp32"):
            splitk_reduce(**kwargs | {"partial": kwargs["partial"].half()}, backend=backend)
        with pytest.raises(ValueError, match="sinks must be \\[2\\]"):
            splitk_reduce(**kwargs, sinks=randn(3), backend=backend)

    def test_gradients_come_from_pytorch(self):
        kwargs = self.arguments(1, 2, 5, 16)
        dispatcher._warned.clear()
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="no backward kernel"):
            splitk_reduce(kwargs["partial"].requires_grad_(), kwargs["lse"], torch.float32).sum().backward()
        assert kwargs["partial"].grad.isfinite().all()

    def test_operator(self):
        partial, lse, dtype = self.arguments(1, 2, 5, 16, dtype=torch.bfloat16).values()
        torch.library.opcheck(splitk_reduce_forward.operator, (partial, lse, dtype, randn(2)))

import functools

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
from common import sanitized

from tilegym.ops import fmha_decode
from tilegym.ops import fmha_paged_decode
from tilegym.ops.cutile import decode_varlen
from tilegym.ops.cutile import decode_varlen_plan
from tilegym.ops.cutile.paged_decode import paged_decode_forward
from tilegym.ops.pytorch.paged_decode import fmha_paged_decode as reference

LENGTHS = (1, 16, 17, 70, 0, 96)  # the last sequences of a batch that is filled up have no keys
# keys of a page, Hq, Hkv, D, Dv
SHAPES = [(16, 8, 2, 80, 80), (32, 2, 2, 32, 16), (48, 20, 1, 16, 16)]
FEW_KEYS = [(4, 8, 4, 32, 16), (8, 12, 6, 32, 32), (2, 24, 8, 20, 20)]  # whose tiles have those of 4, 2 and 8 heads
GPU_SHAPES = [(256, 32, 8, 128, 128), (256, 16, 2, 256, 256), (64, 71, 1, 64, 64)]
GPU_FEW_KEYS = [(16, 32, 8, 128, 128), (32, 28, 4, 128, 128), (8, 40, 8, 128, 96), (48, 16, 8, 256, 256)]
# Tiles of 32 rows, of two heads and of one; of short and of long rows.
GPU_FEW_ROWS = [(16, 64, 8, 128, 128), (32, 32, 2, 128, 128), (16, 64, 8, 64, 64), (32, 64, 4, 64, 64)]
GPU_SHORT_ROWS = [(16, 32, 8, 64, 64), (32, 14, 2, 64, 64), (64, 32, 8, 64, 64), (16, 16, 16, 64, 64)]
GPU_LONG_ROWS = [(16, 16, 2, 256, 256)]
ON_GPU = GPU_SHAPES + GPU_FEW_KEYS + GPU_FEW_ROWS + GPU_SHORT_ROWS + GPU_LONG_ROWS
OPTIONS = {
    "scale": dict(scaling=0.6),
    "window": dict(window_size=9),
    "window of one": dict(window_size=1),
    "soft cap": dict(soft_cap=1.5),
    "sinks": dict(sinks=randn(8, seed=5)),
    "all": dict(scaling=0.3, window_size=21, soft_cap=2.0, sinks=randn(8, seed=5)),
}


def integers(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=device())


def tensors(size, heads, kv_heads, head_dim, v_dim, dtype=torch.float32, lengths=LENGTHS):
    """Arguments; pages are dealt out in no order, and behind the last one stand numbers of none."""
    sequences, each = len(lengths), -(-max(lengths) // size) + 1
    pages = sequences * each + 1
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(3))[:-1].view(sequences, each)
    needed = -(-torch.tensor(lengths) // size)
    none = torch.tensor([-1, pages + 7]).repeat(sequences * each)[: sequences * each].view(sequences, each)
    table = torch.where(torch.arange(each) < needed[:, None], order, none)
    return dict(
        q=randn(heads, sequences, head_dim, dtype=dtype).transpose(0, 1),
        k=randn(sequences, kv_heads, head_dim, dtype=dtype, seed=1),
        v=randn(sequences, kv_heads, v_dim, dtype=dtype, seed=2),
        k_pages=randn(pages, size, kv_heads, head_dim, dtype=dtype, seed=3),
        v_pages=randn(pages, size, kv_heads, v_dim, dtype=dtype, seed=4),
        block_table=table.to(device(), torch.int32),
        cu_seqlens_k=integers(0, *torch.tensor(lengths).cumsum(0).tolist()),
    )


def on_copies(function, **kwargs):
    """The call with pages of its own: output, and pages as they are afterwards."""
    pages = {name: kwargs[name].clone() for name in ("k_pages", "v_pages")}
    return function(**kwargs | pages), *pages.values()


class Test_PagedDecode(PyTestCase):
    @backends("fmha_paged_decode")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + FEW_KEYS + (ON_GPU if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        call, expected = (functools.partial(on_copies, f) for f in (fmha_paged_decode, reference))
        self.assertCorrectness(call, expected, tensors(*shape, dtype=dtype), {"backend": backend})

    @dtypes(torch.float32, torch.bfloat16)
    @pytest.mark.parametrize("shape", [SHAPES[0], FEW_KEYS[0]], ids=str)
    @pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
    def test_options(self, dtype, shape, options):
        call, expected = (functools.partial(on_copies, f) for f in (fmha_paged_decode, reference))
        kwargs = tensors(*shape, dtype=dtype) | options
        self.assertCorrectness(call, expected, kwargs, {"backend": "cutile"})

    @backends("fmha_paged_decode")
    def test_is_a_decoding_step_behind_keys_in_a_row(self, backend):
        kwargs = tensors(*SHAPES[0])
        out, k_pages, v_pages = on_copies(fmha_paged_decode, **kwargs, window_size=30, backend=backend)
        written = torch.zeros(k_pages.shape[:2], dtype=torch.bool, device=device())
        for n, length in enumerate(LENGTHS):
            at = [(kwargs["block_table"][n, j // 16], j % 16) for j in range(length)]
            if not at:
                assert not out[n].any()
                continue
            keys, values = (torch.stack([pages[page, row] for page, row in at]) for pages in (k_pages, v_pages))
            assert torch.equal(keys[-1], kwargs["k"][n]) and torch.equal(values[-1], kwargs["v"][n])
            written[at[-1]] = True
            keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
            alone = fmha_decode(kwargs["q"][n][None, :, None], keys, values, window_size=30, backend="pytorch")
            torch.testing.assert_close(out[n], alone[0, :, 0], rtol=1e-4, atol=1e-4)
        for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
            assert torch.equal(pages[~written], kwargs[name][~written])

    @backends("fmha_paged_decode")
    def test_what_lies_elsewhere_does_not_matter(self, backend):
        kwargs = tensors(*SHAPES[0])
        expected = on_copies(reference, **kwargs)[0]
        seen = torch.zeros(kwargs["k_pages"].shape[:2], dtype=torch.bool, device=device())
        for n, length in enumerate(LENGTHS):
            for j in range(length):
                seen[kwargs["block_table"][n, j // 16], j % 16] = True
        for name in ("k_pages", "v_pages"):
            kwargs[name][~seen] = float("nan")
        with sanitized():
            got = fmha_paged_decode(**kwargs, backend=backend)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)

    @backends("fmha_paged_decode")
    def test_keys_and_values_in_one_tensor(self, backend):
        """Whose pages take turns, as in transformers' cache."""
        kwargs = tensors(*SHAPES[0])
        expected = on_copies(reference, **kwargs)
        both = torch.stack((kwargs["k_pages"], kwargs["v_pages"]), dim=1).flatten(0, 1)
        kwargs |= {"k_pages": both[:-1], "v_pages": both[1:], "block_table": kwargs["block_table"] * 2}
        got = fmha_paged_decode(**kwargs, backend=backend)
        torch.testing.assert_close((got, both[0::2], both[1::2]), expected, rtol=1e-4, atol=1e-4)

    @backends("fmha_paged_decode")
    @pytest.mark.parametrize("lengths", [(0, 0), (0, 0, 33), (5, 0)], ids=str)
    def test_sequences_without_keys(self, backend, lengths):
        kwargs = tensors(*SHAPES[0], lengths=lengths)
        expected = on_copies(reference, **kwargs)
        torch.testing.assert_close(on_copies(fmha_paged_decode, **kwargs, backend=backend), expected)
        changed = (expected[1] != kwargs["k_pages"]).flatten(2).any(-1)
        assert changed.sum() == sum(length > 0 for length in lengths)

    @pytest.mark.parametrize("shape, dtype", [(SHAPES[0], torch.float32), (FEW_KEYS[0], torch.bfloat16)], ids=str)
    def test_calls_of_a_kind(self, shape, dtype):
        """The second is recorded and later ones repeat it, with the pages of the moment."""
        limit = 1e-4 if dtype == torch.float32 else 2e-2
        for n in range(4):
            kwargs = tensors(*shape, dtype=dtype, lengths=(*LENGTHS[n:], *LENGTHS[:n]))
            expected = on_copies(reference, **kwargs)
            got = on_copies(fmha_paged_decode, **kwargs, backend="cutile")
            torch.testing.assert_close(got, expected, rtol=limit, atol=limit)

    @backends("fmha_paged_decode")
    def test_no_sequences(self, backend):
        kwargs = tensors(*SHAPES[0])
        kwargs |= {name: kwargs[name][:0] for name in ("q", "k", "v", "block_table")}
        for table in (kwargs["block_table"], kwargs["block_table"][:, :0]):
            out = fmha_paged_decode(**kwargs | {"cu_seqlens_k": integers(0), "block_table": table}, backend=backend)
            assert out.shape == (0, 8, 80)

    @dtypes(torch.float32, torch.bfloat16)
    @pytest.mark.parametrize("size, head_dim", [(1, 16), (4, 32), (24, 16), (33, 20)])
    def test_small_and_odd_pages(self, dtype, size, head_dim):
        """Whose rows are addressed one by one; what lies behind the last key does not matter."""
        kwargs = tensors(size, 8, 2, head_dim, 16, dtype=dtype) | OPTIONS["all"]
        call, expected = (functools.partial(on_copies, f) for f in (fmha_paged_decode, reference))
        self.assertCorrectness(call, expected, kwargs, {"backend": "cutile"})
        want = reference(**kwargs)
        for n, length in enumerate(LENGTHS):
            if length % size:
                kwargs["k_pages"][kwargs["block_table"][n, length // size], length % size :] = float("nan")
                kwargs["v_pages"][kwargs["block_table"][n, length // size], length % size :] = float("nan")
        torch.testing.assert_close(fmha_paged_decode(**kwargs, backend="cutile"), want, rtol=1e-2, atol=1e-2)

    @pytest.mark.parametrize("shape", GPU_FEW_KEYS[:1] if HAS_GPU else FEW_KEYS, ids=str)
    @pytest.mark.parametrize("number", [float("nan"), float("inf")])
    def test_what_is_not_finite_stays_with_its_head(self, shape, number):
        """Where a tile has the keys of several heads, as where it has those of one; so does what no sequence sees."""
        kwargs = tensors(*shape, dtype=torch.bfloat16)
        size, table = shape[0], kwargs["block_table"]
        expected = on_copies(reference, **kwargs)[0]
        for n, length in enumerate(LENGTHS):
            if length % size:
                for name in ("k_pages", "v_pages"):
                    kwargs[name][table[n, length // size], length % size :] = number
        close = functools.partial(torch.testing.assert_close, rtol=2e-2, atol=2e-2, equal_nan=True)
        close(on_copies(fmha_paged_decode, **kwargs, backend="cutile")[0], expected)
        kwargs["v_pages"][table[3, 0], 1, 1, 3] = number
        kwargs["k_pages"][table[5, 0], 0, 0, 2] = float("nan")
        got = on_copies(fmha_paged_decode, **kwargs, backend="cutile")[0]
        close(got, on_copies(reference, **kwargs)[0])
        group = shape[1] // shape[2]
        assert not got[3, group : 2 * group, 3].isfinite().any()
        strange = ~got.isfinite()
        strange[3, group : 2 * group, 3] = False
        strange[5, :group] = False
        assert not strange.any()

    def test_tiles_of_several_heads_are_written_to_too(self):
        """Whose pages are slices of others, with gaps between heads."""
        kwargs = tensors(*FEW_KEYS[0], dtype=torch.bfloat16)
        expected = on_copies(reference, **kwargs)
        both = torch.cat((kwargs["k_pages"], kwargs["v_pages"], kwargs["k_pages"]), dim=3)
        kwargs |= {"k_pages": both[..., :32], "v_pages": both[..., 32:48]}
        got = fmha_paged_decode(**kwargs, backend="cutile")
        torch.testing.assert_close((got, both[..., :32], both[..., 32:48]), expected, rtol=2e-2, atol=2e-2)

    @pytest.mark.parametrize(
        "lengths", [(200,), (90, 100), (7, 300, 12), (20,) * 9, (1, 0, 400, 3, 0, 33, 16, 90)], ids=str
    )
    @pytest.mark.parametrize("options", [{}, dict(window_size=40, sinks=randn(8, seed=5))], ids=["", "window"])
    @pytest.mark.parametrize("shape, dtype", [(SHAPES[0], torch.float32), (FEW_KEYS[0], torch.bfloat16)], ids=str)
    def test_shares(self, shape, dtype, lengths, options):
        """Few sequences, of which each has several blocks; more than there are blocks; one much longer than others."""
        kwargs = tensors(*shape, dtype=dtype, lengths=lengths) | options
        expected = on_copies(reference, **kwargs)
        limits = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(on_copies(fmha_paged_decode, **kwargs, backend="cutile"), expected, **limits)

    @pytest.mark.parametrize("heads", ["one", "several"])
    def test_more_parts_than_are_merged_at_once(self, heads, monkeypatch):
        monkeypatch.setattr(decode_varlen, "blocks_of", lambda *args: 48)
        monkeypatch.setattr(decode_varlen_plan, "MANY_ROWS", 1024 if heads == "one" else 0)
        kwargs = tensors(*SHAPES[0], lengths=(900, 90))
        expected = on_copies(reference, **kwargs)
        torch.testing.assert_close(on_copies(fmha_paged_decode, **kwargs, backend="cutile"), expected)

    @backends("fmha_paged_decode")
    def test_wrong_arguments(self, backend):
        kwargs, call = tensors(*SHAPES[1]), functools.partial(fmha_paged_decode, backend=backend)
        with pytest.raises(ValueError, match="fmha_paged_decode: q, k and v must have three dimensions"):
            call(**kwargs | {"q": randn(6, 2, 1, 32)})
        with pytest.raises(ValueError, match=r"v_pages must be \[P, S, 2, 16\]"):
            call(**kwargs | {"v_pages": kwargs["k_pages"]})
        with pytest.raises(TypeError, match="k is torch.float32, k_pages is torch.bfloat16"):
            call(**kwargs | {"k_pages": kwargs["k_pages"].bfloat16()})
        for table in (kwargs["block_table"][:5], kwargs["block_table"][:, :0]):
            with pytest.raises(ValueError, match=r"block_table must be \[6, M\] with M of 1 or more"):
                call(**kwargs | {"block_table": table})
        with pytest.raises(ValueError, match=r"cu_seqlens_k must be \[7\]"):
            call(**kwargs | {"cu_seqlens_k": integers(0, 1)})
        with pytest.raises(TypeError, match="block_table must be int32 or int64"):
            call(**kwargs | {"block_table": kwargs["block_table"].float()})

    def test_operator(self):
        arguments = tensors(*SHAPES[0]).values()
        torch.library.opcheck(paged_decode_forward.operator, (*arguments, 0.25, 9, 2.0, randn(8)))

    @pytest.mark.parametrize("name", ["scale", "all"])
    def test_compiles_for_every_architecture(self, name):
        given = tensors(256, 8, 2, 128, 128, dtype=torch.bfloat16) | OPTIONS[name]
        kwargs = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        architectures = ("sm_80", "sm_90", "sm_100", "sm_120") if name == "scale" else ("sm_90",)
        assert_launches_compile(lambda: fmha_paged_decode(**kwargs, backend="cutile"), architectures)

    @pytest.mark.parametrize("size", [256, 32, 16])
    @pytest.mark.parametrize("head_dim, heads", [(64, 64), (128, 32), (256, 16)])
    def test_real_tiles_compile(self, head_dim, heads, size, monkeypatch):
        for name in ("choose_tiles", "paged_tiles"):  # those of a GPU
            chosen = getattr(decode_varlen, name)
            monkeypatch.setattr(decode_varlen, name, lambda *sizes, chosen=chosen: chosen(*sizes[:-1], 0))
        kwargs = tensors(size, heads, 8, head_dim, head_dim, dtype=torch.bfloat16)
        call = functools.partial(fmha_paged_decode, **{k: v.cpu() for k, v in kwargs.items()}, backend="cutile")
        assert_launches_compile(call, ("sm_90",))

    @gpu
    def test_a_graph_replays_with_other_pages(self):
        kwargs = tensors(256, 32, 8, 128, 128, dtype=torch.bfloat16)
        other = tensors(256, 32, 8, 128, 128, dtype=torch.bfloat16, lengths=(96, 3, 50, 0, 0, 0))
        fmha_paged_decode(**kwargs, backend="cutile")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = fmha_paged_decode(**kwargs, backend="cutile")
        for name, tensor in other.items():
            kwargs[name].copy_(tensor)
        graph.replay()
        expected = on_copies(reference, **other)
        torch.testing.assert_close(captured, expected[0], rtol=2e-2, atol=2e-2)
        assert torch.equal(kwargs["k_pages"], expected[1]) and torch.equal(kwargs["v_pages"], expected[2])

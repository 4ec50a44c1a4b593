"""How decoding divides its work where blocks do not come out even: numbers of kv heads between one and two blocks a
multiprocessor, small pages, many sequences, large groups."""

import functools

import cuda.tile as ct
import pytest
import torch
from common import PyTestCase
from common import assert_launches_compile
from common import device
from common import gpu
from common import randn

from tilegym.backend.cutile.launch import launch
from tilegym.ops import fmha_decode
from tilegym.ops import fmha_paged_decode
from tilegym.ops.cutile import decode_varlen
from tilegym.ops.cutile import decode_varlen_plan
from tilegym.ops.cutile import flash_decode_plan
from tilegym.ops.cutile.decode_shares import LEAST_AT_ONCE
from tilegym.ops.cutile.decode_shares import way_of
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.pytorch.flash_decode import fmha_decode as reference

WIDE, HALF_WIDE, NARROW = (8, 64, 256, 256), (8, 128, 128, 128), (8, 128, 64, 64)


@pytest.fixture
def multiprocessors(monkeypatch):
    """Those of an H200."""
    cached = flash_decode_plan.is_uneven, flash_decode_plan.max_splits

    def forget():
        for chosen in cached:
            chosen.cache_clear()

    for module in (flash_decode_plan, decode_varlen_plan):
        monkeypatch.setattr(module, "sm_count", lambda index: 132)
    forget()
    yield
    forget()


def tensors(batch, heads, kv_heads, keys, head_dim, dtype):
    q = randn(batch, heads, 1, head_dim, dtype=dtype)
    k, v = (randn(batch, keys, kv_heads, head_dim, dtype=dtype, seed=n).transpose(1, 2) for n in (1, 2))
    return {"q": q, "k": k, "v": v}


def test_heads_that_two_blocks_a_multiprocessor_share_unevenly(multiprocessors):
    def uneven(*args):
        return [n for n in (8, 128, 132, 133, 160, 192, 198, 199, 256, 320) if flash_decode_plan.is_uneven(n, *args, 0)]

    assert uneven(HALF_WIDE, 2) == uneven(WIDE, 2) == [133, 160, 192, 198]
    assert uneven(NARROW, 2) == uneven(HALF_WIDE, 4) == uneven((32, *HALF_WIDE[1:]), 2) == []
    assert not flash_decode_plan.is_uneven(160, HALF_WIDE, 2, -1)


def test_one_block_a_multiprocessor_is_enough(multiprocessors):
    splits = [flash_decode_plan.choose_splits(heads, 2048, None, 0) for heads in (64, 96, 112, 120, 128, 132, 160, 256)]
    assert splits == [4, 2, 2, 1, 1, 1, 1, 1]
    assert flash_decode_plan.choose_splits(128, 2048, 512, 0) == 4, "what is asked for"


@pytest.mark.parametrize(("head_dim", "splits"), [(128, 2), (256, 4)])
def test_uneven_heads_are_split(head_dim, splits, monkeypatch):
    """In the interpreter, with what a GPU has to be asked for."""
    monkeypatch.setattr(flash_decode_plan, "choose_splits", lambda *sizes: 1)
    monkeypatch.setattr(flash_decode_plan, "is_uneven", lambda *sizes: True)
    monkeypatch.setattr(flash_decode_plan, "UNSPLIT_KEYS", 32)
    kwargs = tensors(2, 4, 2, 70, head_dim, torch.float16)
    lengths = torch.tensor([70, 9], dtype=torch.int32, device=device())
    for options in ({}, {"kv_len": lengths}, {"window_size": 41}):
        out = fmha_decode(**kwargs, **options, backend="cutile")
        torch.testing.assert_close(out, reference(**kwargs, **options), rtol=2e-3, atol=2e-3)

    def plan(window):
        return flash_decode_plan.make_plan(*kwargs.values(), 0.1, None, None, window, None, None, None)

    assert plan(None).grid == plan(33).grid == (4, splits, 1) and plan(32).grid == (4, 1, 1)
    assert plan(None).small == (head_dim == 128) and plan(None).merge == flash_decode_plan.NEXT_LAUNCH


@pytest.mark.parametrize("batch, heads, kv_heads", [(1, 71, 1), (3, 71, 1), (2, 40, 2)])
@pytest.mark.parametrize("splits", [1, 3])
def test_blocks_share_the_heads_of_a_large_group(batch, heads, kv_heads, splits):
    kwargs = tensors(batch, heads, kv_heads, 70, 16, torch.float16)
    own = randn(batch, heads, 1, 70, seed=3) > -0.5
    for options in (
        {
            "kv_len": torch.tensor([70, 9, 33], dtype=torch.int32, device=device())[:batch],
            "sinks": randn(heads, seed=4),
        },
        {"window_size": 41, "soft_cap": 2.0},
        {"attention_mask": own},
        {"attention_mask": torch.zeros_like(own, dtype=torch.float16).masked_fill(own, -1.0)},
    ):
        options["kv_len_per_split"] = -(-70 // splits)
        PyTestCase().assertCorrectness(fmha_decode, reference, kwargs | options, {"backend": "cutile"})


@ct.kernel
def way_kernel(starts, out, blocks: int):
    share, splits, total = way_of(0, starts, 0, blocks, LEAST_AT_ONCE, 1, 16, False, True)
    ct.scatter(out, 0, share)
    ct.scatter(out, 1, splits)
    ct.scatter(out, 2, total)


@pytest.mark.parametrize("sequences, share", [(16, 0), (20, 7), (24, 9), (32, 0)])
def test_who_gets_equal_shares(sequences, share):
    """Of 33 blocks: where the longest of sequences of 8 to 16 tiles would take a block over 1.5 times as long."""
    keys = torch.arange(sequences, dtype=torch.int32) * 8 // (sequences - 1) * 16 + 128
    starts = torch.cat([keys.new_zeros(1), keys.cumsum(0, dtype=torch.int32)]).to(device())
    out = torch.zeros(3, dtype=torch.int32, device=device())
    launch(out, (1,), way_kernel, (starts, out, 33))
    assert out.tolist() == [share, max(33 // sequences, 1), int(keys.sum()) // 16]


def test_small_tiles_compile(multiprocessors, monkeypatch):
    """Those of keys in a cache, split, and in pages."""
    tiles, of_pages = flash_decode_plan.choose_tiles, decode_varlen.paged_tiles
    for module in (flash_decode_plan, decode_varlen):
        monkeypatch.setattr(module, "choose_tiles", lambda *sizes: tiles(*sizes[:-1], 0))
    monkeypatch.setattr(decode_varlen, "paged_tiles", lambda *sizes: of_pages(*sizes[:-1], 0))
    monkeypatch.setattr(flash_decode_plan, "is_uneven", lambda *sizes: True)
    monkeypatch.setattr(flash_decode_plan, "choose_splits", lambda *sizes: 1)
    cached = {name: x.cpu() for name, x in tensors(2, 32, 8, 600, 128, torch.bfloat16).items()}
    assert_launches_compile(lambda: fmha_decode(**cached, backend="cutile"), ("sm_80", "sm_90"))
    q, new, pages = (torch.zeros(*sizes, 128, dtype=torch.bfloat16) for sizes in ((2, 32), (2, 8), (20, 64, 8)))
    table, starts = torch.arange(20, dtype=torch.int32).view(2, 10), torch.tensor([0, 600, 601], dtype=torch.int32)
    call = functools.partial(fmha_paged_decode, q, new, new, pages, pages.clone(), table, starts, backend="cutile")
    assert_launches_compile(call, ("sm_80", "sm_90"))


@gpu
@pytest.mark.parametrize("heads", [(32, 8), (32, 32), (8, 4)], ids=str)
@pytest.mark.parametrize("batch", [4, 5, 6, 16, 17, 20, 24, 40])
def test_batches_of_many_sizes(batch, heads):
    kwargs = tensors(batch, *heads, 700, 256 if heads == (8, 4) else 128, torch.bfloat16)
    expected = reference(**{name: x.float() for name, x in kwargs.items()})
    graph, length = torch.cuda.CUDAGraph(), torch.full((batch,), 700, dtype=torch.int32, device="cuda")
    for options in ({}, {"kv_len": length}):
        eager = fmha_decode(**kwargs, **options, backend="cutile")
        torch.testing.assert_close(eager.float(), expected, rtol=1e-2, atol=1e-2)
    with torch.cuda.graph(graph):
        captured = fmha_decode(**kwargs, kv_len=length, backend="cutile")
    graph.replay()
    assert torch.equal(captured, eager)


def test_tiles_of_packed_keys(multiprocessors):
    def chosen(heads, tiles=HALF_WIDE, itemsize=2, device_index=0):
        (tile_m, tile_n, *dims), together, each = decode_varlen_plan.packed_tiles(tiles, itemsize, heads, device_index)
        assert (tile_m, *dims, together) == (tiles[0], *tiles[2:], 1)
        return tile_n, each

    assert chosen(8) == chosen(1024, NARROW) == chosen(1024, itemsize=4) == chosen(1024, device_index=-1) == (128, 2)
    assert chosen(1024) == (64, 4)
    blocks_of = decode_varlen_plan.blocks_of
    assert blocks_of(24, 8, 2048, 64, 4, 0) == 2 * blocks_of(24, 8, 2048, 128, 2, 0) == 66


def test_tiles_of_pages():
    def chosen(size, kv_heads, group=4, tiles=HALF_WIDE, itemsize=2, device_index=0):
        """Rows, columns, heads together, and blocks a multiprocessor."""
        tiles = (max(8, next_power_of_2(group)), *tiles[1:])
        given = (tiles, itemsize, size, group, kv_heads, device_index)
        (tile_m, tile_n, *dims), together, each = decode_varlen_plan.paged_tiles(*given)
        assert dims == [*tiles[2:]]
        return tile_n, tile_m, together, each

    addressed = (128, 8, 1, 2)
    assert chosen(64, 8) == chosen(192, 8) == chosen(256, 8) == (64, 8, 1, 4)
    assert chosen(16, 8) == chosen(16, 4) == chosen(48, 12) == (64, 16, 4, 2)
    assert chosen(32, 2) == chosen(96, 6) == (64, 8, 2, 2) and chosen(8, 8) == (32, 16, 4, 4)
    # More queries: half as many rows.
    assert chosen(16, 8, 8) == chosen(16, 2, 7) == (32, 16, 2, 4) and chosen(32, 8, 16) == (32, 16, 1, 4)
    # Short rows: the same, and more blocks.
    assert chosen(16, 8, tiles=NARROW) == (64, 16, 4, 4) and chosen(16, 8, 8, NARROW) == (32, 16, 2, 4)
    assert chosen(64, 8, tiles=NARROW) == (64, 8, 1, 4) and chosen(256, 8, tiles=NARROW) == addressed
    # Long rows.
    assert chosen(16, 8, tiles=WIDE) == (64, 16, 4, 1) and chosen(16, 8, 8, WIDE) == (32, 16, 2, 2)
    assert chosen(64, 1024, tiles=WIDE) == (64, 8, 1, 2)
    # There are not as many heads; queries would be too many; numbers are long.
    assert chosen(16, 2) == chosen(16, 6) == chosen(33, 8) == chosen(16, 8, itemsize=4) == addressed
    assert chosen(16, 8, 36) == (128, 64, 1, 2) and chosen(64, 8, itemsize=4) == (64, 8, 1, 2)
    assert chosen(4, 4, tiles=(8, 16, 32, 32), device_index=-1)[:3] == (16, 16, 4)
    assert chosen(256, 1024, tiles=(8, 16, 128, 128), device_index=-1)[:3] == (16, 8, 1)


@gpu
@pytest.mark.parametrize(("sequences", "size"), [(24, 64), (3, 64), (128, 256), (20, 256)])
def test_paged_keys(sequences, size):
    each, heads, kv_heads, head_dim = 4 * 256 // size, 32, 8, 128
    q = randn(sequences, heads, head_dim, dtype=torch.bfloat16)
    k, v = (randn(sequences, kv_heads, head_dim, dtype=torch.bfloat16, seed=n) for n in (1, 2))
    pages = [randn(sequences * each, size, kv_heads, head_dim, dtype=torch.bfloat16, seed=n) for n in (3, 4)]
    table = torch.randperm(sequences * each, device="cuda").view(sequences, each).int()
    lengths = torch.randint(1, 1024, (sequences + 1,), device="cuda", dtype=torch.int32)
    lengths[0] = 0
    starts = lengths.cumsum(0, dtype=torch.int32)
    kinds = {}
    for backend in ("cutile", "pytorch"):
        own = [page.clone() for page in pages]
        kinds[backend] = fmha_paged_decode(q, k, v, *own, table, starts, backend=backend), *own
    for ours, theirs in zip(kinds["cutile"], kinds["pytorch"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)

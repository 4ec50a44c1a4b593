"""In kernels over sequences of different lengths, one token each: how blocks share their tiles of keys.

As a rule each sequence has as many blocks. Where that would give a block over one and a half times a fair share, all
tiles, one behind the other, are cut into equal shares, as in stream-K (Osama et al. 2023, arXiv:2301.03598): a block
may have the end of one sequence, some others, and the beginning of a last one. One token each behind 32768 keys and 31
times 512, Hq32 Hkv8 D128 in pages, takes an H100 90 us so and 339 by as many blocks each; 20 behind 1024 to 2048 keys,
for which one block each leaves a third of the multiprocessors' places empty, an H200 41 us and 46. Of even lengths
shares are slower, 32 times 1024 to 2048 64 us instead of 59. Lengths are read on the device: a captured graph serves
those of the moment.
"""

import cuda.tile as ct

from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int

# Sequences that a block looks through at a time: no fewer than it has threads. Of a smaller tile the compiler takes a
# sum for different numbers in different threads, and lets each matrix product wait for the one before: such a kernel
# took twice as long.
LEAST_AT_ONCE, MOST_AT_ONCE = 256, 1024


def tiles_of(starts_q, starts_k, n, window, TILE_N: Int, WINDOW: Bool, PAGED: Bool):
    """Of sequences ``n``, a tile: (the first tile of keys that their token sees, how many tiles hold one, the first
    such key, all keys). Unless it has one query (by ``starts_q``, if not PAGED) none does."""
    real = n < starts_k.shape[0] - 1
    keys = ct.gather(starts_k, n + 1, mask=real) - ct.gather(starts_k, n, mask=real)
    keys = keys.astype(ct.int32)
    there = keys > 0
    if not PAGED:
        there = there & (ct.gather(starts_q, n + 1, mask=real) - ct.gather(starts_q, n, mask=real) == 1)
    first = ct.maximum(keys - window, 0) if WINDOW else ct.zeros(n.shape, ct.int32)
    return first // TILE_N, ct.where(there, ct.cdiv(keys, TILE_N) - first // TILE_N, 0), first, keys


def tiles_of_one(starts_q, starts_k, n, window, TILE_N: Int, WINDOW: Bool, PAGED: Bool):
    """:func:`tiles_of` of one sequence, as numbers."""
    n = n + ct.zeros((1,), ct.int32)
    tile, count, first, keys = tiles_of(starts_q, starts_k, n, window, TILE_N, WINDOW, PAGED)
    return tile.item(), count.item(), first.item(), keys.item()


def way_of(starts_q, starts_k, window, blocks, CHUNK: Int, CHUNKS: Int, TILE_N: Int, WINDOW: Bool, PAGED: Bool):
    """How ``blocks`` share the tiles of all sequences: (tiles of a share, blocks of a sequence, all tiles). There are
    no shares, 0, where each sequence has as many blocks. Looks through the sequences CHUNK at a time, CHUNKS times;
    with CHUNKS 0 it does not look, and there are no shares."""
    total, longest = 0, 0
    for c in range(CHUNKS):
        n = c * CHUNK + ct.arange(CHUNK, dtype=ct.int32)
        count = tiles_of(starts_q, starts_k, n, window, TILE_N, WINDOW, PAGED)[1]
        total, longest = total + ct.sum(count).item(), max(longest, ct.max(count).item())
    share, splits = max(ct.cdiv(total, blocks), 1), max(blocks // (starts_k.shape[0] - 1), 1)
    return (0 if 2 * ct.cdiv(longest, splits) <= 3 * share else share), splits, total


def share_of_block(
    starts_q, starts_k, window, block, blocks, CHUNK: Int, CHUNKS: Int, TILE_N: Int, WINDOW: Bool, PAGED: Bool
):
    """What a block takes: (the first sequence n, the number of its first tile, the first tile that is taken, the first
    that no longer is, by how much the number of a part differs from that of its block)."""
    share, splits, total = way_of(starts_q, starts_k, window, blocks, CHUNK, CHUNKS, TILE_N, WINDOW, PAGED)
    n, first, place, end = 0, 0, 0, 0
    if share == 0:
        n = block // splits
        _, count, _, _ = tiles_of_one(starts_q, starts_k, n, window, TILE_N, WINDOW, PAGED)
        each = ct.cdiv(count, splits)
        place = block % splits * each
        end = min(place + each, count)
    else:
        place, end, before = block * share, min((block + 1) * share, total), 0
        for c in range(CHUNKS):
            nth = c * CHUNK + ct.arange(CHUNK, dtype=ct.int32)
            count = tiles_of(starts_q, starts_k, nth, window, TILE_N, WINDOW, PAGED)[1]
            done = before + ct.cumsum(count, axis=0) <= place
            n = n + ct.sum(done.astype(ct.int32)).item()
            first = first + ct.sum(ct.where(done, count, 0)).item()
            before = before + ct.sum(count).item()
    return n, first, place, end, 0 if share == 0 else 1


def parts_of_sequence(
    starts_q, starts_k, window, n, count, blocks, CHUNK: Int, CHUNKS: Int, TILE_N: Int, WINDOW: Bool, PAGED: Bool
):
    """The numbers of the parts, from which to which, that sequence n with ``count`` tiles has. In equal shares those of
    block b have the numbers b + n: of any two parts the later one has a later block, a later sequence, or both."""
    share, splits, _ = way_of(starts_q, starts_k, window, blocks, CHUNK, CHUNKS, TILE_N, WINDOW, PAGED)
    begin, end = n * splits, n * splits + ct.cdiv(count, max(ct.cdiv(count, splits), 1))
    if share > 0:
        first = 0
        for c in range(CHUNKS):
            nth = c * CHUNK + ct.arange(CHUNK, dtype=ct.int32)
            each = tiles_of(starts_q, starts_k, nth, window, TILE_N, WINDOW, PAGED)[1]
            first = first + ct.sum(ct.where(nth < n, each, 0)).item()
        begin, end = first // share + n, ct.cdiv(first + count, share) + n
    return begin, end

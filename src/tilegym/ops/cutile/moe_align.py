"""Sorting (token, expert) pairs by expert on the device: a counting sort without atomics, the same in every run.

The pairs fall into chunks. Where there is more than one, a first kernel counts each chunk's pairs of each
expert. The second one, a block a chunk, adds up the counts before it, and compares the ids within its chunk with each
other: both together are a pair's rank among its expert's, and with the ranks of the experts the row that it gets.
"""

import functools

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import begin
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import span
from tilegym.ops.pytorch.moe_align import check_align
from tilegym.ops.pytorch.moe_align import max_blocks

# Pairs a chunk: a block compares each with those before it in its chunk, and reads the counts of all chunks.
FEW_PAIRS, CHUNK_OF_FEW, CHUNK = 4096, 128, 256
COMPARED = 8192  # elements of a tile of comparisons: 64 registers a thread


def ids_at(ids, indices):
    """In a kernel: the ids of these pairs as int32, -1 behind the last and for those that no expert can have."""
    some = ct.gather(ids, indices, padding_value=-1)
    if some.dtype == ct.int64:
        # The low half of any number may be an expert's. The high half or its negative is below 0, if it is not 0.
        high = (some >> 32).astype(ct.int32)
        return some.astype(ct.int32) | high | -high
    return some


def count_chunk(ids, chunk, CHUNK: Int, EXPERTS: Int, STEP: Int):
    """In a kernel: how many ids of a chunk each expert has, [EXPERTS]."""
    experts = ct.arange(EXPERTS, dtype=ct.int32)
    counts = ct.zeros((EXPERTS,), dtype=ct.int32)
    for i in range(CHUNK // STEP):
        some = ids_at(ids, chunk * CHUNK + span(i, STEP))
        counts = counts + ct.sum((experts[:, None] == some[None, :]).astype(ct.int32), axis=1)
    return counts


@ct.kernel
def moe_count_kernel(ids, counts, CHUNK: Int, EXPERTS: Int, STEP: Int, OVERLAP: Bool):
    """ids [P]; counts [chunks, E]: one block a chunk."""
    begin(OVERLAP)
    chunk = ct.bid(0)
    experts = ct.arange(EXPERTS, dtype=ct.int32)
    ct.scatter(counts, (chunk, experts), count_chunk(ids, chunk, CHUNK, EXPERTS, STEP))


@ct.kernel
def moe_align_kernel(
    ids,  # [P]
    counts,  # [chunks, E], or 0 if there is one chunk
    rows,  # [P]: the row of each pair, -1 for ids that are left out
    expert_of,  # [blocks]: the expert of each block of rows, -1 behind the last
    offsets,  # [E + 1]: where each expert's rows begin
    sorted_ids,  # [blocks * BLOCK] if SORTED, else 0
    num_experts,
    BLOCK: Int,
    CHUNK: Int,
    EXPERTS: Int,
    STEP: Int,
    ONE_CHUNK: Bool,
    SORTED: Bool,
    TOP_K: Int,
    OVERLAP: Bool,
):
    """TOP_K > 0: each expert that has a pair gets BLOCK rows, one for each token of so many pairs."""
    begin(OVERLAP)
    chunk = ct.bid(0)
    experts = ct.arange(EXPERTS, dtype=ct.int32)
    if ONE_CHUNK:
        total = count_chunk(ids, 0, CHUNK, EXPERTS, STEP)
        before = ct.zeros((EXPERTS,), dtype=ct.int32)
    else:
        total = ct.zeros((EXPERTS,), dtype=ct.int32)
        before = ct.zeros((EXPERTS,), dtype=ct.int32)
        for i in range(ct.cdiv(counts.shape[0], STEP)):
            chunks = span(i, STEP)
            some = ct.gather(counts, (chunks[:, None], experts[None, :]))
            total = total + ct.sum(some, axis=0)
            before = before + ct.sum(ct.where(chunks[:, None] < chunk, some, 0), axis=0)
    # An expert beyond the last has no pairs: it ends where the last one does.
    total = ct.where(experts < num_experts, total, 0)
    room = ct.where(total > 0, BLOCK, 0) if TOP_K > 0 else ct.cdiv(total, BLOCK) * BLOCK
    ends = ct.cumsum(room, axis=0)
    begins = ends - room
    if chunk == 0:
        ct.scatter(offsets, experts + 1, ends, mask=experts < num_experts)
        ct.scatter(offsets, 0, 0)
    for i in range(CHUNK // STEP):
        pairs = chunk * CHUNK + span(i, STEP)
        mine = ids_at(ids, pairs)
        first = begins + before
        if TOP_K > 0:
            first, rank = begins, pairs // TOP_K
        else:
            rank = ct.zeros((STEP,), dtype=ct.int32)
            for j in range(i + 1):
                others = chunk * CHUNK + span(j, STEP)
                same = (mine[:, None] == ids_at(ids, others)[None, :]) & (others[None, :] < pairs[:, None])
                rank = rank + ct.sum(same.astype(ct.int32), axis=1)
        first = ct.where(mine[:, None] == experts[None, :], first[None, :], 0)
        row = ct.where((mine >= 0) & (mine < num_experts), ct.sum(first, axis=1) + rank, -1)
        ct.scatter(rows, pairs, row)
        if SORTED:
            ct.scatter(sorted_ids, row, pairs, mask=row >= 0)
        # There are no more blocks than pairs, so the same indices reach them all.
        owner = ct.sum((pairs[:, None] * BLOCK >= ends[None, :]).astype(ct.int32), axis=1)
        ct.scatter(expert_of, pairs, ct.where(owner < num_experts, owner, -1))


@functools.lru_cache(maxsize=1024)
def _plan(pairs: int, block_size: int, num_experts: int) -> tuple[int, int, int, int, int]:
    """(blocks, chunks, CHUNK, EXPERTS, STEP)."""
    experts = next_power_of_2(num_experts)
    # 32 x 32 comparisons of pairs, and 32 pairs with up to 256 experts, fit.
    step = min(32, max(1, COMPARED // experts))
    chunk = min(CHUNK if pairs > FEW_PAIRS else CHUNK_OF_FEW, max(step, next_power_of_2(pairs)))
    return max_blocks(pairs, block_size, num_experts), -(-pairs // chunk), chunk, experts, step


def launch_align(
    topk_ids: torch.Tensor, block_size: int, num_experts: int, sorted_ids: torch.Tensor | None = None,
    by_token: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """``rows`` [T * k], ``expert_of`` [blocks] and ``offsets`` [E + 1], int32, and fills ``sorted_ids`` if given.

    ``by_token``: there are at most ``block_size`` tokens, and in each expert's block row t is token t's.
    """
    ids = topk_ids.reshape(-1)
    pairs = ids.shape[0]
    blocks, chunks, chunk, experts, step = _plan(pairs, block_size, num_experts)
    rows, expert_of, offsets = _fake_align(topk_ids, block_size, num_experts)
    if pairs == 0:
        return rows, expert_of, offsets.zero_()
    counts, overlap = 0, overlaps(ids.get_device())
    if chunks > 1:
        counts = rows.new_empty(chunks, num_experts)
        launch(ids, (chunks,), moe_count_kernel, (ids, counts, chunk, experts, step, overlap), overlap)
    ordered = 0 if sorted_ids is None else sorted_ids
    sizes = (num_experts, block_size, chunk, experts, step, chunks == 1, sorted_ids is not None,
             topk_ids.shape[1] if by_token else 0, overlap)  # fmt: skip
    launch(ids, (chunks,), moe_align_kernel, (ids, counts, rows, expert_of, offsets, ordered, *sizes), overlap)
    return rows, expert_of, offsets


def _fake_align(topk_ids, block_size, num_experts):
    pairs = topk_ids.numel()
    blocks = max_blocks(pairs, block_size, num_experts)
    return tuple(topk_ids.new_empty(size, dtype=torch.int32) for size in (pairs, blocks, num_experts + 1))


def _fake(topk_ids, block_size, num_experts):
    _, expert_of, _ = _fake_align(topk_ids, block_size, num_experts)
    sorted_ids = expert_of.new_empty(expert_of.shape[0] * block_size)
    return sorted_ids, expert_of, expert_of.new_empty(num_experts + 1)


@compilable(fake=_fake)
def moe_align_sorted(
    topk_ids: torch.Tensor, block_size: int, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pairs = topk_ids.numel()
    length = max_blocks(pairs, block_size, num_experts) * block_size
    sorted_ids = torch.full((length,), pairs, dtype=torch.int32, device=topk_ids.device)
    _, expert_of, offsets = launch_align(topk_ids, block_size, num_experts, sorted_ids)
    return sorted_ids, expert_of, offsets


@register_impl("moe_align_block_size", "cutile")
def moe_align_block_size(
    topk_ids: torch.Tensor, block_size: int, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_align(topk_ids, block_size, num_experts)
    sorted_ids, expert_of, offsets = moe_align_sorted(topk_ids, block_size, num_experts)
    return sorted_ids, expert_of, offsets[-1:]

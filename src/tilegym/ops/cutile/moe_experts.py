"""The forward pass of ``fused_moe`` in cuTile, from one token to many.

A token and its few experts: ``moe_one_token.py`` or, of other layouts, ``moe_decode.py``, two launches. More: the pairs
are sorted by expert into blocks of rows (``moe_align.py``) as tall as the experts' shares suggest, the tokens' rows are
copied there, unless they are so few that all tokens are a block of each expert, two grouped GEMMs follow
(``moe_gemm.py``), the first with the activation behind it, and each token adds up its rows. For gradients the first
GEMM's result is kept (``moe_backward.py``). Each launch begins while the one before it ends.
"""

import functools
from typing import NamedTuple

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.ops.cutile import moe_one_token
from tilegym.ops.cutile.matmul import GROUP_M
from tilegym.ops.cutile.matmul import uses_tf32
from tilegym.ops.cutile.moe_activation import moe_interleaved_activation_kernel
from tilegym.ops.cutile.moe_align import launch_align
from tilegym.ops.cutile.moe_decode import moe_gemv_down_kernel
from tilegym.ops.cutile.moe_decode import moe_gemv_up_kernel
from tilegym.ops.cutile.moe_gemm import INTERLEAVED
from tilegym.ops.cutile.moe_gemm import NO_GATE
from tilegym.ops.cutile.moe_gemm import SPLIT
from tilegym.ops.cutile.moe_gemm import grouped_gemm_kernel
from tilegym.ops.cutile.moe_gemm import moe_combine_kernel
from tilegym.ops.cutile.moe_gemm import moe_spread_kernel
from tilegym.ops.cutile.moe_gemm import moe_up_kernel
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.cutile.tiling import overlaps
from tilegym.ops.cutile.tiling import sm_count


class Tile(NamedTuple):
    """The columns and the depth of a weight's tile, and the compiler's hints as keyword arguments."""

    n: int
    k: int
    hints: tuple[tuple[str, int], ...] = ()

    def of(self, kernel: ct.kernel) -> ct.kernel:
        return hinted(kernel, **dict(self.hints)) if self.hints else kernel


class Plan(NamedTuple):
    """Tiles for one problem. ``rows`` a block, 0 for products of matrix and vector, ``pairwise`` in three launches;
    ``persistent``: GEMMs in as many blocks as run at once."""

    rows: int
    weight_left: bool
    up: Tile
    down: Tile
    pairwise: bool = False
    persistent: bool = False


MAX_ROWS = 128  # of a block
FEW_TOKENS = 16
WARPS_8, PAIRED, TRIPLED = (("num_worker_warps", 8),), (("occupancy", 2),), (("occupancy", 3),)


@functools.cache
def is_hopper(device: int) -> bool:
    return device >= 0 and torch.cuda.get_device_capability(device)[0] == 9


@functools.lru_cache(maxsize=1024)
def choose(
    tokens: int,
    top_k: int,
    experts: int,
    itemsize: int,
    transposed: bool,
    device: int,
    as_vectors: bool = True,
    alone: bool = False,
    tensor_cores: bool = True,
) -> Plan:
    """The plan for ``tokens`` x ``top_k`` pairs; with ``as_vectors`` few of them are not sorted. ``alone``: for one
    product, ``ragged_group_gemm``'s. ``tensor_cores``: fp32 has none, unless it is rounded to tf32.

    Measured on an H200 in bf16 with the experts of Qwen3-30B-A3B: 1 token 36.5 us as vectors, 32.0 with all tokens in
    each block, 2 tokens 54.2 and 51.3, 4 tokens 95.5 and 82.2; 64 tokens 192 us up and 106 down (4130 and 3734 GB/s),
    with blocks of 32 rows 3 % more; 512 tokens 212 + 116, with blocks of 32 or 128 rows at least 8 % more; 8192 tokens
    1308 in all, and 1245 where the second GEMM is persistent. Of gpt-oss-20b 8192 tokens take 2794 us, and 5108 with
    the activation in the first GEMM. From 64 rows an expert on, where more than 64 are as likely as fewer, blocks of
    128 (of 64) take: 256 tokens of Mixtral-8x7B 743 us (914), 512 tokens 1040 (1244), 512 of gpt-oss-20b 498 (500),
    1024 649 (709), 1024 of DeepSeek-V2-Lite 381 (427). One product of as many rows, uneven (torch's grouped_mm): 600 by
    Mixtral's 8 experts 485 (622, 661), 9600 by Qwen3's 128 231 (275, 264), 2400 by gpt-oss's 32 295 (366, 354).

    In fp32 without tf32 16 tokens, as vectors, of Qwen3-30B-A3B take 575 us and of DeepSeek-V2-Lite 765 (1 takes 54 and
    78), 32, sorted, 6849 and 6787, 512 11151 and 10233; of gpt-oss-20b 4 as vectors 362 (1 takes 105), 16 sorted 1517.
    """
    pairs = tokens * top_k
    share = pairs / experts
    # Few enough for blocks of 64 rows: fewer where it was measured, not in fused_moe's backward pass.
    few = share < 64 if (as_vectors or alone) and is_hopper(device) else share <= 128
    # Eight pairs that fall on 32 experts share hardly any. Without tensor cores 16 rows of an expert take longest:
    # as vectors, tokens cost at most what they cost one by one.
    together = (4 if transposed else 128) if device >= 0 else 0
    as_vectors = as_vectors and (tokens == 1 or 4 * pairs <= experts or (not tensor_cores and tokens <= together))
    if device < 0:
        return Plan(0 if as_vectors else 16, share < 2, Tile(16, 32), Tile(32, 32), transposed)
    # Tensor cores, where they multiply, read the matrices of several experts faster.
    if as_vectors and (itemsize == 4 or pairs < 4):
        if transposed:
            # Columns are the unit of access, and a block takes many: of gpt-oss's four pairs only 90 blocks would come.
            return Plan(0, False, Tile(16, 256 // itemsize), Tile(32, 256 // itemsize), True)
        k = 512 // itemsize
        return Plan(0, False, Tile(8, k, TRIPLED), Tile(8, k))
    if tokens <= FEW_TOKENS:
        if transposed:
            return Plan(16, True, Tile(64, 128 // itemsize, TRIPLED), Tile(64, 256 // itemsize, TRIPLED))
        return Plan(16, True, Tile(64, 256 // itemsize, PAIRED), Tile(128, 256 // itemsize, PAIRED))
    if share <= 24:
        rows = 16 if share <= 8 else 32
        return Plan(rows, True, Tile(64, 256 // itemsize, PAIRED), Tile(64, 256 // itemsize, TRIPLED))
    if itemsize == 4:
        # Without tensor cores large accumulators only spill.
        return Plan(64, False, Tile(32, 32), Tile(64, 32))
    if few:
        return Plan(64, False, Tile(64, 64, PAIRED), Tile(128, 64, PAIRED))
    if is_hopper(device):
        return Plan(MAX_ROWS, False, Tile(128, 64, WARPS_8), Tile(256, 64, WARPS_8), persistent=True)
    return Plan(MAX_ROWS, False, Tile(64, 64), Tile(128, 64))


def as_stored(w: torch.Tensor, transposed: bool) -> tuple[torch.Tensor, bool]:
    """``w``, with the last two dimensions swapped or copied if its last one has no unit stride; and whether it is
    [E, K, N] rather than [E, N, K]."""
    if w.stride(2) == 1 or w.shape[2] == 1:
        return w, transposed
    if w.stride(1) == 1:
        return w.mT, not transposed
    return w.contiguous(), transposed


class Up(NamedTuple):
    """The experts' first matrices and biases, as the kernels take them."""

    arrays: tuple  # w_gate, w_up, b_gate, b_up; 0 for those that are not there
    transposed: bool
    gate: int
    biased: bool


def up_of(w1: torch.Tensor, w1_up: torch.Tensor | None, b1: torch.Tensor | None, inner: int, interleaved: bool,
          transposed: bool) -> Up:  # fmt: skip
    """What the first GEMM reads, without copies: halves and alternating rows are views."""
    w1, stored = as_stored(w1, transposed)
    dim = 2 if stored else 1
    gate_bias = up_bias = 0
    if w1_up is not None:
        w1_up, other = as_stored(w1_up, transposed)
        if other != stored:
            w1_up = w1_up.mT.contiguous()
        return Up((w1, w1_up, 0, 0), stored, SPLIT, False)
    if w1.shape[dim] == inner:
        return Up((w1, 0, 0 if b1 is None else b1, 0), stored, NO_GATE, b1 is not None)
    if b1 is not None:
        gate_bias, up_bias = (b1[:, ::2], b1[:, 1::2]) if interleaved else (b1[:, :inner], b1[:, inner:])
    biases = (gate_bias, up_bias)
    if interleaved and stored:
        return Up((w1, 0, *biases), stored, INTERLEAVED, b1 is not None)
    if interleaved:
        return Up((w1[:, ::2], w1[:, 1::2], *biases), stored, SPLIT, b1 is not None)
    return Up((w1.narrow(dim, 0, inner), w1.narrow(dim, inner, inner), *biases), stored, SPLIT, b1 is not None)


def spread(x: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Copies each row of ``x`` [T, H] to its k rows of ``out``."""
    tokens, width = x.shape
    tile = min(2048, next_power_of_2(width))
    overlap = overlaps(x.get_device())
    args = (x, rows, out, rows.shape[0] // tokens, tile, overlap)
    launch(x, (tokens * -(-width // tile),), moe_spread_kernel, args, overlap)


def combine(
    y: torch.Tensor,
    rows: torch.Tensor | None,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Writes the sum of each token's ``rows`` of ``y``, by default k one after the other, to ``out`` [T, H]."""
    tokens, width = out.shape
    # A few tokens' columns are spread over more blocks.
    tile = min(256 if tokens <= 64 else 1024, next_power_of_2(width))
    pairs, overlap = y if rows is None else rows, overlaps(out.get_device())
    options = (pairs.shape[0] // tokens, tile, rows is not None, weights is not None, shared is not None, overlap)
    arrays = (y, 0 if rows is None else rows, 0 if weights is None else weights, 0 if shared is None else shared, out)
    launch(out, (tokens * -(-width // tile),), moe_combine_kernel, (*arrays, *options), overlap)


def grouped(
    plan: Plan, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, expert_of: torch.Tensor,
    c: torch.Tensor, transposed: bool,
) -> None:  # fmt: skip
    """Writes each block of rows of ``x`` times its expert's matrix to ``c``."""
    tile, device = plan.down, x.get_device()
    overlap, persistent = overlaps(device), plan.persistent and bias is None
    tiles = expert_of.shape[0] * -(-c.shape[1] // tile.n)
    grid = (min(tiles, sm_count(device)) if persistent else tiles,)
    arrays = (x, w, 0 if bias is None else bias, expert_of, c)
    flags = (transposed, bias is not None, plan.weight_left, uses_tf32(x.dtype), persistent, overlap)
    launch(x, grid, tile.of(grouped_gemm_kernel), (*arrays, plan.rows, tile.n, tile.k, GROUP_M, *flags), overlap)


@compilable(fake=lambda hidden, *_: torch.empty_like(hidden, memory_format=torch.contiguous_format))
def moe_forward(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    kind: int,
    w1_up: torch.Tensor | None,
    b1: torch.Tensor | None,
    b2: torch.Tensor | None,
    interleaved: bool,
    transposed: bool,
    alpha: float,
    limit: float | None,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    (tokens, width), (experts, inner) = hidden.shape, (w2.shape[0], w2.shape[1 if transposed else 2])
    out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if hidden.numel() == 0 or ids.numel() == 0:
        return out.zero_() if shared is None else out.copy_(shared)
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    top_k, itemsize, device = ids.shape[1], hidden.element_size(), hidden.get_device()
    up = up_of(w1, w1_up, b1, inner, interleaved, transposed)
    w2, w2_transposed = as_stored(w2, transposed)
    weights = weights.reshape(-1)
    bound, overlap = 0.0 if limit is None else limit, overlaps(device)
    if tokens == 1 and itemsize == 2 and up.gate == SPLIT and not (up.transposed or w2_transposed or up.biased):
        plan = moe_one_token.plan(width, inner, top_k, device) if b2 is None else None
        if plan is not None:
            options = (alpha, bound, kind, limit is not None)
            moe_one_token.one_token(plan, hidden, up.arrays[:2], w2, ids.reshape(-1), weights, shared, out, options)
            return out
    tensor_cores = itemsize == 2 or uses_tf32(hidden.dtype)
    plan = choose(tokens, top_k, experts, itemsize, up.transposed, device, tensor_cores=tensor_cores)
    options = (up.transposed, up.gate, up.biased, kind, limit is not None)
    if plan.rows == 0:
        ids = ids.reshape(-1)
        h = hidden.new_empty(tokens * top_k, inner)
        tile = plan.up
        grid = (tokens * top_k * -(-inner // tile.n),)
        arrays = (hidden, *up.arrays, ids, h)
        args = (*arrays, alpha, bound, top_k, tile.n, tile.k, *options, overlap)
        launch(out, grid, tile.of(moe_gemv_up_kernel), args, overlap)
        tile, pairwise = plan.down, plan.pairwise
        y = hidden.new_empty(tokens * top_k, width, dtype=torch.float32) if pairwise else out
        with_shared = shared is not None and not pairwise
        arrays = (h, w2, 0 if b2 is None else b2, ids, weights, shared if with_shared else 0, y)
        options = (top_k, tile.n, tile.k, w2_transposed, b2 is not None, with_shared, pairwise, overlap)
        launch(out, (y.shape[0] * -(-width // tile.n),), moe_gemv_down_kernel, (*arrays, *options), overlap)
        if pairwise:
            combine(y, None, None, shared, out)
        return out
    # Tensor cores multiply 16 rows whether they are needed or not: a few tokens are all there in every block.
    few = tokens <= FEW_TOKENS
    rows, expert_of, _ = launch_align(ids, plan.rows, experts, None, few)
    total = expert_of.shape[0] * plan.rows
    x, h, y = hidden, hidden.new_empty(total, inner), hidden.new_empty(total, width)
    if not few:
        x = hidden.new_empty(total, width)
        spread(hidden, rows, x)
    if up.gate == INTERLEAVED and plan.persistent:
        # To tell gates from ups in an accumulator takes longer than to store and read them.
        g = hidden.new_empty(total, 2 * inner)
        grouped(plan, x, up.arrays[0], None, expert_of, g, True)
        tile_m, tile_n = 2, 1024
        arrays = (g.view(torch.uint32), *up.arrays[2:], expert_of, h, alpha, bound)
        flags = (plan.rows, tile_m, tile_n, up.biased, kind, limit is not None, overlap)
        grid = (total // tile_m * -(-inner // tile_n),)
        launch(out, grid, moe_interleaved_activation_kernel, (*arrays, *flags), overlap)
    else:
        tile = plan.up
        grid = (expert_of.shape[0] * -(-inner // tile.n),)
        sizes = (plan.rows, tile.n, tile.k, GROUP_M, *options, plan.weight_left, uses_tf32(hidden.dtype), few, overlap)
        launch(out, grid, tile.of(moe_up_kernel), (x, *up.arrays, expert_of, h, alpha, bound, *sizes), overlap)
    grouped(plan, h, w2, b2, expert_of, y, w2_transposed)
    combine(y, rows, weights, shared, out)
    return out

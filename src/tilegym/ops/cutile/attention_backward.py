"""The backward pass of ``fmha``: tiles and launches of the kernels in attention_backward_kernels.py."""

import functools
import math

import torch

from tilegym.backend import recording
from tilegym.backend.cutile.autotuner import Autotuner
from tilegym.backend.cutile.autotuner import Config
from tilegym.backend.cutile.autotuner import SearchSpace
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.cutile.tuning_key import bucket
from tilegym.ops.cutile.attention_backward_configs import dkdv_configs
from tilegym.ops.cutile.attention_backward_configs import dq_configs
from tilegym.ops.cutile.attention_backward_configs import fp32_configs
from tilegym.ops.cutile.attention_backward_configs import fused_configs
from tilegym.ops.cutile.attention_backward_kernels import attention_dkdv_kernel
from tilegym.ops.cutile.attention_backward_kernels import attention_dq_kernel
from tilegym.ops.cutile.attention_backward_rows import finish_fused_kernel
from tilegym.ops.cutile.attention_backward_rows import prepare_fused_kernel
from tilegym.ops.cutile.attention_backward_rows import sum_heads_kernel
from tilegym.ops.cutile.attention_backward_short import attention_short_backward_kernel
from tilegym.ops.cutile.attention_common import ADDITIVE_MASK
from tilegym.ops.cutile.attention_common import BOOLEAN_MASK
from tilegym.ops.cutile.attention_common import KEY_MASK
from tilegym.ops.cutile.attention_common import LOG2E
from tilegym.ops.cutile.attention_common import needs_exact
from tilegym.ops.cutile.attention_common import parts_of
from tilegym.ops.cutile.attention_common import tile_of
from tilegym.ops.cutile.attention_common import with_unit_stride
from tilegym.ops.cutile.attention_tiles import interleave_of
from tilegym.ops.cutile.attention_tiles import mask_of_rows
from tilegym.ops.cutile.attention_tiles import tallest_tile
from tilegym.ops.cutile.matmul import uses_tf32
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import sm_count

# From how many queries and keys on one kernel computes all gradients, where it can, for which widths (width_of) and
# whether causal; it adds to dq atomically. On an H200 at B4 Hq32 Hkv8 S4096 it takes 3.27 ms instead of 3.6 for D 64,
# 1.85 instead of 1.94 if causal, 5.35 instead of 6.2 for D 128, 2.88 instead of 3.00 if causal, 13.3 instead of 14.8
# for D 256, 6.8 instead of 7.7 if causal; causal B1 S8192 2.78 instead of 2.93 for D 128, with Hq64 3.48 instead of
# 3.68 for D 64; latent attention, B4 H16 S4096, 3.75 instead of 3.99, but 2.08 instead of 1.99 if causal. Where it is
# not named, two are as fast or faster; of fewer queries, launches before and behind it weigh more. Of two tiles of
# columns two are, too: D 96 causal B2 H32 S2048 393 us instead of 388, D 80 full B8 H16 S1024 341 instead of 360.
FUSED = {
    (64, False): 1024,
    (64, True): 1024,
    (128, False): 1024,
    (128, True): 1024,
    (192, False): 1024,
    (256, False): 1024,
    (256, True): 1024,
}
# Up to how many queries and keys a single kernel does all in one launch; where groups have more than four heads, they
# are computed apart and added up by a second. On an H200 16 tokens take 14 us instead of 29 (Hq8 Hkv4 D256) and 14
# instead of 25 (Hq64 Hkv8 D128).
SHORT = 64
ROWS = 32  # of a block of the kernel behind the fused one
# As many elements has a block of the kernel before it: 8 rows of D 128 take 73 us of B1 Hq32 S8192 on an H200, 32 take
# 83; of D 64 16 rows 73 and 32 77; of D 256 4 rows 40 and 32 58.
PREPARED = 1024
WHOLE = 128  # keys: a multiple of so many leaves no tile of the fused kernel that is in part behind the last
FEW_KEYS = 1024  # up to so many keys, fused_configs is not told that tiles are whole
FEW = 1.8  # blocks for each multiprocessor, if they differ in length, among which the longest are waited for
SUM_ROWS = 16  # of dk and dv, where parts of groups are added up
# Up to how many keys, with a causal mask and D up to 128, the blocks of all heads take turns in the fused kernel: those
# of eight heads are too few to keep all multiprocessors busy. See _turns.
ALL_IN_TURNS = 1024
HEADS_IN_TURNS = 8  # of more keys, as a rule
# Of how many queries, those of all heads that take turns, the L2 cache holds q, dO and what is added to dq for D 256.
CACHED_QUERIES = 16384


def _suits_queries(q: torch.Tensor, cfg: Config) -> bool:
    # Parts of more than 64 columns may be of more columns in all.
    columns, head_dim = vars(cfg).get("TILE_P", 64), q.shape[3]
    return cfg.TILE_M <= tallest_tile(q) and (columns <= 64 or -head_dim % columns < 64)


def _suits_keys(k: torch.Tensor, cfg: Config) -> bool:
    return cfg.TILE_N <= max(64, bucket(k.shape[2]))


@functools.cache
def _is_hopper(device: int) -> bool:
    """Whether the tensor memory accelerator adds to what is in memory, as the fused kernel wants it."""
    return device >= 0 and torch.cuda.get_device_capability(device)[0] == 9


def _shares(
    device: int, width: int, is_causal: bool, windowed: bool, batch: int, heads: int, kv_heads: int, queries: int,
    keys: int,
) -> int:  # fmt: skip
    """Into how many parts the blocks of the fused kernel divide the heads of a group; 0: two kernels are faster.

    Of a causal mask the blocks differ in length: two for each multiprocessor, or the longest one is waited for. In as
    few parts as give that many, since their sums in fp32 are added up behind it: causal S2048 on an H200 takes 261 us
    with Hq32 Hkv8 D128 in two parts, 286 in four and 376 in one, where two kernels take 323; with Hkv4 256 in four and
    287 by two kernels, of S4096 792 in two and 1134; with Hq64 Hkv8 D64 293 in two, 307 in four, 469 in one, and 413,
    of S1024 101 in four, 138 in two, and 127; full S1024 with Hq32 Hkv8 D128 129 in two and 195 in one. With Hq8 Hkv4
    D256, in one part, 225, and 199; full S1024 126, and 104.
    """
    if min(queries, keys) < FUSED.get((width, is_causal), math.inf) or not _is_hopper(device):
        return 0
    shares, narrow = 1, width <= 128
    blocks = -(-keys // (128 if width < 256 else 64)) * batch * kv_heads
    enough = (FEW if is_causal else 0.9) * sm_count(device)
    if narrow:
        group = heads // kv_heads
        shares = next((n for n in range(1, group) if group % n == 0 and blocks * n >= enough), group)
    few = not windowed and blocks * shares < enough
    if is_causal and windowed and narrow or few and (is_causal or not narrow):
        return 0
    return 0 if recording.ask(torch.are_deterministic_algorithms_enabled) else shares


def _turns(device: int, width: int, keys: int, tile_n: int, kv_heads: int, group: int) -> int:
    """How many heads of keys take turns in the fused kernel with a causal mask, of ``kv_heads`` of all batch entries
    for a ``group`` of query heads each; 0: all of them.

    On an H200 S1024 D128 takes 303 us by all with B4 Hq32 Hkv8, 359 by eights (two kernels 315), and with B1, in four
    parts, 109 instead of 128 (117). Of more keys with D 128 four heads take turns if their blocks are not FEW, else
    eight: B1 Hq64 Hkv8 takes 5.84 ms of S8192 with four and 6.17 with eight, but 1.63 and 1.54 of S4096; Hq32 S8192
    2.71 and 2.75. With D 256 no more than what they add to stays in the L2 cache, if there are blocks enough: on an
    H100 B4 Hq32 Hkv8 S4096 takes 6.94 ms with one head, 7.87 with four, 11.1 with eight, B1 S8192 7.22 and 11.3 with
    one and eight, B2 Hq16 Hkv8 S4096 1.78 and 1.92 with two and eight, but B1 Hq16 Hkv4 1.13 and 1.06.
    """
    tiles = -(-keys // tile_n)
    if width <= 128 and keys <= ALL_IN_TURNS:
        return 0
    if width == 128:
        return 4 if 4 * tiles >= FEW * sm_count(device) else HEADS_IN_TURNS
    if width == 256 and tiles * kv_heads >= 3 * sm_count(device):
        return min(max(CACHED_QUERIES // (group * keys), 2 if group <= 2 else 1), HEADS_IN_TURNS)
    return HEADS_IN_TURNS


def _parts(head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """parts_of, of up to 128 columns; with more, one tile and parts of it."""
    return parts_of(head_dim, dtype) if head_dim <= 128 else (tile_of(head_dim), 0)


def width_of(columns: int, columns_dv: int, exactly: bool) -> int:
    """The columns that tiles are chosen for: of queries or of values, whichever have more, up to 256.

    Those of queries in steps of 64 unless ``exactly``: parts need not add up to a power of two.
    """
    return min(max(columns if exactly else -(-columns // 64) * 64, columns_dv), 256)


def _splits(device: int, batch: int, heads: int, kv_heads: int, keys: int) -> bool:
    """Whether the heads of a group are computed by blocks of their own: tiles of 64 keys leave multiprocessors idle."""
    return heads > kv_heads and -(-keys // 64) * batch * kv_heads < sm_count(device)


@functools.cache
def _fused_autotuner(tile_d: int, whole: bool) -> Autotuner:
    return Autotuner(SearchSpace(functools.partial(fused_configs, tile_d=tile_d, whole=whole)))


@functools.cache
def _autotuners(tile_d: int, fp32: bool) -> tuple[Autotuner, Autotuner]:
    spaces = (
        (fp32_configs if fp32 else dq_configs, _suits_queries),
        (fp32_configs if fp32 else dkdv_configs, _suits_keys),
    )
    return tuple(Autotuner(SearchSpace(functools.partial(c, tile_d=tile_d), suits)) for c, suits in spaces)


def _fake(do, q, k, v, out, lse, scaling, is_causal, window_size, soft_cap, sinks, attention_mask, kv_len):
    dq, dk, dv = (torch.empty_like(with_unit_stride(x)) for x in (q, k, v))
    return dq, dk, dv, lse.new_empty(0 if sinks is None else q.shape[1])


@compilable(_fake)
def attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scaling: float,
    is_causal: bool,
    window_size: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    kv_len: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv laid out as q, k and v, and the gradient of the sinks in fp32, empty if none are given.

    ``out`` and ``lse`` are what attention_forward_lse returned for the same arguments.
    """
    options = (scaling, is_causal, window_size, soft_cap, sinks, attention_mask, kv_len)
    dq, dk, dv, _, _, dsinks = launch_backward(do, q, k, v, None, None, out, lse, *options)
    return dq, dk, dv, dsinks


def launch_backward(
    do, q, k, v, qpe, kpe, out, lse, scaling, is_causal, window_size, soft_cap, sinks, attention_mask, kv_len
) -> tuple[torch.Tensor, ...]:
    """As attention_backward, of queries and keys whose last columns are in ``qpe`` [B, Hq, Sq, R] and ``kpe``
    [B, 1, Skv, R], unless these are None: dq, dk, dv, dqpe, dkpe [B, Hkv, Skv, R] of each head, and the gradient of the
    sinks.
    """
    batch, heads, queries, head_dim = q.shape
    _, kv_heads, keys, v_dim = v.shape
    do, q, k, v = with_unit_stride(do), with_unit_stride(q), with_unit_stride(k), with_unit_stride(v)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dqpe = dkpe = tile_pe = 0
    whole_d, whole_dv = tile_of(head_dim), tile_of(v_dim)
    if qpe is None:
        qpe = kpe = 0
        (tile_d, tile_r), (tile_dv, tile_rv) = _parts(head_dim, q.dtype), _parts(v_dim, q.dtype)
    else:
        qpe, kpe, tile_pe = with_unit_stride(qpe), with_unit_stride(kpe), tile_of(qpe.shape[3])
        tile_d, tile_r, tile_dv, tile_rv = whole_d, tile_pe, whole_dv, 0
        dqpe, dkpe = torch.empty_like(qpe), kpe.new_empty(batch, kv_heads, keys, kpe.shape[3])
    if q.numel() == 0 or k.numel() == 0:
        dsinks = lse.new_zeros(0 if sinks is None else heads)
        if tile_pe:
            dqpe.zero_(), dkpe.zero_()
        return dq.zero_(), dk.zero_(), dv.zero_(), dqpe, dkpe, dsinks
    delta = lse.new_empty(1 if sinks is None else 2, batch, heads, queries)
    mask_kind, mask, one_row = mask_of_rows(attention_mask, keys)
    mask_shape = None if attention_mask is None else mask.shape
    windowed, has_kv_len = window_size is not None, kv_len is not None
    dtype = q.dtype
    tf32, exact = uses_tf32(dtype), needs_exact(dtype, mask_kind)
    numbers = (scaling, 1.0 if soft_cap is None else soft_cap, 0 if window_size is None else window_size)
    lengths = 0 if kv_len is None else kv_len
    columns_dv = tile_dv + tile_rv
    look = (batch, heads, kv_heads, queries, keys, head_dim, tile_pe, columns_dv, mask_shape, dtype, q.get_device())
    two_tiles = tile_r > 0 and not tile_pe
    width = width_of(tile_d + tile_r if two_tiles else head_dim + tile_pe, columns_dv, two_tiles)
    tune_dq, tune_dkdv = _autotuners(width, dtype == torch.float32)

    def parts_with(columns: int) -> int:
        return -(-min(head_dim, tile_d) // columns)

    def constants(cfg: Config, kind: int, bounded: bool) -> tuple:
        mask_rows = 1 if one_row else cfg.TILE_M
        options = (is_causal, windowed, soft_cap is not None, kind, mask_rows, has_kv_len, exact)
        columns = min(vars(cfg).get("TILE_P", tile_d), tile_d)
        tile = (cfg.TILE_M, cfg.TILE_N, columns, parts_with(columns), tile_r, tile_dv, tile_rv)
        two_loops = cfg.TWO_LOOPS or has_kv_len
        return (*tile, *options, bounded, two_loops, tf32, interleave_of(cfg, is_causal))

    def sums_of(shares: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the sums go that dk and dv have in so many parts: of fewer heads of a group each, in fp32."""
        if shares == 1:
            return dk, dv
        parts = (batch, kv_heads * shares, keys)
        return lse.new_empty(*parts, head_dim), lse.new_empty(*parts, v_dim)

    def add_up(shares: int, dk_parts: torch.Tensor, dv_parts: torch.Tensor) -> None:
        if shares > 1:
            rows = SUM_ROWS if keys > SHORT else 4
            blocks = (-(-keys // rows) * batch * kv_heads,)
            launch(q, blocks, sum_heads_kernel, (dk_parts, dv_parts, dk, dv, rows, whole_d, whole_dv, shares))

    def dq_arguments(cfg: Config) -> tuple:
        bounded = is_causal or windowed or has_kv_len or mask_kind == KEY_MASK or keys % cfg.TILE_N != 0
        arrays = (q, k, v, out, do, lse, mask, lengths, dq, delta, qpe, kpe, dqpe)
        return (*arrays, *numbers, *constants(cfg, mask_kind, bounded), sinks is not None)

    key = (*look, is_causal, windowed, soft_cap is not None, mask_kind, has_kv_len, tf32, sinks is None)
    plain = attention_mask is None and kv_len is None and sinks is None and not exact
    if plain and not tile_pe and max(queries, keys) <= SHORT and _is_hopper(q.get_device()):
        shares = heads // kv_heads if heads > 4 * kv_heads else 1
        dk_parts, dv_parts = sums_of(shares)
        arrays = (q, k, v, out, do, lse, dq, dk_parts, dv_parts)
        options = (SHORT, whole_d, whole_dv, is_causal, windowed, soft_cap is not None)
        kernel = hinted(attention_short_backward_kernel, num_worker_warps=8)
        launch(q, (batch * kv_heads * shares,), kernel, (*arrays, *numbers, *options))
        add_up(shares, dk_parts, dv_parts)
        return dq, dk, dv, dqpe, dkpe, lse.new_empty(0)
    # Of latent attention dkpe has no sum over parts.
    place = (q.get_device(), width, is_causal, windowed, batch, kv_heads if tile_pe else heads, kv_heads, queries, keys)
    if plain and not two_tiles and (shares := _shares(*place)):
        total, totalpe = lse.new_empty(q.shape), lse.new_empty(qpe.shape) if tile_pe else 0
        zeros, rows_of_dq = total, ROWS
        if is_causal and width == tile_d == 64 and not tile_r:
            # With a row for each column of dq: on an H200 Hq64 Hkv8 S8192 takes 3.34 ms instead of 3.52, S2048 283 us
            # instead of 293.
            zeros = lse.new_empty(batch, heads, -(-queries // 4) * 4, head_dim)
            total, rows_of_dq = zeros.view(1, batch, heads, head_dim, -1), 64
        dk_parts, dv_parts = sums_of(shares)
        group = heads // (kv_heads * shares)
        whole = not is_causal and not windowed and keys % WHOLE == 0 and keys > FEW_KEYS

        def fused_arguments(cfg: Config) -> tuple:
            arrays = (q, k, v, do, lse, delta, 0, 0, dk_parts, dv_parts, total, qpe, kpe, dkpe, totalpe)
            bounded = is_causal or windowed or keys % cfg.TILE_N != 0
            tiles = constants(cfg, mask_kind, bounded)
            columns = min(vars(cfg).get("TILE_DQ", tiles[2]), tiles[2])
            all_heads = batch * kv_heads * shares
            turns = _turns(q.get_device(), width, keys, cfg.TILE_N, all_heads, group) if is_causal else 1
            parts = (columns, parts_with(columns))
            last = vars(cfg).get("DV_LAST", False) and not tile_pe
            return (*arrays, *numbers, *tiles[:-1], turns, *parts, 0 if tile_pe else group, last)

        small = max(PREPARED // max(whole_d, whole_dv), 1)
        rows = (-(-queries // small) * batch * heads,)
        launch(q, rows, prepare_fused_kernel, (out, do, delta, zeros, totalpe, small, whole_d, tile_pe, whole_dv))
        _fused_autotuner(width, whole)(
            None,
            grid_fn=lambda args, cfg: (-(-keys // cfg.TILE_N) * batch * kv_heads * shares,),
            kernel=attention_dkdv_kernel,
            args_fn=fused_arguments,
            key=key if shares == 1 else (*key, "parts", shares),
            outputs=("dk", "dv"),
        )
        rows = (-(-queries // rows_of_dq) * batch * heads,)
        sums, tiles = (0, 0, 0, 0), (rows_of_dq, whole_d, tile_pe, SUM_ROWS, whole_dv, shares)
        if shares > 1:
            rows = (rows[0] + -(-keys // SUM_ROWS) * batch * kv_heads,)
            sums = (dk_parts, dv_parts, dk, dv)
        launch(q, rows, finish_fused_kernel, (total, dq, totalpe, dqpe, *sums, scaling, *tiles))
        return dq, dk, dv, dqpe, dkpe, lse.new_empty(0)
    # Where the heads of a group can have masks of their own, what is masked shows in the loop over them only.
    own_masks = mask_kind == KEY_MASK and mask_shape[1] > 1
    dkdv_kind = BOOLEAN_MASK if own_masks else mask_kind
    # Of each query head, in fp32, where the heads of the keys would be too few blocks.
    group = heads // kv_heads if not tile_pe and _splits(q.get_device(), batch, heads, kv_heads, keys) else 1
    dk_parts, dv_parts = sums_of(group)

    def dkdv_arguments(cfg: Config) -> tuple:
        arrays = (q, k, v, do, lse, delta, mask, lengths, dk_parts, dv_parts, 0, qpe, kpe, dkpe, 0)
        return (*arrays, *numbers, *constants(cfg, dkdv_kind, is_causal or windowed), 0, 0, 0, False)

    tune_dq(
        None,
        grid_fn=lambda args, cfg: (-(-queries // cfg.TILE_M) * batch * heads,),
        kernel=attention_dq_kernel,
        args_fn=dq_arguments,
        key=key,
    )
    tune_dkdv(
        None,
        grid_fn=lambda args, cfg: (-(-keys // cfg.TILE_N) * batch * kv_heads * group,),
        kernel=attention_dkdv_kernel,
        args_fn=dkdv_arguments,
        key=(*key, group),
    )
    add_up(group, dk_parts, dv_parts)
    if sinks is None:
        return dq, dk, dv, dqpe, dkpe, lse.new_empty(0)
    # A sink is a key whose value is zero: dP is zero there.
    sink = sinks.float().view(-1, 1)
    if exact:
        unit = 1.0 if soft_cap is not None or mask_kind == ADDITIVE_MASK else scaling
        p = torch.exp(sink - lse[0] * unit) * lse[1]
    else:
        p = torch.exp2(sink * LOG2E - lse[0])
    return dq, dk, dv, dqpe, dkpe, -(p * delta[1]).sum((0, 2))

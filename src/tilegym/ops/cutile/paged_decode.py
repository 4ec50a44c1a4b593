"""``fmha_paged_decode`` in cuTile: the new keys and values are written into their pages, then attention is a
launch of :mod:`tilegym.ops.cutile.decode_varlen`."""

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.attention_common import LONGEST_WINDOW
from tilegym.ops.cutile.attention_common import check_supported
from tilegym.ops.cutile.decode_varlen import launch_decode
from tilegym.ops.cutile.decode_varlen import whole_tile
from tilegym.ops.cutile.packed import keys_of_sequence
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import next_power_of_2
from tilegym.ops.pytorch.checks import wants_gradient
from tilegym.ops.pytorch.paged_decode import check_pages

SHORTEST_TILE = 16  # of keys


@ct.kernel
def write_kernel(
    k,  # [N, Hkv, D]
    v,  # [N, Hkv, Dv]
    k_pages,  # [P, S, Hkv, D]
    v_pages,  # [P, S, Hkv, Dv]
    pages,  # [N, M]
    starts,  # [N + 1]
    TILE_H: Int,
    TILE_D: Int,
    TILE_DV: Int,
):
    n = ct.bid(0)
    _, keys = keys_of_sequence(starts, n, 0)
    if keys > 0:
        page = ct.load(pages, (n, (keys - 1) // k_pages.shape[1]), (1, 1)).astype(ct.int32).item()
        row = (keys - 1) % k_pages.shape[1]
        heads, columns = ct.arange(TILE_H, dtype=ct.int32)[:, None], ct.arange(TILE_D, dtype=ct.int32)[None, :]
        ct.scatter(k_pages, (page, row, heads, columns), ct.gather(k, (n, heads, columns)))
        columns = ct.arange(TILE_DV, dtype=ct.int32)[None, :]
        ct.scatter(v_pages, (page, row, heads, columns), ct.gather(v, (n, heads, columns)))


def _fake(q, k, v, *_):
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@compilable(_fake, mutates=("k_pages", "v_pages"))
def paged_decode_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scaling: float,
    window_size: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    sequences, kv_heads, head_dim = k.shape
    tiles = tuple(map(next_power_of_2, (kv_heads, head_dim, v.shape[2])))
    launch(q, (sequences,), write_kernel, (k, v, k_pages, v_pages, block_table, cu_seqlens_k, *tiles))
    longest = block_table.shape[1] * k_pages.shape[1]
    k_pages, v_pages = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
    options = (longest, scaling, window_size, soft_cap, sinks)
    return launch_decode(q, k_pages, v_pages, 0, cu_seqlens_k, block_table, *options)


@register_impl("fmha_paged_decode", "cutile")
def fmha_paged_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    window_size: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    check_pages(q, k, v, k_pages, v_pages, block_table, cu_seqlens_k, window_size, soft_cap, sinks)
    if scaling is None:
        scaling = q.shape[2] ** -0.5
    if wants_gradient(q, k, v, k_pages, v_pages, sinks):
        raise UnsupportedError("it has no backward kernel")
    check_supported(q[:, :, None], k_pages, v_pages, scaling, sinks, None, True)
    if k_pages.stride(3) != 1 or v_pages.stride(3) != 1:
        raise UnsupportedError("it takes pages whose last dimension has no gaps")  # no copy of them could be written
    if whole_tile(k_pages.shape[1]) < SHORTEST_TILE:
        raise UnsupportedError("it takes pages of a multiple of 16 keys")
    if window_size is not None:
        window_size = min(window_size, LONGEST_WINDOW)
    options = (scaling, window_size, soft_cap, sinks)
    return paged_decode_forward(q, k, v, k_pages, v_pages, block_table, cu_seqlens_k, *options)

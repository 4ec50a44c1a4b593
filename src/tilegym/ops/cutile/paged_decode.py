"""``fmha_paged_decode`` in cuTile: a launch of :mod:`tilegym.ops.cutile.decode_varlen`, which writes the new keys and
values into their pages as well."""

import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.attention_common import LONGEST_WINDOW
from tilegym.ops.cutile.attention_common import check_supported
from tilegym.ops.cutile.decode_varlen import launch_decode
from tilegym.ops.pytorch.checks import wants_gradient
from tilegym.ops.pytorch.paged_decode import check_pages


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
    longest = block_table.shape[1] * k_pages.shape[1]
    k_pages, v_pages = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
    options = (longest, scaling, window_size, soft_cap, sinks)
    return launch_decode(q, k_pages, v_pages, 0, cu_seqlens_k, block_table, (k, v), *options)


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
    if window_size is not None:
        window_size = min(window_size, LONGEST_WINDOW)
    options = (scaling, window_size, soft_cap, sinks)
    return paged_decode_forward(q, k, v, k_pages, v_pages, block_table, cu_seqlens_k, *options)

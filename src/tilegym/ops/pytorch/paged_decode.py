"""``fmha_paged_decode`` in plain PyTorch: attention over a copy of each sequence's pages."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.attention import check_arguments
from tilegym.ops.pytorch.attention import fmha


@register_impl("fmha_paged_decode", "pytorch")
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
    if q.shape[0] == 0:
        return q.new_empty(0, q.shape[1], v.shape[2])
    lengths, size = cu_seqlens_k.long().diff(), k_pages.shape[1]
    last = lengths - 1
    # What stands behind a sequence's last page may be anything.
    there = torch.arange(block_table.shape[1], device=q.device) * size < lengths[:, None]
    table = block_table.long().masked_fill(~there, 0)
    pages = table.gather(1, (last.clamp(min=0) // size)[:, None])[:, 0]
    # A sequence without keys writes what the first one with keys does. Where there is none, the first page's first key
    # becomes what it is.
    exists = lengths > 0
    source = torch.where(exists, torch.arange(lengths.shape[0], device=q.device), exists.int().argmax())
    at = (pages[source], last.clamp(min=0)[source] % size)
    for new, cache in ((k, k_pages), (v, v_pages)):
        cache[at] = torch.where(exists.any(), new[source], cache[at])
    keys, values = (cache[table].flatten(1, 2).transpose(1, 2) for cache in (k_pages, v_pages))
    options = (scaling, True, window_size, soft_cap, sinks, None, lengths)
    return fmha(q[:, :, None], keys, values, *options)[:, :, 0]


def check_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    window_size: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> None:
    """Raises ValueError or TypeError unless the arguments fit each other."""
    op = "fmha_paged_decode"
    if not q.dim() == k.dim() == v.dim() == 3 or not k_pages.dim() == v_pages.dim() == 4:
        dims = ", ".join(str(x.dim()) for x in (q, k, v, k_pages, v_pages))
        raise ValueError(f"{op}: q, k and v must have three dimensions, k_pages and v_pages four, they have {dims}")
    check_arguments(op, *(x[:, :, None] for x in (q, k, v)), window_size, soft_cap, sinks, None, None)
    for name, new, pages in (("k", k, k_pages), ("v", v, v_pages)):
        if pages.shape[2:] != new.shape[1:] or pages.shape[1] != k_pages.shape[1] or pages.shape[1] == 0:
            raise ValueError(
                f"{op}: {name}_pages must be [P, S, {new.shape[1]}, {new.shape[2]}], with S keys as k_pages has, "
                f"it is {tuple(pages.shape)}"
            )
        if pages.dtype != new.dtype:
            raise TypeError(f"{op}: {name} is {new.dtype}, {name}_pages is {pages.dtype}; they must be the same")
    sequences = q.shape[0]
    shape = tuple(block_table.shape)
    if len(shape) != 2 or shape[0] != sequences or (shape[1] == 0 and sequences > 0):
        raise ValueError(f"{op}: block_table must be [{sequences}, M] with M of 1 or more, it is {shape}")
    if cu_seqlens_k.shape != (sequences + 1,):
        raise ValueError(f"{op}: cu_seqlens_k must be [{sequences + 1}], it is {tuple(cu_seqlens_k.shape)}")
    for name, numbers in (("block_table", block_table), ("cu_seqlens_k", cu_seqlens_k)):
        if numbers.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{op}: {name} must be int32 or int64, it is {numbers.dtype}")

"""``splitk_reduce`` in cuTile: merges what the blocks of a split attention found."""

import math

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.attention_common import tile_of
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.pytorch.splitk_reduce import check_arguments

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TILE_S = 16  # splits whose outputs are in registers at a time


@ct.kernel
def splitk_reduce_kernel(
    partial,  # [B, Hq, splits, Dv], or more columns if PACKED
    lse,  # [B, Hq, splits, 1]; 0 if PACKED: it is column Dv of partial
    sinks,  # [Hq] if SINKS, else 0
    out,  # [B, Hq, 1, Dv]
    TILE_S: Int,
    TILE_D: Int,
    SPLITS: Int,  # at least the number of splits
    DV: Int,
    SINKS: Bool,
    PACKED: Bool,
):
    # One block a row of the output.
    nothing = ct.PaddingMode.NEG_INF
    batch, head = ct.bid(0) // partial.shape[1], ct.bid(0) % partial.shape[1]
    if PACKED:
        lse = partial.slice(3, DV, DV + 1)
        partial = partial.slice(3, 0, DV)
    logits = ct.load(lse, (batch, head, 0, 0), (1, 1, SPLITS, 1), padding_mode=nothing).reshape((1, SPLITS))
    top = ct.max(logits, axis=1, keepdims=True)
    if SINKS:
        sink = ct.load(sinks, (head,), (1,)).astype(ct.float32).reshape((1, 1))
        top = ct.maximum(top, sink)
    top = ct.where(top == -math.inf, 0.0, top)
    total = ct.sum(ct.exp(logits - top), axis=1, keepdims=True)
    if SINKS:
        total = total + ct.exp(sink - top)
    acc = ct.zeros((1, TILE_D), dtype=ct.float32)
    for s in range(ct.cdiv(partial.shape[2], TILE_S)):
        weight = ct.load(lse, (batch, head, s, 0), (1, 1, TILE_S, 1), padding_mode=nothing).reshape((TILE_S, 1))
        weight = ct.exp(weight - top)
        tile = ct.load(partial, (batch, head, s, 0), (1, 1, TILE_S, TILE_D), padding_mode=ct.PaddingMode.ZERO)
        # A split that saw no key weighs nothing, whatever its output holds.
        weighted = ct.where(weight == 0.0, 0.0, weight * tile.reshape((TILE_S, TILE_D)))
        acc = acc + ct.sum(weighted, axis=0, keepdims=True)
    acc = acc / ct.where(total == 0.0, 1.0, total)
    ct.store(out, (batch, head, 0, 0), acc.reshape((1, 1, 1, TILE_D)).astype(out.dtype))


def launch_splitk_reduce(
    partial: torch.Tensor, lse: torch.Tensor | None, sinks: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Writes the merged [B, Hq, 1, Dv] into ``out``.

    lse is [B, Hq, splits, 1]; if it is None, column Dv of ``partial`` is it.
    """
    batch, heads, splits, _ = partial.shape
    head_dim = out.shape[3]
    arrays = (partial, 0 if lse is None else lse, 0 if sinks is None else sinks, out)
    constants = (TILE_S, tile_of(head_dim), tile_of(splits), head_dim, sinks is not None, lse is None)
    launch(out, (batch * heads,), splitk_reduce_kernel, (*arrays, *constants))


def _fake(partial, lse, dtype, sinks):
    batch, heads, _, head_dim = partial.shape
    return partial.new_empty(batch, heads, 1, head_dim, dtype=dtype)


@compilable(_fake)
def splitk_reduce_forward(
    partial: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype, sinks: torch.Tensor | None
) -> torch.Tensor:
    out = _fake(partial, lse, dtype, sinks)
    if partial.shape[2] == 0:
        return out.zero_()
    launch_splitk_reduce(partial, lse.unsqueeze(3), sinks, out)
    return out


@register_impl("splitk_reduce", "cutile")
def splitk_reduce(
    partial: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    check_arguments(partial, lse, sinks)
    if dtype not in DTYPES or partial.dtype != torch.float32:
        raise UnsupportedError("it merges fp32 into fp32, fp16 or bf16")
    if torch.is_grad_enabled() and (
        partial.requires_grad or lse.requires_grad or (sinks is not None and sinks.requires_grad)
    ):
        raise UnsupportedError("it has no backward kernel")
    return splitk_reduce_forward(partial, lse, dtype, sinks)

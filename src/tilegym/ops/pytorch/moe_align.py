"""``moe_align_block_size`` in plain PyTorch, without a synchronisation."""

import torch

from tilegym.backend import register_impl


def check_align(topk_ids: torch.Tensor, block_size: int, num_experts: int) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    if topk_ids.dim() != 2 or num_experts < 1:
        raise ValueError(f"moe_align_block_size: topk_ids must be [T, k] and num_experts positive, "
                         f"got {tuple(topk_ids.shape)} and {num_experts}")  # fmt: skip
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"moe_align_block_size: block_size must be a power of two, it is {block_size}")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"moe_align_block_size: topk_ids must be int32 or int64, they are {topk_ids.dtype}")


def max_blocks(pairs: int, block_size: int, num_experts: int) -> int:
    """How many blocks there are at most: no expert has more than one block that is not full, none has an empty one."""
    return min(pairs, pairs // block_size + num_experts)


@register_impl("moe_align_block_size", "pytorch")
def moe_align_block_size(
    topk_ids: torch.Tensor, block_size: int, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_align(topk_ids, block_size, num_experts)
    ids, pairs = topk_ids.reshape(-1), topk_ids.numel()
    device, blocks = ids.device, max_blocks(pairs, block_size, num_experts)
    # Ids that are left out become those of one more expert, behind the others.
    ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids).long()
    ranked, order = torch.sort(ids, stable=True)
    counts = ids.new_zeros(num_experts + 1).scatter_add_(0, ids, torch.ones_like(ids))
    padded = (counts[:-1] + block_size - 1) // block_size * block_size
    ends = padded.cumsum(0)
    # One more row takes what is left out.
    begins = torch.cat([ends - padded, ends.new_full((1,), blocks * block_size)])
    rows = begins[ranked] + torch.arange(pairs, device=device) - (counts.cumsum(0) - counts)[ranked]
    rows = rows.clamp(max=blocks * block_size)
    sorted_ids = torch.full((blocks * block_size + 1,), pairs, dtype=torch.int32, device=device)
    sorted_ids = sorted_ids.scatter(0, rows, order.int())[:-1]
    experts = torch.searchsorted(ends, torch.arange(blocks, device=device) * block_size, right=True).int()
    experts = torch.where(experts < num_experts, experts, -1)
    return sorted_ids, experts, ends[-1:].int()

"""Dropout with a counter-based mask in PyTorch.

The mask comes from Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), keyed with the
seed. Element i, counted in row-major order, belongs to group i // 4096; within it, lane i % 1024 of quarter
(i % 4096) // 1024 takes word number quarter of the block whose counter is 1024 * group + lane. So one block of four
words serves four elements that lie 1024 apart, and neighbours come from neighbouring counters.
"""

import torch

from tilegym.backend import register_impl

LANES = 1024
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


def check_dropout(x: torch.Tensor, p: float) -> None:
    """Raises ValueError or TypeError for an argument that no backend accepts."""
    if not x.is_floating_point():
        raise TypeError(f"dropout: x is {x.dtype}; it must be floating-point")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p is {p}; it must be between 0 and 1")


def threshold_and_scale(p: float) -> tuple[int, float]:
    """An element is kept if its word is at least the threshold, and multiplied by the scale then, else by 0."""
    return min(round(p * 2**32), MASK), 0.0 if p == 1.0 else 1.0 / (1.0 - p)


def philox(counter: torch.Tensor, seed: int) -> tuple[torch.Tensor, ...]:
    """The four 32-bit words of each counter below 2^32, in int64."""
    key = [seed & MASK, (seed >> 32) & MASK]
    x = [counter, *(torch.zeros_like(counter) for _ in range(3))]
    for _ in range(ROUNDS):
        # Products of 64 bits wrap around in int64; masking gives their halves all the same.
        first, second = x[0] * MULTIPLIERS[0], x[2] * MULTIPLIERS[1]
        x = [
            ((second >> 32) & MASK) ^ x[1] ^ key[0],
            second & MASK,
            ((first >> 32) & MASK) ^ x[3] ^ key[1],
            first & MASK,
        ]
        key = [(k + step) & MASK for k, step in zip(key, KEY_STEPS, strict=True)]
    return tuple(x)


def dropout_mask(shape: torch.Size, seed: int, threshold: int, device: torch.device) -> torch.Tensor:
    """True where an element is kept."""
    groups = -(-shape.numel() // (4 * LANES))
    counter = torch.arange(groups * LANES, device=device).view(groups, LANES)
    words = torch.stack(philox(counter, seed), dim=1).view(-1)
    return (words[: shape.numel()] >= threshold).view(shape)


@register_impl("dropout", "pytorch")
def dropout(x: torch.Tensor, seed: int, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    check_dropout(x, p)
    if not training or p == 0.0:
        return x
    threshold, scale = threshold_and_scale(p)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = (x.to(compute) * (dropout_mask(x.shape, seed, threshold, x.device) * scale)).to(x.dtype)
    return x.copy_(y) if inplace else y

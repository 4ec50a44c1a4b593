"""Dropout: ``y = x * m / (1 - p)``, with a mask m that seed and index determine, so that nothing is saved for backward.

``pytorch/dropout.py`` defines the mask. The gradient is the same function of dy.
"""

import cuda.tile as ct
import torch

from tilegym.backend import register_impl
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.library import compilable
from tilegym.backend.derivatives import Function
from tilegym.backend.derivatives import once_differentiable
from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.tiling import FLOATS
from tilegym.ops.cutile.tiling import Float
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.pytorch.dropout import KEY_STEPS
from tilegym.ops.pytorch.dropout import LANES
from tilegym.ops.pytorch.dropout import MULTIPLIERS
from tilegym.ops.pytorch.dropout import ROUNDS
from tilegym.ops.pytorch.dropout import check_dropout
from tilegym.ops.pytorch.dropout import threshold_and_scale

M0, M1 = MULTIPLIERS
STEP0, STEP1 = KEY_STEPS


def _word(value):
    """The low 32 bits of an integer scalar as uint32, [1]."""
    return ct.full((1,), value, ct.int64).astype(ct.uint32)


def _product(x, MULTIPLIER: Int):
    """The high and the low half of x * MULTIPLIER."""
    product = x.astype(ct.uint64) * ct.full((1,), MULTIPLIER, ct.uint64)
    return (product >> ct.full((1,), 32, ct.uint64)).astype(ct.uint32), product.astype(ct.uint32)


def _philox(counter, key0, key1):
    """The four words of each counter."""
    zero = ct.zeros(counter.shape, ct.uint32)
    x0, x1, x2, x3 = counter, zero, zero, zero
    for _ in ct.static_iter(range(ROUNDS)):
        high0, low0 = _product(x0, M0)
        high1, low1 = _product(x2, M1)
        x0, x1, x2, x3 = high1 ^ x1 ^ key0, low1, high0 ^ x3 ^ key1, low0
        key0 = key0 + ct.full((1,), STEP0, ct.uint32)
        key1 = key1 + ct.full((1,), STEP1, ct.uint32)
    return x0, x1, x2, x3


@ct.kernel
def dropout_kernel(x, y0, y1, y2, y3, first_group, key0, key1, THRESHOLD: Int, SCALE: Float):
    """x, y: [n]. Each block takes one group: 4 quarters of LANES elements, and LANES counters.

    x is read before the counters' words are computed. All y are one array: stores into one array would be ordered, by
    a barrier each.
    """
    lanes = ct.arange(LANES, dtype=ct.int32)
    start = ct.bid(0) * (4 * LANES) + lanes
    values = ()
    for quarter in ct.static_iter(range(4)):
        values = (*values, ct.gather(x, start + quarter * LANES))
    counter = ((first_group + ct.bid(0)) * LANES + lanes).astype(ct.uint32)
    words = _philox(counter, _word(key0), _word(key1))
    threshold = ct.full((1,), THRESHOLD, ct.uint32)
    outs = (y0, y1, y2, y3)
    for quarter in ct.static_iter(range(4)):
        factor = ct.where(words[quarter] >= threshold, ct.full((1,), SCALE, ct.float32), 0.0)
        out = (values[quarter].astype(ct.float32) * factor).astype(y0.dtype)
        ct.scatter(outs[quarter], start + quarter * LANES, out)


# Elements of one launch: their indices have to stay within 31 bits.
PART = 2**30


def _like(x, *_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _signed(word: int) -> int:
    """32 bits as the kernel's int32 argument."""
    return word - 2**32 if word >= 2**31 else word


@compilable(fake=_like)
def dropout_forward(x: torch.Tensor, seed: int, p: float) -> torch.Tensor:
    y = _like(x)
    flat, out = x.reshape(-1), y.view(-1)
    key = _signed(seed & 0xFFFFFFFF), _signed((seed >> 32) & 0xFFFFFFFF)
    # Left to itself the compiler takes registers for 5 blocks, too few to hide both memory and computing: 8192x4096
    # took an H200 48.6 us then, 37.9 with 6 (a copy 37.3), 40.7 with 8.
    kernel = hinted(dropout_kernel, num_worker_warps=4, occupancy=6)
    for start in range(0, flat.numel(), PART):
        part, part_out = flat[start : start + PART], out[start : start + PART]
        grid = (ct.cdiv(part.numel(), 4 * LANES),)
        launch(x, grid, kernel, (part, *[part_out] * 4, start // (4 * LANES), *key, *threshold_and_scale(p)))
    return y


class Dropout(Function):
    @staticmethod
    def forward(ctx, x, seed, p):
        ctx.options = seed, p
        return dropout_forward(x, seed, p)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return dropout_forward(dy, *ctx.options), None, None


@register_impl("dropout", "cutile")
def dropout(x: torch.Tensor, seed: int, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    check_dropout(x, p)
    if not training or p == 0.0:
        return x
    if x.dtype not in FLOATS:
        raise UnsupportedError("x is not fp32, fp16 or bf16")
    if seed >= 2**63:  # the operator's integers are signed
        seed -= 2**64
    if torch.is_grad_enabled() and x.requires_grad:
        y = Dropout.apply(x, seed, p)
    else:
        y = dropout_forward(x, seed, p)
    return x.copy_(y) if inplace else y

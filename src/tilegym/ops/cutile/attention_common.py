"""What the attention kernels share: the online softmax of a tile of scores, and what the launches prepare and check."""

import functools
import math

import cuda.tile as ct
import torch

from tilegym.errors import UnsupportedError
from tilegym.ops.cutile.tiling import INT32_MAX
from tilegym.ops.cutile.tiling import Bool
from tilegym.ops.cutile.tiling import Int
from tilegym.ops.cutile.tiling import next_power_of_2

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
LONGEST_WINDOW = 2**30  # in keys: a kernel's numbers have 32 bits, and no sequence is longer
NO_MASK, BOOLEAN_MASK, ADDITIVE_MASK = 0, 1, 2
KEY_MASK = 3  # boolean, and the same for all queries: padding
LOG2E = math.log2(math.e)


def load_rows(x, batch, head, i, ROWS: Int, COLUMNS: Int, TF32: Bool, part: int = 0):
    """Tile ``i`` of the tokens of one head of x [B, H, S, D], as the operand of a product, [ROWS, COLUMNS].

    ``part``: which columns, in units of COLUMNS.
    """
    tile = ct.load(x, (batch, head, i, part), (1, 1, ROWS, COLUMNS), padding_mode=ct.PaddingMode.ZERO)
    tile = tile.reshape((ROWS, COLUMNS))
    return tile.astype(ct.tfloat32) if TF32 else tile


def load_columns(x, batch, head, j, ROWS: Int, COLUMNS: Int, TF32: Bool, part: int = 0):
    """The transpose of :func:`load_rows`."""
    zero = ct.PaddingMode.ZERO
    tile = ct.load(x, (batch, head, part, j), (1, 1, COLUMNS, ROWS), order=(0, 1, 3, 2), padding_mode=zero)
    tile = tile.reshape((COLUMNS, ROWS))
    return tile.astype(ct.tfloat32) if TF32 else tile


def cap_scores(s, soft_cap, EXACT: Bool = False):
    """``soft_cap * tanh(s / soft_cap)``; unless EXACT by tanh(x) = 1 - 2 / (1 + exp(2x)), to ulps of ``soft_cap``."""
    if EXACT:
        return soft_cap * ct.tanh(s / soft_cap)
    power = ct.exp2(s * (2 * LOG2E / soft_cap), flush_to_zero=True)
    approximate = ct.RoundingMode.APPROX  # an exact one is a dozen instructions for each score
    return soft_cap - ct.truediv(2 * soft_cap, 1 + power, rounding_mode=approximate, flush_to_zero=True)


def softmax_step(s, row_max, row_sum, unit, AXIS: Int, EXACT: Bool):
    """Takes a tile of scores, in multiples of ``unit`` and with the keys along ``AXIS``, into the online softmax.

    Returns the probabilities (relative to the new maximum), the updated row_max and row_sum, and what the weighted sum
    of values so far is to be multiplied by. With a row_sum as long as ``s`` along ``AXIS`` each key of a tile has a sum
    of its own: see :func:`sums_of_keys`.
    """
    new_max = ct.maximum(row_max, ct.max(s, axis=AXIS, keepdims=True))
    # A row that has seen no key yet has a maximum of -inf, and -inf - -inf is not a number.
    base = ct.where(new_max == -math.inf, 0.0, new_max)
    if EXACT:
        p = ct.exp((s - base) * unit)
        shrink = ct.exp((row_max - base) * unit)
    else:
        # One fused operation and a power of two for each score.
        unit = unit * LOG2E
        p = ct.exp2(s * unit - base * unit, flush_to_zero=True)
        shrink = ct.exp2((row_max - base) * unit, flush_to_zero=True)
    total = p if row_sum.shape[AXIS] == s.shape[AXIS] else ct.sum(p, axis=AXIS, keepdims=True)
    return p, new_max, row_sum * shrink + total, shrink


def update_softmax(s, row_max, row_sum, acc, unit, AXIS: Int, EXACT: Bool):
    """:func:`softmax_step`, of the weighted sum ``acc`` too: returns the probabilities, row_max, row_sum and acc."""
    p, row_max, row_sum, shrink = softmax_step(s, row_max, row_sum, unit, AXIS, EXACT)
    return p, row_max, row_sum, acc * shrink


def sums_of_keys(col_sum, TILE_N: Int):
    """``col_sum``, [1, M], as sums of TILE_N keys each, [TILE_N, M], which are added up behind the last tile: keys are
    shared out among warps, which would wait for each other for the sums of every tile.

    On an H200 pages of 16 keys take 3 % less time so, latents of 16 and of 128 heads 2 to 4 %; ``fmha_decode`` gains
    nothing, and is slower with few keys.
    """
    return ct.where(ct.arange(TILE_N, dtype=ct.int32)[:, None] == 0, col_sum, 0.0)


def needs_exact(dtype: torch.dtype, mask_kind: int) -> bool:
    """Whether the scores must be subtracted before they are multiplied: for fp32's sake, or that of a mask.

    An additive mask may hold the lowest number there is, whose multiple would be -inf.
    """
    return mask_kind == ADDITIVE_MASK or dtype == torch.float32


@functools.cache
def parts_of(head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """The widths of two tiles, or of one and 0, that hold ``head_dim`` in as few columns as powers of two allow.

    80 are 64 and 16, where a tile of 128 would compute much for nothing. The second divides the first. In fp32 there is
    one: the backward pass rounds scores as one product does, and its gradients depend on rounding them alike.
    """
    tile = tile_of(head_dim)
    if tile <= 64 or dtype == torch.float32:
        return tile, 0
    rest = tile_of(head_dim - tile // 2)
    return (tile // 2, rest) if rest < tile // 2 else (tile, 0)


@functools.cache
def tile_of(head_dim: int) -> int:
    """The width of a tile that holds ``head_dim``: a power of two, and 16 or more for ``ct.mma``."""
    return max(16, next_power_of_2(head_dim))


def with_unit_stride(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy if its last dimension is strided, another is expanded, or a stride takes more than 32 bits."""
    if x.is_contiguous():
        return x
    strides = x.stride()
    return x if strides[-1] == 1 and 0 not in strides and max(strides) <= INT32_MAX else x.contiguous()


def prepare_mask(mask: torch.Tensor | None, keys: int) -> tuple[int, torch.Tensor | int]:
    """The kind of a mask, and the mask with four dimensions, those that are broadcast having size one.

    For no mask it is 0: something to pass. Booleans become bytes, see :func:`truth`.
    """
    if mask is None:
        return NO_MASK, 0
    if mask.dim() < 4:
        mask = mask[(None,) * (4 - mask.dim())]
    if mask.shape[3] != keys:
        mask = mask.expand(*mask.shape[:3], keys)
    if max(mask.stride()) > INT32_MAX:
        mask = mask.contiguous()
    return (BOOLEAN_MASK, mask.view(torch.uint8)) if mask.dtype == torch.bool else (ADDITIVE_MASK, mask)


def truth(tile):
    """A tile of a mask, as booleans if it came as bytes.

    Kernels read no arrays of booleans: where a loop reads them ahead, tileiras 13.4 counts a bit for each on sm_90, and
    copies one byte in eight.
    """
    return tile != 0 if tile.dtype == ct.uint8 else tile


def check_supported(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    differentiable: bool = False,
) -> None:
    """Raises UnsupportedError for what the attention kernels do not serve, gradients too unless ``differentiable``."""
    if q.dtype not in DTYPES:
        raise UnsupportedError(f"it does not take {q.dtype}")
    if q.shape[3] > MAX_HEAD_DIM or v.shape[3] > MAX_HEAD_DIM:
        raise UnsupportedError(f"it takes head dimensions up to {MAX_HEAD_DIM}")
    if q.numel() > INT32_MAX or k.numel() > INT32_MAX or v.numel() > INT32_MAX:
        for x in (q, k, v):
            if x.numel() > INT32_MAX and max(x.stride()) > INT32_MAX:
                raise UnsupportedError("it takes strides below 2^31")
    if not scaling > 0:
        raise UnsupportedError("it takes positive scalings only")  # the largest score would become the smallest
    if (
        not differentiable
        and torch.is_grad_enabled()
        and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (sinks is not None and sinks.requires_grad)
            or (attention_mask is not None and attention_mask.requires_grad)
        )
    ):
        raise UnsupportedError("it has no backward kernel")

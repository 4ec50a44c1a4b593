"""Tutorial 5: attention that never holds the matrix of scores, by means of an online softmax.

Run it with ``python examples/tutorials/05_flash_attention.py``, with or without a GPU.
"""

import math

import cuda.tile as ct
import lesson
import torch
from torch.nn import functional as F

from tilegym.backend.cutile.launch import launch

Int = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO
LOG2E = math.log2(math.e)


# A block takes TILE_M queries of one head and walks along that head's keys, TILE_N at a time. Grid: query tiles x
# heads of all batches. Dao et al. 2022, arXiv:2205.14135.
@ct.kernel
def attention_kernel(
    q,  # [B, Hq, Sq, D]
    k,  # [B, Hkv, Skv, D]
    v,  # [B, Hkv, Skv, D]
    out,  # [B, Hq, Sq, D]
    scaling,
    TILE_M: Int,
    TILE_N: Int,
    TILE_D: Int,  # D, rounded up to a power of two
    CAUSAL: ct.Constant[bool],  # compiled in: the kernel without a mask has no trace of one
):
    i, batch, head = ct.bid(0), ct.bid(1) // q.shape[1], ct.bid(1) % q.shape[1]
    kv_head = head // (q.shape[1] // k.shape[1])  # grouped queries: several heads of q share one of k and v
    keys = k.shape[2]
    # Query number r sees the keys up to this one. (With a cache there are more keys than queries.)
    rows = keys - q.shape[2] + i * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]

    q_tile = ct.load(q, (batch, head, i, 0), (1, 1, TILE_M, TILE_D), padding_mode=ZERO).reshape((TILE_M, TILE_D))
    # exp2 is what the hardware has; exp(x) is exp2(x * log2(e)), and that factor joins the scaling for free.
    scaling = scaling * LOG2E

    top = ct.full((TILE_M, 1), -math.inf, ct.float32)  # the largest score of each query so far
    total = ct.zeros((TILE_M, 1), ct.float32)  # the sum of exp2(score - top)
    acc = ct.zeros((TILE_M, TILE_D), ct.float32)  # the sum of exp2(score - top) * value

    last = ct.cdiv(keys, TILE_N)
    if CAUSAL:
        # No tile beyond the last query's diagonal: half of the work is never done.
        last = ct.cdiv(min(keys, keys - q.shape[2] + (i + 1) * TILE_M), TILE_N)
    for j in range(last):
        # K transposed as it is loaded: order says which dimension of the array each one of the tile is.
        k_tile = ct.load(k, (batch, kv_head, 0, j), (1, 1, TILE_D, TILE_N), order=(0, 1, 3, 2), padding_mode=ZERO)
        scores = ct.mma(q_tile, k_tile.reshape((TILE_D, TILE_N)), ct.zeros((TILE_M, TILE_N), ct.float32)) * scaling
        columns = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
        visible = columns < keys  # padded keys have score 0, which is not nothing: exp2(0) = 1
        if CAUSAL:
            visible = visible & (columns <= rows)
        scores = ct.where(visible, scores, -math.inf)

        # The online softmax: a larger maximum makes all that was summed so far smaller by one factor.
        new_top = ct.maximum(top, ct.max(scores, axis=1, keepdims=True))
        shrink = ct.exp2(top - new_top)
        weights = ct.exp2(scores - new_top)
        total = total * shrink + ct.sum(weights, axis=1, keepdims=True)
        v_tile = ct.load(v, (batch, kv_head, j, 0), (1, 1, TILE_N, TILE_D), padding_mode=ZERO)
        # The weights become fp16 or bf16 for the tensor cores; they are at most 1.
        acc = ct.mma(weights.astype(v.dtype), v_tile.reshape((TILE_N, TILE_D)), acc * shrink)
        top = new_top

    ct.store(out, (batch, head, i, 0), (acc / total).reshape((1, 1, TILE_M, TILE_D)).astype(out.dtype))


# 64 x 64 fits the registers of 4 warps on every GPU from Ampere on.
TILES = (64, 64)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """softmax(q k^T / sqrt(D)) v for at least as many keys as queries."""
    batch, heads, queries, d = q.shape
    assert k.shape[2] >= queries, "a query that sees no key would be divided by zero"
    out = torch.empty_like(q)
    grid = (ct.cdiv(queries, TILES[0]), batch * heads)
    tile_d = 1 << (d - 1).bit_length()
    launch(q, grid, attention_kernel, (q, k, v, out, d**-0.5, *TILES, tile_d, causal))
    return out


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """What torch's own fused kernels compute; with the causal mask aligned to the last query, as above."""
    mask = None
    if causal and q.shape[2] != k.shape[2]:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None, enable_gqa=True)


def online_softmax_by_hand() -> None:
    """One query, six scores, two at a time."""
    scores = torch.tensor([1.0, 2.0, 5.0, 3.0, 0.0, 6.0], dtype=torch.float64)
    values = torch.tensor([10.0, 20.0, 30.0, 40.0, 50.0, 60.0], dtype=torch.float64)
    top, total, acc = -math.inf, 0.0, 0.0
    print("    scores       maximum  shrink  sum of weights  weighted values")
    for tile, value in zip(scores.split(2), values.split(2), strict=True):
        new_top = max(top, tile.max().item())
        shrink, weights = math.exp(top - new_top), torch.exp(tile - new_top)
        total = total * shrink + weights.sum().item()
        acc = acc * shrink + (weights * value).sum().item()
        top = new_top
        print(f"    {tile.tolist()!s:12} {top:7.0f}  {shrink:6.3f}  {total:14.4f}  {acc:15.4f}")
    expected = (torch.softmax(scores, 0) * values).sum().item()
    print(f"    {acc / total:.6f} is the last column over the one before; softmax over all six at once: {expected:.6f}")
    assert math.isclose(acc / total, expected, rel_tol=1e-12)


def main() -> None:
    lesson.title("Flash attention: two products and an online softmax")

    scores, rest = 32 * 8192**2 * 2, 4 * 32 * 8192 * 128 * 2
    lesson.step(
        "The trouble with attention",
        f"""
        The textbook computes all scores q k^T, their softmax, and its product with v: three kernels, with a matrix of
        Sq x Skv for each head between them. For 32 heads of dimension 128 and 8192 tokens in fp16, the scores take
        {scores / 1e9:.1f} GB, and so do the weights, each written and read once, where q, k, v and the output
        together are {rest / 1e9:.2f} GB. A tile of scores would fit on the chip: if only softmax could do with tiles.
        """,
    )

    lesson.step(
        "Softmax a tile at a time",
        """
        A softmax needs the maximum and the sum of the whole row, it seems. But sums relative to the maximum so far
        can be corrected: when the maximum grows from a to b, everything summed so far shrinks by exp(a - b).
        """,
    )
    online_softmax_by_hand()

    lesson.step(
        "The kernel",
        """
        Batch 2, 4 heads of queries that share 2 of keys and values, head dimension 48 (a tile of 64), 150 queries.
        Each block loads its queries once and all keys and values that they see; scores never leave the block.
        """,
    )
    q = lesson.randn(2, 4, 150, 48, dtype=torch.float16)
    cases = (("full", 150, False), ("causal", 150, True), ("causal, with 30 keys in a cache", 180, True))
    for what, keys, causal in cases:
        k, v = (lesson.randn(2, 2, keys, 48, dtype=torch.float16, seed=seed) for seed in (1, 2))
        exact = torch_attention(q.double(), k.double(), v.double(), causal)
        lesson.check(what, attention(q, k, v, causal), torch_attention(q, k, v, causal), exact)

    lesson.step(
        "How fast?",
        """
        Two products of 2 Sq Skv D operations for each head, half of them with a causal mask: thousands of operations
        a byte, so TFLOP/s. The baseline is torch's scaled_dot_product_attention.
        """,
    )
    heads, tokens, d = (32, 4096, 128) if lesson.ON_GPU else (1, 32, 16)
    q, k, v = (lesson.randn(1, heads, tokens, d, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    for causal, what in ((False, "full"), (True, "causal")):
        calls = {
            f"torch_{what}": lambda causal=causal: torch_attention(q, k, v, causal),
            f"ours_{what}": lambda causal=causal: attention(q, k, v, causal),
        }
        lesson.measure("TFLOP/s", 4 * heads * tokens**2 * d * (0.5 if causal else 1), **calls)
    lesson.end(
        """
        src/tilegym/ops/cutile/attention.py goes on from here: no mask where a tile is seen whole, windows, sinks, key
        lengths, and tiles and warps for each GPU, which is what the next tutorial is about: 06_autotuning.py.
        """
    )


if __name__ == "__main__":
    main()

"""Tutorial 4: tensor cores. Matrix products in tiles, the order of blocks, persistent blocks, and warps.

Run it with ``python examples/tutorials/04_matmul.py``, with or without a GPU.
"""

import cuda.tile as ct
import lesson
import torch

from tilegym.backend.cutile.launch import launch

Int = ct.Constant[int]


# A function that a kernel calls is compiled into it; it needs no decorator.
def product_tile(a, b, m, n, TILE_M: Int, TILE_N: Int, TILE_K: Int):
    """Tile (m, n) of A B: a row of A's tiles times a column of B's, summed along K."""
    acc = ct.zeros((TILE_M, TILE_N), ct.float32)  # fp16 operands, fp32 sums: what tensor cores do
    for k in range(ct.cdiv(a.shape[1], TILE_K)):
        # Zeros beyond the edges of A and B add nothing to the sums, so any size works.
        a_tile = ct.load(a, (m, k), (TILE_M, TILE_K), padding_mode=ct.PaddingMode.ZERO)
        b_tile = ct.load(b, (k, n), (TILE_K, TILE_N), padding_mode=ct.PaddingMode.ZERO)
        acc = ct.mma(a_tile, b_tile, acc)  # acc + a_tile @ b_tile; the compiler picks the GPU's instruction
    return acc


@ct.kernel
def matmul_kernel(a, b, c, TILE_M: Int, TILE_N: Int, TILE_K: Int):
    """A block for each tile of C, on a grid of two dimensions."""
    m, n = ct.bid(0), ct.bid(1)
    acc = product_tile(a, b, m, n, TILE_M, TILE_N, TILE_K)
    ct.store(c, (m, n), acc.astype(c.dtype))


# Blocks start roughly in the order of their numbers. Those that run at one time should need the same tiles of A and B,
# for then they find them in the L2 cache. A square patch of C shares most: so go down GROUP rows of tiles before moving
# to the next column.
def grouped(block, m_tiles, n_tiles, GROUP: Int):
    first = block // (GROUP * n_tiles) * GROUP
    rows = min(m_tiles - first, GROUP)  # the last group may be smaller
    within = block % (GROUP * n_tiles)
    return first + within % rows, within // rows


@ct.kernel
def grouped_kernel(a, b, c, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP: Int):
    m, n = grouped(ct.bid(0), ct.cdiv(c.shape[0], TILE_M), ct.cdiv(c.shape[1], TILE_N), GROUP)
    acc = product_tile(a, b, m, n, TILE_M, TILE_N, TILE_K)
    ct.store(c, (m, n), acc.astype(c.dtype))


@ct.kernel
def persistent_kernel(a, b, c, TILE_M: Int, TILE_N: Int, TILE_K: Int, GROUP: Int):
    """Only as many blocks as run at once, each of which takes every num_blocks-th tile."""
    m_tiles, n_tiles = ct.cdiv(c.shape[0], TILE_M), ct.cdiv(c.shape[1], TILE_N)
    for tile in range(ct.bid(0), m_tiles * n_tiles, ct.num_blocks(0)):
        m, n = grouped(tile, m_tiles, n_tiles, GROUP)
        acc = product_tile(a, b, m, n, TILE_M, TILE_N, TILE_K)
        ct.store(c, (m, n), acc.astype(c.dtype))


@ct.kernel
def order_kernel(order, m_tiles, n_tiles, GROUP: Int):
    """Writes into the place of each tile the number of the block that computes it."""
    m, n = grouped(ct.bid(0), m_tiles, n_tiles, GROUP)
    ct.store(order, (m, n), ct.full((1, 1), ct.bid(0), ct.int32))


# Hints are advice to the compiler about one kernel. num_worker_warps: how many warps (of 32 threads) share the work of
# a block, and so the registers that its tiles occupy. 128 x 256 fp32 sums are 256 registers a thread for 4 warps, which
# is more than a thread has: they spill to memory. With 8 warps it is half of that. (occupancy, how many blocks share a
# multiprocessor, and num_ctas, how many multiprocessors share a tile, are the others.) Building a hinted kernel costs
# as much as many launches: do it once.
wide_kernel = grouped_kernel.replace_hints(num_worker_warps=8)

GROUP = 8
TILE = (128, 128, 64)
WIDE = (128, 256, 64)


def matmul(a, b, kernel=matmul_kernel, tile=TILE):
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    m_tiles, n_tiles = ct.cdiv(c.shape[0], tile[0]), ct.cdiv(c.shape[1], tile[1])
    if kernel is matmul_kernel:
        launch(c, (m_tiles, n_tiles), kernel, (a, b, c, *tile))
    else:
        blocks = m_tiles * n_tiles
        if kernel is persistent_kernel:
            at_once = torch.cuda.get_device_properties(c.device).multi_processor_count if lesson.ON_GPU else 3
            blocks = min(blocks, at_once)
        launch(c, (blocks,), kernel, (a, b, c, *tile, GROUP))
    return c


def main() -> None:
    lesson.title("Matrix products: tiles, order, persistence, warps")

    lesson.step(
        "Why tiles",
        """
        An element of C is a row of A times a column of B. To compute one element at a time reads 2 K values for K
        multiplications. A tile of T x T elements reads 2 T K values for T x T x K of them: T times fewer for each.
        For 4096 x 4096 x 4096 in fp16 all blocks together load:
        """,
    )
    for tile in (1, 32, 128, 256):
        loaded = 2 * 4096**3 / tile * 2
        print(f"    tiles of {tile:3} x {tile:3}: {loaded / 1e9:8.2f} GB")

    lesson.step(
        "The kernel",
        f"""
        C[500, 300] = A[500, 100] B[100, 300] in fp16 with tiles of {TILE[0]} x {TILE[1]}, {TILE[2]} along K. None of
        the sizes is a multiple of its tile.
        """,
    )
    a, b = lesson.randn(500, 100, dtype=torch.float16), lesson.randn(100, 300, dtype=torch.float16, seed=1)
    reference, exact = a @ b, a.double() @ b.double()
    lesson.check("one block a tile", matmul(a, b), reference, exact)

    lesson.step(
        "The order of blocks",
        """
        Which block computes which tile of a C of 6 x 5 tiles, with groups of 3 rows. Blocks 0 to 8, a patch of 3 x 3,
        need 3 rows and 3 columns of tiles; row by row they would need 2 and 5.
        """,
    )
    order = torch.zeros(6, 5, dtype=torch.int32, device=a.device)
    launch(order, (30,), order_kernel, (order, 6, 5, 3))
    for row in order.tolist():
        print("    " + " ".join(f"{block:2}" for block in row))
    assert sorted(order.flatten().tolist()) == list(range(30)), "every tile exactly once"
    lesson.check("in groups", matmul(a, b, grouped_kernel), reference, exact)

    lesson.step(
        "Persistent blocks",
        """
        A block has a prologue (the first loads, with nothing to compute yet) and an epilogue (the store, with nothing
        left to compute). Where each block computes many tiles, these overlap with work. It pays for a few tiles a
        block; with many, blocks fall out of step and share less in the cache. Measure.
        """,
    )
    lesson.check("persistent", matmul(a, b, persistent_kernel), reference, exact)

    lesson.step(
        "Warps",
        """
        A larger tile loads less, as above, until it no longer fits into the registers. Twice the warps have twice the
        registers. It is a hint: it changes how the result is computed, not what is.
        """,
    )
    lesson.check("wide tile, 8 warps", matmul(a, b, wide_kernel, WIDE), reference, exact)

    lesson.step(
        "How fast?",
        """
        A product of n x n matrices moves 3 n^2 numbers for 2 n^3 operations, so arithmetic is the limit, and TFLOP/s
        the measure. The baseline is cuBLAS, which torch calls.
        """,
    )
    n = 4096 if lesson.ON_GPU else 128
    a, b = lesson.randn(n, n, dtype=torch.bfloat16), lesson.randn(n, n, dtype=torch.bfloat16, seed=1)
    lesson.measure(
        "TFLOP/s",
        2 * n**3,
        torch=lambda: a @ b,
        one_block_a_tile=lambda: matmul(a, b),
        in_groups=lambda: matmul(a, b, grouped_kernel),
        persistent=lambda: matmul(a, b, persistent_kernel),
        wide_tile_4_warps=lambda: matmul(a, b, grouped_kernel, WIDE),
        wide_tile_8_warps=lambda: matmul(a, b, wide_kernel, WIDE),
    )
    lesson.end(
        """
        Which of these is best depends on sizes and GPU: 06_autotuning.py lets the machine decide. Next:
        05_flash_attention.py, two products with a softmax between them.
        """
    )


if __name__ == "__main__":
    main()

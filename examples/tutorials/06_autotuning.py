"""Tutorial 6: let the machine choose. Configurations, how they are compared, and where the result is kept.

Run it with ``python examples/tutorials/06_autotuning.py``, with or without a GPU.
"""

import logging
import sys
import tempfile
from pathlib import Path

import cuda.tile as ct
import lesson
import torch

from tilegym.backend.cutile.autotuner import Config
from tilegym.backend.cutile.autotuner import SearchSpace
from tilegym.backend.cutile.autotuner import autotune
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.tuning_cache import TuningCache

Int = ct.Constant[int]


# The matrix product of tutorial 4, a block for each tile of C.
@ct.kernel
def matmul_kernel(a, b, c, TILE_M: Int, TILE_N: Int, TILE_K: Int):
    m, n = ct.bid(0), ct.bid(1)
    acc = ct.zeros((TILE_M, TILE_N), ct.float32)
    for k in range(ct.cdiv(a.shape[1], TILE_K)):
        a_tile = ct.load(a, (m, k), (TILE_M, TILE_K), padding_mode=ct.PaddingMode.ZERO)
        b_tile = ct.load(b, (k, n), (TILE_K, TILE_N), padding_mode=ct.PaddingMode.ZERO)
        acc = ct.mma(a_tile, b_tile, acc)
    ct.store(c, (m, n), acc.astype(c.dtype))


# What there is to choose from. num_ctas, occupancy, num_worker_warps and opt_level are hints to the compiler; any other
# name is the kernel's own business. The first one is used where nothing can be measured, so it should be a safe one.
def configs(arch: str) -> list[Config]:
    if arch == "cpu":
        return [Config(TILE_M=32, TILE_N=32, TILE_K=32)]
    return [
        Config(TILE_M=64, TILE_N=64, TILE_K=64, occupancy=2),
        Config(TILE_M=32, TILE_N=64, TILE_K=64, occupancy=4),
        Config(TILE_M=128, TILE_N=128, TILE_K=64),
        Config(TILE_M=128, TILE_N=256, TILE_K=64, num_worker_warps=8),
    ]


# Not worth a try: a tile twice as large as C or more. A predicate gets the arguments that it names.
SPACE = SearchSpace(configs, lambda c, cfg: cfg.TILE_M < 2 * c.shape[0] and cfg.TILE_N < 2 * c.shape[1])


def tuned_matmul(bench, cache: TuningCache):
    """The product with an autotuner over SPACE.

    Your own function needs only ``@autotune(search_space=SPACE)``: ``bench`` is then the GPU that the tensors are on,
    and ``cache`` a file for all of your programs. Here the one may be a stand-in, and the other is a temporary file.
    """

    @autotune(search_space=SPACE, bench=bench, cache=cache)
    def matmul(a, b, autotuner=None):
        c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
        config = autotuner(
            None,  # the stream: the current one
            grid_fn=lambda args, cfg: (ct.cdiv(args.c.shape[0], cfg.TILE_M), ct.cdiv(args.c.shape[1], cfg.TILE_N)),
            kernel=matmul_kernel,
            args_fn=lambda cfg: (a, b, c, cfg.TILE_M, cfg.TILE_N, cfg.TILE_K),
        )
        return c, config

    return matmul


class ByteCounter:
    """Where there is no GPU to measure on: pretends to be one, on which time is the bytes that a launch loads.

    What it says is arithmetic, not speed. But it is asked exactly what a GPU is asked, so it shows how tuning goes.
    """

    gpu, arch = "stand-in that counts bytes", "sm_90"

    def ready(self) -> bool:
        return True

    def compile(self, candidates):
        print(f"    asked to compile {len(candidates)} configurations")
        return [None] * len(candidates)

    def run(self, candidate, args) -> None:
        print(f"    asked to run  {candidate.config}")
        launch(args[0], candidate.grid(args), candidate.kernel, args)

    def time(self, candidate, args, reset, samples):
        a, b, c, tile_m, tile_n, tile_k = args
        blocks_m, blocks_n = candidate.grid(args)
        loaded = blocks_m * blocks_n * (tile_m + tile_n) * a.shape[1] * a.element_size()
        print(f"    asked to time {candidate.config}: {loaded:,} bytes")
        return [float(loaded)] * samples


def main() -> None:
    lesson.title("Autotuning: which tile, and who decides")
    bench = None if lesson.ON_GPU else ByteCounter()
    if lesson.ON_GPU:
        logging.getLogger("tilegym.autotuner").setLevel(logging.INFO)
        logging.basicConfig(stream=sys.stdout, format="    %(message)s")
    with tempfile.TemporaryDirectory() as folder:
        tutorial(bench, TuningCache(Path(folder) / "tuning.sqlite"))


def tutorial(bench, cache: TuningCache) -> None:
    matmul = tuned_matmul(bench, cache)
    n = 4096 if lesson.ON_GPU else 160
    a, b = lesson.randn(n, n, dtype=torch.float16), lesson.randn(n, n, dtype=torch.float16, seed=1)

    lesson.step(
        "The first call measures",
        f"""
        {n} x {n} x {n}. All configurations that suit the arguments are compiled. Each runs once on copies of the
        arguments: one that fails, or gives another result than the first one, is out. The others are timed, a few
        samples each and then more for the best ones, always with a cold L2 cache.
        """,
    )
    if not lesson.ON_GPU:
        lesson.explain("There is no GPU here: a stand-in counts bytes instead of measuring time.")
    c, config = matmul(a, b)
    print(f"chosen: {config}")
    lesson.check("the product", c, a @ b, a.double() @ b.double())

    lesson.step(
        "The second call knows", "Nothing is compiled or measured any more; a launch costs one look-up in a table."
    )
    assert matmul(a, b)[1] == config
    print(f"known:  {config}")

    lesson.step(
        "So does the next process",
        """
        The result is in a file (by default ~/.cache/tilegym/tuning.sqlite; `tilegym tune` lists, clears and exports
        it). A new autotuner, as in a new process, finds it under the kernel's source, the GPU, the dtypes and the
        sizes. Change the kernel, and it is measured again.
        """,
    )
    assert tuned_matmul(bench, cache)(a, b)[1] == config
    for result in cache.all():
        print(f"    {result.key.kernel} on {result.key.gpu}, {result.key.shape}: {result.config}")

    lesson.step(
        "Other sizes",
        """
        Sizes are rounded to powers of two in the key, and where one size more rounds to another power, a result for
        nearly the same sizes serves: one token more never tunes again. 24 rows are another matter; of the four
        configurations, the predicate leaves one:
        """,
    )
    small = a[:24]
    c, config = matmul(small, b)
    print(f"chosen: {config}")
    lesson.check("the product", c, small @ b, small.double() @ b.double())

    lesson.step(
        "Where nothing can be measured",
        """
        In the interpreter, while a CUDA graph is captured, and with TILEGYM_DISABLE_AUTOTUNE=1 the first
        configuration is taken. In the interpreter:
        """,
    )
    c, config = tuned_matmul(None, cache)(a[:64].cpu(), b[:, :64].cpu())
    print(f"taken:  {config}")

    lesson.step("How fast?", "Every configuration by itself, and what torch takes:")
    calls = {"torch": lambda: a @ b, "tuned": lambda: matmul(a, b)}
    for cfg in configs("sm_90"):
        c = torch.empty(n, n, dtype=a.dtype, device=lesson.DEVICE)
        kernel = matmul_kernel.replace_hints(**cfg.hints)
        args = (a, b, c, cfg.TILE_M, cfg.TILE_N, cfg.TILE_K)
        grid = (ct.cdiv(n, cfg.TILE_M), ct.cdiv(n, cfg.TILE_N))
        name = f"{cfg.TILE_M}_x_{cfg.TILE_N}"
        calls[name] = lambda grid=grid, kernel=kernel, args=args: launch(args[0], grid, kernel, args)
    lesson.measure("TFLOP/s", 2 * n**3, **calls)
    lesson.end(
        """
        The product's own search space (src/tilegym/ops/cutile/matmul.py) adds persistent blocks and what suits each
        architecture, measured beforehand. Last: 07_kernel_to_model.py.
        """
    )


if __name__ == "__main__":
    main()

"""Measures at which sizes the kernels multiply many rows by a weight in bf16 as fast as PyTorch does.

    python sweep_linear.py [--write]

cuBLAS fills a GPU whose multiprocessors the kernels' tiles do not divide, so linear layers of many rows go to PyTorch,
but for sizes that are listed as exceptions. Here the layers of some models are timed at several numbers of rows,
without gradients and with those of rows and weight, with backend="cutile" and backend="pytorch", each with as many
weights in turn as do not fit the L2 cache. ``--write`` adds the sizes at which PyTorch does not win beyond the noise to
the exceptions in the file for this GPU, takes out those at which it does, and says there from how many rows on PyTorch
serves all others.
"""

import argparse
import functools
import itertools
import json
from collections.abc import Callable

import torch
from sweep_common import graph_seconds

from tilegym import ops
from tilegym.backend import slower
from tilegym.bench.slower_table import Point
from tilegym.bench.slower_table import exceptions

FROM_ROWS = 91  # from where on sizes of rows are rounded to 128; at 64 rows each side wins as often as the other
ROWS = (128, 300, 512, 1024, 2048, 8192)
# Of each model the columns of a token, of the queries, of the keys, and of the MLP; whether that has a gate.
MODELS = {
    "Llama-3.1-8B": (4096, 4096, 1024, 14336, True),
    "Llama-3.1-70B": (8192, 8192, 1024, 28672, True),
    "Llama-3.2-1B": (2048, 2048, 512, 8192, True),
    "Llama-3.2-3B": (3072, 3072, 1024, 8192, True),
    "Llama-2-7B": (4096, 4096, 4096, 11008, True),  # and OLMo-2-7B
    "Llama-2-13B": (5120, 5120, 5120, 13824, True),
    "Qwen2.5-0.5B": (896, 896, 128, 4864, True),
    "Qwen2.5-7B": (3584, 3584, 512, 18944, True),
    "Qwen3-0.6B": (1024, 2048, 1024, 3072, True),
    "Qwen3-8B": (4096, 4096, 1024, 12288, True),
    "Qwen3-32B": (5120, 8192, 1024, 25600, True),
    "Qwen3-30B-A3B": (2048, 4096, 512, 768, True),
    "Gemma-2-2B": (2304, 2048, 1024, 9216, True),
    "Gemma-3-4B": (2560, 2048, 1024, 10240, True),
    "Phi-4": (5120, 5120, 1280, 17920, True),
    "GLM-4-9B": (4096, 4096, 256, 13696, True),
    "Granite-3.1-8B": (4096, 4096, 1024, 12800, True),
    "gpt-oss-20b": (2880, 4096, 512, 2880, True),
    "DeepSeek-V2-Lite": (2048, 3072, 576, 10944, True),
    "SmolLM-135M": (576, 576, 192, 1536, True),
    "SmolLM2-360M": (960, 960, 320, 2560, True),
    "Falcon-7B": (4544, 4544, 64, 18176, False),
    "Pythia-2.8B": (2560, 2560, 2560, 10240, False),
    "Whisper-large": (1280, 1280, 1280, 5120, False),
    "BERT-base": (768, 768, 768, 3072, False),
    "ViT-L": (1024, 1024, 1024, 4096, False),
    "SigLIP-so400m": (1152, 1152, 1152, 4304, False),
}
TOLERANCE = 5e-3  # relative, of all elements
HELD = 120_000_000  # bytes of weights that are multiplied in turn
LAUNCHES, REPETITIONS = 16, 5
FEW_LAUNCHES, LONG = 4, 3e11  # of products of so many multiplications


def sizes() -> list[tuple[int, int]]:
    """(columns of the result, columns of a row) of the layers, each once; those that read the same, also as one."""
    found: dict[tuple[int, int], None] = {}
    for hidden, queries, keys, inner, gated in MODELS.values():
        read = (queries, keys, queries + 2 * keys, inner, *((2 * inner,) if gated else ()))
        found |= dict.fromkeys([*((columns, hidden) for columns in read), (hidden, queries), (hidden, inner)])
    return list(found)


def product(backend: str, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """x @ weight.T, and where gradients are wanted those of half the sum of its squares."""
    y = ops.linear(x, weight, backend=backend)
    return (y.detach(), *torch.autograd.grad(y, (x, weight), y.detach())) if y.requires_grad else (y,)


def seconds(backend: str, calls: list[tuple[torch.Tensor, torch.Tensor]], launches: int) -> float:
    """The time of one product on the GPU, with its gradients if they are wanted."""
    for call in calls[:2]:
        product(backend, *call)  # tunes, where nothing is known of the sizes
    products: list[Callable] = [functools.partial(product, backend, *calls[i % len(calls)]) for i in range(launches)]
    return graph_seconds(products, REPETITIONS)


def measured(rows: int, n: int, k: int, gradients: bool) -> Point:
    """Raises ArithmeticError if the results differ by more than the rounding explains."""
    launches = LAUNCHES if rows * n * k < LONG else FEW_LAUNCHES
    count = max(1, min(launches, HELD // (2 * n * k)))

    def matrix(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device="cuda").mul_(scale).bfloat16().requires_grad_(gradients)

    calls = [(matrix(rows, k), matrix(n, k, scale=k**-0.5)) for _ in range(count)]
    call = slower.describe(ops.linear.op.signature, calls[0], {}, exactly=True)
    pairs = zip(*(product(name, *calls[0]) for name in ("cutile", "pytorch")), strict=True)
    for ours, theirs in pairs:
        error = ((ours - theirs).float().norm() / theirs.float().norm()).item()
        if not error <= TOLERANCE:
            raise ArithmeticError(f"{call}: off by {error:.1e}")
    return Point("linear", call, rows, *(seconds(name, calls, launches) for name in ("cutile", "pytorch")))


def updated(table: dict, points: list[Point]) -> dict:
    """``table``, as the file holds it, with what was measured."""
    kept = (set(table.get("exceptions", {}).get("linear", ())) - {p.kind for p in points}) | set(exceptions(points))
    measured_of = {slower.kind_of(p.kind.removeprefix("exactly ")) for p in points}
    with_bias = {f"{kind} {kind.rpartition(' ')[2]}" for kind in measured_of}
    kinds = dict.fromkeys(sorted(measured_of | with_bias), FROM_ROWS)
    rows = table.get("from_rows", {})
    rows = dict(sorted({**rows, "linear": dict(sorted({**rows.get("linear", {}), **kinds}.items()))}.items()))
    return table | {"from_rows": rows, "exceptions": {"linear": sorted(kept)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into the file for this GPU")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU is visible, and there is nothing to measure without one")
    torch.manual_seed(0)
    points = []
    with slower.ignored(), torch.cuda.stream(torch.cuda.Stream()):
        for (n, k), gradients in itertools.product(sizes(), (False, True)):
            found = [measured(rows, n, k, gradients) for rows in ROWS]
            points += found
            times = (f"{p.rows}: {p.kernels * 1e6:.1f}/{p.pytorch * 1e6:.1f}" for p in found)
            what = f"{k} to {n}{', with gradients' if gradients else ''}, rows"
            print(f"{what}: us of the kernels/PyTorch", *times, flush=True)
            torch.cuda.empty_cache()
    print("As fast as PyTorch:", *exceptions(points), sep="\n")
    if options.write:
        path = slower.file_of(torch.cuda.get_device_name())
        table = updated(json.loads(path.read_text(encoding="utf-8")), points)
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

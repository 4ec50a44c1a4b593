"""Generated kernels against torch.compile of the same region: ``python tests/benchmark/bench_generated.py [REGION]``.

Regions are those of ``tests/autokernel/generate_regions.py``, at sizes of models; medians with a cold L2 cache, and
the geometric mean of torch.compile's time over that of the generated kernels. With ``--variants`` each other choice of
tiles and hints is measured too, and the fastest is named.
"""

import importlib.util
import inspect
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from tilegym.autokernel.generate import GeneratedKernel
from tilegym.autokernel.generate import generate
from tilegym.autokernel.generate import variants
from tilegym.bench.spec import Benchmark

# Regions are no ops of the library, whose benchmarks these would be.
BENCHMARKS: list[Benchmark] = []
DTYPE = torch.bfloat16
ROWS, COLUMNS = 8192, 4096
SIZES = {77: COLUMNS, 154: 2 * COLUMNS, 33: 128, 2: 4, 9: ROWS // 4, 8: 128, 3: 32, 5: 512}


def entry_of(kernel: GeneratedKernel, folder: Path) -> Callable:
    """The entry point of a generated file, loaded from ``folder``."""
    path = folder / f"{kernel.entry_point}_{abs(hash(kernel.source))}.py"
    path.write_text(kernel.source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kernel.entry_point)


def passes(function: Callable, inputs: list[torch.Tensor], trains: bool) -> dict[str, Callable[[], object]]:
    """What is timed: the forward pass, and the backward pass of a graph that is kept."""
    timed: dict[str, Callable[[], object]] = {}

    def forward() -> object:
        with torch.no_grad():
            return function(*inputs)

    timed["forward"] = forward
    if trains:
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        upstream = [torch.randn_like(o) for o in outputs]
        timed["backward"] = lambda: torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    return timed


def measure(
    name: str, region: Callable, inputs: list[torch.Tensor], trains: bool, all_variants: bool, folder: Path
) -> list[float]:
    """Prints the rows of a region; torch.compile's time over ours, by pass."""
    from sweep_common import milliseconds

    flush = torch.empty(64 << 20, device="cuda", dtype=torch.float32)
    module = isinstance(region, torch.nn.Module)
    kernel = generate(region, inputs, name)
    arguments = [*inputs, *(p.detach() for p in region.parameters())] if module else inputs
    trains = trains and kernel.trains
    torch._dynamo.reset()
    if module:
        keys = list(dict(region.named_parameters()))

        def reference(*args: torch.Tensor) -> object:
            own = dict(zip(keys, args[len(inputs) :], strict=True))
            return torch.func.functional_call(region, own, args[: len(inputs)])
    else:
        reference = region
    compiled = passes(torch.compile(reference), arguments, trains)
    ratios = []
    for label, call in passes(entry_of(kernel, folder), arguments, trains).items():
        theirs = milliseconds(compiled[label], flush)
        ours = milliseconds(call, flush)
        text = (
            f"{name:34s} {label:9s} {ours * 1e3:9.1f} us   torch.compile {theirs * 1e3:9.1f} us   {theirs / ours:5.2f}x"
        )
        if all_variants:
            times = {}
            for variant in variants(kernel):
                timed = passes(entry_of(variant, folder), arguments, trains)
                times[milliseconds(timed[label], flush)] = variant.tuning
            best = min(times, default=ours)
            if best < ours:
                changed = {k: v for k, v in vars(times[best]).items() if v != vars(kernel.tuning)[k]}
                text += f"   {best * 1e3:.1f} us with {changed}"
        print(text, flush=True)
        ratios.append(theirs / ours)
    return ratios


def main(names: list[str], all_variants: bool) -> None:
    here = Path(__file__).resolve().parent
    sys.path[:0] = [str(here.parent), str(here.parent / "autokernel"), str(here)]
    from generate_regions import CASES
    from generate_regions import PRODUCTS

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device="cuda", dtype=DTYPE)

    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            if names and name not in names:
                continue
            region = case.make(COLUMNS)
            if isinstance(region, torch.nn.Module):
                region = region.to("cuda", DTYPE)
            inputs = [random(*(SIZES.get(size, size) for size in shape)) for shape in case.inputs]
            ratios += measure(name, region, inputs, case.gradient is True, all_variants, Path(folder))
        for name, (function, shapes) in PRODUCTS.items():
            if names and name not in names:
                continue
            assert len(inspect.signature(function).parameters) == len(shapes)
            for rows in (1, 4096):
                sizes = {"M": rows, "K": 4096, "N": 4096}
                inputs = [random(*(sizes[c] for c in shape)) for shape in shapes]
                inputs = [t * 4096**-0.5 if s == "NK" else t for t, s in zip(inputs, shapes, strict=True)]
                label = f"{name}, {rows} row{'s' if rows > 1 else ''}"
                print(label)
                ratios += measure(name, function, inputs, False, all_variants, Path(folder))
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"geometric mean over torch.compile: {mean:.2f}x of {len(ratios)} passes")


if __name__ == "__main__":
    main([a for a in sys.argv[1:] if not a.startswith("-")], "--variants" in sys.argv)

"""Generated kernels against torch.compile of the same region: ``python tests/benchmark/bench_generated.py [REGION]``.

Regions are those of ``tests/autokernel/generate_regions.py`` at sizes of models, and those that the auto-kernelize loop
finds in two models of real width, but for single linear layers. Each is measured with 1, 512 and 8192 tokens, in bf16
with a cold L2 cache, where both were checked: no result may be further from the region in fp64 than twice what eager
PyTorch is. What is compiled is compiled before, in parallel. Writes JSON (``--out FILE``, by default
``out/bench/generated.json``); with ``--variants`` each other choice of tiles and hints is measured too.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tilegym.autokernel.generate import Unsupported
from tilegym.autokernel.generate import generate
from tilegym.autokernel.generate import variants
from tilegym.bench.spec import Benchmark
from tilegym.inventory import Definition
from tilegym.inventory import reference

# Regions are no ops of the library, whose benchmarks these would be.
BENCHMARKS: list[Benchmark] = []
TOKENS = (1, 512, 8192)
DTYPE, COLUMNS = torch.bfloat16, 4096
REGIONS = (
    "llama_rms_norm gemma_rms_norm cohere_layer_norm per_head_norm add_rms_norm glm4_post_norm "
    "qwen3_next_rms_norm_gated mamba2_rms_norm_gated eager_attention_probabilities mixtral_router starcoder2_gelu "
    "relu_squared nemotron_gate gpt_oss_gate granite_residual rope_halves"
).split()
MODELS = {"llama-3.1-8b": 1, "qwen3.5-0.8b": 4}  # how many layers have one of each kind


@dataclass(frozen=True)
class Case:
    """A region: ``inputs`` makes them for so many tokens, on a device, for so many sequences."""

    name: str
    function: Callable
    inputs: Callable[[int, str, int], list[Any]]
    trains: bool = False


def rope_halves(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return first * cos - second * sin, second * cos + first * sin


def _functional(module: torch.nn.Module, inputs: int) -> Callable:
    """A module as a function of its inputs and its parameters."""
    names = list(dict(module.named_parameters()))

    def function(*values: torch.Tensor) -> Any:
        return torch.func.functional_call(module, dict(zip(names, values[inputs:], strict=True)), values[:inputs])

    return function


def regions_of_tests() -> Iterator[Case]:
    """The cases of tests/autokernel/generate_regions.py, with as many columns as models have."""
    from generate_regions import CASES
    from generate_regions import PRODUCTS

    def sizes(tokens: int, batch: int) -> dict[int, int]:
        return {77: COLUMNS, 154: 2 * COLUMNS, 33: 128, 2: batch, 9: tokens, 8: 128, 3: 32, 5: min(tokens, 512)}

    for name, case in CASES.items():
        region = case.make(COLUMNS)
        module = isinstance(region, torch.nn.Module)
        parameters = [p.detach() for p in region.parameters()] if module else []

        def inputs(tokens: int, device: str, batch: int, case: Any = case, parameters: list = parameters) -> list[Any]:
            size = sizes(tokens, batch)
            made = [torch.randn([size.get(s, s) for s in shape], device=device, dtype=DTYPE) for shape in case.inputs]
            return [*made, *(p.to(device, DTYPE) for p in parameters)]

        function = _functional(region.to(DTYPE), len(case.inputs)) if module else region
        yield Case(name, function, inputs, case.gradient is True)
    for name, (function, shapes) in PRODUCTS.items():

        def inputs(tokens: int, device: str, batch: int, shapes: Any = shapes) -> list[Any]:
            size = {"M": tokens, "K": COLUMNS, "N": COLUMNS}
            made = [torch.randn([size[c] for c in shape], device=device, dtype=DTYPE) for shape in shapes]
            return [t * COLUMNS**-0.5 if s == "NK" else t for t, s in zip(made, shapes, strict=True)]

        yield Case(name, function, inputs)

    def halves(tokens: int, device: str, batch: int) -> list[Any]:
        shapes = (batch, 32, tokens, 128), (batch, 1, tokens, 64), (batch, 1, tokens, 64)
        return [torch.randn(shape, device=device, dtype=DTYPE) for shape in shapes]

    yield Case("rope_halves", rope_halves, halves)


def record_models(file: Path, device: torch.device) -> None:
    """Writes the Definitions of what the loop finds in :data:`MODELS`, of few layers and a small vocabulary."""
    from tilegym.autokernel import profile
    from tilegym.autokernel.regions import find_regions
    from tilegym.bench import models
    from tilegym.errors import InventoryError

    found = []
    for preset, layers in MODELS.items():
        config = models.load_config(preset, True)
        text = config.get_text_config(decoder=True)
        text.num_hidden_layers, text.vocab_size = layers, 512
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
        model = models.load(preset, DTYPE, device, True, config).model

        def run(model: Any = model) -> None:
            with torch.no_grad():
                for batch, length in ((2, 5), (3, 7)):
                    model(input_ids=torch.zeros(batch, length, dtype=torch.int64, device=device), use_cache=False)

        recorded = profile.record(model, [run])
        for region in find_regions(model):
            if region.key.startswith("torch.nn.Linear"):
                continue
            with contextlib.suppress(InventoryError):
                definition = profile.draft(region, recorded[region.key], preset)
                sample = profile.samples(definition, recorded[region.key])[0]
                numbers = {n: v for n, v in sample.inputs.items() if isinstance(v, (bool, int, float))}
                batch = [axis for axis, size in sample.axes.items() if size in (2, 3) and axis in definition.var_axes]
                found.append({"definition": definition.to_json(), "numbers": numbers, "batch": batch})
    file.write_text(json.dumps(found), encoding="utf-8")


def regions_of_models(file: Path) -> Iterator[Case]:
    """The regions that :func:`record_models` wrote."""
    for item in json.loads(file.read_text(encoding="utf-8")):
        definition = Definition.from_json(item["definition"])

        def inputs(
            tokens: int, device: str, batch: int, definition: Definition = definition, item: dict = item
        ) -> list[Any]:
            sizes = {axis: batch if axis in item["batch"] else tokens for axis in definition.var_axes}
            sizes |= definition.const_axes
            made = []
            for name, spec in definition.inputs.items():
                if spec.shape is None:
                    made.append(item["numbers"][name])
                    continue
                shape = [sizes[axis] for axis in spec.shape]
                scale = shape[-1] ** -0.5 if name.endswith("weight") and len(shape) == 2 else 1.0
                made.append((scale * torch.randn(shape, device=device)).to(getattr(torch, spec.dtype)))
            return made

        yield Case(definition.name, reference.load(definition.reference, definition.name), inputs)


def entry_of(entry_point: str, source: str, folder: Path) -> Callable:
    """The entry point of a generated file, loaded from ``folder``."""
    # The same name in all processes: the compiler's cache knows a kernel by its file, too.
    path = folder / f"{entry_point}_{hashlib.sha256(source.encode()).hexdigest()[:12]}.py"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(source, encoding="utf-8")
        part.replace(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, entry_point)


def generated(case: Case) -> Any:
    """The kernel of a region; examples of its inputs are made so that no size is 1 or that of another axis."""
    return generate(case.function, [v for v in case.inputs(13, "cpu", 3)], case.name, case.trains)


def passes(function: Callable, inputs: list[Any], trains: bool) -> dict[str, Callable[[], Any]]:
    """What is timed: the forward pass, and the backward pass of a graph that is kept."""

    def forward() -> Any:
        with torch.no_grad():
            return function(*inputs)

    timed: dict[str, Callable[[], Any]] = {"forward": forward}
    if trains:
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
        outputs = _tuple(function(*leaves))
        generator = torch.Generator(outputs[0].device).manual_seed(1)
        upstream = [torch.randn(o.shape, generator=generator, device=o.device).to(o.dtype) for o in outputs]
        timed["backward"] = lambda: torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    return timed


def _tuple(value: Any) -> tuple:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def error_of(got: Any, exact: Any) -> float:
    """How far results are from those in fp64: the worst of all, relative to the largest exact value of its tensor."""
    worst = 0.0
    for value, oracle in zip(_tuple(got), _tuple(exact), strict=True):
        off = (value.double() - oracle).abs().max() / oracle.abs().max().clamp_min(1e-300)
        worst = max(worst, float(off)) if bool(off.isfinite()) else math.inf
    return worst


def measure(case: Case, tokens: int, kernel: Any, source: str, folder: Path, timer: Any) -> Iterator[dict[str, Any]]:
    """The rows of one region and number of tokens, by pass."""
    inputs = case.inputs(tokens, timer.device, 1)
    trains = kernel["trains"] and tokens == TOKENS[-1]
    ours = passes(entry_of(kernel["entry_point"], source, folder), inputs, trains)
    eager = passes(case.function, inputs, trains)
    torch._dynamo.reset()
    theirs = passes(torch.compile(case.function, dynamic=False), inputs, trains)
    wide = [v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in inputs]
    exact = passes(case.function, wide, trains)
    for label, call in ours.items():
        oracle = exact[label]()
        errors = {"error": error_of(call(), oracle), "eager_error": error_of(eager[label](), oracle)}
        errors["compile_error"] = error_of(theirs[label](), oracle)
        del oracle
        seconds = {}
        both = {"ours": call, "theirs": theirs[label]}
        trials = {name: timer.trial(lambda _, timed=timed: timed(), lambda: None, 0) for name, timed in both.items()}
        for _ in range(timer.rounds):
            for trial in trials.values():
                timer.round(trial)
        for name, trial in trials.items():
            seconds[name] = sorted(trial.samples)[len(trial.samples) // 2]
        yield {
            "region": case.name,
            "tokens": tokens,
            "pass": label,
            "generated_us": 1e6 * seconds["ours"],
            "compile_us": 1e6 * seconds["theirs"],
            "ratio": seconds["theirs"] / seconds["ours"],
            **errors,
            # Half a unit in the last place of bf16 at the largest value: what rounding once costs.
            "correct": errors["error"] <= 2 * errors["eager_error"] + 2**-9,
        }


def cases(recorded: Path, names: list[str]) -> list[Case]:
    """The regions that are asked for."""
    products = "linear_gelu linear_residual rms_norm_linear gated_mlp_half".split()
    found = [c for c in regions_of_tests() if c.name in (names or [*REGIONS, *products])]
    return found + [c for c in regions_of_models(recorded) if not names or c.name in names]


def warm(folder: Path, names: list[str], number: int, processes: int, device: str) -> None:
    """Generates and compiles every so manieth region and number of tokens."""
    units = [(case, tokens) for tokens in reversed(TOKENS) for case in cases(folder / "models.json", names)]
    for case, tokens in units[number::processes]:
        try:
            compile_one(case, tokens, folder, device)
        except Exception as error:  # it is reported where it is measured
            print(f"{case.name}, {tokens} tokens: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        torch._dynamo.reset()


def compile_one(case: Case, tokens: int, folder: Path, device: str) -> None:
    """Generates a region's kernel, if nobody has, and calls it and torch.compile's once."""
    file = folder / f"{case.name}.json"
    if not file.exists():
        try:
            kernel = generated(case)
            found = {"entry_point": kernel.entry_point, "trains": kernel.trains, "source": kernel.source}
        except Unsupported as error:
            found = {"unsupported": str(error)}
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(file)
    kernel = json.loads(file.read_text(encoding="utf-8"))
    if "unsupported" in kernel:
        return
    inputs, trains = case.inputs(tokens, device, 1), kernel["trains"] and tokens == TOKENS[-1]
    ours = entry_of(kernel["entry_point"], kernel["source"], folder)
    for function in (ours, torch.compile(case.function, dynamic=False)):
        for call in passes(function, inputs, trains).values():
            call()


def measure_all(found: list[Case], folder: Path, timer: Any, rows: list[dict[str, Any]], all_variants: bool) -> None:
    """Measures regions, prints and adds to ``rows`` what was measured."""
    for case in found:
        file = folder / f"{case.name}.json"
        kernel = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"unsupported": "no file"}
        if "unsupported" in kernel:
            print(f"{case.name:44s} not generated: {kernel['unsupported'][:70]}", flush=True)
            continue
        for tokens in TOKENS:
            try:
                for row in measure(case, tokens, kernel, kernel["source"], folder, timer):
                    rows.append(row)
                    print(line(row), flush=True)
                    if all_variants:
                        print_variants(case, tokens, row, folder, timer)
            except Exception as error:  # the others are worth measuring all the same
                failed = f"{type(error).__name__}: {error}"[:300]
                rows.append({"region": case.name, "tokens": tokens, "failed": failed})
                print(f"{case.name:44s} {tokens:5d} failed: {failed}", flush=True)


def main(names: list[str], all_variants: bool, out: Path) -> None:
    from tilegym.bench import machine
    from tilegym.bench.timing import CudaTimer

    began, rows = time.perf_counter(), []
    device = torch.device("cuda")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        os.environ.setdefault("CUDA_TILE_CACHE_DIR", str(folder / "cutile"))
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        record_models(folder / "models.json", device)
        processes = max(1, min(14, (os.cpu_count() or 2) - 2))
        command = [sys.executable, __file__, "--warm", str(folder), str(processes)]
        running = [subprocess.Popen([*command, str(i), *names]) for i in range(processes)]
        if any(process.wait() for process in running):
            print("something could not be compiled beforehand: it is measured anyway", flush=True)
        print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
        timer = CudaTimer(budget=0.02, rounds=2)
        with contextlib.suppress(KeyboardInterrupt):  # what was measured until then is written
            measure_all(cases(folder / "models.json", names), folder, timer, rows, all_variants)
    right = [row for row in rows if row.get("correct")]
    means = {what: geomean([r["ratio"] for r in right if test(r)]) for what, test in GROUPS.items()}
    seconds = time.perf_counter() - began
    out.parent.mkdir(parents=True, exist_ok=True)
    found = {"machine": machine.describe(), "means": means, "seconds": seconds, "rows": rows}
    out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"geometric means of torch.compile's time over ours: {means}")
    print(f"{len(right)} of {len(rows)} figures are of right results; {seconds:.0f} s; written: {out}")


GROUPS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "all": lambda row: True,
    "forward": lambda row: row["pass"] == "forward",
    "backward": lambda row: row["pass"] == "backward",
    **{f"{tokens} tokens": lambda row, tokens=tokens: row["tokens"] == tokens for tokens in TOKENS},
}


def geomean(ratios: list[float]) -> float | None:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['region']:44s} {row['tokens']:5d} {row['pass']:8s} {row['generated_us']:9.1f} us   torch.compile "
        f"{row['compile_us']:9.1f} us   {row['ratio']:5.2f}x   error {row['error']:.1e}, eager {row['eager_error']:.1e}"
        f"{'' if row['correct'] else '   WRONG'}"
    )


def print_variants(case: Case, tokens: int, row: dict[str, Any], folder: Path, timer: Any) -> None:
    """Prints the fastest other choice of tiles and hints, if it is faster than the first."""
    kernel, inputs = generated(case), case.inputs(tokens, timer.device, 1)
    times = {}
    for variant in variants(kernel):
        entry = entry_of(variant.entry_point, variant.source, folder)
        call = passes(entry, inputs, row["pass"] == "backward")[row["pass"]]
        trial = timer.trial(lambda _, call=call: call(), lambda: None, 0)
        timer.round(trial)
        times[sorted(trial.samples)[len(trial.samples) // 2]] = variant.tuning
    best = min(times, default=math.inf)
    if 1e6 * best < row["generated_us"]:
        changed = {k: v for k, v in vars(times[best]).items() if v != vars(kernel.tuning)[k]}
        print(f"    {1e6 * best:.1f} us with {changed}", flush=True)


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path[:0] = [str(here.parent), str(here.parent / "autokernel"), str(here)]
    arguments = sys.argv[1:]
    if arguments[:1] == ["--warm"]:
        warm(Path(arguments[1]), arguments[4:], int(arguments[3]), int(arguments[2]), "cuda")
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("regions", nargs="*", metavar="REGION", help="only these; all if none is named")
        parser.add_argument("--variants", action="store_true", help="measure each other choice of tiles and hints too")
        parser.add_argument("--out", type=Path, default=Path("out/bench/generated.json"), help="the file to write")
        options = parser.parse_args(arguments)
        if not torch.cuda.is_available():
            parser.error("no NVIDIA GPU is visible, and there is nothing to measure without one")
        main(options.regions, options.variants, options.out)

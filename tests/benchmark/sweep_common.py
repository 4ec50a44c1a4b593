"""What the sweeps of GEMM and attention share: describing variants, compiling, checking and timing them."""

import functools
import math
import sys
import time
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import cuda.tile as ct
import torch

BF16 = torch.bfloat16
REPETITIONS = 15
COMPILE_TIMEOUT = 60  # seconds
RUN_COMPILE_TIMEOUT = 3  # what was not warmed by then is left out


class Variant(NamedTuple):
    group: str  # a table: one problem
    name: str
    hints: dict[str, int]
    launches: Callable[[dict], list[tuple]]  # the group's tensors -> (grid, kernel, args) one after the other


class Group(NamedTuple):
    tensors: Callable[[str], dict]  # of a device
    result: Callable[[dict], torch.Tensor]  # what the launches wrote
    references: dict[str, Callable[[dict], torch.Tensor]]  # the first is what results are compared with
    work: float
    unit: str  # "TFLOP/s" or "GB/s"


def empty_or_random(device: str, *shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
    if device == "cpu":  # only looked at
        return torch.empty(shape, dtype=dtype)
    return torch.randn(shape, device=device, dtype=dtype) * scale


def p2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def hints_text(hints: dict) -> str:
    short = {"num_worker_warps": "w", "occupancy": "occ", "num_ctas": "ctas", "opt_level": "O"}
    return " ".join(f"{short[k]}{v}" for k, v in hints.items()) or "-"


def hints(warps=None, occ=None, ctas=None) -> dict[str, int]:
    given = {"num_worker_warps": warps, "occupancy": occ, "num_ctas": ctas}
    return {k: v for k, v in given.items() if v is not None}


GROUPS: dict[str, Group] = {}
VARIANTS: list[Variant] = []


@functools.cache
def hinted(kernel: ct.kernel, items: tuple) -> ct.kernel:
    return kernel.replace_hints(**dict(items)) if items else kernel


_tensors: dict[str, dict] = {}


def tensors_of(group: str, device: str) -> dict:
    if group not in _tensors:
        _tensors.clear()  # one problem in memory at a time
        torch.manual_seed(0)
        _tensors[group] = GROUPS[group].tensors(device)
    return _tensors[group]


def launches_of(variant: Variant, device: str) -> list[tuple]:
    launches = variant.launches(tensors_of(variant.group, device))
    (grid, kernel, args), *others = launches
    return [(grid, hinted(kernel, tuple(variant.hints.items())), args), *others]


def runner(variant: Variant) -> Callable[[], None]:
    stream = torch.cuda.current_stream()
    launches = launches_of(variant, "cuda")

    def run() -> None:
        for grid, kernel, args in launches:
            ct.launch(stream, grid, kernel, args)

    return run


def milliseconds(function: Callable[[], Any], flush: torch.Tensor, repetitions: int = REPETITIONS) -> float:
    """Median time of one call whose inputs are not in the L2 cache."""
    for _ in range(3):
        function()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    for start, end in events:
        flush.zero_()
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[repetitions // 2]


def graph_seconds(calls: list[Callable[[], Any]], repetitions: int) -> float:
    """The time of one of ``calls`` on the GPU, from a graph of all, so that the host does not matter: a median."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for call in calls:
            call()
    times = []
    for _ in range(repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return sorted(times)[repetitions // 2]


def selected(names: list[str]) -> list[Variant]:
    return [v for v in VARIANTS if not names or any(v.group.startswith(n) for n in names)]


def compile_for_hopper(i: int, n: int, names: list[str]) -> None:
    from tilegym.interpreter import compile_kernel
    from tilegym.interpreter import kernel_signature

    done = set()
    for variant in selected(names)[i::n]:
        name = f"{variant.group} | {variant.name} | {hints_text(variant.hints)}"
        for _, kernel, args in launches_of(variant, "cpu"):
            what = (kernel, repr(kernel_signature(kernel, args)))
            if what in done:
                continue
            done.add(what)
            began = time.time()
            try:
                with ct.compiler_timeout(COMPILE_TIMEOUT):
                    compile_kernel(kernel, args, "sm_90")
            except Exception as error:  # whatever the compiler says, the next variant is tried
                print(f"FAILS {name}: {str(error)[:300]}", flush=True)
            if time.time() - began > 10:
                print(f"slow: {name}: {time.time() - began:.0f} s", flush=True)
    print(f"{len(done)} kernels", flush=True)


def warm(i: int, n: int, names: list[str]) -> None:
    for variant in selected(names)[i::n]:
        try:
            with ct.compiler_timeout(COMPILE_TIMEOUT):
                runner(variant)()
            torch.cuda.synchronize()
        except Exception as error:  # named by the run that follows
            print(f"warm: {variant.group} | {variant.name}: {type(error).__name__}", flush=True)


def copy_bandwidth(flush: torch.Tensor) -> float:
    source = torch.randn(128 << 20, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / milliseconds(lambda: target.copy_(source), flush) / 1e6


def measured(variant: Variant, tensors: dict, expected: torch.Tensor, flush: torch.Tensor) -> tuple[float, str]:
    """Milliseconds, for sorting, and the row of the table."""
    group = GROUPS[variant.group]
    label = f"{variant.name} | {hints_text(variant.hints)}"
    try:
        group.result(tensors).fill_(math.nan)
        with ct.compiler_timeout(RUN_COMPILE_TIMEOUT):
            call = runner(variant)
            call()
        torch.cuda.synchronize()
        got = group.result(tensors).float()
        error = ((got - expected.float()).norm() / expected.float().norm()).item()
        ms = milliseconds(call, flush)
    except Exception as error:  # a variant that does not compile or run is a row of the table
        return math.inf, f"failed: {label}: {type(error).__name__} {str(error)[:60]!r}"
    wrong = "" if error < 2e-2 else "  WRONG"
    return ms, f"{group.work / ms * 1e3:8.1f} {ms * 1e3:9.1f} us  {label}  err {error:.0e}{wrong}"


def run(names: list[str]) -> None:
    flush = torch.empty(64 << 20, device="cuda", dtype=torch.float32)
    print(f"copy of 512 MB: {copy_bandwidth(flush):.0f} GB/s", flush=True)
    chosen = selected(names)
    for name in dict.fromkeys(v.group for v in chosen):
        group, tensors = GROUPS[name], tensors_of(name, "cuda")
        print(f"\n{name}")
        expected = None
        for label, reference in group.references.items():
            try:
                result = reference(tensors)
                ms = milliseconds(functools.partial(reference, tensors), flush)
            except RuntimeError as error:
                print(f"  {label}: {str(error)[:80]}")
                continue
            expected = result if expected is None else expected
            print(f"  {group.work / ms * 1e3:8.1f} {ms * 1e3:9.1f} us  = {label} ({group.unit})")
        # Twice in turn, and the faster: a GPU that has just become warm is slower than one that was idle.
        twice = [[measured(v, tensors, expected, flush) for v in chosen if v.group == name] for _ in range(2)]
        rows = [min(pair) for pair in zip(*twice, strict=True)]
        for _, row in sorted(rows, key=lambda r: r[0]):
            print("  " + row, flush=True)


def main(usage: str) -> None:
    """The command line of a sweep: ``run``, ``warm`` or ``compile``."""
    command, *rest = sys.argv[1:] or ["help"]
    if command == "compile":
        compile_for_hopper(int(rest[0]), int(rest[1]), rest[2:])
    elif command == "warm":
        warm(int(rest[0]), int(rest[1]), rest[2:])
    elif command == "run":
        run(rest)
    else:
        print(usage)

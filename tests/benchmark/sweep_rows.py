"""Tries tiles and compiler hints of the row-wise and elementwise kernels on one GPU: a tool for kernel authors.

    export CUDA_TILE_CACHE_DIR=/tmp/tile-cache
    for i in $(seq 0 13); do python sweep_rows.py warm $i 14 & done; wait
    python sweep_rows.py run [start of a group's name ...]

``warm i n`` compiles every n-th variant (compiling is CPU work: do it from many processes first); ``run`` checks each
variant against torch and prints a table a group, fastest first, beside what the op itself does ("op"), torch, Liger
where it is installed, and a copy of as many bytes in the same run; then the host time of calls with small inputs.
``compile i n`` compiles ahead of time for sm_90 without a GPU and names the variants that fail.
"""

import itertools
import sys
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import NamedTuple

import cuda.tile as ct
import torch
import torch.nn.functional as F
from sweep_common import graph_seconds

from tilegym import ops
from tilegym.ops.cutile import rms_norm as rms
from tilegym.ops.cutile import rope
from tilegym.ops.cutile import row_norms_backward as row_norms
from tilegym.ops.cutile import softmax as soft
from tilegym.ops.cutile import swiglu
from tilegym.ops.cutile.pointwise import cover
from tilegym.ops.cutile.row_norms_backward_cached import backward_kernel
from tilegym.ops.cutile.silu_and_mul import silu_and_mul_backward
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.cutile.tiling import next_power_of_2

BF16 = torch.bfloat16
EPS = 1e-6
GRAPH_LAUNCHES = 20
REPETITIONS = 10
COMPILE_TIMEOUT = 60  # seconds
RUN_COMPILE_TIMEOUT = 3  # what was not warmed by then is left out
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMS = torch.cuda.get_device_properties(0).multi_processor_count if DEVICE == "cuda" else 132


class Variant(NamedTuple):
    name: str
    hints: dict[str, int]
    grid: tuple[int, ...]
    kernel: ct.kernel
    args: tuple


class Group(NamedTuple):
    variants: list[Variant]
    results: list[torch.Tensor]  # what the kernels write
    calls: dict[str, Callable[[], object]]  # "torch" gives the expected results, the others are timed beside it
    moved: int  # bytes read and written at least


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    # Without a GPU only shapes and strides are looked at.
    return torch.randn(shape, device=DEVICE, dtype=dtype) if DEVICE == "cuda" else torch.empty(shape, dtype=dtype)


def hints(warps: tuple = (4, 8), occupancies: tuple = (None, 2, 4, 8, 16)) -> Iterator[dict[str, int]]:
    for w, o in itertools.product(warps, occupancies):
        yield {"num_worker_warps": w} | ({"occupancy": o} if o else {})


def tiles_of(elements: tuple, n: int) -> list[tuple[int, int]]:
    """(TILE_M, TILE_N) of whole rows with about so many elements."""
    tile_n = next_power_of_2(n)
    return [(e // tile_n, tile_n) for e in elements if e >= tile_n] or [(1, tile_n)]


def liger(name: str) -> Callable | None:
    try:
        import liger_kernel.ops as found
    except ImportError:
        return None
    return getattr(found, name, None)


def with_gradients(function: Callable, inputs: list[torch.Tensor], dy: list[torch.Tensor]) -> Callable[[], object]:
    """A call of function's backward pass alone."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return lambda: torch.autograd.grad(outputs, leaves, dy, retain_graph=True)


def rms_norm_forward(m: int, n: int) -> Group:
    x, w, y = tensor(m, n), tensor(n), tensor(m, n)

    def variant(kernel, grid, tile, hint):
        cached, warps = kernel is rms.rms_norm_cached_kernel, hint["num_worker_warps"] if tile[0] == 1 else 0
        flags = (1, False, 0, warps, False) if cached else ()
        args = (x, w, x, y, x, EPS, 0.0, n, *tile, *flags, True, False, True, False)
        return Variant(f"{kernel._pyfunc.__name__[9:-7]} {tile}", hint, grid, kernel, args)

    variants = []
    if next_power_of_2(n) <= rms.MAX_CACHED:
        for tile in tiles_of((2048, 4096, 8192, 16384), n):
            blocks = ct.cdiv(m, tile[0])
            for hint in hints():
                variants.append(variant(rms.rms_norm_cached_kernel, (blocks,), tile, hint))
            for hint in hints(occupancies=(1, 2, 4, 8)):
                grid = (min(blocks, SMS * hint["occupancy"]),)
                variants.append(variant(rms.rms_norm_persistent_kernel, grid, tile, hint))
    for tile_n in (1024, 2048, 4096, 8192):
        for hint in hints(occupancies=(None, 1, 2, 4, 8)):
            variants.append(variant(rms.rms_norm_reload_kernel, (m,), (1, min(tile_n, next_power_of_2(n))), hint))
    calls = {
        "torch": lambda: F.rms_norm(x, (n,), w, EPS),
        "op": lambda: ops.rms_norm(x, n, w, EPS, backend="cutile"),
    }
    if function := liger("LigerRMSNormFunction"):
        calls["liger"] = lambda: function.apply(x, w, EPS)
    return Group(variants, [y], calls, 2 * x.nbytes)


NORMS = {"rms_norm": (False, False), "fused_add_rms_norm": (False, True), "layer_norm": (True, False)}


def norm_backward(norm: str, m: int, n: int) -> Group:
    center, through = NORMS[norm]
    x, w, dy, added, dx = tensor(m, n), tensor(n), tensor(m, n), tensor(m, n), tensor(m, n)
    mean, rstd = tensor(m, dtype=torch.float32), tensor(m, dtype=torch.float32)
    if DEVICE == "cuda":
        mean = x.float().mean(-1) if center else mean
        rstd = torch.rsqrt((x.float() - (mean[:, None] if center else 0)).pow(2).mean(-1) + EPS)
    variants = []
    whole = tiles_of((2048, 4096, 8192), n) if n <= row_norms.MAX_CACHED_BACKWARD else ()
    tiles = [(*tile, 1) for tile in whole] + [(1, t, ct.cdiv(n, t)) for t in (512, 1024, 2048) if whole and t < n]
    for tile in tiles:
        for hint, latency in itertools.product(hints(occupancies=(1, 2, 3, 4, 8)), (0, 4, 6)):
            blocks = min(ct.cdiv(m, tile[0]), SMS * hint["occupancy"])
            parts = [rstd.new_empty(blocks, n) for _ in range(2)]
            reads = (int(latency == 0), latency, latency > 0, True, latency == 0, 0, 0)
            flags = (center, through, True, True, center, False, False)
            args = (dy, x, added, w, mean, rstd, dx, *parts, 0.0, n, *tile, *reads, *flags)
            name = f"whole rows {tile} latency {latency}"
            variants.append(Variant(name, hint, (blocks,), backward_kernel, args))
    if n > 4096:
        products = (dy.float() * w * (x.float() - mean[:, None] * center) * rstd[:, None]).mean(-1)
        sums = (dy.float() * w).mean(-1)
        for tile, blocks in itertools.product(((2, 512), (4, 512), (8, 512), (4, 1024), (8, 256)), (16, 33, 66, 132)):
            parts = [rstd.new_empty(blocks, n) for _ in range(2)]
            arrays = (dy, x, added, w, mean, rstd, sums, products, dx, *parts)
            args = (*arrays, 0.0, *tile, center, through, True, True, center, False)
            for hint in hints(warps=(4,), occupancies=(None, 4, 8)):
                grid = (blocks, ct.cdiv(n, tile[1]))
                variants.append(
                    Variant(f"columns {tile} {blocks}", hint, grid, row_norms.backward_columns_kernel, args)
                )
    upstream = added if through else None
    options = (0.0, 1, True, center, BF16)
    calls = {"op": lambda: row_norms.norm_backward(dy, x, upstream, w, mean if center else None, rstd, *options)}
    if DEVICE == "cuda":

        def plain(x, w, b):
            return F.layer_norm(x, (n,), w, b, EPS) if center else F.rms_norm(x, (n,), w, EPS) + b

        def with_sum(x, w, b):
            return F.rms_norm(x, (n,), w, EPS) + b, x * 1

        dys = [dy, added] if through else [dy]
        calls["torch"] = with_gradients(with_sum if through else plain, [x, w, tensor(n)], dys)
        if not center and not through and (function := liger("LigerRMSNormFunction")):
            calls["liger"] = with_gradients(lambda x, w: function.apply(x, w, EPS, 0.0, "llama", False), [x, w], [dy])
        if center and (function := liger("LigerLayerNormFunction")):
            calls["liger"] = with_gradients(lambda x, w, b: function.apply(x, w, b, EPS), [x, w, tensor(n)], [dy])
    return Group(variants, [dx], calls, (4 if through else 3) * x.nbytes)


def _swiglu(a, b, y, dy, da, db, backward: bool, calls: dict, moved: int) -> Group:
    m, n = y.shape
    kernel = swiglu.swiglu_backward_kernel if backward else swiglu.swiglu_kernel
    variants = []
    for elements in (512, 1024, 2048, 4096, 8192):
        grid, tile = cover((m, n), elements)
        args = (dy, a, b, da, db, *tile, False, False) if backward else (a, b, y, *tile, False)
        variants += [Variant(str(tile), hint, grid, kernel, args) for hint in hints(occupancies=(None, 4, 8, 16))]
    return Group(variants, [da, db] if backward else [y], calls, moved)


def silu_and_mul_group(m: int, h: int, backward: bool) -> Group:
    x, y, dy, dx = tensor(m, 2 * h), tensor(m, h), tensor(m, h), tensor(m, 2 * h)

    def plain(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    if backward:
        calls = {"op": lambda: silu_and_mul_backward(dy, x)}
        if DEVICE == "cuda":
            calls["torch"] = with_gradients(lambda a, b: F.silu(a) * b, [*x.chunk(2, -1)], [dy])
    else:
        calls = {"torch": lambda: plain(x), "op": lambda: ops.silu_and_mul(x, backend="cutile")}
    moved = (2 * x.nbytes + dy.nbytes) if backward else x.nbytes + y.nbytes
    return _swiglu(*x.chunk(2, -1), y, dy, *dx.chunk(2, -1), backward, calls, moved)


def swiglu_group(m: int, h: int, backward: bool) -> Group:
    a, b, y, dy, da, db = (tensor(1, m * h) for _ in range(6))
    function = liger("LigerSiLUMulFunction")
    if backward:
        calls = {"op": lambda: swiglu.swiglu_backward(dy, a, b)}
        if DEVICE == "cuda":
            calls["torch"] = with_gradients(lambda a, b: F.silu(a) * b, [a, b], [dy])
    else:
        calls = {"torch": lambda: F.silu(a) * b, "op": lambda: ops.swiglu(a, b, backend="cutile")}
        if function:
            rows = [t.view(m, h) for t in (a, b)]
            calls["liger"] = lambda: function.apply(*rows)
    return _swiglu(a, b, y, dy, da, db, backward, calls, (5 if backward else 3) * y.nbytes)


def softmax_group(m: int, n: int, backward: bool) -> Group:
    x, y, dy = tensor(m, n), tensor(m, n), tensor(m, n)
    if backward and DEVICE == "cuda":
        x = torch.softmax(x, -1)
    arrays = (dy, x, y) if backward else (x, y)
    variants = []
    kernel = soft.softmax_backward_kernel if backward else soft.softmax_kernel
    if next_power_of_2(n) <= soft.MAX_HELD[backward][2]:  # longer ones take two launches
        for tile, twice in itertools.product(tiles_of((2048, 4096, 8192, 16384, 32768), n), (False, True)):
            name = f"rows {tile}" + " twice" * twice
            for hint in hints():
                variants.append(Variant(name, hint, (ct.cdiv(m, tile[0]),), kernel, (*arrays, *tile, twice)))
    if backward:
        calls = {"op": lambda: soft.softmax_backward(dy, x, -1)}
        calls["torch"] = lambda: torch._softmax_backward_data(dy, x, -1, BF16)
    else:
        calls = {"torch": lambda: torch.softmax(x, -1), "op": lambda: ops.softmax(x, backend="cutile")}
        if function := liger("LigerSoftmaxFunction"):
            calls["liger"] = lambda: function.apply(x)
    return Group(variants, [y], calls, len(arrays) * x.nbytes)


def rope_group(b: int, heads: int, kv_heads: int, s: int, d: int, heads_inside: bool) -> Group:
    def make(h):
        return tensor(b, s, h, d).transpose(1, 2) if heads_inside else tensor(b, h, s, d)

    q, k, q_out, k_out = make(heads), make(kv_heads), make(heads), make(kv_heads)
    angles = tensor(1, s, d // 2, dtype=torch.float32).repeat(1, 1, 2)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    variants = []
    for rows, inside in itertools.product((4, 8, 16, 32, 64, 128), (True, False)):
        grid, constants = rope.layout(b, heads, kv_heads, s, rows, inside)
        args = (q, k, cos, sin, q_out, k_out, d // 2, 0, *constants, False, False, False, False)
        for hint in hints(occupancies=(None, 4, 8)):
            variants.append(Variant(f"{rows}{' inside' * inside}", hint, grid, rope.rope_kernel, args))

    def plain():
        c, n = cos[:, None], sin[:, None]
        return [t * c + torch.cat((-t[..., d // 2 :], t[..., : d // 2]), -1) * n for t in (q, k)]

    calls = {"torch": plain, "op": lambda: ops.apply_rope_base(q, k, cos, sin, backend="cutile")}
    return Group(variants, [q_out, k_out], calls, 2 * (q.nbytes + k.nbytes))


GROUPS: dict[str, Callable[[], Group]] = {
    **{f"rms_norm {m}x{n}": (lambda m=m, n=n: rms_norm_forward(m, n))
       for m, n in ((8192, 4096), (1, 4096), (16, 4096), (262144, 128), (4096, 8192), (4096, 14336), (1024, 65536))},
    **{f"{norm}_backward {m}x{n}": (lambda norm=norm, m=m, n=n: norm_backward(norm, m, n)) for norm in NORMS
       for m, n in ((8192, 4096), (16, 4096), (1, 4096), (65536, 512), (4096, 8192), (4096, 14336))},
    **{f"silu_and_mul{'_backward' * g} {m}x{2 * h}": (lambda m=m, h=h, g=g: silu_and_mul_group(m, h, g))
       for g in (False, True) for m, h in ((8192, 14336), (1, 14336), (16, 14336))},
    **{f"swiglu{'_backward' * g} {m}x{h}": (lambda m=m, h=h, g=g: swiglu_group(m, h, g))
       for g in (False, True) for m, h in ((8192, 14336), (1, 14336))},
    **{f"softmax{'_backward' * g} {m}x{n}": (lambda m=m, n=n, g=g: softmax_group(m, n, g))
       for g in (False, True) for m, n in ((8192, 4096), (16, 4096), (131072, 256), (1024, 32768), (1024, 128256))},
    **{f"rope B{b} S{s} {'heads' if i else 'tokens'} inside": (lambda b=b, s=s, i=i: rope_group(b, 32, 8, s, 128, i))
       for i in (True, False) for b, s in ((4, 4096), (1, 1), (1, 16))},
}  # fmt: skip


def launch(variant: Variant) -> None:
    kernel = hinted(variant.kernel, **variant.hints)
    ct.launch(torch.cuda.current_stream(), variant.grid, kernel, variant.args)


def microseconds(call: Callable[[], object]) -> float:
    """The time of one call on the GPU, from a graph of many, so that the host does not matter."""
    call()
    return 1e6 * graph_seconds([call] * GRAPH_LAUNCHES, REPETITIONS)


def copy_microseconds(moved: int) -> float:
    source = torch.empty(moved // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return microseconds(lambda: target.copy_(source))


def error(results: list[torch.Tensor], expected: object) -> float:
    expected = list(expected) if isinstance(expected, list | tuple) else [expected]
    pairs = zip(results, expected[: len(results)], strict=True)
    return max(((r.double() - e.double()).norm() / (e.double().norm() + 1e-30)).item() for r, e in pairs)


def run_group(name: str, group: Group) -> None:
    lines = [("copy", copy_microseconds(group.moved), "")]
    for label, call in group.calls.items():
        try:
            lines.append((label, microseconds(call), ""))
        except Exception as failure:
            lines.append((label, float("inf"), f"{type(failure).__name__}: {failure}".splitlines()[0][:80]))
    expected = group.calls["torch"]()
    for variant in group.variants:
        label = f"{variant.name} " + " ".join(f"{k.removeprefix('num_worker_')} {v}" for k, v in variant.hints.items())
        for result in group.results:
            result.fill_(float("nan"))
        try:
            with ct.compiler_timeout(RUN_COMPILE_TIMEOUT):
                launch(variant)
            torch.cuda.synchronize()
            off = error(group.results, expected)
            time_us = microseconds(lambda variant=variant: launch(variant))
            lines.append((label, time_us, "" if off < 1e-2 else f"WRONG: relative error {off:.1e}"))
        except Exception as failure:
            lines.append((label, float("inf"), f"{type(failure).__name__}: {failure}".splitlines()[0][:80]))
    print(f"\n{name}: {group.moved / 1e6:.1f} MB")
    lines.sort(key=lambda line: line[1])
    shown = [line for i, line in enumerate(lines) if i < 12 or line[0] in ("copy", *group.calls) or "WRONG" in line[2]]
    for label, time_us, note in shown:
        print(f"  {label:44} {time_us:9.2f} us {group.moved / time_us / 1e3:7.0f} GB/s  {note}", flush=True)
    failed = [line for line in lines if line[1] == float("inf")]
    if failed:
        print(f"  {len(failed)} failed, the first: {failed[0][0]}: {failed[0][2]}")


def host_microseconds(call: Callable[[], object]) -> float:
    """The time until a call returns; the queue is emptied before it fills up."""
    times = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            call()
        times.append((time.perf_counter() - start) / 200 * 1e6)
    return sorted(times)[len(times) // 2]


def run_host() -> None:
    print("\nhost time of a call, 1 row")
    for name in (
        "rms_norm 1x4096",
        "silu_and_mul 1x28672",
        "swiglu 1x14336",
        "softmax 16x4096",
        "rope B1 S1 heads inside",
    ):
        group = GROUPS[name]()
        with torch.no_grad():
            figures = {label: host_microseconds(call) for label, call in group.calls.items()}
        bare = host_microseconds(lambda variant=group.variants[0]: launch(variant))
        print(f"  {name:44} ct.launch {bare:6.2f} us  " + "  ".join(f"{k} {v:6.2f} us" for k, v in figures.items()))


def main(mode: str, *rest: str) -> int:
    if mode == "run":
        # Graphs cannot be captured from the default stream, nor a backward pass from another than the forward's.
        with torch.cuda.stream(torch.cuda.Stream()):
            for name, make in GROUPS.items():
                if not rest or name.startswith(tuple(rest)):
                    run_group(name, make())
                    torch.cuda.empty_cache()
            if not rest or "host" in rest:
                run_host()
        return 0
    index, count = map(int, rest)
    failures = 0
    numbered = itertools.count()
    for name, make in GROUPS.items():
        for variant in make().variants:
            if next(numbered) % count != index:
                continue
            try:
                with ct.compiler_timeout(COMPILE_TIMEOUT):
                    if mode == "warm":
                        launch(variant)
                    else:
                        from tilegym.interpreter import compile_kernel

                        compile_kernel(hinted(variant.kernel, **variant.hints), variant.args, "sm_90")
            except Exception as failure:
                failures += 1
                print(f"{name} {variant.name} {variant.hints}: {type(failure).__name__} {failure}".splitlines()[0])
    return 1 if failures else 0


if __name__ == "__main__":
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        print(__doc__)
        sys.exit()
    if sys.argv[1] not in ("warm", "run", "compile"):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))

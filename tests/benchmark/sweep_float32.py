"""Measures from how many rows on PyTorch multiplies matrices in fp32 faster than the kernels do, for the table of such.

    python sweep_float32.py [OP ...] [--write]

Without tf32 there are no tensor cores for fp32: for many rows cuBLAS is far ahead, for one or few memory decides. Each
op is timed with backend="cutile" and backend="pytorch" at several numbers of rows and the sizes of some models, as fp32
and with tf32 allowed, and the number from which on PyTorch wins at all of them is printed; of attention for each head
dimension. ``--write`` puts the numbers into the file for this GPU that ``write_slower.py`` writes the other calls to.
"""

import argparse
import contextlib
import json
import statistics
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import torch

from tilegym import ops
from tilegym.backend import slower
from tilegym.bench.slower_table import Point
from tilegym.bench.slower_table import from_rows
from tilegym.bench.timing import CudaTimer

TOLERANCE = {"ieee": 1e-4, "tf32": 5e-3}  # of the largest element
SECONDS = 0.05  # of the GPU, for each call


class Group(NamedTuple):
    op: str
    sizes: str
    arguments: Callable[[int], tuple[list, dict[str, Any]]]  # of a number of rows
    rows: tuple[int, ...]
    gradients: bool = False


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, device="cuda") * scale


def weight(n: int, k: int) -> torch.Tensor:
    return random(n, k, scale=k**-0.5)


def of_linear(n: int, k: int, rows: tuple[int, ...], bias: bool = False, gradients: bool = False) -> Group:
    def arguments(m: int) -> tuple[list, dict]:
        return [random(m, k), weight(n, k), *([random(n)] if bias else [])], {}

    return Group("linear", f"{n}x{k}", arguments, rows, gradients)


def of_add(n: int, k: int, rows: tuple[int, ...]) -> Group:
    return Group("linear_add", f"{n}x{k}", lambda m: ([random(m, k), weight(n, k), random(m, n)], {}), rows)


def of_projections(hidden: int, sizes: tuple[int, ...], rows: tuple[int, ...]) -> Group:
    def arguments(m: int) -> tuple[list, dict]:
        return [random(m, hidden), random(hidden), 1e-6, [weight(n, hidden) for n in sizes]], {}

    return Group("rms_norm_linear", f"{sizes} x {hidden}", arguments, rows)


def of_mlp(inner: int, hidden: int, rows: tuple[int, ...]) -> Group:
    def arguments(m: int) -> tuple[list, dict]:
        return [random(m, hidden), random(hidden), 1e-6, weight(inner, hidden), weight(inner, hidden)], {}

    return Group("rms_norm_swiglu", f"{inner}x{hidden}", arguments, rows)


def of_matmul(n: int, k: int, rows: tuple[int, ...]) -> Group:
    return Group("matmul", f"{k}x{n}", lambda m: ([random(m, k), weight(k, n)], {}), rows)


def of_bmm(batch: int, n: int, k: int, rows: tuple[int, ...]) -> Group:
    return Group("bmm", f"{batch}x{k}x{n}", lambda m: ([random(batch, m, k), random(batch, k, n)], {}), rows)


def of_groups(groups: int, n: int, k: int, rows: tuple[int, ...]) -> Group:
    def arguments(m: int) -> tuple[list, dict]:
        lists = ([random(m, k) for _ in range(groups)], [weight(n, k) for _ in range(groups)])
        return [*lists], {"transpose_b": True}

    return Group("group_gemm", f"{groups} of {n}x{k}", arguments, rows)


def of_attention(heads: int, kv_heads: int, dim: int, tokens: tuple[int, ...], cache: bool = False) -> Group:
    """A prompt; with ``cache`` one that goes into a cache with room for more."""

    def arguments(s: int) -> tuple[list, dict]:
        keys = s + 64 if cache else s
        length = {"kv_len": torch.full((1,), s, dtype=torch.int32, device="cuda")} if cache else {}
        return [random(1, heads, s, dim), *(random(1, kv_heads, keys, dim) for _ in range(2))], length

    return Group("fmha", f"{heads}/{kv_heads} x {dim}", arguments, tokens)


def of_latents(heads: int, tokens: tuple[int, ...]) -> Group:
    def arguments(s: int) -> tuple[list, dict]:
        return [*(random(1, heads, s, 128) for _ in range(3)), random(1, heads, s, 64), random(1, 1, s, 64), True], {}

    return Group("mla", f"{heads} heads", arguments, tokens)


def of_experts(
    experts: int, top_k: int, hidden: int, inner: int, rows: tuple[int, ...], oss: bool = False, shared: bool = False,
    gradients: bool = False,
) -> Group:  # fmt: skip
    """With ``oss`` in gpt-oss's layout and with its biases; with ``shared`` what all tokens' experts gave is added."""

    def arguments(m: int) -> tuple[list, dict]:
        w1 = random(experts, 2 * inner, hidden, scale=hidden**-0.5)
        w2 = random(experts, hidden, inner, scale=inner**-0.5)
        options = {}
        if oss:
            w1, w2 = w1.view(experts, hidden, 2 * inner), w2.view(experts, inner, hidden)
            options = {"b1": random(experts, 2 * inner), "b2": random(experts, hidden), "activation": "gpt_oss"}
            options |= {"interleaved": True, "transposed": True, "limit": 7.0}
        if shared:
            options["shared_output"] = random(m, hidden)
        ids = torch.rand(m, experts, device="cuda").topk(top_k).indices
        return [random(m, hidden), w1, w2, random(m, top_k).softmax(-1), ids], options

    return Group("fused_moe", f"{top_k} of {experts} x {hidden} x {inner}", arguments, rows, gradients)


ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
OF_EXPERTS = (1, 4, 16, 32, 64, 128, 256, 512, 2048)
IN_TRAINING = (16, 64, 128, 256, 512, 2048)
GROUPS = (
    *(of_linear(n, k, ROWS) for n, k in ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (3584, 1024))),
    *(of_linear(n, k, ROWS) for n, k in ((1024, 3584), (6144, 1024))),
    of_linear(128256, 4096, (1, 4, 16)),
    of_linear(4096, 4096, ROWS, bias=True),
    of_linear(1024, 3584, ROWS, bias=True),
    of_linear(4096, 4096, (64, 512), gradients=True),
    of_linear(3584, 1024, (64, 512), gradients=True),
    of_linear(3584, 1024, (64, 512), bias=True, gradients=True),
    of_add(4096, 4096, ROWS),
    of_projections(4096, (4096, 1024, 1024), ROWS),
    of_mlp(14336, 4096, ROWS),
    of_matmul(4096, 4096, ROWS),
    of_bmm(16, 512, 512, ROWS),
    of_groups(8, 1408, 2048, (1, 16, 64, 512)),
    *(of_attention(*sizes, (16, 64, 512, 4096)) for sizes in ((32, 8, 128), (8, 2, 256), (64, 8, 64))),
    of_attention(32, 8, 128, (16, 64, 512, 4096), cache=True),
    of_latents(16, (64, 512, 2048)),
    *(of_experts(64, 6, 2048, 1408, OF_EXPERTS, shared=shared) for shared in (False, True)),
    of_experts(128, 8, 2048, 768, OF_EXPERTS),
    of_experts(32, 4, 2880, 2880, OF_EXPERTS, oss=True),
    of_experts(64, 6, 2048, 1408, IN_TRAINING, gradients=True),
    of_experts(128, 8, 2048, 768, IN_TRAINING, gradients=True),
    of_experts(32, 4, 2880, 2880, IN_TRAINING, oss=True, gradients=True),
)


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = name
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def measured(group: Group, rows: int, name: str, timer: CudaTimer) -> Point:
    """Raises ArithmeticError if the results differ by more than the precision explains."""
    args, kwargs = group.arguments(rows)
    function = getattr(ops, group.op)
    if group.gradients:
        args = [a.requires_grad_(a.is_floating_point()) for a in args]

    def call(backend: str) -> torch.Tensor:
        out = function(*args, **kwargs, backend=backend)
        first = out[0] if isinstance(out, list | tuple) else out
        return torch.autograd.grad(first, [a for a in args if a.requires_grad], first)[1] if group.gradients else first

    with precision(name), slower.ignored(), torch.set_grad_enabled(group.gradients):
        kind = slower.kind_of(slower.describe(function.op.signature, tuple(args), kwargs), widths=group.op == "fmha")
        ours, theirs = call("cutile"), call("pytorch")
        error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        if not error <= TOLERANCE[name]:
            raise ArithmeticError(f"{group.op} {group.sizes}, {rows} rows: off by {error:.1e}")
        trials = [timer.trial(lambda _, b=b: call(b), lambda: None, 0) for b in ("cutile", "pytorch")]
        for trial in trials:
            timer.round(trial)
    return Point(group.op, kind, slower.rows_of(tuple(args), kwargs), *(statistics.median(t.samples) for t in trials))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", metavar="OP", help="only these; all if none is named")
    parser.add_argument("--write", action="store_true", help="into the file for this GPU")
    options = parser.parse_args()
    if unknown := set(options.ops) - {group.op for group in GROUPS}:
        parser.error(f"no {', '.join(sorted(unknown))}; there are {', '.join(sorted({group.op for group in GROUPS}))}")
    if not torch.cuda.is_available():
        parser.error("no NVIDIA GPU is visible, and there is nothing to measure without one")
    wanted = options.ops
    torch.manual_seed(0)
    timer, points = CudaTimer(SECONDS, 1), []
    for name in ("ieee", "tf32"):
        for group in GROUPS:
            if wanted and group.op not in wanted:
                continue
            found = [measured(group, rows, name, timer) for rows in group.rows]
            points += found
            times = (f"{p.rows}: {p.kernels * 1e6:.0f}/{p.pytorch * 1e6:.0f}" for p in found)
            print(f"{found[0].kind} {group.op} {group.sizes}, rows: us of the kernels/PyTorch", *times, flush=True)
            torch.cuda.empty_cache()
    table = from_rows(points)
    print(json.dumps(table, indent=1))
    if options.write:
        path = slower.file_of(torch.cuda.get_device_name())
        known = json.loads(path.read_text(encoding="utf-8"))
        known["from_rows"] = dict(sorted({**known.get("from_rows", {}), **table}.items()))
        path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""The gated norm behind Qwen3-Next's linear attention: 32 value heads of 128, one row each."""

import torch.nn.functional as F

from tilegym import ops
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import TOKENS
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench.spec import usual_peers
from tilegym.bench_cli import main

EPS = 1e-6
HEADS, DIM = 32, 128


def inputs(make, tokens, heads, dim):
    return {"x": make(tokens * heads, dim), "gate": make(tokens * heads, dim), "weight": make(dim)}


def ours(x, gate, weight):
    return ops.rms_norm_gated(x, gate, weight, EPS)


def formula(x, gate, weight):
    """As the model computes it: the gate in fp32."""
    normed = F.rms_norm(x, (x.shape[-1],), weight, EPS)
    return (normed * F.silu(gate if gate.dtype.itemsize == 8 else gate.float())).to(x.dtype)


def fla(x, gate, weight):
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(x, gate, weight, None, eps=EPS)


def forward(itemsize, tokens, heads, dim):
    rows = tokens * heads
    return Work(read=itemsize * (2 * rows + 1) * dim, written=itemsize * rows * dim)


def backward(itemsize, tokens, heads, dim):
    """Reads x, gate, dy and the weight, writes dx, dgate and dweight."""
    rows = tokens * heads
    return Work(read=itemsize * (3 * rows + 1) * dim, written=itemsize * (2 * rows + 1) * dim)


BENCHMARKS = [
    Benchmark(
        op="rms_norm_gated",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers=usual_peers(formula) | {"fla": Provider(fla, requires="fla", jit=True)},
        differentiable=("x", "gate", "weight"),
        forward=forward,
        backward=backward,
        quick_modes=(FORWARD, BACKWARD),
        host={"tokens": 1, "heads": HEADS, "dim": DIM},
        shapes=tuple(
            shape(f"Qwen3-Next, {t} token{'s' if t > 1 else ''}", "Qwen3-Next", tokens=t, heads=HEADS, dim=DIM)
            for t in TOKENS
        ),
        quick=(shape(tokens=8192, heads=HEADS, dim=DIM),),
        small=(shape(tokens=9, heads=4, dim=64),),
    )
]

if __name__ == "__main__":
    main(BENCHMARKS)

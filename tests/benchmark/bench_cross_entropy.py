"""Cross entropy of logits over a vocabulary.

Liger writes the gradient in its forward pass, as TileGym does of many long rows, which then reads the logits once: the
backward pass alone does not compare, and both need read and write no more than it.
"""

import torch.nn.functional as F

from tilegym import ops
from tilegym.bench.spec import BOTH
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench.spec import sweep
from tilegym.bench.spec import usual_peers
from tilegym.bench_cli import main


def targets(make, tokens, vocab):
    return (make(tokens).float().abs() * 1e5).long() % vocab


def inputs(make, tokens, vocab):
    return {"logits": make(tokens, vocab), "target": targets(make, tokens, vocab)}


def ours(logits, target):
    return ops.cross_entropy(logits, target)


def formula(logits, target):
    return F.cross_entropy(logits if logits.dtype.itemsize == 8 else logits.float(), target)


def liger(logits, target):
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy(logits, target)


def forward(itemsize, tokens, vocab):
    return Work(read=itemsize * tokens * vocab + 8 * tokens, written=4)


def backward(itemsize, tokens, vocab):
    """Reads the logits and the targets, writes the logits' gradient."""
    return Work(read=itemsize * tokens * vocab + 8 * tokens, written=itemsize * tokens * vocab)


BENCHMARKS = [
    Benchmark(
        op="cross_entropy",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers=usual_peers(formula, liger),
        differentiable=("logits",),
        activations=("logits",),
        forward=forward,
        backward=backward,
        both=backward,
        quick_modes=(FORWARD, BOTH),
        host={"tokens": 1, "vocab": 1024},
        shapes=sweep(lambda model, tokens: {"tokens": tokens, "vocab": model.vocab}, tokens=(1, 16, 512, 8192)),
        quick=(shape(tokens=8192, vocab=128256), shape(tokens=4096, vocab=128256)),
        small=(shape(tokens=64, vocab=1000), shape(tokens=7, vocab=5003)),
    ),
]

if __name__ == "__main__":
    main(BENCHMARKS)

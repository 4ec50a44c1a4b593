"""Cross entropy of hidden states through the output layer, without all of the logits."""

import torch.nn.functional as F

from tilegym import ops
from tilegym.bench.spec import BOTH
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench.spec import sweep
from tilegym.bench.spec import usual_peers
from tilegym.bench_cli import main


def inputs(make, tokens, hidden, vocab):
    return {
        "hidden": make(tokens, hidden),
        "weight": make(vocab, hidden) * hidden**-0.5,
        "target": (make(tokens).float().abs() * 1e5).long() % vocab,
    }


def ours(hidden, weight, target):
    return ops.fused_linear_cross_entropy(hidden, weight, target)


def formula(hidden, weight, target):
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits if logits.dtype.itemsize == 8 else logits.float(), target)


def liger(hidden, weight, target):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(hidden, weight, target)


def forward(itemsize, tokens, hidden, vocab):
    read = itemsize * (tokens + vocab) * hidden + 8 * tokens
    return Work(read=read, written=4, flops=2 * tokens * hidden * vocab)


def backward(itemsize, tokens, hidden, vocab):
    """Reads what the forward pass reads, writes the gradients of hidden states and weight."""
    size = itemsize * (tokens + vocab) * hidden
    return Work(read=size + 8 * tokens, written=size, flops=4 * tokens * hidden * vocab)


BENCHMARKS = [
    Benchmark(
        op="fused_linear_cross_entropy",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers=usual_peers(formula, liger),
        differentiable=("hidden", "weight"),
        forward=forward,
        backward=backward,
        quick_modes=(BOTH,),  # the gradients are computed in the forward pass: either alone says nothing
        host={"tokens": 1, "hidden": 64, "vocab": 1024},
        shapes=sweep(
            lambda model, tokens: {"tokens": tokens, "hidden": model.hidden, "vocab": model.vocab}, tokens=(512, 8192)
        ),
        quick=(shape(tokens=8192, hidden=4096, vocab=128256),),
        small=(shape(tokens=64, hidden=64, vocab=1000), shape(tokens=7, hidden=40, vocab=503)),
    ),
]

if __name__ == "__main__":
    main(BENCHMARKS)

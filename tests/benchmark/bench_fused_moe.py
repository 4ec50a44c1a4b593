"""Experts from one token to a long prompt, with the experts of each token drawn at random; and their routing."""

import functools

import torch
import torch.nn.functional as F

from tilegym import ops
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import PYTORCH
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Shape
from tilegym.bench.spec import Work
from tilegym.bench.spec import plural
from tilegym.bench.spec import shape
from tilegym.bench.spec import usual_peers
from tilegym.bench_cli import main
from tilegym.ops.pytorch.moe_experts import activate
from tilegym.ops.pytorch.moe_experts import fused_moe as loop_over_experts

TOKENS = (1, 16, 64, 512, 8192)
# experts, experts a token, hidden size, the experts' intermediate size, gpt-oss's layout
MODELS = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768, False),
    "DeepSeek-V2-Lite": (64, 6, 2048, 1408, False),
    "gpt-oss-20b": (32, 4, 2880, 2880, True),
    "Mixtral-8x7B": (8, 2, 4096, 14336, False),
}


@functools.cache
def chosen(tokens, experts, top_k):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(tokens, experts, generator=generator).topk(top_k).indices


def experts_of_tokens(make, tokens, experts, top_k, hidden, inner, oss):
    x = make(tokens, hidden)
    wide, narrow = make(experts, 2 * inner * hidden) * hidden**-0.5, make(experts, hidden * inner) * inner**-0.5
    inputs = {"x": x, "w1": wide.view(experts, 2 * inner, hidden), "w2": narrow.view(experts, hidden, inner)}
    inputs |= {"weights": make(tokens, top_k).softmax(-1), "ids": chosen(tokens, experts, top_k).to(x.device)}
    if oss:
        inputs["w1"], inputs["w2"] = wide.view(experts, hidden, 2 * inner), narrow.view(experts, inner, hidden)
        inputs |= {"b1": make(experts, 2 * inner), "b2": make(experts, hidden)}
    return inputs


def options(b1):
    oss = b1 is not None
    kind = "gpt_oss" if oss else "silu"
    return {"activation": kind, "interleaved": oss, "transposed": oss, "limit": 7.0 if oss else None}


def ours(x, w1, w2, weights, ids, b1=None, b2=None):
    return ops.fused_moe(x, w1, w2, weights, ids, b1=b1, b2=b2, **options(b1))


def formula(x, w1, w2, weights, ids, b1=None, b2=None):
    return loop_over_experts(x, w1, w2, weights, ids, b1=b1, b2=b2, **options(b1))


class Experts:
    """What transformers' function reads of a model's experts."""

    has_gate, has_post_expert_norm, _is_expert_parallel = True, False, False

    def __init__(self, w1, w2, b1, b2):
        self.num_experts = w1.shape[0]
        self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias = w1, w2, b1, b2
        self.has_bias = self.is_transposed = b1 is not None
        self.is_concatenated = b1 is None

    def _apply_gate(self, both):
        if self.is_concatenated:
            first, second = both.chunk(2, dim=-1)
            return F.silu(first) * second
        return activate(both[..., ::2], both[..., 1::2], "gpt_oss", 1.702, 7.0)


def grouped_mm(x, w1, w2, weights, ids, b1=None, b2=None):
    """What transformers runs by default."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    return grouped_mm_experts_forward(Experts(w1, w2, b1, b2), x, ids, weights)


def forward(itemsize, tokens, experts, top_k, hidden, inner, oss):
    """Reads the experts that are chosen, and no others."""
    touched = chosen(tokens, experts, top_k).unique().numel()
    an_expert = 3 * hidden * inner + (2 * inner + hidden if oss else 0)
    read = itemsize * (tokens * hidden + touched * an_expert + tokens * top_k) + 8 * tokens * top_k
    return Work(read=read, written=itemsize * tokens * hidden, flops=6 * tokens * top_k * hidden * inner)


def backward(itemsize, tokens, experts, top_k, hidden, inner, oss):
    """Twice the operations; reads the upstream gradient too, writes four gradients."""
    once = forward(itemsize, tokens, experts, top_k, hidden, inner, oss)
    written = itemsize * (tokens * hidden + experts * 3 * hidden * inner + tokens * top_k)
    return Work(read=once.read + itemsize * tokens * hidden, written=written, flops=2 * once.flops)


def dims(tokens, experts, top_k, hidden, inner, oss=False):
    names = ("tokens", "experts", "top_k", "hidden", "inner", "oss")
    return dict(zip(names, (tokens, experts, top_k, hidden, inner, oss), strict=True))


def at(model, tokens):
    return Shape(plural(model, tokens), dims(tokens, *MODELS[model]), model)


TOP_K = 8


def logits(make, tokens, experts):
    return {"logits": make(tokens, experts)}


def ours_weights(logits):
    return ops.moe_topk_routing(logits, TOP_K, renormalize=True)[0]


def formula_weights(logits):
    """As the routers of transformers write it. Which of two equal scores it takes is open; the weights are not."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    weights = F.softmax(logits, dim=-1, dtype=wide).topk(TOP_K, dim=-1).values
    return weights / weights.sum(-1, keepdim=True)


def routing_forward(itemsize, tokens, experts):
    return Work(read=itemsize * tokens * experts, written=4 * tokens * TOP_K)


def routing_shape(tokens):
    return shape(plural("Qwen3-30B-A3B", tokens), "Qwen3-30B-A3B", tokens=tokens, experts=128)


BENCHMARKS = [
    Benchmark(
        op="fused_moe",
        inputs=experts_of_tokens,
        ours=ours,
        oracle=formula,
        peers={
            "grouped_mm": Provider(grouped_mm, requires="transformers"),
            PYTORCH: Provider(formula),
        },
        baseline="grouped_mm",
        differentiable=("x", "w1", "w2", "weights"),
        forward=forward,
        backward=backward,
        reads_all=False,
        quick_modes=(FORWARD, BACKWARD),
        host=dims(1, 8, 2, 64, 64),
        shapes=tuple(at(model, tokens) for model in MODELS for tokens in TOKENS),
        quick=(
            at("Qwen3-30B-A3B", 16),
            at("Qwen3-30B-A3B", 8192),
            at("gpt-oss-20b", 16),
            at("DeepSeek-V2-Lite", 16),
            at("Qwen3-30B-A3B", 1),
            at("Qwen3-30B-A3B", 64),
            at("gpt-oss-20b", 8192),
            at("DeepSeek-V2-Lite", 8192),
        ),
        small=(shape(**dims(2, 8, 2, 64, 32)), shape(**dims(20, 4, 2, 64, 32, True))),
    ),
    Benchmark(
        op="moe_topk_routing",
        inputs=logits,
        ours=ours_weights,
        oracle=formula_weights,
        peers=usual_peers(formula_weights),
        forward=routing_forward,
        host={"tokens": 1, "experts": 128},
        shapes=tuple(map(routing_shape, TOKENS)),
        quick=(routing_shape(8192),),
        small=(shape(tokens=32, experts=24),),
    ),
]

if __name__ == "__main__":
    main(BENCHMARKS)

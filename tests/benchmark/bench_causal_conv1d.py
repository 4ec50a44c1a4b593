"""The short convolution before linear attention, over q, k and v together: Qwen3.5-0.8B and Qwen3-Next-80B."""

from tilegym import ops
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import PYTORCH
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench_cli import main
from tilegym.ops.pytorch import causal_conv1d as pytorch

TAPS = 4
# Channels of both: 16 key heads, twice, and 16 or 32 value heads of 128.
MODELS = (("Qwen3.5-0.8B", 6144), ("Qwen3-Next-80B", 8192))


def inputs(make, batch, channels, tokens):
    return {"x": make(batch, tokens, channels), "weight": make(channels, TAPS), "bias": make(channels)}


# Transposed before and after, as the models do: so the gradient that comes back has the channels of a token side by
# side too.
def ours(x, weight, bias):
    return ops.causal_conv1d_fn(x.mT, weight, bias, "silu").mT


def formula(x, weight, bias):
    return pytorch.causal_conv1d_fn(x.mT, weight, bias, "silu").mT


def dao(x, weight, bias):
    from causal_conv1d import causal_conv1d_fn

    return causal_conv1d_fn(x.mT, weight, bias, activation="silu").mT


def fla(x, weight, bias):
    from fla.modules.causal_conv1d import causal_conv1d

    return causal_conv1d(x, weight, bias, activation="silu")[0]


def forward(itemsize, batch, channels, tokens):
    size = itemsize * batch * channels * tokens
    return Work(read=size + itemsize * channels * (TAPS + 1), written=size)


def backward(itemsize, batch, channels, tokens):
    """Reads x, dy and the filters, writes dx and the filters' gradients."""
    size, filters = itemsize * batch * channels * tokens, itemsize * channels * (TAPS + 1)
    return Work(read=2 * size + filters, written=size + filters)


def update_inputs(make, batch, channels):
    x = make(batch, channels, 1)
    return {"x": x, "state": make(batch, channels, TAPS), "weight": make(channels, TAPS)}


def update(x, state, weight):
    return ops.causal_conv1d_update(x, state, weight, None, "silu"), state


def update_formula(x, state, weight):
    return pytorch.causal_conv1d_update(x, state, weight, None, "silu"), state


def dao_update(x, state, weight):
    from causal_conv1d import causal_conv1d_update

    return causal_conv1d_update(x, state, weight, None, "silu"), state


def update_work(itemsize, batch, channels):
    size = itemsize * batch * channels
    return Work(read=size * (1 + TAPS) + itemsize * channels * TAPS, written=size * (1 + TAPS))


def peers(formula, dao):
    return {
        PYTORCH: Provider(formula),
        "torch.compile": Provider(formula, compile=True),
        "causal-conv1d": Provider(dao, requires="causal_conv1d", jit=True),
    }


def prompt(tokens, batch=1, channels=8192, model=""):
    return shape(f"B{batch} C{channels} T{tokens}", model, batch=batch, channels=channels, tokens=tokens)


def step(batch, channels=8192, model=""):
    return shape(f"B{batch} C{channels}", model, batch=batch, channels=channels)


BENCHMARKS = [
    Benchmark(
        op="causal_conv1d_fn",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        baseline=PYTORCH,
        peers=peers(formula, dao) | {"fla": Provider(fla, requires="fla", jit=True)},
        differentiable=("x", "weight", "bias"),
        forward=forward,
        backward=backward,
        quick_modes=(FORWARD, BACKWARD),
        host={"batch": 1, "channels": 512, "tokens": 16},
        shapes=tuple(
            prompt(tokens, batch, channels, model)
            for model, channels in MODELS
            for batch, tokens in ((1, 16), (1, 512), (1, 8192), (8, 2048))
        ),
        quick=(prompt(8192), prompt(512)),
        small=(prompt(40, 1, 64), prompt(17, 2, 30)),
    ),
    Benchmark(
        op="causal_conv1d_update",
        inputs=update_inputs,
        ours=update,
        oracle=update_formula,
        baseline=PYTORCH,
        peers=peers(update_formula, dao_update),
        forward=update_work,
        host={"batch": 1, "channels": 8192},
        shapes=tuple(step(batch, channels, model) for model, channels in MODELS for batch in (1, 16, 64, 256)),
        quick=(step(1), step(64)),
        small=(step(1, 64), step(3, 30)),
    ),
]

if __name__ == "__main__":
    main(BENCHMARKS)

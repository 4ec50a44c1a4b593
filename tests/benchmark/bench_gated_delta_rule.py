"""The gated delta rule at the shapes of Qwen3.5-0.8B and Qwen3-Next-80B: a decoding step, and prompts."""

from tilegym import ops
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import PYTORCH
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Work
from tilegym.bench.spec import shape
from tilegym.bench_cli import main
from tilegym.ops.pytorch import gated_delta_rule as pytorch
from tilegym.ops.pytorch.gated_delta_step import gated_delta_step

DIM, CHUNK, FP32, TAPS = 128, 64, 4, 4
MODELS = (("Qwen3.5-0.8B", 16, 16), ("Qwen3-Next-80B", 16, 32))  # key and value heads


def inputs(make, batch, tokens, key_heads, heads):
    return {
        "q": make(batch, tokens, key_heads, DIM),
        "k": make(batch, tokens, key_heads, DIM),
        "v": make(batch, tokens, heads, DIM),
        "g": -0.1 * make(batch, tokens, heads).float().exp(),
        "beta": make(batch, tokens, heads).sigmoid(),
    }


def step_inputs(make, batch, tokens, key_heads, heads):
    state = make(batch, heads, DIM, DIM).float()
    return inputs(make, batch, tokens, key_heads, heads) | {"state": state}


def step(q, k, v, g, beta, state):
    return ops.recurrent_gated_delta_rule(q, k, v, g, beta, state, True, True)


def step_formula(q, k, v, g, beta, state):
    return pytorch.recurrent_gated_delta_rule(q, k, v, g, beta, state, True, True)


def fla_step(q, k, v, g, beta, state):
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, initial_state=state, **options)


def layer_inputs(make, batch, key_heads, heads):
    channels = (2 * key_heads + heads) * DIM
    return {
        "qkv": make(batch, 1, channels),
        "z": make(batch, 1, heads * DIM),
        "b": make(batch, 1, heads),
        "a": make(batch, 1, heads),
        "conv_state": make(batch, channels, TAPS),
        "state": make(batch, heads, DIM, DIM).float(),
        "conv_weight": make(channels, TAPS),
        "a_log": make(heads),
        "dt_bias": make(heads),
        "norm": make(DIM),
    }


def layer_step(qkv, z, b, a, conv_state, state, conv_weight, a_log, dt_bias, norm):
    fixed = (conv_weight, None, a_log, dt_bias, norm, 1e-6)
    return ops.gated_delta_step(qkv, z, b, a, conv_state, state, *fixed), conv_state, state


def layer_formula(qkv, z, b, a, conv_state, state, conv_weight, a_log, dt_bias, norm):
    fixed = (conv_weight, None, a_log, dt_bias, norm, 1e-6)
    return gated_delta_step(qkv, z, b, a, conv_state, state, *fixed), conv_state, state


def layer_work(itemsize, batch, key_heads, heads):
    channels = (2 * key_heads + heads) * DIM
    states = batch * (FP32 * heads * DIM * DIM + itemsize * channels * TAPS)
    filters = itemsize * (channels * TAPS + 2 * heads + DIM)
    rows = itemsize * batch * (channels + heads * (DIM + 2))
    return Work(read=states + filters + rows, written=states + itemsize * batch * heads * DIM)


def chunked(q, k, v, g, beta):
    return ops.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]


def formula(q, k, v, g, beta):
    return pytorch.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0]


def fla(q, k, v, g, beta):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def sizes(itemsize, batch, tokens, key_heads, heads):
    """Bytes of q and k, of v, of the gates, and of the state."""
    rows = batch * tokens
    keys, values = 2 * itemsize * rows * key_heads * DIM, itemsize * rows * heads * DIM
    return keys, values, rows * heads * (itemsize + FP32), FP32 * batch * heads * DIM * DIM


def step_work(itemsize, batch, tokens, key_heads, heads):
    keys, values, gates, state = sizes(itemsize, batch, tokens, key_heads, heads)
    return Work(read=keys + values + gates + state, written=values + state)


def products(batch, tokens, heads):
    """Three with the state, and in a chunk k k^T, q k^T and the two with what they give."""
    return 2 * batch * tokens * heads * (3 * DIM * DIM + 4 * CHUNK * DIM)


def forward(itemsize, batch, tokens, key_heads, heads):
    keys, values, gates, _ = sizes(itemsize, batch, tokens, key_heads, heads)
    return Work(read=keys + values + gates, written=values, flops=products(batch, tokens, heads))


def backward(itemsize, batch, tokens, key_heads, heads):
    """Reads the inputs and dout, writes their gradients; two products for each of the forward pass."""
    keys, values, gates, _ = sizes(itemsize, batch, tokens, key_heads, heads)
    written = keys + values + gates
    return Work(read=written + values, written=written, flops=2 * products(batch, tokens, heads))


def of(batch, tokens, key_heads=16, heads=32, model=""):
    name = f"B{batch} T{tokens} H{key_heads}/{heads} D{DIM}"
    return shape(name, model, batch=batch, tokens=tokens, key_heads=key_heads, heads=heads)


def of_layer(batch, key_heads=16, heads=32, model=""):
    return shape(f"B{batch} H{key_heads}/{heads} D{DIM}", model, batch=batch, key_heads=key_heads, heads=heads)


BENCHMARKS = [
    Benchmark(
        op="gated_delta_step",
        inputs=layer_inputs,
        ours=layer_step,
        oracle=layer_formula,
        baseline=PYTORCH,
        peers={PYTORCH: Provider(layer_formula), "torch.compile": Provider(layer_formula, compile=True)},
        forward=layer_work,
        host={"batch": 1, "key_heads": 2, "heads": 4},
        shapes=tuple(of_layer(batch, *heads, model) for model, *heads in MODELS for batch in (1, 16, 64)),
        quick=(of_layer(1), of_layer(64)),
        small=(of_layer(1, 1, 2), of_layer(2, 1, 1)),
    ),
    Benchmark(
        op="recurrent_gated_delta_rule",
        inputs=step_inputs,
        ours=step,
        oracle=step_formula,
        baseline=PYTORCH,
        peers={PYTORCH: Provider(step_formula), "fla": Provider(fla_step, requires="fla", jit=True)},
        forward=step_work,
        host={"batch": 1, "tokens": 1, "key_heads": 2, "heads": 4},
        shapes=tuple(
            of(batch, tokens, *heads, model)
            for model, *heads in MODELS
            for batch, tokens in ((1, 1), (16, 1), (64, 1), (256, 1), (1, 16))
        ),
        quick=(of(1, 1), of(64, 1)),
        small=(of(1, 1, 1, 2), of(2, 3, 1, 1)),
    ),
    Benchmark(
        op="chunk_gated_delta_rule",
        inputs=inputs,
        ours=chunked,
        oracle=formula,
        baseline=PYTORCH,
        peers={PYTORCH: Provider(formula), "fla": Provider(fla, requires="fla", jit=True)},
        differentiable=("q", "k", "v", "g", "beta"),
        forward=forward,
        backward=backward,
        quick_modes=(FORWARD, BACKWARD),
        host={"batch": 1, "tokens": 64, "key_heads": 1, "heads": 1},
        shapes=tuple(
            of(batch, tokens, *heads, model)
            for model, *heads in MODELS
            for batch, tokens in ((1, 16), (1, 512), (1, 8192), (8, 2048))
        ),
        quick=(of(1, 8192), of(1, 512), of(1, 8192, 16, 16)),
        small=(of(1, 70, 1, 1),),
    ),
]

if __name__ == "__main__":
    main(BENCHMARKS)

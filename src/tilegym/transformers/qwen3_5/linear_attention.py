"""The linear attention of Qwen3.5 and Qwen3-Next on TileGym's ops, and the checks that transformers computes the same.

The layers call functions of their module: a convolution and a delta rule for prompts, one of each for a single token.
"""

import dis
import functools
import inspect
import types
from collections.abc import Callable

import torch
from torch import Tensor

from tilegym import ops
from tilegym.transformers.forwards import reproducible
from tilegym.transformers.forwards import unwrapped
from tilegym.transformers.forwards import with_globals

# The functions, by their names in the module, that are a part; and under which name older versions of transformers keep
# them in each layer.
FUNCTIONS = {
    "causal_conv1d": ("causal_conv1d_fn", "causal_conv1d_update"),
    "gated_delta_rule": ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
}
ATTRIBUTES = {name: name.removeprefix("torch_") for names in FUNCTIONS.values() for name in names}
ACTIVATIONS = ("silu", "swish")  # of the convolution


def functions(part: str, backend: str | None) -> dict[str, Callable]:
    """What stands in for the functions of a part."""
    make = convolution if part == "causal_conv1d" else delta_rule
    return {name: make(name, backend) for name in FUNCTIONS[part]}


def linear_attention_forward(original: Callable, parts: dict[str, str | None]) -> Callable:
    """``original``, the forward of a layer, with the functions of some parts replaced by TileGym's."""
    replaced = {name: function for part in parts for name, function in functions(part, parts[part]).items()}
    return with_globals(original, tuple(replaced.items()))


def calls(original: Callable, part: str) -> bool:
    """Whether the forward of a layer calls the functions of a part as globals of its module."""
    used = {i.argval for i in dis.get_instructions(unwrapped(original)) if i.opname == "LOAD_GLOBAL"}
    return used >= set(FUNCTIONS[part])


def misfit(modeling: types.ModuleType, part: str) -> str:
    """Why the functions of a part cannot be replaced; empty if they compute what TileGym's compute."""
    for name in FUNCTIONS[part]:
        function = getattr(modeling, name, None) or getattr(modeling, f"torch_{name}", None)
        if function is None:
            continue  # the layers do without it
        fits = computes_convolution if part == "causal_conv1d" else computes_delta_rule
        if not fits(function, name):
            return f"in this transformers {name} computes something else"
    return ""


def _conv1d_fn(
    hidden_states: Tensor | None = None,
    weight: Tensor = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    x: Tensor | None = None,
    *,
    backend: str | None,
    **kwargs,
) -> Tensor:
    hidden_states = x if hidden_states is None else hidden_states
    out = ops.causal_conv1d_fn(hidden_states.to(weight.dtype), weight, bias, activation, seq_idx, backend=backend)
    return out.to(hidden_states.dtype)


def _conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    backend: str | None,
) -> Tensor:
    out = ops.causal_conv1d_update(
        hidden_states.to(weight.dtype), conv_state, weight, bias, activation, backend=backend
    )
    return out.to(hidden_states.dtype)


@reproducible
def convolution(name: str, backend: str | None) -> Callable:
    """Stands in for ``causal_conv1d_fn`` or ``causal_conv1d_update``; computes in the weight's dtype, as they do."""
    return functools.partial(_conv1d_fn if name == "causal_conv1d_fn" else _conv1d_update, backend=backend)


def _gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    op: Callable,
    backend: str | None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    return op(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        backend=backend,
    )


@reproducible
def delta_rule(name: str, backend: str | None) -> Callable:
    """Stands in for ``torch_chunk_gated_delta_rule`` or ``torch_recurrent_gated_delta_rule``."""
    return functools.partial(_gated_delta_rule, op=getattr(ops, ATTRIBUTES[name]), backend=backend)


def _numbers(*shape: int, seed: int = 1) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.sin(torch.arange(1.0, count + 1, device="cpu") * seed).view(shape)


def _gives(expected: list[Tensor], run: Callable[[], list[Tensor]]) -> bool:
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            got = run()
    except Exception:  # whatever it does with the arguments, it is not the formula
        return False
    return all(torch.allclose(g, e, rtol=1e-4, atol=1e-5) for g, e in zip(got, expected, strict=True))


def computes_convolution(function: Callable, name: str) -> bool:
    """Whether transformers' ``function`` computes what TileGym's function ``name`` computes."""
    function, x, weight = inspect.unwrap(function), _numbers(2, 6, 5), _numbers(6, 4, seed=2)

    def run(convolve: Callable) -> list[Tensor]:
        state = _numbers(2, 6, 4, seed=3)
        if name == "causal_conv1d_fn":
            return [convolve(x, weight, None, activation=a) for a in (None, "silu")]
        return [convolve(x[..., :1], state, weight, None, "silu"), state]

    return _gives(run(convolution(name, "pytorch")), lambda: run(function))


def computes_delta_rule(function: Callable, name: str) -> bool:
    """Whether transformers' ``function`` computes what TileGym's function ``name`` computes, state included.

    With as many key heads as value heads: older versions of transformers repeat heads before the call.
    """
    function, tokens = inspect.unwrap(function), 1 if "recurrent" in name else 70
    query, key, value = (_numbers(2, tokens, 3, dim, seed=seed) for seed, dim in ((1, 8), (2, 8), (3, 6)))
    g, beta = -_numbers(2, tokens, 3, seed=4).abs(), _numbers(2, tokens, 3, seed=5).sigmoid()
    state = _numbers(2, 3, 8, 6, seed=6)

    def run(rule: Callable) -> list[Tensor]:
        results = []
        for normalize in (False, True):
            results += rule(
                query,
                key,
                value,
                g=g,
                beta=beta,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=normalize,
            )
        return results

    return _gives(run(delta_rule(name, "pytorch")), lambda: run(function))

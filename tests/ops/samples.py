"""A small call of every op, from which ``test_every_op.py`` builds what it checks of all of them.

``SAMPLES["op"] = lambda make: (args, kwargs)``: ``make(*shape)`` gives normal random numbers whose gradient is tested,
``make(*shape, grad=False)`` those in which the op is not differentiable, ``make.integers(high, *shape)`` integers below
``high``, and ``make.tokens`` is the length that varies from call to call, down to 0. Tensors may be changed further
(``make(8).abs()``) and may be in lists. An op without a gradient stands in ``NOT_DIFFERENTIABLE`` besides. Sizes are
small, for the interpreter, and other than ``make.tokens`` (3 to 9) and 1, so that compiled code can tell them apart.
"""

from collections.abc import Callable
from typing import Any

import torch
from common import device


class Make:
    """Makes the tensors of a sample with ``tokens`` tokens, the same ones for the same seed."""

    def __init__(self, tokens: int = 6, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.tokens = tokens
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, grad: bool = True, dtype: torch.dtype | None = None) -> torch.Tensor:
        numbers = torch.randn(shape, generator=self._generator)
        return numbers.to(device(), dtype or self.dtype).requires_grad_(grad)

    def integers(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(high, shape, generator=self._generator).to(device(), dtype)


def _rope(make: Make) -> tuple:
    angles = make(1, make.tokens, 8, grad=False).repeat(1, 1, 2)
    q, k = make(2, 4, make.tokens, 24), make(2, 2, make.tokens, 24)
    return (q, k, angles.cos(), angles.sin()), {"partial_rotary_factor": 16 / 24}


def _mla(make: Make) -> tuple:
    q, k, v = make(2, 4, make.tokens, 24), make(2, 2, 13, 24), make(2, 2, 13, 16)
    return (q, k, v, make(2, 4, make.tokens, 40), make(2, 1, 13, 40)), {"is_causal": False}


def _mla_decoding(make: Make) -> tuple:
    queries = (make(2, 20, 40), make(2, 20, 24))
    return (*queries, make(2, make.tokens, 40), make(2, make.tokens, 24), 0.2), {}


def _splitk_reduce(make: Make) -> tuple:
    partial = make(make.tokens, 2, 3, 16, dtype=torch.float32)
    return (partial, make(make.tokens, 2, 3, dtype=torch.float32), make.dtype), {}


def _fused_moe(make: Make) -> tuple:
    biases = {"b1": make(12, 40), "b2": make(12, 24)}
    chosen = make(make.tokens, 2), make.integers(12, make.tokens, 2)
    return (make(make.tokens, 24), make(12, 40, 24), make(12, 24, 20), *chosen), biases


def _fmha_varlen(make: Make) -> tuple:
    """Of three sequences, the second without queries."""
    q, k, v = make(make.tokens, 4, 16), make(13, 2, 16), make(13, 2, 24)
    starts_q, starts_k = (0, make.tokens // 3, make.tokens // 3, make.tokens), (0, 4, 6, 13)
    starts = (torch.tensor(numbers, dtype=torch.int32, device=device()) for numbers in (starts_q, starts_k))
    return (q, k, v, *starts), {}


def _group_gemm(make: Make) -> tuple:
    return ([make(make.tokens, 24), make(12, 20)], [make(24, 20), make(20, 36)]), {}


def _ragged_group_gemm(make: Make) -> tuple:
    bounds = make.integers(make.tokens + 1, 12).sort().values
    return (make(make.tokens, 24), make(11, 20, 24), bounds), {"bias": make(11, 20)}


def _delta_rule(make: Make) -> tuple:
    q, k = make(2, make.tokens, 2, 16), make(2, make.tokens, 2, 16)
    gates = make(2, make.tokens, 4), make(2, make.tokens, 4)
    options = {"initial_state": make(2, 4, 16, 24), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return (q, k, make(2, make.tokens, 4, 24), -gates[0].detach().abs().requires_grad_(), gates[1]), options


Sample = Callable[[Make], tuple[tuple, dict[str, Any]]]

SAMPLES: dict[str, Sample] = {
    "apply_rope_base": _rope,
    "argmax": lambda make: ((make(make.tokens, 40),), {}),
    "attention_sink": lambda make: (
        (make(2, make.tokens, 2, 2, 16), make(2, 13, 2, 16), make(2, 13, 2, 16), make(4)), {"sliding_window": 5}
    ),
    "attention_sink_decode": lambda make: (
        (make(2, 1, 2, 2, 16), make(2, make.tokens, 2, 16), make(2, make.tokens, 2, 16), make(4)), {}
    ),
    "bmm": lambda make: ((make(2, make.tokens, 24), make(2, 24, 16)), {}),
    "causal_conv1d_fn": lambda make: ((make(2, 24, make.tokens), make(24, 4), make(24), "silu"), {}),
    "chunk_gated_delta_rule": _delta_rule,
    "cross_entropy": lambda make: (
        (make(make.tokens, 70), make.integers(70, make.tokens)), {"reduction": "sum", "softcap": 3.0, "z_loss": 0.1}
    ),
    "dropout": lambda make: ((make(make.tokens, 40), 1234), {}),
    "dual_rms_norm": lambda make: (
        (make(make.tokens, 4, 24), make(make.tokens, 2, 24), make(24), make(24), 1e-6), {"offset": 1.0}
    ),
    "fmha": lambda make: ((make(2, 4, make.tokens, 16), make(2, 2, 13, 16), make(2, 2, 13, 16)), {"is_causal": False}),
    "fmha_decode": lambda make: (
        tuple(make(*shape) for shape in ((2, 4, 1, 16), (2, 2, make.tokens, 16), (2, 2, make.tokens, 16))), {}
    ),
    "fmha_varlen": _fmha_varlen,
    "fused_add_rms_norm": lambda make: ((make(make.tokens, 24), make(make.tokens, 24), make(24), 1e-6), {}),
    "fused_linear_cross_entropy": lambda make: (
        (make(make.tokens, 24), make(70, 24), make.integers(70, make.tokens), make(70)), {"reduction": "sum"}
    ),
    "fused_moe": _fused_moe,
    "gemma_attention": lambda make: (
        (make(2, 4, make.tokens, 16), make(2, 2, 13, 16), make(2, 2, 13, 16)), {"soft_cap": 2.0, "window_size": 5}
    ),
    "gemma_attention_decode": lambda make: (
        tuple(make(*shape) for shape in ((2, 4, 1, 16), (2, 2, make.tokens, 16), (2, 2, make.tokens, 16))),
        {"soft_cap": 2.0},
    ),
    "geglu": lambda make: ((make(make.tokens, 40), make(make.tokens, 40)), {}),
    "gelu": lambda make: ((make(make.tokens, 40),), {}),
    "group_gemm": _group_gemm,
    "group_norm": lambda make: ((make(make.tokens, 12, 15), 3, make(12), make(12)), {}),
    "layer_norm": lambda make: ((make(make.tokens, 24), 24, make(24), make(24)), {}),
    "linear_add": lambda make: ((make(make.tokens, 24), make(20, 24), make(make.tokens, 20), make(20)), {}),
    "linear": lambda make: ((make(make.tokens, 24), make(20, 24), make(20)), {}),
    "matmul": lambda make: ((make(make.tokens, 24), make(24, 16)), {}),
    "mla": _mla,
    "mla_decoding": _mla_decoding,
    "mla_decoding_split_kv": _mla_decoding,
    "moe_align_block_size": lambda make: ((make.integers(5, make.tokens, 2), 16, 5), {}),
    "moe_topk_routing": lambda make: ((make(make.tokens, 24), 3), {"renormalize": True}),
    "quantized_linear": lambda make: (
        (make(make.tokens, 48), make.integers(255, 24, 48, dtype=torch.int16).sub(127).to(torch.int8), make(24) / 40),
        {"bias": make(24), "residual": make(make.tokens, 24)},
    ),
    "ragged_group_gemm": _ragged_group_gemm,
    "recurrent_gated_delta_rule": _delta_rule,
    "relu": lambda make: ((make(make.tokens, 40),), {}),
    "rms_norm": lambda make: ((make(make.tokens, 24), 24, make(24), 1e-6), {"bias": make(24)}),
    "rms_norm_add": lambda make: ((make(make.tokens, 24), make(24), 1e-6, make(make.tokens, 24)), {"offset": 1.0}),
    "rms_norm_linear": lambda make: (
        (make(make.tokens, 24), make(24), 1e-6, [make(20, 24), make(12, 24)], [make(20), make(12)]), {}
    ),
    "rms_norm_swiglu": lambda make: ((make(make.tokens, 24), make(24), 1e-6, make(20, 24), make(20, 24)), {}),
    "rms_norm_gated": lambda make: ((make(make.tokens, 24), make(make.tokens, 24), make(24), 1e-6), {"group_size": 12}),
    "sigmoid_mul": lambda make: ((make(make.tokens, 40), make(make.tokens, 1)), {}),
    "silu_and_mul": lambda make: ((make(make.tokens, 40),), {}),
    "softmax": lambda make: ((make(make.tokens, 40),), {}),
    "splitk_reduce": _splitk_reduce,
    "swiglu": lambda make: ((make(make.tokens, 40), make(make.tokens, 40)), {}),
}  # fmt: skip

# Elementwise ops and those of rows, which take floating-point numbers only.
ROWWISE = (
    "apply_rope_base",
    "cross_entropy",
    "dual_rms_norm",
    "fused_add_rms_norm",
    "fused_linear_cross_entropy",
    "geglu",
    "gelu",
    "group_norm",
    "layer_norm",
    "relu",
    "rms_norm",
    "rms_norm_add",
    "rms_norm_gated",
    "sigmoid_mul",
    "silu_and_mul",
    "softmax",
    "swiglu",
)

NOT_DIFFERENTIABLE = {
    "argmax",
    "attention_sink_decode",
    "fmha_decode",
    "fmha_varlen",
    "gemma_attention_decode",
    "mla_decoding",
    "mla_decoding_split_kv",
    "moe_align_block_size",
    "quantized_linear",
    "splitk_reduce",
}

TWICE_DIFFERENTIABLE = {"bmm", "linear", "linear_add", "matmul"}

# Ops that change what they are given from run to run; their own tests see to them.
WITHOUT_SAMPLE = {
    "causal_conv1d_update",
    "fmha_paged_decode",
    "gated_delta_step",
    "rope_and_cache",
    "rope_fmha_decode",
}

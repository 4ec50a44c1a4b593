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


def _splitk_reduce(make: Make) -> tuple:
    partial = make(make.tokens, 2, 3, 16, dtype=torch.float32)
    return (partial, make(make.tokens, 2, 3, dtype=torch.float32), make.dtype), {}


Sample = Callable[[Make], tuple[tuple, dict[str, Any]]]

SAMPLES: dict[str, Sample] = {
    "apply_rope_base": _rope,
    "bmm": lambda make: ((make(2, make.tokens, 24), make(2, 24, 20)), {}),
    "cross_entropy": lambda make: (
        (make(make.tokens, 70), make.integers(70, make.tokens)), {"reduction": "sum", "softcap": 3.0, "z_loss": 0.1}
    ),
    "dropout": lambda make: ((make(make.tokens, 40), 1234), {}),
    "fmha": lambda make: ((make(2, 4, make.tokens, 16), make(2, 2, 13, 16), make(2, 2, 13, 16)), {"is_causal": False}),
    "fmha_decode": lambda make: (
        tuple(make(*shape) for shape in ((2, 4, 1, 16), (2, 2, make.tokens, 16), (2, 2, make.tokens, 16))), {}
    ),
    "fused_add_rms_norm": lambda make: ((make(make.tokens, 24), make(make.tokens, 24), make(24), 1e-6), {}),
    "fused_linear_cross_entropy": lambda make: (
        (make(make.tokens, 24), make(70, 24), make.integers(70, make.tokens), make(70)), {"reduction": "sum"}
    ),
    "geglu": lambda make: ((make(make.tokens, 40), make(make.tokens, 40)), {}),
    "gelu": lambda make: ((make(make.tokens, 40),), {}),
    "layer_norm": lambda make: ((make(make.tokens, 24), 24, make(24), make(24)), {}),
    "linear": lambda make: ((make(make.tokens, 24), make(20, 24), make(20)), {}),
    "matmul": lambda make: ((make(make.tokens, 24), make(24, 20)), {}),
    "relu": lambda make: ((make(make.tokens, 40),), {}),
    "rms_norm": lambda make: ((make(make.tokens, 24), 24, make(24), 1e-6), {"bias": make(24)}),
    "silu_and_mul": lambda make: ((make(make.tokens, 40),), {}),
    "softmax": lambda make: ((make(make.tokens, 40),), {}),
    "splitk_reduce": _splitk_reduce,
    "swiglu": lambda make: ((make(make.tokens, 40), make(make.tokens, 40)), {}),
}  # fmt: skip

NOT_DIFFERENTIABLE = {"fmha", "fmha_decode", "splitk_reduce"}  # fmha: until it has a backward kernel

# Ops that are being written: whoever adds one moves it from here to SAMPLES.
WITHOUT_SAMPLE = {
    "attention_sink",
    "attention_sink_decode",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "dual_rms_norm",
    "fused_moe",
    "gemma_attention",
    "gemma_attention_decode",
    "group_gemm",
    "group_norm",
    "mla",
    "mla_decoding",
    "mla_decoding_split_kv",
    "moe_align_block_size",
    "moe_topk_routing",
    "recurrent_gated_delta_rule",
    "rms_norm_gated",
    "sigmoid_mul",
}

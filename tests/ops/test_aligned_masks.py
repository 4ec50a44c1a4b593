"""Masks whose rows begin at multiples of 16 bytes, as in caches of fixed size: kernels read them another way.

The tests of each op have rows of odd lengths.
"""

import pytest
import torch
from common import PyTestCase
from common import device
from common import dtypes
from common import randn
from common import recorded_launches
from common import some

from tilegym.ops import fmha
from tilegym.ops import fmha_decode
from tilegym.ops import mla
from tilegym.ops import mla_decoding

CAPACITY = 256
FILLED = 38
HEADS = 4


def padding(rows: int = 1) -> torch.Tensor:
    """[2, 1, rows, CAPACITY]: 27 keys of padding and none, and nothing behind FILLED."""
    mask = torch.zeros(2, 1, rows, CAPACITY, dtype=torch.bool)
    mask[0, ..., 27:FILLED] = True
    mask[1, ..., :FILLED] = True
    return mask.to(device())


def filled() -> torch.Tensor:
    return torch.full((2,), FILLED, dtype=torch.int32, device=device())


def prefill(dtype, width=16):
    return {
        "q": randn(2, HEADS, FILLED, width, dtype=dtype),
        "k": randn(2, 2, CAPACITY, width, dtype=dtype, seed=1),
        "v": randn(2, 2, CAPACITY, width, dtype=dtype, seed=2),
    }


def step(dtype, width=16):
    return {**prefill(dtype, width), "q": randn(2, HEADS, 1, width, dtype=dtype)}


def latents(dtype):
    return {
        "q": randn(2, HEADS, 64, dtype=dtype),
        "qpe": randn(2, HEADS, 16, dtype=dtype, seed=1),
        "kv": randn(2, CAPACITY, 64, dtype=dtype, seed=2),
        "kpe": randn(2, CAPACITY, 16, dtype=dtype, seed=3),
        "sm_scale": 0.1,
    }


def latent_prefill(dtype):
    return {
        "q": randn(2, HEADS, FILLED, 32, dtype=dtype),
        "k": randn(2, HEADS, CAPACITY, 32, dtype=dtype, seed=1),
        "v": randn(2, HEADS, CAPACITY, 32, dtype=dtype, seed=2),
        "qpe": randn(2, HEADS, FILLED, 16, dtype=dtype, seed=3),
        "kpe": randn(2, 1, CAPACITY, 16, dtype=dtype, seed=4),
        "scaling": 0.2,
    }


CALLS = {
    "prefill": (fmha, prefill, dict(kv_len=filled(), attention_mask=padding())),
    "mask of queries and keys": (
        fmha, prefill, dict(kv_len=filled(), attention_mask=padding(FILLED), is_causal=False),
    ),
    "step": (fmha_decode, step, dict(kv_len=filled(), attention_mask=padding())),
    "step of wide heads": (fmha_decode, lambda dtype: step(dtype, 128), dict(attention_mask=padding())),
    "latent prefill": (mla, latent_prefill, dict(kv_len=filled(), attention_mask=padding())),
    "latent step": (mla_decoding, latents, dict(kv_len=filled(), attention_mask=padding())),
}  # fmt: skip
call = pytest.mark.parametrize("name", CALLS)


class Test_AlignedMasks(PyTestCase):
    @call
    @dtypes()
    def test_op(self, name, dtype):
        op, tensors, options = CALLS[name]
        self.assertCorrectness(op, with_pytorch(op), tensors(dtype) | options, {"backend": "cutile"})

    @dtypes(*some((torch.float32, torch.bfloat16), torch.bfloat16))
    def test_gradients(self, dtype):
        op, tensors, options = CALLS["prefill"]
        kwargs = tensors(dtype) | options
        self.assertCorrectness(op, with_pytorch(op), kwargs, {"backend": "cutile"}, gradient=("q", "k", "v"))

    @call
    def test_kernels_read_no_booleans(self, name):
        """tileiras 13.4 copies only some of them where a loop reads them ahead."""
        op, tensors, options = CALLS[name]
        kwargs = {
            k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in (tensors(torch.float32) | options).items()
        }
        for key in ("q", "k", "v"):
            if key in kwargs and name == "prefill":
                kwargs[key] = kwargs[key].requires_grad_()
        with recorded_launches(run=True) as launches:
            result = op(**kwargs, backend="cutile")
            if name == "prefill":
                result.sum().backward()
        assert launches
        for _, args in launches:
            assert not [x for x in args if isinstance(x, torch.Tensor) and x.dtype == torch.bool]


def with_pytorch(op):
    return lambda **kwargs: op(**kwargs, backend="pytorch")

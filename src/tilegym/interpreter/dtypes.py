"""How each cuTile dtype is held on the CPU.

A tile is a torch tensor of its dtype's *carrier*, chosen so that torch can move every carrier (index, permute,
concatenate) without changing a bit:

- bool, signed integers, uint8, float16/32/64 and bfloat16 carry themselves;
- uint16/32/64 travel as the signed integer of the same width, since torch does little with them;
- the 8-bit floats travel as raw bytes and float4_e2m1fn as its code 0..15, one element a byte;
- tfloat32 travels as a float32 whose 13 low mantissa bits are zero.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from cuda import tile as ct

from . import _cutile

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")

CARRIER = {
    "bool_": torch.bool,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "uint16": torch.int16,
    "uint32": torch.int32,
    "uint64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "tfloat32": torch.float32,
    "float8_e4m3fn": torch.uint8,
    "float8_e5m2": torch.uint8,
    "float8_e8m0fnu": torch.uint8,
    "float8_e5m3fnu": torch.uint8,
    "float4_e2m1fn": torch.uint8,
}

TORCH_FLOAT8 = {name: getattr(torch, name) for name in _FLOAT8}
NUMPY_INTEGER = {name: np.dtype(name) for name in _INTEGERS}

# The dtype of an array parameter, by the dtype of the torch tensor passed.
FROM_TORCH = {
    torch.bool: ct.bool_,
    torch.float16: ct.float16,
    torch.bfloat16: ct.bfloat16,
    torch.float32: ct.float32,
    torch.float64: ct.float64,
    **{getattr(torch, name): getattr(ct, name) for name in _INTEGERS},
    **{TORCH_FLOAT8[name]: getattr(ct, name) for name in _FLOAT8},
}
if hasattr(torch, "float4_e2m1fn_x2"):
    FROM_TORCH[torch.float4_e2m1fn_x2] = ct.float4_e2m1fn


def carrier(dtype) -> torch.dtype:
    return CARRIER[dtype.name]


def is_whole(dtype) -> bool:
    """Integer or bool: the dtypes whose rank-0 tiles the interpreter keeps as Python numbers."""
    return not _cutile.is_pointer_dtype(dtype) and (_cutile.is_integral(dtype) or _cutile.is_boolean(dtype))


def integer_range(dtype) -> tuple:
    bits = dtype.bitwidth
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if _cutile.is_signed(dtype) else (0, (1 << bits) - 1)


def wrap(value: int, dtype) -> int:
    """``value`` modulo 2^bits, in the dtype's own range."""
    bits = dtype.bitwidth
    value &= (1 << bits) - 1
    return value - (1 << bits) if _cutile.is_signed(dtype) and value >> (bits - 1) else value


def wrap_carrier(value: int, dtype) -> int:
    """``value`` modulo 2^bits as the integer that the carrier holds."""
    bits = dtype.bitwidth
    value &= (1 << bits) - 1
    return value - (1 << bits) if CARRIER[dtype.name] != torch.uint8 and value >> (bits - 1) else value


def as_numpy(x: torch.Tensor, dtype) -> np.ndarray:
    """An integer or bool tile as a numpy array of its true dtype (a view)."""
    array = x.numpy()
    return array if _cutile.is_boolean(dtype) else array.view(NUMPY_INTEGER[dtype.name])


def from_numpy(array: np.ndarray, dtype) -> torch.Tensor:
    """The tile that holds an integer or bool array; the inverse of ``as_numpy``."""
    if _cutile.is_boolean(dtype):
        return torch.from_numpy(np.asarray(array, dtype=np.bool_))
    array = np.asarray(array, dtype=NUMPY_INTEGER[dtype.name])
    if dtype.name.startswith("uint") and dtype.bitwidth > 8:
        array = array.view(NUMPY_INTEGER[dtype.name[1:]])
    return torch.from_numpy(array)


@functools.lru_cache(4096)
def scalar_tensor(value, dtype) -> torch.Tensor:
    """A rank-0 integer or bool tile from the Python number that stands for it; tiles are never changed."""
    if _cutile.is_boolean(dtype):
        return torch.tensor(bool(value))
    return torch.tensor(wrap_carrier(value, dtype), dtype=CARRIER[dtype.name])


def tensor_scalar(x: torch.Tensor, dtype):
    """The Python number for a rank-0 integer or bool tile."""
    value = x.item()
    return value if _cutile.is_boolean(dtype) else wrap(value, dtype)

"""Linear layers whose weight has 8 bits, by a kernel that takes the weight as it is.

What torchao and quanto put in the place of a weight is a tensor that stands for whole numbers and their scales;
transformers' own fp8 layers hold both as parameters. Nothing is converted or copied, and calls with many rows, with
gradients, or in compiled code stay the library's.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from tilegym.backend import name_of
from tilegym.backend.wrapped import is_quantised
from tilegym.ops import quantized_linear
from tilegym.ops.autocast import is_autocast
from tilegym.ops.pytorch.quantized_linear import BLOCK_K
from tilegym.ops.pytorch.quantized_linear import BLOCK_N
from tilegym.ops.pytorch.quantized_linear import FLOATS
from tilegym.ops.pytorch.quantized_linear import MOST_ROWS
from tilegym.ops.pytorch.quantized_linear import WEIGHTS
from tilegym.transformers.forwards import function_of_forward
from tilegym.transformers.forwards import reproducible
from tilegym.transformers.layers import QUANTISED
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet

FEW_ROWS = 16  # up to which the op is faster than a library that multiplies in 8 bits
SCALES = ("weight_scale_inv", "weight_scale")
# How far a product may be off from the library's, in the norm: by rounding, and by activations of 8 bits as well.
ROUNDING, ACTIVATIONS = 0.01, 0.08


class Held(NamedTuple):
    """Where a layer has its whole numbers and their scales, how many rows and columns share one of them, and for how
    many rows of its input the op is faster."""

    wrapped: bool  # by the weight, which stands for both; else by the layer
    data: str
    scale: str
    block_size: tuple[int, int] | None
    most_rows: int

    def of(self, module: nn.Module) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Both, or None if the layer has them no more."""
        holder = module.weight if self.wrapped else module
        data, scale = getattr(holder, self.data, None), getattr(holder, self.scale, None)
        if data is None or scale is None or data.dtype not in WEIGHTS:
            return None
        if scale.dtype not in FLOATS:  # powers of two as fp8
            scale = scale.to(torch.float32)
        return data, scale.detach() if scale.requires_grad else scale


def held_by(module: nn.Module) -> Held | None:
    """None for a layer whose weight has no 8 bits, or another layout."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return None
    if is_quantised(weight):
        parts = weight.__tensor_flatten__()[0] if hasattr(weight, "__tensor_flatten__") else ()
        holder, wrapped = weight, True
        data = [name for name in parts if getattr(weight, name).dtype in WEIGHTS]
        data = [name for name in data if getattr(weight, name).shape == weight.shape]
        scale = [name for name in parts if "scale" in name and getattr(weight, name).dtype in FLOATS]
    else:
        holder, wrapped = module, False
        data = ["weight"] if weight.dtype in WEIGHTS else []
        scale = [name for name in SCALES if isinstance(getattr(module, name, None), torch.Tensor)]
    if len(data) != 1 or len(scale) != 1:
        return None
    block_size = _block_size(module, weight.shape, getattr(holder, scale[0]).shape)
    most_rows = FEW_ROWS if _quantises_activations(module) else MOST_ROWS
    return None if block_size is None else Held(wrapped, data[0], scale[0], block_size or None, most_rows)


def _block_size(module: nn.Module, weight: torch.Size, scale: torch.Size) -> tuple[int, ...] | None:
    """Empty: one scale for all or one a row; None: neither, nor blocks that the op has a kernel for."""
    (n, k), own = weight, getattr(module, "block_size", None)
    if scale.numel() == 1 or scale in ((n,), (n, 1)):
        return ()
    if len(scale) != 2:
        return None
    block = tuple(own) if own is not None else (-(-n // scale[0]), -(-k // scale[1]))
    fits = not (block[0] % BLOCK_N or block[1] % BLOCK_K)
    return block if fits and scale == (-(-n // block[0]), -(-k // block[1])) else None


@reproducible
def quantised_forward(original: Callable, held: Held, backend: str | None) -> Callable:
    """Forward for a layer that has ``held``, in the place of ``original``, its class's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        few = 0 < input.numel() <= held.most_rows * input.shape[-1]
        if not few or torch.compiler.is_compiling() or is_autocast(input):
            return original(self, input)
        if torch.is_grad_enabled() and input.requires_grad:
            return original(self, input)
        out = _product(held, self, input, None, backend)
        return original(self, input) if out is None else out

    return forward


def _product(
    held: Held, layer: nn.Module, x: torch.Tensor, residual: torch.Tensor | None, backend: str | None
) -> torch.Tensor | None:
    """The op's result, without gradients; None if the layer has changed, or x is of another dtype than its bias."""
    factors, bias = held.of(layer), layer.bias
    if factors is None or (bias is not None and bias.dtype is not x.dtype):
        return None
    if bias is not None and bias.requires_grad:
        bias = bias.detach()
    return quantized_linear(x, *factors, bias, held.block_size, residual, backend=backend)


def is_served(layer: nn.Module) -> bool:
    """Whether a layer has a :func:`quantised_forward`."""
    return getattr(function_of_forward(layer), "recipe", (None,))[0] is quantised_forward


def add_product(layer: nn.Module, x: torch.Tensor, residual: torch.Tensor, backend: str | None) -> torch.Tensor:
    """``residual + layer(x)`` of a layer that is served, for a few rows without gradients."""
    out = _product(function_of_forward(layer).recipe[1][1], layer, x, residual, backend)
    return residual + layer(x) if out is None else out


def put(patches: PatchSet, module: nn.Module, backend: str | None, entry: Entry, tried: dict[tuple, str]) -> bool:
    """Whether ``module`` is a linear layer with a quantised weight: patched then, or skipped with a reason.

    Args:
        tried: what was found out about layers of the same kind before.
    """
    if not isinstance(module, nn.Linear):
        return False
    held = held_by(module)
    if held is None and not is_quantised(module.weight):
        return False
    why = _why_not(module, held, backend, tried)
    if why:
        patches.skip(entry, why)
    else:
        patches.replace_forward(module, quantised_forward(type(module).forward, held, backend), entry)
    return True


def _why_not(module: nn.Module, held: Held | None, backend: str | None, tried: dict[tuple, str]) -> str:
    if held is None or name_of(backend) != "cutile":
        return QUANTISED
    factors = held.of(module)
    if factors is None or factors[0].is_meta:
        return f"{QUANTISED}, and elsewhere until the layer is called"
    key = type(module), type(module.weight), held, factors[0].dtype, *(t.shape for t in factors)
    if key not in tried:
        tried[key] = _misfit(module, held)
    return tried[key]


def _misfit(module: nn.Module, held: Held) -> str:
    """Why the op does not compute what a layer does; "" if it does, on a few numbers."""
    data, scale = held.of(module)
    like = module.weight if held.wrapped else module.bias
    dtype = torch.bfloat16 if like is None else like.dtype
    # Their mean is not 0, so that what is taken from all numbers of a row shows.
    numbers = 0.5 + torch.sin(torch.arange(1.0, 3 * data.shape[1] + 1, device="cpu", dtype=torch.float32))
    x = numbers.view(3, -1).to(data.device, dtype)
    try:
        with torch.no_grad(), torch.autocast(data.device.type, enabled=False):
            expected = type(module).forward(module, x).double()
            bias = None if module.bias is None else module.bias.to(dtype)
            got = quantized_linear(x, data, scale, bias, held.block_size, backend="pytorch").double()
    except Exception as error:  # whatever the library's own kernels need
        return f"{QUANTISED}, and it could not be tried: {type(error).__name__}: {str(error).splitlines()[0]}"
    limit = ACTIVATIONS if held.most_rows == FEW_ROWS else ROUNDING
    return "" if (got - expected).norm() <= limit * expected.norm() else f"{QUANTISED} in a way of its own"


def _quantises_activations(module: nn.Module) -> bool:
    names = "activation_scheme", "activation_qtype", "act_quant_kwargs"
    return any(getattr(holder, name, None) is not None for holder in (module, module.weight) for name in names)

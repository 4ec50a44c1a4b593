"""Functions for which transformers calls another package where one is installed: on the CPU its own instead.

What ``fla``, ``causal_conv1d`` and ``mamba_ssm`` compute runs on GPUs only, and transformers (5.17, 5.24) passes them
tensors on the CPU as well. Small models, which run there, would fail on machines that have them.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# The variables of the function that transformers makes of its own and of the package's.
_THEIRS, _OWN = "implementation", "torch_function"
_BY_OWN = ("cpu", "meta")  # devices


def take_own_functions_on_cpu(model: nn.Module) -> None:
    """Lets the functions that the modules of ``model`` call compute CPU tensors in PyTorch, in all models of the
    family. With tensors on a GPU they call what they called before."""
    for name in {type(module).__module__ for module in model.modules()}:
        for value in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
            _take_own_on_cpu(value)


def _take_own_on_cpu(function: Any) -> None:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if _THEIRS not in names or _OWN not in names:
        return
    cells = dict(zip(names, function.__closure__, strict=True))
    theirs, own = cells[_THEIRS].cell_contents, cells[_OWN].cell_contents
    if theirs is not own and not hasattr(theirs, "_by_device"):
        cells[_THEIRS].cell_contents = _by_device(theirs, own)


def _by_device(theirs: Callable, own: Callable) -> Callable:
    @functools.wraps(theirs)
    def call(*args, **kwargs):
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        first = next(tensors, None)
        return (own if first is not None and first.device.type in _BY_OWN else theirs)(*args, **kwargs)

    call._by_device = True
    return call

"""TileGym kernelizes Hugging Face models with CUDA Tile kernels that are verified on the model's own tensors."""

import importlib
from typing import Any

from tilegym import env
from tilegym import ops
from tilegym.backend import set_backend
from tilegym.backend import use_backend
from tilegym.backend.in_place import set_gradients_in_place

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "apply",
    "graph_training",
    "kernelize_model",
    "ops",
    "revert",
    "set_backend",
    "set_gradients_in_place",
    "use_backend",
]

# Who needs the ops alone does not wait for these.
_LAZY = {
    "apply": "tilegym.integrate.apply",
    "revert": "tilegym.integrate.apply",
    "graph_training": "tilegym.transformers.training_graph",
    "kernelize_model": "tilegym.kernel",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tilegym' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


if env.interpret():
    from tilegym import interpreter

    interpreter.install()

"""TileGym kernelizes Hugging Face models with CUDA Tile kernels that are verified on the model's own tensors."""

from tilegym import env
from tilegym import ops
from tilegym.backend import set_backend
from tilegym.backend import use_backend

__version__ = "0.1.0"
__all__ = ["__version__", "ops", "set_backend", "use_backend"]

if env.interpret():
    from tilegym import interpreter

    interpreter.install()

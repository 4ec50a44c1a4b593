"""The reference implementations in plain PyTorch, which are also the fallback."""

from tilegym.ops.pytorch import attention
from tilegym.ops.pytorch import matmul

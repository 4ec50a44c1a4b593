"""The cuTile implementations: one file an op with its kernels, launch, autograd and registration."""

from tilegym.ops.cutile import attention
from tilegym.ops.cutile import matmul

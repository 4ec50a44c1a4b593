"""Generates cuTile kernels from regions of PyTorch code: ``docs/generator.md``."""

from tilegym.autokernel.generate.api import GeneratedKernel
from tilegym.autokernel.generate.api import generate
from tilegym.autokernel.generate.api import variants
from tilegym.autokernel.generate.errors import Unsupported

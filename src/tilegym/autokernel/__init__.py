"""The auto-kernelize loop: finds what a model still computes in PyTorch, asks for kernels, judges them, keeps the good.

``docs/autokernel.md`` describes it; ``protocol`` is what a proposer has to know.
"""

from tilegym.autokernel.protocol import Attempt
from tilegym.autokernel.protocol import Proposal
from tilegym.autokernel.protocol import Proposer
from tilegym.autokernel.protocol import Sample
from tilegym.autokernel.protocol import Task
from tilegym.autokernel.protocol import TensorInfo

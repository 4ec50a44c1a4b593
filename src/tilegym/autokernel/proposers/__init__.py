"""The proposers: where kernels come from. ``tilegym.autokernel.protocol`` says what they have in common."""

from tilegym.autokernel.proposers.agent import Agent
from tilegym.autokernel.proposers.agent import AgentConfig
from tilegym.autokernel.proposers.generate import Generate
from tilegym.autokernel.proposers.reuse import Reuse
from tilegym.autokernel.proposers.scripted import Scripted
from tilegym.autokernel.proposers.tune import Tune

"""From a model's name to a verified patch: what it computes, which kernels fit, and whether they compute the same."""

from tilegym.integrate.requirement import Requirement
from tilegym.integrate.requirement import Research
from tilegym.integrate.requirement import Source
from tilegym.integrate.requirement import Unrecognised

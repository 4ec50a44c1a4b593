"""The inventory: every kernel as a Definition (what is computed) and a Solution (which code computes it)."""

from tilegym.inventory.schema import AxisConst
from tilegym.inventory.schema import AxisVar
from tilegym.inventory.schema import BuildSpec
from tilegym.inventory.schema import Definition
from tilegym.inventory.schema import Solution
from tilegym.inventory.schema import SourceFile
from tilegym.inventory.schema import TensorSpec
from tilegym.inventory.schema import Trace
from tilegym.inventory.schema import Workload

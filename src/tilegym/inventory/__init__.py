"""The inventory: every kernel as a Definition (what is computed) and a Solution (which code computes it).

``load()`` gives the shipped catalog, ``validate()`` the rules that are broken in it; ``check_solution`` runs a Solution
beside its Definition's reference; ``match(definition)`` gives the Solutions that compute a Definition, best first, each
with the adapter for its call.
"""

from tilegym.inventory.loading import Catalog
from tilegym.inventory.loading import Folder
from tilegym.inventory.loading import family_folder
from tilegym.inventory.loading import folders_in
from tilegym.inventory.loading import load
from tilegym.inventory.matching import COMPATIBLE
from tilegym.inventory.matching import EXACT
from tilegym.inventory.matching import Match
from tilegym.inventory.matching import match
from tilegym.inventory.rules import Problem
from tilegym.inventory.rules import check_definition
from tilegym.inventory.rules import validate
from tilegym.inventory.schema import AxisConst
from tilegym.inventory.schema import AxisVar
from tilegym.inventory.schema import BuildSpec
from tilegym.inventory.schema import Definition
from tilegym.inventory.schema import Solution
from tilegym.inventory.schema import SourceFile
from tilegym.inventory.schema import TensorSpec
from tilegym.inventory.schema import Trace
from tilegym.inventory.schema import Workload
from tilegym.inventory.verify import check_solution
from tilegym.inventory.verify import load_solution

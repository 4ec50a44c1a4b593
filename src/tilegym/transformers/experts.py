"""TileGym's experts as an implementation that transformers can choose, and its forward for routers.

Importing this module makes the names "tilegym" (the backend of the moment) and "tilegym_cutile" known to transformers'
experts interface, as :mod:`.attention` does for attention.
"""

import types
from collections.abc import Callable

import torch
from torch import Tensor
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ExpertsInterface

from tilegym.backend import PREFER_CUTILE
from tilegym.backend import name_of
from tilegym.errors import UnsupportedError
from tilegym.ops.moe_interface import FORMULA
from tilegym.ops.moe_interface import RouterFormula
from tilegym.ops.moe_interface import experts_forward
from tilegym.ops.moe_interface import find_routing
from tilegym.ops.moe_interface import prepare_experts
from tilegym.ops.moe_interface import router_forward
from tilegym.ops.pytorch.checks import can_be_read
from tilegym.transformers.forwards import reproducible

OTHERS = "grouped_mm"  # transformers' default, which in fp32 waits for the device
OTHERS_IN_A_GRAPH = "batched_mm"  # what transformers decodes with
_REFUSED = "_tilegym_refused"


def _experts_forward(backend: str | None) -> Callable:
    def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Experts as transformers calls them: hidden_states [T, H], top_k_index and top_k_weights [T, k]."""
        own = vars(self)
        if FORMULA not in own and _REFUSED not in own:
            _find_experts(self)
        # The formula in PyTorch looks at the choice of experts on the host, which cannot be compiled.
        uncompilable = torch.compiler.is_compiling() and name_of(backend) == "pytorch"
        if _REFUSED in own or uncompilable:
            others = OTHERS if can_be_read(top_k_index) else OTHERS_IN_A_GRAPH
            return ALL_EXPERTS_FUNCTIONS[others](self, hidden_states, top_k_index, top_k_weights)
        return experts_forward(self, hidden_states, top_k_index, top_k_weights, backend=backend)

    return forward


# Traced, the search itself would be compiled; what is compiled breaks off here instead.
_once = torch.compiler.disable(
    reason="The first call of experts under a patch of the whole process finds out what they compute: call the model "
    "once before it is compiled, or patch the model itself."
)


@_once
def _find_experts(module: nn.Module) -> None:
    try:
        prepare_experts(module)
    except UnsupportedError:
        setattr(module, _REFUSED, True)


@_once
def _find_routing(module: nn.Module, original: Callable) -> None:
    own = vars(module)
    own["forward"] = types.MethodType(original, module)
    try:
        own[_ROUTING] = find_routing(module)
    except UnsupportedError:
        own[_ROUTING] = None
    finally:
        del own["forward"]


def forget(model: nn.Module) -> None:
    """Takes away what was found out about the experts of ``model``."""
    for module in model.modules():
        for name in (FORMULA, _REFUSED):
            vars(module).pop(name, None)


@reproducible
def routing_forward(backend: str | None, formula: RouterFormula) -> Callable:
    """Forward for one router, of which :func:`find_routing` has found the formula."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return router_forward(self, hidden_states, formula=formula, backend=backend)

    return forward


@reproducible
def routing_forward_of_class(original: Callable, backend: str | None) -> Callable:
    """:func:`routing_forward` for a whole class; each router's formula is found when it is first called."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own = vars(self)
        if _ROUTING not in own:
            _find_routing(self, original)
        formula = own[_ROUTING]
        if formula is None:
            return original(self, hidden_states)
        return router_forward(self, hidden_states, formula=formula, backend=backend)

    return forward


_ROUTING = "_tilegym_routing"

NAMES = {None: "tilegym", PREFER_CUTILE: "tilegym_cutile"}  # by the backend

for _backend, _name in NAMES.items():
    ExpertsInterface.register(_name, _experts_forward(_backend))

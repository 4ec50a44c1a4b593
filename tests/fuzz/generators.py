"""The generators of all ops and interfaces. Each is called as its op is, and gives a case of it."""

from fuzz import generators_attention
from fuzz import generators_decoding
from fuzz import generators_delta_rule
from fuzz import generators_elementwise
from fuzz import generators_experts
from fuzz import generators_interfaces
from fuzz import generators_norms
from fuzz import generators_products
from fuzz import generators_rotation
from fuzz import generators_rows
from fuzz.drawing import GENERATORS

FAMILIES = (
    generators_attention,
    generators_decoding,
    generators_delta_rule,
    generators_elementwise,
    generators_experts,
    generators_interfaces,
    generators_norms,
    generators_products,
    generators_rotation,
    generators_rows,
)
OPS = tuple(sorted(GENERATORS))  # the families have registered theirs when they were imported

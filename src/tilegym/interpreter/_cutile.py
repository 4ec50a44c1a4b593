"""Every private name of ``cuda.tile`` that the interpreter uses, and the version that they belong to.

The typed IR of cuTile's front end is not a public interface: a new minor version may rename an operation. All of it
comes through this module, so that a new version is met in one place; what of it is replaced stands in
``_cutile_quicker``.
"""

# The names imported here are for the other modules, and the private ones only once the version is known.
# ruff: noqa: E402, F401

from __future__ import annotations

from cuda import tile as ct

from .errors import UnsupportedCuTileError

SUPPORTED = ((1, 7), (1, 8))


def check_version(version: str) -> None:
    """Raises ``UnsupportedCuTileError`` unless ``version`` is one whose typed IR the interpreter knows."""
    try:
        found = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        found = (0, 0)
    if not SUPPORTED[0] <= found < SUPPORTED[1]:
        low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise UnsupportedCuTileError(
            f"tilegym.interpreter evaluates the typed IR of cuda.tile >={low},<{high}, but cuda.tile {version} is"
            f' installed. Install a supported one: pip install "cuda-tile>={low},<{high}"'
        )


check_version(ct.__version__)

from cuda.tile import _cext as cext
from cuda.tile._annotated_function import HeterogeneousTupleNode
from cuda.tile._annotated_function import HomogeneousTupleNode
from cuda.tile._annotated_function import LeafAnnotationNode
from cuda.tile._bytecode.version import BytecodeVersion
from cuda.tile._compile import compile_tile
from cuda.tile._datatype import is_boolean
from cuda.tile._datatype import is_float
from cuda.tile._datatype import is_foreign_pointer_dtype
from cuda.tile._datatype import is_integral
from cuda.tile._datatype import is_pointer_dtype as is_plain_pointer_dtype
from cuda.tile._datatype import is_signed
from cuda.tile._ir import arithmetic_ops
from cuda.tile._ir import control_flow_ops
from cuda.tile._ir import core_ops
from cuda.tile._ir import ops
from cuda.tile._ir.ops import AtomicRMWMode
from cuda.tile._ir.type import ArrayTy
from cuda.tile._ir.type import GatherScatterViewTy
from cuda.tile._ir.type import ListTy
from cuda.tile._ir.type import StridedViewTy
from cuda.tile._ir.type import TileTy
from cuda.tile._ir.type import TokenTy

from . import _cutile_quicker

_cutile_quicker.install()

# The newest architecture and bytecode: what any GPU supports, the front end then accepts.
FRONT_END_ARCH = "sm_100"
FRONT_END_BYTECODE = BytecodeVersion.V_13_4


def parameter_annotations(kernel) -> tuple:
    return tuple(kernel._annotated_function.parameter_annotations)


def parameter_names(kernel) -> tuple:
    return tuple(kernel._annotated_function.pysig.parameters)


def kernel_function(kernel):
    return kernel._annotated_function.pyfunc


def kernel_name(kernel) -> str:
    return kernel_function(kernel).__name__


def is_pointer_dtype(dtype) -> bool:
    return is_plain_pointer_dtype(dtype) or is_foreign_pointer_dtype(dtype)


def is_constant_value(value) -> bool:
    """Whether ``value`` may be passed for a ``ct.Constant`` parameter."""
    return cext.classify_constant(value, True) is not None


def typed_ir(kernel, signature):
    """The final typed IR (a Block) of ``kernel`` for ``signature``; needs neither a GPU nor tileiras.

    The bytecode is made for its errors: some of what the front end rejects it rejects there.
    """
    result = compile_tile(
        kernel._annotated_function,
        [signature],
        FRONT_END_ARCH,
        bytecode_version=FRONT_END_BYTECODE,
        return_final_ir=True,
        return_bytecode=True,
        return_cubin=False,
    )
    return result.final_ir[0]

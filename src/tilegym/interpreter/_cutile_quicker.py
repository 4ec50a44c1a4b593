"""cuTile's front end does what it does most often in fewer steps, with the same result to the last byte.

Most of the time that a kernel's first launch takes in the interpreter is the front end's, and on a GPU a good part of
it. Replaced are functions of cuTile's, most of its pass from HIR to typed IR:

* For every read of a variable and every operator, cuTile makes a constant of the function that does it (and of the
  variable's name), with a type, a name and an operation that a later pass removes. Here the function is just called.
* A block has one constant for each value that no instruction computes with (None, names, functions, modules, dtypes),
  and not one for every place that reads it, or for every call that returns nothing. They were two of three operations,
  which a later pass removes, but which all passes before it look at.
* Context managers that every operation enters twice are classes instead of generators.
* The location of an operation is made from that in its function without looking at what a dataclass consists of.
* Arguments of functions without options or defaults are bound without ``inspect``.
* Signatures, locations of debug information, and which of an operator's overloads fits which types are found out once.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import BuiltinFunctionType
from types import FunctionType
from types import ModuleType
from types import NoneType

from cuda.tile._datatype import DType
from cuda.tile._exception import Loc
from cuda.tile._exception import TileError
from cuda.tile._exception import TileInternalError
from cuda.tile._execution import is_function_allowed_in
from cuda.tile._execution import stub_aliases
from cuda.tile._ir import core_ops
from cuda.tile._ir import hir
from cuda.tile._ir import hir_stubs
from cuda.tile._ir.core_ops import sym2var
from cuda.tile._ir.ir import Builder
from cuda.tile._ir.ir import Operation
from cuda.tile._ir.op_impl import ImplRegistry
from cuda.tile._ir2bytecode import DebugAttrMap
from cuda.tile._passes import hir2ir

_dispatch_other_call = hir2ir._dispatch_call
_bind_other_args = hir2ir._bind_args
_find_overload = ImplRegistry._find_overload
_find_debug_attribute = DebugAttrMap.get_debugattr
_make_constant = core_ops.loosely_typed_const
_NOT_COMPUTED_WITH = frozenset((NoneType, str, FunctionType, BuiltinFunctionType, ModuleType, DType))
_known_positional = {}  # by identity, with the signature: no other one gets its id then
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


async def _dispatch_call(call, scope) -> None:
    callee = call.callee
    if callee is hir_stubs.load_var and _is_defined(call.args[0]):
        result = _load(call.args[0], scope)
    elif isinstance(callee, (FunctionType, BuiltinFunctionType)) and _is_plain(call):
        args, builder = [_operand(arg, scope) for arg in call.args], Builder.get_current()
        callee = stub_aliases.get(callee, callee)
        implementation = ImplRegistry.get_current().op_implementations.get(callee)
        if implementation is None or implementation._is_coroutine or not _is_allowed(callee, builder):
            result = await hir2ir._call_function(callee, args, {}, builder)
        else:
            result = implementation(*_bind_args(hir2ir.get_signature(callee), callee.__name__, args, {}))
            if builder.is_terminated or call.result is None:
                return
            if result is None:
                result = _constant(None)
    else:
        await _dispatch_other_call(call, scope)
        return
    if call.result is not None and result is not None:
        scope.hir2ir_varmap[call.result.id] = result


def _is_plain(call) -> bool:
    if call.kwargs:
        return False
    for arg in call.args:
        if type(arg) is hir.Starred:
            return False
    return True


def _operand(arg, scope):
    return scope.hir2ir_varmap[arg.id] if type(arg) is hir.Value else hir2ir._resolve_operand(arg, scope)


def _is_allowed(callee, builder) -> bool:
    return is_function_allowed_in(callee, builder.ir_ctx.execution_space)


def _is_defined(name) -> bool:
    return name.depth >= 0 or name.index >= 0


def _load(name, scope):
    if name.depth < 0:
        return sym2var(scope.func_hir.frozen_global_values[name.index], constant_only=True)
    value = scope.local_scopes[name.depth][name.index]
    value.get_type()  # raises for one that only some of the paths here define
    return value


def _constant(value, ty=None, loose_ty=None, result_var=None):
    if type(value) not in _NOT_COMPUTED_WITH or result_var is not None:
        return _make_constant(value, ty, loose_ty, result_var)
    constants = Builder.get_current().__dict__.setdefault("constants", {})
    found = constants.get(value)
    if found is None:
        found = constants[value] = _make_constant(value, ty, loose_ty)
    return found


def _retarget_loc(loc: Loc, scope) -> Loc:
    if loc.is_unknown():
        return loc
    function = scope.concrete_func_desc if loc.function is scope.func_hir.desc else loc.function
    return Loc(loc.line, loc.col, loc.filename, loc.last_line, loc.end_col, function, scope.call_site)


class _ChangedLocation:
    __slots__ = ("builder", "location")

    def __init__(self, builder, location):
        self.builder, self.location = builder, location

    def __enter__(self):
        self.builder._loc, self.location = self.location, self.builder._loc

    def __exit__(self, *error):
        self.builder._loc = self.location


class _WrappedExceptions:
    __slots__ = ("location",)

    def __init__(self, location):
        self.location = location

    def __enter__(self):
        pass

    def __exit__(self, kind, error, traceback):
        if isinstance(error, TileError):
            self.location.__exit__(kind, error, traceback)
        elif isinstance(error, Exception):
            raise TileInternalError(str(error), self.location) from error


@functools.lru_cache(4096)
def _found_overload(registry, stub, key, candidates):
    return _find_overload(registry, stub, key)


def _find_overload_once(registry, stub, key):
    return _found_overload(registry, stub, key, len(registry._overloaded_implementations[stub]))


def _positional(signature) -> int:
    """How many parameters there are, if all are taken by position; else -1."""
    found = _known_positional.get(id(signature))
    if found is None:
        parameters = signature.parameters.values()
        count = len(parameters) if all(p.kind in _POSITIONAL for p in parameters) else -1
        found = _known_positional[id(signature)] = signature, count
    return found[1]


def _bind_args(signature, name, args, kwargs, closure_defaults=None) -> list:
    if not kwargs and len(args) == _positional(signature):
        return list(args)
    return _bind_other_args(signature, name, args, kwargs, closure_defaults)


def _nested_blocks(operation) -> tuple:
    names = operation._nested_block_names
    return tuple(getattr(operation, name) for name in names) if names else ()


def _debug_attribute(attributes, location):
    known = attributes.__dict__.setdefault("known", {})  # by identity, with the location: no other one gets its id then
    found = known.get(id(location))
    if found is None:
        found = known[id(location)] = location, _find_debug_attribute(attributes, location)
    return found[1]


def _users_of_constants() -> list:
    """The modules of cuTile that have imported the function by name, and its own."""
    modules = [module for name, module in sys.modules.items() if name.startswith("cuda.tile")]
    return [module for module in modules if vars(module).get("loosely_typed_const") is _make_constant]


# The functions of control flow import ``retarget_loc`` from its module when they are called.
QUICKER = (
    (hir2ir, "_dispatch_call", _dispatch_call),
    (hir2ir, "_wrap_exceptions", _WrappedExceptions),
    (hir2ir, "retarget_loc", _retarget_loc),
    (hir2ir, "get_signature", functools.lru_cache(4096)(hir2ir.get_signature)),
    (hir2ir, "_bind_args", _bind_args),
    (Builder, "change_loc", lambda builder, location: _ChangedLocation(builder, location)),
    (ImplRegistry, "_find_overload", _find_overload_once),
    (Operation, "nested_blocks", property(_nested_blocks)),
    (DebugAttrMap, "get_debugattr", _debug_attribute),
    *((module, "loosely_typed_const", _constant) for module in _users_of_constants()),
)
ORIGINALS = tuple((owner, name, getattr(owner, name)) for owner, name, _ in QUICKER)


def install() -> None:
    for owner, name, quicker in QUICKER:
        setattr(owner, name, quicker)

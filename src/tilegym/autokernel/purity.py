"""Which expressions of a forward are plain tensor computation, and what they look like as source of their own.

A :class:`Reader` reads the expressions of one function for one module instance. What it accepts has no effect but its
value: arithmetic, methods and functions of torch, constants of the instance, and calls of functions and modules that
are made of nothing else (those become helper functions of the region's source).
"""

import ast
import inspect
import re
import textwrap
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Methods and functions that only look at memory in another way, or move it: no reason for a kernel by themselves.
VIEWS = frozenset(
    "view reshape transpose permute unsqueeze squeeze expand expand_as flatten unflatten chunk split unbind narrow "
    "contiguous detach size dim movedim swapaxes t view_as reshape_as tensor_split select index_select".split()
)
_METHODS = VIEWS | frozenset(
    "to float half bfloat16 type_as abs neg sqrt rsqrt square pow exp exp2 expm1 log log1p log2 sigmoid tanh relu sin "
    "cos erf clamp clamp_min clamp_max mean sum var std amax amin max min softmax log_softmax mul add sub div rsub "
    "reciprocal sign floor ceil round where masked_fill norm repeat cumsum flip roll maximum minimum lerp mT".split()
)
_FUNCTIONS = _METHODS | frozenset(
    "silu gelu softplus leaky_relu elu selu celu hardtanh hardsigmoid hardswish mish relu6 softsign logsigmoid glu "
    "threshold cat stack rms_norm layer_norm normalize addcmul addcdiv".split()
)
_ATTRIBUTES = frozenset("shape dtype device ndim T mT is_cuda".split())
_TORCH_ACTIVATIONS = "torch.nn.modules.activation"


class Impure(Exception):
    """The expression does more than compute, or something that cannot be told from its source."""


class Reader(ast.NodeTransformer):
    """Rewrites pure expressions of ``function`` into ones that need nothing but torch, the region's inputs and helpers.

    Args:
        function, module: whose expressions are read.
        linear: whether linear layers are computation, too, their weights being inputs.

    Attributes:
        tensors: for every tensor of the instance that was used, its path ("norm.weight") and its name as an input.
        helpers: source of the functions that the expressions call, by name.
    """

    def __init__(
        self,
        function: Callable,
        module: nn.Module | None,
        prefix: str = "",
        owner: "Reader | None" = None,
        linear: bool = False,
    ):
        self.globals, self.module, self.prefix = function.__globals__, module, prefix
        self.linear = linear or owner is not None and owner.linear
        self.tensors: dict[str, str] = owner.tensors if owner else {}
        self.helpers: dict[str, str] = owner.helpers if owner else {}
        parameters = list(inspect.signature(function).parameters)
        self.self_name = parameters[0] if module is not None and parameters else None
        self.locals = set(function.__code__.co_varnames) - {self.self_name}
        self.computes = False

    def read(self, node: ast.expr) -> ast.expr:
        """A pure expression's equivalent.

        Raises:
            Impure: it is not pure.
        """
        return self.visit(ast.parse(ast.unparse(node), mode="eval").body)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        raise Impure(f"{type(node).__name__}: {ast.unparse(node)[:60]}")

    def _children(self, node: ast.AST) -> ast.AST:
        return super().generic_visit(node)

    visit_Tuple = visit_List = visit_Slice = visit_Subscript = visit_Starred = visit_keyword = _children
    visit_Load = visit_Store = visit_operator = visit_unaryop = visit_cmpop = _children
    visit_Add = visit_Sub = visit_Mult = visit_Div = visit_Pow = visit_FloorDiv = visit_Mod = _children
    visit_USub = visit_UAdd = visit_Not = visit_Invert = _children
    visit_Lt = visit_LtE = visit_Gt = visit_GtE = visit_Eq = visit_NotEq = visit_BitAnd = visit_BitOr = _children

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        constant = not any(isinstance(n, ast.Name) and n.id in self.locals for n in ast.walk(node))
        self.computes = self.computes or not (constant or _is_size(node))
        return self._children(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.computes = self.computes or not isinstance(node.operand, ast.Constant)
        return self._children(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.computes = True
        return self._children(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.locals:
            return node
        return _literal(self._static(node))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        found, value = self.try_static(node)
        if found:
            if isinstance(value, torch.Tensor):
                return ast.Name(self._input(ast.unparse(node)), ast.Load())
            return _literal(value)
        if node.attr in _ATTRIBUTES:
            return self._children(node)
        raise Impure(ast.unparse(node))

    def _input(self, text: str) -> str:
        path = self.prefix + text.partition(".")[2]
        return self.tensors.setdefault(path, path.replace(".", "_"))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        found, function = self.try_static(node.func)
        if not found:
            if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
                return self._method(node)
            raise Impure(ast.unparse(node.func))
        if self.linear and is_linear(function) and len(node.args) == 1 and not node.keywords:
            return self._linear(node, function)
        if isinstance(function, nn.Module):
            return self._call_helper(node, self._module_helper(function, node.func))
        name = _torch_function(function)
        if name is not None:
            self.computes = self.computes or name.rpartition(".")[2] not in VIEWS
            return ast.Call(_dotted(name), [self.visit(a) for a in node.args], [self.visit(k) for k in node.keywords])
        if isinstance(function, types.FunctionType):
            return self._call_helper(node, self._function_helper(inspect.unwrap(function)))
        if isinstance(function, types.MethodType) and function.__self__ is self.module:
            return self._call_helper(node, self._method_helper(function.__func__))
        raise Impure(ast.unparse(node.func))

    def _linear(self, node: ast.Call, layer: nn.Linear) -> ast.AST:
        self.computes = True
        names = ["weight"] if layer.bias is None else ["weight", "bias"]
        tensors = [ast.Name(self._input(f"{ast.unparse(node.func)}.{name}"), ast.Load()) for name in names]
        return ast.Call(_dotted("torch.nn.functional.linear"), [self.visit(node.args[0]), *tensors], [])

    def _method(self, node: ast.Call) -> ast.AST:
        name = node.func.attr
        cast = name == "float" or (name == "to" and [ast.unparse(a) for a in node.args] == ["torch.float32"])
        self.computes = self.computes or (name not in VIEWS)
        if cast and not node.keywords:
            # In fp64 the reference is its own oracle: what the model widens to fp32 must not be narrowed there.
            self.helpers["wide"] = WIDE
            return ast.Call(ast.Name("wide", ast.Load()), [self.visit(node.func.value)], [])
        value = self.visit(node.func.value)
        arguments = [self.visit(a) for a in node.args], [self.visit(k) for k in node.keywords]
        return ast.Call(ast.Attribute(value, name, ast.Load()), *arguments)

    def _call_helper(self, node: ast.Call, helper: tuple[str, list[str]]) -> ast.AST:
        self.computes = True
        name, extra = helper
        keywords = [self.visit(k) for k in node.keywords]
        keywords += [ast.keyword(arg, ast.Name(arg, ast.Load())) for arg in extra]
        return ast.Call(_dotted(name), [self.visit(a) for a in node.args], keywords)

    def _module_helper(self, module: nn.Module, node: ast.expr) -> tuple[str, list[str]]:
        """(what to call, the tensors of the module that it needs): for activations torch's own class."""
        if vars(module).get("forward") is not None or module._forward_hooks or module._forward_pre_hooks:
            raise Impure("the module has a forward or hooks of its own")
        if type(module).__module__ == _TORCH_ACTIVATIONS and not list(module.parameters()):
            return f"torch.nn.{module!r}", []
        if type(module).__module__.startswith("torch.nn.") or list(module.children()):
            raise Impure(f"{type(module).__name__} is a part of its own")
        path = ast.unparse(node).partition(".")[2] if isinstance(node, ast.Attribute) else "activation"
        name = re.sub(r"\W", "_", f"{self.prefix}{path}")
        forward = type(module).forward
        if inspect.unwrap(forward) is not forward:
            raise Impure("its forward is decorated")
        return self._helper(name, forward, module, f"{self.prefix}{path}.")

    def _method_helper(self, method: Callable) -> tuple[str, list[str]]:
        """(what to call, the tensors of the instance that it needs) for a method of the instance itself."""
        if inspect.unwrap(method) is not method:
            raise Impure("the method is decorated")
        name = re.sub(r"\W", "_", f"{self.prefix}{method.__name__}")
        return self._helper(name, method, self.module, self.prefix)

    def _function_helper(self, function: types.FunctionType) -> tuple[str, list[str]]:
        return self._helper(function.__name__, function, None, "")

    def _helper(self, name: str, function: Callable, module: nn.Module | None, prefix: str) -> tuple[str, list[str]]:
        tree = function_tree(function)
        reader = Reader(function, module, prefix, owner=self)
        before, lines = set(self.tensors.values()), []
        body = [s for s in tree.body if not _is_docstring(s)]
        for index, statement in enumerate(body):
            lines.append(ast.unparse(reader.statement(statement, last=index == len(body) - 1)))
        # An instance's tensors become parameters, which the caller passes by name.
        used = {name for line in lines for name in re.findall(r"\w+", line)}
        extra = [n for n in self.tensors.values() if n not in before or n in used] if module is not None else []
        parameters = tree.args.args[1:] if module is not None else tree.args.args
        if tree.args.vararg or tree.args.kwonlyargs or tree.args.posonlyargs:
            raise Impure(f"{name} has parameters of other kinds")
        defaults = tree.args.defaults
        plain = parameters[: len(parameters) - len(defaults)]
        shown = [p.arg for p in plain] + [
            f"{p.arg}={ast.unparse(_literal(ast.literal_eval(d)))}"
            for p, d in zip(parameters[len(plain) :], defaults, strict=True)
        ]
        star = ["*", *extra] if extra else []
        text = f"def {name}({', '.join([*shown, *star])}):\n" + textwrap.indent("\n".join(lines), "    ")
        if self.helpers.setdefault(name, text) != text:
            raise Impure(f"two functions are called {name}")
        return name, extra

    def statement(self, statement: ast.stmt, last: bool = False) -> ast.stmt:
        """A pure assignment (or, if it is the last statement, return) in the reader's terms.

        Raises:
            Impure: it is something else.
        """
        if isinstance(statement, ast.Return) and last and statement.value is not None:
            return ast.Return(self.read(statement.value))
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and targets_of(statement):
            return ast.fix_missing_locations(ast.Assign(statement.targets, self.read(statement.value), lineno=0))
        raise Impure(type(statement).__name__)

    def try_static(self, node: ast.expr) -> tuple[bool, Any]:
        """(whether an expression is known before the call, its value)."""
        try:
            return True, self._static(node)
        except Impure:
            return False, None

    def _static(self, node: ast.expr) -> Any:
        """The value of an expression over globals and attributes of the instance.

        Raises:
            Impure: it is not known before the call.
        """
        if isinstance(node, ast.Name):
            if node.id == self.self_name:
                return self.module
            if node.id in self.locals:
                raise Impure(node.id)
            if node.id in self.globals:
                return self.globals[node.id]
            raise Impure(f"{node.id} is neither local nor global")
        if isinstance(node, ast.Attribute):
            owner = self._static(node.value)
            if not isinstance(owner, (nn.Module, types.ModuleType)) or not hasattr(owner, node.attr):
                raise Impure(ast.unparse(node))
            return getattr(owner, node.attr)
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice):
            owner, key = self._static(node.value), self._static(node.slice)
            if isinstance(owner, dict) and isinstance(key, str) and key in owner:
                return owner[key]
        if isinstance(node, ast.Constant):
            return node.value
        raise Impure(ast.unparse(node))


WIDE = """def wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))"""


def is_linear(layer: Any) -> bool:
    """Whether a part is a linear layer, and nothing has been done to it."""
    own = type(layer) is nn.Linear and vars(layer).get("forward") is None
    return own and not layer._forward_hooks and not layer._forward_pre_hooks


def _literal(value: Any) -> ast.expr:
    """A constant as an expression.

    Raises:
        Impure: it is none that can be written down.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return ast.Constant(value)
    if isinstance(value, float) and value == value and abs(value) != float("inf"):
        return ast.Constant(value)
    if isinstance(value, torch.dtype):
        return _dotted(str(value))
    raise Impure(f"a {type(value).__name__} is no constant")


def _dotted(name: str) -> ast.expr:
    return ast.parse(name, mode="eval").body


def _torch_function(function: Any) -> str | None:
    """The full name of a function of torch that only computes."""
    name = getattr(function, "__name__", "")
    for owner, path in ((torch, "torch"), (nn.functional, "torch.nn.functional")):
        if name in _FUNCTIONS and getattr(owner, name, None) is function:
            return f"{path}.{name}"
    return None


def _is_size(node: ast.expr) -> bool:
    """Whether arithmetic is about shapes: ``x.shape[-1] // 2``."""
    return any(isinstance(n, ast.Attribute) and n.attr in ("shape", "ndim") for n in ast.walk(node))


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def targets_of(statement: ast.stmt) -> list[str]:
    """The names that an assignment binds; empty if it binds anything but names."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return []
    target = statement.targets[0]
    items = target.elts if isinstance(target, ast.Tuple) else [target]
    return [item.id for item in items] if all(isinstance(item, ast.Name) for item in items) else []


def function_tree(function: Callable) -> ast.FunctionDef:
    """The syntax tree of a function, its line numbers those of its file.

    Raises:
        Impure: its source is not to be had.
    """
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise Impure(f"no source: {error}") from error
    if not isinstance(tree, ast.FunctionDef):
        raise Impure("not a plain function")
    return ast.increment_lineno(tree, first - 1)

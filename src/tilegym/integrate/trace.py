"""What happens while a small model runs once: its modules, the functions of its files, and the tensors between them."""

import contextlib
import inspect
import sys
import types
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tilegym.integrate.inputs import continues_text
from tilegym.integrate.inputs import decoding_step
from tilegym.integrate.inputs import example
from tilegym.integrate.inputs import forward_inputs
from tilegym.integrate.inputs import has_loss
from tilegym.integrate.inputs import takes_steps


@dataclass
class Call:
    """A call of a module or function.

    Attributes:
        callee: the module, or the function.
        path: of the module, or of the innermost module that calls the function.
        arguments: by parameter name; what tensors they were, and ``values``: what they held when the call began.
        output: what came back.
        stage: "train", "prefill" or "decode".
        within: the call of a function that this one is part of.
    """

    callee: Any
    path: str
    arguments: dict[str, Any]
    values: dict[str, Any]
    stage: str
    within: "Call | None" = None
    output: Any = None


@dataclass
class Step:
    """A call of a function of torch that gave tensors: its name, its arguments, its result, and where it ran."""

    name: str
    inputs: tuple[Any, ...]
    output: Any
    path: str


@dataclass
class Trace:
    """Everything that was seen, in order; it holds all tensors, so that their identities stay unique."""

    modules: list[Call] = field(default_factory=list)
    functions: list[Call] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def producers(self) -> dict[int, Step]:
        """The step that each tensor, by ``id``, came out of last."""
        found = {}
        for step in self.steps:
            given = {id(t) for t in tensors(step.inputs)}
            changes = step.name.endswith("_")  # in place; others that return their argument do nothing to it
            found |= {id(t): step for t in tensors(step.output) if changes or id(t) not in given}
        return found

    def consumers(self) -> dict[int, list[Step]]:
        """The steps that each tensor, by ``id``, went into."""
        found: dict[int, list[Step]] = {}
        for step in self.steps:
            for tensor in tensors(step.inputs):
                found.setdefault(id(tensor), []).append(step)
        return found


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        yield from tensors(tuple(value.values()))


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        return type(value)(_copied(item) for item in value) if type(value) in (tuple, list) else value
    return value


class _Steps(TorchFunctionMode):
    def __init__(self, trace: Trace, stack: list[str]) -> None:
        super().__init__()
        self.trace, self.stack = trace, stack

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if any(True for _ in tensors(output)):
            inputs = (*args, *(kwargs or {}).values())
            name = getattr(func, "__name__", str(func))
            self.trace.steps.append(Step(name, inputs, output, self.stack[-1] if self.stack else ""))
        return output


def modeling_files(model: nn.Module) -> list[types.ModuleType]:
    """The Python modules that define the classes of ``model``, torch's own and transformers' general ones left out."""
    found = {}
    for module in model.modules():
        for cls in type(module).__mro__:
            name = cls.__module__
            if name in sys.modules and _is_modeling(name):
                found[name] = sys.modules[name]
    return list(found.values())


def _is_modeling(name: str) -> bool:
    """Whether a Python module is a family's own: not torch, nor what all families of transformers share."""
    package = name.partition(".")[0]
    return name.startswith("transformers.models.") or package not in ("transformers", "torch", "builtins")


def functions_of(files: list[types.ModuleType]) -> dict[types.CodeType, types.FunctionType]:
    """The module-level functions that the files define or import from each other, by the code that runs."""
    found = {}
    for file in files:
        for value in vars(file).values():
            if isinstance(value, types.FunctionType) and _is_modeling(value.__module__ or "torch"):  # generated code
                found[inspect.unwrap(value).__code__] = value
    return found


@contextlib.contextmanager
def _profiled(trace: Trace, functions: dict[types.CodeType, types.FunctionType], stack: list[str], stage: list[str]):
    """Records the calls of ``functions``, through the interpreter's own hook: nothing is replaced anywhere."""
    former, opened = sys.getprofile(), {}

    def profile(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in functions:
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount]
            arguments = {name: frame.f_locals[name] for name in names if name in frame.f_locals}
            if frame.f_code.co_flags & inspect.CO_VARKEYWORDS:
                index = len(names) + bool(frame.f_code.co_flags & inspect.CO_VARARGS)
                arguments |= frame.f_locals.get(frame.f_code.co_varnames[index], {})
            values = {name: _copied(value) for name, value in arguments.items()}
            path = stack[-1] if stack else ""
            within = next(reversed(opened.values()), None)
            opened[frame] = Call(functions[frame.f_code], path, arguments, values, stage[0], within)
            trace.functions.append(opened[frame])
        elif event == "return" and frame in opened:
            opened.pop(frame).output = argument

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(former if callable(former) else None)
        if former is not None and not callable(former):
            former.enable()  # cProfile, before Python 3.12


def record(model: nn.Module) -> Trace:
    """Runs ``model``: a training forward if it has a loss of text, a prefill of two rows, one decoding step if it takes
    a token alone; or a forward pass alone, as a prefill, if it does not continue text.

    Raises whatever the model raises.
    """
    trace, stack, stage, handles = Trace(), [], ["train"], []
    continues = continues_text(type(model), model.config)
    ids = example(model) if continues else None
    trains, steps = continues and has_loss(model, ids), continues and takes_steps(model, ids)

    def before(path: str) -> Callable:
        def hook(module, args, kwargs):
            stack.append(path)
            arguments = {str(i): value for i, value in enumerate(args)} | kwargs
            trace.modules.append(Call(module, path, arguments, {}, stage[0]))
            open_calls.append(trace.modules[-1])

        return hook

    def after(module, args, kwargs, output):
        stack.pop()
        open_calls.pop().output = output

    open_calls: list[Call] = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    functions = functions_of(modeling_files(model)) | _library_functions(model)
    try:
        with torch.no_grad(), _profiled(trace, functions, stack, stage), _Steps(trace, stack):
            if not continues:
                stage[0] = "prefill"
                model(**forward_inputs(model))
                return trace
            if trains:
                model(input_ids=ids, labels=ids, use_cache=False)
            stage[0] = "prefill"
            output = model(input_ids=ids, use_cache=True)
            if steps:
                stage[0] = "decode"
                decoding_step(model, ids, output)
    finally:
        for handle in handles:
            handle.remove()
    return trace


def _library_functions(model: nn.Module) -> dict[types.CodeType, types.FunctionType]:
    """Functions of transformers in general that models call: the loss."""
    loss = getattr(model, "loss_function", None)
    return {inspect.unwrap(loss).__code__: loss} if isinstance(loss, types.FunctionType) else {}

"""Comparing a replaced layer with the original on the inputs that a forward of the model gave it.

The measure is the error against the original computed in float64, also where it asks for fp32 on the way: a kernel may
be at most twice as far off as the original is in the working dtype, and four roundings of the largest value in any
case. A result in a wider dtype than what goes in, as a state in fp32 of tokens in bf16, is no more exact than its
inputs: it may be as far off as it would be if they had been rounded to their dtype once more.
"""

import contextlib
import copy
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tilegym.errors import KernelError

Call = tuple[tuple, dict]
Forward = Callable[..., Any]


def capture_inputs(model: nn.Module, layers: list[nn.Module], sample_inputs: Any) -> dict[nn.Module, Call]:
    """Runs ``model`` once, without gradients and in eval mode, and returns the first call of each of ``layers``.

    Args:
        sample_inputs: keyword arguments of the model as a mapping, positional ones as a tuple or list, a single
            tensor, or None for the model's own ``dummy_inputs`` (transformers' models have them).

    Raises:
        KernelError: there are no inputs to run the model with.
    """
    args, kwargs = _model_call(model, sample_inputs)
    calls: dict[nn.Module, Call] = {}

    def remember(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if module not in calls:
            calls[module] = copy.deepcopy((args, kwargs))

    handles = [layer.register_forward_pre_hook(remember, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad(), _rng_of(model), _eval(model), _copied_buffers(model):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def difference(layer: nn.Module, original: Forward, kernel: Forward, call: Call, gradients: bool) -> str | None:
    """How ``kernel`` differs from ``original`` on ``call`` by more than rounding explains, or None.

    Both are called as ``forward(layer, *args, **kwargs)``. With ``gradients`` those with respect to the call's floating
    tensors and the layer's trainable parameters are compared as well.
    """
    errors = deviations(layer, original, kernel, call, gradients)
    if isinstance(errors, str):
        return errors
    return next((f"{name}: {deviation.problem}" for name, deviation in errors.items() if deviation.problem), None)


def deviations(
    layer: nn.Module, original: Forward, kernel: Forward, call: Call, gradients: bool, fp32_roundings: int = 4
) -> dict[str, "Deviation"] | str:
    """As :func:`difference`, each result by name with its error; a sentence where the results are not comparable.

    ``fp32_roundings``: how many roundings of the largest value are allowed in any case where the results are fp32.
    """
    with _eval(layer):
        expected = _run(layer, original, call, gradients)
        got = _run(layer, kernel, call, gradients)
        exact = _run(*_in_float64(layer, original, call), gradients)
    if [_shape(t) for t in got.values()] != [_shape(t) for t in expected.values()] or list(got) != list(expected):
        return f"it returns {_describe(got)}, the original {_describe(expected)}"
    found = {
        name: _deviation(got[name], expected[name], reference, fp32_roundings) for name, reference in exact.items()
    }
    narrow = min((t.dtype.itemsize for t in _floating((call, layer.state_dict()))), default=8)
    doubtful = [n for n, deviation in found.items() if deviation.problem and expected[n].dtype.itemsize > narrow]
    if doubtful:
        with _eval(layer):
            moved = _run(*_in_float64(layer, original, call, rounded=True), gradients)
        for name in doubtful:
            change = (moved[name] - exact[name]).abs()
            inherited = change[change.isfinite()].max().item() if change.isfinite().any() else 0.0
            found[name] = _deviation(got[name], expected[name], exact[name], fp32_roundings, inherited)
    return found


@dataclass(frozen=True)
class Deviation:
    """The largest error against float64, what is allowed, and what is wrong, if anything is."""

    error: float = 0.0
    allowed: float = 0.0
    problem: str = ""


def _model_call(model: nn.Module, sample_inputs: Any) -> Call:
    if sample_inputs is None:
        sample_inputs = getattr(model, "dummy_inputs", None)
    if sample_inputs is None:
        raise KernelError(f"verify=True runs {type(model).__name__} once and needs inputs for it: pass sample_inputs=")
    device = next((p.device for p in model.parameters()), None)
    if isinstance(sample_inputs, Mapping):
        call = ((), dict(sample_inputs))
    elif isinstance(sample_inputs, (tuple, list)):
        call = (tuple(sample_inputs), {})
    else:
        call = ((sample_inputs,), {})
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(device) if device else t, call)


@contextlib.contextmanager
def _eval(module: nn.Module) -> Iterator[None]:
    """Eval mode for a block: dropout would draw other numbers in another dtype."""
    training = {m: m.training for m in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for m, flag in training.items():
            m.training = flag


@contextlib.contextmanager
def _rng_of(module: nn.Module) -> Iterator[None]:
    """Leaves the random state of the CPU and of the module's devices as it was."""
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        yield


@contextlib.contextmanager
def _copied_buffers(module: nn.Module) -> Iterator[None]:
    """Gives the module copies of its buffers for a block: forwards may write to them."""
    kept = [(part, dict(part._buffers)) for part in module.modules()]
    copies = {b: b.detach().clone() for _, buffers in kept for b in buffers.values() if b is not None}
    try:
        for part, buffers in kept:
            part._buffers.update({n: copies[b] for n, b in buffers.items() if b is not None})
        yield
    finally:
        for part, buffers in kept:
            part._buffers.update(buffers)


def _floating(values: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, torch.Tensor) and t.is_floating_point()]


class _Wide(TorchFunctionMode):
    """In float64 what a forward computes in fp32, whatever dtype it is given."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args, kwargs = pytree.tree_map(lambda v: torch.float64 if v is torch.float32 else v, (args, kwargs or {}))
        return function(*args, **kwargs)


def _in_float64(
    layer: nn.Module, forward: Forward, call: Call, rounded: bool = False
) -> tuple[nn.Module, Forward, Call]:
    """All three in float64. ``rounded``: what is in fp16 or bf16 is off by up to half a unit in the last place."""
    generator = torch.Generator().manual_seed(0)

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        wide = tensor.double()
        if rounded and tensor.dtype.itemsize < torch.float32.itemsize:
            off = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device) - 0.5
            wide = wide * (1 + torch.finfo(tensor.dtype).eps * off)
        return wide

    def run(*args: Any, **kwargs: Any) -> Any:
        with _Wide():
            return forward(*args, **kwargs)

    wide = copy.deepcopy(layer).to(torch.float64)
    if rounded:
        wide.load_state_dict({name: widen(tensor) for name, tensor in layer.state_dict().items()})
    return wide, run, pytree.tree_map_only(torch.Tensor, widen, call)


def _run(layer: nn.Module, forward: Forward, call: Call, gradients: bool) -> dict[str, torch.Tensor]:
    """What one call gives by name: outputs, inputs and buffers as it leaves them, gradients of a fixed weighting."""
    with _copied_buffers(layer):
        return _run_on(layer, forward, call, gradients)


def _run_on(layer: nn.Module, forward: Forward, call: Call, gradients: bool) -> dict[str, torch.Tensor]:
    buffers = [name for name, _ in layer.named_buffers(remove_duplicate=False)]
    args, kwargs = copy.deepcopy(call)
    inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    floating = [t for t in inputs if t.is_floating_point()]
    with _rng_of(layer), torch.set_grad_enabled(gradients):
        torch.manual_seed(0)
        if gradients:
            for tensor in floating:
                tensor.requires_grad_()
        # The layer gets copies, as it would in a model: tensors with a history, which may be written to.
        copies = {tensor: tensor.clone() for tensor in inputs}
        args, kwargs = pytree.tree_map_only(torch.Tensor, copies.__getitem__, (args, kwargs))
        output = forward(layer, *args, **kwargs)
    outputs = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
    results = {f"output {i}" if len(outputs) > 1 else "output": t.detach() for i, t in enumerate(outputs)}
    results.update({f"input {i} afterwards": copies[t].detach() for i, t in enumerate(inputs)})
    after = dict(layer.named_buffers(remove_duplicate=False))
    results.update({f"buffer {n} afterwards": after[n].detach().clone() for n in buffers if after.get(n) is not None})
    if gradients:
        results.update(_gradients(layer, floating, [t for t in outputs if t.requires_grad]))
    return results


def _gradients(layer: nn.Module, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    wanted = {f"gradient of input {i}": t for i, t in enumerate(inputs)}
    wanted.update({f"gradient of {n}": p for n, p in layer.named_parameters() if p.requires_grad})
    if not outputs or not wanted:
        return {}
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device, t.dtype) for t in outputs]
    found = torch.autograd.grad(outputs, list(wanted.values()), weights, allow_unused=True)
    return {name: gradient for name, gradient in zip(wanted, found, strict=True) if gradient is not None}


def _deviation(
    got: torch.Tensor,
    expected: torch.Tensor,
    exact: torch.Tensor,
    fp32_roundings: int = 4,
    inherited: float = 0.0,
) -> Deviation:
    """``inherited``: how far off roundings of the inputs would make it."""
    if not expected.is_floating_point():
        return Deviation(problem="" if torch.equal(got, expected) else "the values differ")
    eps = torch.finfo(expected.dtype).eps * (fp32_roundings / 4 if expected.dtype is torch.float32 else 1)
    got, expected, exact = got.double(), expected.double(), exact.double()
    if not torch.equal(got.isfinite(), expected.isfinite()):
        return Deviation(problem="infinities or NaNs in other places than the original's")
    finite = exact.isfinite() & expected.isfinite()
    if not finite.any():
        return Deviation()
    got, expected, exact = got[finite], expected[finite], exact[finite]
    error = (got - exact).abs().max().item()
    allowed = max(2 * (expected - exact).abs().max().item(), 4 * eps * exact.abs().max().item(), inherited)
    if error <= allowed:
        return Deviation(error, allowed)
    why = "what roundings of its inputs make" if allowed == inherited else "twice the original's own error"
    problem = f"off by {error:.3g} from float64, {allowed:.3g} is allowed ({why})"
    return Deviation(error, allowed, problem)


def _shape(tensor: torch.Tensor) -> tuple:
    return tuple(tensor.shape), tensor.dtype


def _describe(results: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in results.items()) or "no tensors"

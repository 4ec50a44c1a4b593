"""A benchmark's inputs at one shape, and the passes over them that are measured."""

from collections.abc import Callable
from typing import Any

import torch

from tilegym.bench import check
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import BOTH
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Shape


class Inputs:
    """A benchmark's inputs at one shape, and copies of them for providers that overwrite theirs."""

    def __init__(self, benchmark: Benchmark, shape: Shape, device: str, dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator(device=device).manual_seed(seed)

        def make(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(sizes, generator=generator, device=device, dtype=torch.float32).to(dtype)

        self.benchmark, self._make = benchmark, make
        self.values = benchmark.inputs(make, **shape.dims)
        self.upstream: tuple[torch.Tensor, ...] = ()

    def oracle(self, gradients: bool) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """The outputs and the gradients of the oracle in fp64; draws the upstream gradients, 1 for a scalar loss."""
        exact = {k: v.double() if _floating(v) else v for k, v in self.values.items()}
        leaves = leaves_of(exact, self.benchmark.differentiable) if gradients else exact
        outputs = check.tensors(self.benchmark.oracle(**leaves))
        if not gradients:
            return outputs, ()
        drawn = (self._make(*output.shape) for output in outputs)
        self.upstream = tuple(torch.ones_like(g) if g.dim() == 0 else g for g in drawn)
        grads = torch.autograd.grad(
            outputs, [leaves[k] for k in self.benchmark.differentiable], [g.double() for g in self.upstream]
        )
        return tuple(output.detach() for output in outputs), grads

    def copy(self) -> "Inputs":
        """The same values in memory of their own, strides kept."""
        twin = object.__new__(Inputs)
        twin.benchmark, twin._make = self.benchmark, self._make
        twin.values = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self.values.items()}
        twin.upstream = tuple(g.clone() for g in self.upstream)
        return twin

    def _all(self) -> list[torch.Tensor]:
        return [v for v in self.values.values() if isinstance(v, torch.Tensor)] + list(self.upstream)

    def equals(self, other: "Inputs") -> bool:
        return all(torch.equal(a, b) for a, b in zip(self._all(), other._all(), strict=True))

    def restore(self, pristine: "Inputs") -> None:
        for own, value in zip(self._all(), pristine._all(), strict=True):
            own.copy_(value)


def _floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class _Computed(torch.autograd.Function):
    """The same memory as a result of autograd's."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad


def leaves_of(values: dict[str, Any], names: tuple[str, ...], activations: tuple[str, ...] = ()) -> dict[str, Any]:
    """The values with new leaves for ``names``; for the ``activations`` among them results of autograd's.

    All share the memory of ``values``.
    """
    leaves = {k: v.detach().requires_grad_() if k in names else v for k, v in values.items()}
    return leaves | {name: _Computed.apply(leaves[name]) for name in activations}


def wanted_gradients(leaves: dict[str, Any], names: tuple[str, ...]) -> list:
    """What torch.autograd.grad is to be asked for; to be called before an op that may change activations.

    An activation's gradient ends at the node that it came from, which does not run.
    """
    return [t if t.is_leaf else torch.autograd.graph.get_gradient_edge(t) for t in map(leaves.get, names)]


def steps(
    function: Callable, inputs: Inputs, mode: str, pristine: Inputs | None, activations: tuple[str, ...] = ()
) -> tuple[Callable, Callable]:
    """(setup, call) of a pass in ``mode``: what happens before the clock starts, and what is timed."""
    names = inputs.benchmark.differentiable

    def fresh(gradients: bool) -> dict[str, Any]:
        if pristine is not None:
            inputs.restore(pristine)
        return leaves_of(inputs.values, names, activations) if gradients else inputs.values

    def run_forward(leaves: dict[str, Any]) -> tuple[tuple[torch.Tensor, ...], list]:
        wanted = wanted_gradients(leaves, names)
        return check.tensors(function(**leaves)), wanted

    def run_backward(state: tuple[tuple[torch.Tensor, ...], list]) -> tuple[torch.Tensor, ...]:
        outputs, wanted = state
        return torch.autograd.grad(outputs, wanted, inputs.upstream)

    if mode == FORWARD:
        return lambda: fresh(False), lambda values: function(**values)
    if mode == BACKWARD:
        return lambda: run_forward(fresh(True)), run_backward
    return lambda: fresh(True), lambda leaves: run_backward(run_forward(leaves))


def compiled(provider: Provider) -> Callable:
    """What is called: torch.compile's product where the provider asks for it."""
    if not provider.compile:
        return provider.call
    # A new start: past a few recompilations of one function torch.compile silently stops compiling it.
    torch.compiler.reset()
    return torch.compile(provider.call, dynamic=False, fullgraph=True)


def run_once(provider: Provider, inputs: Inputs, gradients: bool) -> None:
    """Runs forward, and under autograd forward and backward if asked, so that all of it is compiled."""
    function = compiled(provider)
    outputs = check.tensors(function(**inputs.values))
    if gradients:
        inputs.upstream = tuple(torch.ones_like(output) for output in outputs)
        activations = inputs.benchmark.activations if provider.on_activations else ()
        setup, call = steps(function, inputs, BOTH, None, activations)
        call(setup())

"""What a benchmark of an op consists of: its inputs, its shapes, its providers, and the work that it must do.

A file ``tests/benchmark/bench_<op>.py`` holds one or more :class:`Benchmark` and nothing else that measures.
"""

import contextlib
import dataclasses
import importlib.util
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilegym.backend.in_place import set_gradients_in_place
from tilegym.errors import TileGymError

FORWARD, BACKWARD, BOTH = "forward", "backward", "both"
MODES = (FORWARD, BACKWARD, BOTH)
OURS = "tilegym"
# The op with backend="pytorch". Measured beside ours on a GPU; a benchmark whose formula it is has it among its peers.
PYTORCH = "pytorch backend"
IN_PLACE = "tilegym in place"  # ours under tilegym.set_gradients_in_place(True), on activations
TOKENS = (1, 16, 512, 8192)
MANY_TOKENS = (*TOKENS, 32768)  # where 8192 still leave much of what a call moves in the L2 cache
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class BenchmarkError(TileGymError, ValueError):
    """A benchmark, a file of providers or an option of ``tilegym bench`` cannot be used."""


@dataclass(frozen=True)
class Model:
    """The sizes of a model's layers that its ops see.

    ``intermediate`` is that of one expert where a layer's MLP is nothing but routed experts (``experts``).
    ``latent``: the attention is over latents, so that none of the sizes of heads is what other attention would see.
    """

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: bool = False
    latent: bool = False


MODELS = (
    Model("Llama-3.1-8B", 4096, 14336, 32, 8, 128, 128256),
    Model("Llama-3.1-70B", 8192, 28672, 64, 8, 128, 128256),
    Model("Qwen3-30B-A3B", 2048, 768, 32, 4, 128, 151936, experts=True),
    Model("DeepSeek-V2-Lite", 2048, 10944, 16, 16, 192, 102400, latent=True),
    Model("Gemma-3-4B", 2560, 10240, 8, 4, 256, 262208),
    Model("gpt-oss-20b", 2880, 2880, 64, 8, 64, 201088, experts=True),
    Model("Qwen3-8B", 4096, 12288, 32, 8, 128, 151936),
)
ATTENDING = tuple(model for model in MODELS if not model.latent)


@dataclass(frozen=True)
class Work:
    """The least that an op must do: bytes read once, bytes written once, floating-point operations."""

    read: int
    written: int
    flops: int = 0

    @property
    def bytes(self) -> int:
        return self.read + self.written

    def __add__(self, other: "Work") -> "Work":
        return Work(self.read + other.read, self.written + other.written, self.flops + other.flops)


@dataclass(frozen=True)
class Shape:
    """One point of a sweep: the sizes, passed by name to ``inputs`` and to the work, and where they come from."""

    label: str
    dims: dict[str, Any]
    model: str = ""

    @property
    def tokens(self) -> int | None:
        return self.dims.get("tokens")


@dataclass(frozen=True)
class Provider:
    """An implementation that is measured.

    Attributes:
        call: called with the benchmark's inputs by name; returns a tensor or a tuple of tensors.
        requires: a package without which the provider is left out.
        compile: wrap ``call`` in torch.compile, anew for every shape.
        context: a context manager that is entered around its calls, outside the time that is measured.
        jit: whether ``call`` compiles kernels when it is first made; such providers are run once ahead of the
            measurement, in processes beside each other.
        headline_only: whether to leave it out of sweeps, because it compiles for seconds at every shape. So does
            everything with ``compile``.
        on_activations: whether the benchmark's ``activations`` come to it as what they are in a model, results of
            autograd's, rather than as leaves; it is measured in training passes only.
    """

    call: Callable[..., Any]
    requires: str | None = None
    compile: bool = False
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    jit: bool = False
    headline_only: bool = False
    on_activations: bool = False

    def missing(self) -> str | None:
        """Why the provider cannot be used here, or None."""
        if self.requires is not None and importlib.util.find_spec(self.requires) is None:
            return f"{self.requires} is not installed"
        return None


def usual_peers(formula: Callable[..., Any], liger: Callable[..., Any] | None = None) -> dict[str, Provider]:
    """The formula as it stands and compiled, and ``liger``'s call where it is given."""
    peers = {"torch": Provider(formula), "torch.compile": Provider(formula, compile=True)}
    return peers if liger is None else peers | {"liger": Provider(liger, requires="liger_kernel", jit=True)}


@dataclass(frozen=True)
class Benchmark:
    """The declarative description of one op's benchmark.

    Attributes:
        op: the op's name, as it is dispatched.
        inputs: ``inputs(make, **dims)`` gives the arguments by name; ``make(*sizes)`` is a tensor of normal numbers.
        ours: calls the op; ``backend=`` is left to the dispatcher.
        oracle: the plain PyTorch formula, exact when it is given fp64.
        peers: the other implementations by name.
        baseline: the one among ``peers`` whose error in the working dtype is the measure for all.
        forward: ``forward(itemsize, **dims)``, the least work of a forward pass.
        backward: the same of a backward pass.
        both: the same of both together, where one may do what the other would: then the backward pass is not measured
            alone. Default: the sum.
        differentiable: the inputs whose gradients are measured; empty: forward only.
        activations: those of them that are no parameters, if the op can write their gradients over them, or over what
            it made of them; ours is measured doing so as well then (:data:`IN_PLACE`).
        shapes, quick, small: the sweep; the headline shapes, which ``--quick`` measures alone, the most telling one
            first; those for a machine without a GPU.
        host: the sizes at which host time is measured, so small that the GPU never holds the host up.
        quick_modes: the passes that ``--quick`` measures.
        reads_all: whether a pass reads all of its inputs, rather than a part that depends on their values.
    """

    op: str
    inputs: Callable[..., dict[str, Any]]
    ours: Callable[..., Any]
    oracle: Callable[..., Any]
    peers: dict[str, Provider]
    forward: Callable[..., Work]
    host: dict[str, Any]
    shapes: tuple[Shape, ...]
    quick: tuple[Shape, ...]
    small: tuple[Shape, ...]
    backward: Callable[..., Work] | None = None
    both: Callable[..., Work] | None = None
    differentiable: tuple[str, ...] = ()
    activations: tuple[str, ...] = ()
    quick_modes: tuple[str, ...] = (FORWARD,)
    baseline: str = "torch"
    reads_all: bool = True
    extra: dict[str, Provider] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.baseline not in self.peers:
            raise BenchmarkError(f"benchmark {self.op!r}: its baseline {self.baseline!r} is not among its peers")
        if bool(self.differentiable) != (self.backward is not None):
            raise BenchmarkError(f"benchmark {self.op!r}: give both differentiable and backward, or neither")
        if not set(self.activations) <= set(self.differentiable):
            raise BenchmarkError(f"benchmark {self.op!r}: activations {self.activations} must be differentiable")

    @property
    def providers(self) -> dict[str, Provider]:
        """Ours first, then the peers, then those of plug-in files."""
        return {OURS: Provider(self.ours, jit=True)} | self.peers | self.extra

    def in_training(self, backend: str) -> dict[str, Provider]:
        """What is measured besides ``providers`` in training passes where ``backend`` serves ours."""
        if not self.activations or backend != "cutile":
            return {}
        context = partial(set_gradients_in_place, True)
        return {IN_PLACE: Provider(self.ours, context=context, jit=True, on_activations=True)}

    @property
    def every_shape(self) -> tuple[Shape, ...]:
        """The headline shapes, then the rest of the sweep. A shape of both goes by its headline's label."""
        models = {_sizes(shape): shape.model for shape in reversed(self.shapes)}
        heads = [dataclasses.replace(s, model=s.model or models.get(_sizes(s), "")) for s in self.quick]
        known = {_sizes(shape) for shape in heads}
        return (*heads, *(shape for shape in self.shapes if _sizes(shape) not in known))

    def is_headline(self, shape: Shape) -> bool:
        return _sizes(shape) in {_sizes(headline) for headline in self.quick}

    @property
    def modes(self) -> tuple[str, ...]:
        if not self.differentiable:
            return (FORWARD,)
        return MODES if self.both is None else (FORWARD, BOTH)

    def work(self, mode: str, itemsize: int, dims: dict[str, Any]) -> Work:
        """The least work of a pass in ``mode``."""
        if mode == FORWARD:
            return self.forward(itemsize, **dims)
        if mode == BOTH and self.both is not None:
            return self.both(itemsize, **dims)
        backward = self.backward(itemsize, **dims)
        return backward if mode == BACKWARD else self.forward(itemsize, **dims) + backward


def shape(label: str = "", model: str = "", **dims: Any) -> Shape:
    """A shape; its label is by default the sizes, ``8192x4096``."""
    return Shape(label or "x".join(str(size) for size in dims.values()), dims, model)


def _sizes(shape: Shape) -> frozenset:
    return frozenset(shape.dims.items())


def plural(model: str, tokens: int) -> str:
    """The label "Llama-3.1-8B, 16 tokens"."""
    return f"{model}, {tokens} token{'s' if tokens != 1 else ''}"


def sweep(
    dims: Callable[[Model, int], dict[str, Any]],
    tokens: tuple[int, ...] = TOKENS,
    models: tuple[Model, ...] = MODELS,
) -> tuple[Shape, ...]:
    """The shapes that the models give for each number of tokens; sizes that two models share appear once."""
    shapes: dict[tuple, Shape] = {}
    for model in models:
        for count in tokens:
            sizes = dims(model, count)
            shapes.setdefault(tuple(sizes.items()), Shape(plural(model.name, count), sizes, model.name))
    return tuple(shapes.values())


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"tilegym_benchmark_{path.stem}", path)
    if spec is None or not path.is_file():
        raise BenchmarkError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # torch.compile looks for the globals of a provider there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # it is the user's
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise BenchmarkError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def default_folder() -> Path:
    """``tests/benchmark`` of the checkout that this package is installed from."""
    return Path(__file__).resolve().parents[3] / "tests" / "benchmark"


def load_benchmarks(folder: Path) -> dict[str, Benchmark]:
    """The benchmarks of every ``bench_*.py`` in ``folder``, by op.

    Raises:
        BenchmarkError: there are none, or two describe the same op.
    """
    found: dict[str, Benchmark] = {}
    for path in sorted(folder.glob("bench_*.py")):
        for benchmark in _load(path).BENCHMARKS:
            if benchmark.op in found:
                raise BenchmarkError(f"{path}: there is a benchmark of {benchmark.op!r} already")
            found[benchmark.op] = benchmark
    if not found:
        raise BenchmarkError(f"no bench_*.py in {folder}: give the folder of a checkout's tests/benchmark as --folder")
    return found


def add_providers(benchmarks: dict[str, Benchmark], path: Path) -> None:
    """Adds the providers of a plug-in file, whose ``PROVIDERS`` is {op: {name: callable or Provider}}.

    Raises:
        BenchmarkError: the file has no such dictionary, or names an op that has no benchmark or a provider twice.
    """
    plugged = getattr(_load(path), "PROVIDERS", None)
    if not isinstance(plugged, dict):
        raise BenchmarkError(f"{path} defines no dictionary PROVIDERS = {{op: {{name: callable}}}}")
    for op, providers in plugged.items():
        if op not in benchmarks:
            raise BenchmarkError(f"{path}: no benchmark of {op!r}; there are {', '.join(sorted(benchmarks))}")
        if not isinstance(providers, dict):
            raise BenchmarkError(f"{path}: PROVIDERS[{op!r}] is no dictionary {{name: callable}}")
        for name, provider in providers.items():
            if not isinstance(provider, Provider) and not callable(provider):
                raise BenchmarkError(f"{path}: {op}'s provider {name!r} is neither callable nor a Provider")
            if name in benchmarks[op].providers:
                raise BenchmarkError(f"{path}: {op} has a provider {name!r} already")
            benchmarks[op].extra[name] = provider if isinstance(provider, Provider) else Provider(provider, jit=True)

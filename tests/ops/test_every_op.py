"""What holds for every op, checked on the calls of ``samples.py``: a new op without one fails here.

Each check runs the cuTile implementation. What depends on an op's arguments is tested in its own file.
"""

import copy
import functools
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import samples
import torch
import torch.utils._pytree as pytree
from common import HAS_GPU
from common import PyTestCase
from common import gpu
from common import sanitized
from common import some
from torch.utils._python_dispatch import TorchDispatchMode

from tilegym import interpreter
from tilegym import ops
from tilegym.backend import get_available_backends_for_op
from tilegym.backend import get_registry_info
from tilegym.errors import UnsupportedError

DIFFERENTIABLE = sorted(set(samples.SAMPLES) - samples.NOT_DIFFERENTIABLE)
LOOPS = {"recurrent_gated_delta_rule"}  # its reference takes a step a token
every_op = pytest.mark.parametrize("op", sorted(samples.SAMPLES))
differentiable_op = pytest.mark.parametrize("op", DIFFERENTIABLE)


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would be checked instead of the kernel."""
    monkeypatch.setenv("DISABLE_FALLBACK", "1")


class Call:
    """A call of an op's sample, as a function of its tensors alone."""

    def __init__(self, op: str, backend: str = "cutile", **make: Any) -> None:
        arguments = samples.SAMPLES[op](samples.Make(**make))
        self.op, self.backend = getattr(ops, op), backend
        self.leaves, self.tree = pytree.tree_flatten(arguments)
        self.where = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        gradients = op not in samples.NOT_DIFFERENTIABLE
        self.tensors = tuple(
            leaf.detach().requires_grad_(gradients and leaf.requires_grad)
            for leaf in map(self.leaves.__getitem__, self.where)
        )

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = list(self.leaves)
        for i, tensor in zip(self.where, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        result = self.op(*args, **kwargs, backend=self.backend)
        return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def with_gradients(function: Callable, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The outputs of ``function`` and the gradients of those tensors that want one."""
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
    outputs = function(*leaves)
    wanted = [t for t in leaves if t.requires_grad]
    through = [o for o in outputs if o.requires_grad]
    if wanted:
        assert through, "the gradient is cut off"
    upstream = [torch.linspace(-1.0, 2.0, o.numel(), device=o.device).view(o.shape).to(o.dtype) for o in through]
    gradients = torch.autograd.grad(through, wanted, upstream) if wanted else ()
    return *(o.detach() for o in outputs), *gradients


def run(call: Call, tensors: tuple[torch.Tensor, ...] | None = None) -> tuple[torch.Tensor, ...]:
    return with_gradients(call, call.tensors if tensors is None else tensors)


def assert_same(results: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    torch.testing.assert_close(results, expected, rtol=0, atol=0)


def test_every_op_has_a_sample():
    # Other tests of this process may have declared ops of their own, as a tutorial does.
    own = {op for op, impls in get_registry_info().items() if any(f.startswith("tilegym.") for f in impls.values())}
    missing = own - set(samples.SAMPLES) - samples.WITHOUT_SAMPLE
    assert not missing, f"tests/ops/samples.py has no sample of {', '.join(sorted(missing))}"
    both = samples.WITHOUT_SAMPLE & set(samples.SAMPLES)
    assert not both, f"{', '.join(sorted(both))} have samples: take them from WITHOUT_SAMPLE"
    assert samples.NOT_DIFFERENTIABLE <= set(samples.SAMPLES)


@every_op
def test_results_are_the_references(op):
    """Loosely: the ops' own tests say how exactly. Here it shows that what is checked below are the op's results."""
    with sanitized():
        results = run(Call(op))
    torch.testing.assert_close(results, run(Call(op, backend="pytorch")), rtol=1e-2, atol=1e-2)


@every_op
@pytest.mark.parametrize(
    ("backend", "kind"), [("cutile", numpy.asarray), ("pytorch", torch.tensor)], ids=["numpy", "tensors"]
)
def test_numbers_of_other_types(op, backend, kind):
    """Are the numbers that they hold."""
    call = Call(op, backend, tokens=4)
    expected = run(call)
    numbers = [i for i, leaf in enumerate(call.leaves) if type(leaf) in (int, float)]
    for i in numbers:
        call.leaves[i] = kind(call.leaves[i])[()]
        call.where = [where for where in call.where if where != i]
    assert_same(run(call), expected)


@every_op
def test_three_runs_are_equal(op, monkeypatch):
    """On a GPU blocks run in no order; the interpreter is told to shuffle them."""
    call, launch_blocks = Call(op, tokens=9), interpreter.launch
    first = run(call)
    for seed in range(2):
        if not HAS_GPU:
            shuffled = functools.partial(launch_blocks, order="shuffled", seed=seed)
            monkeypatch.setattr(interpreter, "launch", shuffled)
        assert_same(run(call), first)


# The gradients of the recurrent rule are those of the chunked one.
@pytest.mark.parametrize("op", some(DIFFERENTIABLE, *(op for op in DIFFERENTIABLE if op not in LOOPS)))
@pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # that they are not fp64
def test_gradcheck(op):
    """In fp32, with steps that are large for it: a wrong formula is off by far more."""
    call = Call(op, tokens=4)
    assert any(t.requires_grad for t in call.tensors), "nothing to differentiate"
    torch.autograd.gradcheck(call, call.tensors, eps=1e-2, atol=2e-2, rtol=2e-2, nondet_tol=0.0, fast_mode=True)


@differentiable_op
def test_second_derivative(op):
    """An error, where it is not the reference's; also of a loss, whose own gradient is a constant."""

    def second(backend):
        call = Call(op, backend)
        wanted = [t for t in call.tensors if t.requires_grad]
        outputs = [o.float().sum() for o in call(*call.tensors) if o.requires_grad]
        first = torch.autograd.grad(outputs, wanted, create_graph=True)
        total = torch.stack([g.square().sum() for g in first]).sum() + outputs[0]
        return torch.autograd.grad(total, wanted)

    if op in samples.TWICE_DIFFERENTIABLE:
        torch.testing.assert_close(second("cutile"), second("pytorch"), rtol=1e-2, atol=1e-2)
    else:
        with pytest.raises(UnsupportedError, match="ran with create_graph=True"):
            second("cutile")


class Recorded(TorchDispatchMode):
    """Collects the calls of TileGym's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "tilegym":
            self.calls.append((function, copy.copy(args)))
        return function(*args, **(kwargs or {}))


@every_op
def test_operators(op, monkeypatch):
    """What torch.compile calls: schemas, fake results and functionalization of every operator that the op runs."""
    call = Call(op)
    with monkeypatch.context() as patch, Recorded() as recorded:
        patch.setattr(torch.compiler, "_is_compiling_flag", True)
        run(call)
    assert recorded.calls, f"{op} runs no operator of torch.library"
    for operator, args in recorded.calls:
        torch.library.opcheck(operator, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args))


@every_op
def test_compiles_once_for_all_lengths(op):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    calls = [Call(op, tokens=tokens) for tokens in (5, 9)]
    compiled = torch.compile(
        calls[0].__call__, fullgraph=True, dynamic=True, backend="inductor" if HAS_GPU else "aot_eager"
    )
    for call in calls:
        results, expected = with_gradients(compiled, call.tensors), run(call)
        # On a GPU inductor generates code of its own for what surrounds the kernels.
        torch.testing.assert_close(results, expected, **({} if HAS_GPU else {"rtol": 0, "atol": 0}))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "it was compiled again for another length"
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("op", sorted(set(samples.SAMPLES) - LOOPS))
def test_references_compile_once_for_all_lengths(op):
    """They serve calls in compiled code, too: without a GPU, and those that the kernels do not support."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    calls = [Call(op, tokens=tokens, backend="pytorch") for tokens in (5, 9)]
    compiled = torch.compile(calls[0].__call__, fullgraph=True, dynamic=True, backend="eager")
    for call in calls:
        torch.testing.assert_close(compiled(*call.tensors), call(*call.tensors))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "it was compiled again for another length"
    torch.compiler.reset()


@every_op
@pytest.mark.parametrize("backend", ["cutile", "pytorch"])
def test_autocast_changes_nothing(op, backend):
    """An op computes in the dtypes that it is given; the interfaces to models do what autocast asks for."""
    call = Call(op, backend)
    expected = run(call)
    autocast = torch.autocast(call.tensors[0].device.type, torch.bfloat16)
    assert_same(with_gradients(autocast(call.__call__), call.tensors), expected)
    if backend == "cutile":  # the backward pass, too: of what PyTorch computes autocast would reach PyTorch's own
        with autocast:
            assert_same(run(call), expected)


@every_op
def test_no_tokens(op):
    with sanitized():
        results = run(Call(op, tokens=0))
    torch.testing.assert_close(results, run(Call(op, tokens=0, backend="pytorch")))


@pytest.mark.parametrize("op", samples.ROWWISE)
def test_integers_are_a_type_error(op):
    """Named by op and argument, whatever backend: to say that a backend does not support them would be no help."""
    for backend in get_available_backends_for_op(op):
        call = Call(op, backend=backend)
        numbers = tuple(t.detach().to(torch.int32) if t.is_floating_point() else t for t in call.tensors)
        with pytest.raises(TypeError, match=rf"^{op}: \w+ .*torch\.int32"):
            call(*numbers)


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with nothing contiguous: in every second element of every second row of a larger tensor."""
    wide = tensor.new_zeros([2 * size for size in tensor.shape])
    view = wide[tuple(slice(None, None, 2) for _ in tensor.shape)]
    return view.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the order of the dimensions in memory reversed."""
    axes = tuple(reversed(range(tensor.dim())))
    return tensor.detach().permute(axes).contiguous().permute(axes).requires_grad_(tensor.requires_grad)


def far_apart(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with more than 2^31 elements between the first row and the last, where there are several."""
    lead = tensor.shape[:-1]
    if not lead or max(lead) < 2 or not tensor.is_floating_point():
        return tensor
    far = lead.index(max(lead))
    strides = list(tensor.contiguous().stride())
    strides[far] = (2**31 // (lead[far] - 1) // 64 + 2) * 64
    # On a CPU only what is touched takes memory.
    memory = torch.empty((lead[far] - 1) * strides[far] + tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return memory.as_strided(tensor.shape, strides).copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


@every_op
@pytest.mark.parametrize("layout", [every_other, transposed, far_apart], ids=lambda layout: layout.__name__)
def test_layouts(op, layout):
    call = Call(op, dtype=torch.bfloat16 if layout is far_apart else torch.float32)
    expected = run(call)
    with sanitized():
        results = run(call, tuple(map(layout, call.tensors)))
    torch.testing.assert_close(results, expected)


@gpu
class Test_OnGPU(PyTestCase):
    @pytest.fixture(autouse=True)
    def small_memory(self) -> Iterator[None]:
        yield
        torch.cuda.empty_cache()

    @every_op
    def test_graph_replays_with_changed_inputs(self, op):
        call, other = (Call(op, tokens=64, dtype=torch.bfloat16, seed=seed) for seed in (0, 1))
        inputs = [t.detach().clone() for t in call.tensors]
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            call(*inputs)  # compiles
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                captured = call(*inputs)
            for tensor, value in zip(inputs, other.tensors, strict=True):
                tensor.copy_(value.detach())
            graph.replay()
            expected = call(*inputs)
            stream.synchronize()
        assert_same(captured, expected)

    @every_op
    def test_stream(self, op):
        """On a stream that is busy: kernels on another one would read what is not written yet."""
        call = Call(op, tokens=64, dtype=torch.bfloat16)
        expected = run(call)
        late = tuple(torch.zeros_like(t).requires_grad_(t.requires_grad) for t in call.tensors)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)  # cycles, some 50 ms
            with torch.no_grad():
                for tensor, value in zip(late, call.tensors, strict=True):
                    tensor.copy_(value)
            results = run(call, late)
        stream.synchronize()
        assert_same(results, expected)

    @every_op
    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_device(self, op):
        """On another device than the current one."""
        call = Call(op, tokens=64, dtype=torch.bfloat16)
        expected = run(call)
        results = run(call, tuple(t.detach().to("cuda:1").requires_grad_(t.requires_grad) for t in call.tensors))
        assert torch.cuda.current_device() == 0
        assert {t.device for t in results} == {torch.device("cuda:1")}
        assert_same(tuple(t.to("cuda:0") for t in results), expected)

"""What the tests of the ops share: devices, parameters, and the measure of correctness.

A kernel's results are compared with an oracle, the reference run in fp64 on the same inputs. How far off they may be
is no constant: the reference itself is run in the working dtype, and the kernel may be at most ``RATIO`` times as far
from the oracle as the reference is. Without a GPU a cuTile kernel runs in the interpreter, under its sanitizer.
"""

import contextlib
import functools
import re
import struct
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda.tile import _compile
from cuda.tile._bytecode.version import BytecodeVersion
from cuda.tile._passes.check_dtype_support import check_dtype_support
from torch.nn.attention import SDPBackend
from torch.nn.attention import sdpa_kernel

from tilegym import interpreter
from tilegym.backend import get_available_backends_for_op
from tilegym.backend.selector import MIN_COMPUTE_CAPABILITY
from tilegym.interpreter.signature import kernel_signature

RATIO = 2.0
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
# Launches that overlap need compute capability 9.0: whether they do, and for which architectures that is compiled.
OVERLAPS = ((False, ("sm_80", "sm_100", "sm_120")), (True, ("sm_90",)))
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
HAS_GPU = (
    not interpreter.is_installed()  # whose imaginary GPU has no memory of its own
    and torch.cuda.is_available()
    and torch.cuda.get_device_capability() >= MIN_COMPUTE_CAPABILITY
)


def device() -> str:
    """The device that tests put their tensors on."""
    return "cuda" if HAS_GPU else "cpu"


def gpu(test: Callable) -> Callable:
    """Marks a test that needs a GPU; it is skipped where there is none."""
    return pytest.mark.gpu(pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU that cuTile supports")(test))


def backends(op: str) -> pytest.MarkDecorator:
    """Parametrises a test over the backends that implement ``op`` here, as ``backend``."""
    return pytest.mark.parametrize("backend", get_available_backends_for_op(op))


def dtypes(*chosen: torch.dtype) -> pytest.MarkDecorator:
    """Parametrises a test over ``chosen``, by default fp32, fp16 and bf16, as ``dtype``."""
    chosen = chosen or (torch.float32, torch.float16, torch.bfloat16)
    return pytest.mark.parametrize("dtype", chosen, ids=lambda d: str(d).removeprefix("torch."))


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal random numbers on :func:`device`, the same ones everywhere."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device(), dtype)


def sanitized() -> contextlib.AbstractContextManager:
    """Where kernels run in the interpreter: its sanitizer. On a GPU: nothing."""
    return contextlib.nullcontext() if HAS_GPU else interpreter.sanitize()


@contextlib.contextmanager
def recorded_launches(run: bool = False) -> Iterator[list[tuple[Any, tuple]]]:
    """Collects (kernel, args) of every launch on CPU tensors within the block; runs them only if asked."""
    launches, real = [], interpreter.launch

    def record(grid, kernel, args):
        launches.append((kernel, args))
        if run:
            real(grid, kernel, args)

    interpreter.launch = record
    try:
        yield launches
    finally:
        interpreter.launch = real


def some(values: Iterable, *quick: Any) -> list:
    """Values of a parameter, of which all but ``quick`` are those of slow tests."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def assert_compiles(kernel: Any, args: tuple, architectures: tuple[str, ...] = ARCHITECTURES) -> None:
    """Compiles ``kernel`` for each architecture as a launch with ``args`` (CPU tensors) would; takes seconds."""
    try:
        with _front_end_runs_once():
            cubins = {arch: interpreter.compile_kernel(kernel, args, arch) for arch in architectures}
    except _compile.TileCompilerError:
        for arch in architectures:
            interpreter.compile_kernel(kernel, args, arch)  # the same error, with its line
        raise
    for arch, cubin in cubins.items():
        assert cubin[:4] == b"\x7fELF", arch
        assert arch != "sm_90" or not waits_for_registers(cubin), "its warps would wait for registers for ever"


@contextlib.contextmanager
def _front_end_runs_once() -> Iterator[None]:
    """For one kernel and signature: cuTile's bytecode is the same for every architecture, and takes as long to make as
    to assemble. What depends on the architecture, the check of dtypes, is done for each. The bytecode names no lines:
    cuTile's cache on disk then knows kernels again that were only moved."""
    real, first = _compile._get_bytecode, []

    def get_bytecode(keeper, options, anonymize_debug_info):
        if keeper.bytecode_version < BytecodeVersion.V_13_3:
            return real(keeper, options, anonymize_debug_info)
        if not first:
            keeper.final_ir = [None] * keeper.num_signatures  # has it kept
            first.extend((keeper, real(keeper, options, anonymize_debug_info=True)))
        for block in first[0].final_ir:
            check_dtype_support(block, keeper.sm_arch, keeper.bytecode_version)
        return first[1]

    _compile._get_bytecode = get_bytecode
    try:
        yield
    finally:
        _compile._get_bytecode = real


def waits_for_registers(cubin: bytes) -> bool:
    """Whether a warpgroup of a kernel for sm_90 asks for more registers than the others can leave it.

    Such kernels come out of tileiras 13.4 where the warps that load share a reduction with those that compute: they
    never end.
    """
    changes = re.findall(rb"\xc8\x79\0\0(.)\0\0\0\0([\5\6])", cubin, re.DOTALL)  # USETMAXREG DEALLOC, TRY_ALLOC
    asked, left = ([count[0] for count, kind in changes if kind == way] for way in (b"\6", b"\5"))
    if not asked:
        return False
    (threads,) = struct.unpack_from("<I", cubin, cubin.index(b"\4\x10\x0c\0") + 4)  # EIATTR_REQNTID
    groups = threads // 128
    return max(asked) + min(left) * (groups - 1) > registers_of(cubin) * groups


def registers_of(cubin: bytes) -> int:
    """How many registers a kernel is given for each thread."""
    return struct.unpack_from("<I", cubin, cubin.index(b"\4\x2f\x08\0") + 8)[0]  # EIATTR_REGCOUNT


def of_plain_sdpa(reference: Callable) -> Callable:
    """``reference`` with SDPA's unfused kernel: for fp32 on a GPU another one splits numbers in two, and makes NaN of
    the second half of infinity."""

    @functools.wraps(reference)
    def call(**kwargs):
        with sdpa_kernel(SDPBackend.MATH):
            return reference(**kwargs)

    return call


def assert_launches_compile(call: Callable[[], Any], architectures: tuple[str, ...] = ARCHITECTURES) -> None:
    """Compiles every kernel that ``call`` launches on CPU tensors, without running any."""
    with recorded_launches() as launches:
        call()
    assert launches, "nothing was launched on CPU tensors"
    for kernel, args in distinct(launches):
        assert_compiles(kernel, args, architectures)


def distinct(launches: list[tuple[Any, tuple]]) -> list[tuple[Any, tuple]]:
    """Of launches that the compiler cannot tell apart only one."""
    return list({(k, repr(kernel_signature(k, args).parameters)): (k, args) for k, args in launches}.values())


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def _prepared(value: Any, dtype: torch.dtype | None, gradient: bool) -> Any:
    """A leaf of its own for a tensor argument, in ``dtype`` if it is floating point; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_floating_point():
        return value
    # A copy would lose the strides under test; the leaf shares memory with the caller's tensor instead.
    leaf = value.detach().to(dtype) if dtype is not None else value.detach()
    return leaf.requires_grad_(gradient)


class PyTestCase:
    """Base class of the op tests."""

    def assertClose(
        self, name: str, got: torch.Tensor, reference: torch.Tensor, oracle: torch.Tensor, *others: torch.Tensor
    ) -> None:
        """``got`` is as near to ``oracle`` as ``reference`` is, within RATIO; NaN and infinities where it has them.

        Both the largest error and the root mean square are compared. ``others`` are further results of the reference:
        the least exact counts. A floor is added for references that are exact by luck, as happens with few elements:
        half an ulp of the dtype, as far as a correctly rounded result is off, and an ulp of fp32, for the steps that
        led to it.
        """
        assert got.shape == reference.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(reference.shape)}"
        assert got.dtype == reference.dtype, f"{name}: dtype {got.dtype}, expected {reference.dtype}"
        assert got.device == reference.device, f"{name}: device {got.device}, expected {reference.device}"
        finite = reference.isfinite()
        torch.testing.assert_close(
            got[~finite], reference[~finite], rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{name}, not finite: {m}"
        )
        finite &= oracle.isfinite()
        if not finite.any():
            return
        exact = oracle[finite].double()
        error = (got[finite].double() - exact).abs()
        references = [(r[finite].double() - exact).abs() for r in (reference, *others)]
        floor = torch.finfo(got.dtype).eps / 2 + torch.finfo(torch.float32).eps
        for norm, of in (("largest", torch.max), ("root mean square", lambda t: t.square().mean().sqrt())):
            allowed = max(map(of, references))
            limit = RATIO * allowed + floor * of(exact.abs())
            assert of(error) <= limit, (
                f"{name}: {norm} error {of(error):.3e} against the fp64 oracle, the reference's is {allowed:.3e}, "
                f"allowed {limit:.3e}; worst at flat index {error.argmax()} of the finite ones"
            )

    def assertCorrectness(
        self,
        test_fn: Callable,
        ref_fn: Callable,
        kwargs: dict[str, Any],
        extra_test_kwargs: dict[str, Any] | None = None,
        gradient: bool | tuple[str, ...] = False,
        other_ref_fns: tuple[Callable, ...] = (),
    ) -> None:
        """``test_fn`` is as exact as ``ref_fn``, forward and, if asked, in the gradients.

        Args:
            test_fn: what is tested, called with kwargs and extra_test_kwargs.
            ref_fn: the reference: computes in fp64 when it is given fp64.
            kwargs: arguments of both by name; tensors keep their strides.
            extra_test_kwargs: further arguments of test_fn alone (``backend=``).
            gradient: True for the gradients with respect to every floating-point tensor in kwargs, or their names.
            other_ref_fns: other ways in which PyTorch computes the same, of which the least exact counts: with another
                layout a product takes another kernel of cuBLAS, which adds in another order.
        """
        floating = [k for k, v in kwargs.items() if isinstance(v, torch.Tensor) and v.is_floating_point()]
        wanted = floating if gradient is True else list(gradient or ())
        runs = {}
        for run, function, extra, dtype in (
            ("test", test_fn, extra_test_kwargs or {}, None),
            ("reference", ref_fn, {}, None),
            ("oracle", ref_fn, {}, torch.float64),
            *((f"reference {i}", function, {}, None) for i, function in enumerate(other_ref_fns)),
        ):
            arguments = {k: _prepared(v, dtype, k in wanted) for k, v in kwargs.items()}
            with sanitized() if run == "test" else contextlib.nullcontext():
                outputs = _tensors(function(**arguments, **extra))
                results = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
                if wanted:
                    outputs = [o for o in outputs if o.requires_grad]
                    upstream = [randn(*o.shape, dtype=kwargs[wanted[0]].dtype, seed=7).to(o) for o in outputs]
                    gradients = torch.autograd.grad(outputs, [arguments[k] for k in wanted], upstream)
                    results |= {f"gradient of {k}": g for k, g in zip(wanted, gradients, strict=True)}
            runs[run] = results
        for name, got in runs["test"].items():
            others = (runs[f"reference {i}"][name] for i in range(len(other_ref_fns)))
            self.assertClose(name, got, runs["reference"][name], runs["oracle"][name], *others)

    def assertCompiledEqualsEager(self, function: Callable, *inputs: torch.Tensor) -> None:
        """``torch.compile(function, fullgraph=True)`` gives function's outputs and input gradients.

        Bit for bit on a CPU; on a GPU inductor generates its own sin, exp and so on for the code around the ops, and
        PyTorch 2.9 rounds silu otherwise where it traces it.
        """
        results = []
        torch.compiler.reset()
        for run in (function, torch.compile(function, fullgraph=True, backend="inductor" if HAS_GPU else "aot_eager")):
            leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
            outputs = _tensors(run(*leaves))
            upstream = [randn(*o.shape, dtype=o.dtype, seed=7) for o in outputs]
            wanted = [t for t in leaves if t.requires_grad]
            results.append((*outputs, *torch.autograd.grad(outputs, wanted, upstream)))
        tolerance = {} if HAS_GPU or TORCH < (2, 10) else {"rtol": 0, "atol": 0}
        for eager, compiled in zip(*results, strict=True):
            torch.testing.assert_close(compiled, eager, **tolerance)

    def assertLargeInput(self, function: Callable, *shape: int) -> None:
        """The last rows of an input of more than 2^31 elements come out as they do with few before them."""
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        assert x.numel() > 2**31
        torch.testing.assert_close(function(x)[-2:], function(x[-16:])[-2:])

    def assertCaptures(self, function: Callable, *inputs: torch.Tensor, exact: bool = True) -> None:
        """A CUDA graph of ``function``, replayed after the inputs changed, gives what an eager call gives.

        Not ``exact``: up to rounding, for what computes otherwise while it is captured.
        """
        function(*inputs)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = _tensors(function(*inputs))
        for i, tensor in enumerate(inputs):
            if tensor.is_floating_point():
                tensor.copy_(randn(*tensor.shape, dtype=tensor.dtype, seed=100 + i))
        graph.replay()
        for got, expected in zip(captured, _tensors(function(*inputs)), strict=True):
            torch.testing.assert_close(got, expected, **({"rtol": 0, "atol": 0} if exact else {}))

"""Compiles the kernels that some code is about to launch, side by side and ahead of their first launch.

A launch compiles its kernel and waits for that, one kernel after the other. Here the code is run once without launching
anything, to see what it would launch; the compilers then run in parallel, and the launches that follow find their
binaries in cuTile's cache on disk. For a model of Llama's kind the trial of its decoding step, its first prompt and its
steps took an H200's host (16 cores) 22 s so, and 43 s without.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cuda.tile as ct
import torch
from cuda.tile import compilation
from cuda.tile._cext import default_tile_context
from torch.utils._python_dispatch import TorchDispatchMode

from tilegym.backend import recording
from tilegym.backend.recording_writer import Submission
from tilegym.interpreter.signature import kernel_signature

Job = tuple[ct.kernel, compilation.KernelSignature | None]


class _Collector(TorchDispatchMode):
    """Takes a recorder's place, and keeps the kernels that calls launch from running.

    What they would write is zero: PyTorch's operations behind them find no index out of range.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.refused = self.put_off = True
        self.answers: list[tuple[Callable, Any]] = []
        self.jobs: dict[tuple[ct.kernel, str], Job] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as the recorder's

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result.zero_() if function in recording.ALLOCATIONS else result

    def launch(self, how: Submission, device: int, grid: tuple, kernel: Any, args: tuple, overlap: bool) -> None:
        if self.thread != threading.get_ident():
            how.submit(device, grid, kernel, args, overlap)
            return
        signature = signature_of(kernel, args, device)
        self.jobs[kernel, repr(signature)] = kernel, signature

    def lent(self, give: Callable[[], tuple[torch.Tensor, ...]], varies: bool) -> tuple[torch.Tensor, ...]:
        return give()


def collect(run: Callable[[], Any]) -> list[Job]:
    """What ``run`` would launch on this thread, each kernel and signature once; it launches nothing.

    Empty where calls are being recorded. Where ``run`` fails, what it launched before: it will fail again, where it is
    run to launch something.
    """
    collector = _Collector()
    with recording.replaced_by(collector) as replaced, contextlib.suppress(Exception), _nothing_compiled():
        if replaced:
            with collector:
                run()
    return list(collector.jobs.values())


def _nothing_compiled() -> contextlib.AbstractContextManager[Any]:
    """Within the block what is compiled by torch.compile runs as it is written: what PyTorch's compiler meets under a
    dispatch mode, as the collector is one, it leaves alone for good."""
    # Where the compiler is not imported, nothing is compiled, and to import it takes a second.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def compile_ahead(run: Callable[[], Any], device: torch.device) -> int:
    """Compiles what ``run`` would launch on a GPU into cuTile's cache on disk, and tells how many kernels those were.

    Nothing is done elsewhere, nor without that cache, and little where the last of them, the first and the one in the
    middle are in it: the others are likely there, too. ``run`` must be one that may run on zeros, and leaves nothing
    behind that anybody reads.
    """
    if device.type != "cuda" or default_tile_context.config.cache_dir is None:
        return 0
    from tilegym.backend.cutile.tuning_bench import gpu_bench

    with torch.cuda.device(device):
        jobs = collect(run)
        return compile_jobs(jobs, gpu_bench(torch.cuda.current_device()).arch) if jobs else 0


def compile_jobs(jobs: list[Job], arch: str) -> int:
    """:func:`compile_ahead` of what was collected, for an architecture such as "sm_90"."""
    from tilegym.backend.cutile.tuning_bench import compile_one
    from tilegym.backend.cutile.tuning_bench import compiler_threads
    from tilegym.backend.cutile.tuning_bench import parallel_compilation

    with parallel_compilation() as runs, ThreadPoolExecutor(compiler_threads()) as pool:
        for job in (jobs[-1], jobs[0], jobs[len(jobs) // 2]):
            compile_one(job, arch)
            if runs:
                list(pool.map(functools.partial(compile_one, arch=arch), jobs))
                break
        return len(runs)


def signature_of(kernel: ct.kernel, args: tuple, device: int = 0) -> compilation.KernelSignature | None:
    """The signature that a launch of ``kernel`` with ``args`` compiles for; None if it cannot be told.

    ``device`` is the index of the GPU with the tensors, -1 for those of the CPU.
    """
    try:
        if device < 0:
            return kernel_signature(kernel, args)
        convention = compilation.CallingConvention
        signature = compilation.KernelSignature.from_kernel_args(kernel, args, convention.cutile_python_v2())
        # A launch takes the second convention only where it says more than the first; its binary has another name.
        if any(map(_needs_v2, signature.parameters)):
            return signature
        return compilation.KernelSignature.from_kernel_args(kernel, args, convention.cutile_python_v1())
    except Exception:
        return None  # the launch will say what is wrong, if anything is


def _needs_v2(constraint: compilation.ParameterConstraint) -> bool:
    if isinstance(constraint, compilation.ListConstraint):
        return _needs_v2(constraint.element)
    if isinstance(constraint, compilation.ArrayConstraint):
        return any(size is not None for size in constraint.shape_constant)
    return isinstance(constraint, compilation.TupleConstraint)

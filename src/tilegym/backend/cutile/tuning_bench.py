"""The GPU as the autotuner sees it: compiling candidates in parallel, launching them, timing them with a cold L2."""

import contextlib
import functools
import io
import os
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import cuda.tile as ct
import torch
from cuda.tile import compilation

from tilegym import env
from tilegym.backend import recording
from tilegym.backend.cutile.compile_ahead import signature_of
from tilegym.backend.cutile.launch import launch
from tilegym.backend.cutile.tuning import Candidate

_parallel_lock = threading.Lock()


class GpuBench:
    """One CUDA device."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(index)
        self.gpu = properties.name
        self.arch = f"sm_{properties.major}{properties.minor}"
        self._l2_bytes = properties.L2_cache_size

    def ready(self) -> bool:
        return not (
            torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing() or recording.is_replaced()
        )

    def compile(self, candidates: Sequence[Candidate]) -> list[Exception | None]:
        """Compiles into cuTile's disk cache, from which the first launch takes the binary."""
        with torch.cuda.device(self.device):
            jobs = [
                (candidate.kernel, signature_of(candidate.kernel, candidate.make_args())) for candidate in candidates
            ]
        return compile_all(jobs, self.arch, env.tune_timeout())

    def run(self, candidate: Candidate, args: tuple) -> None:
        with ct.compiler_timeout(env.tune_timeout()):
            self._launch(candidate, args)
        torch.cuda.current_stream(self.device).synchronize()

    def time(self, candidate: Candidate, args: tuple, reset: Callable[[], None], samples: int) -> list[float]:
        events = []
        flush = self._flush_buffer()
        with torch.cuda.device(self.device):
            for _ in range(samples):
                reset()
                flush.zero_()  # also keeps the GPU busy while the host issues what follows
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                self._launch(candidate, args)
                end.record()
                events.append((start, end))
            torch.cuda.current_stream(self.device).synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events]

    def _launch(self, candidate: Candidate, args: tuple) -> None:
        launch(self._like, candidate.grid(args), candidate.kernel, args)

    @functools.cached_property
    def _like(self) -> torch.Tensor:
        return torch.empty(0, device=self.device)

    def _flush_buffer(self) -> torch.Tensor:
        return torch.empty(2 * self._l2_bytes, dtype=torch.uint8, device=self.device)


@functools.cache
def gpu_bench(index: int) -> GpuBench:
    """The bench of the CUDA device with this index."""
    return GpuBench(index)


def compile_all(
    jobs: Sequence[tuple[ct.kernel, compilation.KernelSignature | None]], arch: str, timeout: float
) -> list[Exception | None]:
    """Compiles kernels in parallel threads into cuTile's disk cache; for each the exception that it ended in.

    Args:
        jobs: kernels, hints included, with the signatures to compile for; one without signature is passed over.
        arch: "sm_90".
        timeout: seconds that the compiler may take for one of them.
    """
    with parallel_compilation(), ct.compiler_timeout(timeout), ThreadPoolExecutor(compiler_threads()) as pool:
        return list(pool.map(functools.partial(compile_one, arch=arch), jobs))


def compile_one(job: tuple[ct.kernel, compilation.KernelSignature | None], arch: str) -> Exception | None:
    """:func:`compile_all` for one kernel, on this thread."""
    kernel, signature = job
    try:
        if signature is not None:
            compilation.export_kernel(kernel, [signature], io.BytesIO(), gpu_code=arch, output_format="cubin")
    except Exception as error:
        return error
    return None


def compiler_threads() -> int:
    return min(16, os.cpu_count() or 1)


@contextlib.contextmanager
def parallel_compilation() -> Iterator[list[str]]:
    """Within the block, threads that compile cuTile kernels run the compiler proper side by side.

    The list names the bytecode files for which it ran: kernels in cuTile's cache on disk need none.

    cuTile holds one lock over a whole compilation. Its Python front end (a hundredth of a second) needs that; the wait
    for the tileiras process that follows does not, so the lock is let go for as long as that runs: eight variants of
    a matmul take half the time with two threads on two cores.
    """
    from cuda.tile import _compile as front_end

    with _parallel_lock:
        compile_cubin, lock, runs = front_end.compile_cubin, front_end._compiler_lock, []

        @functools.wraps(compile_cubin)
        def without_lock(bytecode, *args, **kwargs):
            runs.append(bytecode)
            lock.release()
            try:
                return compile_cubin(bytecode, *args, **kwargs)
            finally:
                lock.acquire()

        front_end.compile_cubin = without_lock
        try:
            yield runs
        finally:
            front_end.compile_cubin = compile_cubin

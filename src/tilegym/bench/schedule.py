"""In which order a run measures, and when it stops."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from itertools import chain
from itertools import zip_longest

from tilegym.bench.deadline import Late
from tilegym.bench.deadline import at_most
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Shape

Task = tuple[Benchmark, Shape, tuple[str, ...]]

# Roughly by what language models spend their time on, so that a run that ends early has measured what matters most.
IMPORTANCE = (
    "fmha",
    "fmha_decode",
    "fmha_varlen",
    "fmha_paged_decode",
    "linear",
    "quantized_linear",
    "matmul",
    "fused_moe",
    "rms_norm",
    "fused_linear_cross_entropy",
    "cross_entropy",
    "mla",
    "mla_decoding",
    "chunk_gated_delta_rule",
    "recurrent_gated_delta_rule",
    "silu_and_mul",
    "swiglu",
    "geglu",
    "apply_rope_base",
    "softmax",
    "layer_norm",
    "fused_add_rms_norm",
    "attention_sink",
    "attention_sink_decode",
    "gemma_attention",
    "gemma_attention_decode",
    "group_gemm",
    "ragged_group_gemm",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "gated_delta_step",
    "rms_norm_linear",
    "rms_norm_swiglu",
    "linear_add",
    "rms_norm_add",
    "rope_and_cache",
    "rope_fmha_decode",
    "argmax",
    "moe_topk_routing",
    "rms_norm_gated",
    "sigmoid_mul",
    "dual_rms_norm",
    "bmm",
    "gelu",
    "relu",
    "dropout",
    "group_norm",
)


def by_importance(ops: list[str]) -> list[str]:
    """The ops in the order in which they are measured; those that are not listed come last, by name."""
    ranks = {op: rank for rank, op in enumerate(IMPORTANCE)}
    return sorted(ops, key=lambda op: (ranks.get(op, len(ranks)), op))


def in_rounds(tasks: list[Task]) -> list[Task]:
    """Every op's first shape, then every op's second, and so on; within a round the ops keep their order."""
    queues: dict[str, list[Task]] = {}
    for task in tasks:
        queues.setdefault(task[0].op, []).append(task)
    rounds = chain.from_iterable(zip_longest(*queues.values()))
    return [task for task in rounds if task is not None]


class OutOfTime(Late):
    """The time for what runs is over. Not an Exception: whatever a provider catches, it must not catch this."""


class Clock:
    """The time of a whole run; endless for ``minutes=None``."""

    def __init__(self, minutes: float | None = None) -> None:
        self.end = float("inf") if minutes is None else time.monotonic() + 60 * minutes

    @property
    def limited(self) -> bool:
        return self.end != float("inf")

    @property
    def remaining(self) -> float:
        return self.end - time.monotonic()

    @contextlib.contextmanager
    def at_most(self, seconds: float) -> Iterator[None]:
        """Raises OutOfTime in the block after ``seconds``, or when the run's time is over if that is sooner."""
        seconds = min(seconds, self.remaining)
        with contextlib.nullcontext() if seconds == float("inf") else at_most(seconds, OutOfTime):
            yield


@contextlib.contextmanager
def terminate_like_ctrl_c() -> Iterator[None]:
    """Within the block SIGTERM, which ``timeout`` sends, is a KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

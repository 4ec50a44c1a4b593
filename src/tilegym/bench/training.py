"""Training steps of a model: the time of forward pass, backward pass and optimizer, the memory they take, losses."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from dataclasses import dataclass
from typing import Any

import torch

from tilegym import interrupts
from tilegym.bench import compare
from tilegym.bench import gradients
from tilegym.bench.prompts import Batch
from tilegym.bench.timing import Timing

ADAMW, NO_OPTIMIZER = "adamw", "none"
OPTIMIZERS = (ADAMW, NO_OPTIMIZER)
FLAGS = ("gradient_checkpointing", "gradients_in_place", "graph", "compile")  # what is said of a run where it is on


@dataclass(frozen=True)
class Step:
    """Seconds of one step's parts."""

    forward: float
    backward: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.optimizer


@dataclass(frozen=True)
class Memory:
    """Bytes on a GPU. ``peak``: the most that a step allocates, and what graphs keep for it; ``activations``: what a
    forward pass left there for the backward pass; the others are there from step to step."""

    peak: int
    activations: int
    weights: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class Measurement:
    """Timed steps of ``tokens`` tokens each; ``losses`` of all steps, warm-up included; no ``memory`` on a CPU."""

    steps: list[Step]
    losses: list[float]
    tokens: int
    memory: Memory | None

    def summary(self) -> dict[str, Any]:
        """Plain data: medians in milliseconds, the spread of whole steps as their 20th and 80th percentile."""
        whole = Timing.of([step.total for step in self.steps])
        return compare.plain(
            {
                "step_ms": 1e3 * whole.median,
                "step_ms_low": 1e3 * whole.low,
                "step_ms_high": 1e3 * whole.high,
                **{
                    f"{part}_ms": 1e3 * statistics.median(getattr(step, part) for step in self.steps)
                    for part in ("forward", "backward", "optimizer")
                },
                "tokens_per_second": self.tokens / whole.median,
                "memory_bytes": asdict(self.memory) if self.memory else None,
                "losses": self.losses,
                "step_ms_of_steps": [1e3 * step.total for step in self.steps],
            }
        )


class Trainer:
    """Takes steps: one batch after the other, over and over.

    Args:
        model: in training mode.
        batches: where the model is.
        optimizer: of ``OPTIMIZERS``.
        learning_rate: of the optimizer.
    """

    def __init__(self, model: Any, batches: list[Batch], optimizer: str, learning_rate: float) -> None:
        self.model = model
        self._batches = batches
        self._taken = 0
        self.tokens = batches[0].input_ids.numel()  # of a step: batches are of one size
        self.optimizer = None
        if optimizer == ADAMW:
            fused = model.device.type == "cuda"
            trained = [p for p in model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.AdamW(trained, lr=learning_rate, fused=fused)

    def step(self, mark: Callable[[], None] = lambda: None) -> torch.Tensor:
        """A step; returns the loss. ``mark`` is called before it and after each of its three parts."""
        interrupts.check()
        batch = self._batches[self._taken % len(self._batches)]
        self._taken += 1
        mark()
        loss = gradients.loss_of(self.model, batch)
        mark()
        loss.backward()
        mark()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad()
        mark()
        return loss.detach()


def measure(trainer: Trainer, steps: int, warmup_steps: int) -> Measurement:
    """Times ``steps`` steps after ``warmup_steps`` that do not count; on a GPU one more shows the memory.

    The device is waited for before the first timed step and after the last, and nowhere in between.
    """
    losses = [trainer.step() for _ in range(warmup_steps)]
    marks: list[list[Any]] = []
    on_gpu = trainer.model.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    for _ in range(steps):
        marks.append([])
        losses.append(trainer.step(lambda: marks[-1].append(_moment(on_gpu))))
    if on_gpu:
        torch.cuda.synchronize()
    taken = [Step(*(_seconds(*pair) for pair in zip(step[:-1], step[1:], strict=True))) for step in marks]
    return Measurement(taken, [loss.item() for loss in losses], trainer.tokens, _memory(trainer) if on_gpu else None)


def _moment(on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def _idle_in_graphs(device: torch.device) -> int:
    """Bytes that CUDA graphs write to when they are replayed, and that do not count as allocated meanwhile."""
    segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == device.index or device.index is None]
    return sum(s["total_size"] - s["allocated_size"] for s in segments if s["segment_pool_id"] != (0, 0))


def _memory(trainer: Trainer) -> Memory:
    """Of a step apart from the timed ones: asking for what is allocated takes the host as long as a small op."""
    device, allocated = trainer.model.device, []
    torch.cuda.reset_peak_memory_stats(device)
    trainer.step(lambda: allocated.append(torch.cuda.memory_allocated(device)))
    parameters = list(trainer.model.parameters())
    states = trainer.optimizer.state.values() if trainer.optimizer is not None else ()
    return Memory(
        peak=torch.cuda.max_memory_allocated(device) + _idle_in_graphs(device),
        activations=allocated[1] - allocated[0],
        weights=sum(p.nbytes for p in parameters),
        gradients=sum(p.nbytes for p in parameters if p.requires_grad),
        optimizer=sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor)),
    )

"""Greedy generation of a fixed number of tokens: timed, and replayed along given tokens for its logits."""

import inspect
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilegym import interrupts
from tilegym.bench.prompts import Batch


@dataclass(frozen=True)
class Run:
    """One timed pass over all batches. Times in seconds; ``tokens``: the new ones of each batch, int64 [B, T]."""

    tokens: list[torch.Tensor]
    seconds: float
    first_token_seconds: list[float]

    @property
    def num_tokens(self) -> int:
        return sum(tokens.numel() for tokens in self.tokens)

    @property
    def throughput(self) -> float:
        """Tokens a second over all sequences, prefill included."""
        return self.num_tokens / self.seconds

    @property
    def time_to_first_token(self) -> float:
        return statistics.median(self.first_token_seconds)

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds of one decoding step; None if no step followed the first token."""
        steps = sum(tokens.shape[1] - 1 for tokens in self.tokens)
        return (self.seconds - sum(self.first_token_seconds)) / steps if steps else None


@dataclass(frozen=True)
class Measurement:
    """Several timed runs of one model, and the most memory that was in use meanwhile."""

    runs: list[Run]
    peak_memory: int

    @property
    def tokens(self) -> list[torch.Tensor]:
        return self.runs[-1].tokens

    def summary(self) -> dict[str, Any]:
        """Plain numbers: mean and standard deviation of the throughput, medians of the latencies."""
        rates = [run.throughput for run in self.runs]
        steps = [run.time_per_output_token for run in self.runs if run.time_per_output_token is not None]
        return {
            "throughput_tokens_per_second": statistics.fmean(rates),
            "throughput_stdev": statistics.stdev(rates) if len(rates) > 1 else 0.0,
            "time_to_first_token_ms": 1e3 * statistics.median(run.time_to_first_token for run in self.runs),
            "time_per_output_token_ms": 1e3 * statistics.median(steps) if steps else None,
            "decode_tokens_per_second": self._decode_rate(steps),
            "peak_memory_bytes": self.peak_memory,
            "throughput_of_runs": rates,
        }

    def _decode_rate(self, steps: list[float]) -> float | None:
        sequences = statistics.fmean(tokens.shape[0] for tokens in self.tokens)
        return sequences / statistics.median(steps) if steps else None


def run_once(model: Any, batches: list[Batch], output_length: int, **how: Any) -> Run:
    """Generates ``output_length`` tokens for every batch and times it; ``how``: more arguments of ``generate``.

    The device is waited for after the first token and after the last, and nowhere in between.
    """
    device = model.device
    tokens, first_token_seconds, total = [], [], 0.0
    for batch in batches:
        on_device = batch.to(device, model.dtype)
        clock = _first_token_clock(device, batch.size)
        _synchronize(device)
        start = time.perf_counter()
        output = _generate(model, on_device, output_length, stopping_criteria=[clock], **how)
        _synchronize(device)
        total += time.perf_counter() - start
        first_token_seconds.append(clock.first - start)
        tokens.append(output[:, batch.prompt_length :].cpu())
    return Run(tokens, total, first_token_seconds)


def measure(
    model: Any,
    batches: list[Batch],
    output_length: int,
    num_runs: int,
    warmup_runs: int,
    tell: Callable[[str], None] = lambda line: None,
    **how: Any,
) -> Measurement:
    """Times ``num_runs`` runs after ``warmup_runs`` that do not count, and tells of each when it is over."""
    for i in range(warmup_runs):
        run = run_once(model, batches, output_length, **how)
        tell(f"warm-up {i + 1}/{warmup_runs}: {run.seconds:.2f} s")
    from tilegym.transformers.several_gpus import devices_of  # imports transformers

    devices = devices_of(model)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
    runs = []
    for i in range(num_runs):
        runs.append(run_once(model, batches, output_length, **how))
        tell(f"run {i + 1}/{num_runs}: {runs[-1].seconds:.2f} s, {runs[-1].throughput:.1f} tokens/sec")
    return Measurement(runs, sum(map(peak_memory, devices)))


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that torch had allocated on a GPU since the last reset; on a CPU, the most of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def replay(model: Any, batch: Batch, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The logits of cached decoding along given ``tokens``.

    Args:
        model: as loaded, patched or not.
        batch: the prompts.
        tokens: the tokens to follow, whatever the model would choose; [B, T].

    Returns:
        T tensors [B, vocab] on the CPU, in the model's dtype, which loses nothing: they are what the model returned.
    """
    follow = _follow_tokens(tokens.to(model.device), batch.prompt_length, model.dtype)
    _generate(model, batch.to(model.device, model.dtype), tokens.shape[1], logits_processor=[follow])
    return follow.logits


@torch.no_grad()
def forward_logits(model: Any, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
    """The same logits as :func:`replay`, from one forward pass over prompt and tokens without a cache.

    Returns:
        [B, T, vocab] on the CPU, in the model's dtype.
    """
    ids = torch.cat([batch.input_ids, tokens[:, :-1]], dim=1)  # [B, S + T - 1]
    mask = torch.cat([batch.attention_mask, torch.ones_like(tokens[:, :-1])], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    media = {name: _with_text(name, value, tokens) for name, value in batch.media.items()}
    inputs = Batch(ids, mask, media).to(model.device, model.dtype)
    wanted = {"logits_to_keep": tokens.shape[1]}
    if not (media and hasattr(model.base_model, "get_rope_index")):  # else of several planes, found by the images
        wanted["position_ids"] = positions.to(model.device)
    known = inspect.signature(type(model).forward).parameters
    output = model(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        use_cache=False,
        **inputs.media,
        **{name: value for name, value in wanted.items() if name in known},
    )
    return output.logits[:, -tokens.shape[1] :].cpu()


@torch.no_grad()
def _generate(model: Any, batch: Batch, output_length: int, **kwargs: Any) -> torch.Tensor:
    return model.generate(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        max_new_tokens=output_length,
        do_sample=False,
        **batch.media,
        **kwargs,
    )


def _with_text(name: str, value: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The types of a prompt's tokens with those of the text behind it, zeros; what else a prompt has as it is."""
    if not name.endswith("token_type_ids"):
        return value
    return torch.cat([value, value.new_zeros(len(value), tokens.shape[1] - 1)], dim=1)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _first_token_clock(device: torch.device, batch_size: int) -> Any:
    # Defined here: transformers is imported only when a model runs.
    from transformers import StoppingCriteria

    class FirstTokenClock(StoppingCriteria):
        """Never stops; notes when the first token was there. A streamer would copy every token to the host."""

        first: float | None = None

        def __init__(self) -> None:
            self.go_on = torch.zeros(batch_size, dtype=torch.bool, device=device)

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            interrupts.check()
            if self.first is None:
                _synchronize(device)
                self.first = time.perf_counter()
            return self.go_on

    return FirstTokenClock()


def _follow_tokens(tokens: torch.Tensor, prompt_length: int, dtype: torch.dtype) -> Any:
    from transformers import LogitsProcessor

    class FollowTokens(LogitsProcessor):
        """Keeps the logits of every step and makes the given token the only choice."""

        def __init__(self) -> None:
            self.logits: list[torch.Tensor] = []

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.logits.append(scores.to("cpu", dtype))
            step = tokens[:, input_ids.shape[1] - prompt_length, None]  # [B, 1]
            return torch.full_like(scores, -torch.inf).scatter(1, step, 0.0)

    return FollowTokens()

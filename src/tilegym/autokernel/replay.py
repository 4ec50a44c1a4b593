"""A model's greedy runs as CUDA graphs: what gate 8 times where there is a GPU.

An eager run of a small model is bound by the host, and as noisy as that is. Here the prompts and one decoding step are
captured, over buffers that stay where they are, and then replayed, so that what is timed is the GPU's work.
"""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import nn

from tilegym.bench.prompts import Batch
from tilegym.transformers import decode_graph
from tilegym.transformers import graph_capture
from tilegym.transformers.cache_name import CACHE

# Turns a function into one that does the same by replaying; both work in place. Besides the function it is given what
# the function changes and depends on, which it leaves as it is, and the device. It may raise whatever it likes.
Capture = Callable[[Callable[[], None], list[Tensor], torch.device], Callable[[], None]]

# Implementations whose masks say which slots of a cache with spare room are filled.
_ATTENTION = ("sdpa", "eager", *decode_graph.ATTENTION.values())


class Refused(Exception):
    """A model cannot be replayed; says why."""


def cuda_graph(run: Callable[[], None], state: list[Tensor], device: torch.device) -> Callable[[], None]:
    """The :data:`Capture` that makes CUDA graphs."""
    graph, _ = graph_capture.capture(run, state, device)
    return graph.replay


class Greedy(decode_graph.Session):
    """A batch of prompts and the tokens that a model chooses behind them, without the host in between.

    Args:
        model: in evaluation mode; as it is now, with the patches that it has.
        batch: the prompts, [B, S].
        output_length: T, how many tokens to choose for each.
        capture: makes what is replayed.
        prompts: whether the prompts are replayed too, and not the decoding steps alone.

    Raises:
        Exception: whatever the model does that cannot be captured.
    """

    def __init__(self, model: nn.Module, batch: Batch, output_length: int, capture: Capture, prompts: bool) -> None:
        unit = decode_graph.ROUND_CAPACITY
        super().__init__(model, batch.size, -(-(batch.prompt_length + output_length) // unit) * unit)
        for layer in self.cache.layers:
            if not isinstance(getattr(type(layer), "is_compileable", None), property):  # linear attention's is True
                layer.is_compileable = True  # masks are written out: without one SDPA would see slots that hold nothing
        self._model, device = model, model.device
        known = inspect.signature(type(model).forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        given = batch.to(device)
        self._prompt, self._prompt_mask = given.input_ids, given.attention_mask
        self._prompt_positions = (given.attention_mask.cumsum(1) - 1).clamp(min=0)
        self._padded = not bool(given.attention_mask.all())
        self.mask[:, : batch.prompt_length] = given.attention_mask
        self._chosen = torch.zeros(batch.size, output_length, dtype=torch.int64, device=device)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        with torch.no_grad():
            self._begin()  # makes the cache, on the stream on which it is used
            state = [*self.cache.state(), self.positions, self.tokens, self._chosen, self._count]
            self._advance_run = capture(self._advance, state, device)
            self._begin_run = capture(self._begin, [], device) if prompts else self._begin

    @torch.no_grad()
    def generate(self) -> Tensor:
        """Makes a run; the tokens, int64 [B, T], which the next run overwrites."""
        self._begin_run()
        for _ in range(self._chosen.shape[1] - 1):
            self._advance_run()
        return self._chosen

    def _begin(self) -> None:
        """From the prompts to the first token. Nothing of an earlier run is left, keys and values included."""
        self.cache.reset()
        self.cache.set_length(0)
        outputs = self._model(
            input_ids=self._prompt,
            attention_mask=self._prompt_mask if self._padded else None,
            position_ids=self._prompt_positions,
            use_cache=True,
            return_dict=True,
            **{CACHE: self.cache},
            **self._last_only,
        )
        self.cache.set_length(self._prompt.shape[1])
        self.positions.copy_(self._prompt_positions[:, -1:] + 1)
        self._count.zero_()
        self._choose(outputs.logits[:, -1])

    def _advance(self) -> None:
        with getattr(self._model, "_optimize_model_for_decode", contextlib.nullcontext)():
            self._choose(self.compute(self._model, self._padded))

    def _choose(self, logits: Tensor) -> None:
        self.tokens.copy_(logits.argmax(-1, keepdim=True))
        self._chosen.index_copy_(1, self._count, self.tokens)
        self._count.add_(1)


class Replays:
    """The runs of one model over all batches; captured when they are first asked for.

    Args:
        model, batches, output_length, capture: as of :class:`Greedy`, for each batch.
    """

    def __init__(self, model: Any, batches: list[Batch], output_length: int, capture: Capture = cuda_graph) -> None:
        self._arguments = model, batches, output_length, capture
        self._made: dict[bool, list[Greedy] | str] = {}  # or why there are none

    def prepare(self, prompts: bool) -> list[Greedy]:
        """What makes the runs, one for each batch.

        Raises:
            Refused: the model cannot be captured.
            RuntimeError: and has left the GPU in a state in which nothing runs.
        """
        if prompts not in self._made:
            model, batches, output_length, capture = self._arguments
            without = capture is cuda_graph and model.device.type != "cuda"
            why = "without a GPU there are no graphs" if without else decode_graph.suits(model)
            if not why and output_length < 2:
                why = "one token alone takes no step"
            if not why and (attention := model.config._attn_implementation) not in _ATTENTION:
                why = f"its attention is {attention}, which needs a cache without spare room"
            try:
                self._made[prompts] = why or [Greedy(model, b, output_length, capture, prompts) for b in batches]
            except Exception as error:  # whatever a model does that a graph cannot hold
                self._made[prompts] = _first_reason(error)
                if model.device.type == "cuda":
                    torch.cuda.synchronize()  # raises again if this process is of no more use
        made = self._made[prompts]
        if isinstance(made, str):
            raise Refused(made)
        return made

    def run(self, prompts: bool) -> list[Tensor]:
        """One run: of each batch the tokens, int64 [B, T] on the CPU.

        Raises:
            Refused: the model cannot be captured.
        """
        return [tokens.to("cpu", copy=True) for tokens in [greedy.generate() for greedy in self.prepare(prompts)]]


def _first_reason(error: BaseException) -> str:
    """The first line of what went wrong first: ending a capture that has failed raises another error."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).strip().partition("\n")[0] or type(error).__name__

"""Prompts: read from the command line or a file, encoded and padded to batches."""

from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any
from typing import TypeVar

import torch

from tilegym.errors import ModelError

TEXT = "The capital of France is"  # where none is given

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """Prompts of one ``generate`` call, padded on the left: ``input_ids`` and ``attention_mask``, int64 [B, S].

    ``media``: what else ``generate`` takes with them, as images; of each the first B-th is of the first prompt.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    media: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.input_ids.shape[0]

    @property
    def prompt_length(self) -> int:
        return self.input_ids.shape[1]

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "Batch":
        """On ``device``; with a ``dtype`` the numbers of ``media`` in it."""
        media = {n: v.to(device, dtype if v.is_floating_point() else None) for n, v in self.media.items()}
        return Batch(self.input_ids.to(device), self.attention_mask.to(device), media)

    def row(self, i: int) -> "Batch":
        """Prompt ``i`` alone."""
        media = {n: v[i * len(v) // self.size : (i + 1) * len(v) // self.size] for n, v in self.media.items()}
        return Batch(self.input_ids[i : i + 1], self.attention_mask[i : i + 1], media)


def read_prompts(input_text: str | None, sentence_file: Path | None) -> list[str]:
    """The prompts to run: every line of ``sentence_file`` that is not blank, or else ``input_text``, or else TEXT.

    Raises:
        ModelError: both are given, the file cannot be read or holds no text, or ``input_text`` is empty.
    """
    if input_text is not None and sentence_file is not None:
        raise ModelError("--input_text and --sentence_file: give one of them")
    if sentence_file is None:
        input_text = TEXT if input_text is None else input_text
        if not input_text.strip():
            raise ModelError("--input_text is empty: give the model some text to continue")
        return [input_text]
    try:
        text = sentence_file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ModelError(f"--sentence_file {sentence_file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"--sentence_file {sentence_file} is not UTF-8 text: save it as such") from error
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ModelError(f"--sentence_file {sentence_file} is empty: write one prompt a line into it")
    return prompts


def make_batches(
    prompts: list[str], tokenizer: Any | None, config: Any, batch_size: int | None, input_length: int | None
) -> list[Batch]:
    """Encodes ``prompts`` into batches of ``batch_size``.

    Fewer prompts than ``batch_size`` are repeated to fill one batch; more make several. None makes one batch of all.
    Without a tokenizer the bytes of the text stand for tokens. ``input_length`` cuts or repeats every prompt to exactly
    that many tokens.

    Raises:
        ModelError: a prompt has no tokens.
    """
    encoded = encode_all(prompts, tokenizer, config.vocab_size, input_length)
    pad = tokenizer.pad_token_id if tokenizer is not None else getattr(config, "pad_token_id", None)
    return [Batch(*pad_left(rows, pad or 0)) for rows in in_batches(encoded, batch_size)]


def encode_all(prompts: list[str], tokenizer: Any | None, vocab_size: int, input_length: int | None) -> list[list[int]]:
    """The tokens of each prompt, as :func:`make_batches` says."""
    encoded = [_encode(prompt, tokenizer, vocab_size) for prompt in prompts]
    if not all(encoded):
        raise ModelError("a prompt has no tokens: give the model some text to continue")
    if input_length is not None:
        encoded = [(ids * -(-input_length // len(ids)))[:input_length] for ids in encoded]
    return encoded


def in_batches(prompts: list[T], batch_size: int | None) -> list[list[T]]:
    """``prompts``, so many at a time; fewer are repeated, and None takes all at once."""
    size = batch_size or len(prompts)
    if len(prompts) < size:
        prompts = [prompts[i % len(prompts)] for i in range(size)]
    return [prompts[i : i + size] for i in range(0, len(prompts), size)]


def random_batch(rows: int, length: int, vocab_size: int, seed: int = 0) -> Batch:
    """``rows`` sequences of ``length`` tokens, each as likely as any other; the same ones for a ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (rows, length), generator=generator)
    return Batch(ids, torch.ones_like(ids))


def check_length(batches: list[Batch], output_length: int, config: Any) -> None:
    """Raises ModelError if prompt and output together exceed the positions that the model has."""
    limit = getattr(config, "max_position_embeddings", None)
    longest = max(batch.prompt_length for batch in batches)
    if limit is not None and longest + output_length > limit:
        raise ModelError(
            f"a prompt of {longest} tokens and --output_length {output_length} exceed the model's {limit} positions: "
            "shorten one of them"
        )


def _encode(prompt: str, tokenizer: Any | None, vocab_size: int) -> list[int]:
    if tokenizer is not None:
        return tokenizer(prompt)["input_ids"]
    return [byte % vocab_size for byte in prompt.encode("utf-8")]


def pad_left(rows: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, int64 [B, S], of ``rows`` filled up with ``pad`` on the left."""
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask

"""Prompts: read from the command line or a file, encoded and padded to batches."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilegym.errors import ModelError


@dataclass(frozen=True)
class Batch:
    """Prompts of one ``generate`` call, padded on the left: ``input_ids`` and ``attention_mask``, int64 [B, S]."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor

    @property
    def size(self) -> int:
        return self.input_ids.shape[0]

    @property
    def prompt_length(self) -> int:
        return self.input_ids.shape[1]

    def to(self, device: torch.device) -> "Batch":
        return Batch(self.input_ids.to(device), self.attention_mask.to(device))


def read_prompts(input_text: str, sentence_file: Path | None) -> list[str]:
    """The prompts to run: every line of ``sentence_file`` that is not blank, or else ``input_text``.

    Raises:
        ModelError: the file cannot be read or holds no text, or ``input_text`` is empty.
    """
    if sentence_file is None:
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
    encoded = [_encode(prompt, tokenizer, config.vocab_size) for prompt in prompts]
    if not all(encoded):
        raise ModelError("a prompt has no tokens: give the model some text to continue")
    if input_length is not None:
        encoded = [(ids * -(-input_length // len(ids)))[:input_length] for ids in encoded]
    size = batch_size or len(encoded)
    if len(encoded) < size:
        encoded = [encoded[i % len(encoded)] for i in range(size)]
    pad = tokenizer.pad_token_id if tokenizer is not None else getattr(config, "pad_token_id", None)
    return [_pad(encoded[i : i + size], pad or 0) for i in range(0, len(encoded), size)]


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


def _pad(rows: list[list[int]], pad: int) -> Batch:
    width = max(len(row) for row in rows)
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return Batch(ids, mask)

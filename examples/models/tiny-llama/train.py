"""Train tiny-llama, the half-million-parameter Llama that stands beside this script, from text.txt.

    python examples/models/tiny-llama/train.py --output DIR

Trains a byte-level BPE tokenizer and a Llama of four layers with grouped-query attention, and writes a folder that
AutoTokenizer and AutoModelForCausalLM load. It takes a few minutes on two CPU cores. Every random choice is seeded: on
one machine two runs write the same files; another CPU or torch version may round differently, so its weights differ
in the last digits.
"""

import argparse
import re
import sys
from pathlib import Path

import torch
from rich.progress import BarColumn
from rich.progress import MofNCompleteColumn
from rich.progress import Progress
from rich.progress import TextColumn
from rich.progress import TimeRemainingColumn
from tokenizers import Tokenizer
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import processors
from tokenizers import trainers
from transformers import GenerationConfig
from transformers import LlamaConfig
from transformers import LlamaForCausalLM
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
BEGIN = "<|begin|>"
END = "<|end|>"
MAX_LENGTH = 512
CAPITAL = re.compile(r"^(The capital of .+ is) (.+)\.$")


def train_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that any text can be encoded. Every encoded text starts with BEGIN."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN} $B",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
        padding_side="left",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """0.54 million parameters. The MLP's width is no power of two, so that kernels meet ragged tiles."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


class LineWindows:
    """Batches of windows that each begin at a line of the text; past its end comes END and the text starts over."""

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerFast, window: int):
        lines = [line + "\n" for line in text.splitlines()]
        encoded = [tokenizer.encode(line, add_special_tokens=False) for line in lines]
        starts, position = [], 0
        for line, ids in zip(lines, encoded, strict=True):
            if line.strip():
                starts.append(position)
            position += len(ids)
        stream = [token for ids in encoded for token in ids] + [tokenizer.eos_token_id]
        self.num_tokens = len(stream)
        self.starts = torch.tensor(starts)
        self.stream = torch.tensor(stream + stream[:window])
        self.offsets = torch.arange(window - 1)
        self.begin = tokenizer.bos_token_id

    def batch(self, size: int, generator: torch.Generator) -> torch.Tensor:
        starts = self.starts[torch.randint(len(self.starts), (size,), generator=generator)]
        tokens = self.stream[starts[:, None] + self.offsets]  # [size, window - 1]
        return torch.cat([torch.full((size, 1), self.begin), tokens], dim=1)


def train(model: LlamaForCausalLM, data: LineWindows, args: argparse.Namespace) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.learning_rate, total_steps=args.steps, pct_start=0.1
    )
    generator = torch.Generator().manual_seed(args.seed)
    columns = [
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    ]
    smoothed = None
    with Progress(*columns) as progress:
        task = progress.add_task("", total=args.steps, loss=float("nan"))
        for step in range(args.steps):
            ids = data.batch(args.batch_size, generator)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            smoothed = loss.item() if smoothed is None else 0.98 * smoothed + 0.02 * loss.item()
            progress.update(task, advance=1, loss=smoothed)
            if not progress.console.is_terminal and (step + 1) % 100 == 0:
                print(f"step {step + 1}/{args.steps}  loss {smoothed:.3f}", flush=True)
    return smoothed


@torch.no_grad()
def count_right_capitals(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, int]:
    """How many of the text's capitals greedy generation names, and how many there are."""
    right = total = 0
    for line in text.splitlines():
        match = CAPITAL.match(line)
        if match is None:
            continue
        prompt, capital = match.groups()
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
        completion = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
        right += completion.startswith(f" {capital}.")
        total += 1
    return right, total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE, help="folder to write (default: beside this script)")
    parser.add_argument("--text", type=Path, default=HERE / "text.txt", help="text to train on")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--window", type=int, default=112, help="tokens of a training sequence")
    parser.add_argument("--vocab_size", type=int, default=768)
    parser.add_argument("--learning_rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)

    text = args.text.read_text(encoding="utf-8")
    tokenizer = train_tokenizer(text, args.vocab_size)
    data = LineWindows(text, tokenizer, args.window)
    model = LlamaForCausalLM(build_config(tokenizer))
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} token types, {data.num_tokens:,} tokens of text")

    loss = train(model, data, args)
    model = model.to(torch.bfloat16).eval()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)

    right, total = count_right_capitals(model, tokenizer, text)
    print(f"loss {loss:.3f}; {right} of {total} capitals right after rounding to bfloat16; written to {args.output}")
    return 0 if right == total else 1


if __name__ == "__main__":
    sys.exit(main())

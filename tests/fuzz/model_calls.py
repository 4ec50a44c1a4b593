"""Calls of language models, as programs make them: prompts, padding, caches, chats, gradients, ways to generate."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fuzz.comparing import Results
from fuzz.models import has_experts

IGNORED = -100  # a label that is left out of the loss
CALLS: dict[str, Callable[[torch.nn.Module, "Prompt", random.Random], Results]] = {}
NEW_TOKENS = (1, 3, 8)


@dataclass
class Prompt:
    """Tokens [B, S], and which of them are not padding; 0 is the padding's."""

    ids: torch.Tensor
    mask: torch.Tensor | None
    side: str | None

    def __str__(self) -> str:
        padding = "" if self.mask is None else f", {self.side} padded to {self.mask.sum(1).tolist()}"
        return f"{list(self.ids.shape)}{padding}"

    def from_the_left(self) -> "Prompt":
        """With the padding on the left, where generation wants it."""
        if self.side != "right":
            return self
        return Prompt(self.ids.flip(1), self.mask.flip(1), "left")

    def labels(self, first: bool) -> torch.Tensor:
        """The tokens themselves, but what is padding or would be predicted from it; without the ``first`` of all."""
        labels = self.ids.masked_fill(self.ids == 0, IGNORED)
        before = torch.cat((torch.zeros_like(self.ids[:, :1]), self.ids[:, :-1]), 1) == 0
        if self.side == "left":
            labels = labels.masked_fill(before, IGNORED)
        if first:
            labels[:, 0] = IGNORED
        return labels


def drawn_prompt(rng: random.Random, vocabulary: int, device: str) -> Prompt:
    batch, length = rng.choice([1, 1, 2, 3]), rng.choice([1, 5, 17, 33, 70])
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    ids = torch.randint(2, vocabulary, (batch, length), generator=generator)
    if rng.random() < 0.5:
        return Prompt(ids.to(device), None, None)
    mask, side = torch.ones_like(ids), rng.choice(["left", "right"])
    if rng.random() < 0.7:
        for row in mask:
            padding = rng.randrange(length)
            row[:padding] = 0
        mask = mask.flip(1) if side == "right" else mask
    return Prompt(ids.masked_fill(mask == 0, 0).to(device), mask.to(device), side)


def calls(function: Callable) -> Callable:
    CALLS[function.__name__] = function
    return function


def drawn_call(rng: random.Random) -> str:
    common = ["forward", "gradients", "generate", "generate"]
    return rng.choice([*CALLS, *common])


@calls
def forward(model: torch.nn.Module, prompt: Prompt, rng: random.Random) -> Results:
    output = model(input_ids=prompt.ids, attention_mask=prompt.mask, use_cache=rng.random() < 0.7)
    return {"logits": output.logits}


@calls
def gradients(model: torch.nn.Module, prompt: Prompt, rng: random.Random) -> Results:
    labels, checkpointing = prompt.labels(rng.random() < 0.5), rng.random() < 0.3
    with torch.enable_grad():
        if checkpointing:
            model.train()
            model.gradient_checkpointing_enable()
        try:
            loss = model(input_ids=prompt.ids, attention_mask=prompt.mask, labels=labels, use_cache=False).loss
            if torch.isfinite(loss):  # of a prompt of one token there is none
                loss.backward()
            found = {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        finally:
            model.gradient_checkpointing_disable()
            model.eval()
            model.zero_grad()
    return {"loss": loss.detach(), **found}


@calls
def generate(model: torch.nn.Module, prompt: Prompt, rng: random.Random) -> Results:
    prompt, number = prompt.from_the_left(), rng.choice(NEW_TOKENS)
    ids, mask = prompt.ids, torch.ones_like(prompt.ids) if prompt.mask is None else prompt.mask
    options = dict(max_new_tokens=number, min_new_tokens=number, do_sample=False, pad_token_id=0)
    how = rng.choice(["greedy", "greedy", "static", "static", "beams", "sample", "assisted"])
    if how == "static":
        options["cache_implementation"] = "static"
        # On a GPU transformers compiles the step then, which takes as long as dozens of cases.
        options["disable_compile"] = prompt.ids.is_cuda and rng.random() < 0.9
    elif how == "beams":
        options["num_beams"] = 3
    elif how == "sample":
        # A row of NaN, as eager attention has in fp64 where all is padding, would end the GPU's context.
        options.update(do_sample=True, remove_invalid_values=True)
        torch.manual_seed(rng.getrandbits(40))
    elif how == "assisted":  # of one sequence
        options["prompt_lookup_num_tokens"] = 2
        ids, mask = ids[:1].masked_fill(ids[:1] == 0, 5), torch.ones_like(mask[:1])
    wanted = how in ("greedy", "static")
    output = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_logits=wanted, **options)
    return {"tokens": output.sequences} | ({"logits of steps": torch.stack(output.logits, 1)} if wanted else {})


@calls
def chat(model: torch.nn.Module, prompt: Prompt, rng: random.Random) -> Results:
    """A prompt in parts, with the cache of those before."""
    length, cache, seen, found = prompt.ids.shape[1], None, 0, []
    cuts = sorted({rng.randrange(1, length) for _ in range(rng.choice([1, 2, 3]))} if length > 1 else ())
    for part in prompt.ids.tensor_split(cuts, 1):
        seen += part.shape[1]
        mask = prompt.mask[:, :seen] if prompt.side == "left" else None
        output = model(input_ids=part, attention_mask=mask, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    return {"logits": torch.cat(found, 1)}


@calls
def embeddings(model: torch.nn.Module, prompt: Prompt, rng: random.Random) -> Results:
    embedded = model.get_input_embeddings()(prompt.ids)
    return {"logits": model(inputs_embeds=embedded, attention_mask=prompt.mask).logits}


@calls
def last_logits(model: torch.nn.Module, prompt: Prompt, rng: random.Random) -> Results:
    prompt = prompt.from_the_left()
    kept = model(input_ids=prompt.ids, attention_mask=prompt.mask, logits_to_keep=rng.choice([1, 2])).logits
    return {"logits": kept[:, -1]}


@calls
def hidden_states(model: torch.nn.Module, prompt: Prompt, rng: random.Random) -> Results:
    output = model(input_ids=prompt.ids, attention_mask=prompt.mask, output_hidden_states=True)
    return {"logits": output.logits} | {f"hidden state {i}": h for i, h in enumerate(output.hidden_states)}


@calls
def own_mask(model: torch.nn.Module, prompt: Prompt, rng: random.Random) -> Results:
    """A causal mask [B, 1, S, S] that is added to the scores."""
    batch, length = prompt.ids.shape
    lowest = torch.finfo(model.dtype).min
    mask = torch.full((batch, 1, length, length), lowest, dtype=model.dtype, device=prompt.ids.device).triu(1)
    return {"logits": model(input_ids=prompt.ids.clamp(min=2), attention_mask=mask).logits}


@calls
def positions(model: torch.nn.Module, prompt: Prompt, rng: random.Random) -> Results:
    numbers = torch.arange(prompt.ids.shape[1], device=prompt.ids.device) + rng.choice([0, 3])
    numbers = numbers.expand(prompt.ids.shape)
    return {"logits": model(input_ids=prompt.ids, attention_mask=prompt.mask, position_ids=numbers).logits}


@calls
def training(model: torch.nn.Module, prompt: Prompt, rng: random.Random) -> Results:
    """Two steps, and what the model gives then; its weights are put back. Of what rounds little."""
    if model.dtype == torch.bfloat16:
        return {}
    before = [p.detach().clone() for p in model.parameters()]
    try:
        for _ in range(2):
            with torch.enable_grad():
                labels = prompt.labels(True)
                loss = model(input_ids=prompt.ids, attention_mask=prompt.mask, labels=labels, use_cache=False).loss
                if not torch.isfinite(loss):
                    return {}
                loss.backward()
            largest = max(p.grad.abs().max() for p in model.parameters() if p.grad is not None)
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad * (0.02 / largest))
            model.zero_grad()
        return {"trained logits": model(input_ids=prompt.ids, attention_mask=prompt.mask).logits}
    finally:
        model.zero_grad()
        for p, values in zip(model.parameters(), before, strict=True):
            p.copy_(values)


@calls
def copied(model: torch.nn.Module, prompt: Prompt, rng: random.Random) -> Results:
    """A copy, and a copy that has the weights by way of a state dict."""
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    for p in other.parameters():
        p.zero_()
    other.load_state_dict(model.state_dict(), assign=rng.random() < 0.5)
    given = dict(input_ids=prompt.ids, attention_mask=prompt.mask)
    return {"logits": one(**given).logits, "logits of the other": other(**given).logits}


@calls
def autocast(model: torch.nn.Module, prompt: Prompt, rng: random.Random) -> Results:
    """In bf16, logits and gradients, of models whose weights are not and where rounding chooses no experts."""
    if model.dtype == torch.bfloat16 or has_experts(model):
        return {}
    with torch.enable_grad(), torch.autocast(prompt.ids.device.type, torch.bfloat16):
        output = model(input_ids=prompt.ids, attention_mask=prompt.mask, labels=prompt.labels(True))
    if torch.isfinite(output.loss):
        output.loss.backward()
    found = {f"gradient in bf16 of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"logits in bf16": output.logits, **found}

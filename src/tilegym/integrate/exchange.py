"""Can a model's attention be exchanged, and its decoding steps? Tried on a small model of its kind.

Some models read the mask, or need one where TileGym's attention gives none.
"""

import torch
from torch import nn
from transformers import GenerationConfig

from tilegym.backend import use_backend
from tilegym.bench.models import quiet_transformers
from tilegym.integrate.inputs import continues_text
from tilegym.integrate.inputs import decoding_step
from tilegym.integrate.inputs import example
from tilegym.integrate.inputs import forward_inputs
from tilegym.integrate.inputs import main_output
from tilegym.integrate.inputs import mask_of
from tilegym.integrate.probe import attempt
from tilegym.transformers.attention import NAMES
from tilegym.transformers.attention import name_for
from tilegym.transformers.decode_graph import eager_steps
from tilegym.transformers.general_graph import put_graph
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet

# Of the mean square. Rounding in fp32 comes to 1e-3 where a model cuts off what is small; a wrong mask, to a tenth.
_ALLOWED = 1e-2
_CACHES = {"growing cache": {}, "static cache": {"cache_implementation": "static", "disable_compile": True}}


def attention_misfit(model: nn.Module) -> str:
    """Why a small model is another one with TileGym's attention in the place of its own; "" if it is not.

    Args:
        model: with eager attention, in fp32 on the CPU; it is as it was afterwards.
    """
    try:
        expected = _logits(model)
    except Exception as error:  # such as of padding, for which its config lacks something
        return f"the model by itself fails: {_told(error)}"
    by_itself = {cache: attempt(lambda c=cache: _logits_over(model, c)) for cache in _CACHES}
    generated = {cache: logits for cache, logits in by_itself.items() if logits is not None}
    with PatchSet(model, maker=__name__) as patches, use_backend("pytorch"):
        patches.use_attention(model, name_for(model, None), Entry("", "attn"))
        try:
            got = _logits(model) | {cache: _logits_over(model, cache) for cache in generated}
        except Exception as error:  # whatever a model does with a mask that is none of its own
            return f"with another attention the whole model fails: {_told(error)}"
    for call, logits in (expected | generated).items():
        if not (got[call] - logits).square().mean() <= (_ALLOWED**2) * logits.square().mean():
            return f"with another attention the whole model gives something else ({call}): the mask is not left to it"
    return ""


def decoding_misfit(model: nn.Module, length: int = 8) -> str:
    """Why a small model generates other tokens over the cache of decoding graphs; "" if it does not.

    Args:
        model: as for :func:`attention_misfit`, which says that its attention can be exchanged.
    """
    try:
        expected = _tokens(model, length)
    except Exception as error:  # it may want other arguments than tokens
        return f"the model by itself does not generate: {_told(error)}"
    with PatchSet(model, maker=__name__) as patches, use_backend("pytorch"), eager_steps("cpu"):
        patches.use_attention(model, NAMES[None], Entry("", "attn"))
        skipped = put_graph(model, False, patches).skipped
        if skipped:
            return skipped[-1].why
        try:
            same = torch.equal(_tokens(model, length), expected)
        except Exception as error:  # whatever a model does with a cache that is none of its own
            return f"with the cache of a graph the model fails: {_told(error)}"
    return "" if same else "with the cache of a graph the model generates other tokens"


def _told(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line}"


@torch.no_grad()
def _tokens(model: nn.Module, length: int) -> torch.Tensor:
    """What follows a padded batch."""
    ids = example(model)
    mask = mask_of(ids)
    greedy = GenerationConfig(do_sample=False, pad_token_id=0, max_new_tokens=length, min_new_tokens=length)
    with quiet_transformers():
        return model.generate(ids, attention_mask=mask, generation_config=greedy)


@torch.no_grad()
def _logits(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of a prompt, a step behind it, and a padded batch, without the padding; or of what the model reads."""
    if not continues_text(type(model), model.config):
        found = {}
        for call in ("forward", "padded batch"):
            inputs = forward_inputs(model, padded=call == "padded batch")
            output, mask = main_output(model(**inputs)), inputs.get("attention_mask")
            found[call] = output[mask.bool()] if mask is not None and output.shape[:2] == mask.shape else output
        return found
    ids = example(model)
    mask = mask_of(ids)
    prompt = model(input_ids=ids[:, :-1], use_cache=True)
    found = {"prefill": prompt.logits}
    step = decoding_step(model, ids, prompt)
    if step is not None:
        found["decode"] = step.logits
    found["padded batch"] = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    return found


@torch.no_grad()
def _logits_over(model: nn.Module, cache: str) -> torch.Tensor | None:
    """[2, B, vocabulary], of the prefill and a step of ``generate``, which makes the masks itself over a static cache;
    None if the model does not generate."""
    if not getattr(model, "can_generate", lambda: False)():
        return None
    if continues_text(type(model), model.config):
        ids = example(model)
        inputs = {"input_ids": ids, "attention_mask": mask_of(ids)}
    else:
        inputs = forward_inputs(model, padded=True)
    greedy = GenerationConfig(
        do_sample=False, pad_token_id=0, decoder_start_token_id=0, max_new_tokens=2, min_new_tokens=2,
        return_dict_in_generate=True, output_logits=True, **_CACHES[cache],
    )  # fmt: skip
    with quiet_transformers():
        return torch.stack(model.generate(**inputs, generation_config=greedy).logits)

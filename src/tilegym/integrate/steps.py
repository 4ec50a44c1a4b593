"""What the steps of the pipeline are made of: checks of the input, and one candidate's verification."""

import copy
import functools
from typing import Any

import torch
from torch import nn

from tilegym.bench import models
from tilegym.bench.prompts import Batch
from tilegym.errors import ModelError
from tilegym.integrate.capture import Recorded
from tilegym.integrate.check import check_patch
from tilegym.integrate.inputs import example
from tilegym.integrate.small_model import small_model
from tilegym.integrate.verify import Check
from tilegym.integrate.verify import compile_ahead
from tilegym.integrate.verify import compiler_is_there
from tilegym.integrate.verify import kernel_name
from tilegym.integrate.verify import verify
from tilegym.transformers.general import Place

# In the interpreter a matrix of this many numbers takes seconds; a model of this many, minutes.
_MODULE_LIMIT = 4_000_000
_MODEL_LIMIT = 20_000_000


def is_remote(config: Any) -> bool:
    """Whether the code of the model comes with it."""
    return type(config).__module__.startswith("transformers_modules")


def check_kind(config: Any, model_id: str, trust_remote_code: bool = False) -> None:
    """Raises ModelError unless ``config`` is that of a causal language model.

    Some families can be either; of those a small model is asked.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or is_remote(config)
    if not known and not getattr(config, "is_encoder_decoder", False):
        vision = any(hasattr(config, name) for name in ("vision_config", "image_size", "num_channels"))
        raise _not_taken(config, model_id, "a vision model" if vision else "no causal language model")
    refuse_encoder(config, model_id, trust_remote_code)


def _not_taken(config: Any, model_id: str, kind: str) -> ModelError:
    return ModelError(
        f"{model_id} is {kind} ({config.model_type}): this takes decoder-only language models; "
        "give the language model that is part of it, if there is one"
    )


def refuse_encoder(config: Any, model_id: str, trust_remote_code: bool = False) -> None:
    """Raises ModelError if ``config`` has an encoder, or is one's of which transformers makes a language model."""
    if getattr(config, "is_encoder_decoder", False):
        raise _not_taken(config, model_id, "an encoder-decoder model")
    if getattr(config, "is_decoder", None) is False and _sees_ahead(config, trust_remote_code):
        raise ModelError(
            f"{model_id} is an encoder ({config.model_type}), which sees the tokens to come and continues no text: "
            'take a decoder, or write "is_decoder": true into its config if it was trained as one'
        )


@torch.no_grad()
def _sees_ahead(config: Any, trust_remote_code: bool) -> bool:
    """Whether a model of ``config`` gives other logits for a token if a later one is another."""
    small = small_model(config, trust_remote_code=trust_remote_code)
    shrunk = copy.deepcopy(small.model.config)
    shrunk.is_decoder = False
    model, ids = small.make(shrunk).eval(), example(small.model, batch=1)
    other = ids.clone()
    other[:, -1] = ids[:, -1] % ids.max() + 1  # any other token
    return not torch.equal(model(ids).logits[:, 0], model(other).logits[:, 0])


def laid_out(config: Any, options: Any) -> nn.Module:
    """The model without memory for its weights: enough for the plan.

    Raises:
        ModelError: the config contradicts itself.
    """
    from transformers import AutoModelForCausalLM

    extra = {"trust_remote_code": True} if options.trust_remote_code else {}
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(config), **extra).eval()
    except Exception as error:  # each architecture checks its config in its own way
        raise ModelError(
            f"no model can be made from the config of {options.model_id} ({models.first_sentence(error)}): "
            "correct the config"
        ) from error


def verify_candidate(model: nn.Module, place: Place, path: str, calls: list[Recorded], launches: list) -> Check:
    """Verifies a kernel on captured calls: natively on a GPU, else in the interpreter.

    Without a GPU, a part so large that the interpreter would take minutes is verified in two halves: how the kernel is
    called, with PyTorch's implementation on the captured calls; the kernel itself on a small model of the family.
    """
    size = sum(p.numel() for p in model.get_submodule(path).parameters()) if place.put == "forward" else 0
    if model.device.type == "cuda" or size <= _MODULE_LIMIT:
        return verify(model, place, path, calls, "cutile", launches=launches)
    check = verify(model, place, path, calls, "pytorch")
    if check.passed:
        try:
            check_patch((place,), model.config)
        except AssertionError as error:
            check.why = str(error)
        check.notes.append("without a GPU the kernel ran on a small model of the family")
    return check


def compiled(
    launches: list, done: dict[str, str], notices: list[str], binding: bool = True
) -> tuple[dict[str, str], str]:
    """Compiles what was launched for all architectures: the new results, and why the candidate fails, "" if not.

    Args:
        binding: whether the candidate fails if a kernel does not compile. What ran on a GPU has that GPU's
            configuration, and another one elsewhere: there it is only reported.
    """
    if not launches:
        return done, ""
    if not compiler_is_there():
        notice = "cuTile's compiler is not installed, so nothing was compiled ahead: pip install 'tilegym[tileiras]'"
        if notice not in notices:
            notices.append(notice)
        return done, ""
    done = compile_ahead(launches, done)
    names = {kernel_name(kernel) for kernel, _ in launches}
    bad = next((f"{job}: {why}" for job, why in done.items() if why and job.split()[0] in names), "")
    return done, f"it does not compile: {bad}" if bad and binding else ""


def summary(check: Check) -> dict[str, Any]:
    """The errors and notes of a check, plain."""
    return {
        "errors": [[e.call, e.result, e.error, e.allowed] for e in check.errors],
        "notes": list(dict.fromkeys(check.notes)),
    }


def whole_backend(model: nn.Module, backend: str) -> str:
    """On which backend the whole model is verified: on cuTile wherever that takes seconds, not minutes."""
    if model.device.type == "cuda" or model.num_parameters() > _MODEL_LIMIT:
        return backend
    return "cutile"


def faster(first: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """What was measured first, with the times of the second measurement where that one was faster."""
    rate = "throughput_tokens_per_second"
    return first | again if again[rate] > first[rate] else first


def text(batch: Batch, tokenizer: Any | None, row: list[int]) -> dict[str, str]:
    """Prompt and continuation; token numbers where there is no tokenizer."""
    decode = functools.partial(" ".join) if tokenizer is None else None
    prompt = batch.input_ids[0][batch.attention_mask[0].bool()].tolist()
    if decode is not None:
        return {"prompt": decode(map(str, prompt)), "text": " " + decode(map(str, row))}
    if tokenizer.eos_token_id in row:
        row = row[: row.index(tokenizer.eos_token_id)]
    return {"prompt": tokenizer.decode(prompt, skip_special_tokens=True), "text": tokenizer.decode(row)}

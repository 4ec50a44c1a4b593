"""A model of any family, small enough to run anywhere in a second, that keeps every kind of layer of the original.

One recipe for all families (:mod:`tilegym.integrate.small_config`); where a family asks for other sizes, the next,
less thorough one is tried.
"""

import functools
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilegym.errors import ModelError
from tilegym.integrate.inputs import continues_text
from tilegym.integrate.inputs import decoding_step
from tilegym.integrate.inputs import example
from tilegym.integrate.inputs import forward_inputs
from tilegym.integrate.inputs import text_alone
from tilegym.integrate.inputs import writes_about_images
from tilegym.integrate.own_functions import take_own_functions_on_cpu
from tilegym.integrate.small_config import RECIPES
from tilegym.integrate.small_config import filled
from tilegym.integrate.small_config import gaps_filled
from tilegym.integrate.small_config import has_large_images
from tilegym.integrate.small_config import in_proportion

MAX_PARAMETERS = 40_000_000  # a model that the recipes leave larger than this is not small
_TOO_LARGE = "parameters are too many for a small model"


@dataclass(frozen=True)
class SmallModel:
    """A small model in evaluation mode on the CPU, in fp32, and how it came about.

    Attributes:
        model: the model; its weights are random and large enough for every part to matter.
        config: what it was made from, a config in which nothing is open, with the original's sizes.
        make: makes a model from such a config.
        changes: what differs from the given config, by the attribute's dotted name: (former, now).
        failures: why the recipes before the one that worked did not.
    """

    model: nn.Module
    config: Any
    make: Callable[..., nn.Module]
    changes: dict[str, Any]
    failures: tuple[str, ...]


def small_model(
    config: Any,
    seed: int = 0,
    trust_remote_code: bool = False,
    model_class: type | None = None,
    recipes: tuple[Callable, ...] | None = None,
) -> SmallModel:
    """Builds a small model of the family of ``config``: of ``model_class``, or a causal language model.

    Args:
        config: a config of transformers, which is not changed, or a ``model_type``, whose default config is taken.
        seed: of the weights.
        trust_remote_code: whether code that comes with the config may run.
        model_class: the class to build where that is not the causal language model which transformers makes of such a
            config: an encoder, a classifier, a model of one's own.
        recipes: what to try instead of all of :mod:`tilegym.integrate.small_config`.

    Raises:
        ModelError: the family has no causal language model and no class is given, or no recipe makes it small; with
            what was tried. Or the class is none of transformers', such as a wrapper's.
    """
    if model_class is not None and not hasattr(model_class, "_from_config"):
        raise ModelError(
            f"{model_class.__name__} is no model class of transformers: give the model in it, if it wraps one"
        )
    config = default_config(config) if isinstance(config, str) else config
    text = config.get_text_config(decoder=True)
    failures: list[str] = []
    with torch.device("cpu"):
        candidates = _candidates(config, trust_remote_code, model_class)
        small = _first_that_runs(candidates, RECIPES if recipes is None else recipes, seed, failures, model_class)
    if small is not None:
        return small
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    told = (failure for failure in failures if _TOO_LARGE not in failure)  # says more than that
    why = next(told, failures[0] if failures else "its config has no decoder")
    remedy = "take a decoder-only model"
    if model_class is not None or type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        remedy = "check its config; where that is right, patch the family by hand (docs/how-to-add-a-model.md)"
    raise ModelError(f"no small model of type {config.model_type!r} can be made ({why}): {remedy}")


def _first_that_runs(
    candidates: Iterator[tuple[Any, Callable]],
    recipes: tuple[Callable, ...],
    seed: int,
    failures: list[str],
    model_class: type | None,
) -> SmallModel | None:
    without_loss: SmallModel | None = None
    without_steps: SmallModel | None = None
    for candidate, make in candidates:
        at_once = model_class is not None and not continues_text(model_class, candidate)
        encodes = at_once and hasattr(candidate, "is_decoder")
        large = has_large_images(candidate.to_dict())
        for recipe in sorted(recipes, key=lambda recipe: large and recipe is not in_proportion):
            small = None
            try:
                values, changes = recipe(candidate.to_dict())
                if encodes:
                    values["is_decoder"] = candidate.is_decoder
                    changes.pop("is_decoder", None)
                if at_once and values.get("pad_token_id", 0) is None:
                    values["pad_token_id"] = 0  # else classifiers that were decoders take one text at a time
                model = _build(type(candidate), make, values, seed)
                if model_class is None and writes_about_images(type(model), model.config):
                    raise ModelError(f"{type(model).__name__} takes no text without an image: tilegym.apply serves it")
                whole = candidate
                if recipe is gaps_filled or (getattr(candidate, "is_decoder", None) is False and not encodes):
                    whole = type(candidate).from_dict(filled(candidate.to_dict(), recipe is gaps_filled))
                small = SmallModel(model, whole, make, changes, tuple(failures))
                run(model)
            except Exception as error:  # each architecture checks its config in its own way, or fails in its forward
                reason = str(error).strip().splitlines()
                failures.append(f"{recipe.__name__}: {type(error).__name__}: {reason[-1] if reason else ''}"[:300])
                if small is not None and not at_once:
                    if without_loss is None and _runs(model):
                        without_loss = small
                    elif without_steps is None and _runs(model, step=False):
                        without_steps = small
            else:
                return small
    return without_loss or without_steps


def default_config(model_type: str) -> Any:
    """The config that transformers gives a family by default.

    Raises:
        ModelError: there is no such family, or its config has no defaults.
    """
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[model_type]()
    except KeyError:
        raise ModelError(f"transformers knows no model type {model_type!r}: check the spelling") from None
    except Exception as error:
        raise ModelError(f"the default config of {model_type!r} contradicts itself: give a model's own") from error


def _candidates(
    config: Any, trust_remote_code: bool, model_class: type | None
) -> Iterator[tuple[Any, Callable[..., nn.Module]]]:
    """Configs, and what makes a model of them.

    For several modalities first the text part, where that makes a model by itself.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers import AutoModelForCausalLM

    options = {"trust_remote_code": True} if trust_remote_code else {}
    automatic = functools.partial(AutoModelForCausalLM.from_config, **options)
    if text_alone(config) is not None:
        yield text_alone(config), automatic
    if model_class is not None and MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) is not model_class:
        yield config, model_class._from_config
    else:
        yield config, automatic


@torch.no_grad()
def run(model: nn.Module, loss: bool = True, step: bool = True) -> None:
    """One training forward, one prefill and one decoding step, or one forward pass of a model that does not continue
    text; raises what they raise.

    Args:
        loss: False: no training forward, for models whose loss is not one of text, as CSM's.
        step: False: no decoding step, for models that do not take a token alone, as CPM-Ant.
    """
    if not continues_text(type(model), model.config):
        model(**forward_inputs(model))
        return
    ids = example(model)
    if loss:
        model(input_ids=ids, labels=ids, use_cache=False)
    prefill = model(input_ids=ids, use_cache=True)
    if step:
        decoding_step(model, ids, prefill)


def _runs(model: nn.Module, step: bool = True) -> bool:
    """Whether it does without the training forward."""
    try:
        run(model, loss=False, step=step)
    except Exception:  # as in the run with it
        return False
    return True


def _build(config_class: type, make: Callable[..., nn.Module], values: dict[str, Any], seed: int) -> nn.Module:
    with torch.device("meta"):
        count = make(config_class.from_dict(values)).num_parameters()
    if count > MAX_PARAMETERS:
        raise ModelError(f"{count:,} {_TOO_LARGE}")
    config = config_class.from_dict(values)  # a model changes the config that it is made from
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        # Eager attention is plain PyTorch that gets every mask and option as an argument.
        model = make(config, dtype=torch.float32, attn_implementation="eager").eval()
        _scatter(model)
    take_own_functions_on_cpu(model)
    return model


@torch.no_grad()
def _scatter(model: nn.Module) -> None:
    """Moves the weights away from zeros and ones, so that no part of the model is without effect."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or "conv" in name:
            parameter.add_(0.1 * torch.randn_like(parameter))
        else:
            parameter.normal_(0, max(parameter.shape[-1], 16) ** -0.5)
    for name, buffer in model.named_buffers():
        if "bias" in name and buffer.is_floating_point():
            buffer.add_(0.1 * torch.randn_like(buffer))

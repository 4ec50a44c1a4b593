"""Prompts with more than text: images, videos and sounds, which the steps behind them find in the cache.

What a model is given with such a prompt goes to its prefill alone. Whether a step of :mod:`.decode_graph`, which gets a
token and its position, computes what the model's own step does, which gets what transformers leaves of all that, is
tried with the first prompt of each kind.
"""

import copy
import inspect
import re
from typing import TYPE_CHECKING
from typing import Any

import torch
from torch import Tensor
from torch import nn

from tilegym.transformers.cache_name import CACHE
from tilegym.transformers.graph_capture import distance
from tilegym.transformers.graph_capture import warn

if TYPE_CHECKING:
    from tilegym.transformers.decode_graph import Session

_MEDIA = re.compile(r"pixel_values|input_features$|input_values$")
_OF_PROMPTS = re.compile(
    r"pixel_|images?_|videos?_|input_(features|values)|audio_|feature_attention_mask|mm_|token_type_ids$|padding_mask$"
    r"|second_per_grid|spatial_shapes|high_res_|patches_|num_local_patches|num_frames_|batch_num_images|target_sizes"
)
_TYPES = {"token_type_ids", "mm_token_type_ids"}
# Of logits, by their norm; other dtypes 0.2: a token goes to other experts for a rounding.
_CLOSE = {torch.float32: 1e-2, torch.float64: 1e-2}


def beyond_text(model_kwargs: dict[str, Any], known: set[str]) -> frozenset[str]:
    """The names of what a prompt is given besides what is ``known``, its positions among them if they are of several
    planes."""
    # transformers gives what it has made of no image as an empty dictionary.
    names = {name for name, value in model_kwargs.items() if value is not None and value != {}} - known
    positions = model_kwargs.get("position_ids")
    return frozenset(names | {"position_ids"} if positions is not None and positions.dim() == 3 else names)


def are_of_prompts(model: nn.Module, names: frozenset[str]) -> bool:
    """Whether ``names`` are of what a prompt alone is given, to a model that reads more than text."""
    if not names:
        return True
    reads = any(map(_MEDIA.match, inspect.signature(type(model).forward).parameters))
    return reads and all(name == "position_ids" or _OF_PROMPTS.match(name) for name in names)


def is_text(model_kwargs: dict[str, Any], names: frozenset[str]) -> bool:
    """Whether a prompt is of text all the same: the types of its tokens say so, if they were given. It waits for the
    device."""
    return all(name == "position_ids" or (name in _TYPES and not model_kwargs[name].any()) for name in names)


def steps_agree(
    session: "Session",
    names: frozenset[str],
    model: nn.Module,
    ids: Tensor,
    mask: Tensor | None,
    generation_config,
    model_kwargs: dict[str, Any],
) -> bool:
    """Whether the step of ``session`` behind a prompt [B, S] computes what the model's own does; tried once for all
    prompts that are given ``names``, where a warning says if it does not.

    Args:
        mask: [B, S] of padded prompts, else None.
        model_kwargs: of ``generate``, with a cache that holds nothing yet.
    """
    if not names:
        return True
    if names not in session.agreed:
        try:
            off = _off(session, model, ids, mask, generation_config, model_kwargs)
            if off > _CLOSE.get(model.dtype, 0.2):
                given = ", ".join(sorted(names))
                raise ValueError(f"behind prompts with {given} a step is off by {off:.2g} of its size")
        except Exception as error:  # whatever a model does with a cache that is none of its own
            warn(model, "decodes", error)
            session.agreed[names] = False
        else:
            session.agreed[names] = True
        session.cache.set_length(0)
    return session.agreed[names]


def _off(
    session: "Session", model: nn.Module, ids: Tensor, mask: Tensor | None, generation_config, model_kwargs: dict
) -> float:
    own = model_kwargs | {CACHE: copy.deepcopy(model_kwargs[CACHE])}
    outputs = model._prefill(ids, generation_config, own)
    tokens = outputs.logits[:, -1:].argmax(-1)
    own = model._update_model_kwargs_for_generation(outputs, own)
    inputs = model.prepare_inputs_for_generation(torch.cat([ids, tokens], 1), next_sequence_length=1, **own)
    expected = model(**inputs, return_dict=True).logits[:, -1]
    model._prefill(ids, generation_config, model_kwargs | {CACHE: session.cache})
    session.start(mask, model_kwargs.get("position_ids"), ids.shape[1])
    session.tokens.copy_(tokens)
    return distance(session.compute(model, mask is not None), expected)

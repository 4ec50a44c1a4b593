"""What one forward pass of a model takes: token ids of a decoder that continues text, or what other models read."""

import inspect
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tilegym.errors import ModelError
from tilegym.integrate.small_config import VOCAB
from tilegym.integrate.small_config import WINDOW
from tilegym.transformers.cache_name import cache_argument
from tilegym.transformers.cache_name import cache_of

_PADDED = 5  # tokens of the second row of a padded batch, or half of it


def continues_text(model_class: type, config: Any) -> bool:
    """Whether models of a class generate text by themselves: decoders with an output layer. Others are run once:
    encoders, classifiers, models of images or sound, those of an encoder and a decoder, and those that write about
    images."""
    if not _generates(model_class, config) or getattr(config, "is_encoder_decoder", False):
        return False
    read = inspect.signature(model_class.forward).parameters
    if writes_about_images(model_class, config):
        return False
    # Of sound alone: what writes down speech, by CTC.
    return "input_ids" in read or getattr(model_class, "main_input_name", "input_ids") not in read


def writes_about_images(model_class: type, config: Any) -> bool:
    """Whether models of a class generate text, and take none without an image."""
    read = inspect.signature(model_class.forward).parameters
    return _generates(model_class, config) and _takes_texts_with_images(read, config) and text_alone(config) is None


def _generates(model_class: type, config: Any) -> bool:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    generates = getattr(model_class, "can_generate", lambda: False)() or model_class in _classes(
        MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), ())
    )
    # Code that comes with a model may be older than that rule of transformers.
    return generates or model_class.__name__.endswith(("ForCausalLM", "LMHeadModel"))


def text_alone(config: Any) -> Any | None:
    """The part of a config of several modalities that is for text, if it makes a language model by itself."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config(decoder=True)
    return text if type(text) is not type(config) and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else None


def _classes(of_config: Any) -> tuple:
    return of_config if isinstance(of_config, tuple) else (of_config,)


def example(model: nn.Module, batch: int = 2, length: int = 2 * WINDOW + 3, seed: int = 1) -> torch.Tensor:
    """[batch, length] random token ids for ``model``, longer than small windows, but for few positions."""
    generator, length = torch.Generator().manual_seed(seed), min(length, _positions(model))
    return torch.randint(3, _vocabulary(model) - 3, (batch, length), generator=generator)


def _positions(model: nn.Module) -> int:
    """How many tokens ``model`` takes at least, before two that it generates."""
    config = model.config.get_text_config(decoder=True)
    named = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_target_positions"))
    return max(2, min((n for n in named if isinstance(n, int) and n > 0), default=1 << 20) - 2)


def _vocabulary(model: nn.Module) -> int:
    """How many tokens ``model`` knows."""
    try:
        inputs = model.get_input_embeddings()
        outputs = model.get_output_embeddings() or inputs
        known = getattr(inputs, "num_embeddings", None) or inputs.weight.shape[0]
        return min(outputs.weight.shape[0], known)
    # Of models of texts and images together, those that hash their tokens, and those with several output layers.
    except (NotImplementedError, AttributeError):
        return getattr(model.config.get_text_config(decoder=True), "vocab_size", VOCAB)


def _takes_texts_with_images(read: Mapping[str, inspect.Parameter], config: Any) -> bool:
    """Whether what reads these arguments compares texts with images, as CLIP does, or writes about images, as BLIP
    does: not whether images may stand within texts."""
    if not {"input_ids", "pixel_values"} <= read.keys():
        return False
    if read["pixel_values"].default is inspect.Parameter.empty:
        return True
    both = "vision_config" in vars(config) or {"vocab_size", "image_size"} <= vars(config).keys()
    return both and _image_token(config) is None and "bbox" not in read  # which is of documents, with or without pixels


def _image_token(config: Any) -> int | None:
    """The token that stands for an image, or for a part of one, in texts."""
    tokens = (getattr(config, f"image_token_{kind}", None) for kind in ("id", "index"))
    return next((token for token in tokens if token is not None), None)


def _ended(ids: torch.Tensor, config: Any) -> torch.Tensor:
    """Texts whose last token is their end, where CLIP looks for what they say: the largest one in older configs."""
    end = getattr(config, "eos_token_id", None)
    ids[:, -1] = config.vocab_size - 1 if end in (None, 2) else end
    return ids


def _texts_with_images(
    model: nn.Module, ids: torch.Tensor, generator: torch.Generator, padded: bool
) -> dict[str, torch.Tensor]:
    """Texts and an image for each, with the tokens that stand for it behind the padding, where there are any."""
    config, known = model.config, inspect.signature(model.forward).parameters
    inputs = {"input_ids": _ended(ids, config.get_text_config())}
    inputs |= _images(model, getattr(config, "vision_config", config), ids.shape[0], generator, padded)
    if "image_embeds_position_mask" in known:
        mask = inputs["image_embeds_position_mask"] = torch.zeros_like(ids)
        mask[:, _PADDED : _PADDED + config.latent_query_num] = 1
    elif _image_token(config) is not None:
        ids[:, _PADDED : _PADDED + config.num_query_tokens] = _image_token(config)
    if "image_attention_mask" in known:  # which of several images each token sees
        inputs["pixel_values"] = _several(inputs["pixel_values"], 2)
        seen = inputs["image_attention_mask"] = torch.ones(*ids.shape, 2, dtype=torch.long)
        seen[:, :2], seen[:, :_PADDED, 1] = 0, 0
    elif type(model).__name__.endswith("ForImagesAndTextClassification"):
        inputs["pixel_values"] = _several(inputs["pixel_values"], config.num_images)
    if "qformer_input_ids" in known:
        inputs["qformer_input_ids"] = example(model, ids.shape[0]) % config.qformer_config.vocab_size
    return inputs


def _several(images: torch.Tensor, count: int) -> torch.Tensor:
    """[batch, count, channels, height, width]: each image, and its mirror images."""
    return torch.stack([images if i % 2 == 0 else images.flip(-1) for i in range(count)], 1)


def _images(
    model: nn.Module, config: Any, batch: int, generator: torch.Generator, padded: bool
) -> dict[str, torch.Tensor]:
    """Images for a model whose part for them has this config: pixels, or, of any shape, patches and their numbers."""
    if "spatial_shapes" not in inspect.signature(model.forward).parameters:
        return {"pixel_values": _image(config, batch, generator, "ForImage" in type(model).__name__)}
    rows, columns = 4, 3
    patches = torch.randn(batch, rows * columns, config.num_channels * config.patch_size**2, generator=generator)
    mask = torch.ones(batch, rows * columns, dtype=torch.long)
    shapes = torch.tensor([[rows, columns]] * batch)
    if padded:
        mask[1, (rows - 1) * columns :], shapes[1, 0] = 0, rows - 1
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def _image(config: Any, batch: int, generator: torch.Generator, still: bool = False) -> torch.Tensor:
    """Pixels of images, or of the frames of videos where the config says how many and they need not be ``still``."""
    parts = config, getattr(config, "backbone_config", None)
    size = next((size for part in parts if (size := getattr(part, "image_size", None))), 32)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    frames = getattr(config, "num_frames", None)  # of a video
    shape = (batch, frames) if isinstance(frames, int) and not still else (batch,)
    return torch.randn(*shape, getattr(config, "num_channels", 3), height, width, generator=generator)


def _patches_in_places(config: Any, batch: int, generator: torch.Generator, padded: bool) -> torch.Tensor:
    """[images, patches, numbers], each patch behind its row and its column, as Pix2Struct reads them; 0 is padding."""
    rows, columns = 4, 3
    patches = torch.randn(batch, rows * columns, config.patch_embed_hidden_size, generator=generator)
    row, column = torch.meshgrid(torch.arange(1.0, rows + 1), torch.arange(1.0, columns + 1), indexing="ij")
    places = torch.stack((row, column), -1).reshape(1, -1, 2).expand(batch, -1, -1)
    patches = torch.cat((places, patches), -1)
    if padded:
        patches[1, (rows - 1) * columns :] = 0
    return patches


def _sound(name: str, config: Any, known: Collection[str]) -> tuple[int, ...] | None:
    """The shape of a sound: samples, those of each channel, or numbers for frequencies at each time; None for what is
    no sound. ``known``: what a forward pass takes."""
    if name == "input_values":
        if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):  # as images are
            return config.max_length, config.num_mel_bins
        channels = "padding_mask" in known or hasattr(config, "codebook_size")  # as what puts sound into codes
        return (getattr(config, "audio_channels", 1), 4000) if channels else (4000,)
    if name != "input_features":
        return None
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):  # Whisper's kind
        return config.num_mel_bins, 2 * config.max_source_positions
    names = "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel"
    parts = config, *(part for part in vars(config).values() if hasattr(part, "model_type"))
    found = (value for part in parts for n in names if (value := getattr(part, n, None)))
    return next(((64, frequencies) for frequencies in found), None)


def main_input(model: nn.Module) -> str:
    """The name of what ``model`` reads first: transformers' name for it, if that is more than its default, or another
    name of it that says what it is."""
    name, known = getattr(model, "main_input_name", "input_ids"), inspect.signature(model.forward).parameters
    if name == "inputs" and (plain := [n for n in ("input_ids", "pixel_values") if n in known]):
        return plain[0]
    return next(iter(known), name) if name == "input_ids" and name not in known else name


def reads_packed_images(model: nn.Module) -> bool:
    """Whether it reads patches of images that lie one behind the other, with a grid for each, as Qwen2-VL's part."""
    return "grid_thw" in inspect.signature(model.forward).parameters


def _packed_images(model: nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A high image and a wide one: [patches, numbers of a patch], and their grids."""
    config = model.config
    merged = getattr(config, "spatial_merge_size", 1)
    grid = torch.tensor([[1, 6 * merged, 2 * merged], [1, merged, 4 * merged]])
    channels = next((v for n in ("in_channels", "in_chans", "num_channels") if (v := getattr(config, n, None))), 3)
    numbers = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
    patches = torch.randn(int(grid.prod(1).sum()), numbers, generator=generator)
    return {next(iter(inspect.signature(model.forward).parameters)): patches, "grid_thw": grid}


def forward_inputs(model: nn.Module, padded: bool = False, batch: int = 2) -> dict[str, torch.Tensor]:
    """Random arguments for a forward pass of a model that does not continue text, on the CPU, numbers in fp32.

    Args:
        padded: with the first tokens of the second row masked, where the model reads tokens, and the last patches of
            the second image, where images may have any shape.

    Raises:
        ModelError: it reads neither tokens nor images nor sound.
    """
    name, config = main_input(model), model.config
    known, generator = inspect.signature(model.forward).parameters, torch.Generator().manual_seed(1)
    if reads_packed_images(model):
        inputs = _packed_images(model, generator)
    elif name == "input_ids" or (name == "pixel_values" and _takes_texts_with_images(known, config)):
        inputs = {"input_ids": example(model, batch)}
        if _takes_texts_with_images(known, config):
            inputs |= _texts_with_images(model, inputs["input_ids"], generator, padded)
        if padded:
            inputs["attention_mask"] = mask_of(inputs["input_ids"])
    elif name == "pixel_values":
        images = config if hasattr(config, "patch_size") else getattr(config, "vision_config", config)
        inputs = _images(model, images, batch, generator, padded)
    elif name == "flattened_patches":
        inputs = {name: _patches_in_places(getattr(config, "vision_config", config), batch, generator, padded)}
    elif (shape := _sound(name, config, known)) is not None:
        inputs = {name: torch.randn(batch, *shape, generator=generator)}
    else:
        raise ModelError(f"{type(model).__name__} reads {name!r}: give a model of tokens, images or sound")
    if "input_points" in known:  # of what to cut out of the images
        inputs["input_points"] = torch.rand(batch, 1, 2, 2, generator=generator) * inputs["pixel_values"].shape[-1]
    if getattr(config, "is_encoder_decoder", False) or "decoder_input_ids" in known:
        inputs["decoder_input_ids"] = example(model, batch)
        if type(model).__name__.endswith("ForSequenceClassification"):  # which looks where the text ends
            inputs["input_ids"][:, -1] = config.eos_token_id
    if type(model).__name__.endswith("ForMultipleChoice"):  # reads [batch, choices, tokens]
        inputs = {n: value[:, None] for n, value in inputs.items()}
    return inputs


def decoding_step(model: nn.Module, ids: torch.Tensor, prefill: Any) -> Any | None:
    """The last of ``ids`` once more, behind a prefill's output: the output; None where that has kept no cache."""
    cache = cache_of(prefill)
    if cache is None:
        return None
    return model(input_ids=ids[:, -1:], use_cache=True, **{cache_argument(type(model)): cache})


@torch.no_grad()
def takes_steps(model: nn.Module, ids: torch.Tensor) -> bool:
    """Whether a decoder takes the last token alone behind its cache: CPM-Ant wants the whole text each time."""
    try:
        decoding_step(model, ids, model(input_ids=ids, use_cache=True))
    except Exception:  # whatever a model does with part of what it wants
        return False
    return True


@torch.no_grad()
def has_loss(model: nn.Module, ids: torch.Tensor) -> bool:
    """Whether a decoder has a loss of text: that of CSM, which speaks, is of sounds."""
    try:
        model(input_ids=ids, labels=ids, use_cache=False)
    except Exception:  # whatever a model does with labels of another kind
        return False
    return True


def mask_of(ids: torch.Tensor) -> torch.Tensor:
    """An attention mask like ``ids``, whose second row is padded on the left."""
    mask = torch.ones_like(ids)
    mask[1, : min(_PADDED, ids.shape[1] // 2)] = 0
    return mask


def main_output(output: Any) -> torch.Tensor:
    """The first numbers that a forward pass returns: logits, or hidden states; behind a loss."""
    return next(v for v in _tensors(output) if v.is_floating_point() and v.ndim)


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (dict, list, tuple)):
        for value in output.values() if isinstance(output, dict) else output:
            yield from _tensors(value)

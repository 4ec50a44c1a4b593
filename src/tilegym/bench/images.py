"""Prompts with images in them: files, or noise of a size, put before the text as the model's processor does.

A model of random weights may have no processor. Its images are noise then, made from its config, and as many tokens
stand for one as the model makes features of it.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tilegym.bench.models import LoadedModel
from tilegym.bench.models import first_sentence
from tilegym.bench.prompts import Batch
from tilegym.bench.prompts import encode_all
from tilegym.bench.prompts import in_batches
from tilegym.bench.prompts import pad_left
from tilegym.errors import ModelError

_SIZE = re.compile(r"(\d+)x(\d+)")
_TYPES = ("token_type_ids", "mm_token_type_ids")


def size_of(image: str) -> tuple[int, int] | None:
    """Width and height in pixels if ``image`` names a size, as in "896x672"; else it is a file."""
    size = _SIZE.fullmatch(image)
    return (int(size[1]), int(size[2])) if size else None


def check(images: tuple[str, ...]) -> None:
    """Raises ModelError if an image is a size of nothing, or no file."""
    for image in images:
        size = size_of(image)
        if (size and 0 in size) or (size is None and not Path(image).expanduser().is_file()):
            raise ModelError(
                f"--image {image}: there is no such file; give a picture, or a size such as 896x896 for noise"
            )


def make_batches(
    prompts: list[str],
    images: tuple[str, ...],
    loaded: LoadedModel,
    batch_size: int | None,
    input_length: int | None,
) -> list[Batch]:
    """Batches of ``batch_size`` prompts, each with all ``images`` before its text; sizes as for text alone.

    Args:
        input_length: of the text behind images of a model without a processor.

    Raises:
        ModelError: a file is no picture, the model's processor refuses it, or there is none and it is needed.
    """
    if loaded.processor is not None:
        if input_length is not None:
            raise ModelError("--input_length does not go with --image where the model has a processor: leave it out")
        return [_processed(texts, images, loaded) for texts in in_batches(prompts, batch_size)]
    sizes = [size_of(image) for image in images]
    if None in sizes:
        raise ModelError(
            f"{loaded.name} has no processor to read {images[sizes.index(None)]} with: put its processor's files "
            "there, or give a size instead, such as --image 896x896, for noise"
        )
    texts = encode_all(prompts, loaded.tokenizer, loaded.model.config.get_text_config().vocab_size, input_length)
    of_images, ids = noise(loaded.model, sizes)
    if loaded.tokenizer is None:  # a byte of the text may be the image's token: Mistral 3's is a new line
        texts = [[token if token not in ids else 0 for token in text] for text in texts]
    return [_joined(rows, of_images, ids, loaded.model) for rows in in_batches(texts, batch_size)]


def _processed(texts: list[str], images: tuple[str, ...], loaded: LoadedModel) -> Batch:
    processor, pictures = loaded.processor, [_open(image) for image in images]
    options = {}
    try:
        if getattr(processor, "chat_template", None):
            options["add_special_tokens"] = False  # the template has written them
            shown = [{"type": "image"} for _ in images]
            turns = [[{"role": "user", "content": [*shown, {"type": "text", "text": text}]}] for text in texts]
            texts = [processor.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) for turn in turns]
        else:
            texts = [processor.image_token * len(images) + "\n" + text for text in texts]
        processor.tokenizer.padding_side = "left"
        made = processor(text=texts, images=[pictures for _ in texts], padding=True, return_tensors="pt", **options)
        media = {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}
        return Batch(media.pop("input_ids"), media.pop("attention_mask"), media)
    except Exception as error:  # each processor checks in its own way
        raise ModelError(
            f"the processor of {loaded.name} does not take these images ({first_sentence(error)}): take others, or run "
            "the model without --image"
        ) from error


def _open(image: str) -> Any:
    from PIL import Image  # transformers needs it for any processor of images

    size = size_of(image)
    if size is not None:
        width, height = size
        numbers = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        return Image.fromarray(numbers.numpy())
    try:
        return Image.open(Path(image).expanduser()).convert("RGB")
    except OSError as error:
        raise ModelError(f"--image {image} is no picture ({first_sentence(error)}): give a PNG or JPEG file") from error


@torch.no_grad()
def noise(model: Any, sizes: list[tuple[int, int]]) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Normal random images for ``model``, and the tokens of a prompt that stand for them.

    Args:
        sizes: width and height of each; a model that reads images of one size gets that.

    Returns:
        What ``generate`` takes for one prompt, on the CPU, numbers in fp32, and token ids.

    Raises:
        ModelError: it is not known how the model reads images.
    """
    config, known = model.config, inspect.signature(type(model).forward).parameters
    generator = torch.Generator().manual_seed(0)
    vision, token = config.vision_config, token_of(config)
    features = getattr(model, "get_image_features", None)
    if token is None or features is None:
        raise ModelError(f"it is not known how {type(model).__name__} reads images: give a model with its processor")
    media, ids = [], []
    for size in sizes:
        if "image_grid_thw" in known:
            image = _patches(vision, size, generator)
        else:
            image = {"pixel_values": _pixels(vision, size, generator)}
            if vision.model_type == "pixtral":
                image["image_sizes"] = torch.tensor([image["pixel_values"].shape[-2:]])
        try:
            count = _count(features(**{name: _to_model(value, model) for name, value in image.items()}))
        except Exception as error:  # each model reads them in its own way
            raise ModelError(
                f"{type(model).__name__} does not read images as others do ({first_sentence(error)}): give a model "
                "with its processor"
            ) from error
        begin = _token(config, "vision_start_token_id", "image_start_token_id", "boi_token_index", "boi_token_id")
        end = _token(config, "vision_end_token_id", "image_end_token_id", "eoi_token_index", "eoi_token_id")
        ids += [*([begin] if begin is not None else []), *[token] * count, *([end] if end is not None else [])]
        media.append(image)
    return {name: _stacked([image[name] for image in media]) for name in media[0]}, ids


def _count(features: Any) -> int:
    """How many tokens' hidden states a model has made of an image."""
    features = getattr(features, "pooler_output", features)
    parts = features if isinstance(features, (list, tuple)) else [features]
    return sum(part.numel() // part.shape[-1] for part in parts)


def _stacked(images: list[torch.Tensor]) -> torch.Tensor:
    """One behind the other; those of fewer pixels, [1, channels, height, width], with zeros around."""
    if images[0].dim() == 4:
        height, width = (max(image.shape[d] for image in images) for d in (2, 3))
        images = [F.pad(image, (0, width - image.shape[3], 0, height - image.shape[2])) for image in images]
    return torch.cat(images)


def _to_model(value: torch.Tensor, model: Any) -> torch.Tensor:
    """``value`` on the device of ``model``, and in its dtype if it is of numbers."""
    return value.to(model.device, model.dtype) if value.is_floating_point() else value.to(model.device)


def token_of(config: Any) -> int | None:
    """The token that stands for a part of an image; None if the config names none."""
    return _token(config, "image_token_id", "image_token_index")


def _token(config: Any, *names: str) -> int | None:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _pair(size: Any) -> tuple[int, int]:
    return tuple(size) if isinstance(size, (list, tuple)) else (size, size)


def _pixels(vision: Any, size: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """[1, channels, height, width] of what ``vision`` reads: its own size, but Pixtral's any, up to it."""
    height, width = _pair(vision.image_size)
    if vision.model_type == "pixtral":
        step = 2 * vision.patch_size  # of which two by two become a token
        width, height = (min(max(n // step, 1) * step, limit) for n, limit in zip(size, (width, height), strict=True))
    return torch.randn(1, getattr(vision, "num_channels", 3), height, width, generator=generator)


def _patches(vision: Any, size: tuple[int, int], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """As Qwen2-VL reads an image: patch behind patch [patches, numbers of one], and how many there are each way."""
    merged = vision.spatial_merge_size
    step = vision.patch_size * merged
    wide, high = (max(round(n / step), 1) * merged for n in size)
    channels = next((v for n in ("in_channels", "in_chans", "num_channels") if (v := getattr(vision, n, None))), 3)
    numbers = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    return {
        "pixel_values": torch.randn(wide * high, numbers, generator=generator),
        "image_grid_thw": torch.tensor([[1, high, wide]]),
    }


def _joined(texts: list[list[int]], of_images: dict[str, torch.Tensor], ids: list[int], model: Any) -> Batch:
    """A batch of the same images before each of ``texts``."""
    config = model.config
    ids_in, mask = pad_left(
        [ids + text for text in texts], getattr(config.get_text_config(), "pad_token_id", None) or 0
    )
    media = {name: torch.cat([value] * len(texts)) for name, value in of_images.items()}
    image = ids_in == token_of(config)
    known = inspect.signature(type(model).forward).parameters
    media |= {name: image.long() for name in _TYPES if name in known}
    return Batch(ids_in, mask, media)

"""Finds and loads a causal language model: from the Hub, a local folder, or a bare config with random weights."""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilegym.bench import placement
from tilegym.errors import ModelError

PRESET_DIR = Path(__file__).parent / "presets"
PRECISIONS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode on its device, its tokenizer where there is one, and what reads images for it."""

    name: str
    model: Any
    tokenizer: Any | None
    random_weights: bool
    processor: Any | None = None


def presets() -> list[str]:
    """The names of the configs that ship with TileGym."""
    return sorted(path.stem for path in PRESET_DIR.glob("*.json"))


def load_config(model_id: str, random_weights: bool, trust_remote_code: bool = False, images: bool = False) -> Any:
    """Reads the config of ``model_id``.

    Args:
        model_id: a Hub id or a local folder; with ``random_weights`` also a config file or the name of a preset.
        random_weights: whether a config is enough.
        trust_remote_code: whether code that comes with the model may run.
        images: whether it is to read images, too.

    Returns:
        The ``transformers`` config; of a model that also sees or hears, the language model's, if that stands alone,
        unless there are ``images``.

    Raises:
        ModelError: there is no such model, ``transformers`` does not know its architecture, or it reads no images.
    """
    import transformers
    from transformers import AutoConfig

    path = Path(model_id).expanduser()
    if not model_id:
        raise ModelError(
            f"the model's name is empty: give a Hub id, a local folder or a preset ({', '.join(presets())})"
        )
    if model_id in presets() and not path.exists():
        if not random_weights:
            raise ModelError(f"{model_id} is a preset without weights: add --random_weights to run its shape")
        source = PRESET_DIR / f"{model_id}.json"
    elif os.path.isfile(path):  # which is False for names that are too long, where path.is_file() is an error
        if path.suffix == ".py":
            raise ModelError(f"{model_id} is a Python file: `tilegym autokernel` takes {model_id}::FUNCTION")
        if not random_weights:
            raise ModelError(f"{model_id} is a file: give its folder, or add --random_weights to run a config file")
        source = path
    elif os.path.isdir(path):
        if not (path / "config.json").is_file():
            raise ModelError(f"the folder {model_id} holds no config.json: give the folder of a transformers model")
        source = path
    elif model_id.count("/") != 1 or model_id.startswith((".", "~", "/")) or model_id.endswith(".json"):
        raise ModelError(
            f"{model_id!r} is no file, no folder and no Hub id (owner/name, such as openai-community/gpt2): check the "
            f"spelling, or name a preset with --random_weights ({', '.join(presets())})"
        )
    else:
        _check_hub(model_id)
        source = model_id
    if isinstance(source, Path):
        _check_config_file(source / "config.json" if source.is_dir() else source)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        if not images:
            return _of_language_model(config)
    except Exception as error:  # each architecture checks its config in its own way
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{model_id} brings code of its own: read that code, then add --trust-remote-code to run it"
            ) from error
        raise ModelError(
            f"the config of {model_id} cannot be used ({first_sentence(error)}): "
            f"correct it, or take a model that transformers {transformers.__version__} knows"
        ) from error

    if type(config) not in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or not hasattr(config, "vision_config"):
        raise ModelError(f"{model_id} reads no images: leave out --image, or take a model that does, such as Gemma 3")
    return config


def _of_language_model(config: Any) -> Any:
    """What ``AutoModelForCausalLM`` makes a model of: the text config, where the class it takes is made of that."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config(decoder=True)
    if text is config or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return text if getattr(model_class, "config_class", None) is type(text) else config


def _check_config_file(path: Path) -> None:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({first_sentence(error)}): give the config.json of a model") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f'{path} names no "model_type": give the config.json of a transformers model')


def _check_hub(model_id: str) -> None:
    """Asks the Hub once: ``from_pretrained`` would try again for half a minute before it says less."""
    import huggingface_hub
    from huggingface_hub import errors

    remedy = f"give a local folder, or a preset such as {presets()[0]} with --random_weights"
    try:
        if isinstance(huggingface_hub.try_to_load_from_cache(model_id, "config.json"), str):
            return
        huggingface_hub.HfApi().model_info(model_id, timeout=10)
    except errors.GatedRepoError as error:
        raise ModelError(
            f"the model {model_id} is gated: accept its terms on its Hub page, then set HF_TOKEN; or {remedy}"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelError(
            f"the Hub has no model {model_id!r} that you may see: check the spelling, "
            f"set HF_TOKEN if it is private, or {remedy}"
        ) from error
    except Exception as error:  # whatever the HTTP client raises when there is no network
        raise ModelError(
            f"the model {model_id!r} is not in the local cache and the Hub cannot be reached "
            f"({first_sentence(error)}): connect to the network, or {remedy}"
        ) from error


def load(
    model_id: str,
    dtype: torch.dtype,
    device: torch.device,
    random_weights: bool,
    config: Any | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    images: bool = False,
    gpus: int | None = None,
) -> LoadedModel:
    """Loads a model for greedy generation of a fixed number of tokens.

    Args:
        model_id: as in :func:`load_config`.
        dtype: of the weights and the computation.
        device: where the model is put.
        random_weights: initialise the weights from ``seed`` instead of reading them.
        config: what :func:`load_config` returned for the same model; read again if None.
        seed: of the random weights.
        trust_remote_code: whether code that comes with the model may run.
        images: whether it is to read images, too.
        gpus: over how many its layers are spread, where the caller can do that; ``device`` is the first of them.

    Raises:
        ModelError: the model is missing, broken, no causal language model, or too large for the memory that is free.
    """
    from transformers import GenerationConfig

    config = config or load_config(model_id, random_weights, trust_remote_code, images)
    extra, auto_class = {"trust_remote_code": True} if trust_remote_code else {}, _auto_class(config, images)
    check_memory(config, dtype, device, images, gpus)
    places = None
    with out_of_memory_is_explained(device):
        try:
            if (gpus or 1) > 1:
                with torch.device("meta"):
                    model = auto_class.from_config(config, dtype=dtype, **extra)
                places = placement.places_of(model, dtype, placement.devices_of(device, gpus))
            if random_weights:
                torch.manual_seed(seed)
                if places:
                    model = placement.filled(model, places)
                else:
                    with torch.device(device):
                        model = auto_class.from_config(config, dtype=dtype, **extra)
            else:
                model, info = auto_class.from_pretrained(
                    model_id,
                    config=config,
                    dtype=dtype,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # _check_complete names them
                    device_map=places,
                    **extra,
                )
                _check_complete(model_id, info)
                model = model if places else model.to(device)
        except Exception as error:  # a damaged file fails in whichever library reads it
            if isinstance(error, ModelError) or is_out_of_memory(error):
                raise
            raise ModelError(
                f"the model {model_id} cannot be loaded ({first_sentence(error)}): "
                "restore its files, or add --random_weights to run its shape"
            ) from error
    # Neutral: greedy, and no end token, so that every run makes the same number of tokens.
    pad = getattr(config.get_text_config(decoder=True), "pad_token_id", None) or 0
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=pad)
    tokenizer = _load_tokenizer(model_id, random_weights, extra)
    processor = _load_processor(model_id, random_weights, extra) if images else None
    return LoadedModel(model_id, model.eval(), tokenizer, random_weights, processor)


def _auto_class(config: Any, images: bool) -> Any:
    import transformers

    # Some read text by itself, too, but have no class for that alone.
    alone = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    images = images or (type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not alone)
    return transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM


def _check_complete(model_id: str, loading_info: dict[str, Any]) -> None:
    """transformers fills weights that are missing or do not fit with random numbers, and only logs it."""
    unfit = sorted(loading_info["mismatched_keys"], key=str)
    if unfit:
        name, stored, wanted = (part if isinstance(part, str) else list(part) for part in unfit[0])
        raise ModelError(
            f"the weight {name} of {model_id} has the shape {stored}, its config asks for {wanted}: "
            "restore config.json or the weights"
        )
    missing = sorted(loading_info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ModelError(
            f"the model {model_id} lacks the weight {missing[0]}{more}: restore its files, "
            "or add --random_weights to run its shape"
        )


def _load_tokenizer(model_id: str, random_weights: bool, extra: dict[str, bool]) -> Any | None:
    from transformers import AutoTokenizer

    path = Path(model_id).expanduser()
    if random_weights and (path.is_file() or model_id in presets()):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_id, **extra)
        if not tokenizer.encode("a", add_special_tokens=False):  # some classes make an empty one where no file is
            raise ValueError("it has no vocabulary")
    except Exception as error:  # as many reasons as there are kinds of tokenizer
        if random_weights:
            return None
        problem = f"transformers finds no tokenizer for {model_id}: put its tokenizer.json there"
        if (path / "tokenizer.json").is_file():
            problem = f"the tokenizer.json of {model_id} cannot be used ({first_sentence(error)}): restore it"
        raise ModelError(f"{problem}, or add --random_weights to run the shape without one") from error
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _load_processor(model_id: str, random_weights: bool, extra: dict[str, bool]) -> Any | None:
    """What makes inputs of texts and images for the model; None where random weights have none."""
    from transformers import AutoProcessor

    if random_weights and (Path(model_id).expanduser().is_file() or model_id in presets()):
        return None
    try:
        processor = AutoProcessor.from_pretrained(model_id, **extra)
        if getattr(processor, "image_processor", None) is None:  # a tokenizer is all that was found
            raise ValueError("it has no preprocessor_config.json")
        return processor
    except Exception as error:  # as many reasons as there are kinds of processor, missing packages among them
        if random_weights:
            return None
        raise ModelError(
            f"transformers finds no processor for the images of {model_id} ({first_sentence(error)}): put its files "
            "there, install what is missing, or add --random_weights to run the shape without one"
        ) from error


def cut_layers(config: Any, layers: int) -> None:
    """Leaves a model of ``config`` the first ``layers`` of its layers, in place.

    Raises:
        ModelError: it has fewer, or none that can be counted.
    """
    text = config.get_text_config(decoder=True)
    there = getattr(text, "num_hidden_layers", None)
    if there is None or layers > there:
        raise ModelError(
            f"--num_layers {layers}: the model has {there or 'no'} layers; take at most that many, or leave it out"
        )
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == there:  # layer_types and its like: an entry for each layer
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers


def count_parameters(config: Any, images: bool = False) -> int:
    """The number of parameters of the model that ``config`` describes, without allocating it.

    ``images``: of the model that reads images, too.

    Raises:
        ModelError: the config describes no causal language model, or contradicts itself.
    """
    # The code of a config that is there has been trusted already.
    extra = {"trust_remote_code": True} if type(config).__module__.startswith("transformers_modules") else {}
    try:
        with torch.device("meta"):
            return _auto_class(config, images).from_config(config, **extra).num_parameters()
    except Exception as error:  # a config that contradicts itself fails anywhere in the model's constructor
        raise ModelError(
            f"a config of type {config.model_type!r} makes no causal language model ({first_sentence(error)}): "
            "correct it, or take one of a decoder such as llama or qwen3"
        ) from error


def check_memory(
    config: Any, dtype: torch.dtype, device: torch.device, images: bool = False, gpus: int | None = None
) -> None:
    """Raises ModelError if the weights alone exceed the free memory of ``device``, or of as many ``gpus``.

    On a CPU the operating system would otherwise kill the process without a word.
    """
    more = gpus is not None and device.type == "cuda" and gpus < torch.cuda.device_count()
    _require(
        count_parameters(config, images) * dtype.itemsize,
        placement.devices_of(device, gpus or 1),
        f"the weights take {{}} in {str(dtype).removeprefix('torch.')}",
        f"a smaller model, a 16-bit --precision, or {'more --gpus' if more else 'a device with more memory'}",
    )


def check_training_memory(config: Any, dtype: torch.dtype, device: torch.device, with_adamw: bool) -> None:
    """Raises ModelError if weights, gradients and, ``with_adamw``, its moments exceed the free memory of ``device``."""
    _require(
        count_parameters(config) * dtype.itemsize * (4 if with_adamw else 2),
        [device],
        f"weights, gradients{' and the moments of AdamW' if with_adamw else ''} take {{}}",
        f"a smaller --num_layers{', --optimizer none' if with_adamw else ''} or a device with more memory",
    )


def check_cache_memory(
    config: Any, dtype: torch.dtype, device: torch.device, sequences: int, tokens: int, gpus: int = 1
) -> None:
    """Raises ModelError if the keys and values of ``sequences`` x ``tokens`` exceed the free memory of ``device``, or
    of as many ``gpus``.

    Layers that do not keep every token, and those of configs with names of their own, are not counted.
    """
    config = config.get_text_config(decoder=True)
    layers, kept = getattr(config, "num_hidden_layers", 0), tokens
    if getattr(config, "layer_types", None):
        layers = config.layer_types.count("full_attention")
    elif getattr(config, "sliding_window", None):
        kept = min(tokens, config.sliding_window)
    heads = getattr(config, "num_attention_heads", 0)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", 0) // heads if heads else 0)
    _require(
        2 * layers * kv_heads * head_dim * kept * sequences * dtype.itemsize,
        placement.devices_of(device, gpus),
        f"the keys and values of {sequences} x {tokens} tokens take {{}}",
        "a smaller --batch_size or --output_length, or shorter prompts",
    )


def _require(needed: int, devices: list[torch.device], what: str, remedy: str) -> None:
    free = [placement.free_memory(device) for device in devices]
    if None not in free and needed > sum(free):
        needs, has = what.format(f"{needed / 2**30:.1f} GiB"), f"{sum(free) / 2**30:.1f} GiB"
        where = " and ".join(map(str, devices))
        raise ModelError(f"out of memory: {needs} and {has} are free on {where}; take {remedy}")


_SMALLER = "take a smaller --batch_size, --output_length, shorter prompts, a smaller model or a 16-bit --precision"


@contextlib.contextmanager
def out_of_memory_is_explained(device: torch.device, remedy: str = _SMALLER) -> Iterator[None]:
    """Turns an allocation that failed in the block into a ModelError that says what to do: ``remedy``."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(f"out of memory on {device}: {remedy}") from error


def is_out_of_memory(error: Exception) -> bool:
    # torch's CPU allocator raises a plain RuntimeError.
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def first_sentence(error: BaseException) -> str:
    """The first sentence of what went wrong at the root, on one line and without the final stop."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, KeyError) and lines:  # its text is the key alone
        return f"{error} is not known"
    return (lines[0].split(". ")[0].rstrip(".:") if lines else type(error).__name__)[:300]


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps loading bars and advice out of the output for as long as the block runs."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()

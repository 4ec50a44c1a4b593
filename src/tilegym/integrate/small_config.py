"""Configs made small: what in a config is a size is recognised by its name, for all families at once.

Widths, vocabularies and numbers of heads, experts and layers become small numbers that stand in the same relations
(grouped queries stay grouped, packed stays packed). What is no size (eps, activations, windows' presence, scalings,
kinds of layers) stays.
"""

import re
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

HIDDEN, HEADS, HEAD_DIM, VOCAB, WINDOW = 64, 4, 16, 128, 8
POSITIONS = 64  # at least, of texts: what a small model is run on, and generates, has to fit
PATCHES = 16  # at most, on a side of an image: Mistral 3's have 110, and to attend to two takes gigabytes
LARGE = 1000  # an image's side that is not made small by its patches: a SAM's takes minutes
_SHARE = 4  # of widths and sides that is left in proportion to each other, where there are at least
_LEAST = 32

_LAYERS = re.compile(
    r"(^layers|num_(hidden_|decoder_|encoder_)?layers|(decoder|encoder)_layers|n_layers?|num_blocks|attends_per_block)$"
)
_PERIOD = re.compile(r"period|interval|pattern$|every_n|(sparse|moe_layer)_step$|moe_layer_freq|layer_group_size")
_FIRST = re.compile(r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|_layer_offset$|per_attn_res_block")
_SECTION = re.compile(r"^n(um)?_\w+_layers$")
_INDICES = re.compile(r"(_layers|_idxs|_layer_ids|^global_attn_indexes|_block_indices)$")
_TOKEN = re.compile(r"_(token_id|token_index|index|id)$")

# Name of a size -> small value; the first that matches. Functions get the config's dictionary and the old value.
_Rule = int | Callable[[dict[str, Any], int], int]


def _kv_heads(config: dict[str, Any], value: int) -> int:
    heads = next((config[n] for n in ("num_attention_heads", "n_heads", "n_head") if isinstance(config.get(n), int)), 0)
    return HEADS if value == heads else min(value, 2)


def _head_dim(config: dict[str, Any], value: int) -> int:
    if isinstance(config.get("qk_rope_head_dim"), int) and value == config["qk_rope_head_dim"]:
        return 8
    layers = config.get("per_layer_config") or {}  # which say what differs there
    for whole in (config, *(config | part for part in layers.values())):
        rotated, plain = (whole.get(name) for name in ("qk_rope_head_dim", "qk_nope_head_dim"))
        if isinstance(rotated, int) and isinstance(plain, int) and value == rotated + plain:
            return 24
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    square = not isinstance(hidden, int) or not isinstance(heads, int) or hidden == value * heads
    return HEAD_DIM if square else 2 * HEAD_DIM


def _attention_width(config: dict[str, Any]) -> int:
    return HIDDEN * max(1, round(config.get("attention_hidden_size", 0) / config["hidden_size"]))


def _at_least(limit: int) -> Callable[[dict[str, Any], int], int]:
    return lambda config, value: max(value, limit)


def _at_most(limit: int) -> Callable[[dict[str, Any], int], int]:
    return lambda config, value: min(value, limit)


def _like(other: str, same: int, different: int) -> Callable[[dict[str, Any], int], int]:
    return lambda config, value: same if config.get(other) == value else different


def _image_size(config: dict[str, Any], value: int) -> int:
    """Of square images, where every patch attends to all."""
    patch, windowed = config.get("patch_size"), any("window" in name for name in config)
    if windowed or "num_attention_heads" not in config or not type(patch) is type(config["image_size"]) is int:
        return value
    return min(value, PATCHES * patch)


_SIZES: tuple[tuple[str, _Rule], ...] = (
    (r"vocab_size_per_layer_input|(^|_)vocab_size$", VOCAB),
    (r"ngram_vocab_size_base|hash_byte_group_vocab", 64),
    (r"moe_(shared_expert_)?intermediate_size|expert_ffn_hidden_size|shared_experts?_intermediate_size", _at_most(48)),
    (r"shared_intermediate_size", _at_most(48)),
    (r"intermediate_size(_mlp)?$|(^|_)ffn_dim$|ffn_hidden_size|d_ff$|d_inner|dim_ff|dff|feed_forward_size|n_inner", 96),
    (r"qk_nope_head_dim", 16),
    (r"qk_rope_head_dim", 8),
    (r"qk_head_dim", 24),
    (r"v_head_dim", _like("qk_nope_head_dim", 16, 32)),
    (r"index_head_dim", 16),
    (r"index_n_heads", 2),
    (r"index_topk", lambda config, value: max(8, config.get("index_kpool") or 0)),
    (r"indexer_budget", _at_most(16)),
    (r"indexer_compress_ratio", _at_most(4)),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads", _like("linear_num_key_heads", 2, 4)),
    (r"linear_key_head_dim|linear_head_dim", 16),
    (r"linear_value_head_dim", _like("linear_key_head_dim", 16, 32)),
    (r"linear_num_heads", HEADS),
    (r"mamba_(n|num)_heads|n_mamba_heads", _at_most(8)),
    (r"mamba_d_head|mamba_head_?dim", 16),
    (r"mamba_d_ssm", 2 * HIDDEN),
    (r"(mamba_d_state|state_size)$", 16),
    (r"mamba_dt_rank|time_step_rank", 4),
    (r"^upsample_groups$", lambda config, value: HIDDEN if value == config.get("hidden_size") else value),
    (r"^num_filters$", _at_most(16)),
    (r"^codebook_size$", _at_most(VOCAB)),
    (r"(mamba_)?(n_|n)groups$|^n_group$|num_expert_group", _at_most(2)),
    (r"^topk_group$", lambda config, value: min(value, 2) if value == config.get("n_group") else 1),
    (r"^attention_head_dim", lambda config, value: _attention_width(config) // HEADS),
    (r"^(cross_)?attention_hidden_size", lambda config, value: _attention_width(config)),
    (r"(^|_)head_dim$|dim_head|d_head|attention_head_size|kv_channels|d_kv", _head_dim),
    (r"kv_n_heads|num_kv_heads|num_key_value_heads|num_query_groups", _kv_heads),
    (r"num_cross_attention_heads$", _at_most(HEADS)),
    (r"attention_heads$|^n_heads?$", HEADS),
    (r"^num_heads$", lambda config, value: 2 * HIDDEN // HEAD_DIM if "expand" in config else HEADS),
    (r"kv_lora_rank", 32),
    (r"q_lora_rank", 24),
    (r"o_lora_rank|adapter_rank|laurel_rank|gated_norm_rank|hc_lowrank", 16),
    (r"(num|n_routed|num_local|moe_num)_experts$|zero_expert_num", _at_most(8)),
    (r"experts_per_tok(en)?$|moe_top_?k|moe_k$", _at_most(2)),
    (r"^num_queries$", _at_most(16)),
    (r"^(latent_query_num|num_query_tokens|num_latents)$", _at_most(8)),
    (r"^num_frames$", _at_most(4)),
    (r"rotary_dim", 8),
    (r"lru_width", HIDDEN),
    (r"hidden_size_per_layer_input|ple_embed_dim", 16),
    (
        r"^(hidden_size(_global)?|d_(model|latents)|n_embd|emb_dim|(input_|output_)?embedding_(dim|size)|dim_model)$",
        HIDDEN,
    ),
    (r"word_embed_proj_dim|backbone_hidden_size|lm_width|input_size|dim_model_base", HIDDEN),
    # That of Qwen2.5-VL's images is of pixels.
    (r"^window_size$", lambda config, value: value if "spatial_merge_size" in config else WINDOW),
    (r"(sliding_window|window_size|sliding_window_size|local_attention)$|window_len$", WINDOW),
    (r"attention_chunk_size", WINDOW),
    (r"^image_size$", _image_size),
    (r"model_max_length", 4096),
    (r"^(max_position_embeddings|n_positions|n_ctx|max_target_positions)$", _at_least(POSITIONS)),
)
_SIZES_COMPILED = tuple((re.compile(pattern), rule) for pattern, rule in _SIZES)
_LEFT_OUT = ("architectures", "transformers_version", "quantization_config", "dtype")
_NOT_OURS = re.compile(r"vision|audio|vq_config|label|quantization")
# What is a width in any family, and what depends on the side of an image.
_WIDTH = re.compile(
    r"(hidden|intermediate|embedding)_(size|dim)s?$|(^|_)(dim|ffn_dim|channels|channel_list|pos_feats)$|^d_|dim_per_stage"
)
_SIDE = re.compile(r"image_(embedding_)?size$|feat(ure)?_sizes$|mask_size$")
# What else is a size in the parts of models that read texts and images.
_BESIDE_IMAGES = {"depth": 2, "embed_dim": HIDDEN, "out_hidden_size": HIDDEN, "projection_size": HIDDEN}
_NOT_OURS_WITH_SOUNDS = re.compile(r"vq_config|label|quantization")
_NOT_OURS_WITH_IMAGES = re.compile(rf"audio|{_NOT_OURS_WITH_SOUNDS.pattern}")


# Recipes: from the dictionary of a config to the dictionary of a small one, and the changes.


def small_everywhere(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return _shrink(config, lambda name: True)


def heads_from_width(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    values, changes = _shrink(config, lambda name: True)
    for _, part in _named_parts(values):
        for name in ("head_dim", "attention_head_dim"):
            if isinstance(part.get(name), int):
                part[name] = HEAD_DIM
    return values, changes


def original_heads(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return _shrink(config, lambda name: not re.search(r"head|rotary|lru|hidden_size|embd|d_model|groups|mamba", name))


def few_layers(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return _shrink(config, _is_count)


def gaps_filled(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """For configs that leave open what their model needs, as some do by default."""
    whole = filled(config, True)
    values, changes = _shrink(whole, lambda name: True)
    return values, {
        n: (None, v) for n, v in whole.items() if n in config and config[n] is None and v is not None
    } | changes


def filled(config: dict[str, Any], gaps: bool) -> dict[str, Any]:
    """A config with what it leaves open, and as a decoder."""
    whole = dict(config)
    if whole.get("is_decoder") is False:  # families that can be encoders too
        whole["is_decoder"] = True
    heads, depth = whole.get("num_attention_heads"), _depth(whole)[0]
    usual = {
        "head_dim": whole["hidden_size"] // heads if isinstance(heads, int) and "hidden_size" in whole else None,
        "num_key_value_heads": heads,
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "attn_layer_indices": [1],
        "layer_types": (["conv", "full_attention"] * depth)[:depth],
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": whole.get("head_dim"),
        "indexer_budget": 2048,
        "indexer_compress_ratio": 64,
    }
    for name, value in usual.items() if gaps else ():
        if name in whole and whole[name] is None:
            whole[name] = value
    return whole


def twice_as_deep(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """For models that tie the second layer of a kind to the first."""
    return _shrink(config, lambda name: True, 2)


def images_too(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """For models that read texts and images, as CLIP, for those whose part for texts is no model by itself, and for the
    parts for images themselves."""
    return _with_images(config, _NOT_OURS_WITH_IMAGES)


def images_and_sounds_too(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """For models that read texts, images and sounds, all by one class, as Phi-4-multimodal."""
    return _with_images(config, _NOT_OURS_WITH_SOUNDS)


def _with_images(config: dict[str, Any], left: re.Pattern) -> tuple[dict[str, Any], dict[str, Any]]:
    values, changes = _shrink(config, lambda name: True, left=left)
    parts = {f"{n}.": (v, config[n]) for n, v in values.items() if isinstance(v, dict) and "model_type" in v}
    if "patch_size" in values:
        parts[""] = values, config
    for prefix, (part, original) in parts.items():
        for name, small in _BESIDE_IMAGES.items():
            if isinstance(part.get(name), int) and part[name] > small:
                changes[f"{prefix}{name}"] = original[name], small
                part[name] = small
    return values, changes


def in_proportion(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """For models whose parts' widths, and sides of large images, depend on each other, whatever they are called, as
    SAM's: a share of each, for as many heads."""
    values, changes = _shrink(config, _is_count, left=_NOT_OURS_WITH_SOUNDS)
    large = has_large_images(config)
    for prefix, part in _named_parts(values):
        for name, value in part.items():
            if _WIDTH.search(name) or (large and _SIDE.search(name)):
                small = _share(value)
                if small != value:
                    part[name], changes[f"{prefix}{name}"] = small, (value, small)
    return values, changes


def _is_count(name: str) -> bool:
    return "experts" in name or name.endswith(("vocab_size", "num_queries"))


def _share(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_share, value))
    return value // _SHARE if type(value) is int and value >= _LEAST else value


def has_large_images(config: dict[str, Any]) -> bool:
    """Whether only :func:`in_proportion` makes its images small."""
    sizes = ((part, part.get("image_size")) for _, part in _named_parts(config))
    sides = (_image_size(part, size) if type(size) is int else size for part, size in sizes)
    return any(max(side) >= LARGE if isinstance(side, (list, tuple)) else (side or 0) >= LARGE for side in sides)


RECIPES = (
    small_everywhere, heads_from_width, gaps_filled, twice_as_deep, original_heads, few_layers, images_too,
    images_and_sounds_too, in_proportion,
)  # fmt: skip


def _named_parts(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield prefix, values
    for name, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            yield from _named_parts(value, f"{prefix}{name}.")


def _shrink(
    config: dict[str, Any], wanted: Callable[[str], bool], depths: int = 1, left: re.Pattern = _NOT_OURS
) -> tuple[dict[str, Any], dict[str, Any]]:
    values = {name: value for name, value in config.items() if name not in _LEFT_OUT}
    changes: dict[str, Any] = {}
    depth, layers = _depth(values)
    layers = min(depth, layers * depths) or layers
    if values.get("is_decoder") is False:
        values, changes["is_decoder"] = filled(values, False), (False, True)
    for name, value in list(values.items()):
        new = value
        if isinstance(value, bool) or value is None or left.search(name):
            continue
        if isinstance(value, dict) and "model_type" in value:
            new, inner = _shrink(value, wanted, depths, left)
            changes |= {f"{name}.{key}": change for key, change in inner.items()}
            values[name] = new
            continue
        if name == "per_layer_config" and isinstance(value, dict):
            new = {i: _shrink(part, wanted)[0] for i, part in value.items() if int(i) < layers}
        elif isinstance(value, (list, tuple)):
            new = type(value)(_shrink_list(config, name, list(value), depth, layers, wanted))
        elif isinstance(value, int):
            new = _shrink_number(config, name, value, layers, wanted)
        if new != value:
            values[name], changes[name] = new, (value, new)
    for name, chosen in _read_layers(values, depth):
        if max(chosen) >= layers:
            values[name] = list(range(1, len(chosen) + 1))
            changes[name] = chosen, values[name]
            if name == "out_indices" and values.get("out_features"):
                values["out_features"] = [values["stage_names"][i] for i in values[name]]
    _fit_rotation(values, config)
    return values, changes


def _read_layers(values: dict[str, Any], depth: int) -> Iterator[tuple[str, list[int]]]:
    """The lists of numbers of layers from which is read what stands behind a backbone, counted from 0 or 1, by name."""
    stages = values.get("stage_names")
    if depth and (stages is None or len(stages) == depth + 1):  # where several layers are a stage, all stages stay
        for name in ("out_indices", "backbone_out_indices"):
            chosen = values.get(name)
            if isinstance(chosen, (list, tuple)) and chosen and all(type(i) is int and 0 <= i <= depth for i in chosen):
                yield name, list(chosen)


def _shrink_number(config: dict[str, Any], name: str, value: int, layers: int, wanted: Callable) -> int:
    if _LAYERS.search(name):
        stack = config.get("num_layers_per_stack")  # of which each is run several times
        return value // stack * min(stack, layers) if stack else min(value, layers)
    if name == "num_layers_per_stack":
        return min(value, layers)
    if name == "loop_layer_index_end":
        return _end_of_loop(config)
    if name in (sections := _sections(config)):
        return value if layers == sum(config[n] for n in sections) else layers // len(sections)
    if name == "num_kv_shared_layers":
        return min(value, layers // 2)
    if name == "moe_layer_end_index":
        return min(value, layers - 1)
    if _TOKEN.search(name):
        return min(value, VOCAB - 1)
    for pattern, rule in _SIZES_COMPILED:
        if value > 0 and pattern.search(name) and wanted(name):
            return rule if isinstance(rule, int) else rule(config, value)
    return value


def _shrink_list(config: dict[str, Any], name: str, value: list, depth: int, layers: int, wanted: Callable) -> list:
    if _are_indices(name, value, depth):
        return [i for i in value if i < layers]
    if name == "attention_types":  # GPT-Neo: [[kinds, repetitions], ...]
        return [[kinds, max(1, layers // len(kinds))] for kinds, _ in value[:1]]
    if name.endswith("token_id"):
        return [min(i, VOCAB - 1) for i in value]
    if len(value) == depth:
        value = value[:layers]
    return [_shrink_number(config, name, v, layers, wanted) if type(v) is int and v > 8 else v for v in value]


def _are_indices(name: str, value: list, depth: int) -> bool:
    """Whether a list names layers by their numbers, and does not hold something for each of the ``depth`` layers."""
    if not _INDICES.search(name) or not all(type(i) is int for i in value):
        return False
    if depth and len(value) == depth and value[-1] >= depth:  # [1] of one layer is what SmolLM3 has
        return False
    return all(a < b for a, b in zip(value, value[1:], strict=False))


def _sections(values: dict[str, Any]) -> list[str]:
    """The names of parts that all layers are in, one behind the other, as those before, in and behind a loop."""
    depths = [v for name, v in values.items() if _LAYERS.search(name) and type(v) is int]
    names = (name for name in values if _SECTION.search(name) and not _LAYERS.search(name))
    parts = {name: values[name] for name in names if type(values[name]) is int and values[name] > 0}
    return list(parts) if len(parts) > 1 and sum(parts.values()) in depths else []


def _end_of_loop(values: dict[str, Any]) -> int:
    """Behind which layer the first loop of a small model ends."""
    begin, block = values.get("loop_layer_index_start") or 0, values.get("n_layers_per_attn_res_block") or 1
    return min(values["loop_layer_index_end"], begin + block)


def _depth(values: dict[str, Any]) -> tuple[int, int]:
    """The number of layers, and how many of the first of them show every kind of layer."""
    depths = [v for name, v in values.items() if _LAYERS.search(name) and isinstance(v, int) and v > 0]
    if not depths:
        return 0, 2
    depth = max(depths)
    lists = {name: list(v) for name, v in values.items() if isinstance(v, (list, tuple)) and v}
    indices = [v for name, v in lists.items() if _are_indices(name, v, depth)]
    columns = [v for name, v in lists.items() if len(v) == depth and not _are_indices(name, v, depth)]
    special = values.get("per_layer_config") or {}
    kinds = [
        (*(str(c[i]) for c in columns), *(i in v for v in indices), str(special.get(str(i), special.get(f"{i:02}"))))
        for i in range(depth)
    ]
    needed = 1 + max(kinds.index(kind) for kind in set(kinds))
    for name, value in lists.items():
        if isinstance(value[0], str) and "type" in name and len(value) < depth:
            needed = max(needed, len(value))  # a pattern that is repeated
    for name, value in values.items():
        if type(value) is int and 1 <= value <= 16:
            if _PERIOD.search(name):
                needed = max(needed, value)
            elif _FIRST.search(name):
                needed = max(needed, value + 1)
    for _, chosen in _read_layers(values, depth):
        needed = max(needed, len(chosen) + 1)
    if values.get("loop_layer_index_end"):
        needed = max(needed, _end_of_loop(values) + 1)
    if sections := _sections(values):  # of pairs, as Dory counts attention and what is behind it
        needed = -(-needed // (2 * len(sections))) * 2 * len(sections)
    if values.get("num_kv_shared_layers"):
        needed *= 2  # the layers that share come last, and each kind needs one before it to share from
    return depth, min(depth, max(2, needed))


def _fit_rotation(values: dict[str, Any], config: dict[str, Any]) -> None:
    """Gives lists in the rotary parameters, which hold a number for each pair of dimensions, their new lengths."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    for part in parts:
        dim = values.get("qk_rope_head_dim") or values.get("head_dim") or HIDDEN // HEADS
        dim = int(dim * part.get("partial_rotary_factor", values.get("partial_rotary_factor") or 1.0))
        for name in ("short_factor", "long_factor"):
            if isinstance(part.get(name), list):
                part[name] = part[name][: dim // 2]
        section = part.get("mrope_section")
        if isinstance(section, list):
            share = dim // 2 // len(section)
            part["mrope_section"] = [dim // 2 - share * (len(section) - 1)] + [share] * (len(section) - 1)

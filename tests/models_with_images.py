"""Small models of random weights that continue text with images in it, one of each family."""

import torch
import transformers
from common import device

IMAGE = 98  # the token that stands for a part of an image
TEXT = dict(
    vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
VISION = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
)
TOKENS = dict(image_token_id=IMAGE, video_token_id=97, vision_start_token_id=96, vision_end_token_id=95)
ROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
# The class, the kinds of its parts, how many tokens an image is, and what else its config says.
MODELS = {
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text", "siglip_vision_model", 4,
               dict(mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=97, eoi_token_index=96)),
    "llava": ("LlavaForConditionalGeneration", "llama", "clip_vision_model", 16, dict(image_token_index=IMAGE)),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral", "pixtral", 4,
                 dict(image_token_index=IMAGE, spatial_merge_size=2)),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", "qwen2_5_vl_vision", 4,
                   TOKENS),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "qwen3_vl_text", "qwen3_vl_vision", 4, TOKENS),
    "glm4v": ("Glm4vForConditionalGeneration", "glm4v_text", "glm4v_vision", 4,
              dict(image_token_id=IMAGE, video_token_id=97, image_start_token_id=96, image_end_token_id=95,
                   video_start_token_id=94, video_end_token_id=93)),
    "internvl": ("InternVLForConditionalGeneration", "qwen2", "internvl_vision", 4, dict(image_token_id=IMAGE)),
    "voxtral": ("VoxtralForConditionalGeneration", "llama", "voxtral_encoder", 8,
                dict(audio_token_id=IMAGE, hidden_size=64)),
}  # fmt: skip
# Enough where a test takes seconds: masks of its own, none, positions in three planes and features of several layers,
# and sounds.
FEW = ("gemma3", "llava", "qwen3_vl", "voxtral")
PACKED = ("qwen2_5_vl", "qwen3_vl", "glm4v")  # images of any sizes, patch behind patch
PARTS = {  # of those whose parts have other sizes
    "qwen2_5_vl_text": dict(rope_parameters=ROPE),
    "qwen3_vl_text": dict(rope_parameters=ROPE),
    "glm4v_text": dict(rope_parameters=ROPE | dict(partial_rotary_factor=1.0)),
    "qwen2_5_vl_vision": dict(depth=2, hidden_size=64, num_heads=4, intermediate_size=96, out_hidden_size=64),
    "qwen3_vl_vision": dict(
        depth=2, hidden_size=64, num_heads=4, intermediate_size=96, out_hidden_size=64, patch_size=14,
        num_position_embeddings=16, deepstack_visual_indexes=[0, 1],
    ),
    "glm4v_vision": dict(
        depth=2, hidden_size=64, num_heads=4, intermediate_size=96, out_hidden_size=64, image_size=56
    ),
    "internvl_vision": dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=[32, 32],
        patch_size=[8, 8],
    ),
    "voxtral_encoder": dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256, num_mel_bins=16,
        max_source_positions=32,
    ),
}  # fmt: skip


def config_of(name):
    kind, text, vision, _, others = MODELS[name]
    media = "audio_config" if vision == "voxtral_encoder" else "vision_config"
    parts = {
        "text_config": TEXT | {"model_type": text} | PARTS.get(text, {}),
        media: PARTS.get(vision, VISION) | {"model_type": vision},
    }
    return getattr(transformers, kind).config_class(**parts, **others)


def make(name):
    torch.manual_seed(0)
    model = getattr(transformers, MODELS[name][0])(config_of(name)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(device())


def inputs_of(name, model, text=7, seed=1):
    """So many tokens of text with an image in it, and as many others with padding before them."""
    tokens, generator = MODELS[name][3], torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 90, (2, tokens + text), generator=generator)
    ids[:, 4 : 4 + tokens] = IMAGE
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    pixels = torch.randn(2, 3, 32, 32, generator=generator)
    if name in PACKED:  # 4x4 patches of an image, two pictures of 14x14 pixels each, joined by fours
        pixels = torch.randn(2 * 16, 3 * 2 * 14 * 14, generator=generator)
    inputs = dict(input_ids=ids, attention_mask=mask, pixel_values=pixels)
    if name == "voxtral":
        del inputs["pixel_values"]
        inputs["input_features"] = torch.randn(2, 16, 64, generator=generator)
    if name == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).long()
    if name == "mistral3":
        inputs["image_sizes"] = torch.tensor([[32, 32], [32, 32]])
    if name in PACKED:
        ids[:, 3], ids[:, 4 + tokens] = 96, 95
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4], [1, 4, 4]])
        inputs["mm_token_type_ids"] = (ids == IMAGE).long()
    return {n: value.to(model.device) for n, value in inputs.items()}

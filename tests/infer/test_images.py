"""``tilegym infer --image``: models that continue text with images in it."""

import json

import pytest
import torch
import transformers
from common import some
from models_with_images import FEW
from models_with_images import MODELS
from models_with_images import config_of
from typer.testing import CliRunner

from tilegym.bench import images
from tilegym.bench import job
from tilegym.bench import models
from tilegym.errors import ModelError
from tilegym_command import build_app

PIL = pytest.importorskip("PIL.Image")
NAMES = [name for name in MODELS if name != "voxtral"]
TINY = "examples/models/tiny-llama"


@pytest.fixture
def config_file(tmp_path):
    def write(name):
        path = tmp_path / f"{name}.json"
        config_of(name).to_json_file(path)
        return str(path)

    return write


def options(model_id, *image, **others):
    sizes = dict(output_length=4, num_runs=1, warmup_runs=1, batch_size=2, precision="float32", input_length=5)
    sizes["random_weights"] = True
    return job.Options(
        model_id=model_id, use_tilegym=True, use_cutile=True, use_attn=True, compare=True,
        image=image, **sizes | others,
    )  # fmt: skip


@pytest.mark.parametrize("name", some(NAMES, *FEW))
def test_patched_model_is_as_exact_behind_images(name, config_file):
    result = job.run_job(options(config_file(name), "32x32", "56x28"))
    assert result.comparison.passed and result.comparison.unpatched_max_error < 1e-6
    assert {entry.compute for entry in result.patches.patched} >= {"attn", "rms_norm"}
    assert result.summary()["images"] == ["32x32", "56x28"]
    media = result.batches[0].media
    assert media["pixel_values"].count_nonzero() and len(media["pixel_values"]) % 2 == 0
    alone = result.batches[0].row(1)
    assert all(torch.equal(value, media[n][len(media[n]) // 2 :]) for n, value in alone.media.items())


def test_images_count(config_file):
    """Other images are other logits: nothing is compared that has not been read."""
    loaded = models.load(config_file("qwen2_5_vl"), torch.float32, torch.device("cpu"), True, images=True)
    logits = []
    for sizes in (["28x28"], ["56x28"], ["28x28", "28x28"]):
        batch = images.make_batches(["abc"], tuple(sizes), loaded, None, None)[0]
        assert (batch.input_ids == loaded.model.config.image_token_id).sum() == len(sizes) * int(sizes[0][:2]) // 28
        with torch.no_grad():
            logits.append(loaded.model(batch.input_ids, **batch.media).logits[:, -1])
    assert not torch.allclose(logits[0], logits[1]) and not torch.allclose(logits[1], logits[2])


@pytest.fixture
def folder(tmp_path):
    """A small LLaVA with its tokenizer and processor, as from the Hub."""
    clip = pytest.importorskip("transformers.models.clip.image_processing_pil_clip")
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    sizes = dict(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = transformers.LlavaProcessor(
        image_processor=clip.CLIPImageProcessorPil(**sizes), tokenizer=tokenizer, patch_size=8, image_token="<image>",
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip
    config = config_of("llava")
    config.image_token_index = config.image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    config.text_config.vocab_size, config.text_config.max_position_embeddings = len(tokenizer), 256
    transformers.LlavaForConditionalGeneration(config).save_pretrained(tmp_path / "llava")
    processor.save_pretrained(tmp_path / "llava")
    PIL.fromarray(torch.arange(40 * 60 * 3).reshape(40, 60, 3).to(torch.uint8).numpy()).save(tmp_path / "photo.png")
    return tmp_path


TEMPLATE = (
    "{{ bos_token }}{% for turn in messages %}{% for part in turn.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["plain", "chat"])
def test_files_by_the_processor_of_the_model(folder, template):
    """In a padded batch."""
    if template:
        (folder / "llava/chat_template.jinja").write_text(template)
    (folder / "texts.txt").write_text("A cat\nThe capital of France is a city\n")
    result = job.run_job(
        options(
            str(folder / "llava"), str(folder / "photo.png"), "64x48", sentence_file=folder / "texts.txt",
            input_length=None, random_weights=False,
        )
    )  # fmt: skip
    batch = result.batches[0]
    assert result.comparison.passed
    assert batch.media["pixel_values"].shape == (4, 3, 32, 32)
    assert (batch.attention_mask == 0).any(), "no row was padded"
    first, bos = batch.attention_mask[0].argmax(), 0
    assert batch.input_ids[0, first] == bos and batch.input_ids[0, first + 1] != bos
    assert result.outputs[1]["prompt"].strip() == "The capital of France is a city"


def refusal(folder, *flags):
    result = CliRunner().invoke(build_app("infer"), ["infer", "--output_length", "2", *flags])
    assert result.exit_code == 2 and "Traceback" not in result.output
    return result.output


def test_images_that_cannot_be_read(folder, config_file):
    llava, other = str(folder / "llava"), config_file("llava")
    (folder / "no.png").write_text("no picture")
    assert "there is no such file; give a picture, or a size" in refusal(folder, "--model_id", llava, "--image", "/no")
    assert "there is no such file" in refusal(folder, "--model_id", llava, "--image", "0x4")
    assert "is no picture" in refusal(folder, "--model_id", llava, "--image", str(folder / "no.png"))
    both = "--image", "3x3", "--input_length", "4"
    assert "--input_length does not go with --image" in refusal(folder, "--model_id", llava, *both)
    assert "reads no images: leave out --image" in refusal(folder, "--model_id", TINY, "--image", "3x3")
    file = "--random_weights", "--image", str(folder / "photo.png")
    assert "has no processor to read" in refusal(folder, "--model_id", other, *file)


def test_model_whose_images_are_not_like_others(tmp_path):
    """LLaVA-NeXT cuts them in pieces."""
    config = config_of("llava").to_dict() | {"model_type": "llava_next", "architectures": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="does not read images as others do .*: give a model with its processor"):
        job.run_job(options(str(tmp_path / "config.json"), "32x32"))

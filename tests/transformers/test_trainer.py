"""Hugging Face's Trainer and accelerate, where they are installed: the same training, and the model whole behind it."""

from contextlib import nullcontext

import pytest
import torch
import transformers
from late_loss import FUSED
from late_loss import WHOLE
from late_loss import count_whole
from late_loss import losses_of
from tiny_models import assert_close
from tiny_models import make_model
from tiny_models import observed
from tiny_models import tokens
from torch import nn
from training_graphs import count_replays

from tilegym.transformers import monkey_patch
from tilegym.transformers.training_graph import graph_training

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def state():
    """accelerate's, of the process, as it was before."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


class Texts(torch.utils.data.Dataset):
    """Of different lengths, so that batches are padded."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return {"input_ids": tokens(1, 5 + i, seed=i)[0].cpu()}


def collate(texts):
    rows = [text["input_ids"] for text in texts]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}


def trainer(model, folder, **options):
    options = {"max_steps": 3, "learning_rate": 1e-2, "optim": "sgd", "save_strategy": "no", **options}
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True, **options,
    )  # fmt: skip
    return transformers.Trainer(model, arguments, train_dataset=Texts(), eval_dataset=Texts(), data_collator=collate)


def trained(model, folder, **options):
    run = trainer(model, folder, **options)
    run.train()
    return [torch.tensor(log["loss"]) for log in run.state.log_history if "loss" in log], model.state_dict(), run


def assert_same_training(got, expected, exact=True):
    for a, b in zip(got[0], expected[0], strict=True):
        assert_close(a, b) if exact else torch.testing.assert_close(a, b, rtol=2e-2, atol=0)
    assert got[1].keys() == expected[1].keys()
    for name, weight in expected[1].items():
        assert_close(got[1][name], weight) if exact else torch.testing.assert_close(
            got[1][name], weight, rtol=0, atol=2e-2 * weight.abs().max().item()
        )


@pytest.mark.parametrize("options, op", [
    (dict(), FUSED),
    (dict(gradient_accumulation_steps=2), FUSED),
    (dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}), FUSED),
    (dict(bf16=True), FUSED),
    (dict(label_smoothing_factor=0.1), None),  # the Trainer's own, of logits
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_training(options, op, tmp_path, monkeypatch):
    computed = count_whole(monkeypatch)
    expected = trained(make_model("llama"), tmp_path / "plain", **options)
    model = make_model("llama")
    with monkey_patch.apply(model, use_cutile=False), observed() as calls:
        got = trained(model, tmp_path / "patched", **options)
        assert losses_of(calls) == {op} - {None} and not computed
    assert_same_training(got, expected, exact="bf16" not in options)
    # Everything is as it was, though what accelerate has put around the forward is there.
    with observed() as calls:
        ids = tokens(1, 6)
        assert type(model(ids, labels=ids).logits) is torch.Tensor and not calls


class Chunks(Texts):
    """All of a length, as a language model is pretrained on."""

    def __getitem__(self, i):
        return {"input_ids": tokens(1, 8, seed=i)[0].cpu()}


@pytest.mark.parametrize("options", [dict(), dict(gradient_accumulation_steps=2), dict(bf16=True)], ids=str)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_training_by_graphs(options, tmp_path, monkeypatch):
    replays, runs = count_replays(monkeypatch), []
    for graphs in (False, True):
        model = make_model("llama")
        with monkey_patch.apply(model, use_cutile=False), graph_training(model) if graphs else nullcontext():
            run = trainer(model, tmp_path / str(graphs), max_steps=4, **options)
            run.train_dataset = Chunks()
            run.train()
            losses = [torch.tensor(log["loss"]) for log in run.state.log_history if "loss" in log]
            runs.append((losses, model.state_dict()))
    assert replays == [4 * options.get("gradient_accumulation_steps", 1) - 1]
    assert_same_training(*reversed(runs), exact="bf16" not in options)


def test_predictions(tmp_path):
    model = make_model("llama")
    expected = trainer(model, tmp_path).predict(Texts())
    with monkey_patch.apply(model, use_cutile=False):
        got = trainer(model, tmp_path).predict(Texts())
    real = torch.from_numpy(expected.label_ids) != -100
    assert_close(torch.from_numpy(got.predictions)[real], torch.from_numpy(expected.predictions)[real])
    assert_close(torch.tensor(got.metrics["test_loss"]), torch.tensor(expected.metrics["test_loss"]))


def test_a_checkpoint_goes_on_with_and_without_the_patch(tmp_path):
    options = dict(max_steps=4, save_strategy="steps", save_steps=2, optim="adamw_torch")
    expected = trained(make_model("llama"), tmp_path / "plain", **options)
    model = make_model("llama")
    with monkey_patch.apply(model, use_cutile=False):
        trained(model, tmp_path / "patched", **options)
        run = trainer(model, tmp_path / "more", **options)
        run.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2"))
    other = make_model("llama", seed=1)
    trainer(other, tmp_path / "other", **options).train(
        resume_from_checkpoint=str(tmp_path / "patched" / "checkpoint-2")
    )
    for weights in (model.state_dict(), other.state_dict()):
        assert weights.keys() == expected[1].keys()
        for name, weight in expected[1].items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-4)


def test_offloaded_weights():
    model, ids = make_model("llama"), tokens(2, 7)
    expected = model(ids, labels=ids)
    report = monkey_patch.apply(model, use_cutile=False)
    accelerate.cpu_offload(model, execution_device=ids.device)
    with observed() as calls, torch.no_grad():
        got = model(ids, labels=ids)
    assert losses_of(calls) == {WHOLE} and {"rms_norm", "swiglu", "fmha"} <= {op for op, _ in calls}
    assert_close(got.loss, expected.loss.detach())
    assert_close(got.logits, expected.logits.detach())
    report.revert()
    with observed() as calls, torch.no_grad():
        assert_close(model(ids, labels=ids).loss, expected.loss.detach())
    assert not calls


def test_unwrapped_from_mixed_precision():
    model, ids = make_model("llama").train(), tokens(2, 7)
    expected = model(ids, labels=ids).loss
    with monkey_patch.apply(model, use_cutile=False):
        accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=ids.device.type == "cpu")
        prepared = accelerator.prepare(model)
        with observed() as calls:
            assert prepared(ids, labels=ids).logits.dtype is torch.float32
        assert losses_of(calls) == {FUSED}
        accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        assert_close(model(ids, labels=ids).loss, expected)
    assert "forward" not in vars(model)

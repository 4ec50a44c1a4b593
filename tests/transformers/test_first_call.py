"""A patched model's first call collects what it will launch, to be compiled side by side, and leaves nothing behind."""

import copy
import io

import pytest
import torch
from common import HAS_GPU
from common import device
from common import some
from tiny_models import make_model
from tiny_models import tokens
from transformers import BertConfig
from transformers import BertForMaskedLM
from transformers import ResNetConfig
from transformers import ResNetForImageClassification

import tilegym
from tilegym import interpreter
from tilegym.backend.cutile import compile_ahead
from tilegym.transformers import first_call
from tilegym.transformers import monkey_patch


@pytest.fixture
def collected(monkeypatch) -> list[set]:
    """For every run ahead the kernels, with signatures, that it would launch; on this device, whatever it is."""
    runs: list[set] = []

    def collect(run, device):
        runs.append({(kernel, repr(signature)) for kernel, signature in compile_ahead.collect(run)})

    monkeypatch.setattr(first_call, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(compile_ahead, "compile_ahead", collect)
    return runs


def patched(model, collected):
    """Without what ``apply`` compiles ahead for its own trial."""
    patches = tilegym.apply(model)
    collected.clear()
    return patches


def bert(dropout: float = 0.0):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(**sizes, vocab_size=99, hidden_dropout_prob=dropout, attention_probs_dropout_prob=0.0)
    return BertForMaskedLM(config).eval().to(device())


def resnet():
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3}
    return ResNetForImageClassification(ResNetConfig(**sizes)).to(device())


def step(model, ids):
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
@pytest.mark.parametrize("family", some(["llama", "gemma3", "qwen3_moe"], "llama"))
def test_a_training_step_launches_what_was_collected(family, collected, monkeypatch):
    launched, real = set(), interpreter.launch

    def launch(grid, kernel, args):
        launched.add((kernel, repr(compile_ahead.signature_of(kernel, args, -1))))
        real(grid, kernel, args)

    model = make_model(family).train()
    patched(model, collected)
    monkeypatch.setattr(interpreter, "launch", launch)
    step(model, tokens(2, 8))
    assert len(collected) == 1
    assert len(launched) > 8 and launched <= collected[0]
    step(model, tokens(2, 8))
    assert len(collected) == 1, "the first call alone"


def test_calls_with_and_without_gradients_are_collected_once_each(collected):
    model, ids = bert(), tokens(1, 6)
    patched(model, collected)
    for _ in range(2):
        with torch.no_grad():
            model(ids)
        model(ids, labels=ids)
    without, with_gradients = ({kernel._pyfunc.__name__ for kernel, _ in run} for run in collected)
    assert without < with_gradients


def test_compiled_layers_are_compiled_nonetheless(collected):
    """What torch.compile meets in the run ahead, it would not compile any more."""
    model, graphs, ids = make_model("llama").train(), [], tokens(2, 8)
    patched(model, collected)

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(backend=backend)
    step(model, ids)
    assert len(collected) == 1 and collected[0]
    assert len(graphs) == 1, "which all layers share"
    assert "rms_norm_forward" in graphs[0].print_readable(False)


def test_nothing_is_left_behind(collected):
    """Dropout's random numbers, gradients, buffers and results are as without the run ahead."""
    ids, results = tokens(1, 6), []
    for ahead in (True, False):
        model = bert(dropout=0.3).train()
        patched(model, collected)
        if not ahead:
            first_call.take_out(model)
        torch.manual_seed(5)
        loss = model(ids, labels=ids).loss
        assert all(p.grad is None for p in model.parameters())
        loss.backward()
        results.append([loss, torch.rand(3), *(p.grad for p in model.parameters())])
        assert len(collected) == ahead
    for with_run, without in zip(*results, strict=True):
        torch.testing.assert_close(with_run, without)


def test_running_statistics_count_a_call_once(collected):
    images, buffers = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)).to(device()), []
    for ahead in (True, False):
        model = resnet().train()
        patched(model, collected)
        if not ahead:
            first_call.take_out(model)
        model(images)
        assert len(collected) == ahead
        buffers.append([b.clone() for b in model.buffers()])
    torch.testing.assert_close(*buffers)


def test_calls_with_a_cache_run_once(collected):
    model = make_model("llama").eval()
    patched(model, collected)
    model.generate(tokens(1, 5), max_new_tokens=2, do_sample=False)
    assert collected == []


def test_a_model_with_hooks_is_run_once(collected):
    model, calls = bert(), []
    patched(model, collected)
    model.bert.encoder.layer[0].register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        model(tokens(1, 6))
    assert collected == [] and calls == [1]


def test_a_call_that_fails_says_what_is_wrong(collected):
    model = bert()
    patched(model, collected)
    with pytest.raises(ValueError, match="input_ids"):
        model(tokens(1, 4), inputs_embeds=torch.zeros(1, 4, 32, device=device()))
    assert len(collected) == 1
    assert not first_call.recording.is_replaced()


def test_copies_bring_it_along_and_reverting_takes_it_out(collected):
    model = bert()
    patches = patched(model, collected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        collected.clear()
        with torch.no_grad():
            other(tokens(1, 6))
        assert len(collected) == 1
        tilegym.revert(other)
        assert not other._forward_pre_hooks
    assert len(model._forward_pre_hooks) == 1
    patches.revert()
    assert not model._forward_pre_hooks and not model._forward_pre_hooks_with_kwargs


def test_patching_twice_puts_it_once(collected):
    model = make_model("llama")
    with monkey_patch.apply(model, rope=False):
        monkey_patch.apply(model)
        assert len(model._forward_pre_hooks) == 1


def test_there_is_none_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with tilegym.apply(bert(), use_cutile=True) as patches:
        assert not patches._model._forward_pre_hooks

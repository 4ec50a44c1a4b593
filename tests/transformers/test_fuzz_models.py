"""The fuzzer of models, ``python tests/fuzz --models``: some cases, and what it has to find out."""

import random

import pytest
import torch
from common import device
from fuzz import model_running
from fuzz.model_calls import CALLS
from fuzz.model_calls import IGNORED
from fuzz.model_calls import Prompt
from fuzz.model_running import Trial
from fuzz.model_running import run_model
from fuzz.models import FAMILIES
from fuzz.models import drawn_model
from tiny_models import VOCAB
from tiny_models import make_model

from tilegym.backend import dispatcher

pytestmark = pytest.mark.filterwarnings("ignore")
KERNELS = 7  # a seed whose llama runs on cuTile kernels: forward passes and gradients


@pytest.mark.parametrize(
    "family, seed", [("llama", KERNELS), ("gemma3", 2), ("gemma3", 9), ("qwen3_next", 2), ("olmo", 3), ("lfm2", 1)]
)
def test_case(family, seed):
    outcome = run_model(family, seed, device())
    assert outcome.status == "ok", outcome.text


@pytest.mark.parametrize("family, seed", [("llama", KERNELS), ("qwen3_moe", 6)])
def test_case_under_hooks(family, seed, monkeypatch):
    """Of a model that accelerate moves inputs for: before it is patched, and then."""
    spread, hooked = model_running.spread, []
    monkeypatch.setattr(model_running, "spread", lambda *args: hooked.append(spread(*args)) or hooked[-1])
    outcome = run_model(family, seed, device(), over=max(1, torch.cuda.device_count()))
    assert outcome.status == "ok", outcome.text
    assert len(hooked) == 2 and all(hasattr(model.get_input_embeddings(), "_hf_hook") for model in hooked)


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_taken(name):
    """By models as they are: what transformers refuses is not compared. Each way to generate is drawn by some seed."""
    torch.manual_seed(0)
    prompt = Prompt(torch.randint(2, VOCAB, (2, 7), device=device()), None, None)
    model = make_model("llama")
    for seed in range(12 if name == "generate" else 2):
        assert Trial(name, prompt, seed, device(), False).call(model)


def _change(monkeypatch, op, function):
    implementations = dispatcher._ops[op].impls
    for backend, real in list(implementations.items()):
        changed = lambda *args, real=real, **kwargs: function(real(*args, **kwargs))  # noqa: E731
        monkeypatch.setitem(implementations, backend, changed)


def test_wrong_numbers_are_found(monkeypatch):
    _change(monkeypatch, "rms_norm", lambda result: result * 1.001)
    outcome = run_model("llama", KERNELS, device())
    assert outcome.status == "FAIL" and " is off by " in outcome.text


def test_errors_are_found(monkeypatch):
    def refuse(result):
        raise RuntimeError("no more")

    real = model_running.tilegym.apply

    def apply(model, **options):
        real(model, **options)  # tries kernels that refuse
        _change(monkeypatch, "swiglu", refuse)

    monkeypatch.setattr(model_running.tilegym, "apply", apply)
    outcome = run_model("llama", KERNELS, device())
    assert outcome.status == "FAIL" and "only patched raises RuntimeError: no more" in outcome.text


def test_what_is_left_patched_is_found(monkeypatch):
    monkeypatch.setattr(model_running.tilegym, "revert", lambda model: None)
    outcome = run_model("llama", KERNELS, device())
    assert outcome.status == "FAIL" and outcome.text.startswith("reverted: ")


def test_labels_leave_out_padding():
    """And, where it is on the left, what would be predicted from it."""
    ids = torch.tensor([[0, 0, 5, 6], [3, 4, 5, 6]])
    left = Prompt(ids, (ids != 0).long(), "left")
    assert left.labels(False).tolist() == [[IGNORED, IGNORED, IGNORED, 6], [IGNORED, 4, 5, 6]]
    right = Prompt(ids.flip(1), (ids != 0).long().flip(1), "right")
    assert right.labels(True).tolist() == [[IGNORED, 5, IGNORED, IGNORED], [IGNORED, 5, 4, 3]]
    assert right.from_the_left().ids.tolist() == ids.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_all_sizes_run(family):
    """What cannot run as it is would not be compared."""
    for seed in range(8):
        model, text = drawn_model(random.Random(seed), family, device())
        with torch.no_grad():
            logits = model(torch.full((1, 3), 5, device=device())).logits
        assert logits.isfinite().all(), text

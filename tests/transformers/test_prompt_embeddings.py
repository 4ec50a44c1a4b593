"""Prompts with images and sounds in them: from the third that fits on, the part that reads the text is a graph."""

import collections

import pytest
import torch
from common import gpu
from common import some
from models_with_images import FEW
from models_with_images import MODELS
from models_with_images import inputs_of
from models_with_images import make
from test_decode_capture import OnDevice
from test_decode_capture import capturing  # noqa: F401

import tilegym
from tilegym.errors import FallbackWarning
from tilegym.transformers import decode_graph
from tilegym.transformers import prompt_graph

OPTIONS = dict(do_sample=False, max_new_tokens=6, min_new_tokens=6, pad_token_id=0)
LENGTHS = (7, 8, 9, 7, 11, 26, 23, 25)  # of the text


@pytest.fixture(autouse=True)
def on_every_device(monkeypatch):
    monkeypatch.setattr(prompt_graph, "BOUND_BY_HOST", 0.0)  # small models keep no GPU busy, but a test may be held up
    with decode_graph.eager_steps("cpu"):
        yield


def calls_of(name, model):
    """Prompts of several lengths, a padded batch and an unpadded prompt of each."""
    calls = []
    for seed, text in enumerate(LENGTHS):
        both = inputs_of(name, model, text, seed)
        calls += [both, {n: value[: len(value) // 2] for n, value in both.items()}]
    return calls


def rooms_of(model):
    """By whether there is padding, for how many tokens the text part has graphs."""
    return {form[:2] for form in decode_graph._sessions[model].embeddings.forms}


@pytest.mark.parametrize("name", some(MODELS, *FEW))
@pytest.mark.parametrize("padded", [False, True])
def test_same_tokens(name, padded):
    model = make(name)
    calls = calls_of(name, model)[0 if padded else 1 :: 2]
    expected = [model.generate(**given, **OPTIONS) for given in calls]
    with tilegym.apply(model, use_cutile=False):
        part = model.get_decoder()
        held = dict(vars(part))
        for given, tokens in zip(calls, expected, strict=True):
            assert torch.equal(model.generate(**given, **OPTIONS), tokens)
        rooms = collections.Counter(prompt_graph.room_for(MODELS[name][3] + n) for n in LENGTHS)
        # Masks that a model writes out have the padding in them.
        wanted = {(padded and name != "gemma3", room) for room, prompts in rooms.items() if prompts > 1}
        assert rooms_of(model) == wanted
        assert vars(part) == held


def test_what_a_graph_computes_otherwise_is_left_to_the_model():
    """With one warning; and prompts of text alone keep their graphs."""
    model = make("llava")
    calls = calls_of("llava", model)[1::2]
    words = [given["input_ids"].clamp(max=90) for given in calls]
    expected = [model.generate(**given, **OPTIONS) for given in calls]
    fill = prompt_graph.Prompt.fill

    def fill_wrongly(self, given):
        fill(self, given)
        if given.tokens.dim() == 3:
            self.tokens[:, 3:5] = 0

    with tilegym.apply(model, use_cutile=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_graph.Prompt, "fill", fill_wrongly)
        with pytest.warns(FallbackWarning, match="another's, off by") as warned:
            for ids, given, tokens in zip(words, calls, expected, strict=True):
                assert torch.equal(model.generate(**given, **OPTIONS), tokens)
                model.generate(ids, **OPTIONS)
        assert len([w for w in warned if "takes in prompts" in str(w.message)]) == 1
        assert not rooms_of(model) and decode_graph._sessions[model].prompts.forms


def test_only_the_sessions_own_calls_are_replayed():
    """Not those over another cache that are made meanwhile, as by another thread."""
    model, seen = make("llava"), []
    call = {n: value[:1] for n, value in inputs_of("llava", model).items()}
    with tilegym.apply(model, use_cutile=False), torch.no_grad():
        expected = model(**call).logits
        prefill = type(model)._prefill

        def prefill_beside(self, *args):
            seen.append(torch.equal(model(**call).logits, expected))
            return prefill(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(model), "_prefill", prefill_beside)
            for _ in range(3):
                model.generate(**call, **OPTIONS)
        assert rooms_of(model) and len(seen) >= 3 and all(seen)


def test_what_others_add_where_images_are_stays_there():
    """As another thread's call does, while a prompt's own is computed for all places at once."""
    model = make("qwen3_vl")
    with tilegym.apply(model, use_cutile=False), torch.no_grad():
        part, graphs = model.get_decoder(), decode_graph.Session(model, 1, 256, (3,)).embeddings
        hidden, places = torch.randn(1, 5, 64).to(model.device), torch.tensor([[0, 1, 1, 0, 0]]).bool().to(model.device)
        added = torch.randn(2, 64).to(model.device)
        expected, seen = part._deepstack_process(hidden, places, added), []

        def forward(**kwargs):
            seen.append(part._deepstack_process(hidden, places, added))
            return (part._deepstack_process(hidden, None, kwargs["deepstack_visual_embeds"][0]),)

        graphs._forward = forward
        given = prompt_graph.Given(hidden, None, None, {}, (hidden,))
        prompt = prompt_graph.Prompt(given, 5)
        prompt.fill(given)
        torch.testing.assert_close(graphs.call(model, prompt), 2 * hidden)
        assert torch.equal(seen[0], expected) and "_deepstack_process" not in vars(part)


def test_a_decoder_that_is_asked_for_more_is_left_to_the_model():
    """And graphs of other calls stay."""
    model, asked = make("llava"), []
    call = {n: value[:1] for n, value in inputs_of("llava", model).items()}
    prefill = type(model)._prefill

    def prefill_for_more(self, ids, config, kwargs, *args):
        return prefill(self, ids, config, kwargs | {"output_hidden_states": True} if asked else kwargs, *args)

    expected = model.generate(**call, **OPTIONS)
    with tilegym.apply(model, use_cutile=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "_prefill", prefill_for_more)
        for more in (True, False, False, False, True, False):  # the first leaves hooks of transformers behind
            asked[:] = [more] if more else []
            assert torch.equal(model.generate(**call, **OPTIONS), expected)
        assert len(decode_graph._sessions[model].embeddings.forms) == 1


@pytest.mark.parametrize("name", some(["llava", "gemma3", "qwen2_5_vl", "qwen3_vl"], "gemma3", "qwen3_vl"))
def test_a_captured_prompt_stays_on_the_device(name, capturing):  # noqa: F811
    model = make(name)
    with tilegym.apply(model, use_cutile=False), torch.no_grad():
        planes = (3,) if name in ("qwen2_5_vl", "qwen3_vl") else ()
        session = decode_graph.Session(model.to("meta"), 2, 256, planes)
        hidden = torch.zeros(2, 11, 64, device="meta")
        positions = torch.zeros(*planes, 2, 11, dtype=torch.int64, device="meta")
        mask = torch.zeros(2, 1, 11, 256, dtype=torch.bool, device="meta")
        masks = {"full_attention": mask, "sliding_attention": mask} if name == "gemma3" else {}
        graphs = session.embeddings
        graphs._forward = model.get_decoder().forward
        prompt = prompt_graph.Prompt(
            prompt_graph.Given(hidden, None, positions, masks, (hidden,) * 2 if name == "qwen3_vl" else ()), 16
        )
        capturing()
        graphs._compute(model, prompt)  # the cache gets its memory from a prompt before
        with OnDevice() as mode:
            assert graphs._compute(model, prompt).shape == (2, 16, 64)
        assert mode.ran


@gpu
@pytest.mark.parametrize("name", MODELS)
def test_replays(name):
    """Of cuTile's kernels; test_same_tokens sees to PyTorch's there."""
    model = make(name)
    calls = calls_of(name, model)[:8]
    expected = [model.generate(**given, **OPTIONS) for given in calls]
    with tilegym.apply(model, use_cutile=True):
        for first in (0, 1):  # another size of batches begins a session anew
            for given, tokens in list(zip(calls, expected, strict=True))[first::2]:
                assert torch.equal(model.generate(**given, **OPTIONS), tokens)
            graphs = decode_graph._sessions[model].embeddings.forms.values()
            assert graphs and all(prompt.graph for prompt in graphs)

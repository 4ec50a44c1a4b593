"""Prompts as graphs of models with linear attention, whose states what fills the room must not change."""

import contextlib
import functools

import pytest
import torch
from common import HAS_GPU
from common import gpu
from common import some
from family_parity import make
from test_decode_capture import OnDevice
from test_decode_capture import capturing  # noqa: F401
from test_decode_graph import generate
from test_prompt_graph import forms_of
from test_prompt_graph import on_every_device  # noqa: F401
from test_qwen3_5 import QWEN3_5
from test_qwen3_5 import QWEN3_5_MOE
from test_qwen3_5 import QWEN3_NEXT
from test_qwen3_5 import pytestmark  # noqa: F401
from tiny_models import padded
from tiny_models import tokens

from tilegym.errors import FallbackWarning
from tilegym.transformers import decode_graph
from tilegym.transformers import monkey_patch
from tilegym.transformers import prompt_graph
from tilegym.transformers.cache_name import CACHE
from tilegym.transformers.cache_name import cache_of

HYBRIDS = [QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT]
hybrids = pytest.mark.parametrize("family", HYBRIDS, ids=repr)
one_hybrid = pytest.mark.parametrize("family", some(HYBRIDS, QWEN3_NEXT), ids=repr)
LENGTHS = (16, 11, 9, 5, 2, 1, 21, 75, 70)  # 75 and 70 are more than a chunk of the delta rule


class Replayed:
    """What a replay of a prompt does: the work of the device, and none of Python's."""

    def __init__(self, model, prompts, prompt):
        self.model, self.prompts, self.prompt = model, prompts, prompt

    def replay(self):
        recurrent = self.prompts.cache.recurrent
        flags = [layer.has_previous_state for layer in recurrent]
        self.prompt.results = self.prompts._compute(self.model, self.prompt)
        for layer, flag in zip(recurrent, flags, strict=True):
            layer.has_previous_state = flag


@one_hybrid
def test_same_tokens(family):
    """Prompts of several lengths in turn, padded and not, by graphs from the third of a form on."""
    model = make(family)
    prompts = [(tokens(2, n, seed=n), None) for n in LENGTHS]
    prompts += [(*padded(lengths, "left", seed=sum(lengths)),) for lengths in ([5, 11], [3, 10], [13, 1], [6, 16])]
    expected = [generate(model, *prompt) for prompt in prompts]
    with monkey_patch.apply(model, use_cutile=False):
        for _ in range(2):
            for prompt, wanted in zip(prompts, expected, strict=True):
                assert torch.equal(generate(model, *prompt), wanted)
            prompts.reverse()
            expected.reverse()
        assert forms_of(model) == {(False, 16), (False, 32), (False, 80), (True, 16)}


@hybrids
@pytest.mark.parametrize("with_padding", [False, True])
def test_logits_and_states_are_those_of_the_models_own_prefill(family, with_padding):
    """Also behind prompts shorter than the convolution, and right behind longer ones."""
    # In fp32 sums of other chunks differ, by 5e-5 on a GPU. On a CPU, in fp64, no rounding hides a fault.
    model = make(family) if HAS_GPU else make(family).double()
    with monkey_patch.apply(model, use_cutile=False), torch.no_grad():
        session = decode_graph.session_for(model, 2, 256)
        for length in LENGTHS + LENGTHS[::-1]:
            ids, mask = tokens(2, length, seed=length), None
            positions = torch.arange(length, device=ids.device)[None]
            if with_padding:  # of tokens that would show
                mask = torch.ones_like(ids)
                mask[0, : length // 2] = 0
                positions = (mask.cumsum(1) - 1).clamp(min=0)
            inputs = dict(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)
            own = model(**inputs)
            session.cache.set_length(0)
            prefill = functools.partial(_prefill, model, inputs, session.cache)
            got = session.prompts.run(model, ids, mask, positions, prefill)
            kept = [layer for layer in cache_of(own).layers if hasattr(layer, "conv_states")]
            wanted = [state for layer in kept for state in (layer.conv_states[0], layer.recurrent_states[0])]
            for a, b in zip([got, *session.cache.states()], [own.logits[:, -1], *wanted], strict=True):
                rtol, atol = (1e-3, 2e-4) if HAS_GPU else (1e-9, 1e-11)
                torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
        assert set(session.prompts.forms) == {(with_padding, room) for room in (16, 32, 80)}


def _prefill(model, inputs, cache):
    return model(**inputs, **{CACHE: cache}).logits[:, -1]


@one_hybrid
def test_decoding_goes_on_from_replayed_states(family):
    """By steps that are captured only then."""
    model, prompts = make(family), [tokens(1, n, seed=n) for n in (9, 10, 11, 3)]
    expected = [generate(model, ids) for ids in prompts]
    with monkey_patch.apply(model, use_cutile=False):
        for ids in prompts[:2]:
            generate(model, ids)
        graphs = decode_graph._sessions[model].prompts
        for prompt in graphs.forms.values():
            prompt.graph = Replayed(model, graphs, prompt)
        for ids, wanted in zip(prompts, expected, strict=True):
            assert torch.equal(generate(model, ids), wanted)


def test_only_the_sessions_own_calls_are_moved():
    """Not those that another thread makes meanwhile; and nothing stays behind."""
    model, ids, seen = make(QWEN3_5), tokens(1, 9), []

    def hooks():
        return [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]

    with monkey_patch.apply(model, use_cutile=False), torch.no_grad():
        before, expected = hooks(), model(ids).logits
        compute = prompt_graph.PromptGraphs._compute

        def compute_beside(self, model, prompt):
            with prompt_graph.room_comes_first(self.linear, self.cache, prompt.last, 16):
                seen.append(torch.equal(model(ids).logits, expected))
            return compute(self, model, prompt)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prompt_graph.PromptGraphs, "_compute", compute_beside)
            for _ in range(3):
                generate(model, ids)
        assert seen and all(seen)
        assert hooks() == before


@pytest.mark.parametrize("looks", [True, False])
def test_states_that_take_in_the_room_are_found_out(looks, monkeypatch):
    """By a prompt of no tokens, and by the states behind the first that leaves room, even if the logits are right."""
    model, prompts = make(QWEN3_5), [tokens(1, n) for n in (16, 16, 12, 11)]
    expected = [generate(model, ids) for ids in prompts]
    monkeypatch.setattr(prompt_graph, "room_comes_first", lambda *_: contextlib.nullcontext())
    if not looks:
        monkeypatch.setattr(prompt_graph.PromptGraphs, "_check_that_room_leaves_no_trace", lambda *_: None)
    with monkey_patch.apply(model, use_cutile=False):
        with pytest.warns(FallbackWarning, match="take in what fills the room" if looks else "another's, off by"):
            assert all(torch.equal(generate(model, ids), e) for ids, e in zip(prompts, expected, strict=True))
        assert not forms_of(model)


def test_layers_that_make_something_of_zeros_have_no_graphs():
    model, prompts = make(QWEN3_5), [tokens(1, n) for n in (16, 16, 12)]
    convolution = model.model.layers[0].linear_attn.conv1d
    convolution.bias = torch.nn.Parameter(torch.ones_like(convolution.weight[:, 0, 0]))
    expected = [generate(model, ids) for ids in prompts]
    with monkey_patch.apply(model, use_cutile=False), pytest.warns(FallbackWarning, match="what fills the room"):
        assert all(torch.equal(generate(model, ids), e) for ids, e in zip(prompts, expected, strict=True))
        assert not forms_of(model)


@pytest.mark.filterwarnings("error::tilegym.errors.FallbackWarning")
def test_layers_of_other_names_have_no_graphs(monkeypatch):
    monkeypatch.setattr(prompt_graph, "linear_attentions", lambda model: [])
    model, prompts = make(QWEN3_5), [tokens(1, n) for n in (9, 9, 10)]
    expected = [generate(model, ids) for ids in prompts]
    with monkey_patch.apply(model, use_cutile=False):
        assert all(torch.equal(generate(model, ids), e) for ids, e in zip(prompts, expected, strict=True))
        assert not forms_of(model)


@pytest.mark.skipif(HAS_GPU, reason="on a GPU test_replays runs the kernels")
def test_cutile_leaves_no_trace_of_the_room(monkeypatch):
    monkeypatch.setenv("DISABLE_FALLBACK", "1")
    model, prompts = make(QWEN3_5), [tokens(1, n) for n in (5, 5, 3)]
    expected = [generate(model, ids, max_new_tokens=2) for ids in prompts]
    with monkey_patch.apply(model, use_cutile=True):
        for ids, wanted in zip(prompts, expected, strict=True):
            assert torch.equal(generate(model, ids, max_new_tokens=2), wanted)
        assert forms_of(model) == {(False, 16)}


@hybrids
@pytest.mark.parametrize("with_padding", [False, True])
def test_a_captured_prompt_stays_on_the_device(family, with_padding, capturing):  # noqa: F811
    model = make(family)
    with monkey_patch.apply(model, use_cutile=False), torch.no_grad():
        session = decode_graph.Session(model.to("meta"), 2, 256)
        ids = torch.zeros(2, 11, dtype=torch.int64, device="meta")
        prompt = prompt_graph.Prompt(prompt_graph.Given(ids, ids if with_padding else None, ids), 16)
        capturing()
        session.prompts._compute(model, prompt)  # the cache gets its memory from a prompt before
        with OnDevice() as mode:
            assert session.prompts._compute(model, prompt).shape == (2, model.config.vocab_size)
        assert mode.ran


@gpu
@hybrids
@pytest.mark.parametrize("backend", ["pytorch", "cutile"])
def test_replays(family, backend):
    """One graph serves other prompts, lengths and paddings, greedily and by chance, and weights loaded in place."""
    model = make(family)
    prompts = [(tokens(2, n, seed=n), None, {}) for n in LENGTHS]
    prompts += [(*padded(lengths, "left", seed=sum(lengths)), {}) for lengths in ([5, 11], [3, 10], [6, 16])]
    prompts += [(tokens(2, 12, seed=7), None, dict(repetition_penalty=1.5))]
    for scale in (1.0, 0.9):
        model.load_state_dict({name: scale * value for name, value in model.state_dict().items()})
        expected = [generate(model, ids, mask, **options) for ids, mask, options in prompts]
        with monkey_patch.apply(model, use_cutile=backend == "cutile"):
            for _ in range(2):
                for (ids, mask, options), wanted in zip(prompts, expected, strict=True):
                    assert torch.equal(generate(model, ids, mask, **options), wanted)
            assert forms_of(model) == {(False, 16), (False, 32), (False, 80), (True, 16)}

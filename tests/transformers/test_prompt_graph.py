"""Prompts as graphs; on a CPU the same buffers and calls, each prompt computed anew."""

import pytest
import torch
from common import gpu
from test_decode_capture import OnDevice
from test_decode_capture import capturing  # noqa: F401
from test_decode_capture import session_of
from test_decode_graph import generate
from tiny_models import FAMILIES
from tiny_models import few_families
from tiny_models import make_model
from tiny_models import padded
from tiny_models import tokens
from transformers import GPT2Config
from transformers import GPT2LMHeadModel
from transformers import LlamaForCausalLM

import tilegym
from tilegym.errors import FallbackWarning
from tilegym.transformers import decode_graph
from tilegym.transformers import monkey_patch
from tilegym.transformers import prompt_graph


@pytest.fixture(autouse=True)
def on_every_device(monkeypatch):
    monkeypatch.setattr(prompt_graph, "BOUND_BY_HOST", 0.0)  # small models keep no GPU busy, but a test may be held up
    with decode_graph.eager_steps("cpu"):
        yield


def forms_of(model):
    """The padded and plain rooms that there are graphs for."""
    return set(decode_graph._sessions[model].prompts.forms)


def test_room():
    assert [prompt_graph.room_for(n) for n in (1, 16, 17, 130, 256, 257, 512, 513, 4000, 4096, 4097)] == [
        16, 16, 32, 144, 256, 288, 512, 576, 4096, 4096, 4608,
    ]  # fmt: skip
    for n in range(1, 5000):
        assert 0 <= prompt_graph.room_for(n) - n < max(16, n / 8)


@few_families
def test_same_tokens(family):
    """The third prompt of a form and those behind it, shorter and longer, padded and not, of the caller's positions."""
    model = make_model(family)
    prompts = [(tokens(2, n, seed=n), None) for n in (11, 9, 16, 5, 21)]
    prompts += [(*padded(lengths, "left", seed=sum(lengths)),) for lengths in ([5, 11], [3, 10], [13, 1], [6, 16])]
    expected = [generate(model, *prompt) for prompt in prompts]
    with monkey_patch.apply(model, use_cutile=False):
        for _ in range(3):
            for prompt, wanted in zip(prompts, expected, strict=True):
                assert torch.equal(generate(model, *prompt), wanted)
        assert forms_of(model) == {(False, 16), (False, 32), (True, 16)}
    assert model not in decode_graph._sessions


def test_the_callers_positions_and_a_choice_by_chance():
    model = make_model("llama")
    calls = [
        (tokens(1, 11), {"position_ids": 9 * torch.arange(11, device=model.device)[None]}),
        (tokens(1, 12), {"do_sample": True, "top_k": 5}),
        (tokens(1, 13), {"repetition_penalty": 1.5}),
    ]
    expected = [generate(model, ids, **options) for ids, options in calls]
    with monkey_patch.apply(model, use_cutile=False):
        for _ in range(2):
            for (ids, options), wanted in zip(calls, expected, strict=True):
                assert torch.equal(generate(model, ids, **options), wanted)
        assert forms_of(model) == {(False, 16)}


def test_a_prompt_is_seen_twice_by_the_models_own_code():
    model, seen = make_model("llama"), []
    with monkey_patch.apply(model, use_cutile=False):
        prefill = type(model)._prefill

        def counted(self, ids, *args):
            seen.append(ids.shape[1])
            return prefill(self, ids, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(model), "_prefill", counted)
            for length in (9, 10, 11, 12, 17, 33):
                generate(model, tokens(1, length))
    assert seen == [9, 10, 17, 33]


@pytest.mark.parametrize("table", [48, 47])
def test_positions_end_where_a_table_of_them_ends(table):
    torch.manual_seed(0)
    ends = dict(bos_token_id=1, eos_token_id=None, pad_token_id=0)
    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=2, n_positions=table, **ends)
    model = GPT2LMHeadModel(config).eval().to(tokens(1, 1).device)
    prompts = [tokens(1, n) for n in (14, 13, 12, 35, 34, 33)]  # with room for 16 and 48
    expected = [generate(model, ids, max_new_tokens=4) for ids in prompts]
    with tilegym.apply(model):
        for ids, wanted in zip(prompts, expected, strict=True):
            assert torch.equal(generate(model, ids, max_new_tokens=4), wanted)
        assert forms_of(model) == ({(False, 16), (False, 48)} if table == 48 else {(False, 16)})


def test_what_a_graph_computes_otherwise_is_left_to_the_model():
    """And what cannot be run so; each with a warning, once."""
    model = make_model("llama")
    prompts = [tokens(1, n) for n in (9, 10, 11, 12)]
    expected = [generate(model, ids) for ids in prompts]

    fill = prompt_graph.Prompt.fill

    def fill_wrongly(self, *given):
        fill(self, *given)
        self.last.fill_(3)

    def refuse(self, model, prompt):
        raise TypeError("no such argument")

    mistakes = [
        ("another's, off by", prompt_graph.Prompt, "fill", fill_wrongly),
        ("no such argument", prompt_graph.PromptGraphs, "_compute", refuse),
    ]
    for message, owner, name, mistake in mistakes:
        with monkey_patch.apply(model, use_cutile=False), pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, mistake)
            with pytest.warns(FallbackWarning, match=message) as warned:
                assert [generate(model, ids).tolist() for ids in prompts] == [e.tolist() for e in expected]
            assert len([w for w in warned if "takes in prompts" in str(w.message)]) == 1
            assert not forms_of(model)


class KeepsNumbers(LlamaForCausalLM):
    """Takes the last tokens only by how many they are."""

    def forward(self, *args, logits_to_keep: int = 0, **kwargs):
        count = logits_to_keep if isinstance(logits_to_keep, int) else 1
        return super().forward(*args, logits_to_keep=count, **kwargs)


@pytest.mark.parametrize("first", [13, 16])
def test_a_prompt_that_leaves_room_is_compared(first):
    """Nothing fills the room of one that does not."""
    model = make_model("llama")
    model.__class__ = KeepsNumbers
    prompts = [tokens(1, n) for n in (first, first, 16, 12, 9)]
    expected = [generate(model, ids) for ids in prompts]
    with tilegym.apply(model, use_cutile=False), pytest.warns(FallbackWarning, match="another's"):
        assert all(torch.equal(generate(model, ids), e) for ids, e in zip(prompts, expected, strict=True))
        assert not forms_of(model)


def test_hooks_see_the_prompt_alone():
    model, seen = make_model("llama"), []
    hook = model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
    with monkey_patch.apply(model, use_cutile=False):
        for _ in range(3):
            generate(model, tokens(1, 9), max_new_tokens=1)
        assert seen == [9, 9, 9] and not forms_of(model)
        hook.remove()
        for _ in range(2):
            generate(model, tokens(1, 9))
        assert forms_of(model) == {(False, 16)}
        with torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(0)):
            del seen[:]
            generate(model, tokens(1, 9), max_new_tokens=1)
        assert seen


@pytest.mark.filterwarnings("error::tilegym.errors.FallbackWarning")
def test_a_model_in_training_has_none():
    model = make_model("llama", attention_dropout=0.5).train()
    with monkey_patch.apply(model, use_cutile=False):
        for _ in range(3):
            generate(model, tokens(1, 9))
        assert not forms_of(model)


def test_tokens_that_see_those_behind_them_are_left_to_transformers():
    model = make_model("gemma3", use_bidirectional_attention=True)
    prompts = [tokens(1, n) for n in (9, 9, 10)]
    expected = [generate(model, ids) for ids in prompts]
    with monkey_patch.apply(model, use_cutile=False) as report:
        assert "its tokens see those behind them" in [e.why for e in report.skipped if e.compute == "graph"]
        assert all(torch.equal(generate(model, ids), e) for ids, e in zip(prompts, expected, strict=True))


@pytest.mark.parametrize("limit", ["MOST_TOKENS", "MOST_GRAPHS"])
def test_limits(limit, monkeypatch):
    model = make_model("llama")
    monkeypatch.setattr(prompt_graph, limit, 47 if limit == "MOST_TOKENS" else 1)
    with monkey_patch.apply(model, use_cutile=False):
        for length in (9, 9, 9, 17, 17, 17):
            generate(model, tokens(2, length))
        assert forms_of(model) == {(False, 16)}


@few_families
@pytest.mark.parametrize("with_padding", [False, True])
def test_a_captured_prompt_stays_on_the_device(family, with_padding, capturing):  # noqa: F811
    model = make_model(family)
    with monkey_patch.apply(model, use_cutile=False), torch.no_grad():
        session, ran = session_of(model, 2), []
        session.cache.set_length(0)
        ids = torch.zeros(2, 11, dtype=torch.int64, device="meta")
        prompt = prompt_graph.Prompt(prompt_graph.Given(ids, ids if with_padding else None, ids), 16)
        for begin in (capturing,) if with_padding else (lambda: None, capturing):
            begin()
            with OnDevice() as mode:
                assert session.prompts._compute(model, prompt).shape == (2, model.config.vocab_size)
            ran.append(mode.ran)
    assert ran[0] == ran[-1] and ran[0]


@gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["pytorch", "cutile"])
def test_replays(family, backend):
    """One graph serves other prompts, lengths and paddings, and a reload of the weights in place."""
    model = make_model(family)
    prompts = [(*padded([5, 11, 8], "left"),), (tokens(3, 40), None), (tokens(3, 37), None), (tokens(3, 33), None)]
    prompts += [(*padded([16, 2, 1], "left", seed=1),), (*padded([3, 4, 12], "left", seed=2),)]
    for seed in (0, 1):
        model.load_state_dict(make_model(family, seed=seed).state_dict())
        expected = [generate(model, *prompt) for prompt in prompts]
        with monkey_patch.apply(model, use_cutile=backend == "cutile"):
            for _ in range(2):
                for prompt, wanted in zip(prompts, expected, strict=True):
                    assert torch.equal(generate(model, *prompt), wanted)
            if type(model)._can_compile_fullgraph:
                assert forms_of(model) == {(True, 16), (False, 48)}


@gpu
def test_a_prompt_that_keeps_the_gpu_busy_is_not_captured(monkeypatch):
    monkeypatch.setattr(prompt_graph, "BOUND_BY_HOST", 2.0)
    model = make_model("llama")
    with monkey_patch.apply(model, use_cutile=False):
        for _ in range(3):
            generate(model, tokens(1, 9))
        assert not forms_of(model)


@gpu
@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_a_graph_that_takes_longer_is_not_kept(seconds, monkeypatch):
    model, prompts = make_model("llama"), [tokens(2, n) for n in (9, 10, 11, 12)]
    expected = [generate(model, ids) for ids in prompts]
    monkeypatch.setattr(prompt_graph.PromptGraphs, "_seconds", lambda *_: seconds)
    with monkey_patch.apply(model, use_cutile=False):
        for ids, wanted in zip(prompts, expected, strict=True):
            assert torch.equal(generate(model, ids), wanted)
        assert len(forms_of(model)) == (seconds == 0.0)


@gpu
def test_what_cannot_be_captured():
    model, prompts = make_model("llama"), [tokens(2, n) for n in (9, 10, 11)]
    expected = [generate(model, ids) for ids in prompts]
    embed = model.model.embed_tokens
    table = embed.weight
    embed.forward = lambda ids: torch.nn.functional.embedding(ids, table * (1 if ids.sum().item() else 2))  # waits
    with monkey_patch.apply(model, use_cutile=False), pytest.warns(FallbackWarning, match="takes in prompts without"):
        for ids, wanted in zip(prompts, expected, strict=True):
            assert torch.equal(generate(model, ids), wanted)

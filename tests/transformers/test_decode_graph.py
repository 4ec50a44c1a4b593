"""generate with replayed steps; on a CPU the same loop and cache, each step run anew."""

import copy
import functools
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from common import gpu
from tiny_models import assert_close
from tiny_models import make_model
from tiny_models import observed
from tiny_models import padded
from tiny_models import tokens
from transformers import GenerationConfig
from transformers import LogitsProcessor
from transformers import LogitsProcessorList
from transformers import StoppingCriteria
from transformers import TextStreamer

from tilegym.transformers import decode_graph
from tilegym.transformers import monkey_patch
from tilegym.transformers.side_stream import LateFlag

FAMILIES = ["llama", "mistral", "qwen3"]


@pytest.fixture(autouse=True)
def on_every_device():
    with decode_graph.eager_steps("cpu"):
        yield


@pytest.fixture
def steps(monkeypatch):
    """The steps that sessions have made: whether anything was padded, and whether they chose the tokens."""
    made, step = [], decode_graph.Session.step
    monkeypatch.setattr(
        decode_graph.Session,
        "step",
        lambda self, model, *how: (made.append(how), step(self, model, *how))[1],
    )
    return made


def generate(model, ids, mask=None, **options):
    torch.manual_seed(0)
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, **{"do_sample": False, "max_new_tokens": 9, **options})


def one_by_one(model, ids, mask, **options):
    """What each row of ``ids`` [B, S] is continued with, alone."""
    return [generate(model, row[None], m[None], **options) for row, m in zip(ids, mask, strict=True)]


def logits_of_steps(model, ids, prompt):
    """The logits [1, S, V] of the tokens behind the first ``prompt`` of ``ids``, one by one on a DecodeCache."""
    cache = decode_graph.DecodeCache(model.config.num_hidden_layers, 32, ids.device)
    model(ids[:, :prompt], past_key_values=cache, use_cache=True)
    logits = []
    for n in range(prompt, ids.shape[1]):
        cache.set_length(n)
        position = torch.tensor([[n]], device=ids.device)
        logits.append(model(ids[:, n : n + 1], position_ids=position, past_key_values=cache, use_cache=True).logits)
    return torch.cat(logits, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens(family, steps):
    model = make_model(family)
    ids, mask = padded([5, 11, 8], "left")
    kinds = (
        {},
        {"do_sample": True, "top_k": 5, "temperature": 0.8},
        {"repetition_penalty": 1.4},
        {"num_return_sequences": 2, "do_sample": True},
        {"max_new_tokens": 1},
    )
    calls = [(rows, m, kind) for rows, m in ((ids, mask), (ids[1:2], None)) for kind in kinds]
    expected = [generate(model, rows, m, **kind) for rows, m, kind in calls]
    with monkey_patch.apply(model, use_cutile=False) as report:
        assert [e.module for e in report.patched if e.compute == "graph"] == [type(model).__name__]
        for (rows, m, kind), wanted in zip(calls, expected, strict=True):
            assert torch.equal(generate(model, rows, m, **kind), wanted), kind
    assert len(steps) == 2 * 4 * 8
    # Of each row of calls, the plain one.
    assert [steps.count(how) for how in itertools.product((True, False), repeat=2)] == [8, 24, 8, 24]
    assert torch.equal(generate(model, ids, mask), expected[0])
    assert len(steps) == 2 * 4 * 8


@pytest.mark.parametrize("lengths", [[5, 11], [11]])
def test_ends_where_all_sequences_have_ended(lengths, steps):
    model = make_model("llama")
    ids, mask = padded(lengths, "left")
    free = generate(model, ids, mask, max_new_tokens=30)[:, ids.shape[1] :]
    ends = [int(free[0, 3]), int(free[-1, 7])]  # whatever comes there ends a sequence
    options = {"max_new_tokens": 30, "eos_token_id": ends, "pad_token_id": 0}
    expected = generate(model, ids, mask, **options)
    assert expected.shape[1] < ids.shape[1] + 12
    with monkey_patch.apply(model, use_cutile=False):
        assert torch.equal(generate(model, ids, mask, **options), expected)
    assert len(steps) <= expected.shape[1] - ids.shape[1] + 1 and {choose for _, choose in steps} == {True}


def test_processors_and_criteria_of_the_caller(steps):
    class Ban(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.scatter(1, input_ids, -torch.inf)

    class Stop(StoppingCriteria):
        def __init__(self):
            self.seen = []

        def __call__(self, input_ids, scores, **kwargs):
            self.seen.append(input_ids)
            return torch.full(input_ids.shape[:1], input_ids.shape[1] >= 15, device=input_ids.device)

    model, ids = make_model("llama"), tokens(1, 11)

    def results():
        ban, stop, both = Ban(), Stop(), Stop()
        calls = [([ban], []), ([], [stop]), ([ban], [both])]
        found = [
            generate(model, ids, logits_processor=LogitsProcessorList(processors), stopping_criteria=criteria)
            for processors, criteria in calls
        ]
        generate(model, ids.flip(1))
        return found, stop.seen[:4] + both.seen[:4]  # they are asked once more here, which changes nothing

    expected, seen = results()
    assert [e.shape[1] for e in expected] == [20, 15, 15] and not torch.equal(expected[1], expected[2])
    with monkey_patch.apply(model, use_cutile=False):
        got, seen_now = results()
    assert all(map(torch.equal, got + seen_now, expected + seen))
    assert {choose for _, choose in steps} == {True, False}


def test_what_was_generated_stays_when_more_is():
    model, prompts = make_model("llama"), (tokens(1, 11), tokens(1, 7))
    expected = [generate(model, ids) for ids in prompts]
    with monkey_patch.apply(model, use_cutile=False):
        assert all(map(torch.equal, [generate(model, ids) for ids in prompts], expected))


def rotations(model, monkeypatch):
    """How many positions the rotary embedding has computed, call by call."""
    cls, counts = type(model.model.rotary_emb), []
    compute = cls.forward

    @functools.wraps(compute)
    def forward(self, x, position_ids):
        counts.append(position_ids.shape[1])
        return compute(self, x, position_ids)

    monkeypatch.setattr(cls, "forward", forward)
    return counts


def test_one_sequence_takes_rows_of_the_rotary_embedding(monkeypatch):
    """Its steps compute none; at positions of the caller's too, and those of one call are not those of the next."""
    model = make_model("llama")
    ids, mask = padded([5, 11], "left")
    # generate makes the positions of further tokens of a mask, or of those that it was given.
    calls = [
        (ids[1:], None, {}),
        (ids[:1], mask[:1], {}),
        (ids[1:], None, {"position_ids": 9 * torch.arange(11, device=ids.device)[None]}),
    ]
    expected = [generate(model, rows, m, **options) for rows, m, options in calls]
    assert not torch.equal(expected[0], expected[2])
    counts = rotations(model, monkeypatch)
    with monkey_patch.apply(model, use_cutile=False):
        for (rows, m, options), wanted in zip(calls, expected, strict=True):
            assert torch.equal(generate(model, rows, m, **options), wanted)
        del counts[:]
        generate(model, ids[1:], None)
        # The prompt with what fills a graph's room, if it is not replayed, and all that comes behind it.
        assert counts[-1] == 8 and set(counts[:-1]) <= {16}
        del counts[:]
        assert generate(model, ids, mask).shape == (2, 20)
        assert counts[0] == 11 and len(counts) > 3 and set(counts[1:]) == {1}
    assert "forward" not in vars(model.model.rotary_emb)


@pytest.mark.parametrize(
    "alone",
    [lambda positions: positions.shape[1] != 8, lambda positions: positions.max() < 15],
    ids=["by their number", "by the largest"],
)
def test_a_rotary_embedding_whose_rows_depend_on_each_other_computes_each(alone, monkeypatch):
    model, ids = make_model("llama"), tokens(1, 11)
    cls = type(model.model.rotary_emb)
    compute = cls.forward

    def forward(self, x, position_ids):
        return compute(self, x, position_ids * (1 if alone(position_ids) else 7))  # 8: all steps at once

    monkeypatch.setattr(cls, "forward", forward)
    expected = generate(model, ids)
    with monkey_patch.apply(model, use_cutile=False):
        assert torch.equal(generate(model, ids), expected)


ONE_SEQUENCE = {"streamer", "prompt_lookup_num_tokens", "generation_config"}


class Silent(TextStreamer):
    def __init__(self):
        self.seen = 0

    def put(self, value):
        self.seen += value.numel()

    def end(self):
        pass


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"return_dict_in_generate": True},
        {"cache_implementation": "static", "disable_compile": True},
        {"use_cache": False},
        {"streamer": Silent()},
        {"prompt_lookup_num_tokens": 2},
        {"generation_config": GenerationConfig(prompt_lookup_num_tokens=2)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_everything_else_is_left_to_transformers(options, steps):
    model, ids = make_model("llama"), tokens(1 if options.keys() & ONE_SEQUENCE else 2, 7)
    expected = generate(model, ids, **options)
    with monkey_patch.apply(model, use_cutile=False):
        got = generate(model, ids, **options)
    if not isinstance(got, torch.Tensor):
        got, expected = got.sequences, expected.sequences
    assert torch.equal(got, expected) and not steps


def test_a_cache_of_the_caller_is_filled(steps):
    from transformers import DynamicCache

    model, ids = make_model("llama"), tokens(1, 7)
    with monkey_patch.apply(model, use_cutile=False):
        cache = DynamicCache(config=model.config)
        generate(model, ids, past_key_values=cache)
    assert cache.get_seq_length() == 7 + 9 - 1 and not steps


def test_a_session_is_kept_until_something_changes():
    model = make_model("llama")
    with monkey_patch.apply(model, use_cutile=False):
        generate(model, tokens(2, 7))
        first = decode_graph._sessions[model]
        generate(model, tokens(2, 30))
        assert decode_graph._sessions[model] is first
        generate(model, tokens(1, 7))
        second = decode_graph._sessions[model]
        assert second is not first
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        generate(model, tokens(1, 7))
        third = decode_graph._sessions[model]
        assert third is not second
        model.config.attention_dropout += 0.5  # whatever it says, a forward pass may read it
        generate(model, tokens(1, 7))
        assert decode_graph._sessions[model] is not third
        third = decode_graph._sessions[model]
        with monkey_patch.apply(model, use_cutile=True):  # other forwards
            assert not third.fingerprint.holds(model)
        keys = []
        for length in (300, 7, 2100, 1100, 900, 300):  # one that is too large is not kept for short ones
            generate(model, tokens(1, length))
            keys.append(decode_graph._sessions[model].key[1])
        assert keys == [512, 512, 2304, 2304, 1024, 1024]
    assert model not in decode_graph._sessions


def test_a_session_serves_calls_in_inference_mode_and_others(steps):
    model, ids = make_model("llama"), tokens(1, 7)
    expected = generate(model, ids)
    with monkey_patch.apply(model, use_cutile=False):
        for mode in (True, False, True):
            with torch.inference_mode(mode):
                assert torch.equal(generate(model, ids.clone()), expected)
    assert len(steps) == 3 * 8


def test_a_default_device_of_the_caller_does_not_take_what_the_host_reads():
    ended = LateFlag(torch.device("cpu"))
    with torch.device("meta"):
        ended.post(torch.tensor(False, device="cpu"), 4)
        ended.post(torch.tensor(True, device="cpu"), 5)
        assert ended.read() is None and ended.read(wait_for_last=True) == 5


def test_copies_and_pickles_bring_their_own(steps):
    model, ids = make_model("llama"), tokens(1, 7)
    expected = generate(model, ids)
    monkey_patch.apply(model, use_cutile=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        steps.clear()
        assert torch.equal(generate(other, ids), expected) and len(steps) == 8
        monkey_patch.revert(other)
        assert "generate" not in vars(other)
    monkey_patch.revert(model)


def test_without_the_attention_there_is_no_graph():
    model = make_model("llama")
    with monkey_patch.apply(model, use_cutile=False, use_attn=False) as report:
        assert {e.compute: e.why for e in report.skipped}["graph"] == "its attention is not TileGym's"
    with monkey_patch.apply(model, use_cutile=False, graph=False) as report:
        assert "graph" not in {e.compute for e in report.patched} and "generate" not in vars(model)


@gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["pytorch", "cutile"])
def test_replays(family, backend):
    """One graph serves other prompts, lengths and paddings, and a reload of the weights in place."""
    model = make_model(family)
    ids, mask = padded([5, 11, 8], "left")
    for seed in (0, 1):
        model.load_state_dict(make_model(family, seed=seed).state_dict())
        expected = generate(model, ids, mask), generate(model, tokens(3, 40)), generate(model, tokens(3, 17))
        with monkey_patch.apply(model, use_cutile=backend == "cutile"):
            for _ in range(2):
                assert torch.equal(generate(model, ids, mask), expected[0])
                assert torch.equal(generate(model, tokens(3, 40)), expected[1])
                assert torch.equal(generate(model, tokens(3, 17)), expected[2])
            assert decode_graph._sessions[model].logits.keys() == {(True, True), (False, True)}


@gpu
@pytest.mark.parametrize(
    "family, options",
    [
        *itertools.product(["qwen3_moe", "olmoe", "gpt_oss", "mixtral"], ({}, {"dtype": torch.bfloat16})),
        ("mixtral", {"hidden_act": "sigmoid"}),  # which is left to transformers
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["pytorch", "cutile"])
def test_replays_of_experts(family, options, backend):
    """Nothing waits for the device to learn which were chosen."""
    model = make_model(family, **options)
    if not type(model)._can_compile_fullgraph:
        pytest.skip("this transformers does not let it be captured")
    prompts = [padded([5, 11, 8], "left"), (tokens(3, 40), None), (tokens(3, 17), None)]
    expected = [generate(model, *prompt) for prompt in prompts]
    with monkey_patch.apply(model, use_cutile=backend == "cutile"):
        got = [generate(model, *prompt) for prompt in prompts]
        graphs = decode_graph._sessions[model].graphs
        assert graphs.keys() == {(True, True), (False, True)} and decode_graph._NO_GRAPH not in graphs.values()
    # In bf16 another choice of experts for a rounding, or another token, changes all that follow.
    assert "dtype" in options or all(map(torch.equal, got, expected))


@gpu
def test_what_cannot_be_captured_decodes_without_a_graph():
    model, ids = make_model("llama"), tokens(2, 11)
    expected = generate(model, ids)
    norm = model.model.norm
    norm.register_forward_hook(lambda module, args, out: out if out.sum().item() else None)  # waits for the device
    with monkey_patch.apply(model, use_cutile=False), pytest.warns(UserWarning, match="without a CUDA graph"):
        assert torch.equal(generate(model, ids), expected)


def test_weights_on_the_meta_device():
    model, ids = make_model("llama"), tokens(2, 7)
    expected, weights = model(ids).logits, copy.deepcopy(model.state_dict())
    model.to("meta")
    with monkey_patch.apply(model, use_cutile=False) as report:
        (skipped,) = [entry.why for entry in report.skipped if entry.compute == "graph"]
        assert skipped == "its weights are on the meta device"
        model.load_state_dict(weights, assign=True)
        rotary = model.model.rotary_emb
        model.model.rotary_emb = type(rotary)(model.config)
        assert torch.allclose(model(ids).logits, expected, atol=1e-5)


@pytest.mark.parametrize("attention_of_base", [True, False])
def test_a_model_whose_base_was_patched_by_itself(attention_of_base, steps):
    """It has one config, whoever was patched and undone before."""
    model, ids = make_model("llama"), tokens(1, 9)
    other, expected = copy.deepcopy(model), generate(model, ids)
    for first, second in ((model.model, model), (model, model.model), (model.model, model)):
        reports = [
            monkey_patch.apply(m, use_cutile=False, use_attn=attention_of_base or m is model) for m in (first, second)
        ]
        del steps[:]
        assert {id(module.config) for module in model.modules() if "config" in vars(module)} == {id(model.config)}
        assert torch.equal(generate(model, ids), expected) and steps
        for report in reversed(reports):
            report.revert()
        del steps[:]
        assert torch.equal(generate(model, ids), expected) and not steps
        assert model.config._attn_implementation == model.model.config._attn_implementation == "sdpa"
    assert other.config is not model.config and torch.equal(generate(other, ids), expected)


def test_threads_take_turns():
    model = make_model("llama")
    prompts = [tokens(1, 5 + i) for i in range(4)]
    expected = [generate(model, prompt) for prompt in prompts]
    with monkey_patch.apply(model, use_cutile=False), ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(functools.partial(generate, model), prompts))
    assert [ids.tolist() for ids in got] == [ids.tolist() for ids in expected]


def test_a_call_from_within_another_one():
    model, prompt, other = make_model("llama"), tokens(1, 9), tokens(1, 5)
    expected, expected_within = generate(model, prompt), generate(model, other)
    within = []

    class Generates(LogitsProcessor):
        def __call__(self, ids, scores):
            within.append(generate(model, other))
            return scores

    with monkey_patch.apply(model, use_cutile=False):
        got = generate(model, prompt, logits_processor=LogitsProcessorList([Generates()]))
    assert torch.equal(got, expected)
    assert len(within) > 1 and all(torch.equal(ids, expected_within) for ids in within)


def test_a_compiled_model_is_patched_but_for_the_graph():
    """The wrapper that torch.compile makes passes ``generate`` on to the model in it."""
    model, ids = make_model("mistral"), tokens(2, 7)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        expected = compiled(ids).logits
        with monkey_patch.apply(compiled, use_cutile=False) as report, observed() as calls:
            got = compiled(ids).logits
        assert {"rms_norm", "fmha", "linear"} <= {op for op, _ in calls}
        assert_close(got, expected)
        assert [e.why for e in report.skipped] == ["the model that it wraps generates: patch that one"]
        with observed() as calls:
            assert torch.equal(compiled(ids).logits, expected)
        assert not calls

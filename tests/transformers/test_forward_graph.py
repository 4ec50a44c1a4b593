"""Whole calls of encoders as graphs; without a GPU a graph is stood in for by running the same over its buffers."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
import transformers
from common import HAS_GPU
from common import device
from replicas import replicas_of
from transformers.masking_utils import bidirectional_mask_function

import tilegym
from tilegym.errors import FallbackWarning
from tilegym.transformers import forward_graph
from tilegym.transformers import graph_calls
from tilegym.transformers.attention import causal_mask
from tilegym.transformers.attention import full_masks
from tilegym.transformers.graph_capture import Fingerprint

CONFIG = dict(
    vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64,
)  # fmt: skip


class Again:
    """A graph without a GPU: runs what was captured, and writes where it wrote."""

    def __init__(self, run, results):
        self.run, self.results = run, results

    def replay(self):
        for kept, new in zip(graph_calls.leaves_of(self.results), graph_calls.leaves_of(self.run()), strict=True):
            kept.copy_(new)


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """The captures, each as the number of replays since."""
    captured, real = [], forward_graph.capture

    def capture(run, state, at, pool=None):
        captured.append(0)
        if at.type == "cuda":
            return real(run, state, at, pool)
        with torch.no_grad():
            results = run()
        return Again(run, results), results

    def replay(self, inputs, real=forward_graph._Graph.replay):
        captured[-1] += 1
        return real(self, inputs)

    monkeypatch.setattr(forward_graph, "capture", capture)
    monkeypatch.setattr(forward_graph._Graph, "replay", replay)
    if not HAS_GPU:
        monkeypatch.setattr(graph_calls, "DEVICES", ("cpu",))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    return captured


def make(name="BertModel", **changes):
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    return model_class(model_class.config_class(**CONFIG | changes)).eval().to(device())


@pytest.fixture
def model():
    made = make()
    with tilegym.apply(made, use_cutile=False):
        yield made


def ids(batch=2, length=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 60, (batch, length), generator=generator).to(device())


def padded(batch=2, length=12):
    mask = torch.ones(batch, length, dtype=torch.long, device=device())
    mask[1, -3:] = 0
    return mask


@pytest.fixture
def near():
    """Asserts that a call gives what the model's own code gives, which calls with gradients run."""

    def check(model, got, **inputs):
        with torch.enable_grad():
            expected = model(**inputs).last_hidden_state.detach()
        torch.testing.assert_close(got.last_hidden_state, expected, rtol=1e-4, atol=1e-5)

    return check


def test_the_third_call_is_replayed(model, graphs, near):
    kept = []
    for seed in range(5):
        with torch.inference_mode():
            kept.append(model(input_ids=ids(seed=seed)))
        assert graphs == [[], [1], [2], [3], [4]][seed] or seed == 0
    assert graphs == [4]  # one when it was captured, to compare
    for seed, output in enumerate(kept):
        near(model, output, input_ids=ids(seed=seed))
    assert type(kept[4]) is type(kept[0]) and kept[4].keys() == kept[0].keys()


def calls(model, times=3, **inputs):
    with torch.no_grad():
        for _ in range(times):
            output = model(**inputs)
    return output


def test_each_form_has_its_graph(model, graphs, near):
    whole = torch.ones_like(ids())
    for inputs in (
        dict(input_ids=ids()),
        dict(input_ids=ids(length=9)),
        dict(input_ids=ids(batch=3)),
        dict(input_ids=ids(), attention_mask=whole),
        dict(input_ids=ids(), attention_mask=padded()),
        dict(input_ids=ids(), return_dict=True),
        dict(inputs_embeds=torch.randn(2, 12, 64, device=device())),
    ):
        before = len(graphs)
        near(model, calls(model, **inputs), **inputs)
        assert len(graphs) == before + 1 and graphs[-1] == 2
        near(model, calls(model, 1, **inputs), **inputs)
        assert len(graphs) == before + 1


def test_padding_counts_whatever_was_captured(model, near):
    calls(model, input_ids=ids(), attention_mask=torch.ones_like(ids()))
    calls(model, input_ids=ids(), attention_mask=padded())
    other = padded().flip(0).contiguous()
    for mask in (padded(), other, torch.ones_like(other)):
        near(model, calls(model, 1, input_ids=ids(), attention_mask=mask), input_ids=ids(), attention_mask=mask)


def test_tuples_and_hidden_states(model, graphs):
    output = calls(model, 4, input_ids=ids(), output_hidden_states=True)
    assert output.hidden_states[-1] is output.last_hidden_state and len(output.hidden_states) == 3
    assert isinstance(calls(model, 4, input_ids=ids(), return_dict=False), tuple)
    assert sum(graphs) >= 4


def test_the_models_code_runs_where_a_graph_could_differ(model, graphs, near):
    calls(model, input_ids=ids())
    replays = graphs[-1]
    with torch.enable_grad():
        assert model(input_ids=ids()).last_hidden_state.requires_grad
    with torch.no_grad(), torch.autocast(device(), dtype=torch.bfloat16):
        model(input_ids=ids())
    model.train()
    calls(model, input_ids=ids())
    assert model not in forward_graph._kept
    model.eval()
    with torch.no_grad(), pytest.raises(TypeError, match="input_ids"):
        model(ids(), input_ids=ids())
    assert graphs == [replays]


def test_hooks_are_called(model, graphs):
    calls(model, input_ids=ids())
    seen = []
    handle = model.encoder.layer[1].register_forward_hook(lambda *args: seen.append(1))
    calls(model, 4, input_ids=ids())
    assert len(seen) == 4 and len(graphs) == 1
    handle.remove()
    calls(model, 3, input_ids=ids())
    assert len(seen) == 4 and len(graphs) == 2


def test_hooks_on_all_modules_are_called(model):
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: seen.append(1))
    try:
        calls(model, 1, input_ids=ids())
        first = len(seen)
        calls(model, 3, input_ids=ids())
        assert len(seen) == 4 * first > 0
    finally:
        handle.remove()


def test_new_weights_are_seen(model, near):
    calls(model, input_ids=ids())
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight.mul_(2)  # in place
    near(model, calls(model, 1, input_ids=ids()), input_ids=ids())
    layer = model.encoder.layer[1].output
    layer.dense = torch.nn.Linear(96, 64).to(device())
    near(model, calls(model, 1, input_ids=ids()), input_ids=ids())
    layer.dense.weight = torch.nn.Parameter(layer.dense.weight.detach() * 3)
    near(model, calls(model, 1, input_ids=ids()), input_ids=ids())


def test_what_changes_by_itself_is_not_replayed(graphs):
    model = make()
    noise = model.encoder.layer[0].output.dense
    real = noise.forward
    noise.forward = lambda x: torch.nn.functional.dropout(real(x))
    with tilegym.apply(model, use_cutile=False), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = [calls(model, 1, input_ids=ids()).last_hidden_state for _ in range(5)]
    assert not any(torch.equal(a, b) for a, b in zip(outputs, outputs[1:], strict=False))
    told = [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]
    assert told == ["BertModel runs without a CUDA graph: its results differ from run to run"]
    assert len(graphs) == 1


def test_a_capture_that_fails(model, monkeypatch, near):
    def fail(*args):
        raise RuntimeError("no graph holds this\nand more")

    monkeypatch.setattr(forward_graph, "capture", fail)
    with pytest.warns(FallbackWarning, match="BertModel runs without a CUDA graph: no graph holds this$") as caught:
        near(model, calls(model, 5, input_ids=ids()), input_ids=ids())
    assert len(caught) == 1


DECODER = dict(num_key_value_heads=2, head_dim=16)


def left_padded(batch=2, length=12):
    return padded(batch, length).flip(1)


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("name, changes", [("Qwen3Model", {}), ("MistralModel", {"sliding_window": 5})])
def test_a_decoder_that_embeds(name, changes, by_hand, graphs, near):
    """With the cache that it returns, which grows by itself and which the next replay leaves alone."""
    model = make(name, **DECODER, **changes)
    with tilegym.apply(model, use_cutile=False, by_hand=by_hand) as report:
        assert [e.module for e in report.patched if e.compute == "graph"] == [name]
        for mask in (None, torch.ones_like(ids()), left_padded()):
            inputs = {} if mask is None else {"attention_mask": mask}
            kept = [calls(model, 1, input_ids=ids(seed=seed), **inputs) for seed in range(5)]
            assert graphs.pop() == 4 and not graphs
            for seed, output in enumerate(kept):
                near(model, output, input_ids=ids(seed=seed), **inputs)
                cache, expected = output.past_key_values, kept[0].past_key_values
                assert type(cache) is type(expected) and cache.get_seq_length() == 12
                assert [type(layer) for layer in cache.layers] == [type(layer) for layer in expected.layers]
            more, whole = (
                ids(length=3, seed=9),
                [torch.cat([ids(seed=seed), ids(length=3, seed=9)], 1) for seed in (4, 0)],
            )
            longer = None if mask is None else torch.cat([mask, torch.ones_like(more)], 1)
            for output, both in zip((kept[4], kept[0]), whole, strict=True):
                got = calls(model, 1, input_ids=more, attention_mask=longer, past_key_values=output.past_key_values)
                with torch.enable_grad():
                    expected = model(input_ids=both, attention_mask=longer).last_hidden_state[:, -3:].detach()
                torch.testing.assert_close(got.last_hidden_state, expected, rtol=1e-4, atol=1e-5)


def test_a_decoder_that_classifies(graphs):
    model = make("LlamaForSequenceClassification", **DECODER, num_labels=3, pad_token_id=0)
    with tilegym.apply(model, use_cutile=False):
        for mask in (torch.ones_like(ids()), left_padded()):
            for seed in range(4):
                inputs = {"input_ids": ids(seed=seed) * mask, "attention_mask": mask}
                got = calls(model, 1, **inputs).logits
                with torch.enable_grad():
                    torch.testing.assert_close(got, model(**inputs).logits.detach(), rtol=1e-4, atol=1e-5)
        assert graphs == [3, 3]


def test_what_the_config_says_is_obeyed(graphs):
    """A graph holds what it said when it was captured."""
    model = make("LlamaForSequenceClassification", **DECODER, num_labels=3, pad_token_id=None)
    with tilegym.apply(model, use_cutile=False):
        calls(model, 4, input_ids=ids(batch=1))
        model.config.use_cache = False
        assert calls(model, 4, input_ids=ids(batch=1)).past_key_values is None
        model.config.pad_token_id = int(ids(batch=1)[0, -1])
        calls(model, 4, input_ids=ids(batch=1))
        assert graphs == [3, 3, 3]


def test_a_hook_in_the_place_of_another(model):
    def scaled(by):
        return model.encoder.layer[0].register_forward_hook(lambda module, args, out: out * by)

    first = scaled(1.0)
    fingerprint = Fingerprint(model)
    assert fingerprint.holds(model)
    first.remove()
    scaled(2.0)
    assert not fingerprint.holds(model)


def test_a_decoder_without_a_cache_gets_a_mask_that_says_nothing(graphs):
    model = make("Qwen3Model", **DECODER)
    with tilegym.apply(model, use_cutile=False):
        given = {"input_ids": ids(), "use_cache": False}
        forward = type(model).forward
        assert torch.equal(graph_calls.with_mask(forward, given)["attention_mask"], torch.ones_like(ids()))
        for other in ({"use_cache": True}, {"position_ids": ids()}, {"attention_mask": padded()}):
            assert graph_calls.with_mask(forward, given | other) == given | other
        assert calls(model, 4, **given).past_key_values is None and graphs == [3]


def test_rotations_by_length_are_left():
    rope = dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
    for by_hand in (True, False):
        model = make("LlamaModel", **DECODER, rope_parameters=rope)
        with tilegym.apply(model, use_cutile=False, by_hand=by_hand) as report:
            (why,) = [entry.why for entry in report.skipped if entry.compute == "graph"]
            assert why == "its rotary embedding changes with the length of the sequence"


def test_results_that_cannot_be_kept(graphs):
    class Grows(transformers.DynamicCache):
        pass

    model = make("Qwen3Model", **DECODER)
    with tilegym.apply(model, use_cutile=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.models.qwen3.modeling_qwen3, "DynamicCache", Grows)
        with pytest.warns(FallbackWarning, match="it returns a Grows: give use_cache=False") as warned:
            calls(model, 4, input_ids=ids())
            calls(model, 4, input_ids=ids(length=9))
        assert len([w for w in warned if "returns a Grows" in str(w.message)]) == 1 and not graphs
        calls(model, 4, input_ids=ids(), use_cache=False)
        assert graphs == [3]


def test_only_so_many(model, graphs, monkeypatch):
    monkeypatch.setattr(forward_graph, "MOST_GRAPHS", 2)
    for length in range(4, 9):
        calls(model, input_ids=ids(length=length))
    assert len(graphs) == 2
    monkeypatch.setattr(forward_graph, "MOST_GRAPHS", 9)
    total = torch.cuda.get_device_properties(0).total_memory if HAS_GPU else 1 << 34
    monkeypatch.setattr(forward_graph, "MOST_MEMORY", 20_000 / total)
    calls(model, 4, input_ids=ids(length=40))
    assert len(graphs) == 2
    calls(model, input_ids=ids(batch=1, length=3))  # one that is too large leaves room for small ones
    assert len(graphs) == 3


def test_copies_have_their_own(model, graphs, near):
    calls(model, input_ids=ids())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.embeddings.word_embeddings.weight.mul_(3)
        before = len(graphs)
        near(other, calls(other, input_ids=ids()), input_ids=ids())
        assert len(graphs) == before + 1
    near(model, calls(model, 1, input_ids=ids()), input_ids=ids())


def test_reverted_and_freed():
    model = make()
    report = tilegym.apply(model, use_cutile=False)
    calls(model, input_ids=ids())
    assert model in forward_graph._kept
    report.revert()
    assert model not in forward_graph._kept and "forward" not in vars(model)
    tilegym.apply(model, use_cutile=False)
    calls(model, input_ids=ids())
    for graph in forward_graph._kept[model].forms.values():
        graph.graph = None  # the one of this test holds the model
    gone = weakref.ref(model)
    del model, report, graph
    gc.collect()
    assert gone() is None


def test_encoder_of_a_model_of_two_parts(graphs):
    model = make(
        "BartForConditionalGeneration", d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, decoder_start_token_id=1,
        forced_eos_token_id=None,
    )  # fmt: skip
    options = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False)
    expected = [model.generate(ids(seed=seed), **options) for seed in range(4)]
    with tilegym.apply(model, use_cutile=False):
        for seed, wanted in enumerate(expected):
            assert torch.equal(model.generate(ids(seed=seed), **options), wanted)
    assert graphs == [3]


def test_a_model_of_two_parts_without_an_encoder_to_ask_for(monkeypatch):
    model = make("BartModel", d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
                 decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96)  # fmt: skip
    for found in (lambda: model, lambda: torch.nn.Linear(1, 1)):
        monkeypatch.setattr(model, "get_encoder", found, raising=False)
        with tilegym.apply(model, use_cutile=False) as report:
            assert [e.why for e in report.skipped if e.compute == "graph"] == [
                "it has no encoder with a config of its own"
            ]


def test_compiled(model, graphs):
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for seed in range(4):
            got = compiled(input_ids=ids(seed=seed)).last_hidden_state
            with torch.enable_grad():
                expected = model(input_ids=ids(seed=seed)).last_hidden_state
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not graphs


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_masks_while_a_graph_is_captured():
    mask, graph = torch.ones(2, 5, dtype=torch.long, device="cuda"), torch.cuda.CUDAGraph()
    options = dict(
        batch_size=2, q_length=5, kv_length=5, mask_function=bidirectional_mask_function, attention_mask=mask,
        allow_is_bidirectional_skip=True,
    )  # fmt: skip
    with torch.cuda.graph(graph):
        assert causal_mask(**options).shape == (2, 1, 1, 5)
        with full_masks(True):
            assert causal_mask(**options) is None
        assert causal_mask(**options) is not None
        options = dict(batch_size=2, q_length=5, kv_length=5, attention_mask=mask)
        assert causal_mask(**options).keys is not None
        with full_masks(True):
            assert causal_mask(**options) is None


def test_replicas_have_no_graphs(model, graphs, monkeypatch):
    """Their weights are elsewhere each time."""
    with torch.no_grad():
        (replica,) = replicas_of(model, monkeypatch, count=1)
        own = [model(ids()).last_hidden_state for _ in range(4)][-1]
        kept = list(graphs)
        others = [replica(ids()).last_hidden_state for _ in range(4)]
    assert kept and graphs == kept
    assert all(torch.equal(other, others[0]) for other in others) and not torch.allclose(own, others[0])

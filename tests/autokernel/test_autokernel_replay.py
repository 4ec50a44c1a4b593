"""Greedy runs from a replay; without a GPU a replay of the operators that a run has called, on the same tensors."""

import contextlib
from unittest import mock

import pytest
import torch
import transformers
from common import device
from common import gpu
from torch.utils._python_dispatch import TorchDispatchMode

from tilegym.autokernel import replay
from tilegym.autokernel.replay import Greedy
from tilegym.autokernel.replay import Refused
from tilegym.autokernel.replay import Replays
from tilegym.bench import generate
from tilegym.bench.prompts import Batch
from tilegym.transformers import graph_capture

STEPS = 7


class Recording(TorchDispatchMode):
    """As a CUDA graph: what is called is called again, on the same memory, with the host's values of the first time."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the run waits for the device\nand says more")
        results = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, results))
        return results

    def replay(self):
        for function, args, kwargs, results in self.calls:
            again = function(*args, **kwargs)
            for old, new in zip(*(torch.utils._pytree.tree_leaves(r) for r in (results, again)), strict=True):
                if isinstance(old, torch.Tensor) and old.numel():
                    old.copy_(new)


def recorded(run, state, device):
    values = [t.clone() for t in state]
    graph = Recording()
    told = mock.patch("transformers.utils.import_utils.is_cuda_stream_capturing", return_value=True)
    for modes in ((), (), (graph, told)):
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            run()
        for tensor, value in zip(state, values, strict=True):
            tensor.copy_(value)
    return torch.no_grad()(graph.replay)


CONFIG = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.3,
    eos_token_id=None,
    pad_token_id=0,
)
MODELS = {
    "sdpa": (transformers.LlamaForCausalLM, {}),
    "eager": (transformers.LlamaForCausalLM, {"attn_implementation": "eager"}),
    "sliding": (transformers.MistralForCausalLM, {"sliding_window": 4}),
    "recurrent": (
        transformers.Qwen3_5ForCausalLM,
        dict(
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"],
        ),
    ),
}


def make_model(name="sdpa", **options):
    model_class, own = MODELS[name]
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**CONFIG, **own, **options})).eval().to(device())
    model.generation_config.eos_token_id = None
    return model


def make_batches(padded=False):
    torch.manual_seed(1)
    batches = [Batch(ids, torch.ones_like(ids)) for ids in (torch.randint(1, 61, (1, 6)), torch.randint(1, 61, (2, 9)))]
    if padded:
        batches[1].attention_mask[0, :3] = 0
    return batches


def capture():
    return replay.cuda_graph if device() == "cuda" else recorded


def equal(got, expected):
    return len(got) == len(expected) and all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("prompts", [True, False], ids=["prompts", "steps"])
@pytest.mark.parametrize("name", MODELS)
def test_a_replay_is_the_eager_run(name, prompts):
    model, batches = make_model(name), make_batches()
    expected = generate.run_once(model, batches, STEPS).tokens
    replays = Replays(model, batches, STEPS, capture())
    for _ in range(2):
        assert equal(replays.run(prompts), expected)
    model.lm_head.weight.data.mul_(-1)  # it computes, and remembers nothing
    changed = generate.run_once(model, batches, STEPS).tokens
    assert not equal(changed, expected) and equal(replays.run(prompts), changed)


@pytest.mark.parametrize("prompts", [True, False], ids=["prompts", "steps"])
def test_padded_prompts(prompts):
    model, batches = make_model(), make_batches(padded=True)
    expected = generate.run_once(model, batches, STEPS).tokens
    assert equal(Replays(model, batches, STEPS, capture()).run(prompts), expected)


@pytest.mark.parametrize("prompts", [True, False], ids=["prompts", "steps"])
def test_nothing_of_an_earlier_run_is_left(prompts):
    """Where a cache holds nothing, its slots have a weight of zero; which NaN would survive."""
    model, batches = make_model("recurrent"), make_batches()
    replays = Replays(model, batches, STEPS, capture())
    expected = replays.run(prompts)
    for greedy in replays.prepare(prompts):
        recurrent, attention = greedy.cache.layers
        for tensor in (attention.keys, attention.values, *greedy.cache.state()[1:]):
            tensor.fill_(torch.nan)
    assert equal(replays.run(prompts), expected)


def test_capturing_changes_nothing():
    """The state that is named to the capture is all that a step changes: it may be run in between, and put back."""
    model, (batch, _) = make_model("recurrent"), make_batches()
    expected = generate.run_once(model, [batch], STEPS).tokens[0]

    def twice(run, state, device):
        values = [t.clone() for t in state]
        run()
        run()
        for tensor, value in zip(state, values, strict=True):
            tensor.copy_(value)
        return run

    greedy = Greedy(model, batch, STEPS, twice, prompts=False)
    for _ in range(STEPS - 1):  # behind the prompts' run that the capture has begun with
        with torch.no_grad():
            greedy._advance_run()
    assert torch.equal(greedy._chosen.cpu(), expected)


def test_a_cuda_graph_is_what_is_replayed(monkeypatch):
    given = object(), [torch.zeros(2)], torch.device("cpu")
    graph = mock.Mock()
    captured = mock.Mock(return_value=(graph, None))
    monkeypatch.setattr(graph_capture, "capture", captured)
    replay.cuda_graph(*given)()
    captured.assert_called_once_with(*given)
    graph.replay.assert_called_once_with()


def test_what_is_refused(monkeypatch):
    batches = make_batches()
    with pytest.raises(Refused, match="^the run waits for the device$"):
        model = make_model()
        model.model.norm.register_forward_hook(lambda module, args, out: out if out.sum().item() else None)
        Replays(model, batches, STEPS, recorded).run(prompts=False)
    made = []

    def failing(run, state, device):
        made.append(run)
        try:
            raise ValueError
        finally:
            raise RuntimeError("the capture was ended by an error before")

    replays = Replays(make_model(), batches, STEPS, failing)
    for _ in range(2):
        with pytest.raises(Refused, match="ValueError"):
            replays.run(prompts=True)
    assert len(made) == 1  # it is not tried again
    with pytest.raises(Refused, match="its attention is flex_attention"):
        Replays(make_model(attn_implementation="flex_attention"), batches, STEPS, recorded).run(prompts=True)
    with pytest.raises(Refused, match="no step"):
        Replays(make_model(), batches, 1, recorded).run(prompts=True)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_can_compile_fullgraph", False)
    with pytest.raises(Refused, match="values on the device"):
        Replays(make_model(), batches, STEPS, recorded).run(prompts=True)


@pytest.mark.skipif(device() != "cpu", reason="there are graphs on a GPU")
def test_without_a_gpu_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(replay, "Greedy", None)
    with pytest.raises(Refused, match="without a GPU"):
        Replays(make_model(), make_batches(), STEPS).run(prompts=True)


@gpu
def test_on_a_gpu_a_step_is_one_launch():
    model, batches = make_model(), make_batches()
    replays = Replays(model, batches, STEPS)
    replays.prepare(prompts=True)
    calls = Recording()
    with calls:
        replays.run(prompts=True)
    assert len(calls.calls) <= 4 * len(batches)  # the copies to the host

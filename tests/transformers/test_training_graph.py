"""Training steps as graphs; without a GPU a graph is stood in for by running the same over its buffers."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from common import HAS_GPU
from common import device
from common import gpu
from training_graphs import as_it_is
from training_graphs import assert_same
from training_graphs import count_replays
from training_graphs import gradients_of
from training_graphs import ids
from training_graphs import make

import tilegym
from tilegym.errors import FallbackWarning
from tilegym.errors import PatchError
from tilegym.errors import UnsupportedError
from tilegym.transformers import training_graph
from tilegym.transformers.training_graph import graph_training


@pytest.fixture(autouse=True)
def replays(monkeypatch):
    return count_replays(monkeypatch)


@pytest.fixture
def model():
    made = make()
    with tilegym.apply(made, use_cutile=False), graph_training(made):
        yield made


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "GPT2LMHeadModel"])
def test_the_second_step_is_captured(name, replays):
    options = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0} if name == "GPT2LMHeadModel" else {}
    model = make(name, **options)
    with tilegym.apply(model, use_cutile=False), graph_training(model):
        for seed in range(4):
            assert_same(gradients_of(model, ids(seed=seed)), as_it_is(model, ids(seed=seed)))
            assert replays == [[], [1], [2], [3]][seed]


OTHERS = {
    "BertForSequenceClassification": {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
    "Gemma3ForCausalLM": {"sliding_window": 8},
    "Qwen3MoeForCausalLM": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "T5ForConditionalGeneration": {
        "d_model": 64,
        "d_kv": 16,
        "num_heads": 4,
        "dropout_rate": 0,
        "decoder_start_token_id": 0,
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models(name, replays):
    """Classifiers, windows, experts, an encoder and a decoder."""
    model, steps = make(name, **OTHERS[name]), []
    with tilegym.apply(model, use_cutile=False), graph_training(model):
        for seed in range(5):
            for one in (model, copy.deepcopy(model)):
                if one is not model:
                    tilegym.revert(one)
                one.zero_grad()
                labels = torch.tensor([0, 1], device=device()) if "Classification" in name else ids(seed=seed)
                options = {"use_cache": False} if "T5" in name else {}
                loss = one(input_ids=ids(seed=seed), labels=labels, **options).loss
                loss.backward()
                gradients = {n: p.grad.clone() for n, p in one.named_parameters() if p.grad is not None}
                steps.append((loss.detach(), gradients))
            assert_same(*steps[-2:])
    # What a GPU cannot hold runs the code.
    assert HAS_GPU or (len(replays) == 1 and replays[0] >= 3)


def test_an_optimizer_trains_the_same_weights(replays):
    losses = []
    for graph in (False, True):
        model = make()
        with tilegym.apply(model, use_cutile=False) as report:
            if graph:
                report = graph_training(model)
                assert "training_graph" in str(report)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for seed in range(6):
                loss, _ = gradients_of(model, ids(seed=seed))
                optimizer.step()
                losses.append(loss)
    torch.testing.assert_close(torch.stack(losses[:6]), torch.stack(losses[6:]), rtol=1e-4, atol=1e-5)
    assert replays == [5]


def test_gradients_accumulate_and_are_the_callers(model, replays):
    _, expected = gradients_of(model, ids())
    gradients_of(model, ids())
    _, single = gradients_of(model, ids())
    kept = {name: p.grad for name, p in model.named_parameters()}
    loss = model(input_ids=ids(), labels=ids()).loss
    loss.backward()  # once more, on top
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 2 * expected[name], rtol=1e-3, atol=1e-5)
        assert p.grad is kept[name]
    held = dict(kept)
    model.zero_grad()
    gradients_of(model, ids(seed=7))
    for name, gradient in held.items():  # of the earlier step: nothing has written over it
        torch.testing.assert_close(gradient, 2 * single[name], rtol=1e-3, atol=1e-5)
    assert replays == [4]


def test_masks(model, replays):
    mask = torch.ones_like(ids())
    padded = mask.clone()
    padded[1, :3] = 0
    for _ in range(3):
        assert_same(gradients_of(model, ids(), attention_mask=mask), as_it_is(model, ids(), attention_mask=mask))
        found = gradients_of(model, ids(), attention_mask=padded)
        assert_same(found, as_it_is(model, ids(), attention_mask=padded))
        other = padded.flip(0)
        assert_same(gradients_of(model, ids(), attention_mask=other), as_it_is(model, ids(), attention_mask=other))
    assert replays == [5]  # of two padded calls in a row the second is captured, and another never comes twice in a row


def test_a_pass_that_waits_for_its_backward_pass_keeps_its_activations(model, replays):
    for _ in range(2):
        gradients_of(model, ids())
    expected = [as_it_is(model, ids(seed=seed)) for seed in (1, 2)]
    model.zero_grad()
    losses = [model(input_ids=ids(seed=1), labels=ids(seed=1)).loss]
    with pytest.warns(FallbackWarning, match="still waits"):
        losses.append(model(input_ids=ids(seed=2), labels=ids(seed=2)).loss)
    assert replays == [2]
    sum(losses).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[0][1][name] + expected[1][1][name], rtol=1e-3, atol=1e-5)
    gradients_of(model, ids())
    assert replays == [3]


def test_a_pass_that_nobody_holds_does_not_wait(model, replays):
    for _ in range(3):
        model(input_ids=ids(), labels=ids())
        gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        gradients_of(model, ids())
    assert replays == [3]


def test_backward_twice_is_an_error(model):
    for _ in range(2):
        gradients_of(model, ids())
    loss = model(input_ids=ids(), labels=ids()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="undo graph_training"):
        loss.backward()


def test_second_derivatives_are_an_error(model):
    for _ in range(2):
        model.model(input_ids=ids()).last_hidden_state.sum().backward()
    hidden = model.model(input_ids=ids()).last_hidden_state
    with pytest.raises(UnsupportedError, match="no second derivatives"):
        torch.autograd.grad(hidden.sum(), list(model.model.parameters()), create_graph=True)


def nodes_of(node):
    """A node of autograd's, and those that come behind it."""
    found, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return found


def test_weights_that_change_before_the_backward_pass_are_an_error(model):
    for _ in range(2):
        gradients_of(model, ids())
    loss = model(input_ids=ids(), labels=ids()).loss
    (node,) = {node for node in nodes_of(loss.grad_fn) if node.name() == "_ReplayBackward"}
    assert len(node.saved_tensors) == len(list(model.model.parameters()))  # of which autograd knows the versions
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_results_are_the_callers(model):
    for _ in range(2):
        model.model(input_ids=ids()).last_hidden_state.sum().backward()
    first = model.model(input_ids=ids(seed=1)).last_hidden_state
    before = first.detach().clone()
    first.sum().backward()
    model.model(input_ids=ids(seed=2)).last_hidden_state.sum().backward()
    assert torch.equal(first, before)


@gpu
def test_nothing_waits_for_the_gpu(model, replays):
    inputs, mode = ids(), torch.cuda.get_sync_debug_mode()

    def step():
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
        hidden.backward(torch.ones_like(hidden))

    for _ in range(2):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert replays == [2]


def test_frozen_weights_and_embeddings_that_are_given(model, replays):
    for p in model.model.layers[0].parameters():
        p.requires_grad_(False)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    for _ in range(3):
        found = gradients_of(model, ids())
        assert not frozen & found[1].keys()
    assert replays == [2]
    embedded = [model.get_input_embeddings()(ids(seed=s)).detach().requires_grad_() for s in (0, 1, 2)]
    for given in embedded:
        model.model(inputs_embeds=given).last_hidden_state.square().sum().backward()
    plain = copy.deepcopy(model)
    tilegym.revert(plain)
    for given in embedded:
        fresh = given.detach().requires_grad_()
        plain.model(inputs_embeds=fresh).last_hidden_state.square().sum().backward()
        torch.testing.assert_close(given.grad, fresh.grad, rtol=5e-3, atol=1e-4)
    assert replays == [2, 2]


class Counted(torch.nn.Module):
    """An activation, none that is replaced, that counts its passes, as batch norms do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        with torch.no_grad():
            self.passes.add_(1)
        return 1.5 * torch.nn.functional.silu(x)


def test_buffers_change_once_a_step(replays):
    model = make()
    model.model.layers[1].mlp.act_fn = counted = Counted().to(device())
    with tilegym.apply(model, use_cutile=False), graph_training(model):
        counted.passes.zero_()
        for seed in range(4):
            gradients_of(model, ids(seed=seed))
            assert counted.passes == seed + 1
    assert replays == [3]


def test_what_is_no_training_step_runs_the_code(model, replays):
    with torch.no_grad():
        for _ in range(3):
            model(input_ids=ids())
    model.eval()
    for _ in range(3):
        model(input_ids=ids(), labels=ids()).loss.backward()
    assert replays == []
    model.generate(ids(1, 4), max_new_tokens=2, do_sample=False)


def test_transforms_run_the_code(model, replays):
    for _ in range(2):
        model.model(input_ids=ids()).last_hidden_state.sum().backward()
    expected = {n: p.grad / 2 for n, p in model.model.named_parameters()}
    weights = {n: p.detach() for n, p in model.model.named_parameters()}

    def loss(weights):
        with tilegym.use_backend("pytorch"):
            return torch.func.functional_call(model.model, weights, (ids(),)).last_hidden_state.sum()

    for name, gradient in torch.func.grad(loss)(weights).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4)
    assert replays == [1]


REASONS = {
    "a cache": (lambda model: model(input_ids=ids(), labels=ids(), use_cache=True).loss, "use_cache=False"),
    "hooks that save": (
        lambda model: _under(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), model),
        "hooks save",
    ),
}


def _under(context, model):
    with context:
        return model(input_ids=ids(), labels=ids()).loss


def test_autocast(model, replays):
    """Weights that an optimizer has changed are cast anew."""
    for factor in (1.0, 1.5, 0.5, 1.0):
        with torch.no_grad():
            model.model.layers[0].mlp.gate_proj.weight.mul_(factor)
        plain = copy.deepcopy(model)
        tilegym.revert(plain)
        losses = []
        for one in (model, plain):
            one.zero_grad()
            losses.append(_under(torch.autocast(device(), torch.bfloat16), one))
            losses[-1].backward()
        torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-3)
        found, expected = ([p.grad for p in one.parameters()] for one in (model, plain))
        for gradient, other in zip(found, expected, strict=True):
            assert (gradient - other).norm() <= 0.05 * other.norm() + 1e-4
    assert replays == [3]
    gradients_of(model, ids())
    assert replays == [3]  # without it, another form


@pytest.mark.parametrize(("call", "why"), REASONS.values(), ids=REASONS)
def test_it_says_why_not(model, replays, call, why):
    with pytest.warns(FallbackWarning, match=why):
        call(model).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)  # once
        for _ in range(3):
            call(model).backward()
    assert replays == []


def test_checkpointing_and_hooks(model, replays):
    model.gradient_checkpointing_enable()
    with pytest.warns(FallbackWarning, match="checkpoints"):
        for _ in range(3):
            gradients_of(model, ids())
    model.gradient_checkpointing_disable()
    seen = []
    handle = model.model.layers[0].mlp.register_full_backward_hook(lambda *args: seen.append(1))
    with pytest.warns(FallbackWarning, match="hooks on its modules"):
        for _ in range(3):
            gradients_of(model, ids())
    assert replays == [] and len(seen) == 3
    handle.remove()


def test_gradients_that_are_wrong_are_found(model, replays, monkeypatch):
    real = training_graph.capture_in_turn

    def capture(runs, at, pool):
        forward, (graph, gradients) = real(runs, at, pool)
        replay = graph.replay
        graph = type("Graph", (), {"replay": lambda self: (replay(), gradients[3].mul_(1.1))})()
        return forward, (graph, gradients)

    monkeypatch.setattr(training_graph, "capture_in_turn", capture)
    gradients_of(model, ids())
    with pytest.warns(FallbackWarning, match="differ"):
        found = gradients_of(model, ids())
    assert_same(found, as_it_is(model, ids()))
    assert replays == [0]


def test_other_weights_are_captured_anew(model, replays):
    for _ in range(3):
        gradients_of(model, ids())
    weight = model.model.layers[0].mlp.up_proj
    weight.weight = torch.nn.Parameter(weight.weight.detach() * 2)
    for _ in range(2):
        assert_same(gradients_of(model, ids()), as_it_is(model, ids()))
    assert replays == [2, 1]


def test_most_steps(model, replays):
    for length in range(4, 10):
        for _ in range(3):
            gradients_of(model, ids(length=length))
    assert len(replays) == training_graph.MOST_STEPS
    assert len(training_graph._kept[model.model].forms) == len(replays)


def test_lengths_that_vary_are_not_captured(model, replays):
    for _ in range(3):
        for length in (5, 7, 9):
            gradients_of(model, ids(length=length))
    assert replays == []


def test_it_is_undone_copied_and_pickled(replays):
    model = make()
    with tilegym.apply(model, use_cutile=False):
        before = model.model.forward
        report = graph_training(model)
        again = graph_training(model)
        assert not again.patched and "already patched" in str(again)
        for _ in range(2):
            gradients_of(model, ids())
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        for _ in range(2):
            assert_same(gradients_of(twin, ids()), gradients_of(model, ids()))
        assert len(replays) == 2
        report.revert()
        assert model.model.forward == before and model.model not in training_graph._kept
        gradients_of(model, ids())
    assert len(replays) == 2


def test_what_it_does_not_take():
    with pytest.raises(PatchError, match="takes a model of transformers"):
        graph_training(torch.nn.Linear(2, 2))
    with pytest.raises(PatchError, match=r"tilegym\.apply"):
        graph_training(make())
    longer = make(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with tilegym.apply(longer, use_cutile=False), pytest.raises(PatchError, match="length of the sequence"):
        graph_training(longer)
    assert "forward" not in vars(longer.model)


def test_models_die(replays):
    model = make()
    tilegym.apply(model, use_cutile=False)
    graph_training(model)
    for _ in range(3):
        gradients_of(model, ids())
    if not HAS_GPU:  # what stands in for a graph holds the model
        for step in training_graph._kept[model.model].forms.values():
            step.forward.run = step.backward.run = None
    gone = weakref.ref(model.model)
    del model
    gc.collect()
    assert gone() is None

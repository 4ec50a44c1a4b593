"""Masks of whole patched models under torch.compile: not written out where a few numbers say the same."""

import copy
import functools
import pickle

import pytest
import torch
from common import device
from tiny_models import WINDOW
from tiny_models import make_model
from tiny_models import tokens

import tilegym
from tilegym.transformers import monkey_patch
from tilegym.transformers.traced_masks import with_compact_masks

LENGTH = 4 * WINDOW
PADDED = torch.ones(2, LENGTH, dtype=torch.long, device=device())
PADDED[0, :5] = 0
PACKED = torch.cat([torch.arange(10), torch.arange(LENGTH - 10)])[None].to(device())
FAMILIES = ["gemma3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "mistral"))]


def patched(family):
    options = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3" else {}
    model = make_model(family, num_hidden_layers=2, **options).train()
    getattr(monkey_patch, f"apply_tilegym_kernel_to_{family}")(model=model)
    return model


def compiled(model):
    """The model with its whole forward compiled, and a list of the shapes of the masks that its graphs make."""
    shapes = []

    def backend(graph, _):
        # The formula in PyTorch, which stands for the kernels here, has masks of its own.
        nodes = [node for node in graph.graph.nodes if "/ops/pytorch/" not in (node.stack_trace or "")]
        values = [node.meta.get("example_value") for node in nodes]
        shapes.extend(v.shape for v in values if isinstance(v, torch.Tensor) and v.dtype == torch.bool)
        return graph.forward

    torch.compiler.reset()
    model.compile(backend=backend, fullgraph=True)
    return model, shapes


def assert_same_training(model, eager, **kwargs):
    ids = tokens(2, LENGTH)
    losses = [m(input_ids=ids, labels=ids, use_cache=False, **kwargs).loss for m in (model, eager)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for got, expected in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad)


def written_out(shapes):
    """Those of masks of all pairs for each text, as transformers writes them."""
    return [s for s in shapes if s == (2, 1, LENGTH, LENGTH)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("masked", [False, True])
def test_no_mask_of_all_pairs_is_written_out(family, masked):
    model = patched(family)
    eager = copy.deepcopy(model)
    model, shapes = compiled(model)
    assert_same_training(model, eager, **({"attention_mask": PADDED} if masked else {}))
    assert not written_out(shapes)
    assert ((2, LENGTH) in shapes) == masked, "which keys are no padding"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("by_position", [False, True])
def test_packed_texts_keep_to_themselves(family, by_position):
    model = make_model(family).train()
    tilegym.apply(model)
    eager, body = copy.deepcopy(model), model.model
    body, shapes = compiled(body)
    embeddings, positions = model.get_input_embeddings()(tokens(2, LENGTH)), PACKED.expand(2, -1)
    arguments = (None, None, positions, None, embeddings) if by_position else ()
    kwargs = {} if by_position else {"position_ids": positions, "inputs_embeds": embeddings}
    with torch.no_grad():
        packed, expected, alone = (
            body(*arguments, use_cache=False, **kwargs).last_hidden_state,
            eager.model(inputs_embeds=embeddings, position_ids=positions, use_cache=False).last_hidden_state,
            eager.model(inputs_embeds=embeddings[:, 10:], use_cache=False).last_hidden_state,
        )
    assert written_out(shapes)
    torch.testing.assert_close(packed, expected)
    torch.testing.assert_close(packed[:, 10:], alone)


def test_of_a_whole_process_and_reverted():
    from transformers.models.gemma3 import modeling_gemma3

    original = modeling_gemma3.Gemma3TextModel.forward
    with monkey_patch.apply_tilegym_kernel_to_gemma3():
        model = make_model("gemma3").train()
        eager = copy.deepcopy(model)
        model, shapes = compiled(model)
        assert_same_training(model, eager)
        assert not written_out(shapes)
    assert modeling_gemma3.Gemma3TextModel.forward is original


def test_a_second_patch_adds_nothing_and_reverting_leaves_nothing():
    model = make_model("gemma3")
    first = tilegym.apply(model)
    forward = model.model.forward.__func__
    assert forward.recipe[0] is with_compact_masks
    tilegym.apply(model)
    assert model.model.forward.__func__ is forward
    assert pickle.loads(pickle.dumps(model)).model.forward.__func__ is forward
    first.revert()
    assert "forward" not in vars(model.model)


def test_a_forward_of_others_is_left_alone():
    model = make_model("llama")
    theirs = model.model.forward = functools.partial(type(model.model).forward, model.model)
    with monkey_patch.apply_tilegym_kernel_to_llama(model=model):
        assert model.model.forward is theirs
    assert model.model.forward is theirs

"""A decoding step can be captured: tried without a GPU, on tensors of the meta device in the place of a GPU's."""

import pytest
import torch
import torch.utils._pytree as pytree
from tiny_models import families
from tiny_models import make_model
from tiny_models import tokens
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.utils import import_utils

from tilegym.transformers import attention
from tilegym.transformers import decode_graph
from tilegym.transformers import monkey_patch


class OnDevice(TorchDispatchMode):
    """Records the operators that run, and refuses what a CUDA graph cannot hold: tensors of the CPU.

    Reading a value of the meta device is an error of its own.
    """

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        held = [t for t in pytree.tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        assert all(t.device.type == "meta" for t in held), f"{func} has a tensor of the CPU"
        assert func is not torch.ops.aten.lift_fresh.default, "torch.tensor(...) copies from the CPU"
        self.ran.append((str(func), [tuple(t.shape) for t in held]))
        return result


def session_of(model, batch_size):
    """A session behind a prompt of 11 tokens, of a model that is on the meta device then."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    session = decode_graph.Session(model.to("meta"), batch_size, 256)
    keys = torch.empty(batch_size, config.num_key_value_heads, 1, head_dim, device="meta")
    for layer in session.cache.layers:
        layer.lazy_initialization(keys, keys)
    session.cache.set_length(11)
    return session


@pytest.fixture
def capturing(monkeypatch):
    """Lets transformers and TileGym believe that a CUDA graph is being captured."""

    def begin():
        monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
        monkeypatch.setattr(attention, "_is_capturing", lambda: True)

    return begin


@pytest.mark.parametrize("batch_size", [1, 3])
@families
def test_a_captured_step_is_the_step_before_it(family, batch_size, capturing):
    """And it stays on the device: what a graph of CUDA takes in."""
    model = make_model(family)
    with monkey_patch.apply(model, use_cutile=False), torch.no_grad():
        assert not decode_graph.suits(model)
        session, ran = session_of(model, batch_size), []
        for begin in (lambda: None, capturing):
            begin()
            for padded in (False, True):
                with OnDevice() as mode:
                    assert session.compute(model, padded).shape == (batch_size, model.config.vocab_size)
                ran.append(mode.ran)
    assert ran[0] == ran[2] and ran[1] == ran[3]


def test_a_tensor_of_the_cpu_is_noticed():
    model = make_model("llama")
    model.model.norm.register_forward_hook(lambda module, args, out: out[..., torch.arange(out.shape[-1])])
    with monkey_patch.apply(model, use_cutile=False), torch.no_grad(), OnDevice():
        with pytest.raises(AssertionError, match="a tensor of the CPU"):
            session_of(model, 1).compute(model, False)


def test_layers_count_by_themselves_where_the_first_is_fused():
    """A later layer that keeps its own forward puts keys where they belong, also behind a prompt of one token."""
    model, ids = make_model("mistral"), tokens(1, 1)
    options = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    expected = model.generate(ids, **options)
    with monkey_patch.apply(model, use_cutile=False), decode_graph.eager_steps("cpu"):
        model.model.layers[1].mlp.down_proj.register_forward_hook(lambda module, args, out: out)
        assert torch.equal(model.generate(ids, **options), expected)


def test_experts_left_to_transformers_do_not_wait_for_the_device():
    with monkey_patch.apply_tilegym_kernel_to_mixtral(use_cutile=False), torch.no_grad():
        model = make_model("mixtral", hidden_act="sigmoid")
        model(tokens(1, 5))  # finds out what they compute
        session = session_of(model, 3)
        with OnDevice() as mode:
            session.compute(model, False)
    assert mode.ran and not any("grouped_mm" in name for name, _ in mode.ran)

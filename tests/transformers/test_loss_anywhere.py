"""The loss of patched models that are compiled, copied, distributed, patched in their class, or of other families."""

import copy
import pickle
import types

import pytest
import torch
from common import HAS_GPU
from common import device
from common import some
from late_loss import FUSED
from late_loss import WHOLE
from late_loss import count_whole
from late_loss import losses_of
from late_loss import only_loss
from test_training import assert_same_step
from test_training import loss_and_gradients
from tiny_models import assert_close
from tiny_models import make_model
from tiny_models import observed
from tiny_models import tokens
from torch import nn
from transformers import AutoConfig
from transformers import AutoModelForCausalLM
from transformers import LlamaForSequenceClassification

import tilegym
from tilegym.backend import PREFER_CUTILE
from tilegym.transformers import late_logits
from tilegym.transformers import loss
from tilegym.transformers import monkey_patch
from tilegym.transformers.late_logits import LateLogits
from tilegym.transformers.patching import ALREADY_PATCHED

NETWORK = "nccl" if HAS_GPU else "gloo"


@pytest.fixture
def computed(monkeypatch):
    return count_whole(monkeypatch)


@pytest.mark.parametrize("in_class", some([False, True], True))
def test_compiled_models_have_whole_logits(in_class):
    model, ids = make_model("llama").train(), tokens(2, 9)
    expected = loss_and_gradients(model)
    with only_loss("llama", None if in_class else model), observed() as calls:
        model.compile(backend="aot_eager", fullgraph=True)
        got = loss_and_gradients(model, use_cache=False)
        assert type(model(ids, labels=ids, use_cache=False).logits) is torch.Tensor
    assert_same_step(got, expected)
    assert losses_of(calls) == {WHOLE}


def test_models_made_afterwards(computed):
    before, ids = make_model("llama").train(), tokens(2, 9)
    expected = loss_and_gradients(before)
    with only_loss("llama") as report:
        where = "transformers.models.llama.modeling_llama.LlamaForCausalLM"
        assert {e.module for e in report.patched if e.compute == "loss"} == {where, f"{where}.loss_function"}
        model = make_model("llama").train()
        for each in (model, before, pickle.loads(pickle.dumps(model))):
            with observed() as calls:
                assert_same_step(loss_and_gradients(each), expected)
            assert losses_of(calls) == {FUSED} and not computed
        again = only_loss("llama")
        assert not again.patched and {e.why for e in again.skipped} == {ALREADY_PATCHED}
        # The loss that a model's config asks for stays.
        model.loss_type = "ForMaskedLM"
        with observed() as calls:
            out = model(ids, labels=ids)
        assert not losses_of(calls) and type(out.logits) is torch.Tensor
        assert_close(out.loss, nn.functional.cross_entropy(out.logits.view(-1, out.logits.shape[-1]), ids.view(-1)))
        del model.loss_type
        own = only_loss("llama", model)
        assert len(own.patched) == 2
    assert_same_step(loss_and_gradients(before), expected)
    with own, observed() as calls:
        assert_same_step(loss_and_gradients(model), expected)
    assert losses_of(calls) == {FUSED}
    with observed() as calls:
        assert_same_step(loss_and_gradients(model), expected)
    assert not losses_of(calls)


def test_copies_and_pickles():
    model, ids = make_model("llama").train(), tokens(2, 9)
    with only_loss("llama", model):
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in copies:
        with torch.no_grad():
            each.lm_head.weight.mul_(2)
        with observed() as calls:
            out = each(ids, labels=ids)
        assert losses_of(calls) == {FUSED}
        assert_close(out.logits, 2 * model(ids).logits)
        monkey_patch.revert(each)
        assert type(each(ids, labels=ids).logits) is torch.Tensor


def test_a_forward_around_it_is_bound_anew():
    """As accelerate's mixed precision does it: to the model, from ``__func__``, with all results in fp32."""
    model, ids = make_model("llama").train(), tokens(2, 9)

    def prepared(function):
        def forward(self, *args, **kwargs):
            with torch.autocast(device(), torch.bfloat16):
                out = function(self, *args, **kwargs)
            return type(out)(**{name: t.float() if torch.is_tensor(t) else t for name, t in out.items()})

        return forward

    with only_loss("llama", model), observed() as calls:
        ours = model.forward
        model.forward = types.MethodType(prepared(ours.__func__), model)
        out = model(ids, labels=ids, use_cache=False)
        assert isinstance(out.logits, LateLogits) and not out.logits.is_whole and out.logits.dtype is torch.float32
        out.loss.backward()
        model.forward = ours
    assert losses_of(calls) == {FUSED}


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_distributed_data_parallel(options, tmp_path, computed):
    """Which looks for the tensors in what the forward gives."""
    torch.distributed.init_process_group(
        "nccl" if HAS_GPU else "gloo", f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model, ids = make_model("llama").train(), tokens(2, 9)
        expected = loss_and_gradients(model)
        with only_loss("llama", model):
            parallel = nn.parallel.DistributedDataParallel(model, **options)
            for _ in range(2):
                got = loss_and_gradients(parallel)
        assert not computed and type(parallel(ids, labels=ids).loss) is torch.Tensor
        assert_same_step((got[0], {n.removeprefix("module."): g for n, g in got[1].items()}), expected)
    finally:
        torch.distributed.destroy_process_group()


def test_fully_sharded_data_parallel(tmp_path, computed):
    """Its hooks gather an output layer that is sharded by itself: that one is called."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group(
        "nccl" if HAS_GPU else "gloo", f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        for apart in (False, True):
            model = make_model("llama").train()
            expected = loss_and_gradients(model)
            mesh = torch.distributed.init_device_mesh(device(), (1,))
            with only_loss("llama", model), observed() as calls:
                for module in (model.model.layers[0], *([model.lm_head] if apart else []), model):
                    fully_shard(module, mesh=mesh)
                loss_, gradients = loss_and_gradients(model)
            assert losses_of(calls) == {WHOLE if apart else FUSED} and not computed
            assert_same_step((loss_, {n: g.full_tensor() for n, g in gradients.items()}), expected)
    finally:
        torch.distributed.destroy_process_group()


def test_models_that_are_no_causal_language_models():
    config = AutoConfig.for_model("llama", hidden_size=64, intermediate_size=96, num_hidden_layers=1, vocab_size=61)
    model = LlamaForSequenceClassification(config)
    with monkey_patch.apply(model, use_cutile=False) as report:
        [skipped] = [e for e in report.skipped if e.compute == "loss"]
        assert skipped.why == "there is no LlamaForCausalLM in it"
    # Within another module the model is found.
    wrapped = nn.Module()
    wrapped.config, wrapped.inner = config, make_model("llama").train()
    with monkey_patch.apply(wrapped, use_cutile=False, graph=False) as report, observed() as calls:
        assert {e.module for e in report.patched if e.compute == "loss"} == {"inner", "inner.loss_function"}
        wrapped.inner(tokens(2, 9), labels=tokens(2, 9))
    assert losses_of(calls) == {FUSED}


def test_two_backends_one_over_the_other():
    model = make_model("llama").train()
    first, second = only_loss("llama", model), only_loss("llama", model, use_cutile=True)
    assert len(first.patched) == 2 and [e.module for e in second.patched] == ["LlamaForCausalLM.loss_function"]
    first.revert()
    assert model.loss_function is loss.loss_function(PREFER_CUTILE)
    second.revert()
    assert "_loss_function" not in vars(model) and "forward" not in vars(model)


@pytest.mark.parametrize("model_type", ["gpt_neox", "gpt2", "cohere"])
def test_any_other_family(model_type, computed):
    """By tilegym.apply. Cohere's logits have a factor."""
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=61)
    dropout = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, hidden_dropout=0.0, attention_dropout=0.0)
    config = AutoConfig.for_model(model_type, **sizes, **dropout, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(device()).train()
    expected = loss_and_gradients(model)
    with tilegym.apply(model, use_cutile=False, graph=False), observed() as calls:
        got = loss_and_gradients(model)
    assert losses_of(calls) == {FUSED} and not computed
    assert_close(got[0], expected[0])
    for name, gradient in expected[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=0, atol=5e-4 * gradient.abs().max().item())


def test_threads_do_not_see_each_others_logits():
    """The forward runs on a twin: a call without labels that runs meanwhile, here within it, has plain logits."""
    model, ids = make_model("llama").train(), tokens(2, 9)
    with only_loss("llama", model):
        inner, original = [], model.model.forward

        def meanwhile(*args, **kwargs):
            model.model.forward = original
            inner.append(model(ids).logits)
            return original(*args, **kwargs)

        model.model.forward = meanwhile
        out = model(ids, labels=ids)
        del model.model.forward
    assert type(inner[0]) is torch.Tensor and isinstance(out.logits, LateLogits)
    assert_close(out.logits, inner[0])
    assert late_logits.is_plain(model.lm_head)

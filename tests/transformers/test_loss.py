"""The loss of patched models: the same loss and gradients from hidden states, without the logits."""

import copy
import pickle
import types

import pytest
import torch
from common import HAS_GPU
from common import device
from family_parity import make
from peak_memory import PeakMemory
from test_deepseek import V2
from test_deepseek import V3
from test_qwen3_5 import QWEN3_5
from test_qwen3_5 import QWEN3_5_MOE
from test_qwen3_5 import QWEN3_NEXT
from test_training import assert_same_step
from test_training import loss_and_gradients
from tiny_models import FAMILIES
from tiny_models import assert_close
from tiny_models import backends
from tiny_models import computes
from tiny_models import families
from tiny_models import make_model
from tiny_models import observed
from tiny_models import padded
from tiny_models import tokens
from torch import nn
from transformers import AutoConfig
from transformers import AutoModelForCausalLM
from transformers import LlamaForSequenceClassification
from transformers.loss.loss_utils import ForCausalLMLoss

import tilegym
from tilegym import interpreter
from tilegym.backend import PREFER_CUTILE
from tilegym.backend import recording
from tilegym.transformers import late_logits
from tilegym.transformers import loss
from tilegym.transformers import monkey_patch
from tilegym.transformers.late_logits import LateLogits
from tilegym.transformers.patching import ALREADY_PATCHED

OWN = {family.name: family for family in (V2, V3, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT)}
FUSED, WHOLE = "fused_linear_cross_entropy", "cross_entropy"


def only_loss(family, model=None, use_cutile=False):
    """Patches the loss and nothing else."""
    off = dict.fromkeys(computes(family) - {"loss"}, False)
    return getattr(monkey_patch, f"apply_tilegym_kernel_to_{family}")(model=model, use_cutile=use_cutile, **off)


def losses_of(calls):
    return {op for op, _ in calls if op in (FUSED, WHOLE)}


@pytest.fixture
def computed(monkeypatch):
    """A list that gets an entry for late logits that are computed after all."""
    entries, original = [], LateLogits.whole

    def whole(self):
        if not self.is_whole:
            entries.append(tuple(self.shape))
        return original(self)

    monkeypatch.setattr(LateLogits, "whole", whole)
    return entries


@backends
@pytest.mark.parametrize("family", [*FAMILIES, *OWN])
def test_loss_and_gradients_without_logits(family, backend, computed):
    model = make(OWN[family]) if family in OWN else make_model(family)
    model.train()
    expected = loss_and_gradients(model)
    off = dict.fromkeys(computes(family) - {"loss", "attn"}, False)
    with monkey_patch.apply(model, backend == "cutile", use_attn=False, **off) as report, observed() as calls:
        got = loss_and_gradients(model)
        assert {e.compute for e in report.patched} == {"loss"}
    assert_same_step(got, expected, backend)
    # Gemma's logits are capped in between.
    assert calls == {(WHOLE if family == "gemma3" else FUSED, backend)} and not computed
    with observed() as calls:
        assert_same_step(loss_and_gradients(model), expected)
    assert not calls and "forward" not in vars(model) and "_loss_function" not in vars(model)


@families
def test_tied_embeddings(family):
    """Gradients of the embedding come from both of its uses."""
    model = make_model(family, tie_word_embeddings=True).train()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    expected = loss_and_gradients(model)
    with only_loss(family, model), observed() as calls:
        assert_same_step(loss_and_gradients(model), expected)
    assert len(losses_of(calls)) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "granite", "gemma3"])
@pytest.mark.parametrize("scaling", [2.0, 6.0])
def test_16_bits_are_as_exact_as_the_unpatched_model(family, dtype, scaling):
    """A factor behind the output layer, as Granite's, is in the hidden states then."""
    options = {"logits_scaling": scaling} if family == "granite" else {}
    exact = loss_and_gradients(make_model(family, **options).train())
    model = make_model(family, dtype, **options).train()

    def errors():
        found = loss_and_gradients(model)
        gradients = [((found[1][n] - e).norm() / e.norm()).item() for n, e in exact[1].items()]
        return (found[0] - exact[0]).abs().item(), sum(gradients)

    own = errors()
    with only_loss(family, model):
        got = errors()
    assert got[0] <= 1.5 * own[0] + 1e-3 and got[1] <= 1.1 * own[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, computed):
    """As a linear layer under autocast: in 16 bits, with gradients in fp32 for weights in fp32."""
    model = make_model("llama").train()
    ids = tokens(2, 9)

    def step():
        with torch.autocast(device(), dtype):
            out = model(ids, labels=ids)
        assert out.loss.dtype is torch.float32 and out.logits.dtype is dtype
        model.zero_grad()
        out.loss.backward()
        return out.loss.detach(), model.lm_head.weight.grad.clone(), out.logits

    expected = step()
    with only_loss("llama", model), observed() as calls:
        got = step()
        assert not computed
        assert_close(got[2].float(), expected[2].float())  # read outside of autocast
    assert losses_of(calls) == {FUSED}
    eps = torch.finfo(dtype).eps
    for g, e in zip(got[:2], expected[:2], strict=True):
        assert g.dtype is e.dtype
        torch.testing.assert_close(g, e, rtol=0, atol=4 * eps * e.abs().max().item())


@pytest.mark.parametrize("frozen", ["lm_head", "body", "all"])
def test_frozen_parameters(frozen):
    model = make_model("llama").train()
    for name, parameter in model.named_parameters():
        if frozen == "all" or ("lm_head" in name) == (frozen == "lm_head"):
            parameter.requires_grad_(False)
    ids = tokens(2, 9)

    def step():
        model.zero_grad()
        out = model(ids, labels=ids)
        if frozen != "all":
            out.loss.backward()
        return out, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected, gradients = step()
    with only_loss("llama", model), observed() as calls:
        got, found = step()
        assert got.logits.requires_grad == expected.logits.requires_grad == (frozen != "all")
        assert_same_step((got.loss, found), (expected.loss, gradients))
    assert losses_of(calls) == {FUSED}


class Adapter(nn.Module):
    """Around a linear layer, as PEFT's LoRA."""

    def __init__(self, base):
        super().__init__()
        self.base, self.weight = base, base.weight
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        nn.init.normal_(self.b.weight)
        self.to(base.weight.device)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("what", ["adapter", "hook", "forward"])
def test_an_output_layer_that_is_more_than_a_weight_is_called(what, before):
    """Before the model is patched, and after that."""
    model, ids = make_model("llama").train(), tokens(2, 9)

    def change():
        head = model.lm_head
        if what == "adapter":
            model.lm_head = Adapter(head)
            head.weight.requires_grad_(False)
        elif what == "hook":
            head.register_forward_hook(lambda module, args, out: 2 * out)
        else:
            head.forward = lambda x: 2 * type(head).forward(head, x)

    if before:
        torch.manual_seed(0)
        change()
    with only_loss("llama", model) as report, observed() as calls:
        if not before:
            torch.manual_seed(0)
            change()
        else:
            [skipped] = report.skipped
            assert "its logits are computed: lm_head is a " in skipped.why
        out = model(ids, labels=ids)
        out.loss.backward()
    assert type(out.logits) is torch.Tensor and losses_of(calls) == {WHOLE}
    expected = model(ids, labels=ids)
    assert_close(out.loss, expected.loss)
    assert_close(out.logits, expected.logits)


def test_a_loss_of_the_users_is_left_alone():
    model, ids, calls = make_model("llama").train(), tokens(2, 9), []

    def mine(logits, labels, **kwargs):
        calls.append(type(logits))
        return logits.mean()

    with only_loss("llama", model):
        model.loss_function = mine  # in the patch's place
        assert_close(model(ids, labels=ids).loss, model(ids).logits.mean())
        model.loss_function = loss.loss_function(None)
    with monkey_patch.apply(model, use_cutile=False):
        del model._loss_function
    model.loss_function = mine
    with monkey_patch.apply(model, use_cutile=False) as report:
        [skipped] = [e for e in report.skipped if e.compute == "loss"]
        assert "its loss is test_loss.test_a_loss_of_the_users" in skipped.why
        assert_close(model(ids, labels=ids).loss, model(ids).logits.mean())
    assert set(calls) == {torch.Tensor} and model.loss_function is mine


def test_a_loss_function_that_computes_something_else_is_refused(monkeypatch):
    def other(logits, labels, vocab_size, **kwargs):
        return 2 * ForCausalLMLoss(logits, labels, vocab_size, **kwargs)

    assert loss.computes_causal_lm_loss(ForCausalLMLoss) and not loss.computes_causal_lm_loss(other)
    monkeypatch.setattr("transformers.loss.loss_utils.ForCausalLMLoss", other)
    for model in (make_model("llama"), None):
        with monkey_patch.apply_tilegym_kernel_to_llama(model=model) as report:
            [skipped] = [e for e in report.skipped if e.compute == "loss"]
            assert "computes something else" in skipped.why


@pytest.mark.parametrize(
    "options",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"ignore_index": 5},
        {"shift_labels": True},
        {"logits_to_keep": 4},
        {"return_dict": False},
        {"attention_mask": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_a_call_may_say(options, computed):
    model, (ids, mask) = make_model("llama").train(), padded([9, 6], "right")
    labels = ids.clone()
    if "ignore_index" in options:
        labels[0, 3:6] = 5
    if "shift_labels" in options:
        options = {"shift_labels": ids.roll(-1, 1)}
    if "logits_to_keep" in options:
        labels = labels[:, -4:]
    if "attention_mask" in options:
        options, labels = {"attention_mask": mask}, labels.masked_fill(mask == 0, -100)

    def step():
        model.zero_grad()
        out = model(ids, labels=labels, **options)
        first, logits = (out[0], out[1]) if isinstance(out, tuple) else (out.loss, out.logits)
        first.backward()
        return (first.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}), logits

    expected, whole = step()
    with only_loss("llama", model), observed() as calls:
        got, late = step()
        assert not computed and isinstance(late, LateLogits)
        assert_same_step(got, expected)
        assert_close(late, whole)
    assert losses_of(calls) == {FUSED}


def test_labels_by_position_none_at_all_and_all_ignored(computed):
    model, ids = make_model("llama").train(), tokens(2, 9)
    expected = model(ids, labels=ids).loss
    with only_loss("llama", model), observed() as calls:
        assert_close(model(ids, None, None, None, None, ids).loss, expected)
        assert model(ids, labels=torch.full_like(ids, -100)).loss.isnan()
        assert losses_of(calls) == {FUSED} and not computed
        calls.clear()
        assert type(model(ids).logits) is torch.Tensor and not losses_of(calls)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation(mode, computed):
    """The loss alone needs no logits; who reads them gets them."""
    model, ids = make_model("llama").eval(), tokens(2, 9)
    expected = model(ids, labels=ids)
    with only_loss("llama", model), mode():
        out = model(ids, labels=ids)
        assert_close(out.loss, expected.loss.detach())
        assert isinstance(out.logits, LateLogits) and not computed
        assert_close(out.logits, expected.logits.detach())
        assert torch.equal(out.logits.argmax(-1), expected.logits.argmax(-1)) and len(computed) == 1


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_checkpointing(family, reentrant, computed):
    model = make_model(family).train()
    expected = loss_and_gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with only_loss(family, model), observed() as calls:
        assert_same_step(loss_and_gradients(model, use_cache=False), expected)
    assert losses_of(calls) == {FUSED} and not computed


def test_the_loss_of_routers_is_added():
    model = make_model("mixtral", router_aux_loss_coef=0.5).train()
    expected = loss_and_gradients(model, output_router_logits=True)
    assert not torch.equal(expected[0], loss_and_gradients(model)[0])
    with only_loss("mixtral", model), observed() as calls:
        assert_same_step(loss_and_gradients(model, output_router_logits=True), expected)
    assert losses_of(calls) == {FUSED}


def test_gradients_accumulate_over_batches():
    model, batches = make_model("llama").train(), (tokens(2, 9), tokens(2, 7, seed=1))

    def run():
        model.zero_grad()
        for ids in batches:
            (model(ids, labels=ids, num_items_in_batch=28).loss * 3).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    expected = run()
    with only_loss("llama", model):
        for name, gradient in run().items():
            assert_close(gradient, expected[name])


@pytest.mark.skipif(HAS_GPU, reason="counts what is allocated on a CPU")
def test_peak_memory(computed, monkeypatch):
    """The logits, these in fp32, and their gradient are never there."""
    monkeypatch.setattr(interpreter, "launch", lambda *_: None)  # kernels allocate nothing
    monkeypatch.setattr(recording, "MAX_BYTES", 0)  # no call is repeated: PyTorch would not see what that allocates
    recording.forget()
    model, ids = make_model("llama", torch.bfloat16, vocab_size=40_000).train(), tokens(2, 1024)

    def peak():
        model.zero_grad(set_to_none=False)
        with PeakMemory() as memory:
            model(ids, labels=ids, use_cache=False).loss.backward()
        return memory.peak

    peak()
    before, logits = peak(), 2 * ids.numel() * 40_000
    with only_loss("llama", model, use_cutile=True):
        after = peak()
    assert before > 5 * logits and after < logits / 2 and not computed


@pytest.mark.parametrize("in_class", [False, True])
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
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
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

    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
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

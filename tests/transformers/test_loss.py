"""The loss of patched models: the same loss and gradients from hidden states, without the logits."""

import pytest
import torch
from common import HAS_GPU
from common import device
from common import gpu
from family_parity import make
from late_loss import FUSED
from late_loss import WHOLE
from late_loss import count_whole
from late_loss import losses_of
from late_loss import only_loss
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
from transformers import LlamaForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss

from tilegym import interpreter
from tilegym.backend import recording
from tilegym.ops.cutile import linear_cross_entropy_plan
from tilegym.transformers import loss
from tilegym.transformers import monkey_patch
from tilegym.transformers.late_logits import LateLogits

OWN = {family.name: family for family in (V2, V3, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT)}


@pytest.fixture
def computed(monkeypatch):
    return count_whole(monkeypatch)


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


@pytest.mark.skipif(HAS_GPU, reason="on a GPU the test above runs the kernels themselves")
@pytest.mark.parametrize("family", ["llama", "granite"])
def test_kernels_in_the_interpreter(family, monkeypatch, computed):
    monkeypatch.setenv("DISABLE_FALLBACK", "1")
    model = make_model(family).train()
    expected = loss_and_gradients(model)
    with only_loss(family, model, use_cutile=True), observed() as calls:
        assert_same_step(loss_and_gradients(model), expected)
    assert calls == {(FUSED, "cutile")} and not computed


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


@pytest.mark.parametrize("what", ["meta", "float64", "functorch"])
def test_tensors_for_which_logits_are_computed(what):
    """Of no memory, of a dtype that the kernels have not, and of functorch's, which have another graph."""
    model, ids = make_model("llama").train(), tokens(2, 9)
    if what == "meta":
        model, ids = model.to("meta"), ids.to("meta")
    elif what == "float64":
        model = model.to(torch.float64)

    def step(weight):
        return torch.func.functional_call(model, {"lm_head.weight": weight}, (ids,), {"labels": ids}).loss

    def run():
        if what == "functorch":
            return torch.func.grad(step)(model.lm_head.weight.detach())
        return model(ids, labels=ids).loss

    expected = run()
    with only_loss("llama", model), observed() as calls:
        got = run()
    assert losses_of(calls) == {WHOLE} and got.device == expected.device
    if what != "meta":
        assert_close(got, expected.to(got.dtype))


def test_weights_that_a_call_brings(computed):
    model, ids = make_model("llama").train(), tokens(2, 9)
    weight = torch.nn.Parameter(2 * model.lm_head.weight.detach())
    call = (model, {"lm_head.weight": weight}, (ids,), {"labels": ids})
    expected = torch.func.functional_call(*call)
    [gradient] = torch.autograd.grad(expected.loss, weight)
    with only_loss("llama", model), observed() as calls:
        got = torch.func.functional_call(*call)
        assert_close(got.loss, expected.loss)
        assert_close(torch.autograd.grad(got.loss, weight)[0], gradient)
        assert losses_of(calls) == {FUSED} and not computed
        assert_close(got.logits, expected.logits)


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


def test_a_forward_of_the_users_is_left_alone():
    """It may do what a forward on a twin of the model does not: keep something in the model."""

    class Mine(LlamaForCausalLM):
        def forward(self, ids, labels=None):
            out = super().forward(ids, labels=labels)
            self.kept = out.loss
            return out

    model, ids = Mine(make_model("llama").config).to(device()).train(), tokens(2, 9)
    with only_loss("llama", model) as report, observed() as calls:
        [skipped] = report.skipped
        assert skipped.module == "Mine" and "Mine, not a LlamaForCausalLM" in skipped.why
        out = model(ids, labels=ids)
        assert model.kept is out.loss and type(out.logits) is torch.Tensor and losses_of(calls) == {WHOLE}
    assert_close(out.loss, model(ids, labels=ids).loss)


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
def test_what_a_call_may_say(options, computed, no_run_ahead):
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
    monkeypatch.setattr(linear_cross_entropy_plan, "SLICE_ELEMENTS", 2**22)  # a small buffer for small logits
    recording.forget()
    model, ids = make_model("llama", torch.bfloat16, vocab_size=20_000).train(), tokens(2, 768)

    def peak():
        model.zero_grad(set_to_none=False)
        with PeakMemory() as memory:
            model(ids, labels=ids, use_cache=False).loss.backward()
        return memory.peak

    peak()
    before, logits = peak(), 2 * ids.numel() * 20_000
    with only_loss("llama", model, use_cutile=True):
        after = peak()
    assert before > 5 * logits and after < logits / 2 and not computed


@gpu
def test_peak_memory_on_a_gpu():
    model, ids = make_model("llama", torch.bfloat16, vocab_size=128_256).train(), tokens(2, 2048)

    def peak():
        model.zero_grad(set_to_none=False)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return torch.cuda.max_memory_allocated() - before

    peak()
    before, logits = peak(), 2 * ids.numel() * 128_256
    with only_loss("llama", model, use_cutile=True):
        peak()
        after = peak()
    assert before > 5 * logits and after < logits / 4

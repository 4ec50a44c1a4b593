"""``tilegym.apply``: any family, in memory, quickly, and back."""

import contextlib
import copy
import functools
import pickle
import time

import pytest
import torch
import transformers
from common import some
from integrate_models import Unseen
from integrate_models import UnseenConfig
from integration import small

import tilegym
from tilegym.backend import observe_calls
from tilegym.errors import ModelError
from tilegym.errors import PatchError
from tilegym.errors import UnsupportedError
from tilegym.integrate import recipes
from tilegym.integrate.inputs import example
from tilegym.integrate.inputs import takes_steps
from tilegym.integrate.plan import make_plan
from tilegym.integrate.small_model import small_model
from tilegym.transformers import decode_graph
from tilegym.transformers.decode_graph import eager_steps
from tilegym.transformers.general import Place
from tilegym.transformers.general import put
from tilegym.transformers.general import resolve
from tilegym.transformers.general_kernels import kernel

FAMILIES = [
    "stablelm", "cohere", "phi", "starcoder2", "olmo", "gpt_neox", "glm4", "mixtral", "qwen3_5_text", "deepseek_v2",
    "gemma4_text",  # norms of one class with a weight and without
    "afmoe",  # takes a view of what attention gives
    "hy_v4",  # rotates by one function heads in the second dimension and in the third
    "qwen4_exp_text",  # rotates queries alone, and blocks of keys without a batch
]  # fmt: skip
PADDED = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])


def ids_of(model):
    return torch.tensor([[11, 12, 13, 14, 15], [9, 9, 21, 22, 23]]) % model.config.vocab_size


def answers(model):
    ids = ids_of(model)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=PADDED).logits[PADDED.bool()]
        tokens = model.generate(input_ids=ids, attention_mask=PADDED, max_new_tokens=6, do_sample=False)
    return logits, tokens


@pytest.mark.parametrize("family", some(FAMILIES, "stablelm", "gpt_neox", *FAMILIES[-7:]))
def test_logits_and_tokens_stay_and_revert(family):
    model = small(family)
    logits, tokens = answers(model)
    start = time.process_time()  # what else a busy machine does is none of it
    report = tilegym.apply(model, use_cutile=False, by_hand=False)
    assert time.process_time() - start < 5
    assert {"linear", "loss"} <= {entry.compute for entry in report.patched}
    assert "attn" in {entry.compute for entry in report.patched} or family in ("hy_v4", "qwen4_exp_text")
    patched_logits, patched_tokens = answers(model)
    torch.testing.assert_close(patched_logits, logits, rtol=1e-4, atol=1e-5 * logits.abs().max().item())
    assert torch.equal(patched_tokens, tokens)
    report.revert()
    assert torch.equal(answers(model)[0], logits)
    assert not any("forward" in vars(module) for module in model.modules())


def put_hooks(model):
    """As accelerate puts them into a model that is spread over devices."""
    for module in model.modules():
        module._hf_hook, module._old_forward = object(), module.forward
        module.forward = functools.partial(lambda module, *args, **kw: module._old_forward(*args, **kw), module)


@pytest.mark.parametrize("family", ["stablelm", "gpt_neox"])
def test_under_hooks_of_accelerate(family):
    plain, model = small(family), small(family)
    logits, _ = answers(model)
    with tilegym.apply(plain, use_cutile=False, by_hand=False, graph=False) as report:
        expected = {(e.module, e.compute) for e in report.patched}
    put_hooks(model)
    with tilegym.apply(model, use_cutile=False, by_hand=False, graph=False) as report:
        # The output layer is no linear layer alone there.
        missing = expected - {(e.module, e.compute) for e in report.patched}
        assert missing == {(type(model).__name__, "loss")}
        torch.testing.assert_close(answers(model)[0], logits, rtol=1e-4, atol=1e-5 * logits.abs().max().item())
    assert torch.equal(answers(model)[0], logits)


@pytest.mark.parametrize("family", ["stablelm", "mixtral"])
def test_verified_on_the_models_own_tensors(family):
    model = small(family)
    with tilegym.apply(model, use_cutile=False, verify=True) as report:
        assert {"linear", "attn", "rope"} <= {entry.compute for entry in report.patched}


def test_a_layer_norm_with_an_offset_on_its_weight():
    model = small("nemotron")
    logits, _ = answers(model)
    with tilegym.apply(model, use_cutile=False, verify=True) as report:
        norms = [entry.module for entry in report.patched if entry.compute == "layer_norm"]
        assert len(norms) == 2 * model.config.num_hidden_layers + 1
        torch.testing.assert_close(answers(model)[0], logits, rtol=1e-4, atol=1e-5 * logits.abs().max().item())
    place = make_plan(model, look_up=False).computes["layer_norm"][0].candidates[0].place
    plain = Place(place.of, place.kernel, {**place.options, "offset": 0.0})
    with pytest.raises(PatchError, match="does not compute layer_norm"):
        put(model, "layer_norm", (plain,))


def test_arguments_that_a_function_swallows_and_the_op_has_not():
    """Those that are for others are left out; one that may change the result sends the call to the function."""
    name = "transformers.models.qwen3_next.modeling_qwen3_next.causal_conv1d_fn"
    x, weight = torch.randn(1, 4, 7), torch.randn(4, 3)
    expected = resolve(name)(x, weight, None, "silu")
    function, called = kernel("causal_conv1d_fn", (("original", name),), "pytorch"), []
    with observe_calls(lambda op, backend: called.append(op) or contextlib.nullcontext()):
        got = function(x, weight=weight, activation="silu", position_embeddings=(x, x), use_cache=True)
        torch.testing.assert_close(got, expected)
        assert called == ["causal_conv1d_fn"]
        rows = torch.zeros(1, 7, dtype=torch.int32)
        assert torch.equal(function(x, weight=weight, activation="silu", seq_idx_of_another=rows), expected)
        assert called == ["causal_conv1d_fn"]
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight=weight, activation="silu", use_cache=True), expected)
    with pytest.raises(UnsupportedError, match="seq_idx_of_another"):
        kernel("causal_conv1d_fn", (), "pytorch")(x, weight=weight, seq_idx_of_another=rows)


@pytest.mark.parametrize("family", ["exaone4", "opt", "whisper"])
def test_replayed_steps_give_the_same_tokens(family):
    """Positions from the model's own rule: windows, positions by the mask, and none that generate gives (Whisper)."""
    model = small(family)
    ids = example(model)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
    expected = model.generate(ids, **options)
    with tilegym.apply(model, use_cutile=False) as report, eager_steps("cpu"):
        assert "graph" in {entry.compute for entry in report.patched}
        assert torch.equal(model.generate(ids, **options), expected)
    with tilegym.apply(model, use_cutile=False, graph=False) as report:
        assert "graph" not in {entry.compute for entry in report.patched + report.skipped}


@pytest.mark.parametrize(
    "wrong, why",
    [
        (lambda model, *args, **kwargs: 0 * type(model).generate(model, *args, **kwargs), "generates other tokens"),
        (lambda model, *args, **kwargs: model.no_such_thing, "fails: AttributeError"),
    ],
)
def test_steps_are_not_replayed_where_a_small_model_does_not_bear_it(wrong, why, monkeypatch):
    monkeypatch.setattr(decode_graph, "generate", wrong)
    model = small("stablelm")
    with tilegym.apply(model, use_cutile=False) as report:
        (left,) = (entry for entry in report.skipped if entry.compute == "graph")
        assert why in left.why and "generate" not in vars(model)


def test_steps_of_a_model_that_does_not_generate_by_itself(monkeypatch):
    def generate(*args, **kwargs):
        raise ValueError("speech comes in several streams")

    model = small("stablelm")
    monkeypatch.setattr(transformers.GenerationMixin, "generate", generate)
    with tilegym.apply(model, use_cutile=False) as report:
        (left,) = (entry for entry in report.skipped if entry.compute == "graph")
        assert "does not generate: ValueError: speech comes in several streams" in left.why


@pytest.mark.parametrize("family, why", [("bigbird_pegasus", "gives something else"), ("deepseek_v4", "model fails")])
def test_attention_is_left_where_the_model_does_more_with_the_mask(family, why):
    model = small(family)
    logits, _ = answers(model)
    with tilegym.apply(model, use_cutile=False) as report:
        assert [entry.why for entry in report.skipped if why in entry.why]
        assert "attn" not in {entry.compute for entry in report.patched}
        torch.testing.assert_close(answers(model)[0], logits, rtol=1e-4, atol=1e-5 * logits.abs().max().item())


@pytest.mark.parametrize("family", ["gpt2", "stablelm"])
def test_a_static_cache_whose_masks_generate_makes(family):
    """GPT-2's own forward looks at the mask, too."""
    model = small(family)
    ids = ids_of(model)
    options = dict(max_new_tokens=6, do_sample=False, cache_implementation="static", disable_compile=True)
    expected = model.generate(ids, attention_mask=PADDED, **options)
    with tilegym.apply(model, use_cutile=False, by_hand=False) as report:
        assert "attn" in {entry.compute for entry in report.patched}
        assert torch.equal(model.generate(ids, attention_mask=PADDED, **options), expected)


@pytest.mark.parametrize("use_cutile", [False, True])
def test_steps_that_want_the_whole_text(use_cutile, monkeypatch):
    """CPM-Ant cuts off by itself what its cache holds."""
    monkeypatch.setenv("TILEGYM_DISABLE_AUTOTUNE", "1")
    sizes = dict(hidden_size=64, num_attention_heads=4, dim_head=16, dim_ff=96, num_hidden_layers=2)
    config = transformers.CpmAntConfig(vocab_size=61, prompt_length=4, prompt_types=4, segment_types=4, **sizes)
    torch.manual_seed(0)
    model = transformers.CpmAntForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    assert not takes_steps(small_model(config).model, ids_of(model))
    assert takes_steps(small("stablelm"), ids_of(model))

    @torch.no_grad()
    def answers():
        ids = ids_of(model) * PADDED  # of 0 is padding
        logits = model(ids, use_cache=False).logits[PADDED.bool()]
        return logits, model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)

    logits, tokens = answers()
    with tilegym.apply(model, use_cutile=use_cutile) as report:
        assert {entry.compute for entry in report.patched} == {"geglu", "linear", "rms_norm"}
        patched = answers()
    torch.testing.assert_close(patched[0], logits, rtol=1e-4, atol=1e-5 * logits.abs().max().item())
    assert torch.equal(patched[1], tokens) and torch.equal(answers()[0], logits)


def test_gradients_are_those_of_the_model():
    model = small("stablelm")
    ids = ids_of(model)

    def gradients():
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    with tilegym.apply(model, use_cutile=False):
        got = gradients()
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=1e-5 * gradient.abs().max().item() + 1e-9)


@pytest.mark.parametrize("family", some(["stablelm", "zaya", "hy_v4"], "stablelm", "hy_v4"))
def test_under_autocast(family):
    """Of the last two queries come out of a product, in bf16, and keys out of a norm, in fp32."""
    model = small(family)

    def logits(enabled=True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled):
            return model(ids_of(model)).logits.float()

    exact, expected = logits(False), logits()
    with tilegym.apply(model, use_cutile=False) as report:
        assert "rope" in {entry.compute for entry in report.patched}
        assert (logits() - exact).abs().mean() <= 2 * (expected - exact).abs().mean()


def test_dropout_within_an_mlp_is_kept():
    """Of functions with a rate of the module's, and by the names of a model without dropout in one that has it."""
    model = small("seed_oss")
    ids, dropout = ids_of(model), model.model.layers[0].mlp.residual_dropout
    model.config.attention_dropout = 0.0
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0

    def loss():
        torch.manual_seed(0)
        return model.train()(input_ids=ids, labels=ids).loss

    expected = loss()
    assert dropout and not torch.equal(expected, model.eval()(input_ids=ids, labels=ids).loss)
    with tilegym.apply(model, use_cutile=False) as report:
        assert {"linear", "rms_norm"} <= {entry.compute for entry in report.patched}
        torch.testing.assert_close(loss(), expected)
        assert "its dropout in training stands between the parts" in {entry.why for entry in report.skipped}
    model.config.residual_dropout = 0.0
    place = make_plan(model, look_up=False).computes["swiglu"][0].candidates[0].place
    with pytest.raises(PatchError, match="its dropout in training"):
        put(model, "swiglu", (place,))
    model.model.layers[0].mlp.residual_dropout = 0.0
    random = torch.get_rng_state()
    assert len(put(model, "swiglu", (place,)).patched) == 1
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("count", [None, 13, torch.tensor(13)], ids=["own", "number", "tensor"])
def test_losses_of_batches_that_make_up_one_step(count):
    """What trainers give, the tokens of all batches of a step, divides the loss, not the tokens of this batch."""
    model = small("stablelm")
    ids = ids_of(model)
    labels = ids.masked_fill(PADDED == 0, -100)

    def step():
        model.zero_grad()
        loss = model(ids, labels=labels, num_items_in_batch=count).loss
        loss.backward()
        return loss.detach(), model.lm_head.weight.grad

    expected = step()
    with tilegym.apply(model, use_cutile=False, by_hand=False) as report:
        assert "loss" in {entry.compute for entry in report.patched}
        torch.testing.assert_close(step(), expected)


def test_a_wrong_kernel_is_left_out_before_and_after_it_is_put_in(monkeypatch):
    model = small("stablelm")
    good = recipes._WAYS["layer_norm"]

    def wrong(requirement, of):
        (op, place), *_ = good(requirement, of)
        return [(op, Place(place.of, place.kernel, {**place.options, "eps": 0.3}))]

    monkeypatch.setitem(recipes._WAYS, "layer_norm", wrong)
    with tilegym.apply(model, use_cutile=False) as report:
        assert "layer_norm" not in {entry.compute for entry in report.patched}
        assert any("it does not compute layer_norm" in entry.why for entry in report.skipped)
    # The first candidate is wrong, the second right.
    monkeypatch.setitem(recipes._WAYS, "layer_norm", lambda r, m: wrong(r, m) + good(r, m))
    with tilegym.apply(model, use_cutile=False, verify=True) as report:
        assert "layer_norm" in {entry.compute for entry in report.patched}
        assert any("off by" in entry.why for entry in report.skipped)


def test_another_model_of_the_family_with_other_numbers_is_not_changed_silently():
    """The names and numbers of one model's patch, put into one with another eps."""
    model, other = small("olmo"), small("olmo")
    item = make_plan(model, look_up=False).computes["layer_norm"][0]
    place = item.candidates[0].place
    place = Place(place.of, place.kernel, {**place.options, "eps": 0.1})
    with pytest.raises(PatchError, match="does not compute layer_norm"):
        put(other, "layer_norm", (place,))


def test_a_model_of_ones_own():
    torch.manual_seed(0)
    model = Unseen(UnseenConfig(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2)).eval()
    ids = ids_of(model)
    with torch.no_grad():
        expected = model(ids).logits
        with tilegym.apply(model, use_cutile=False) as report:
            got = model(ids).logits
    assert {"rms_norm", "rope", "attn", "linear"} <= {entry.compute for entry in report.patched}
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "stablelm"])
def test_models_without_memory_are_patched_all_the_same(family):
    model = small(family)
    with tilegym.apply(model, use_cutile=False, graph=False) as report:
        expected = {(entry.module, entry.compute) for entry in report.patched}
    with torch.device("meta"):
        laid_out = type(model)(model.config)
        with tilegym.apply(laid_out, use_cutile=False, graph=False) as report:
            assert {(entry.module, entry.compute) for entry in report.patched} == expected


@pytest.mark.parametrize("family", ["llama", "stablelm", "gpt2"])
def test_one_call_for_all_models(family):
    """What a model has not need not be left out."""
    left = dict.fromkeys(("use_attn", "rope", "layer_norm", "moe", "layout", "graph", "geglu"), False)
    with tilegym.apply(small(family), use_cutile=False, **left) as report:
        assert "linear" in {entry.compute for entry in report.patched}
        assert not {*left, "attn"} & {entry.compute for entry in report.patched}
    with tilegym.apply(small(family), use_cutile=False, attn=False) as report:
        assert "attn" not in {entry.compute for entry in report.patched}
    for kind in (PatchError, TypeError):  # by either
        with pytest.raises(kind, match="no family has roppe; flags are attn, .*graph, .*layer_norm, .*use_attn"):
            tilegym.apply(small(family), use_cutile=False, roppe=False)


def test_flags_leave_computes_out():
    model = small("stablelm")
    with tilegym.apply(model, use_cutile=False, rope=False) as report:
        assert "rope" not in {entry.compute for entry in report.patched}
    with pytest.raises(PatchError, match="no compute 'moe'"):
        tilegym.apply(model, use_cutile=False, moe=True)


@pytest.mark.parametrize("family", ["stablelm", "mamba"])  # a forward of the latter calls two functions
def test_twice_changes_nothing_and_revert_reaches_all(family):
    model = small(family)
    first = tilegym.apply(model, use_cutile=False)
    second = tilegym.apply(model, use_cutile=False)
    assert first.patched and not second.patched
    tilegym.revert(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_copies_and_pickles_keep_their_kernels():
    model = small("stablelm")
    tilegym.apply(model, use_cutile=False)
    logits = answers(model)[0]
    for double in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "forward" in vars(double.model.layers[0].mlp)
        assert torch.equal(answers(double)[0], logits)


def test_families_by_hand_keep_their_patch():
    model = small("llama")
    with tilegym.apply(model, use_cutile=False) as report:
        assert report.maker == "tilegym.transformers.monkey_patch"
    with tilegym.apply(model, use_cutile=False, verify=True) as report:
        assert report.maker == "tilegym.integrate.apply"


def test_what_is_no_model_of_transformers_is_refused():
    with pytest.raises(ModelError, match="config.model_type"):
        tilegym.apply(torch.nn.Linear(2, 2))
    with pytest.raises(ModelError, match="OptimizedModule is no model class of transformers: give the model in it"):
        tilegym.apply(torch.compile(small("stablelm")), use_cutile=False)

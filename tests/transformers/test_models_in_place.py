"""Training patched models with set_gradients_in_place: the same gradients, bit for bit, in less memory."""

import pytest
import torch
from common import HAS_GPU
from common import device
from common import some
from family_parity import make
from peak_memory import PeakMemory
from test_deepseek import V2
from test_deepseek import V3
from test_qwen3_5 import QWEN3_5
from tiny_models import FAMILIES
from tiny_models import assert_close
from tiny_models import make_model
from tiny_models import padded
from tiny_models import tokens
from transformers import AutoConfig
from transformers import AutoModelForCausalLM

import tilegym
from tilegym import interpreter
from tilegym.backend import in_place
from tilegym.backend import recording
from tilegym.transformers import monkey_patch

OWN = {family.name: family for family in (V2, V3, QWEN3_5)}
QUICK = {("deepseek_v2", torch.float32), ("gemma3", torch.bfloat16)}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def patched(family, dtype, **options):
    model = make(OWN[family], dtype, **options) if family in OWN else make_model(family, dtype, **options)
    monkey_patch.apply(model, use_cutile=True)
    return model.train()


def step(model, ids, mask=None, **options):
    """The forward pass's results, and every parameter's gradient."""
    model.zero_grad()
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    out = model(ids, attention_mask=mask, labels=labels, use_cache=False, **options)
    found = {"loss": out.loss.detach(), "logits": out.logits.detach().clone()}
    found |= {f"hidden states {i}": t.detach().clone() for i, t in enumerate(out.hidden_states or ())}
    out.loss.backward()
    return found | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(got, expected, again=None):
    """Bit for bit; where a second run, ``again``, differs from the first itself, up to rounding."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if again is not None and not torch.equal(again[name], value):
            assert_close(got[name], value, "cutile")
            continue
        torch.testing.assert_close(got[name], value, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")


@pytest.fixture
def written(monkeypatch):
    """The shapes of what is overwritten."""
    shapes, original = [], in_place.overwritten
    monkeypatch.setattr(in_place, "overwritten", lambda *ts: shapes.extend(t.shape for t in ts) or original(*ts))
    return shapes


@pytest.mark.filterwarnings("ignore::tilegym.errors.FallbackWarning")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=() if (family, dtype) in QUICK else pytest.mark.slow)
        for dtype, families in (
            (torch.float32, (*FAMILIES, *OWN)),
            (torch.bfloat16, ("llama", "gemma3", "qwen3", "phi3", "deepseek_v2")),
        )
        for family in families
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_the_same_step(family, dtype, written):
    model, (ids, mask) = patched(family, dtype), padded([7, 5], "right")
    with tilegym.set_gradients_in_place(False):
        expected = step(model, ids, mask, output_hidden_states=True)
        again = step(model, ids, mask, output_hidden_states=True) if HAS_GPU else None
    assert not written
    with tilegym.set_gradients_in_place(True):
        got = step(model, ids, mask, output_hidden_states=True)
    assert written
    assert_equal(got, expected, again)


@pytest.mark.parametrize("family", some(["llama", "gemma3", "qwen3"], "qwen3"))
def test_what_is_overwritten_unless_set(family, written, no_run_ahead):
    """Gate and up, which nothing but the graph holds, unless a hook does."""
    model, ids = patched(family, torch.float32), tokens(2, 8)
    with tilegym.set_gradients_in_place(False):
        expected = step(model, ids)
    assert not written
    assert_equal(step(model, ids), expected)
    assert written == [(2, 8, model.config.intermediate_size)] * 4
    kept = []
    model.model.layers[1].mlp.gate_proj.register_forward_hook(lambda *args: kept.append(args[-1]))
    assert_equal(step(model, ids), expected)
    assert len(written) == 6 and len(kept) == 1


@pytest.mark.parametrize("family", some(["llama", "gemma3", "qwen3"], "qwen3"))
def test_what_is_overwritten(family, written, no_run_ahead):
    """In two layers: gate and up, q and k, and what goes into norms but for embeddings that are left alone."""
    model, ids = patched(family, torch.float32), tokens(2, 8)
    config = model.config
    with tilegym.set_gradients_in_place(True):
        step(model, ids)
    assert written.count((2, 8, config.intermediate_size)) == 4
    for heads in (config.num_attention_heads, config.num_key_value_heads):
        assert written.count((2, heads, 8, config.head_dim)) >= 2
    assert written.count((2, 8, config.hidden_size)) >= 4


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("reentrant", [False, True])
@DTYPES
@pytest.mark.parametrize("family", some(["llama", "gemma3", "qwen3"], "llama", "gemma3"))
def test_checkpointing(family, dtype, reentrant, written):
    model, (ids, mask) = patched(family, dtype), padded([7, 5], "right")
    with tilegym.set_gradients_in_place(False):
        expected = step(model, ids, mask)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        checkpointed = step(model, ids, mask)
    # On a GPU passes without gradients, as the first ones are in reentrant checkpointing, may be of other kernels.
    if HAS_GPU:
        for name, value in expected.items():
            assert_close(checkpointed[name], value, "cutile")
    else:
        assert_equal(checkpointed, expected)
    with tilegym.set_gradients_in_place(False):
        again = step(model, ids, mask) if HAS_GPU else None
    assert not written
    with tilegym.set_gradients_in_place(True):
        got = step(model, ids, mask)
    assert_equal(got, checkpointed, again)
    assert written.count((2, 7, model.config.intermediate_size)) == 4


def test_a_family_without_a_patch_of_its_own(written):
    """GPT-NeoX: two norms read each layer's input; the first backward pass leaves it to the other. And the loss,
    for which there are logits where a hook wants to see them."""
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=61)
    config = AutoConfig.for_model("gpt_neox", **sizes, hidden_dropout=0.0, attention_dropout=0.0)
    torch.manual_seed(0)
    model, ids = AutoModelForCausalLM.from_config(config).to(device()).train(), tokens(2, 8)
    model.lm_head.register_forward_hook(lambda *_: None)
    with tilegym.apply(model, graph=False), tilegym.use_backend("cutile"):
        expected = step(model, ids)
        with tilegym.set_gradients_in_place(True):
            got = step(model, ids)
    assert_equal(got, expected)
    # Each layer's input once, what the last norm reads, and the logits.
    assert written.count((2, 8, 64)) == 3 and (16, 61) in written


def test_keys_in_the_cache(written):
    """A forward pass with gradients that fills a cache, and one that goes on from it."""
    model, ids = patched("llama", torch.float32), tokens(2, 8)

    def run():
        first = model(ids[:, :5], use_cache=True)
        second = model(ids[:, 5:], past_key_values=first.past_key_values, use_cache=True)
        layers = second.past_key_values.layers
        kept = [t.detach().clone() for layer in layers for t in (layer.keys, layer.values)]
        model.zero_grad()
        second.logits.square().mean().backward()
        return kept, [p.grad.clone() for p in model.parameters()]

    expected = run()
    with tilegym.set_gradients_in_place(True):
        got = run()
    assert written
    for g, e in zip([*got[0], *got[1]], [*expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(g, e, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.skipif(HAS_GPU, reason="counts what is allocated on a CPU")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3"])
def test_peak_memory(family, checkpointing, monkeypatch):
    """The MLP's backward pass takes most; in place it makes neither gate's nor up's gradient."""
    monkeypatch.setattr(interpreter, "launch", lambda *_: None)  # kernels allocate nothing
    monkeypatch.setattr(recording, "MAX_BYTES", 0)  # no call is repeated: PyTorch would not see what that allocates
    recording.forget()
    model, ids = patched(family, torch.bfloat16, intermediate_size=1024), tokens(2, 256)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    step(model, ids)
    peaks = []
    for mode in (False, None, True):
        model.zero_grad(set_to_none=False)
        with tilegym.set_gradients_in_place(mode), PeakMemory() as memory:
            model(ids, labels=ids, use_cache=False).loss.backward()
        peaks.append(memory.peak)
    size = 2 * ids.numel() * model.config.intermediate_size
    assert max(peaks[1:]) <= peaks[0] - 3 * size // 4  # then something else takes most

"""The masks of tilegym.transformers.attention against transformers' own, and attention under them against eager."""

import inspect
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from common import HAS_GPU
from common import device
from common import randn
from tiny_models import WINDOW
from tiny_models import assert_close
from tiny_models import backends
from tiny_models import default_attention
from tiny_models import families
from tiny_models import few_families
from tiny_models import make_model
from tiny_models import padded
from tiny_models import tokens
from transformers import AttentionInterface
from transformers import AttentionMaskInterface
from transformers.masking_utils import and_masks
from transformers.masking_utils import bidirectional_mask_function
from transformers.masking_utils import causal_mask_function
from transformers.masking_utils import chunked_causal_mask_function
from transformers.masking_utils import sdpa_mask
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.llama.modeling_llama import eager_attention_forward

from tilegym.errors import UnsupportedError
from tilegym.transformers import attention
from tilegym.transformers import monkey_patch
from tilegym.transformers.attention import CausalMask
from tilegym.transformers.attention import causal_mask

CAUSAL = causal_mask_function
SLIDING = sliding_window_causal_mask_function(3)


def written_out(mask, q_length, kv_length):
    if mask is None:
        mask = CausalMask((1, 1, q_length, kv_length), None, None, None)
    mask = mask.to_dense() if isinstance(mask, CausalMask) else mask
    return mask.cpu().expand(2, 1, q_length, kv_length)


def two_dimensional(length, *unmasked):
    mask = torch.zeros(2, length, dtype=torch.bool)
    for row, part in enumerate(unmasked):
        mask[row, part] = True
    return mask


CASES = {  # what transformers passes, and what kind of mask is to come of it
    "prefill": (dict(q_length=7, kv_length=7), None),
    "prefill, nothing padded": (dict(q_length=7, kv_length=7, attention_mask=torch.ones(2, 7).bool()), None),
    "left padding": (
        dict(q_length=7, kv_length=7, attention_mask=two_dimensional(7, slice(3, 7), slice(0, 7))),
        CausalMask,
    ),
    "right padding": (
        dict(q_length=7, kv_length=7, attention_mask=two_dimensional(7, slice(0, 4), slice(0, 7))),
        CausalMask,
    ),
    "holes": (
        dict(q_length=7, kv_length=7, attention_mask=two_dimensional(7, slice(0, 7, 2), slice(1, 6))),
        CausalMask,
    ),
    "decoding": (dict(q_length=1, kv_length=9, q_offset=8), None),
    "decoding, padded": (
        dict(q_length=1, kv_length=9, q_offset=8, attention_mask=two_dimensional(9, slice(4, 9), slice(0, 9))),
        CausalMask,
    ),
    "second prefill": (dict(q_length=4, kv_length=9, q_offset=5), CausalMask),
    "window": (dict(q_length=7, kv_length=7, mask_function=SLIDING, local_size=3), CausalMask),
    "window wider than the keys": (
        dict(q_length=3, kv_length=3, mask_function=SLIDING, local_size=3),
        None,
    ),
    "window, padded": (
        dict(
            q_length=7,
            kv_length=7,
            mask_function=SLIDING,
            local_size=3,
            attention_mask=two_dimensional(7, slice(2, 7), slice(0, 7)),
        ),
        CausalMask,
    ),
    "sliding cache": (
        dict(
            q_length=1,
            kv_length=3,
            q_offset=8,
            kv_offset=6,
            mask_function=SLIDING,
            local_size=3,
            attention_mask=two_dimensional(9, slice(8, 9), slice(0, 9)),
        ),
        CausalMask,
    ),
    "static cache, empty": (dict(q_length=5, kv_length=12), CausalMask),
    "static cache, empty, padded": (
        dict(q_length=5, kv_length=12, attention_mask=two_dimensional(5, slice(2, 5), slice(0, 5))),
        CausalMask,
    ),
    "static cache, decoding": (
        dict(q_length=1, kv_length=12, q_offset=torch.tensor(6), allow_is_causal_skip=False),
        CausalMask,
    ),
    "static cache, decoding, padded": (
        dict(
            q_length=1,
            kv_length=12,
            q_offset=torch.tensor(6),
            attention_mask=two_dimensional(7, slice(2, 7), slice(0, 7)),
            allow_is_causal_skip=False,
        ),
        CausalMask,
    ),
    "static cache, mask longer than what is filled": (
        dict(q_length=2, kv_length=12, q_offset=torch.tensor(6), attention_mask=torch.ones(2, 12).bool()),
        CausalMask,
    ),
    "static cache, full": (dict(q_length=1, kv_length=7, q_offset=6, allow_is_causal_skip=False), torch.Tensor),
    "no shortcut": (dict(q_length=7, kv_length=7, allow_is_causal_skip=False), torch.Tensor),
    "both directions": (dict(q_length=7, kv_length=7, mask_function=bidirectional_mask_function), torch.Tensor),
    "chunked": (
        dict(
            q_length=7,
            kv_length=7,
            mask_function=chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int)),
            local_size=3,
        ),
        torch.Tensor,
    ),
    "overlay": (
        dict(
            q_length=7,
            kv_length=7,
            mask_function=and_masks(CAUSAL, lambda b, h, q, kv: (q + kv) % 3 != 1),
            allow_is_causal_skip=False,
            use_vmap=True,
        ),
        torch.Tensor,
    ),
    "queries beyond the keys": (dict(q_length=4, kv_length=7, q_offset=5), torch.Tensor),
}


@pytest.mark.parametrize("case", CASES)
def test_the_mask_is_that_of_transformers(case):
    kwargs, kind = CASES[case]
    expected = sdpa_mask(**{"batch_size": 2, **kwargs, "allow_is_causal_skip": False})
    mask = causal_mask(batch_size=2, **kwargs)
    assert mask is None if kind is None else isinstance(mask, kind)
    got = written_out(mask, kwargs["q_length"], kwargs["kv_length"])
    assert torch.equal(got, expected.expand_as(got))


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(data=st.data())
def test_any_mask_is_that_of_transformers(data):
    """Any cache (dynamic or static, sliding or not, wherever it stands), any window, any padding."""
    q_length, past = data.draw(st.integers(1, 6), "q_length"), data.draw(st.integers(0, 9), "past")
    window = data.draw(st.none() | st.integers(1, 8), "window")
    kv_offset = data.draw(st.integers(0, past), "dropped from the cache")
    room = data.draw(st.integers(0, 4), "room left in the cache")
    kv_length = past + q_length - kv_offset + room
    mask = None
    if data.draw(st.booleans(), "padded"):
        length = data.draw(st.integers(1, past + q_length + room + 2), "length of the mask")
        mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=2 * length, max_size=2 * length))).view(
            2, length
        )
    kwargs = dict(
        batch_size=2,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=past,
        kv_offset=kv_offset,
        mask_function=CAUSAL if window is None else sliding_window_causal_mask_function(window),
        attention_mask=mask,
    )
    expected = sdpa_mask(**kwargs, allow_is_causal_skip=False)
    shortcut = data.draw(st.booleans(), "allow_is_causal_skip")
    got = written_out(causal_mask(**kwargs, allow_is_causal_skip=shortcut), q_length, kv_length)
    assert torch.equal(got, expected.expand_as(got))
    # The same where nothing may be read from the device, not even how far a static cache is filled.
    with mock.patch.object(attention, "is_tracing", return_value=True):
        offset = torch.tensor(past) if kv_offset == 0 else past
        unread = causal_mask(**{**kwargs, "q_offset": offset}, allow_is_causal_skip=shortcut)
    assert torch.equal(written_out(unread, q_length, kv_length), got)
    assert window is not None or kv_offset or (isinstance(unread, CausalMask) and unread.kv_len is not None)


@pytest.mark.parametrize("case", [case for case, (_, kind) in CASES.items() if kind is CausalMask])
@pytest.mark.parametrize("backend", ["pytorch", "cutile"])
def test_attention_under_a_mask_is_that_of_eager(case, backend, monkeypatch):
    monkeypatch.setenv("DISABLE_FALLBACK", "1")
    kwargs, _ = CASES[case]
    q_length, kv_length = kwargs["q_length"], kwargs["kv_length"]
    mask = sdpa_mask(**{"batch_size": 2, **kwargs, "allow_is_causal_skip": False}).expand(2, 1, q_length, kv_length)
    sees_something = mask.any(-1).view(2, q_length, 1, 1)
    q, k, v = randn(2, 4, q_length, 16), randn(2, 2, kv_length, 16, seed=1), randn(2, 2, kv_length, 16, seed=2)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    bias = torch.zeros(mask.shape).masked_fill(~mask, float("-inf")).to(q.device)
    expected = eager_attention_forward(module.eval(), q, k, v, bias, scaling=0.3)[0]
    attend = AttentionInterface()["tilegym" if backend == "pytorch" else "tilegym_cutile"]
    compact = causal_mask(batch_size=2, **kwargs)
    got, weights = attend(module, q, k, v, compact.to(device()).contiguous(), scaling=0.3)
    assert weights is None and got.shape == expected.shape
    assert_close(got.where(sees_something.to(got.device), 0), expected.nan_to_num(), backend)


@pytest.mark.parametrize("q_length, kv_length", [(5, 5), (1, 5), (3, 5)])
def test_attention_without_a_mask_is_that_of_sdpa(q_length, kv_length):
    """What transformers means by no mask: causal, and with more keys than queries those behind are not filled yet."""
    q, k, v = randn(1, 4, q_length, 16), randn(1, 2, kv_length, 16, seed=1), randn(1, 2, kv_length, 16, seed=2)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    expected = AttentionInterface()["sdpa"](module, q, k, v, None, scaling=0.3)[0]
    assert_close(AttentionInterface()["tilegym"](module, q, k, v, None, scaling=0.3)[0], expected)
    module.is_causal = False
    expected = AttentionInterface()["sdpa"](module, q, k, v, None, scaling=0.3)[0]
    assert_close(AttentionInterface()["tilegym"](module, q, k, v, None, scaling=0.3)[0], expected)


@families
def test_the_inner_model_alone_can_be_patched(family):
    """generate then makes masks for the attention of the outer model and hands them to the inner one."""
    model = make_model(family)
    ids, mask = padded([5, 11], "left")
    options = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, cache_implementation="static")
    batches = (ids, mask), (ids[1:], None)
    expected = [model.generate(i, attention_mask=m, disable_compile=True, **options) for i, m in batches]
    with monkey_patch.apply(model.model, use_cutile=False):
        assert model.config._attn_implementation == default_attention(family)
        for (i, m), tokens_ in zip(batches, expected, strict=True):
            assert torch.equal(model.generate(i, attention_mask=m, disable_compile=True, **options), tokens_)


def test_the_mask_function_takes_what_transformers_passes():
    assert AttentionMaskInterface()["tilegym"] is AttentionMaskInterface()["tilegym_cutile"] is causal_mask
    ours, theirs = (inspect.signature(f).parameters for f in (causal_mask, sdpa_mask))
    for name in set(ours) & set(theirs):
        assert ours[name].kind == theirs[name].kind


def test_a_mask_prints_and_moves():
    mask = CausalMask((2, 1, 1, 4), torch.ones(2, 1, 1, 4).bool(), None, 3)
    assert repr(mask) == str(mask) == "CausalMask(shape=(2, 1, 1, 4), padded=True, kv_len=False, window=3)"
    moved = mask.to("meta")
    assert moved.keys.is_meta and moved.kv_len is None and moved.window == 3 and moved.shape == mask.shape


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_decoding_does_not_wait_for_the_device():
    kwargs = CASES["static cache, decoding, padded"][0]
    kwargs = {name: v.cuda() if isinstance(v, torch.Tensor) else v for name, v in kwargs.items()}
    torch.cuda.set_sync_debug_mode("error")
    try:
        causal_mask(batch_size=2, device="cuda", **kwargs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("queries", [1, 4, 9])
def test_attention_with_weights_is_attention(queries, softcap, sinks):
    """A call that asks for the weights gets what the op gives, and they are what weights the values."""
    q, k, v = randn(2, 4, queries, 16), randn(2, 2, 9, 16), randn(2, 2, 9, 16)
    s_aux = randn(4) if sinks else None
    keys = torch.ones(2, 1, 1, 9, dtype=torch.bool, device=device())
    keys[0, ..., :3] = False
    filled = torch.tensor([8, 8], dtype=torch.int32, device=device())
    shape, attend = (2, 1, queries, 9), AttentionInterface()["tilegym"]
    for mask in (None, CausalMask(shape, keys, filled, 3), CausalMask(shape, keys, filled, None).to_dense()):
        options = dict(scaling=0.3, softcap=softcap, s_aux=s_aux, sliding_window=3)
        out, none = attend(torch.nn.Module(), q, k, v, mask, **options)
        again, weights = attend(torch.nn.Module(), q, k, v, mask, output_attentions=True, **options)
        seen = slice(None) if queries < 9 or mask is None else (slice(None), slice(4, None))  # rows that see a key
        assert none is None
        assert_close(again[seen], out[seen])
        values = v.repeat_interleave(2, 1)[:, :, : weights.shape[-1]]
        assert_close((weights @ values).transpose(1, 2)[seen], out[seen])


def test_paged_caches_are_refused():
    q = randn(1, 1, 1, 16)
    with pytest.raises(UnsupportedError, match="paged cache"):
        AttentionInterface()["tilegym"](torch.nn.Module(), q, q, q, None, cache=object())


# Whole models, without generation: what each gives the attention, and what comes out.


def run(model, ids, **inputs):
    with torch.no_grad():
        return model(ids, **inputs).logits


@families
@backends
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_gives_what_each_row_gives_alone(family, backend, side):
    model = make_model(family)
    lengths = [5, 13, 9]
    ids, mask = padded(lengths, side)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    alone = [run(model, row[valid.bool()][None])[0] for row, valid in zip(ids, mask, strict=True)]
    with monkey_patch.apply(model, use_cutile=backend == "cutile"):
        together = run(model, ids, attention_mask=mask, position_ids=positions)
    for row, valid, expected in zip(together, mask.bool(), alone, strict=True):
        assert_close(row[valid], expected, backend)


@families
@backends
def test_packed_sequences_do_not_see_each_other(family, backend):
    if family == "gpt_oss":
        pytest.skip("transformers' own does not look for packed sequences")
    model = make_model(family)
    first, second = tokens(1, 9), tokens(1, 8, seed=1)
    packed = torch.cat((first, second), 1)
    positions = torch.cat((torch.arange(9), torch.arange(8)))[None].to(packed.device)
    expected = torch.cat((run(model, first), run(model, second)), 1)
    with monkey_patch.apply(model, use_cutile=backend == "cutile"):
        assert_close(run(model, packed, position_ids=positions, use_cache=False), expected, backend)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_custom_4d_mask_is_obeyed(dtype):
    model, ids = make_model("llama"), tokens(2, 9)
    mask = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.6
    mask = (mask | torch.eye(9, dtype=torch.bool)).to(ids.device)
    if dtype.is_floating_point:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
    expected = run(model, ids, attention_mask=mask)
    with monkey_patch.apply(model, use_cutile=False):
        assert_close(run(model, ids, attention_mask=mask), expected)
        assert not torch.allclose(run(model, ids), expected, atol=1e-2)


@few_families
def test_attention_in_both_directions(family):
    eager = make_model(family, attn_implementation="eager", is_causal=False)
    model, ids = make_model(family, is_causal=False), tokens(2, 9)
    expected = run(eager, ids)
    assert (expected - run(make_model(family), ids)).abs().max() > 0.1
    with monkey_patch.apply(model, use_cutile=False):
        assert_close(run(model, ids), expected)


@families
def test_the_window_counts_the_query_itself(family):
    """A change of the token just outside the window changes nothing; of the one just inside, something."""
    sliding = dict(num_hidden_layers=1)
    if family.startswith("qwen"):
        sliding["max_window_layers"] = 0
    if family in ("gemma3", "olmo3", "gpt_oss"):
        sliding["layer_types"] = ["sliding_attention"]
    model, ids = make_model(family, **sliding), tokens(1, 12)
    if getattr(model.config, "sliding_window", None) is None:
        pytest.skip("has no window")
    with monkey_patch.apply(model, use_cutile=False):
        expected = run(model, ids)[0, -1]
        for position, same in ((11 - WINDOW, True), (12 - WINDOW, False)):
            changed = ids.clone()
            changed[0, position] = (changed[0, position] + 1) % 50 + 2
            assert torch.allclose(run(model, changed)[0, -1], expected, atol=1e-5) == same


def test_a_model_that_reads_its_mask_is_told_so():
    with pytest.raises(TypeError, match="reads its causal mask, which is not written out"):
        CausalMask((1, 1, 4, 4), None, None, None)[:, :, -1, :]

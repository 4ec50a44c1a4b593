"""The forms in which versions of transformers give the cache of continuous batching to an attention function."""

from types import SimpleNamespace

import pytest
import torch

from tilegym.ops import fmha_paged_decode
from tilegym.ops import fmha_varlen
from tilegym.transformers import paged_attention as implementation
from tilegym.transformers.paged_attention import BY_ATTENTION
from tilegym.transformers.paged_attention import BY_LAYERS

LAYER, SIZE = 3, 16  # of the cache's pages
FULL, SLIDING = "full_attention", "sliding_attention"


def heads(count, tokens):
    return torch.randn(1, count, tokens, 16)


class Cache:
    """All keys and values of the layer [1, Hkv, Tk, D], or its pages [P, S, Hkv, D]; the layer is of the group 1."""

    def __init__(self, key, value, window):
        self.key, self.value, self.window = key, value, window


class Until517(Cache):
    updates, block_size = BY_ATTENTION, SIZE

    @property
    def sliding_windows(self):
        return {LAYER: self.window or 1}

    @property
    def layer_index_to_group_indices(self):
        return {LAYER: (1, 0)}

    @property
    def key_cache(self):
        return [self.key.flatten(0, 1)]

    @property
    def value_cache(self):
        return [self.value.flatten(0, 1)]

    def update(self, key_states, value_states, layer_idx, read_index, write_index):
        assert (layer_idx, read_index, write_index) == (LAYER, "read", "write")
        return self.key[0].transpose(0, 1), self.value[0].transpose(0, 1)


class Of518(Cache):
    updates, update = BY_ATTENTION, Until517.update

    def get_cache_for_block_table(self, layer_idx):
        assert layer_idx == LAYER
        return 1, self.key, self.value


class From519(Cache):
    updates = BY_LAYERS

    def update(self, key_states, value_states, layer_idx, kwargs):
        assert (layer_idx, kwargs["read_index"], kwargs["write_index"]) == (LAYER, "read", "write")
        kind = SLIDING if self.window else FULL
        kwargs |= {name: kwargs[name][kind] for name in ("cu_seq_lens_k", "max_length_k")}
        if kwargs["block_table"] is None:
            return self.key, self.value
        kwargs |= {"block_table": kwargs["block_table"][1], "k_cache": self.key, "v_cache": self.value}
        return key_states, value_states


def call(form, monkeypatch, q, k, v, cache, window, cu_seq_lens_q, cu_seq_lens_k, longest, table=None):
    """What the attention of a layer is given by a version of transformers."""
    monkeypatch.setattr(implementation, "who_updates_the_cache", lambda: form.updates)
    lengths = {SLIDING if window else FULL: cu_seq_lens_k}
    names = ("max_length_q", "max_length_k") if form is From519 else ("max_seqlen_q", "max_seqlen_k")
    given = dict(zip(names, (longest[0], dict.fromkeys(lengths, longest[1])), strict=True))
    own = None if form is Until517 else window  # there it is the cache that knows
    out, weights = implementation.paged_attention(
        SimpleNamespace(layer_idx=LAYER), q, k, v, 0.3, own, None, None, cache, "pytorch", cu_seq_lens_q=cu_seq_lens_q,
        cu_seq_lens_k=lengths, read_index="read", write_index="write", block_table=table, **given,
    )  # fmt: skip
    assert weights is None
    return out[0]


forms = pytest.mark.parametrize("form", [Until517, Of518, From519])
windows = pytest.mark.parametrize("window", [None, 4])


@forms
@windows
def test_prompts(form, window, monkeypatch):
    q, keys, values = heads(4, 5), heads(2, 12), heads(2, 12)
    ends_q, ends_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 2, 5], [0, 8, 12]))
    got = call(form, monkeypatch, q, keys[:, :, :5], values[:, :, :5], form(keys, values, window), window, ends_q,
               ends_k, (3, 8))  # fmt: skip
    rows = (x[0].transpose(0, 1) for x in (q, keys, values))
    expected = fmha_varlen(*rows, ends_q, ends_k, 3, 8, 0.3, True, window, backend="pytorch")
    torch.testing.assert_close(got, expected)


@forms
@windows
def test_block_tables(form, window, monkeypatch):
    q, k, v = heads(4, 2), heads(2, 2), heads(2, 2)
    pages = torch.randn(2, 6, SIZE, 2, 16)
    ends = torch.tensor([0, 20, 27], dtype=torch.int32)
    table = torch.tensor([[4, 1], [3, -1]], dtype=torch.int32)
    mine, theirs = pages.clone(), pages.clone()
    tables = torch.stack((torch.zeros_like(table), table))
    one = torch.tensor([0, 1, 2], dtype=torch.int32)
    got = call(form, monkeypatch, q, k, v, form(*mine, window), window, one, ends, (1, 20), tables)
    rows = (x[0].transpose(0, 1) for x in (q, k, v))
    expected = fmha_paged_decode(*rows, *theirs, table, ends, 0.3, window, backend="pytorch")
    torch.testing.assert_close(got, expected)
    assert torch.equal(mine, theirs) and not torch.equal(mine, pages)

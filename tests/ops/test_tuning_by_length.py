"""Ops with an autotuner do not tune again for a prompt that is one token longer, nor in the next process."""

import pytest
import torch

from tilegym import ops
from tilegym.backend.cutile import autotuner as autotuner_module
from tilegym.backend.cutile.autotuner import Autotuner


class Bench:
    """Says that it is an H200 and that the last configuration is the fastest; runs nothing."""

    gpu, arch = "Fake H200", "sm_90"

    def __init__(self):
        self.tuned = []

    def ready(self):
        return True

    def compile(self, candidates):
        self.tuned.append(candidates)
        return [None] * len(candidates)

    def run(self, candidate, args):
        pass

    def time(self, candidate, args, reset, samples):
        position = [other.config for other in self.tuned[-1]].index(candidate.config)
        return [1.0 / (1 + position)] * samples


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.delenv("TILEGYM_DISABLE_AUTOTUNE", raising=False)
    monkeypatch.setenv("TILEGYM_CACHE_DIR", str(tmp_path))
    bench, tuners = Bench(), set()

    def device(self, args_fn):
        tuners.add(self)
        return bench, bench.arch

    def forget():
        for tuner in tuners:
            tuner.forget()

    monkeypatch.setattr(Autotuner, "_device", device)
    monkeypatch.setattr(autotuner_module, "launch", lambda *args: None)
    bench.forget = forget
    yield bench
    forget()


def _attention(length, **options):
    q, k, v = (torch.zeros(1, heads, length, 16, dtype=torch.bfloat16) for heads in (6, 3, 3))
    ops.fmha(q, k, v, backend="cutile", **options)


def _attention_gradients(length):
    q, k, v = (torch.zeros(1, heads, length, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (6, 3, 3))
    ops.fmha(q, k, v, backend="cutile").sum().backward()


def _latent_attention(length):
    q, k, v = (torch.zeros(1, 3, length, 16, dtype=torch.bfloat16) for _ in range(3))
    qpe, kpe = (torch.zeros(1, heads, length, 8, dtype=torch.bfloat16) for heads in (3, 1))
    ops.mla(q, k, v, qpe, kpe, True, backend="cutile")


def _batched_product(length):
    ops.bmm(*(torch.zeros(3, *shape, dtype=torch.bfloat16) for shape in ((length, 48), (48, 96))), backend="cutile")


def _linear(length):
    ops.linear(torch.zeros(1, length, 48), torch.zeros(1152, 48), backend="cutile")


CALLS = {
    "linear": _linear,
    "bmm": _batched_product,
    "fmha": _attention,
    "fmha, window": lambda length: _attention(length, window_size=100),
    "fmha, full": lambda length: _attention(length, is_causal=False),
    "fmha, backward": _attention_gradients,
    "mla": _latent_attention,
}


@pytest.mark.parametrize("length", [512, 724, 1448])
@pytest.mark.parametrize("call", CALLS)
def test_one_token_more(bench, call, length):
    CALLS[call](length)
    before = len(bench.tuned)
    assert before
    CALLS[call](length + 1)
    assert len(bench.tuned) == before
    bench.forget()
    CALLS[call](length + 1)
    assert len(bench.tuned) == before, "in the next process"
    CALLS[call](8 * length)
    assert len(bench.tuned) > before, "the test could not fail"

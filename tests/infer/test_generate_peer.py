"""``tilegym infer --peer``: what transformers itself offers for faster decoding, measured beside."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import GenerationMixin
from typer.testing import CliRunner

from tilegym.bench import generate_peer
from tilegym_command import build_app

TINY_LLAMA = str(Path(__file__).parents[2] / "examples/models/tiny-llama")
SHORT = ["--model_id", TINY_LLAMA, "--output_length", "6", "--num_runs", "2", "--warmup_runs", "0", "--peer", "compile"]
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")


@pytest.fixture(autouse=True)
def no_tuning(monkeypatch):
    monkeypatch.setenv("TILEGYM_DISABLE_AUTOTUNE", "1")


def infer(*args):
    return CliRunner().invoke(build_app("infer"), ["infer", *SHORT, *args])


def infer_json(*args):
    result = infer(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@needs_no_gpu
def test_a_static_cache_where_transformers_compiles_nothing(monkeypatch):
    """It runs last, unpatched, with a cache that is as long as what is generated."""
    caches, real = [], GenerationMixin._prepare_static_cache

    def prepare(self, *args, **kwargs):
        caches.append(type(self.model.layers[0].mlp).forward is self.model.layers[0].mlp.forward.__func__)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_prepare_static_cache", prepare)
    result = infer("--compare")
    assert result.exit_code == 0, result.output
    assert caches == [True, True]
    assert "note     --peer compile: a static cache alone, transformers compiled nothing here" in result.stdout
    assert re.search(r"unpatched +static cache +TileGym +TileGym is +vs static cache", result.stdout)
    row = re.search(r"throughput .*", result.stdout)[0]
    rates, ratios = re.findall(r"([\d.]+) tokens/sec", row), re.findall(r"([\d.]+)x as fast", row)
    assert len(rates) == 3
    for rate, ratio in zip(rates, ratios, strict=False):
        assert float(ratio) == pytest.approx(float(rates[-1]) / float(rate), rel=0.05)
    assert len(re.findall(r"^(?:unpatched|static cache|TileGym): +Average", result.stdout, re.MULTILINE)) == 3


def test_what_transformers_compiles(monkeypatch):
    """On a CPU it is made to; ``torch.compile`` does nothing here, which tests need not wait for."""
    compiled = []
    monkeypatch.setattr(GenerationMixin, "_valid_auto_compile_criteria", lambda *args: True)
    monkeypatch.setattr(torch, "compile", lambda f, **how: compiled.append(how) or f)
    summary = infer_json()
    assert len(compiled) == 1 and summary["patched"] is None
    peer = summary["peer"]
    assert (peer["name"], peer["compiled"], peer["error"]) == ("compile", True, None)
    assert peer["measurement"]["decode_tokens_per_second"] > 0
    assert not any("--peer" in notice for notice in summary["notices"])
    assert "compiled" in infer().stdout


def test_what_fails_is_told(monkeypatch):
    monkeypatch.setitem(generate_peer.PEERS, "compile", {"cache_implementation": "none such"})
    summary = infer_json("--compare")
    assert summary["peer"]["measurement"] is None and "none such" in summary["peer"]["error"]
    assert summary["comparison"]["passed"]
    assert any(n.startswith("--peer compile could not be measured: ") for n in summary["notices"])


def test_no_such_peer():
    result = infer("--peer", "liger")
    assert result.exit_code == 2
    assert result.stderr == "error: --peer 'liger' is none of compile\n"

"""In which order a run measures, and when it stops."""

import time

import pytest
import torch
from bench.benchmark_fakes import FakeTimer
from bench.benchmark_fakes import session

from tilegym.bench import schedule
from tilegym.bench import spec
from tilegym.bench.passes import Inputs
from tilegym.bench.timing import HOST_BATCHES
from tilegym.bench.timing import HOST_CALLS
from tilegym.bench.timing import HOST_SECONDS
from tilegym.bench.timing import MIN_SAMPLES
from tilegym.bench.timing import _batches

BENCHMARKS = spec.load_benchmarks(spec.default_folder())


def test_every_benchmark_has_a_place():
    assert sorted(schedule.IMPORTANCE) == sorted(BENCHMARKS)


def test_unknown_ops_come_last():
    assert schedule.by_importance(["zeta", "rms_norm", "alpha", "fmha"]) == ["fmha", "rms_norm", "alpha", "zeta"]


def test_headlines_of_all_ops_come_before_the_second_shape_of_any():
    ops = ("linear", "mla", "relu")
    tasks = [(BENCHMARKS[op], shape, ()) for op in ops for shape in BENCHMARKS[op].quick]
    ordered = schedule.in_rounds(tasks)
    assert [task[0].op for task in ordered[:5]] == ["linear", "mla", "relu", "linear", "mla"]
    assert [task[1].label for task in ordered[:3]] == [BENCHMARKS[op].quick[0].label for op in ops]
    assert sorted(map(id, ordered)) == sorted(map(id, tasks))


def test_the_clock():
    endless = schedule.Clock()
    assert not endless.limited and endless.remaining == float("inf")
    with endless.at_most(float("inf")):
        pass
    with pytest.raises(schedule.OutOfTime), endless.at_most(0.05):
        time.sleep(10)
    over = schedule.Clock(0)
    with pytest.raises(schedule.OutOfTime), over.at_most(10):
        pytest.fail("no time for anything")
    time.sleep(0.1)  # no alarm is left


def test_out_of_time_passes_what_catches_exceptions():
    assert not issubclass(schedule.OutOfTime, Exception)


@pytest.mark.parametrize("first", (1e-4, 1e-3, 0.03, 0.1, 2.0))
def test_host_batches_stay_within_their_time(first):
    batches, calls = _batches(first)
    assert MIN_SAMPLES <= batches <= HOST_BATCHES and 1 <= calls <= HOST_CALLS
    assert batches * calls * first / HOST_CALLS <= max(HOST_SECONDS, MIN_SAMPLES * first / HOST_CALLS) * 1.01


def test_every_shape_is_the_headlines_and_the_rest_of_the_sweep():
    norm = BENCHMARKS["rms_norm"]
    labels = [shape.label for shape in norm.every_shape]
    assert labels[:3] == [shape.label for shape in norm.quick]
    assert "Llama-3.1-8B, 8192 tokens" not in labels, "it is the headline 8192x4096"
    assert norm.every_shape[1].model == "Llama-3.1-8B"
    sizes = [tuple(sorted(shape.dims.items())) for shape in norm.every_shape]
    assert len(set(sizes)) == len(sizes)
    assert all(norm.is_headline(shape) for shape in norm.every_shape[:3])
    assert not any(norm.is_headline(shape) for shape in norm.every_shape[3:])


def test_shapes_of_the_models_that_were_asked_for():
    """Tokens 1, 16, 512 and 8192 of the projections, norms and experts; latents, sinks, windows, delta rule."""

    def have(op, **dims):
        return any(dims.items() <= shape.dims.items() for shape in BENCHMARKS[op].every_shape)

    for tokens in (1, 16, 512, 8192):
        for hidden in (2048, 2560, 2880, 4096, 8192):
            for op in ("rms_norm", "layer_norm", "fused_add_rms_norm"):
                assert have(op, tokens=tokens, hidden=hidden), (op, tokens, hidden)
        for n, k in ((6144, 4096), (57344, 8192), (5120, 2048), (576, 2048), (4096, 512), (4096, 2560), (5120, 2880)):
            assert have("linear", tokens=tokens, n=n, k=k), (tokens, n, k)
        for experts, inner in ((128, 768), (64, 1408), (32, 2880)):
            assert have("fused_moe", tokens=tokens, experts=experts, inner=inner)
        assert have("mla", heads=16, tokens=tokens)
        assert have("cross_entropy", tokens=tokens, vocab=128256)
    assert have("fused_moe", tokens=64, experts=32) and have("mla_decoding", heads=16, tokens=8192)
    assert have("attention_sink", tokens=8192, window=128) and have("attention_sink_decode", tokens=8192)
    assert have("gemma_attention", tokens=8192, window=1024, soft_cap=None)
    assert have("gemma_attention", window=None, soft_cap=50.0) and have("gemma_attention_decode", window=1024)
    assert have("chunk_gated_delta_rule", tokens=8192) and have("recurrent_gated_delta_rule", batch=1, tokens=1)
    assert have("fused_linear_cross_entropy", tokens=8192, hidden=4096, vocab=128256)


@pytest.mark.parametrize("op", ("attention_sink", "gemma_attention"))
def test_pairs_that_see_each_other_are_counted(op):
    count, visible = (BENCHMARKS[op].oracle.__globals__[name] for name in ("pairs", "visible"))
    for queries, keys, window in ((5, 5, None), (7, 7, 3), (1, 9, 4), (3, 20, None), (4, 9, 100)):
        assert count(queries, keys, window) == int(visible(queries, keys, window, "cpu").sum())


def test_torch_compile_stays_out_of_sweeps():
    norm = BENCHMARKS["rms_norm"]
    assert "torch.compile" in session(FakeTimer()).providers(norm, sweep=False)
    assert "torch.compile" not in session(FakeTimer()).providers(norm, sweep=True)
    only = session(FakeTimer(), only=("liger",)).providers(norm, sweep=False)
    assert list(only) == ["liger"]


def test_what_is_measured_against_a_loop_over_chunks_or_heads_is_not_compiled():
    for op in (
        "chunk_gated_delta_rule",
        "recurrent_gated_delta_rule",
        "attention_sink",
        "gemma_attention",
        "fused_moe",
    ):
        assert not any(provider.compile for provider in BENCHMARKS[op].peers.values()), op


def test_experts_as_transformers_reads_them():
    """The peer of fused_moe computes what the oracle does, in both layouts."""
    moe = BENCHMARKS["fused_moe"]
    for shape in moe.small:
        inputs = Inputs(moe, shape, "cpu", torch.float32, 0)
        torch.testing.assert_close(moe.peers["grouped_mm"].call(**inputs.values), moe.oracle(**inputs.values))

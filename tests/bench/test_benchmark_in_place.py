"""Ours under set_gradients_in_place beside ours without it: what is measured, and what the tables make of it."""

import dataclasses

import pytest
import torch
from bench.benchmark_fakes import FakeTimer
from bench.benchmark_fakes import session

from tilegym.backend import in_place
from tilegym.bench import docs
from tilegym.bench import runner
from tilegym.bench import slower_table
from tilegym.bench import spec
from tilegym.bench import warm
from tilegym.bench.merge import merge
from tilegym.bench.report import Result
from tilegym.bench.report import Run
from tilegym.bench.spec import BACKWARD
from tilegym.bench.spec import BOTH
from tilegym.bench.spec import FORWARD
from tilegym.bench.spec import IN_PLACE
from tilegym.bench.spec import OURS
from tilegym.bench.spec import PYTORCH
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Work

SHAPE = spec.shape(rows=8, columns=32)
BENCHMARKS = spec.load_benchmarks(spec.default_folder())


class Squares(torch.autograd.Function):
    """``x * x * weight``, whose gradient for x is written over x where that is allowed."""

    calls: list[tuple[bool, bool, bool, torch.Tensor]] = []
    factor = 2.0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.in_place = in_place.wanted()
        return x * x * weight

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        activation = in_place.are_activations(x)
        Squares.calls.append((bool(ctx.in_place), activation, in_place.are_activations(weight), x.clone()))
        dweight = (dy * x * x).sum(0)
        if ctx.in_place and activation and not in_place.may_run_again():
            with torch.no_grad():
                return in_place.overwritten(x.mul_(Squares.factor).mul_(weight).mul_(dy))[0], dweight
        return dy * 2 * x * weight, dweight


@pytest.fixture
def toy():
    def work(itemsize, rows, columns):
        return Work(itemsize * rows * columns, itemsize * rows * columns)

    Squares.calls = []
    return Benchmark(
        op="toy",
        inputs=lambda make, rows, columns: {"x": make(rows, columns), "weight": make(columns)},
        ours=lambda x, weight: Squares.apply(x, weight),
        oracle=lambda x, weight: x * x * weight,
        peers={"torch": Provider(lambda x, weight: x * x * weight)},
        forward=work,
        backward=work,
        differentiable=("x", "weight"),
        activations=("x",),
        host={"rows": 1, "columns": 4},
        shapes=(SHAPE,),
        quick=(SHAPE,),
        small=(SHAPE,),
    )


def measure(benchmark, shape=SHAPE, modes=spec.MODES, **options):
    found = runner.measure_shape(benchmark, shape, modes, session(FakeTimer(), **{"backend": "cutile"} | options))
    return {(result.provider, result.mode): result for result in found}


def test_activations_are_overwritten_and_restored_and_parameters_stay_leaves(toy):
    found = measure(toy)
    assert [mode for name, mode in found if name == IN_PLACE] == [BACKWARD, BOTH]
    for mode in (BACKWARD, BOTH):
        row = found[IN_PLACE, mode]
        assert (row.status, row.backend, row.note) == ("ok", "cutile", "overwrites its inputs"), row
        assert row.seconds > 0 and row.peak_bytes == 1_000_000
        assert found[OURS, mode].status == "ok" and found[OURS, mode].note == ""
    assert [name for name, mode in found if mode == BOTH] == [OURS, "torch", IN_PLACE, runner.COPY]
    assert {call[:3] for call in Squares.calls} == {(False, False, False), (True, True, False)}
    assert all(torch.equal(x, Squares.calls[0][3]) for *_, x in Squares.calls), "every call sees the same inputs"
    assert len([call for call in Squares.calls if call[0]]) > 12
    assert in_place._mode is None


def test_it_is_measured_with_the_kernels_and_gradients_only(toy):
    assert not any(name == IN_PLACE for name, _ in measure(toy, backend="pytorch"))
    assert not any(name == IN_PLACE for name, _ in measure(toy, modes=(FORWARD,)))
    assert not any(name == IN_PLACE for name, _ in measure(toy, only=(OURS,)))
    assert {name for name, _ in measure(toy, only=(IN_PLACE,))} == {IN_PLACE}
    assert IN_PLACE not in {row.provider for row in runner.measure_host(toy, session(FakeTimer(), backend="cutile"))}
    no_gpu = FakeTimer()
    no_gpu.compares = False
    assert list(session(no_gpu, backend="cutile").providers(toy, False, True)) == [OURS]
    without = dataclasses.replace(toy, activations=())
    assert not any(name == IN_PLACE for name, _ in measure(without))


def test_gradients_that_are_wrong_in_place_alone_are_wrong(toy, monkeypatch):
    monkeypatch.setattr(Squares, "factor", 2.01)
    found = measure(toy)
    assert found[IN_PLACE, BOTH].status == "WRONG" and found[IN_PLACE, BOTH].seconds is None
    assert found[OURS, BOTH].status == "ok"
    run = Run({}, {}, results=list(found.values()))
    assert {row.provider for row in run.wrong()} == {IN_PLACE}


def test_it_compiles_ahead_where_it_is_measured(toy):
    def named(modes, backend="cutile"):
        jobs = warm.jobs_of([(toy, SHAPE, modes)], (), False, backend)
        return [provider.on_activations for *_, provider, _ in jobs]

    assert named(spec.MODES) == [False, True]
    assert named((FORWARD,)) == named(spec.MODES, "pytorch") == [False]
    (provider,) = toy.in_training("cutile").values()
    with provider.context():
        warm.run_once(provider, runner.Inputs(toy, SHAPE, "cpu", torch.float32, 0), True)
    assert [call[:3] for call in Squares.calls] == [(True, True, False)]


def test_the_ops_that_write_in_place():
    declared = {op: benchmark.activations for op, benchmark in BENCHMARKS.items() if benchmark.activations}
    assert declared == {
        "swiglu": ("a", "b"),
        "silu_and_mul": ("x",),
        "geglu": ("a", "b"),
        "apply_rope_base": ("q", "k"),
        "rms_norm": ("x",),
        "layer_norm": ("x",),
        "fused_add_rms_norm": ("x", "residual"),
        "cross_entropy": ("logits",),
    }
    with pytest.raises(spec.BenchmarkError, match="must be differentiable"):
        dataclasses.replace(BENCHMARKS["rms_norm"], activations=("eps",))


SMALL = {
    "swiglu": {"tokens": 7, "intermediate": 100},
    "silu_and_mul": {"tokens": 7, "intermediate": 100},
    "geglu": {"tokens": 7, "intermediate": 100},
    "apply_rope_base": {"batch": 1, "tokens": 5, "heads": 2, "kv_heads": 1, "head_dim": 16},
    "cross_entropy": {"tokens": 7, "vocab": 100},
    "rms_norm": {"tokens": 7, "hidden": 100},
    "layer_norm": {"tokens": 7, "hidden": 100},
    "fused_add_rms_norm": {"tokens": 7, "hidden": 100},
}


@pytest.mark.parametrize("op", SMALL)
def test_kernels_write_over_their_inputs(op):
    found = measure(BENCHMARKS[op], spec.shape(**SMALL[op]), only=(OURS, IN_PLACE))
    over = runner.OVERWRITES if op != "fused_add_rms_norm" else ""  # which writes over the sum that it returned
    modes = [mode for mode in BENCHMARKS[op].modes if mode != FORWARD]
    assert BOTH in modes
    for mode in modes:
        assert found[IN_PLACE, mode].status == "ok" and found[IN_PLACE, mode].note == over
        assert found[OURS, mode].status == "ok" and not found[OURS, mode].note


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is a GPU's")
def test_memory_is_what_is_not_written_in_place():
    from tilegym.bench.timing import CudaTimer

    shape = spec.shape(tokens=512, intermediate=1024)
    on_gpu = session(CudaTimer(1e-3), torch.bfloat16, "cutile", (OURS, IN_PLACE))
    found = {(r.provider, r.mode): r for r in runner.measure_shape(BENCHMARKS["swiglu"], shape, spec.MODES, on_gpu)}
    size = 2 * 512 * 1024
    assert {key: row.peak_bytes for key, row in found.items() if key[1] != FORWARD} == {
        (OURS, BACKWARD): 2 * size,
        (OURS, BOTH): 3 * size,
        (IN_PLACE, BACKWARD): 0,
        (IN_PLACE, BOTH): size,
    }


def row(provider, seconds=None, op="swiglu", shape="4x8", mode=BOTH, status="ok", **more):
    if seconds is not None:
        more = {
            "seconds": seconds, "low": seconds, "high": seconds, "bytes_per_second": 1e12, "flops_per_second": 0.0,
            "bound": "memory", "roofline_share": 0.5, "error": 1e-3,
        } | more  # fmt: skip
    return Result(op, shape, "", {}, mode, provider, status, **more)


def page_of(*rows):
    run = Run({"gpu": "NVIDIA H200", "date": "2026-01-01"}, {"dtype": "bf16", "backend": "cutile"}, results=[*rows])
    return docs.page(merge([run]), {})


MB = 1_000_000


def test_the_page_has_it_beside_liger():
    text = page_of(
        row(OURS, 100e-6, peak_bytes=300 * MB),
        row("liger", 150e-6, peak_bytes=100 * MB),
        row(IN_PLACE, 120e-6, peak_bytes=100 * MB, note=runner.OVERWRITES),
        row(OURS, 100e-6, op="geglu", peak_bytes=300 * MB),
        row("liger", 150e-6, op="geglu", peak_bytes=100 * MB),
        row(IN_PLACE, op="geglu", status="WRONG", note="result 2: error"),
        row(OURS, 100e-6, op="rms_norm", peak_bytes=2 * MB),
        row("liger", 150e-6, op="rms_norm", peak_bytes=0),
        row(IN_PLACE, 90e-6, op="rms_norm", peak_bytes=MB),
        row(OURS, 10e-6, op="apply_rope_base", peak_bytes=MB),
        row("liger", 15e-6, op="apply_rope_base", peak_bytes=MB),
        row(IN_PLACE, 10e-6, op="apply_rope_base", peak_bytes=0),
        row(OURS, 10e-6, op="softmax"),
        row("liger", 20e-6, op="softmax"),
        row(OURS, 60e-6, mode=BACKWARD, peak_bytes=200 * MB),
        row(IN_PLACE, 50e-6, mode=BACKWARD, peak_bytes=0, note=runner.OVERWRITES),
    )
    for expected in (
        "| Op | Shape | TileGym, us | Liger, us | In place, us "
        "| TileGym's peak memory, MB | Liger's, MB | In place, MB |\n",
        "| swiglu | 4x8 | 100.0 | 150.0 (1.50x) | 120.0 (1.25x) | 300 | 100 (0.33x) | 100 (1.00x) |\n",
        "| geglu | 4x8 | 100.0 | 150.0 (1.50x) | WRONG | 300 | 100 (0.33x) | - |\n",
        "| rms_norm | 4x8 | 100.0 | 150.0 (1.50x) | 90.0 (1.67x) | 2 | 0 (0.00x) | 1 (0.00x) |\n",
        "| apply_rope_base | 4x8 | 10.0 | 15.0 (1.50x) | 10.0 (1.50x) | 1 | 1 (1.00x) | 0 |\n",
        "| softmax | 4x8 | 10.0 | 20.0 (2.00x) | - | - | - | - |\n",
        "needs over 1% more memory than Liger in 3 of 4 rows (rms_norm 1, swiglu 1, geglu 1).",
        "Of the 3 rows measured in place too, it does in 1 in place (rms_norm 1), by at most 1.0 MB, and in 2 as it "
        "comes.",
        "- tilegym in place: result 2: error (4x8).",
        "| 50.0 (0.83x) | 200 (tilegym in place 0) |",
    ):
        assert expected in text.replace("\n", " ") or expected in text, expected
    assert "overwrites its inputs" not in text
    both = text.partition("### swiglu, both")[2].partition("###")[0]
    assert "| 100.0 ± 0% |" in both and "in place" not in both, "it stands in the table against Liger"


def test_the_page_of_runs_without_it():
    rows = row(OURS, 100e-6, peak_bytes=300 * MB), row("liger", 150e-6, peak_bytes=299 * MB)
    text = page_of(*rows)
    assert "| swiglu | 4x8 | 100.0 | 150.0 (1.50x) | 300 | 299 (1.00x) |\n" in text
    assert "needs over 1% more memory than Liger in 0 of 1 rows.\n" in text and "In place, us" not in text


def test_it_is_nobodys_rival():
    """A comparison is worth more than ours in two ways, and PyTorch is compared with ours as it comes."""
    settings = {"dtype": "bf16"}
    compared = Run({"date": "2026-01-01"}, settings, results=[row(OURS, 100e-6), row("liger", 150e-6)])
    alone = Run({"date": "2026-01-02"}, settings, results=[row(OURS, 90e-6), row(IN_PLACE, 80e-6)])
    assert merge([compared, alone]).cases["swiglu", BOTH, "4x8"][0] == 1
    rows = [row(OURS, 100e-6, backend="cutile"), row(PYTORCH, 80e-6), row(IN_PLACE, 10e-6, backend="cutile")]
    (case,) = slower_table.cases(Run({}, settings, results=rows))
    assert case.goes_to_pytorch and case.kernels == 100e-6
    assert not slower_table.cases(Run({}, settings, results=[rows[0], rows[2]]))

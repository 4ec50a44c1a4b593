"""The runner: what is wrong gets no figure, what overwrites its inputs is still measured rightly."""

import dataclasses
import functools
import importlib.util
from collections.abc import Iterator

import pytest
import torch
from bench.benchmark_fakes import FakeTimer
from bench.benchmark_fakes import session

from tilegym.backend import dispatcher
from tilegym.bench import check
from tilegym.bench import runner
from tilegym.bench import spec
from tilegym.bench.passes import Inputs
from tilegym.bench.spec import Benchmark
from tilegym.bench.spec import Provider
from tilegym.bench.spec import Work
from tilegym.errors import UnsupportedError

SHAPE = spec.shape(rows=8, columns=32)


def inputs(make, rows, columns):
    return {"x": make(rows, columns), "scale": 2.0}


def formula(x, scale):
    return x * x * scale


def toy(ours=formula, **peers):
    return Benchmark(
        op="toy",
        inputs=inputs,
        ours=ours,
        oracle=formula,
        peers={"torch": Provider(formula)}
        | {name: peer if isinstance(peer, Provider) else Provider(peer) for name, peer in peers.items()},
        forward=lambda itemsize, rows, columns: Work(itemsize * rows * columns, itemsize * rows * columns),
        backward=lambda itemsize, rows, columns: Work(2 * itemsize * rows * columns, itemsize * rows * columns),
        differentiable=("x",),
        host={"rows": 1, "columns": 4},
        shapes=(SHAPE,),
        quick=(SHAPE,),
        small=(SHAPE,),
    )


def measure(benchmark, *modes, timer=None, **options):
    found = runner.measure_shape(benchmark, SHAPE, modes or spec.MODES, session(timer or FakeTimer(), **options))
    return {(result.provider, result.mode): result for result in found}


def test_figures():
    result = measure(toy())[spec.OURS, "forward"]
    assert (result.status, result.samples, result.bound) == ("ok", 6, "memory")
    assert result.seconds == pytest.approx(1.01e-5)
    assert result.low < result.seconds < result.high
    assert result.bytes_per_second == pytest.approx(2 * 4 * 8 * 32 / 1.01e-5)
    assert result.roofline_share == pytest.approx(2 * 4 * 8 * 32 / 4e12 / 1.01e-5)
    assert result.peak_bytes == 1_000_000
    assert result.dims == {"rows": 8, "columns": 32}


def test_passes_that_share_their_work():
    benchmark = Benchmark(**vars(toy()) | {"both": lambda itemsize, rows, columns: Work(itemsize * rows * columns, 0)})
    found = measure(benchmark)
    assert {mode for _, mode in found} == {"forward", "both"}
    result = found[spec.OURS, "both"]
    assert result.bytes_per_second == pytest.approx(4 * 8 * 32 / result.seconds)


def test_a_wrong_provider_gets_no_figure():
    found = measure(toy(liar=lambda x, scale: 1.01 * x * x * scale))
    for mode in spec.MODES:
        liar = found["liar", mode]
        assert liar.status == "WRONG" and "error 1.0e-02 rms" in liar.note
        assert liar.seconds is None and liar.roofline_share is None
        assert found[spec.OURS, mode].status == "ok"


def test_wrong_gradients_are_wrong():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(x)
            return formula(x, scale)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x, None

    half = lambda x, scale: Half.apply(x, scale)  # noqa: E731 - apply takes keywords from torch 2.12 on only
    found = measure(toy(half=half))
    for mode in ("backward", "both"):
        assert found["half", mode].status == "WRONG" and found["half", mode].seconds is None, str(found["half", mode])
        assert found["half", mode].note.startswith("gradient of x: error")
    assert found["half", "forward"].status == "ok" and found["half", "forward"].seconds > 0
    assert measure(toy(half=half), "forward")["half", "forward"].status == "ok"
    ours = measure(toy(ours=half))
    assert {ours[spec.OURS, mode].status for mode in spec.MODES} == {"WRONG"}


def test_another_shape_is_named():
    assert "output: shape [4, 32] instead of [8, 32]" in measure(toy(cut=lambda x, scale: x[:4]))["cut", "forward"].note


def test_a_provider_that_is_right_only_under_autograd_is_wrong():
    found = measure(toy(sly=lambda x, scale: formula(x, scale) if torch.is_grad_enabled() and x.requires_grad else x))
    assert found["sly", "forward"].status == found["sly", "both"].status == "WRONG"


def test_a_provider_whose_outputs_are_wrong_only_under_autograd_is_wrong():
    found = measure(toy(sly=lambda x, scale: formula(x, scale) + (1 if x.requires_grad else 0)))
    assert found["sly", "both"].status == "WRONG"


def test_a_peer_that_is_wrong_at_single_elements_is_timed_and_said_to_be_inexact():
    large = spec.shape(rows=256, columns=512)  # so large that one element does not show in the mean
    inputs = Inputs(toy(), large, "cpu", torch.float32, 0)
    exact = inputs.oracle(False)[0][0]
    allowed = check.Judge.of((exact,), (formula(**inputs.values),), torch.float32).allowed[0]

    def off(x, scale):
        y = formula(x, scale)
        y.view(-1)[exact.abs().argmin()] += 2.5 * allowed.largest * float(exact.square().mean().sqrt())
        return y

    def rows(benchmark):
        found = runner.measure_shape(benchmark, large, ("forward",), session(FakeTimer()))
        return {result.provider: result for result in found}

    peer = rows(toy(off=off))["off"]
    assert peer.status == "inexact" and peer.seconds > 0 and "allowed" in peer.note
    ours = rows(toy(ours=off))[spec.OURS]
    assert ours.status == "WRONG" and ours.seconds is None


def test_another_plain_peer_stands_in_for_a_baseline_that_fails():
    def fail(x, scale):
        raise RuntimeError("no such kernel")

    benchmark = toy(plain=formula)
    benchmark.peers["torch"] = Provider(fail)
    found = measure(benchmark, "forward")
    assert found["torch", "forward"].status == "failed"
    assert found[spec.OURS, "forward"].status == found["plain", "forward"].status == "ok"


def test_upstream_gradients_are_drawn_but_for_a_scalar_loss():
    inputs = Inputs(toy(), SHAPE, "cpu", torch.float32, 0)
    inputs.oracle(gradients=True)
    assert inputs.upstream[0].shape == (8, 32) and inputs.upstream[0].std() > 0.5
    loss = dataclasses.replace(toy(), oracle=lambda x, scale: formula(x, scale).sum())
    inputs = Inputs(loss, SHAPE, "cpu", torch.float32, 0)
    inputs.oracle(gradients=True)
    assert inputs.upstream[0].item() == 1.0


def test_what_took_the_time_is_noted():
    seen = session(FakeTimer())
    list(runner.measure_shape(toy(), SHAPE, ("forward",), seen))
    assert set(seen.spent) == {"inputs", "oracle", "check of tilegym", "check of torch", "timing"}


def test_failures_are_rows():
    def fail(x, scale):
        raise RuntimeError("no available\nkernel")

    found = measure(toy(fail=fail, absent=Provider(formula, requires="no_such_package_at_all")))
    assert found["fail", "forward"].status == "failed"
    assert found["fail", "forward"].note == "RuntimeError: no available kernel"
    assert found["absent", "forward"].status == "missing"
    assert importlib.util.find_spec("no_such_package_at_all") is None


def test_a_peer_whose_backward_pass_fails_keeps_its_forward_pass():
    def forward_only(x, scale, off=0.0):
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError("no gradients here")
        return formula(x, scale) + off

    found = measure(toy(peer=forward_only), "forward", "backward")
    assert found["peer", "forward"].status == "ok" and found["peer", "forward"].seconds > 0
    assert found["peer", "backward"].status == "failed" and found["peer", "backward"].seconds is None
    assert found["peer", "backward"].note == "RuntimeError: no gradients here"
    wrong = measure(toy(peer=functools.partial(forward_only, off=1.0)), "forward", "backward")
    assert {wrong["peer", mode].status for mode in ("forward", "backward")} == {"WRONG"}
    ours = measure(toy(ours=forward_only), "forward", "backward")  # whose training is checked whatever is measured
    assert {ours[spec.OURS, mode].status for mode in ("forward", "backward")} == {"failed"}


def test_without_a_baseline_nothing_is_measured():
    def out_of_memory(x, scale):
        raise torch.OutOfMemoryError("too large")

    benchmark = toy()
    benchmark.peers["torch"] = Provider(out_of_memory)
    found = measure(benchmark, "forward")
    assert list(found) == [(spec.OURS, "forward")]
    assert found[spec.OURS, "forward"].status == "failed"
    assert "nothing to check against" in found[spec.OURS, "forward"].note


def test_inputs_are_restored_for_a_provider_that_overwrites_them():
    seen = []

    def overwrite(x, scale):
        seen.append(x.detach().clone())
        with torch.no_grad():
            return x.detach().mul_(x.detach()).mul_(scale)

    found = measure(toy(overwrite=overwrite), "forward")
    assert found["overwrite", "forward"].status == "ok"
    assert found["overwrite", "forward"].note == "overwrites its inputs"
    assert len(seen) > 6 and all(torch.equal(x, seen[0]) for x in seen)
    assert found[spec.OURS, "forward"].note == ""


def test_rounds_alternate_between_providers():
    timer = FakeTimer()
    measure(toy(), "forward", timer=timer)
    assert timer.log == [0, 1, 2, 0, 1, 2], "ours, torch and the copy take turns"


def test_only_what_is_wanted():
    assert {provider for provider, _ in measure(toy(), "forward", only=("torch",))} == {"torch"}
    timer = FakeTimer()
    timer.compares = False
    assert {provider for provider, _ in measure(toy(), "forward", timer=timer)} == {spec.OURS}


def test_context_is_entered_around_calls():
    depth, calls = [], []

    class Context:
        def __enter__(self):
            depth.append(1)

        def __exit__(self, *exception):
            depth.pop()

    def call(x, scale):
        calls.append(len(depth))
        return formula(x, scale)

    measure(toy(inside=Provider(call, context=Context)))
    assert set(calls) == {1} and not depth


@pytest.fixture
def choosy() -> Iterator[Benchmark]:
    """An op whose backend "cutile" refuses calls that need gradients."""
    op = dispatcher.dispatch("choosy")(formula)

    @dispatcher.register_impl("choosy", "pytorch")
    def reference(x, scale):
        return formula(x, scale)

    @dispatcher.register_impl("choosy", "cutile")
    def kernel(x, scale):
        if x.requires_grad:
            raise UnsupportedError("no gradients here")
        return formula(x, scale)

    yield toy(ours=op)
    del dispatcher._ops["choosy"]


@pytest.mark.filterwarnings("ignore:op 'choosy'")
def test_a_call_that_another_backend_served_says_so(choosy):
    found = measure(choosy, backend="cutile")
    assert (found[spec.OURS, "forward"].backend, found[spec.OURS, "forward"].note) == ("cutile", "")
    for mode in ("backward", "both"):
        assert found[spec.OURS, mode].status == "ok"
        assert found[spec.OURS, mode].backend == "pytorch"
        assert found[spec.OURS, mode].note.startswith("served by pytorch: ")
        assert "no gradients here" in found[spec.OURS, mode].note


def test_host_time():
    found = {
        result.provider: result for result in runner.measure_host(toy(liar=lambda x, scale: x), session(FakeTimer()))
    }
    assert found[spec.OURS].seconds == found["torch"].seconds == 5e-6
    assert found["liar"].status == "WRONG" and found["liar"].seconds is None


def test_compiled_providers_start_anew(monkeypatch):
    made = []

    def compile(function, **options):
        made.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    found = measure(toy(compiled=Provider(formula, compile=True)), "forward")
    assert found["compiled", "forward"].status == "ok"
    assert made == [{"dynamic": False, "fullgraph": True}]


def test_benchmarks_that_contradict_themselves_are_refused():
    fields = vars(toy()) | {"baseline": "nobody"}
    with pytest.raises(spec.BenchmarkError, match="nobody"):
        Benchmark(**fields)
    with pytest.raises(spec.BenchmarkError, match="both differentiable and backward"):
        Benchmark(**vars(toy()) | {"backward": None})


def test_sweep_drops_equal_sizes():
    shapes = spec.sweep(lambda model, tokens: {"tokens": tokens, "hidden": model.hidden}, tokens=(1, 16))
    sizes = [tuple(shape.dims.values()) for shape in shapes]
    assert len(sizes) == len(set(sizes)) == 2 * len({model.hidden for model in spec.MODELS})
    assert shapes[0].label == "Llama-3.1-8B, 1 token" and shapes[0].tokens == 1

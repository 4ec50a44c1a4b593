"""What is made of a training job's figures, on a GPU: its summary, the terminal, the page of the documentation."""

import io
import json
import math

import pytest
import torch
from rich.console import Console

from tilegym.bench import docs
from tilegym.bench import docs_steps
from tilegym.bench import machine
from tilegym.bench import train_job
from tilegym.bench import train_terminal
from tilegym.bench.coverage import Coverage
from tilegym.bench.coverage import Entry
from tilegym.bench.gradients import Check
from tilegym.bench.gradients import ParameterCheck
from tilegym.bench.report import Result
from tilegym.bench.report import Run
from tilegym.bench.spec import OURS
from tilegym.bench.training import Measurement
from tilegym.bench.training import Memory
from tilegym.bench.training import Step


def measurement(factor: float, losses: list[float]) -> Measurement:
    steps = [Step(*(ms * factor / 1e3 for ms in (30, 60, 10 + more))) for more in (-1, 0, 1)]
    return Measurement(
        steps, losses, 8192, Memory(int(20e9 * factor), int(10e9 * factor), 2 * 10**9, 2 * 10**9, 4 * 10**9)
    )


def checked(error: float) -> Check:
    parameters = [
        ParameterCheck("model.norm.weight", 2.0, 0.04, error, 0.09),
        ParameterCheck("b", 2.0, 0.04, 0.0, 0.09),
    ]
    passed = error <= 0.09
    reason = "as exact" if passed else "the patched gradient of model.norm.weight is off"
    whole = ParameterCheck("all parameters", 10.0, 0.1, 0.05, 0.25)
    return Check(passed, reason, "criterion", "float32", 2, 1024, True, 11.0, 11.01, 11.02, whole, parameters)


def result(peer_error: float = math.inf, **options) -> train_job.Result:
    liger = measurement(0.9, [11.5, 11.0]).summary()
    return train_job.Result(
        options=train_job.Options(
            model_id="llama-3.2-1b", random_weights=True, use_tilegym=True, use_cutile=True, compare=True, **options
        ),
        device=torch.device("cpu"),
        backend="cutile",
        model={"id": "llama-3.2-1b", "type": "llama", "parameters": 10**9, "random_weights": True},
        unpatched=measurement(1.0, [11.5, 11.0]),
        patched=measurement(0.8, [11.5, 11.125]),
        coverage=Coverage("cuda", 2.0, [Entry("kernel", 3, 1.5, True), Entry("other", 3, 0.5, False)]),
        check=checked(0.06),
        peer={
            "name": "liger",
            "version": "0.8.5",
            "error": None,
            "measurement": liger,
            "gradient_check": checked(peer_error).summary(),
        },
    )


@pytest.fixture
def folder(tmp_path):
    """A run of a benchmark, so that there is a page to write."""
    more = {"low": 1e-5, "high": 1e-5, "samples": 60, "bytes_per_second": 1e12, "flops_per_second": 0.0}
    more |= {"bound": "memory", "roofline_share": 0.5, "peak_bytes": 10, "error": 1e-3, "seconds": 1e-5}
    row = Result(
        op="rms_norm",
        shape="8x8",
        model="",
        dims={},
        provider=OURS,
        mode="forward",
        status="ok",
        backend="cutile",
        **more,
    )
    run = Run(
        machine=machine.describe() | {"gpu": "NVIDIA H200"},
        settings={"quick": True, "dtype": "bf16", "backend": "cutile", "command": "tilegym bench --quick"},
        roofline={"bandwidth": 4.2e12, "rate": 7e14, "copied_bytes": 1 << 30, "gemm_size": 8192},
        results=[row],
        host=[],
        complete=True,
    )
    run.write(tmp_path)
    return tmp_path


def test_summary():
    summary = json.loads(json.dumps(result().summary(), allow_nan=False))
    assert summary["passed"] and summary["reason"] == "as exact" and summary["largest_loss_difference"] == 0.125
    assert summary["patched"]["step_ms"] == pytest.approx(80)
    assert summary["patched"]["tokens_per_second"] == pytest.approx(8192 / 0.08)
    assert summary["patched"]["memory_bytes"]["peak"] == int(16e9)
    assert summary["peer"]["gradient_check"]["parameters"][0]["patched_error"] == "inf"


def test_terminal():
    text = io.StringIO()
    train_terminal.show(result(), Console(file=text, width=120))
    lines = {" ".join(line.split()) for line in text.getvalue().splitlines()}
    for expected in (
        "unpatched TileGym liger",
        "a step 100.00 ms 80.00 ms (1.25x) 90.00 ms (1.11x)",
        "forward 30.00 ms 24.00 ms (1.25x) 27.00 ms (1.11x)",
        "throughput 81920 tokens/sec 102400 tokens/sec 91022 tokens/sec",
        "peak memory 18.63 GiB 14.90 GiB 16.76 GiB",
        "kept for the backward pass 9.31 GiB 7.45 GiB 8.38 GiB",
        "2 11.000000 11.125000 11.000000 0.12",
        "largest difference of a loss, of all steps: 0.125",
        "error of model.norm.weight: unpatched 0.02, TileGym 0.03, allowed 0.045",
        "error of model.norm.weight: unpatched 0.02, liger inf, allowed 0.045",
        "PASS: as exact",
    ):
        assert expected in lines, expected
    assert "liger 0.8.5 does not pass the same check: the patched gradient of model.norm.weight" in text.getvalue()
    assert "gradients compared for: 2 x 1024 tokens (a part of a batch" in text.getvalue()


def test_page(folder):
    (folder / "train-llama.json").write_text(json.dumps(result().summary()))
    text = docs.write([folder], folder / "page.md").read_text()
    for expected in (
        "tilegym train --model_id llama-3.2-1b --random_weights --compare",
        f"\n{docs_steps.HEADING}\n",
        "### llama-3.2-1b\n",
        "bfloat16, random weights, 4 x 2048 tokens, 10 steps, optimizer adamw",
        "|  | Unpatched | TileGym | Liger 0.8.5 |",
        "| A step, ms | 100.0 ± 0.6 | 80.0 ± 0.5 (1.25x) | 90.0 ± 0.5 (1.11x) |",
        "| Backward, ms | 60.0 | 48.0 (1.25x) | 54.0 (1.11x) |",
        "| Tokens/s | 81920 | 102400 | 91022 |",
        "| Peak memory, GB | 20.00 | 16.00 (1.25x) | 18.00 (1.11x) |",
        "| Weights, gradients and optimizer, GB | 8.00 | 8.00 (1.00x) | 8.00 (1.00x) |",
        "- Kernel coverage (GPU time): 75.0%",
        "- TileGym's gradients of 2 x 1024 tokens, a part of a step's, against float32: error of all 0.005 (unpatched "
        "0.01); nearest to what is allowed: `model.norm.weight`, 0.03 (unpatched 0.02). Passed: as exact.",
        "- Largest difference of a step's loss from the unpatched model's: 0.12",
        "- Liger's gradients of 2 x 1024 tokens",
        "`model.norm.weight`, inf (unpatched 0.02). FAILED: the patched gradient",
    ):
        assert expected in text, expected
    assert "\n\n\n" not in text


def test_a_peer_that_could_not_be_measured(folder):
    summary = result().summary()
    summary["peer"] |= {"version": None, "error": "no kernels", "measurement": None, "gradient_check": None}
    (folder / "train.json").write_text(json.dumps(summary))
    text = docs.write([folder], folder / "page.md").read_text()
    assert "|  | Unpatched | TileGym |\n" in text and "- Liger was not measured: no kernels" in text


def test_runs_stay_until_they_are_measured_again(folder):
    page, summary = folder / "page.md", folder / "train-llama.json"
    summary.write_text(json.dumps(result().summary()))
    first = docs.write([folder], page).read_text()
    summary.write_text(json.dumps(result(num_layers=4, gradients_in_place=True).summary()))
    for _ in range(2):
        both = docs.write([folder], page).read_text()
        assert both.count(docs.EARLIER) == both.count("### llama-3.2-1b\n") == 1
        assert both.count("### llama-3.2-1b, 4 layers, gradients in place\n") == 1
    assert first.partition("### llama-3.2-1b\n")[2].strip() in both
    summary.write_text(json.dumps(result(batch_size=2, optimizer="none").summary()))
    assert "### llama-3.2-1b, 2 x 2048 tokens, optimizer none\n" in docs.write([folder], page).read_text()
    alone = folder / "alone"
    alone.mkdir()
    (alone / "train.json").write_text(json.dumps(result(compile=True).summary()))
    assert "### llama-3.2-1b, compile\n" in docs.write([alone], page).read_text()
    with pytest.raises(docs.BenchmarkError, match="these runs have measured nothing"):
        docs.write([alone], folder / "no_ops.md")
    (folder / "infer.json").write_text("{")
    with pytest.raises(docs.BenchmarkError, match="infer.json cannot be read"):
        docs.write([folder], page)

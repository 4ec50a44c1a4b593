"""What a run leaves behind: JSON, CSV, pictures, tables, the page of the documentation."""

import csv
import json

import pytest

from tilegym.bench import docs
from tilegym.bench import machine
from tilegym.bench import report
from tilegym.bench.report import HostResult
from tilegym.bench.report import Result
from tilegym.bench.report import Run
from tilegym.bench.runner import COPY
from tilegym.bench.spec import OURS
from tilegym.bench.spec import BenchmarkError


def row(provider, seconds=None, mode="forward", status="ok", **more):
    fields = {"op": "rms_norm", "shape": "8192x4096", "model": "", "dims": {"tokens": 8192, "hidden": 4096}}
    if seconds is not None:
        more = {
            "seconds": seconds,
            "low": 0.98 * seconds,
            "high": 1.02 * seconds,
            "samples": 60,
            "bytes_per_second": 134217728 / seconds,
            "flops_per_second": 0.0,
            "bound": "memory",
            "roofline_share": 134217728 / 4.2e12 / seconds,
            "peak_bytes": 67_000_000,
            "error": 1.7e-3,
        } | more
    return Result(**fields, provider=provider, mode=mode, status=status, **more)


@pytest.fixture
def run():
    gpu = {"gpu": "NVIDIA H200", "device_name": "NVIDIA H200", "driver": "580.1", "compute_capability": "9.0"}
    return Run(
        machine=machine.describe() | gpu,
        settings={"quick": True, "dtype": "bf16", "backend": "cutile", "command": "tilegym bench --quick"},
        roofline={"bandwidth": 4.2e12, "rate": 7e14, "copied_bytes": 1 << 30, "gemm_size": 8192},
        results=[
            row(OURS, 40e-6, backend="cutile"),
            row("torch", 60e-6),
            row("liger", status="WRONG", note="result 0: error 1.0e-01 rms"),
            row("absent", status="missing", note="absent is not installed"),
            row(COPY, 38e-6),
            row(OURS, mode="backward", status="failed", note="RuntimeError: boom"),
            row(OURS, 2e-3, mode="both", bound="compute", flops_per_second=5.5e14, note="served by pytorch: x"),
        ],
        host=[
            HostResult("rms_norm", {"tokens": 1}, OURS, "ok", seconds=9.5e-6, low=9e-6, high=1e-5),
            HostResult("rms_norm", {"tokens": 1}, "torch", "ok", seconds=8.3e-6, low=8e-6, high=9e-6),
        ],
        complete=True,
    )


def test_written_and_read_again(run, tmp_path):
    run.write(tmp_path)
    again = Run.read(tmp_path)
    assert again == run
    assert not list(tmp_path.glob("*.part"))
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored["machine"]["gpu"] == "NVIDIA H200" and stored["machine"]["driver"] == "580.1"
    assert stored["machine"]["torch"] and stored["machine"]["cuda_tile"] and stored["machine"]["tilegym"]


def test_csv_has_every_row_with_gpu_and_versions(run, tmp_path):
    run.write(tmp_path)
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(run.results)
    assert float(rows[0]["seconds"]) == 40e-6 and rows[2]["seconds"] == ""
    assert rows[0]["gpu"] == "NVIDIA H200" and rows[0]["driver"] == "580.1" and rows[0]["torch"]
    with (tmp_path / "host.csv").open(newline="") as file:
        assert [r["provider"] for r in csv.DictReader(file)] == [OURS, "torch"]


@pytest.mark.parametrize("content", (None, "{", '{"schema": 0}'))
def test_unreadable_results_are_one_clear_error(content, tmp_path):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(BenchmarkError, match=r"results\.json"):
        Run.read(tmp_path)


def test_table(run):
    text = report.table(run)
    line = next(line for line in text.splitlines() if line.startswith("rms_norm         forward"))
    assert "40.0 ±  2%" in line and "3355 GB/s" in line and "80%" in line
    assert "torch 60.0 (1.50x)" in line and "liger WRONG" in line and "absent" not in line
    assert "550 TFLOP/s" in text
    assert "rms_norm         tilegym 9.50, torch 8.30" in text
    assert "rms_norm 8192x4096, liger WRONG: result 0: error 1.0e-01 rms" in text
    assert "rms_norm 8192x4096, tilegym failed: RuntimeError: boom" in text


def test_what_of_ours_is_not_right_makes_the_run_a_failure(run):
    assert [result.mode for result in run.wrong] == ["backward"]


def test_pictures(run, tmp_path):
    pytest.importorskip("matplotlib")
    from tilegym.bench.plots import plot

    files = plot(run, tmp_path)
    assert [path.name for path in files] == ["rms_norm_forward.png", "rms_norm_both.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)


INFERENCE = {
    "torch": "2.11.0",
    "device": "NVIDIA H200",
    "model": {"id": "llama-3.1-8b", "random_weights": True},
    "precision": "bfloat16",
    "batch_sizes": [1],
    "prompt_lengths": [512],
    "output_length": 128,
    "num_runs": 3,
    "unpatched": {
        "throughput_tokens_per_second": 55.0,
        "throughput_stdev": 0.5,
        "time_to_first_token_ms": 30.0,
        "time_per_output_token_ms": 18.0,
        "decode_tokens_per_second": 55.5,
        "peak_memory_bytes": 17e9,
    },
    "patched": {
        "throughput_tokens_per_second": 66.0,
        "throughput_stdev": 0.5,
        "time_to_first_token_ms": 25.0,
        "time_per_output_token_ms": None,
        "decode_tokens_per_second": None,
        "peak_memory_bytes": 17e9,
    },
    "kernel_coverage": {"measure": "gpu_time_in_own_kernels", "percent": 96.25},
    "comparison": {"token_agreement": 1.0, "max_logit_difference": 0.125, "passed": True, "reason": "as exact"},
}


def test_page(run, tmp_path):
    run.write(tmp_path)
    (tmp_path / "infer-llama.json").write_text(json.dumps(INFERENCE))
    text = docs.write(tmp_path, tmp_path / "page.md").read_text()
    for expected in (
        "bash tests/benchmark/run_all.sh --quick --output out/bench",
        "| GPU | NVIDIA H200 |",
        "| Driver | 580.1 |",
        "| Copy bandwidth (1024 MiB) | 4200 GB/s |",
        "### rms_norm, forward",
        "| 8192x4096 | 40.0 ± 2% | 3355 GB/s | 80% | 60.0 (1.50x) | WRONG | 38.0 (0.95x) | 67 | 1.7e-03 |",
        "- 8192x4096, liger: result 0: error 1.0e-01 rms.",
        "- 8192x4096, TileGym: served by pytorch: x.",
        "| rms_norm | 9.50 | 8.30 |",
        "### llama-3.1-8b",
        "| Throughput, tokens/s | 55.0 ± 0.5 | 66.0 ± 0.5 |",
        "| Time per output token, ms | 18.00 | - |",
        "- Kernel coverage (GPU time): 96.2%",
        "Passed: as exact.",
    ):
        assert expected in text, expected
    assert "absent" not in text and "interrupted" not in text


def test_page_of_an_interrupted_run_without_a_gpu(run, tmp_path):
    run.complete = False
    run.machine["gpu"] = None
    text = docs.page(run, [])
    assert "interrupted" in text and "say nothing about the kernels" in text

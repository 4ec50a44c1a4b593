"""What a run leaves behind: JSON, CSV, pictures, tables, the page of the documentation."""

import csv
import dataclasses
import json

import pytest

from tilegym.backend import slower
from tilegym.bench import docs
from tilegym.bench import machine
from tilegym.bench import report
from tilegym.bench import store
from tilegym.bench.merge import merge
from tilegym.bench.report import SCHEMA
from tilegym.bench.report import HostResult
from tilegym.bench.report import Result
from tilegym.bench.report import Run
from tilegym.bench.runner import COPY
from tilegym.bench.spec import OURS
from tilegym.bench.spec import PYTORCH
from tilegym.bench.spec import BenchmarkError


def row(provider, seconds=None, mode="forward", status="ok", **more):
    fields = {"op": "rms_norm", "shape": "8192x4096", "model": "", "dims": {"tokens": 8192, "hidden": 4096}}
    fields |= {key: more.pop(key) for key in ("op", "shape") if key in more}
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


@pytest.mark.parametrize("content", (None, "{", '{"schema": 0}', "[]", f'{{"schema": {SCHEMA}}}'))
def test_unreadable_results_are_one_clear_error(content, tmp_path):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(BenchmarkError, match=r"results\.json"):
        Run.read(tmp_path)


def test_table(run):
    text = report.table(run)
    line = next(line for line in text.splitlines() if line.startswith("rms_norm forward"))
    assert "40.0 ±  2%" in line and "3355 GB/s" in line and "80%" in line
    assert "torch 60.0 (1.50x)" in line and "liger WRONG" in line and "absent" not in line
    assert "550 TFLOP/s" in text
    assert "rms_norm tilegym 9.50, torch 8.30" in text
    assert "rms_norm 8192x4096, liger WRONG: result 0: error 1.0e-01 rms" in text
    assert "rms_norm 8192x4096, tilegym failed: RuntimeError: boom" in text


def test_what_of_ours_is_not_right_makes_the_run_a_failure(run):
    assert [result.mode for result in run.wrong()] == ["backward"]


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
    "comparison": {
        "token_agreement": 0.25,
        "choice_agreement": 0.875,
        "max_logit_difference": 0.125,
        "max_logit": 6.5,
        "passed": True,
        "reason": "as exact",
    },
}


def test_runs_without_a_gpu_do_not_take_the_place_of_the_page(run, tmp_path, monkeypatch):
    page = tmp_path / "benchmarks.md"
    monkeypatch.setattr(docs, "default_target", lambda: page)
    run.write(tmp_path)
    assert docs.write([tmp_path]) == page and page.is_file()
    page.unlink()
    run.machine["gpu"] = None
    run.write(tmp_path)
    with pytest.raises(BenchmarkError, match="these runs had no GPU: .*give another --target"):
        docs.write([tmp_path])
    assert not page.exists()
    assert docs.write([tmp_path], tmp_path / "other.md").is_file()


def test_page(run, tmp_path):
    run.write(tmp_path)
    (tmp_path / "infer-llama.json").write_text(json.dumps(INFERENCE))
    text = docs.write([tmp_path], tmp_path / "page.md").read_text()
    for expected in (
        "bash tests/benchmark/run_all.sh --output out/bench",
        "| GPU | NVIDIA H200 |",
        "| Driver | 580.1 |",
        "| Copy bandwidth (large) | 4200 GB/s (1024 MiB) |",
        "### rms_norm, forward",
        "| 8192x4096 | 40.0 ± 2% | 3355 GB/s | 80% | 60.0 (1.50x) | WRONG | 38.0 (0.95x) | 67 (torch 67) | 1.7e-03 |",
        "- liger: result 0: error 1.0e-01 rms (8192x4096).",
        "- TileGym: served by pytorch: x (8192x4096).",
        "| rms_norm | 9.50 ± 5% | 8.30 ± 6% |",
        "### llama-3.1-8b",
        "| Throughput, tokens/s | 55.0 ± 0.5 | 66.0 ± 0.5 |",
        "| Time per output token, ms | 18.00 | - |",
        "- Kernel coverage (GPU time): 96.2%",
        "25.0% of the generated text; 87.5% where both continue the unpatched model's text.",
        "Largest difference of a logit 0.125, where they reach 6.5. Passed: as exact.",
    ):
        assert expected in text, expected
    assert "absent" not in text and "A run ended" not in text and "Run A" not in text and "\n\n\n" not in text
    noted = docs.write([tmp_path], tmp_path / "page.md", "Kernels have changed since.").read_text()
    assert noted.replace("Kernels have changed since.\n\n", "") == text


@pytest.mark.parametrize("compiled, column", [(True, "torch.compile"), (False, "Static cache")])
def test_peers_of_models(compiled, column, run, tmp_path):
    run.write(tmp_path)
    measured = INFERENCE["patched"] | {"throughput_tokens_per_second": 60.0}
    for peer, expected in (
        ({"error": None, "measurement": measured}, f"|  | Unpatched | {column} | TileGym |"),
        ({"error": None, "measurement": measured}, "| Throughput, tokens/s | 55.0 ± 0.5 | 60.0 ± 0.5 | 66.0 ± 0.5 |"),
        ({"error": "no way", "measurement": None}, "| Throughput, tokens/s | 55.0 ± 0.5 | 66.0 ± 0.5 |"),
        ({"error": "no way", "measurement": None}, "torch.compile was not measured: no way\n"),
    ):
        summary = INFERENCE | {"peer": {"name": "compile", "compiled": compiled} | peer}
        (tmp_path / "infer-llama.json").write_text(json.dumps(summary))
        page = docs.write([tmp_path], tmp_path / "page.md").read_text()
        assert expected in page
        # A run with it has a place of its own beside one without, which knows the share of the kernels.
        assert ("### llama-3.1-8b, beside torch.compile\n" in page) == compiled


def test_models_stay_until_they_are_measured_again(run, tmp_path):
    run.write(tmp_path)
    page, summary = tmp_path / "page.md", tmp_path / "infer-llama.json"
    summary.write_text(json.dumps(INFERENCE))
    first = docs.write([tmp_path], page).read_text()
    summary.unlink()
    for _ in range(2):
        kept = docs.write([tmp_path], page).read_text()
        assert kept.count("### llama-3.1-8b") == kept.count(docs.EARLIER) == 1
        assert first.partition("### llama-3.1-8b")[2].strip() in kept
    summary.write_text(json.dumps(INFERENCE | {"precision": "float32"}))
    both = docs.write([tmp_path], page).read_text()
    assert (
        both.index("### llama-3.1-8b\n") < both.index("### llama-3.1-8b, float32\n") and both.count(docs.EARLIER) == 1
    )
    summary.write_text(json.dumps(INFERENCE | {"batch_sizes": [8]}))
    assert "### llama-3.1-8b, batch 8\n" in docs.write([tmp_path], page).read_text()
    page.write_text(first)
    other = INFERENCE | {"model": INFERENCE["model"] | {"id": "another"}}
    summary.write_text(json.dumps(other))
    both = docs.write([tmp_path], page).read_text()
    assert both.index("### another") < both.index("### llama-3.1-8b") and both.count(docs.EARLIER) == 1
    summary.write_text(json.dumps(INFERENCE))
    assert docs.EARLIER not in docs.write([tmp_path], page).read_text().partition("### llama-3.1-8b")[2]


def test_cases_stay_until_they_are_measured_again(run, tmp_path):
    """A page written from one op's results keeps the others', and is what it would be from all of them at once."""
    early = dataclasses.replace(run, machine=run.machine | {"date": "2026-01-01"})
    late = dataclasses.replace(
        run,
        machine=run.machine | {"date": "2026-02-01"},
        results=[row(OURS, 5e-6, op="relu", shape="x"), row("torch", 6e-6, op="relu", shape="x")],
        host=[],
    )
    early.write(tmp_path / "early")
    late.write(tmp_path / "late")
    both = docs.write([tmp_path / "early", tmp_path / "late"], tmp_path / "both.md").read_text()
    page = tmp_path / "page.md"
    docs.write([tmp_path / "early"], page)
    assert docs.write([tmp_path / "late"], page).read_text() == both
    assert "| 8192x4096 | 40.0" in both and "### relu, forward" in both and "\n| A | " in both and "\n| B | " in both
    # Measured again, nothing of the former run is left, nor its machine.
    renewed = dataclasses.replace(run, machine=run.machine | {"date": "2026-03-01"})
    renewed.write(tmp_path / "renewed")
    text = docs.write([tmp_path / "renewed"], page).read_text()
    assert "2026-01-01" not in text and "2026-02-01" in text and "2026-03-01" in text
    # Of another GPU nothing is kept: rows of two are on no page.
    other = dataclasses.replace(renewed, machine=renewed.machine | {"gpu": "NVIDIA B200"})
    other.write(tmp_path / "other")
    text = docs.write([tmp_path / "other"], page).read_text()
    assert "NVIDIA H200" not in text and "### relu" not in text
    nothing = dataclasses.replace(other, results=[], host=[])
    nothing.write(tmp_path / "nothing")
    page.with_name("page.json.xz").unlink()
    with pytest.raises(BenchmarkError, match="measured nothing"):
        docs.write([tmp_path / "nothing"], page)
    assert page.read_text() == text


def test_a_broken_file_of_former_results_is_one_clear_error(run, tmp_path):
    run.write(tmp_path)
    (tmp_path / "page.json.xz").write_bytes(b"no xz")
    with pytest.raises(BenchmarkError, match="page.json.xz cannot be read .*: restore it, or remove it"):
        docs.write([tmp_path], tmp_path / "page.md")
    assert not (tmp_path / "page.md").exists()


def test_a_note_names_its_shapes_unless_they_are_all(run):
    shapes, note = ("8x8", "16x8"), "overwrites its inputs"
    run.results = [row(OURS, 5e-6, shape=shape, note=note) for shape in shapes]
    run.results += [row("torch", 6e-6, shape=shape, note=note if shape == "8x8" else "") for shape in shapes]
    text = docs.page(merge([run]), {})
    assert f"- TileGym: {note} (every shape).\n" in text and f"- torch: {note} (8x8).\n" in text


def test_more_runs_than_letters(run):
    merged = merge([run])
    assert [merged.run_of(i) for i in (0, 25, 26, 27, 52)] == ["A", "Z", "AA", "AB", "BA"]


def test_page_of_an_interrupted_run_without_a_gpu(run, tmp_path):
    run.complete = False
    run.machine["gpu"] = None
    text = docs.page(merge([run]), {})
    assert "A run ended before" in text and "say nothing about the kernels" in text


def test_training_is_compared_with_liger_in_time_and_memory(run):
    run.results += [
        row(OURS, 100e-6, mode="both", shape="4x8"),
        row("liger", 150e-6, mode="both", shape="4x8", status="inexact", peak_bytes=134_000_000, note="result 1: x"),
        row("liger", 10e-6, mode="forward", shape="4x8"),
    ]
    text = docs.page(merge([run]), {})
    assert "| rms_norm | 4x8 | 100.0 | 150.0 (1.50x) inexact | 67 | 134 (2.00x) |" in text
    assert text.count("| rms_norm | ") == 2, "host time, and the one case of training"


def test_calls_that_pytorch_serves_faster_have_a_table(run):
    run.results += [
        row(OURS, 100e-6, shape="4x8", backend="cutile"),
        row(PYTORCH, 80e-6, shape="4x8", backend="pytorch"),
        row(OURS, 100e-6, shape="8x8", backend="cutile"),
        row(PYTORCH, 99e-6, shape="8x8", backend="pytorch"),
    ]
    text = docs.page(merge([run]), {})
    assert "| rms_norm | forward | 4x8 | 100.0 | 80.0 |" in text
    assert "| rms_norm | forward | 8x8" not in text


@pytest.mark.parametrize("rows", [{}, {"linear": {"float32 float32": 17}}])
def test_calls_that_go_to_pytorch_from_a_number_of_rows_on_have_a_table(run, rows, tmp_path, monkeypatch):
    text = json.dumps({"gpu": run.machine["gpu"], "slower": {}, "from_rows": rows})
    slower.file_of(run.machine["gpu"], tmp_path).write_text(text)
    monkeypatch.setattr(slower, "FOLDER", tmp_path)
    slower._entries.cache_clear()
    try:
        page = docs.page(merge([run]), {})
    finally:
        slower._entries.cache_clear()
    assert ("From rows" in page) == ("| linear | `float32 float32` | 17 |" in page) == bool(rows)


def test_the_page_tells_the_figures_that_are_kept(run, tmp_path):
    """Written anew from the kept ones, which have fewer digits, it is the same: 64.95 us, not 64.9 once and 65.0."""
    page = tmp_path / "page.md"
    one = dataclasses.replace(run, results=[row(OURS, 64.9499999e-6), row("torch", 70e-6)], host=[])
    one.write(tmp_path / "one")
    first = docs.write([tmp_path / "one"], page).read_text()
    assert first.startswith(f"# Benchmarks on an {run.machine['gpu']}\n")
    (kept,) = store.read(store.store_of(page))
    assert [result.seconds for result in kept.results] == [64.95e-6, 70e-6]
    table = first.partition("### rms_norm, forward")[2]
    assert docs.page(merge([kept]), {}).partition("### rms_norm, forward")[2] == table


def test_runs_are_merged_case_by_case(run, tmp_path):
    run.machine["date"] = "2026-01-01"
    later = Run(
        machine=run.machine | {"date": "2026-01-02", "driver": "590.2"},
        settings=run.settings,
        results=[
            row(OURS, 30e-6, mode="both", backend="cutile"),
            row(OURS, 20e-6),  # alone: the earlier run's comparison is worth more
            row(OURS, 50e-6, op="fmha", shape="new"),
            row("cuDNN", 45e-6, op="fmha", shape="new"),
        ],
        host=[HostResult("fmha", {}, OURS, "ok", seconds=7e-6, low=7e-6, high=7e-6)],
    )
    merged = merge([run, later])
    assert merged.runs == [later, run]
    numbers = {key: number for key, (number, _) in merged.cases.items()}
    assert list(numbers) == [
        ("fmha", "forward", "new"), ("rms_norm", "both", "8192x4096"),
        ("rms_norm", "forward", "8192x4096"), ("rms_norm", "backward", "8192x4096"),
    ]  # fmt: skip
    assert list(numbers.values()) == [0, 0, 1, 1]
    assert {op: number for op, (number, _) in merged.host.items()} == {"fmha": 0, "rms_norm": 1}
    for name, one in (("old", run), ("new", later)):
        one.write(tmp_path / name)
    (tmp_path / "old" / "infer-llama.json").write_text(json.dumps(INFERENCE))
    (tmp_path / "new" / "infer-llama.json").write_text(json.dumps(INFERENCE | {"num_runs": 7}))
    text = docs.write([tmp_path / "old", tmp_path / "new"], tmp_path / "page.md").read_text()
    for expected in (
        "|  | All runs |\n| --- | --- |\n| GPU | NVIDIA H200 |\n",
        "| Run | Date | Driver | Copy bandwidth (large) | GEMM of the vendor's library |",
        "| A | 2026-01-02 | 590.2 | - | - |",
        "| B | 2026-01-01 | 580.1 | 4200 GB/s (1024 MiB) |",
        "A run ended before",
        "67 (torch 67) | 1.7e-03 | B |",
        "| new | 50.0 ± 2% | 2684 GB/s | 64% | 45.0 (0.90x) | 67 (cuDNN 67) | 1.7e-03 | A |",
        "7 runs",
    ):
        assert expected in text, expected
    assert text.count("### llama-3.1-8b") == 1


def test_host_times_are_of_the_run_in_which_the_machine_was_least_busy(run):
    def timed(date, ours, torch):
        rows = [("rms_norm", OURS, ours), ("rms_norm", "torch", torch), ("softmax", OURS, ours)]
        host = [HostResult(op, {}, name, "ok", seconds=s, low=s, high=s) for op, name, s in rows]
        return dataclasses.replace(run, machine=run.machine | {"date": date}, results=[], host=host)

    merged = merge([timed("2026-11-02", 9e-6, 20e-6), timed("2026-11-01", 10e-6, 12e-6)])
    assert merged.host["rms_norm"][0] == 1 and merged.host["rms_norm"][1][OURS].seconds == 10e-6
    assert merged.host["softmax"][0] == 0, "without others the latest run counts"


def test_runs_of_different_gpus_or_dtypes_are_not_merged(run):
    for field, other in (("machine", {"gpu": "NVIDIA A100"}), ("settings", {"dtype": "fp16"})):
        changed = dataclasses.replace(run, **{field: getattr(run, field) | other})
        with pytest.raises(BenchmarkError, match="can be merged"):
            merge([run, changed])


def test_a_peer_that_is_a_little_too_far_off_is_shown_so(run):
    run.results[2] = row("liger", 50e-6, status="inexact", note="result 3: error")
    assert "liger 50.0 (1.25x) inexact" in report.table(run)
    assert "rms_norm 8192x4096, liger inexact: result 3: error" in report.table(run)
    assert [result.mode for result in run.wrong()] == ["backward"], "a peer does not fail the run"


def test_what_took_the_time_is_kept_by_op(run):
    run.add_spent("rms_norm", {"oracle": 1.0, "timing": 2.0})
    run.add_spent("rms_norm", {"timing": 0.5})
    assert run.spent == {"rms_norm": {"oracle": 1.0, "timing": 2.5}}


def test_what_was_not_timed_steadily_has_no_figure_on_the_page(run, tmp_path):
    run.results += [
        row(OURS, 123e-6, backend="cutile", shape="1x4096", low=60e-6, high=200e-6),
        row("torch", 50e-6, shape="1x4096"),
    ]
    run.write(tmp_path)
    page = docs.write([tmp_path], tmp_path / "page.md").read_text()
    line = next(line for line in page.splitlines() if line.startswith("| 1x4096"))
    assert line.startswith("| 1x4096 | unsteady | - ") and "123" not in line
    assert sum(r.status == report.UNSTEADY for r in Run.read(tmp_path).steady().results) == 1

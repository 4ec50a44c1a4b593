"""The page's summary of the ops that memory bounds, at sizes that no cache holds."""

from tilegym.bench import docs
from tilegym.bench.merge import merge
from tilegym.bench.report import Result
from tilegym.bench.report import Run
from tilegym.bench.runner import COPY
from tilegym.bench.spec import OURS

L2 = 60 << 20


def rows(shape, moved, *, op="rms_norm", mode="forward", statuses=(), **seconds):
    """What a run has of one case, ``seconds`` by provider; ``moved``: bytes, in multiples of the L2 cache."""
    names = {"ours": OURS, "copy": COPY, "compiled": "torch.compile"}
    return [
        Result(
            op, shape, "", {}, mode, names.get(name, name), dict(statuses).get(name, "ok"), seconds=time, low=time,
            high=time, bytes_per_second=moved * L2 / time, flops_per_second=0.0, bound="memory", roofline_share=0.5,
            error=1e-3,
        )
        for name, time in seconds.items()
    ]  # fmt: skip


def run_of(*cases, l2_bytes=L2, date="2026-01-01"):
    machine = {"gpu": "NVIDIA H200", "date": date} | ({"l2_bytes": l2_bytes} if l2_bytes else {})
    return Run(machine, {"dtype": "bf16", "backend": "cutile"}, results=[row for case in cases for row in case])


def page_of(*cases, **how):
    return docs.page(merge([run_of(*cases, **how)]), {})


def section_of(text):
    return text.partition("\n## Beyond the L2 cache\n")[2].partition("\n## ")[0]


def test_the_least_of_each_and_where_it_was():
    section = section_of(
        page_of(
            rows("1x1", 4.0, ours=100e-6, copy=90e-6, liger=99e-6, compiled=300e-6),
            rows("2x2", 8.0, ours=200e-6, copy=190e-6, liger=250e-6),
            rows("3x3", 9.0, ours=200e-6, copy=200e-6, compiled=250e-6),
            rows("small", 3.9, ours=100e-6, copy=10e-6, liger=10e-6),
            rows("1x1", 5.0, mode="backward", ours=100e-6, copy=80e-6),
            rows("1x1", 50.0, op="fmha", ours=100e-6, copy=1e-6),
        )
    )
    assert "| rms_norm | forward | 3 | 0.90 (1x1) | 0.95 | 0.99 (1x1) | 1.25 (3x3) |\n" in section
    assert "| rms_norm | backward | 1 | 0.80 (1x1) | 0.80 | - | - |\n" in section
    assert "small" not in section and "fmha" not in section


def test_what_was_not_measured_counts_nowhere():
    section = section_of(
        page_of(
            rows("1x1", 8.0, ours=100e-6, copy=90e-6, liger=50e-6, statuses={"liger": "WRONG"}),
            rows("2x2", 8.0, ours=100e-6, copy=50e-6, statuses={"ours": "WRONG"}),
            rows("3x3", 8.0, ours=100e-6, copy=50e-6, statuses={"copy": "failed"}),
            rows("4x4", 8.0, ours=100e-6),
        )
    )
    assert "| rms_norm | forward | 1 | 0.90 (1x1) | 0.90 | - | - |\n" in section


def test_a_run_that_does_not_tell_the_size_of_the_cache_is_of_the_same_gpu():
    old = run_of(rows("1x1", 8.0, ours=100e-6, copy=90e-6), l2_bytes=None, date="2025-01-01")
    new = run_of(rows("2x2", 8.0, ours=100e-6, copy=95e-6))
    assert "| rms_norm | forward | 2 | 0.90 (1x1) | 0.93 | - | - |\n" in section_of(docs.page(merge([old, new]), {}))


def test_no_section_without_such_sizes():
    case = rows("1x1", 8.0, ours=100e-6, copy=90e-6)
    assert "Beyond the L2 cache" in page_of(case)
    assert "Beyond the L2 cache" not in page_of(case, l2_bytes=None), "the machine does not tell"
    assert "Beyond the L2 cache" not in page_of(rows("1x1", 1.0, ours=100e-6, copy=90e-6))

"""A GPU for which nothing is shipped takes what was measured on another with the same chip."""

from types import SimpleNamespace

import pytest
import torch

from tilegym import doctor
from tilegym.backend import same_chip
from tilegym.backend import slower
from tilegym.backend.cutile import tuning_cache

H200, H100, GH200 = "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"
A100, H20 = "NVIDIA A100-SXM4-80GB", "NVIDIA H20"
GPUS = {A100: (8, 0, 108), GH200: (9, 0, 132), H20: (9, 0, 78)}


@pytest.fixture(autouse=True)
def slower_calls_stay():
    """Not here."""


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """A machine with an A100, a GH200 and an H20."""
    found = [SimpleNamespace(name=n, major=a, minor=b, multi_processor_count=c) for n, (a, b, c) in GPUS.items()]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found[index])
    same_chip.others_like.cache_clear()
    yield
    same_chip.others_like.cache_clear()


@pytest.mark.parametrize(
    ("gpu", "others"),
    [(GH200, (H200, H100)), (H200, (H100,)), (H100, (H200,)), (A100, ()), (H20, ()), ("a GPU elsewhere", ())],
)
def test_gpus_with_the_same_chip(gpu, others):
    assert same_chip.others_like(gpu) == others


def test_doctor_tells_whose_results_a_gpu_takes():
    assert doctor._tuned_for(H200) == H200
    assert doctor._tuned_for(GH200) == f"{GH200}: what was measured on an NVIDIA H200, which has the same chip"
    assert doctor._tuned_for(A100).startswith(f"{A100}: nothing was measured on it")


def test_all_that_is_shipped_is_of_a_chip_that_is_known():
    files = {file.name for file in (*tuning_cache.SHIPPED.glob("*.json"), *slower.FOLDER.glob("*.json"))}
    assert files == {slower.file_of(gpu).name for gpu in same_chip.CHIPS}


def test_tuning_results_of_the_same_chip():
    key = next(iter(tuning_cache.shipped_results(H200)))
    assert tuning_cache.shipped(key._replace(gpu=GH200)) == tuning_cache.shipped(key) is not None
    assert tuning_cache.shipped(key._replace(gpu=A100)) is None


def test_tuning_results_in_bf16_serve_fp16(monkeypatch):
    measured = next(key for key in tuning_cache.shipped_results(H200) if "=bfloat16[" in key.shape)
    key = measured._replace(shape=measured.shape.replace("bfloat16", "float16"))
    result = tuning_cache.shipped(measured)
    assert tuning_cache.shipped(key) is tuning_cache.shipped(key._replace(gpu=GH200)) is result is not None
    assert tuning_cache.shipped(key._replace(shape=measured.shape.replace("bfloat16", "float32"))) is None
    own = result._replace(key=key, config={"TILE": 1})
    shipped = tuning_cache.shipped_results(H200) | {key: own}
    monkeypatch.setattr(tuning_cache, "shipped_results", lambda gpu: shipped if gpu == H200 else {})
    assert tuning_cache.shipped(key) is own


def test_own_tuning_results_come_first(monkeypatch):
    key = next(iter(tuning_cache.shipped_results(H200)))._replace(gpu=GH200)
    own = tuning_cache.TuningResult(key, {"TILE": 1}, 1.0)
    others = tuning_cache.shipped_results(H200)
    monkeypatch.setattr(tuning_cache, "shipped_results", lambda gpu: {key: own} if gpu == GH200 else others)
    assert tuning_cache.shipped(key) is own


def test_products_of_many_rows_have_results_of_their_own_on_an_h100():
    """Of those of an H200, which has more bandwidth, some are a quarter slower there."""
    of_h100, of_h200 = tuning_cache.shipped_results(H100), tuning_cache.shipped_results(H200)
    other = [key for key in of_h100 if key._replace(gpu=H200) in of_h200]
    assert other and all("matmul_kernel" in key.kernel or "bmm_kernel" in key.kernel for key in other)
    assert all(of_h100[key].config != of_h200[key._replace(gpu=H200)].config for key in other)
    assert all(tuning_cache.shipped(key) is of_h100[key] for key in other)


def test_calls_that_go_to_pytorch_on_the_same_chip(monkeypatch):
    """Products in fp32, which have no tensor cores."""
    rows = slower.rows_to_pytorch(H200)
    assert rows["matmul"] and slower.rows_to_pytorch(GH200) == rows
    assert slower.rows_to_pytorch(None) == {}
    monkeypatch.setattr(slower, "_name_of", lambda index: GH200)
    x = torch.zeros(64, 64)
    assert slower.lookup_of("matmul")((x, x), {})


def test_on_another_chip_only_products_in_fp32_go_to_pytorch(monkeypatch):
    calls = frozenset({"bfloat16[64,64] bfloat16[64,64]"})
    rows = {"float32 float32": 1, "tfloat32 tfloat32": 1}
    monkeypatch.setattr(slower, "_entries", lambda: {H200: {"matmul": slower.Entries(calls, rows)}})
    monkeypatch.setattr(slower, "_fp32_precision", lambda: "ieee")
    x = torch.zeros(64, 64)
    for gpu, bf16 in ((GH200, True), (A100, False)):
        monkeypatch.setattr(slower, "_name_of", lambda index, gpu=gpu: gpu)
        lookup = slower.lookup_of("matmul")
        assert lookup((x, x), {})
        assert lookup((x.bfloat16(), x.bfloat16()), {}) == bf16
        with monkeypatch.context() as tf32:
            tf32.setattr(slower, "_fp32_precision", lambda: "tf32")
            assert lookup((x, x), {}) == bf16


def test_own_table_of_calls_comes_first(monkeypatch):
    """Another GPU's numbers of rows count, with their exceptions, where it has none of its own for a kind of calls."""
    of_h200 = slower.Entries(
        frozenset({"x"}), {"a a": 8, "b b": 1}, frozenset({"exactly a[16] a[16]", "exactly b[16] b[16]"})
    )
    of_gh200 = slower.Entries(frozenset({"y"}), {"a a": 64}, frozenset({"exactly a[32] a[32]"}))
    tables = {H200: {"matmul": of_h200, "bmm": of_h200}, GH200: {"matmul": of_gh200}}
    monkeypatch.setattr(slower, "_entries", lambda: tables)
    entries = slower._entries_of(GH200)
    kept = frozenset({"exactly a[32] a[32]", "exactly b[16] b[16]"})
    assert entries["matmul"] == (frozenset({"y"}), {"a a": 64, "b b": 1}, kept)
    assert entries["bmm"] == (frozenset(), of_h200.from_rows, of_h200.exceptions)
    assert slower.rows_to_pytorch(H200)["matmul"] == {"a a": 8, "b b": 1}


def test_products_in_16_bits_on_an_h100(monkeypatch):
    """Its own table has no numbers of rows for them."""
    assert "bfloat16 bfloat16" not in slower._entries()[H100]["linear"].from_rows
    monkeypatch.setattr(slower, "_name_of", lambda index: H100)
    lookup = slower.lookup_of("linear")
    x, weight, fits = (torch.empty(n, 4096, dtype=torch.bfloat16, device="meta") for n in (512, 11008, 6144))
    assert lookup((x, weight), {}) and not lookup((x, fits), {}) and not lookup((x[:64], weight), {})

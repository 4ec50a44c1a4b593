"""Calls that PyTorch serves faster go there."""

import dataclasses
import json
import warnings

import pytest
import torch
from bench.benchmark_fakes import FakeTimer
from bench.benchmark_fakes import session
from common import recorded_launches

from tilegym import ops
from tilegym.backend import PREFER_CUTILE
from tilegym.backend import observe_calls
from tilegym.backend import recording
from tilegym.backend import slower
from tilegym.backend import use_backend
from tilegym.bench import slower_table
from tilegym.bench.runner import measure_shape
from tilegym.bench.spec import PYTORCH
from tilegym.bench.spec import default_folder
from tilegym.bench.spec import load_benchmarks
from tilegym.bench.spec import shape as shape_of

GPU = "Test GPU 9000"


@pytest.fixture(autouse=True)
def slower_calls_stay():
    """Not here."""


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table for GPU, which the tensors of this test seem to be on; softmax has an entry."""
    path = slower.file_of(GPU, tmp_path)
    path.write_text(json.dumps({"gpu": GPU, "slower": {"softmax": ["float32[4,16]"]}}))
    monkeypatch.setattr(slower, "FOLDER", tmp_path)
    monkeypatch.setattr(slower, "_name_of", lambda index: GPU)
    monkeypatch.delenv("DISABLE_FALLBACK", raising=False)
    slower._entries.cache_clear()
    monkeypatch.setattr(ops.softmax.op, "is_slower", slower.lookup_of("softmax"))
    yield
    slower._entries.cache_clear()


def served(call):
    """The backends that serve the ops within ``call``, which must not warn."""
    seen = []

    class Note:
        def __init__(self, op, backend):
            seen.append(backend)

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    with observe_calls(Note), use_backend("cutile"), warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
    return seen


def test_listed_calls_go_to_pytorch(table):
    x = torch.randn(4, 16)
    assert served(lambda: ops.softmax(x)) == ["pytorch"]
    assert served(lambda: ops.softmax(x=x)) == ["pytorch"]
    assert served(lambda: ops.softmax(torch.randn(5, 12))) == ["pytorch"], "of the same powers of two"
    assert served(lambda: (ops.softmax(x), ops.softmax(x.half()), ops.softmax(x))) == ["pytorch", "cutile", "pytorch"]


def test_calls_listed_exactly(table, monkeypatch):
    slower.file_of(GPU, slower.FOLDER).write_text(
        json.dumps({"gpu": GPU, "slower": {"linear": ["exactly float32[4,24] float32[12,24]"]}})
    )
    slower._entries.cache_clear()
    monkeypatch.setattr(ops.linear.op, "is_slower", slower.lookup_of("linear"))
    weight = torch.randn(12, 24)
    assert served(lambda: ops.linear(torch.randn(5, 24), weight)) == ["pytorch"], "rows are rounded"
    assert served(lambda: ops.linear(torch.randn(1, 4, 24), weight)) == ["pytorch"]
    assert served(lambda: ops.linear(torch.randn(4, 24), torch.randn(11, 24))) == ["cutile"]
    assert served(lambda: ops.linear(torch.randn(4, 23), torch.randn(12, 23))) == ["cutile"]
    assert served(lambda: ops.linear(torch.randn(7, 24), weight)) == ["cutile"]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ops.softmax(x, backend="cutile"),
        lambda x: ops.softmax(x.repeat(2, 1)),
        lambda x: ops.softmax(x.half()),
        lambda x: ops.softmax(x.requires_grad_()),
        lambda x: ops.relu(x),
    ],
    ids=["backend", "size", "dtype", "gradients", "op"],
)
def test_others_do_not(table, call):
    assert served(lambda: call(torch.randn(4, 16))) == ["cutile"]


def test_gradients_count_only_where_they_are_enabled(table):
    x = torch.randn(4, 16).requires_grad_()
    with torch.no_grad():
        assert served(lambda: ops.softmax(x)) == ["pytorch"]
    assert served(lambda: ops.softmax(x)) == ["cutile"]


def test_compiled_code_stays_one_for_all_sizes(table):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(ops.softmax, fullgraph=True, dynamic=True, backend="eager")
    with use_backend("cutile"):
        for rows in (4, 7):
            compiled(torch.randn(rows, 16))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("gradients", [False, True])
def test_compiled_products_of_many_rows_go_to_pytorch(table, monkeypatch, gradients):
    """One graph for few rows and one for many, whatever they are; sizes do not count."""
    kind = "gradients bfloat16 bfloat16" if gradients else "bfloat16 bfloat16"
    written = {"gpu": GPU, "slower": {}, "from_rows": {"linear": {kind: 8}}}
    written["exceptions"] = {"linear": ["exactly bfloat16[16,16] bfloat16[24,16]"]}
    slower.file_of(GPU, slower.FOLDER).write_text(json.dumps(written))
    slower._entries.cache_clear()
    monkeypatch.setattr(ops.linear.op, "is_slower", slower.lookup_of("linear"))
    by_kernels = []  # of each graph

    def compiler(graph, _):
        called = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
        by_kernels.append(any("tilegym" in name or name == "autograd_function_apply" for name in called))
        return graph.forward

    def call(x, weight, **options):
        return ops.linear(x, weight, **options)

    def served_of(rows, n=24, k=16, dtype=torch.bfloat16, **options):
        torch.manual_seed(0)
        x, weight = torch.randn(*rows, k).to(dtype), torch.randn(n, k).to(dtype).requires_grad_(gradients)
        with use_backend("cutile"):
            y = compiled(x, weight, **options)
        torch.testing.assert_close(y, torch.nn.functional.linear(x, weight), rtol=2e-2, atol=2e-2)

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=compiler)
    for rows in (4, 7, 9, 16, 30, 200, 5):
        served_of((rows,))
    assert by_kernels == [True, False]
    for options in ({"n": 25}, {"k": 20}, {"dtype": torch.float32}, {"backend": "cutile"}, {"dtype": torch.float16}):
        torch.compiler.reset()
        by_kernels.clear()
        served_of((2, 32), **options)
        assert by_kernels == [options != {"dtype": torch.float16}], options


@pytest.fixture
def rows_table(table, monkeypatch, request):
    """From 8 rows on PyTorch serves linear without a bias in fp32, from 64 on with tf32."""
    rows = {"linear": {"float32 float32": getattr(request, "param", 8), "tfloat32 tfloat32": 64}}
    slower.file_of(GPU, slower.FOLDER).write_text(json.dumps({"gpu": GPU, "slower": {}, "from_rows": rows}))
    slower._entries.cache_clear()
    monkeypatch.setattr(ops.linear.op, "is_slower", slower.lookup_of("linear"))
    recording.forget()
    yield
    recording.forget()


def test_widths_count_where_the_table_names_them(rows_table, monkeypatch):
    rows = {"linear": {"float32[16] float32[16]": 8}}
    slower.file_of(GPU, slower.FOLDER).write_text(json.dumps({"gpu": GPU, "slower": {}, "from_rows": rows}))
    slower._entries.cache_clear()
    monkeypatch.setattr(ops.linear.op, "is_slower", slower.lookup_of("linear"))
    assert served(linear_of(8)) == ["pytorch"] and served(linear_of(7)) == ["cutile"]
    x, weight = torch.randn(8, 32), torch.randn(24, 32)
    assert served(lambda: ops.linear(x, weight)) == ["cutile"]


def linear_of(*sizes, dtype=torch.float32, **options):
    x, weight = torch.randn(*sizes, 16).to(dtype), torch.randn(24, 16).to(dtype)
    return lambda: ops.linear(x, weight, **options)


def test_calls_of_many_rows_go_to_pytorch_whatever_their_sizes(rows_table):
    assert served(linear_of(8)) == served(linear_of(2, 5)) == served(linear_of(1, 333)) == ["pytorch"]
    assert served(linear_of(7)) == served(linear_of(2, 1, 3)) == ["cutile"]
    assert served(linear_of(8, dtype=torch.bfloat16)) == ["cutile"]
    assert served(linear_of(8, bias=torch.randn(24))) == ["cutile"], "another kind of call"
    assert served(linear_of(8, backend="cutile")) == ["cutile"]


def test_sizes_of_16_bits_that_are_as_fast_stay_with_the_kernels(table, monkeypatch):
    written = {"gpu": GPU, "slower": {}, "from_rows": {"linear": {"bfloat16 bfloat16": 8}}}
    written["exceptions"] = {"linear": ["exactly bfloat16[16,16] bfloat16[24,16]"]}
    slower.file_of(GPU, slower.FOLDER).write_text(json.dumps(written))
    slower._entries.cache_clear()
    monkeypatch.setattr(ops.linear.op, "is_slower", slower.lookup_of("linear"))

    def served_of(*rows, n=24, k=16, dtype=torch.bfloat16):
        x, weight = torch.randn(*rows, k).to(dtype), torch.randn(n, k).to(dtype)
        return served(lambda: ops.linear(x, weight))

    assert served_of(8) == served_of(30) == served_of(16, n=32) == ["pytorch"]
    assert served_of(16) == served_of(15) == ["cutile"], "rows of one bucket"
    assert served_of(2, 8) == served_of(1, 16) == served_of(5, 1, 3) == ["cutile"], "however they are laid out"
    assert served_of(2, 4) == served_of(3, 10) == ["pytorch"]
    assert served_of(8, n=25) == served_of(8, k=20) == ["cutile"], "cuBLAS is slow where 16 bytes do not divide a size"
    assert served_of(7) == served(linear_of(8)) == ["cutile"]
    assert [served_of(m, dtype=torch.float16) for m in (7, 8, 16)] == [["cutile"], ["pytorch"], ["cutile"]]
    # Of other chips nothing was measured; that they have no tensor cores for fp32 is known.
    monkeypatch.setattr(slower, "_name_of", lambda index: "Another GPU")
    slower.file_of(GPU, slower.FOLDER).write_text(json.dumps(written | {"gpu": "NVIDIA H200"}))
    slower._entries.cache_clear()
    monkeypatch.setattr(ops.linear.op, "is_slower", slower.lookup_of("linear"))
    assert served_of(8) == ["cutile"]


@pytest.fixture
def precision():
    """Sets the precision of products in fp32; monkeypatch cannot: it is no attribute of its module."""
    before = torch.backends.cuda.matmul.fp32_precision
    yield lambda name: setattr(torch.backends.cuda.matmul, "fp32_precision", name)
    torch.backends.cuda.matmul.fp32_precision = before


def test_tf32_has_rows_of_its_own(rows_table, precision):
    few, many = linear_of(8), linear_of(64)
    assert served(lambda: (few(), many())) == ["pytorch", "pytorch"]
    precision("tf32")
    assert served(lambda: (few(), many())) == ["cutile", "pytorch"]


@pytest.mark.parametrize("rows_table", [1], indirect=True)
def test_a_recorded_call_is_asked_again_where_tf32_decides(rows_table, precision):
    row, launches = linear_of(1), []
    with use_backend("cutile"), recorded_launches() as seen:
        for name in ("tf32", "tf32", "tf32", "ieee"):
            precision(name)
            seen.clear()
            row()
            launches.append(len(seen))
    assert launches == [1, 1, 1, 0]


def test_experts_stay_with_the_kernels_while_a_graph_is_captured(table, monkeypatch):
    """PyTorch's look at which experts were chosen, which a graph cannot hold."""
    rows = {"fused_moe": {"float32 float32 float32 float32 int64": 4}}
    slower.file_of(GPU, slower.FOLDER).write_text(json.dumps({"gpu": GPU, "slower": {}, "from_rows": rows}))
    slower._entries.cache_clear()
    monkeypatch.setattr(ops.fused_moe.op, "is_slower", slower.lookup_of("fused_moe"))
    recording.forget()
    captures = []
    monkeypatch.setattr(slower, "_is_capturing", lambda: bool(captures))
    ids = torch.arange(8).view(4, 2) % 3
    args = torch.randn(4, 16), torch.randn(3, 24, 16), torch.randn(3, 16, 12), torch.rand(4, 2), ids

    def call():
        ops.fused_moe(*args)

    assert served(call) == ["pytorch"]
    captures.append(1)
    assert served(call) == ["cutile"]
    # A recorded call asks again.
    with use_backend("cutile"), recorded_launches() as seen:
        launches = []
        for capturing in (True, True, True, False, True):
            captures[:] = [1] * capturing
            seen.clear()
            call()
            launches.append(len(seen) > 0)
    assert launches == [True, True, True, False, True]
    recording.forget()


def test_a_preferred_backend_gives_way_and_is_recorded(rows_table):
    few, many = (linear_of(n, backend=PREFER_CUTILE) for n in (4, 8))
    assert served(few) == ["cutile"] and served(many) == ["pytorch"]
    with use_backend("pytorch"), recorded_launches() as seen:
        for _ in range(3):
            few()
    assert len(seen) == 3
    (recordings,) = ops.linear.op.preferred_recordings.values()
    assert any(isinstance(known, recording.Recording) for known in recordings.known.values())


def test_rows_of_lists():
    a = [torch.empty(3, 16), torch.empty(2, 5, 16)]
    assert (
        slower.rows_of((None, a), {}) == 13 and slower.rows_of((), {"x": a[0]}) == 3 and slower.rows_of((1,), {}) == 0
    )
    lists = "gradients [float32[8,16] float32[8,16]] [bfloat16[4]] mode=x"
    assert slower.kind_of(lists) == "gradients [float32] [bfloat16] mode=x"
    assert slower.kind_of(lists, widths=True) == "gradients [float32[16]] [bfloat16[4]] mode=x"
    assert slower.kind_of("float32[2,8] float32[3] transpose_a=True trans_b=True x=True") == "float32 float32 x=True"


def test_ops_without_an_entry_are_not_looked_up(table, monkeypatch):
    assert slower.lookup_of("relu") is None
    assert slower.lookup_of("softmax") is not None
    monkeypatch.setenv("DISABLE_FALLBACK", "1")
    assert slower.lookup_of("softmax") is None


def test_shipped_files_are_read():
    for path in slower.FOLDER.glob("*.json"):
        table = json.loads(path.read_text())
        assert path == slower.file_of(table["gpu"])
        assert set(table["slower"]) <= {name for name in dir(ops) if hasattr(getattr(ops, name), "op")}
        # As calls are looked up: an entry of another form would never be found.
        for op, kinds in table["from_rows"].items():
            assert all(kind == slower.kind_of(kind, widths=op == "fmha") for kind in kinds)
        for op, calls in table.get("exceptions", {}).items():
            assert all(slower.kind_of(call.removeprefix("exactly ")) in table["from_rows"][op] for call in calls)
            assert not set(calls) & set(table["slower"].get(op, ()))


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_grouped_products_in_fp32_go_to_pytorch(gpu, monkeypatch):
    monkeypatch.setattr(slower, "_name_of", lambda index: gpu)
    a, b = [torch.zeros(64, 32)] * 2, [torch.zeros(48, 32)] * 2
    lookup = slower.lookup_of("group_gemm")
    assert lookup((a, b), {"transpose_b": True})
    assert not lookup(([x.bfloat16() for x in a], [x.bfloat16() for x in b]), {"transpose_b": True})


@pytest.mark.parametrize("gradients", [False, True])
def test_products_in_16_bits_go_to_pytorch(gradients, monkeypatch):
    """But for those that were as fast, and where 16 bytes do not divide a row."""
    monkeypatch.setattr(slower, "_name_of", lambda index: "NVIDIA H200")

    def listed(op, a, b, dtype=torch.bfloat16, **options):
        matrices = (torch.empty(size, dtype=dtype, device="meta").requires_grad_(gradients) for size in (a, b))
        return slower.lookup_of(op)(tuple(matrices), options)

    assert listed("bmm", (7, 128, 136), (7, 136, 64)) and not listed("bmm", (8, 128, 132), (8, 132, 64))
    assert listed("bmm", (7, 128, 136), (7, 136, 64), torch.float16)
    assert listed("matmul", (3000, 3000), (3000, 3000)) and listed("matmul", (99, 3000), (3000, 3000), trans_b=True)
    assert not listed("matmul", (1024, 1024), (1024, 1024)) and not listed("matmul", (64, 99), (99, 64))
    assert listed("linear", (2, 256, 4096), (64, 4096)) and not listed("linear", (90, 4096), (64, 4096))
    assert not listed("linear", (4, 2048, 4096), (14336, 4096))


def signature(op):
    return getattr(ops, op).op.signature


def test_calls_are_described_by_what_decides_their_speed():
    x, w = torch.empty(3, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
    described = slower.describe(signature("rms_norm"), (x, (4096,), w, 1e-6), {})
    assert described == "bfloat16[4,4096] bfloat16[4096]"
    assert (
        slower.describe(signature("rms_norm"), (x,), {"eps": 1e-5, "weight": w, "normalized_shape": [4096]})
        == described
    )
    q = torch.empty(1, 8, 64, 64)
    plain = slower.describe(signature("fmha"), (q, q, q), {})
    assert slower.describe(signature("fmha"), (q, q, q), {"is_causal": True, "window_size": None}) == plain
    assert slower.describe(signature("fmha"), (q, q, q), {"is_causal": False}) == f"{plain} is_causal=False"
    assert slower.describe(signature("fmha"), (q, q, q), {"window_size": 7}) == f"{plain} window_size"
    assert (
        slower.describe(signature("fmha"), (q, q, q), {"scaling": 0.1}) == plain == " ".join(["float32[8,64,64]"] * 3)
    )
    assert slower.describe(signature("rms_norm"), (x[None], (4096,), w, 1e-6), {}) == described


def test_matrices_whose_rows_begin_anywhere_stand_for_themselves():
    def described(m, k, n, dtype=torch.bfloat16):
        return slower.describe(
            signature("linear"), (torch.empty(m, k, dtype=dtype), torch.empty(n, k, dtype=dtype)), {}
        )

    assert described(15, 3420, 1280) == "bfloat16[16,3420] bfloat16[1024,3420]"
    assert described(15, 1280, 3420) == "bfloat16[16,1024] bfloat16[3420,1024]"
    assert described(15, 3424, 1280) == "bfloat16[16,4096] bfloat16[1024,4096]"
    assert described(15, 3420, 1280, torch.float32) == "float32[16,4096] float32[1024,4096]"


def test_lists_of_tensors_are_described():
    a, b = [torch.empty(8, 16) for _ in range(2)], [torch.empty(16, 32).requires_grad_() for _ in range(2)]
    described = slower.describe(signature("group_gemm"), (a, b), {})
    assert described == "gradients [float32[8,16] float32[8,16]] [float32[16,32] float32[16,32]]"
    assert slower._key(a, True) != slower._key(b, True) and slower._key(a, True) == slower._key(list(a), True)


def test_options_are_told_apart(table, monkeypatch):
    call = slower.describe(signature("fmha"), (torch.empty(1, 2, 16, 16),) * 3, {"window_size": 4})
    slower.file_of(GPU, slower.FOLDER).write_text(json.dumps({"gpu": GPU, "slower": {"fmha": [call]}}))
    slower._entries.cache_clear()
    monkeypatch.setattr(ops.fmha.op, "is_slower", slower.Lookup("fmha"))
    q = torch.randn(1, 2, 16, 16)
    assert served(lambda: ops.fmha(q, q, q, window_size=4)) == ["pytorch"]
    assert served(lambda: ops.fmha(q, q, q)) == ["cutile"]
    assert served(lambda: ops.fmha(q, q, q, soft_cap=4.0)) == ["cutile"]


def test_the_list_can_be_ignored(table):
    x = torch.randn(4, 16)
    with slower.ignored():
        assert served(lambda: ops.softmax(x)) == ["cutile"]
    assert served(lambda: ops.softmax(x)) == ["pytorch"]


def test_a_call_that_the_op_does_not_take_fails_as_ever(table):
    with pytest.raises(TypeError, match="no_such_option"):
        ops.softmax(torch.randn(4, 16), no_such_option=1)


def test_the_benchmark_measures_both_backends_and_says_where_the_table_sends_a_call(table):
    """On the CPU: the kernels run in the interpreter. The sizes of softmax that are listed, and others."""
    softmax = load_benchmarks(default_folder())["softmax"]
    for columns, listed in ((16, True), (40, False)):
        shape = shape_of(tokens=4, columns=columns)
        small = dataclasses.replace(softmax, quick=(shape,))
        options = {"backend": "cutile", "only": ("tilegym", slower_table.CUTILE, PYTORCH)}
        rows = {r.provider: r for r in measure_shape(small, shape, ("forward",), session(FakeTimer(), **options))}
        assert [row.status for row in rows.values()] == ["ok"] * (3 if listed else 2)
        assert rows["tilegym"].backend == ("pytorch" if listed else "cutile")
        assert ("measured to be the faster one here" in rows["tilegym"].note) == listed
        assert (slower_table.CUTILE in rows) == listed
        if listed:
            assert (rows[slower_table.CUTILE].backend, rows[slower_table.CUTILE].note) == ("cutile", "")
        assert rows[PYTORCH].backend == "pytorch"

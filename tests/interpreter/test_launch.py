"""What launch() takes, refuses and guarantees, apart from what kernels compute."""

import dataclasses
import gc
import time
import weakref

import cuda.tile as ct
import numpy as np
import pytest
import torch

from interpreter import programs
from tilegym import interpreter
from tilegym.interpreter import KernelError
from tilegym.interpreter import _cutile
from tilegym.interpreter import frontend
from tilegym.interpreter import launch

ConstInt = ct.Constant[int]


@ct.kernel
def double(x, y, size: ConstInt):
    ct.store(y, (ct.bid(0),), ct.load(x, (ct.bid(0),), (size,)) * 2)


@ct.kernel
def number_blocks(y):
    index = ct.bid(0) + ct.num_blocks(0) * (ct.bid(1) + ct.num_blocks(1) * ct.bid(2))
    ct.scatter(y, (ct.bid(0), ct.bid(1), ct.bid(2)), index)


@pytest.mark.parametrize("order", ["sequential", "shuffled", "threads"])
def test_grid(order):
    y = torch.full((2, 3, 4), -1, dtype=torch.int32)
    launch((2, 3, 4), number_blocks, (y,), order=order, seed=3)
    assert torch.equal(y, torch.arange(24, dtype=torch.int32).reshape(4, 3, 2).permute(2, 1, 0))


@ct.kernel
def append(log, count):
    position = ct.atomic_add(count, 0, 1)
    ct.scatter(log, position, ct.bid(0))


def test_orders():
    def run(**options):
        log, count = torch.zeros(16, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        launch((16,), append, (log, count), **options)
        return log.tolist()

    assert run() == list(range(16))
    assert run(order="shuffled", seed=1) == run(order="shuffled", seed=1) != run(order="shuffled", seed=2)
    assert sorted(run(order="threads")) == list(range(16))


def test_arguments_that_are_refused():
    x = torch.ones(8)
    with pytest.raises(TypeError, match="kernel made by"):
        launch((1,), lambda: None, ())
    with pytest.raises(TypeError, match="Expected 3 kernel arguments, got 2"):
        launch((1,), double, (x, x))
    with pytest.raises(TypeError, match="a grid is a tuple of one to three sizes, got 1"):
        launch(1, double, (x, x, 8))
    with pytest.raises(ValueError, match="one to three sizes"):
        launch((1, 1, 1, 1), double, (x, x, 8))
    with pytest.raises(ValueError, match="negative"):
        launch((-1,), double, (x, x, 8))
    for grid in ([1], torch.tensor([1])):
        with pytest.raises(TypeError, match="a grid is a tuple"):
            launch(grid, double, (x, x, 8))
    for size in (1.5, 1.0, torch.tensor(1)):
        with pytest.raises(TypeError, match="grid sizes are ints"):
            launch((size,), double, (x, x, 8))
    with pytest.raises(ValueError, match="at most 16777215 blocks an axis"):
        launch((2**24, 0), double, (x, x, 8))
    with pytest.raises(ValueError, match="order must be one of sequential, shuffled, threads"):
        launch((1,), double, (x, x, 8), order="random")
    with pytest.raises(ValueError, match="CPU tensors, got one on meta"):
        launch((1,), double, (x, x.to("meta"), 8))
    frozen = np.ones(8, dtype=np.float32)
    launch((1,), double, (np.ones(8, dtype=np.float32), frozen, 8))  # one that may be written to, of the same kind
    frozen.flags.writeable = False
    for arrays in ((x, frozen), (frozen, x)):
        with pytest.raises(ValueError, match="has to be writable: pass a copy"):
            launch((1,), double, (*arrays, 8))
    with pytest.raises(TypeError, match="complex64"):
        launch((1,), double, (x, x.to(torch.complex64), 8))
    with pytest.raises(TypeError, match="constant"):
        launch((1,), double, (x, x, x))
    with pytest.raises(TypeError, match="holds arrays, not 'int'"):
        launch((1,), double, ([x, 1], x, 8))
    for size in ({8}, {"size": 8}):
        with pytest.raises(TypeError, match=f"constant argument: {type(size).__name__}"):
            launch((1,), double, (x, x, size))
        with pytest.raises(TypeError, match=f"Unsupported kernel argument type '{type(size).__name__}'"):
            launch((1,), double, (size, x, 8))


@ct.kernel
def takes_int(y, n):
    ct.store(y, (0,), ct.full((1,), n, ct.int64))


def test_integers_that_do_not_fit():
    y = torch.zeros(1, dtype=torch.int64)
    launch((1,), takes_int, (y, 2**31 - 1))
    assert y.item() == 2**31 - 1
    with pytest.raises(OverflowError):
        launch((1,), takes_int, (y, 2**31))


def test_empty_grid_and_empty_arrays():
    y = torch.ones(8)
    launch((0,), double, (y, y, 8))
    launch((1,), double, (torch.zeros(0), torch.zeros(0), 8))
    launch((1,), double, (y[1:1], y[3:3], 8))  # of which torch says that they lie at address 0
    assert y.tolist() == [1] * 8


def test_numpy_arrays_and_views_are_written_in_place():
    x, y = np.arange(8, dtype=np.int64), np.zeros(8, dtype=np.int64)
    launch((2,), double, (x, y, 4))
    assert y.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    whole = torch.zeros(4, 8)
    launch((2,), double, (torch.arange(8.0), whole[1], 4))
    assert whole[1].tolist() == y.tolist() and whole[0].sum() == 0


def test_tensors_that_require_grad_are_read_and_written():
    x, y = torch.ones(8, requires_grad=True), torch.zeros(8)
    launch((1,), double, (x, y, 8))
    assert y.tolist() == [2] * 8 and not y.requires_grad


@pytest.mark.parametrize("inside", [False, True])
def test_tensors_of_inference_mode_are_read_and_written(inside):
    with torch.inference_mode():
        x, y = torch.arange(8.0), torch.zeros(8)
    with torch.inference_mode(inside):
        launch((1,), double, (x, y, 8))
    assert torch.equal(y, 2 * x)


@pytest.mark.parametrize("mode", [torch.device("meta"), torch.inference_mode()], ids=["device", "inference"])
def test_modes_of_the_caller_do_not_reach_the_kernel(mode):
    @ct.kernel
    def with_constants(x, y):
        columns = ct.arange(4, dtype=ct.int32)
        tile = ct.where(columns < 3, ct.load(x, (0,), (4,), padding_mode=ct.PaddingMode.NAN), 0.5)
        ct.store(y, (0,), ct.insert(tile, (0,), ct.full((2,), 7.0, ct.float32)))

    x, y = torch.ones(3), torch.zeros(4)
    with mode:
        launch((1,), with_constants, (x, y))  # compiles it
    assert y.tolist() == [7, 7, 1, 0.5]
    y.zero_()
    launch((1,), with_constants, (x, y), sanitize=True)
    assert y.tolist() == [7, 7, 1, 0.5]


def test_the_number_of_threads_is_left_as_it_was():
    before = torch.get_num_threads()
    launch((1,), double, (torch.ones(8), torch.zeros(8), 8), order="threads")
    assert torch.get_num_threads() == before


def test_signatures_are_compiled_once(monkeypatch):
    compilations = []
    typed_ir = _cutile.typed_ir
    monkeypatch.setattr(_cutile, "typed_ir", lambda *args: compilations.append(args) or typed_ir(*args))

    @ct.kernel
    def copy(x, y, size: ConstInt):
        ct.store(y, (ct.bid(0),), ct.load(x, (ct.bid(0),), (size,)))

    for length in (32, 48, 64, 32):  # all multiples of 16: one signature
        x, y = torch.randn(length), torch.zeros(length)
        launch((length // 16,), copy, (x, y, 16))
        assert torch.equal(x, y)
    assert len(compilations) == 1
    launch((1,), copy, (torch.zeros(33), torch.zeros(33), 16))
    launch((1,), copy, (torch.zeros(33), torch.zeros(33), 8))
    launch((1,), copy, (torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32), 8))
    assert len(compilations) == 4


def test_arguments_equal_in_python_but_not_in_type():
    @ct.kernel
    def dtype_of(y, value: ct.Constant):
        ct.store(y, (0,), (ct.full((1,), 7, ct.int32) * value / 2).astype(ct.float32))

    y = torch.zeros(1)
    for value in (1, 1.0):
        launch((1,), dtype_of, (y, value))
        assert y.item() == 3.5


@ct.kernel
def number_of(y, value):
    ct.store(y, (0,), value)


@pytest.mark.parametrize("value", [0.1, 3.4028235e38, -3.4028235e38, 1e39, -1e300, -0.0])
def test_floats_are_rounded_to_float32(value):
    y = torch.zeros(1)
    launch((1,), number_of, (y, value))
    expected = torch.tensor([value], dtype=torch.float64).to(torch.float32)
    assert torch.equal(y.view(torch.int32), expected.view(torch.int32))


@dataclasses.dataclass(frozen=True)
class Window:
    left: int
    right: int


@ct.kernel
def structures(arrays, y, bounds: ct.Constant, scales):
    made = Window(bounds[0] + 1, right=bounds[1])
    total = ct.load(arrays[0], (0,), (4,)) * scales[0] + ct.load(arrays[1], (0,), (4,)) * scales[1]
    ct.store(y, (0,), total + made.left - made.right)


def test_tuples_and_dataclasses():
    y = torch.zeros(4)
    launch((1,), structures, ((torch.ones(4), torch.full((4,), 2.0)), y, (1, 5), (10, 0.5)))
    assert y.tolist() == [8.0] * 4


@ct.kernel
def prints(x):
    print("block", ct.bid(0), ct.load(x, (ct.bid(0),), (2,)))
    ct.printf("%.2f %5d%%\n", 1.5, ct.bid(0))


def test_print(capsys):
    launch((2,), prints, (torch.arange(4, dtype=torch.int32),))
    assert capsys.readouterr().out == "block 0 [0, 1]\n1.50     0%\nblock 1 [2, 3]\n1.50     1%\n"


def test_dependent_launch_calls_do_nothing():
    @ct.kernel
    def dependent(x):
        ct.grid_dependency_control_wait()
        ct.store(x, (0,), ct.ones((1,), ct.float32))
        ct.grid_dependency_control_launch_dependents()

    x = torch.zeros(1)
    launch((1,), dependent, (x,))
    assert x.item() == 1


def test_float64_and_large_indices():
    @ct.kernel
    def scaled(x: ct.IndexedWithInt64, y, factor):
        ct.store(y, (ct.bid(0),), ct.load(x, (ct.bid(0),), (4,)) * factor)

    x, y = torch.rand(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    launch((2,), scaled, (x, y, 0.1))
    assert torch.equal(y, x * torch.tensor(0.1).double())  # a float argument is a float32


def test_unexpected_failures_name_the_statement(monkeypatch):
    def broken(x, y):
        raise ZeroDivisionError("broken")

    from tilegym.interpreter import ops_arithmetic

    monkeypatch.setitem(ops_arithmetic._FLOAT_FUNCTIONS, "sub", broken)

    @ct.kernel
    def subtracts(x):
        ct.store(x, (0,), ct.load(x, (0,), (4,)) - 1)

    with pytest.raises(KernelError, match=r"ZeroDivisionError: broken \(kernel subtracts, at .*test_launch.py:\d+"):
        launch((1,), subtracts, (torch.zeros(4),))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_compile_kernel(arch):
    cubin = interpreter.compile_kernel(double, (torch.zeros(8), torch.zeros(8, device="meta"), 8), arch)
    assert cubin[:4] == b"\x7fELF"


def test_versions():
    for good in ("1.7.0", "1.7.3"):
        _cutile.check_version(good)
    for bad in ("1.6.9", "1.8.0", "2.0", "dev"):
        with pytest.raises(interpreter.UnsupportedCuTileError, match=">=1.7,<1.8"):
            _cutile.check_version(bad)


@ct.kernel
def attention(q, k, v, o, scale: ct.Constant[float], size: ConstInt, rows: ConstInt, columns: ConstInt):
    block, head = ct.bid(0), ct.bid(1)
    query = ct.load(q, (head, block, 0), (1, rows, size)).reshape((rows, size))
    highest = ct.full((rows, 1), -1e30, ct.float32)
    total = ct.zeros((rows, 1), ct.float32)
    out = ct.zeros((rows, size), ct.float32)
    row = block * rows + ct.arange(rows, dtype=ct.int32)[:, None]
    for i in range(ct.cdiv((block + 1) * rows, columns)):
        key = ct.load(k, (head, 0, i), (1, size, columns), order=(0, 2, 1)).reshape((size, columns))
        score = ct.mma(query, key, ct.zeros((rows, columns), ct.float32)) * scale
        column = i * columns + ct.arange(columns, dtype=ct.int32)[None, :]
        score = ct.where(row >= column, score, -1e30)
        new = ct.maximum(highest, ct.max(score, axis=1, keepdims=True))
        weight, decay = ct.exp2(score - new), ct.exp2(highest - new)
        total = total * decay + ct.sum(weight, axis=1, keepdims=True)
        value = ct.load(v, (head, i, 0), (1, columns, size)).reshape((columns, size))
        out = ct.mma(weight.astype(value.dtype), value, out * decay)
        highest = new
    ct.store(o, (head, block, 0), (out / total).astype(o.dtype).reshape((1, rows, size)))


@ct.kernel
def multiply_add(x, y, z, out):
    ct.store(out, (0,), ct.load(x, (0,), (4,)) * ct.load(y, (0,), (4,)) + ct.load(z, (0,), (4,)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_infinities_warn_of_nothing(dtype):
    inf, nan = float("inf"), float("nan")
    x, y, z = (torch.tensor(v).to(dtype) for v in ([inf, 1.0, nan, inf], [1.0, 0.0, 1.0, 2.0], [-inf, inf, 1.0, 3.0]))
    out = torch.zeros(4, dtype=dtype)
    launch((1,), multiply_add, (x, y, z, out))
    torch.testing.assert_close(out, torch.tensor([nan, inf, nan, inf], dtype=dtype), equal_nan=True)


def fastest(run, times: int = 3) -> float:
    """Seconds of this process: what else the machine does shall not count."""
    run()
    seconds = []
    for _ in range(times):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return min(seconds)


def test_speed_of_attention():
    q, k, v = (torch.randn(8, 1024, 64, dtype=torch.bfloat16) for _ in range(3))
    o = torch.zeros_like(q)
    arguments = (q, k, v, o, 0.125 * 1.4426950408889634, 64, 64, 64)
    seconds = fastest(lambda: launch((16, 8), attention, arguments))
    want = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    torch.testing.assert_close(o.float(), want, atol=2e-2, rtol=2e-2)
    assert seconds < 2.0, f"{seconds:.2f} s; 0.15 s on an idle machine"


def test_caches_do_not_keep_kernels_alive():
    before = len(frontend._caches)

    def run():
        @ct.kernel
        def passing(x):
            ct.store(x, (0,), ct.ones((1,), ct.float32))

        launch((1,), passing, (torch.zeros(1),))

    run()
    gc.collect()
    assert len(frontend._caches) <= before + 1


@pytest.mark.parametrize("group", ["memory", "shapes", "reductions", "products", "atomics", "control_flow"])
def test_programs_do_not_keep_the_typed_ir_alive(group):
    """It is many times as large as they are: what a process collects garbage among, as long as a kernel lives."""
    kept = []
    for case in getattr(programs, group)():
        block = _cutile.typed_ir(case.kernel, interpreter.kernel_signature(case.kernel, case.make_args()))
        kept.append((case, frontend.Program(block), weakref.ref(block.ctx)))
        del block
    gc.collect()
    assert not [case for case, _, ir in kept if ir() is not None]


@ct.kernel
def takes_a_list(arrays, y):
    ct.store(y, (0,), ct.load(arrays[1], (0,), (4,)))


def test_signature_of_a_list():
    (arrays, _) = interpreter.kernel_signature(
        takes_a_list, ([torch.ones(16), torch.ones(20)], torch.ones(4))
    ).parameters
    assert arrays.elements_may_alias  # the compiler is told so whatever the arrays are
    element = arrays.element
    assert (element.stride_constant, element.shape_constant, element.shape_divisible_by) == ((1,), (None,), (1,))

import functools

import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import assert_compiles
from common import assert_launches_compile
from common import backends
from common import dtypes
from common import gpu
from common import randn
from common import recorded_launches
from common import some

from tilegym import interpreter
from tilegym.backend import recording
from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.ops import softmax
from tilegym.ops.cutile import parts
from tilegym.ops.cutile import softmax as kernels
from tilegym.ops.cutile import softmax_joint as joint
from tilegym.ops.cutile import softmax_long as long
from tilegym.ops.cutile import workspace
from tilegym.ops.cutile.parts import parts_of
from tilegym.ops.cutile.softmax import softmax_backward
from tilegym.ops.cutile.softmax import softmax_forward
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.pytorch.softmax import softmax as reference

SHAPES = [(1, 1), (3, 5), (37, 128), (2, 7, 96), (5, 4099)]
# Fewer rows would leave the largest error of a gradient in fp16 to how the one largest probability was rounded.
GPU_SHAPES = [(16, 4096), (8192, 4096), (100000, 64), (64, 128256)]
INF = float("inf")
ORDERS = ["patient", "impatient"] if HAS_GPU else ["sequential", "shuffled", "threads"]
HINTS = {"num_worker_warps": 4, "occupancy": 4}  # of softmax_joint_kernel on a CPU


class Test_Softmax(PyTestCase):
    @backends("softmax")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        kwargs = {"x": randn(*shape, dtype=dtype) * 3}
        self.assertCorrectness(softmax, reference, kwargs, {"backend": backend}, gradient=True)

    @dtypes(torch.bfloat16, torch.float16)
    @pytest.mark.parametrize("idle", [0, 8, 232])  # columns of the tile; 232: most of one warp
    @pytest.mark.parametrize("shape", [(40,), (2, 9)], ids=str)
    def test_rows_whose_warps_exchange_once(self, shape, idle, dtype):
        """Warps with maxima far apart, or of nothing; rows that fill their tile or not, or that are NaN as a whole."""
        if HAS_GPU:
            shape = (600,) if len(shape) == 1 else (2, 300)
        shape = *shape, (4096 if HAS_GPU else 512) - idle
        x = randn(*shape, dtype=dtype) * 3
        rows = x.view(-1, shape[-1])
        half = shape[-1] // 2
        rows[1, :half], rows[2, half:], rows[3, 5:], rows[4] = -INF, -INF, -INF, -INF
        rows[5, 7], rows[6, -3], rows[7, half:] = INF, float("nan"), torch.finfo(dtype).max
        rows[8], rows[9, :half], rows[10] = torch.finfo(dtype).min, torch.finfo(dtype).min, 0.0
        recording.forget()
        with recorded_launches(run=True) as recorded:
            y = softmax(x, backend="cutile")
        assert HAS_GPU or [kernel for kernel, _ in recorded] == [hinted(joint.softmax_joint_kernel, **HINTS)]
        expected = torch.softmax(x, -1)
        assert torch.equal(y.isnan(), expected.isnan())
        kwargs = {"x": x[~expected.isnan().any(-1)]}
        self.assertCorrectness(softmax, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
    def test_which_rows_are_read_by_eights(self):
        """Of both passes; those that sixteen divides, or eight does not, are held as they come."""
        for n, forward, backward in (
            (504, joint.softmax_joint_kernel, joint.softmax_backward_eights_kernel),
            (496, kernels.softmax_kernel, kernels.softmax_backward_kernel),
            (500, kernels.softmax_kernel, kernels.softmax_backward_kernel),
            (512, joint.softmax_joint_kernel, kernels.softmax_backward_kernel),
        ):
            x = randn(40, n, dtype=torch.bfloat16)
            recording.forget()
            with recorded_launches() as recorded:
                softmax_forward(x, -1), softmax_backward(x, x, -1)
            expected = [hinted(kernel, **HINTS) for kernel in (forward, backward)]
            found = [kernel for kernel, _ in recorded]
            for kernel, other in zip(found, expected, strict=True):
                assert kernel._pyfunc is other._pyfunc

    def test_large_inputs_become_rows(self, monkeypatch):
        monkeypatch.setattr("tilegym.ops.cutile.tiling.SMALL", 0)
        self.assertCorrectness(softmax, reference, {"x": randn(2, 7, 96)}, {"backend": "cutile"}, gradient=True)

    def test_wide_rows_of_three_dimensions(self):
        kwargs = {"x": randn(2, 1, 17000)}
        self.assertCorrectness(softmax, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("dim", [0, 1, 2, -2])
    def test_dim(self, dim):
        kwargs = {"x": randn(5, 6, 7), "dim": dim}
        self.assertCorrectness(softmax, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @dtypes()
    @pytest.mark.parametrize("n", [20000, 33000])  # bf16: held in registers, in parts
    def test_rows_wider_than_the_registers(self, n, dtype):
        x = randn(4, n, dtype=dtype) * 3
        x[1, :17000] = -INF  # a whole part without a maximum, before and after one that has it
        x[2, 4000:] = -INF
        x[3, n - 5000] = 50.0
        self.assertCorrectness(softmax, reference, {"x": x}, {"backend": "cutile"}, gradient=True)

    @pytest.fixture
    def multiprocessors(self, monkeypatch):
        """Sets how many of them wide rows are planned for."""
        monkeypatch.setattr(long, "wide_plan", long.wide_plan.__wrapped__)
        return lambda number: [monkeypatch.setattr(m, "sm_count", lambda device: number) for m in (kernels, long)]

    @dtypes()
    @pytest.mark.parametrize("shape", [(1, 33001), (8, 33001), (2, 1, 40000), (3, 20000)], ids=str)
    def test_few_wide_rows(self, shape, dtype, multiprocessors):
        multiprocessors(132)
        kwargs = {"x": randn(*shape, dtype=dtype) * 3 - 300}  # parts that are not there have another maximum
        self.assertCorrectness(softmax, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_parts_that_fill_the_row(self):
        """Wide ones, unless more than a tenth of their columns were idle."""
        widths = [long.wide_plan(512, n, -1, False, 2, 0)[4][0] for n in (102400, 128256, 151936)]
        assert widths == [8192, 16384, 16384]

    def test_what_is_left_over_takes_no_part_of_its_own(self):
        """If it is little: of Gemma 3's 262208 columns 64."""
        assert [parts_of(n, 16384) for n in (262144, 262208, 151936, 16384, 16385, 64)] == [
            (16, 0), (16, 64), (10, 0), (1, 0), (1, 32), (1, 0)
        ]  # fmt: skip
        assert [parts_of(n, 8192) for n in (33280, 33281)] == [(4, 512), (5, 0)]

    @pytest.fixture(params=ORDERS)
    def in_one_launch(self, request, multiprocessors, monkeypatch):
        """Wide rows in blocks that wait for others. Where those run later, or they are impatient, they do it all."""
        multiprocessors(12)
        if request.param != "patient":
            monkeypatch.setattr(parts, "PATIENCE", 2**30 if request.param == "threads" else 0)
        if not HAS_GPU:
            options = {"order": request.param, "sanitize": False} if request.param == "threads" else {"seed": 1}
            options = {"order": request.param} | options
            monkeypatch.setattr(interpreter, "launch", functools.partial(interpreter.launch, **options))
        number = torch.get_num_threads()
        torch.set_num_threads(16)
        yield
        torch.set_num_threads(number)

    @dtypes()
    @pytest.mark.parametrize("shape", [(8, 33001), (9, 33001), (2, 4, 40000)], ids=str)
    def test_wide_rows_in_one_launch(self, shape, dtype, in_one_launch):
        x = randn(*shape, dtype=dtype) * 3
        x[0, ..., :20000] = -INF  # a whole part without a maximum
        x[1] -= 300
        x[-1, ..., 5] = 50.0
        x[0, ..., -1] = 9.0
        with recorded_launches(run=True) as launches:
            self.assertCorrectness(softmax, reference, {"x": x}, {"backend": "cutile"}, gradient=True)
        if not HAS_GPU:
            assert [kernel for kernel, _ in launches][::2] == [parts.clear_kernel] * 2

    @pytest.fixture
    def in_turns(self, monkeypatch):
        """Launches on the CPU share the memory of states as those on a stream of a GPU do."""
        monkeypatch.setattr(workspace, "_turns", {})
        if not HAS_GPU:
            monkeypatch.setattr(parts, "shared_states", lambda like, number: workspace._next_turn(-1, number))

    @pytest.mark.parametrize(
        ("columns", "states", "other"),
        [(49008, (3, 6), 9), (33008, (3, 4), 9), (33001, (4, 5), 16)],
        ids=["parts", "more", "edges"],
    )
    @pytest.mark.parametrize("in_one_launch", some(ORDERS, *(o for o in ORDERS if o != "shuffled")), indirect=True)
    def test_launches_in_turns(self, columns, states, other, in_turns, in_one_launch):
        for seed, m in enumerate((8, other, 8, 8, 8, 8, other, 8)):
            x = randn(m, columns, dtype=torch.bfloat16, seed=seed) * 3
            with recorded_launches(run=True) as launches:
                self.assertCorrectness(softmax, reference, {"x": x}, {"backend": "cutile"}, gradient=True)
            sizes = [t.numel() for _, args in launches for t in args if getattr(t, "dtype", None) == torch.int64]
            more = (
                [size - workspace.TURNS * m * n for size, n in zip(sizes, states, strict=True)] if not HAS_GPU else []
            )
            assert all(n // workspace.SPACING in range(workspace.TURNS) for n in more)
            if seed == 4:  # of another thread, or a launch that an exception prevents
                parts.shared_states(x.to("cuda" if HAS_GPU else "cpu"), m * 3)

    def test_a_launch_that_fails(self, in_turns, in_one_launch, monkeypatch):
        kwargs = {"x": randn(8, 33001, dtype=torch.bfloat16)}

        def fails(*args, **kwargs):
            raise MemoryError

        for _ in range(workspace.TURNS):
            self.assertCorrectness(softmax, reference, kwargs, {"backend": "cutile"})
            recording.forget()  # a call that repeats a recorded one launches by itself
            with monkeypatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr(parts, "launch", fails)
                softmax(kwargs["x"].to("cuda" if HAS_GPU else "cpu"), backend="cutile")
            assert not workspace._turns

    @gpu
    def test_calls_that_come_often(self, monkeypatch):
        """Repeated calls take turns, too, where they are recorded by addresses."""
        monkeypatch.setattr(recording, "USES_BEFORE_ADDRESSES", 3)
        for seed in range(16):
            x = randn(512, 40000, seed=seed).cuda() * (seed + 1)
            torch.testing.assert_close(softmax(x, backend="cutile"), x.softmax(-1))

    def test_more_rows_than_a_launch_takes(self, monkeypatch):
        monkeypatch.setattr(kernels, "MAX_ROWS", 2)
        with recorded_launches(run=True) as launches:
            self.assertCorrectness(softmax, reference, {"x": randn(5, 33001)}, {"backend": "cutile"}, gradient=True)
        assert HAS_GPU or len(launches) == 2 * 3 * 2

    def test_special_values_in_one_launch(self, in_one_launch):
        x = randn(8, 40000, dtype=torch.bfloat16)
        x[0] = -INF
        x[1, 3] = float("nan")
        x[2, -1] = INF
        x[4] = 3e38
        x[5, :9] = torch.tensor([32640.0, 32768.0, 33024.0]).repeat(3)
        x[6] = -3e38
        x[7] += 1000
        self.assertCorrectness(softmax, reference, {"x": x}, {"backend": "cutile"})

    @pytest.mark.parametrize("n", [40, 20000, 33000])
    def test_special_values(self, n):
        x = randn(6, n, dtype=torch.bfloat16)
        x[0] = -INF
        x[1, 3] = float("nan")
        x[2, n - 1] = INF
        x[3, : n // 2] = -INF
        x[4] = 3e38
        self.assertCorrectness(softmax, reference, {"x": x}, {"backend": "cutile"})

    @pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # that it is not fp64
    def test_gradcheck(self):
        x = randn(3, 6).requires_grad_()
        torch.autograd.gradcheck(lambda x: softmax(x, backend="cutile"), (x,), eps=1e-2, atol=1e-2, rtol=1e-2)

    @pytest.mark.parametrize(
        "view",
        [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[::2, :32], lambda x: x[:1].expand(5, 64)],
        ids=["transposed", "every_other_column", "slice", "expanded"],
    )
    def test_not_contiguous(self, view):
        kwargs = {"x": view(randn(64, 64, dtype=torch.bfloat16))}
        self.assertCorrectness(softmax, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_written_over(self):
        y = softmax(randn(2, 3, 2, 8).requires_grad_(), backend="cutile")
        y *= 2
        torch.testing.assert_close(y.sum(-1), torch.full_like(y[..., 0], 2.0))

    @pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)], ids=str)
    def test_empty(self, shape):
        self.assertCorrectness(softmax, reference, {"x": randn(*shape)}, {"backend": "cutile"}, gradient=True)

    def test_offsets_beyond_32_bits(self):
        """Three rows, each 2^30 elements after the other; only what is touched takes memory."""
        stride = 2**30 + 64
        x = torch.empty(2 * stride + 64, dtype=torch.bfloat16).as_strided((3, 64), (stride, 1))
        x.copy_(randn(3, 64, dtype=x.dtype))
        self.assertCorrectness(softmax, reference, {"x": x}, {"backend": "cutile"})

    @pytest.mark.parametrize("x", [randn(2, 8, dtype=torch.float64), randn(1)[0]], ids=["fp64", "scalar"])
    def test_unsupported_falls_back(self, x):
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="not fp32, fp16 or bf16|no dimensions"):
            y = softmax(x)
        assert torch.equal(y, reference(x))

    def test_rows_of_too_many_parts_fall_back(self, monkeypatch):
        monkeypatch.setattr(kernels, "MAX_COLUMNS", 8)
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="more than 8 columns"):
            assert torch.equal(softmax(randn(2, 9)), reference(randn(2, 9)))
        softmax(randn(9, 8), backend="cutile")

    @backends("softmax")
    def test_wrong_dim(self, backend):
        with pytest.raises(IndexError, match="Dimension out of range"):
            softmax(randn(2, 3), dim=2, backend=backend)

    @pytest.mark.parametrize("dim", [-1, 0])
    def test_compiled(self, dim):
        self.assertCompiledEqualsEager(lambda x: softmax(x * 2, dim, backend="cutile").sin(), randn(10, 48))

    @pytest.mark.parametrize("dim", [-1, 1])
    def test_operators(self, dim):
        x, dy = randn(3, 2, 48), randn(3, 2, 48, seed=1)
        torch.library.opcheck(softmax_forward.operator, (x, dim))
        torch.library.opcheck(softmax_backward.operator, (dy, x, dim))

    @pytest.mark.parametrize("n", [4096, 32768, 128256])
    def test_compiles_for_every_architecture(self, n):
        x, dy = (torch.empty(4, n, dtype=torch.bfloat16) for _ in range(2))
        assert_launches_compile(lambda: (softmax_forward(x, -1), softmax_backward(dy, x, -1)))

    @dtypes(torch.bfloat16, torch.float16)
    @pytest.mark.parametrize("n", [4096, 3000])
    def test_rows_whose_warps_exchange_once_compile(self, n, dtype):
        x = torch.empty(1024, n, dtype=dtype)
        for kernel, args in (
            (joint.softmax_joint_kernel, (x, x, 4096, 8, n == 4096)),
            (joint.softmax_backward_eights_kernel, (x, x, x, 4096, 8)),
        ):
            assert_compiles(hinted(kernel, num_worker_warps=8, occupancy=4), args)

    @dtypes()
    @pytest.mark.parametrize("n", [128256, 262208])
    def test_wide_rows_in_one_launch_compile(self, n, dtype, multiprocessors):
        multiprocessors(132)
        x, dy = (torch.empty(512, n, dtype=dtype) for _ in range(2))
        assert_launches_compile(lambda: (softmax_forward(x, -1), softmax_backward(dy, x, -1)), ("sm_90",))

    @gpu
    def test_more_than_32_bits_of_elements(self):
        self.assertLargeInput(lambda x: softmax(x, backend="cutile"), 2**19 + 5, 4096)

    @gpu
    @pytest.mark.parametrize("shape", [(16, 4096), (16, 128256), (300, 128256)], ids=str)
    def test_graph_capture(self, shape):
        def both(x):
            y = softmax_forward(x, -1)
            return y, softmax_backward(x, y, -1)

        self.assertCaptures(both, randn(*shape, dtype=torch.bfloat16))

    @gpu
    def test_several_streams_at_once(self):
        inputs = [randn(300, 128256, dtype=torch.bfloat16, seed=seed) for seed in range(3)]

        def both(x):
            y = softmax_forward(x, -1)
            return y, softmax_backward(x, y, -1)

        expected = [both(x) for x in inputs]
        streams = [torch.cuda.Stream() for _ in inputs]
        torch.cuda.synchronize()
        for _ in range(5):
            results = []
            for stream, x in zip(streams, inputs, strict=True):
                with torch.cuda.stream(stream):
                    results.append(both(x))
            torch.cuda.synchronize()
            for got, want in zip(results, expected, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0)

"""rms_norm_linear, rms_norm_swiglu and linear_add."""

import pytest
import torch
from common import HAS_GPU
from common import OVERLAPS
from common import PyTestCase
from common import assert_compiles
from common import assert_launches_compile
from common import backends
from common import device
from common import distinct
from common import dtypes
from common import gpu
from common import randn
from common import recorded_launches
from common import sanitized
from common import some

from tilegym import ops
from tilegym.backend import recording
from tilegym.interpreter import compile_kernel
from tilegym.ops import geglu
from tilegym.ops import linear_add
from tilegym.ops import rms_norm_linear
from tilegym.ops import rms_norm_swiglu
from tilegym.ops.cutile import fused_gemv
from tilegym.ops.cutile import linear
from tilegym.ops.cutile import stream_gemv
from tilegym.ops.cutile.early_weights import NOTHING
from tilegym.ops.cutile.early_weights import columns_of
from tilegym.ops.cutile.early_weights import early_columns
from tilegym.ops.cutile.early_weights import rows_fit
from tilegym.ops.cutile.fused_gemv import gemv_add
from tilegym.ops.cutile.fused_gemv import norm_gemv
from tilegym.ops.cutile.fused_gemv import norm_swiglu
from tilegym.ops.pytorch import fused_gemv as reference

# x and the N of the weights: one row, in one tile, in several and not a multiple of it; several rows, 16 and more.
SHAPES = [
    ((1, 64), (32,)),
    ((1, 128), (136, 8, 16)),
    ((1, 1, 200), (24, 13, 40)),
    ((77,), (9, 16)),
    ((1, 96), (24, 16, 8, 16)),
    ((1, 50), (12, 9, 17, 3)),
    ((2, 30), (12, 9, 17, 16)),
    ((3, 70), (40, 8, 24)),
    ((2, 2, 33), (5,)),
    ((8, 1, 130), (33, 70)),
    ((16, 64), (64, 9, 16, 24)),
    ((17, 40), (24, 9)),
]
GPU_SHAPES = [((1, 1, 4096), (4096, 1024, 1024)), ((1, 14336), (4096,)), ((1, 2048), (6144,)), ((20, 4096), (1024,))]
GPU_SHAPES += [((8, 1, 4096), (4096, 1024, 1024)), ((16, 14336), (4096,)), ((2, 2048), (2048, 512, 512))]
shapes = pytest.mark.parametrize(("shape", "widths"), SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
norms = pytest.mark.parametrize("casting", ["llama", "gemma"])


def weights_of(k, widths, dtype, seed=10):
    return [randn(n, k, dtype=dtype, seed=seed + i) * k**-0.5 for i, n in enumerate(widths)]


class Test_RMSNormLinear(PyTestCase):
    @backends("rms_norm_linear")
    @dtypes()
    @pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
    @norms
    @shapes
    def test_op(self, backend, dtype, shape, widths, casting, bias):
        weights = weights_of(shape[-1], widths, dtype)
        tensors = {f"w{i}": w for i, w in enumerate(weights)}
        if bias:
            tensors |= {f"b{i}": randn(n, dtype=dtype, seed=20 + i) for i, n in enumerate(widths)}
        kwargs = dict(x=randn(*shape, dtype=dtype), norm_weight=randn(shape[-1], dtype=dtype, seed=2)) | tensors

        def call(function):
            def run(x, norm_weight, **rest):
                ws, bs = ([rest[f"{k}{i}"] for i in range(len(widths))] if f"{k}0" in rest else None for k in "wb")
                options = {"backend": rest["backend"]} if "backend" in rest else {}
                return function(x, norm_weight, 1e-5, ws, bs, 1.0 if casting == "gemma" else 0.0, casting, **options)

            return run

        extra = {"backend": backend}
        self.assertCorrectness(call(rms_norm_linear), call(reference.rms_norm_linear), kwargs, extra)
        small = {k: v for k, v in kwargs.items() if v.numel() < 10**5}
        if len(small) == len(kwargs):
            self.assertCorrectness(call(rms_norm_linear), call(reference.rms_norm_linear), kwargs, extra, gradient=True)

    @backends("rms_norm_linear")
    @dtypes()
    @pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
    @pytest.mark.parametrize("shape", [(1, 24), (1, 64), (1, 1, 160), (1, 192), (1, 256), (3, 24)], ids=str)
    def test_without_a_norm(self, backend, dtype, shape, bias):
        """As OLMo 2 projects: by each of the kernels."""
        widths = (20, 8, 12)
        tensors = dict(zip("qkv", weights_of(shape[-1], widths, dtype), strict=True))
        tensors |= {f"bias{i}": randn(n, dtype=dtype, seed=n) for i, n in enumerate(widths)} if bias else {}

        def call(function):
            def run(x, q, k, v, backend=None, **biases):
                options = {"backend": backend} if backend else {}
                return function(x, None, 1e-5, [q, k, v], [*biases.values()] or None, **options)

            return run

        kwargs = dict(x=randn(*shape, dtype=dtype)) | tensors
        for gradient in (False, True):
            ours, theirs = call(rms_norm_linear), call(reference.rms_norm_linear)
            self.assertCorrectness(ours, theirs, kwargs, {"backend": backend}, gradient=gradient)

    @pytest.mark.parametrize("count", [0, 5])
    @backends("rms_norm_linear")
    def test_wrong_arguments(self, backend, count):
        x, weight = randn(1, 8), randn(8)
        with pytest.raises(ValueError, match=f"rms_norm_linear: {count} weights"):
            rms_norm_linear(x, weight, 1e-5, weights_of(8, (4,) * count, x.dtype), backend=backend)
        with pytest.raises(ValueError, match="2 biases for 1 weights"):
            rms_norm_linear(x, weight, 1e-5, weights_of(8, (4,), x.dtype), [randn(4), randn(4)], backend=backend)
        with pytest.raises(ValueError, match="linear: expected x"):
            rms_norm_linear(x, weight, 1e-5, weights_of(9, (4,), x.dtype), backend=backend)


class Test_RMSNormSwiGLU(PyTestCase):
    @backends("rms_norm_swiglu")
    @dtypes()
    @norms
    @shapes
    @pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
    def test_op(self, backend, dtype, shape, widths, casting, activation):
        gate, up = weights_of(shape[-1], widths[:1] * 2, dtype)
        kwargs = dict(x=randn(*shape, dtype=dtype), norm_weight=randn(shape[-1], dtype=dtype, seed=2))
        kwargs |= dict(gate_weight=gate, up_weight=up, eps=1e-5, casting=casting, activation=activation)
        extra = {"backend": backend}
        self.assertCorrectness(rms_norm_swiglu, reference.rms_norm_swiglu, kwargs, extra)
        if gate.numel() < 10**5:

            def row_by_row(x, **others):
                return torch.stack([reference.rms_norm_swiglu(x=row, **others) for row in x])

            others = (row_by_row,) if len(shape) > 1 else ()
            self.assertCorrectness(rms_norm_swiglu, reference.rms_norm_swiglu, kwargs, extra, True, others)

    @backends("rms_norm_swiglu")
    @dtypes()
    @pytest.mark.parametrize("shape", [(1, 24), (1, 64), (1, 128), (1, 256), (3, 24)], ids=str)
    def test_without_a_norm(self, backend, dtype, shape):
        gate, up = weights_of(shape[-1], (20, 20), dtype)
        kwargs = dict(x=randn(*shape, dtype=dtype), norm_weight=None, eps=1e-5, gate_weight=gate, up_weight=up)
        self.assertCorrectness(rms_norm_swiglu, reference.rms_norm_swiglu, kwargs, {"backend": backend})

    @backends("rms_norm_swiglu")
    @pytest.mark.parametrize(("activation", "approximate"), [("gelu_tanh", "tanh"), ("gelu", "none")])
    def test_gelu_is_that_of_geglu(self, backend, activation, approximate):
        """To the last bit of bf16, of sums that are exact; the other approximation is farther off at both ends."""
        x, one = torch.ones(1, 64, device=device(), dtype=torch.bfloat16), torch.ones(64, device=device()).bfloat16()
        gate, up = torch.zeros(2, 48, 64, device=device(), dtype=torch.bfloat16)
        gate[:, 0], up[:, 1] = torch.linspace(-4, 4, 48).bfloat16(), torch.linspace(3, -2, 48).bfloat16()
        with torch.no_grad():
            found = rms_norm_swiglu(x, one, 0.0, gate, up, activation=activation, backend=backend)
            expected = geglu(gate[None, :, 0].contiguous(), up[None, :, 1].contiguous(), approximate, backend=backend)
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)

    @backends("rms_norm_swiglu")
    def test_wrong_arguments(self, backend):
        x, weight = randn(1, 8), randn(4, 8)
        with pytest.raises(ValueError, match="activation is 'relu', allowed are 'silu', 'gelu_tanh', 'gelu'"):
            rms_norm_swiglu(x, randn(8), 1e-5, weight, weight, activation="relu", backend=backend)


class Test_LinearAdd(PyTestCase):
    @backends("linear_add")
    @dtypes()
    @pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
    @shapes
    def test_op(self, backend, dtype, shape, widths, bias):
        n, k = widths[0], shape[-1]
        kwargs = dict(x=randn(*shape, dtype=dtype), weight=weights_of(k, (n,), dtype)[0])
        kwargs |= dict(residual=randn(*shape[:-1], n, dtype=dtype, seed=3))
        kwargs |= dict(bias=randn(n, dtype=dtype, seed=4)) if bias else {}
        extra = {"backend": backend}
        self.assertCorrectness(linear_add, reference.linear_add, kwargs, extra)
        if n * k < 10**5:
            self.assertCorrectness(linear_add, reference.linear_add, kwargs, extra, gradient=True)

    @backends("linear_add")
    @dtypes()
    @pytest.mark.parametrize("shape", [(1, 24), (1, 128), (1, 1, 256), (3, 24), (9, 130)], ids=str)
    def test_scale(self, backend, dtype, shape):
        """As Granite's residuals: by each of the kernels."""
        n, k = 16, shape[-1]
        kwargs = dict(x=randn(*shape, dtype=dtype), weight=weights_of(k, (n,), dtype)[0], scale=0.22)
        kwargs |= dict(residual=randn(*shape[:-1], n, dtype=dtype, seed=3), bias=randn(n, dtype=dtype, seed=4))
        for gradient in (False, True):
            self.assertCorrectness(linear_add, reference.linear_add, kwargs, {"backend": backend}, gradient=gradient)

    @backends("linear_add")
    def test_wrong_arguments(self, backend):
        x, weight = randn(1, 8), randn(4, 8)
        with pytest.raises(ValueError, match=r"residual has shape \(1, 5\)"):
            linear_add(x, weight, randn(1, 5), backend=backend)
        with pytest.raises(TypeError, match="residual is torch.float16"):
            linear_add(x, weight, randn(1, 4, dtype=torch.float16), backend=backend)

    def test_special_values(self):
        x, weight = randn(1, 40), randn(9, 40, seed=1)
        x[0, 3], weight[2, 5] = float("inf"), float("nan")
        self.assertCorrectness(
            linear_add, reference.linear_add, dict(x=x, weight=weight, residual=randn(1, 9)), {"backend": "cutile"}
        )


def one_row(dtype=torch.bfloat16, k=4096, n=1024):
    x, norm = torch.zeros(1, 1, k, dtype=dtype, device=device()), torch.ones(k, dtype=dtype, device=device())
    return x, norm, torch.zeros(n, k, dtype=dtype, device=device())


def launches():
    x, norm, weight = one_row()
    gemma = (1e-5, [weight, weight], [weight[0, :1024]] * 2, 1.0, False)
    norm_gemv(x, norm, 1e-5, [weight] * 3, [], 0.0, True)
    norm_gemv(x, norm, 1e-5, [weight] * 4, [], 0.0, True)
    norm_gemv(x, norm, *gemma)
    norm_swiglu(x, norm, 1e-5, weight, weight, 0.0, True, "silu")
    norm_swiglu(x, norm, 1e-5, weight, weight, 0.0, True, "gelu")
    norm_swiglu(x, norm, 1e-5, weight, weight, 1.0, False, "gelu_tanh")
    gemv_add(x, weight, x[..., :1024].contiguous(), None, 1.0)
    gemv_add(x, weight, x[..., :1024].contiguous(), None, 0.22)
    norm_gemv(x, None, 1e-5, [weight] * 3, [], 0.0, True)
    norm_swiglu(x, None, 1e-5, weight, weight, 0.0, True, "silu")


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
def test_compiles_for_every_architecture():
    assert_launches_compile(launches)


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
def test_overlapping_launches_compile():
    """OVERLAP, every kernel's last argument, needs compute capability 9.0."""
    with recorded_launches() as recorded:
        launches()
    for kernel, args in distinct(recorded):
        assert args[-1] is False
        assert compile_kernel(kernel, (*args[:-1], True), "sm_90")[:4] == b"\x7fELF"


@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], torch.bfloat16))
def test_operators(dtype):
    x, norm, weight = randn(1, 24, dtype=dtype), randn(24, dtype=dtype), randn(9, 24, dtype=dtype)
    torch.library.opcheck(norm_gemv.operator, (x, norm, 1e-5, [weight, weight], [], 0.0, True))
    torch.library.opcheck(norm_swiglu.operator, (x, norm, 1e-5, weight, weight, 0.0, True, "silu"))
    torch.library.opcheck(gemv_add.operator, (x, weight, randn(1, 9, dtype=dtype), None, 0.5))
    torch.library.opcheck(norm_gemv.operator, (x, None, 1e-5, [weight, weight], [], 0.0, True))
    torch.library.opcheck(norm_swiglu.operator, (x, None, 1e-5, weight, weight, 0.0, True, "silu"))


@pytest.mark.parametrize("rows", [1, 3])
def test_compiled(rows):
    x, norm, weight = randn(rows, 24), randn(24, seed=1), randn(24, 24, seed=2)

    def call(x):
        q, k = rms_norm_linear(x, norm, 1e-5, [weight, weight], backend="cutile")
        inner = rms_norm_swiglu(q + k, norm, 1e-5, weight, weight, backend="cutile")
        return linear_add(inner, weight, x, backend="cutile")

    torch.compiler.reset()
    with torch.no_grad(), sanitized():
        compiled = torch.compile(call, fullgraph=True, backend="inductor" if HAS_GPU else "aot_eager")(x)
        torch.testing.assert_close(compiled, call(x), **({} if HAS_GPU else {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("k", [64, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_whatever_bits_weights_hold_results_stay(dtype, k, rows):
    """What is read ahead of the wait is all there is to that; the last block would write to the first result."""
    x, norm = randn(rows, k, dtype=dtype), randn(k, dtype=dtype)
    weight = torch.arange(16 * k, device=device()).view(16, k).sub(8).to(torch.int16).view(dtype)
    weight[:, ::2] = torch.full((16, k // 2), -1, dtype=torch.int16, device=device()).view(dtype)
    weight[0] = 1.0
    with torch.no_grad():
        for out in (
            linear_add(x, weight, x[:, :16].contiguous(), backend="cutile"),
            ops.linear(x, weight, settled=True, backend="cutile"),
            rms_norm_linear(x, norm, 1e-5, [weight], backend="cutile")[0],
            rms_norm_swiglu(x, norm, 1e-5, weight, weight, backend="cutile"),
        ):
            assert out[:, 0].isfinite().all() and out[0, 0] != 0 and out[:, 1:].isnan().all()


def test_weights_are_read_early_in_graphs():
    sizes = (8192, 4096, 1024, 256)
    large, middle, small, tiny = weights = [torch.empty(4096, k, dtype=torch.bfloat16, device=device()) for k in sizes]
    early = 0 if HAS_GPU else 1024  # a CPU reads them always, so that tests see it
    assert early_columns(large, 4, 1024) == early_columns(small, 4, 1024) == early
    assert early_columns(large.float(), 4, 1024) == 0
    assert columns_of(4096, 8, 768) == 768 and columns_of(4096, 8, 384) == 512 and columns_of(100, 8, 768) == 256
    assert not any(map(rows_fit, weights))
    if HAS_GPU:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            assert [early_columns(w, 4, 1024) for w in weights] == [1024, 512, 512, 0]
            assert [rows_fit(w) for w in weights] == [False, True, True, False]
            assert not any(map(rows_fit, (middle[:-1], middle.float(), small[:, :1000])))


def rows_at_once(dtype, k=128):
    """Results of linear_add and rms_norm_linear with and without biases, and the kernels that ran."""
    x, norm = randn(1, k, dtype=dtype), randn(k, dtype=dtype, seed=1)
    q, *_ = weights = weights_of(k, (160, 8, 4), dtype)
    biases = [randn(n, dtype=dtype, seed=n) for n in (160, 8, 4)]
    residual = randn(1, 160, dtype=dtype, seed=3)
    recording.forget()  # which kernels ran before
    with recorded_launches(run=True) as recorded, torch.no_grad():
        results = [
            linear_add(x, q, residual, backend="cutile"),
            linear_add(x, q, residual, biases[0], backend="cutile"),
            *rms_norm_linear(x, norm, 1e-5, weights, backend="cutile"),
            *rms_norm_linear(x, norm, 1e-5, weights[:2], biases[:2], 1.0, "gemma", backend="cutile"),
        ]
    return results, [kernel for kernel, _ in recorded]


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
@pytest.mark.parametrize("dtype", some([torch.bfloat16, torch.float16], torch.bfloat16))
def test_rows_that_registers_hold_change_no_bit(dtype, monkeypatch):
    held, kernels = rows_at_once(dtype)
    assert kernels == [linear.at_once_gemv_kernel] * 2 + [stream_gemv.stream_norm_gemv_kernel] * 2
    monkeypatch.setattr(linear, "rows_fit", lambda weight: False)
    monkeypatch.setattr(stream_gemv, "norm_plan", lambda weights: None)
    begun, kernels = rows_at_once(dtype)
    assert kernels == [linear.held_gemv_kernel] * 2 + [fused_gemv.norm_gemv_kernel] * 2
    monkeypatch.setattr(linear, "held_plan", lambda *args: None)
    loaded, kernels = rows_at_once(dtype)
    assert kernels == [linear.gemv_kernel] * 2 + [fused_gemv.norm_gemv_kernel] * 2
    assert all(map(torch.equal, held, loaded)) and all(map(torch.equal, begun, loaded))


def test_rows_that_registers_hold_by_their_sizes(monkeypatch):
    """As measured: rows and columns of a tile, columns held; the blocks' last wave is as full as may be."""
    monkeypatch.setattr(linear, "sm_count", lambda device: 132)
    monkeypatch.setattr(linear, "overlaps", lambda device: True)
    for tiles, sizes in {
        (8, 256, 1536): [(4096, 14336), (3584, 18944), (3072, 8192), (8192, 8192)],
        (4, 512, 3072): [(2048, 8192), (2048, 6144)],
        (4, 512, 2048): [(2048, 11008)],
        (4, 512, 1024): [(2560, 4096), (2880, 4096), (5120, 5120)],
    }.items():
        for n, k in sizes:
            assert linear.held_plan.__wrapped__(n, k, 0)[1:4] == tiles, (n, k)
    assert linear.held_plan.__wrapped__(4098, 4096, 0) is None


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
def test_rows_that_registers_hold_compile():
    """With the sizes of a GPU's."""
    x, norm, weight = one_row(k=4096, n=4096)
    x = x[0]
    for overlap, architectures in OVERLAPS:
        sizes = (4096, 4, 1024, overlap)
        for cols in (0, 4096):
            args = (x, weight, 0, x, x, NOTHING, False, True, 1.0, *sizes[:3], 528, cols, sizes[3])
            assert_compiles(linear.at_once_gemv_kernel, args, architectures)
        long = torch.empty(512, 14336, dtype=torch.bfloat16)
        args = (long[:1], long, 0, x[:, :512], x[:, :512], False, True, 1.0, 14336, 8, 256, 1024, overlap)
        assert_compiles(linear.held_gemv_kernel, args, architectures)


@gpu
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_graph_capture_and_overlap(rows):
    """A chain of launches that overlap gives what it gives with the device idle between them."""
    x, norm = randn(rows, 4096, dtype=torch.bfloat16), randn(4096, dtype=torch.bfloat16, seed=1)
    gate, up, down = (
        randn(*s, dtype=torch.bfloat16, seed=i) / 64 for i, s in enumerate(((14336, 4096),) * 2 + ((4096, 14336),))
    )

    def chain(x, wait=lambda: None, backend="cutile", weights=(norm, gate, up, down)):
        norm, gate, up, down = weights
        for _ in range(8):
            inner = rms_norm_swiglu(x, norm, 1e-5, gate, up, backend=backend)
            wait()
            x = linear_add(inner, down, x, backend=backend)
            wait()
            (x,) = rms_norm_linear(x, norm, 1e-5, [down[:, :4096].contiguous()], backend=backend)
            wait()
        return x

    assert torch.equal(chain(x), chain(x, torch.cuda.synchronize))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(x)
    weights = [t.double() for t in (norm, gate, up, down)]
    for seed in (100, 101):
        x.copy_(randn(rows, 4096, dtype=torch.bfloat16, seed=seed))
        graph.replay()
        first = captured.clone()
        graph.replay()
        assert torch.equal(captured, first)
        # Launches in a graph add up in another order.
        exact = chain(x.double(), backend="pytorch", weights=weights)
        errors = [(y.double() - exact).norm() / exact.norm() for y in (captured, chain(x))]
        assert errors[0] <= 2 * errors[1]

from unittest import mock

import cuda.tile as ct
import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import assert_launches_compile
from common import backends
from common import device
from common import dtypes
from common import gpu
from common import randn
from common import recorded_launches
from common import sanitized

from tilegym.ops import group_gemm
from tilegym.ops import ragged_group_gemm
from tilegym.ops.cutile import group_gemm as cutile
from tilegym.ops.cutile import moe_experts
from tilegym.ops.cutile import ragged_group_gemm as ragged
from tilegym.ops.pytorch.group_gemm import group_gemm as reference
from tilegym.ops.pytorch.group_gemm import ragged_group_gemm as ragged_reference

# M, K, N of each product: one; several of as many tiles; one has no rows, one more than a tile.
GROUPS = [[(3, 20, 40)], [(3, 20, 40), (30, 9, 50)] * 2, [(3, 20, 40), (70, 33, 9), (0, 5, 6), (17, 64, 65)]]
# Offsets of four groups among 48 rows: empty ones, rows before and behind them all, whole tiles.
OFFSETS = [[0, 3, 3, 40, 41], [2, 18, 30, 30, 37], [0, 0, 0, 0, 0], [0, 16, 32, 48, 48], [5, 5, 48, 48, 48]]


def tensors(groups, dtype, transpose_b):
    """a0, a1, ..., b0, b1, ... by name: assertCorrectness differentiates in arguments that are tensors."""
    a = {f"a{i}": randn(m, k, dtype=dtype, seed=i) for i, (m, k, _) in enumerate(groups)}
    shapes = [(n, k) if transpose_b else (k, n) for _, k, n in groups]
    return a | {f"b{i}": randn(*shape, dtype=dtype, seed=9 + i) for i, shape in enumerate(shapes)}


def by_name(function, transpose_b, **options):
    def call(**named):
        a, b = ([t for name, t in named.items() if name[0] == letter] for letter in "ab")
        return tuple(function(a, b, transpose_b, **options))

    return call


class Test_GroupGEMM(PyTestCase):
    @pytest.fixture
    def batches(self, monkeypatch):
        """The shapes of the operands A that came as a batch."""
        shapes, forward = [], cutile.batch_forward

        def batch_forward(a, *args):
            shapes.append(tuple(a.shape))
            return forward(a, *args)

        monkeypatch.setattr(cutile, "batch_forward", batch_forward)
        return shapes

    @backends("group_gemm")
    @dtypes()
    @pytest.mark.parametrize("transpose_b", [False, True], ids=["", "transpose_b"])
    @pytest.mark.parametrize("groups", GROUPS, ids=["one", "equal", "unequal"])
    def test_op(self, backend, dtype, groups, transpose_b):
        ours = by_name(group_gemm, transpose_b, backend=backend)
        self.assertCorrectness(
            ours, by_name(reference, transpose_b), tensors(groups, dtype, transpose_b), gradient=True
        )

    @pytest.mark.parametrize(
        "view", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[:, 3:40]], ids=["t", "step", "cut"]
    )
    def test_not_contiguous(self, view):
        kwargs = {name: view(randn(64, 64, seed=i)) for i, name in enumerate(("a0", "a1"))}
        kwargs |= {f"b{i}": view(randn(64, 64, seed=9)).t() for i in range(2)}
        self.assertCorrectness(
            by_name(group_gemm, False, backend="cutile"), by_name(reference, False), kwargs, gradient=True
        )

    @backends("group_gemm")
    def test_empty(self, backend):
        assert group_gemm([], [], backend=backend) == []
        (c,) = group_gemm([randn(3, 0)], [randn(0, 4)], backend=backend)
        assert c.shape == (3, 4) and not c.any()

    @backends("group_gemm")
    def test_wrong_arguments(self, backend):
        x = randn(4, 4)
        with pytest.raises(ValueError, match="2 matrices, group_B 1"):
            group_gemm([x, x], [x], backend=backend)
        with pytest.raises(ValueError, match="pair 1 does not fit"):
            group_gemm([x, x], [x, x[1:]], backend=backend)
        with pytest.raises(TypeError, match="pair 0 has"):
            group_gemm([x], [x.half()], backend=backend)

    @backends("group_gemm")
    def test_one_tensor(self, backend):
        a, b = randn(3, 5, 8).requires_grad_(), randn(3, 4, 8).requires_grad_()
        out = torch.stack(group_gemm(a, b, True, backend=backend))
        torch.testing.assert_close(out, a @ b.mT)
        expected = torch.autograd.grad((a @ b.mT).square().sum(), (a, b))
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (a, b)), expected)
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(torch.stack(group_gemm(a, b, True, backend=backend)), out)

    def test_double_falls_back(self):
        x = randn(4, 4, dtype=torch.float64)
        with pytest.warns(match="not fp32, fp16 or bf16"):
            assert torch.equal(group_gemm([x], [x], backend="cutile")[0], x @ x)

    @pytest.mark.parametrize("transpose_b", [False, True], ids=["", "transpose_b"])
    def test_slices_of_one_tensor(self, transpose_b, batches):
        a, b = randn(5, 18, 40, dtype=torch.float16), randn(5, *((24, 40) if transpose_b else (40, 24)), seed=1).half()
        leaves = [x.clone().requires_grad_() for x in (a, b)]
        a, b = (list(x)[1::2] for x in leaves)
        outputs = group_gemm(a, b, transpose_b, backend="cutile")
        expected = reference([x.detach().double() for x in a], [x.detach().double() for x in b], transpose_b)
        assert batches == [(2, 18, 40)]
        for c, want in zip(outputs, expected, strict=True):
            torch.testing.assert_close(c.double(), want, rtol=2e-3, atol=2e-2)
        squares = outputs[1] * outputs[1]
        outputs[0].mul_(2)  # which no view may be, and which changes nothing that is saved of another output
        (outputs[0].sum() + squares.sum()).backward()
        exact = [x.detach().double().requires_grad_() for x in leaves]
        c0, c1 = reference(list(exact[0])[1::2], list(exact[1])[1::2], transpose_b)
        (2 * c0.sum() + (c1 * c1).sum()).backward()
        for leaf, want in zip(leaves, exact, strict=True):
            assert (leaf.grad - want.grad).norm() < 2e-3 * want.grad.norm()

    def test_where_matrices_lie_is_asked_in_every_call(self, batches):
        """Their shapes, by which calls are recorded, do not tell it."""
        whole, b = randn(6, 9, 32, dtype=torch.bfloat16), randn(3, 32, 16, dtype=torch.bfloat16, seed=1)
        for a in ([*whole[::2]], [*whole[::2]], [*whole[::2]], [*whole[:3]], [whole[0], whole[1], whole[5]]):
            for c, want in zip(group_gemm(a, list(b), backend="cutile"), reference(a, list(b)), strict=True):
                torch.testing.assert_close(c, want)
        assert len(batches) == 4

    def test_evenly_spaced(self):
        whole = randn(6, 4, 8)
        for group in ([*whole], [*whole[1::2]], [*whole.mT], [*whole[:, :2, 3:6]], [whole[0, :2], whole[0, 2:]]):
            assert torch.equal(cutile.evenly_spaced(group), torch.stack(group))
        apart = [whole[0], whole[1], whole[3]], [whole[1], whole[0]], [whole[0], whole[0]], [whole[0]]
        for group in (
            *apart,
            [whole[0, :2], whole[1, :3]],
            [whole[0], whole[1].view(8, 4).t()],
            [*whole.clone(), whole[0]],
        ):
            assert cutile.evenly_spaced(group) is None
        alone = sorted((torch.empty(4, 8) for _ in range(2)), key=torch.Tensor.data_ptr)
        assert cutile.evenly_spaced(alone) is None

    def test_compiles_for_every_architecture(self):
        a = [torch.empty(m, 64, dtype=torch.bfloat16) for m in (128, 200)]
        b = [torch.empty(128, 64, dtype=torch.bfloat16)] * 2
        assert_launches_compile(lambda: group_gemm(a, b, transpose_b=True, backend="cutile"))

    @pytest.mark.parametrize("rows", [(16, 16), (64, 16), (512, 512), (512, 128)], ids=str)
    def test_compiles_with_the_tiles_of_a_gpu(self, rows, monkeypatch):
        plan = cutile._list_plan
        monkeypatch.setattr(cutile, "_list_plan", lambda c, itemsize, device: plan(c, itemsize, 0))
        monkeypatch.setattr(cutile, "is_hopper", lambda device: True)
        monkeypatch.setattr(cutile, "sm_count", lambda device: 132)
        a = [torch.empty(m, 256, dtype=torch.bfloat16) for m in rows]
        b = [torch.empty(256, 4096, dtype=torch.bfloat16)] * 2
        assert_launches_compile(lambda: group_gemm(a, b, backend="cutile"), ("sm_90",))

    @pytest.mark.parametrize("m, count, n", [(64, 3, 200), (128, 8, 256), (512, 4, 4096), (2048, 8, 2048)])
    def test_batches_compile_with_the_tiles_of_a_gpu(self, m, count, n, monkeypatch):
        plan = cutile._batch_plan
        monkeypatch.setattr(cutile, "_batch_plan", lambda count, m, n, device: plan(count, m, n, 0))
        monkeypatch.setattr(cutile, "is_hopper", lambda device: True)
        monkeypatch.setattr(cutile, "sm_count", lambda device: 132)
        a, b = torch.empty(count, m, 64, dtype=torch.bfloat16), torch.empty(count, n, 64, dtype=torch.bfloat16)
        assert_launches_compile(lambda: group_gemm(list(a), list(b), True, backend="cutile"), ("sm_90",))

    @pytest.mark.parametrize(("groups", "count"), [(GROUPS[0], 1), (GROUPS[-1], 3)], ids=["few rows", ""])
    def test_capture_gives_the_same_bits(self, groups, count, monkeypatch):
        """A launch into a graph takes no lists."""
        kwargs = tensors(groups, torch.bfloat16, True)
        ours = by_name(group_gemm, True, backend="cutile")
        expected = ours(**kwargs)
        monkeypatch.setattr(cutile, "_is_captured", lambda x: True)
        with recorded_launches(run=True) as launches:
            on_cpu = ours(**{name: t.cpu() for name, t in kwargs.items()})
        assert len(launches) == count and not any(isinstance(arg, list) for _, args in launches for arg in args)
        for a, b in zip(on_cpu, expected, strict=True):
            torch.testing.assert_close(a, b.cpu(), **({} if HAS_GPU else {"rtol": 0, "atol": 0}))

    @gpu
    def test_graph_capture(self):
        kwargs = tensors([(100, 256, 64), (70, 33, 9)], torch.bfloat16, True)
        ours = by_name(group_gemm, True, backend="cutile")
        self.assertCaptures(lambda *t: ours(**dict(zip(kwargs, t, strict=True))), *kwargs.values())

    @gpu
    @pytest.mark.parametrize("transpose_b", [False, True], ids=["", "transpose_b"])
    @pytest.mark.parametrize(
        "groups",
        [
            [(512, 2048, 768), (1, 4096, 4096), (3000, 1023, 513)],
            [(512, 2048, 768)] * 8,
            [(16, 2048, 4096), (3, 64, 99)],
        ],
        ids=["unequal", "equal", "few rows"],
    )
    def test_real_sizes(self, groups, transpose_b):
        kwargs = tensors(groups, torch.bfloat16, transpose_b)
        ours = by_name(group_gemm, transpose_b, backend="cutile")
        self.assertCorrectness(ours, by_name(reference, transpose_b), kwargs, gradient=True)


def arguments(offsets, dtype, transpose_b=True, bias=False, rows=48, k=30, n=20):
    b = randn(len(offsets) - 1, n, k, dtype=dtype, seed=1)
    given = {"a": randn(rows, k, dtype=dtype), "b": b if transpose_b else b.mT.contiguous(), "transpose_b": transpose_b}
    given["offsets"] = torch.tensor(offsets, device=device())
    return given | ({"bias": randn(len(offsets) - 1, n, dtype=dtype, seed=2)} if bias else {})


class Test_RaggedGroupGEMM(PyTestCase):
    @backends("ragged_group_gemm")
    @dtypes()
    @pytest.mark.parametrize("transpose_b", [False, True], ids=["", "transpose_b"])
    @pytest.mark.parametrize("offsets", OFFSETS, ids=str)
    def test_op(self, backend, dtype, transpose_b, offsets):
        kwargs = arguments(offsets, dtype, transpose_b, bias=transpose_b)
        self.assertCorrectness(ragged_group_gemm, ragged_reference, kwargs, {"backend": backend}, gradient=True)

    def test_int32_and_strides(self):
        kwargs = arguments([0, 7, 33], torch.float32)
        kwargs |= {"a": kwargs["a"].t().contiguous().t(), "b": kwargs["b"].mT.contiguous().mT}
        kwargs["offsets"] = kwargs["offsets"].int()
        self.assertCorrectness(ragged_group_gemm, ragged_reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("rows", [0, 1, 48])
    def test_one_group_and_no_rows(self, rows):
        kwargs = arguments([0, rows], torch.float32, rows=rows, bias=True)
        self.assertCorrectness(ragged_group_gemm, ragged_reference, kwargs, {"backend": "cutile"}, gradient=True)

    @backends("ragged_group_gemm")
    def test_no_groups(self, backend):
        kwargs = arguments([30], torch.float32, bias=True)
        self.assertCorrectness(ragged_group_gemm, ragged_reference, kwargs, {"backend": backend}, gradient=True)

    def test_rows_of_no_group_are_zero(self):
        kwargs = arguments([7, 20, 20, 40], torch.float32, bias=True)
        c = ragged_group_gemm(**kwargs, backend="cutile")
        assert not c[:7].any() and not c[40:].any() and c[7:40].any(dim=1).all()

    @pytest.mark.parametrize("transpose_b", [False, True], ids=["", "transpose_b"])
    def test_older_compilers(self, transpose_b, monkeypatch):
        """They know no tiles that begin at any row."""
        monkeypatch.setattr(ragged, "_older_compiler", True)
        kwargs = arguments([2, 18, 30, 30, 37], torch.bfloat16, transpose_b, bias=True)
        self.assertCorrectness(ragged_group_gemm, ragged_reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_an_older_compiler_is_found_out_once(self, monkeypatch):
        tried = []

        def refuse(like, grid, kernel, args):
            tried.append((grid, *args[-2:]))
            if args[-2]:
                raise ct.TileUnsupportedFeatureError("traversal_steps")

        monkeypatch.setattr(ragged, "_older_compiler", False)
        monkeypatch.setattr(ragged, "launch", refuse)
        monkeypatch.setattr(ragged, "sm_count", lambda device: 3)
        for _ in range(2):
            ragged._launch_ragged(7, ragged.ragged_gemm_kernel, (torch.empty(1),), True)
        # For them not with fewer blocks than tiles either.
        assert tried == [((3,), True, True), ((7,), False, False), ((7,), False, False)]

    @dtypes(torch.float16, torch.bfloat16)
    @pytest.mark.parametrize("transpose_b", [False, True], ids=["", "transpose_b"])
    @pytest.mark.parametrize("offsets", [[0, 7, 33, 33, 48], [5, 20, 40], [0, 48]], ids=str)
    def test_as_many_blocks_as_run_at_once(self, offsets, transpose_b, dtype, monkeypatch):
        """Blocks with several tiles each, and rows of no group."""
        tile = moe_experts.Tile(32, 32)
        plan = moe_experts.Plan(16, False, tile, tile, persistent=True)
        monkeypatch.setattr(ragged, "choose", lambda *_, **__: plan)
        monkeypatch.setattr(ragged, "sm_count", lambda device: 3)
        kwargs = arguments(offsets, dtype, transpose_b)
        kwargs["a"][: offsets[0]] = float("nan")
        with recorded_launches(run=True) as launches:
            self.assertCorrectness(ragged_group_gemm, ragged_reference, kwargs, {"backend": "cutile"}, gradient=True)
        if not HAS_GPU:  # forward, and the gradient of a
            assert sum(kernel is ragged.ragged_gemm_kernel and args[-1] for kernel, args in launches) == 2

    def test_nan_stays_in_its_group(self):
        kwargs = arguments([0, 7, 33, 48], torch.float32)
        kwargs["a"][6, 1], kwargs["a"][40, 2] = float("nan"), float("inf")
        self.assertCorrectness(ragged_group_gemm, ragged_reference, kwargs, {"backend": "cutile"}, gradient=True)

    @backends("ragged_group_gemm")
    def test_wrong_arguments(self, backend):
        kwargs = arguments([0, 7, 33], torch.float32, bias=True) | {"backend": backend}
        for changed, error, text in (
            ({"a": randn(4, 5)}, ValueError, "expected a"),
            ({"offsets": kwargs["offsets"][1:]}, ValueError, r"offsets must be \[3\]"),
            ({"bias": randn(2, 3)}, ValueError, r"bias must be \[2, 20\]"),
            ({"offsets": kwargs["offsets"].float()}, TypeError, "int32 or int64"),
            ({"b": kwargs["b"].half()}, TypeError, "a is torch.float32, b is torch.float16"),
            ({"bias": kwargs["bias"].half()}, TypeError, "a is torch.float32, bias is torch.float16"),
        ):
            with pytest.raises(error, match=text):
                ragged_group_gemm(**kwargs | changed)

    def test_compiled(self):
        offsets = torch.tensor([0, 7, 33], device=device())

        def call(a, b, bias):
            return ragged_group_gemm(a * 2, b, offsets, bias=bias, backend="cutile").relu()

        self.assertCompiledEqualsEager(call, randn(40, 24), randn(2, 16, 24), randn(2, 16))

    @pytest.mark.parametrize(("rows", "hopper"), [(64, False), (4096, False), (4096, True)])
    def test_compiles_for_every_architecture(self, rows, hopper):
        real = moe_experts.choose.__wrapped__
        a, b = torch.empty(rows, 512, dtype=torch.bfloat16), torch.empty(8, 768, 512, dtype=torch.bfloat16)
        offsets = torch.zeros(9, dtype=torch.int32)

        def call():
            ragged_group_gemm(a, b, offsets, backend="cutile")
            ragged.ragged_outer(a, a, offsets)
            ragged.ragged_sum(a, None, offsets)

        with (
            mock.patch.object(ragged, "choose", lambda *args, **kwargs: real(*args[:5], 0, **kwargs)),
            mock.patch.object(moe_experts, "is_hopper", lambda device: hopper),
        ):
            assert_launches_compile(call)

    def test_rows_with_a_bias_keep_smaller_blocks(self):
        a, b, bias = randn(40, 24), randn(2, 16, 24), randn(2, 16)
        with mock.patch.object(ragged, "choose", wraps=ragged.choose) as choose:
            for given in (bias, None):
                ragged_group_gemm(a, b, torch.tensor([0, 7, 33], device=device()), bias=given, backend="cutile")
        assert [call.kwargs["alone"] for call in choose.call_args_list] == [False, True]

    @gpu
    @pytest.mark.parametrize("rows", [40, 3000])
    def test_real_sizes(self, rows):
        kwargs = arguments([0, rows // 3, rows // 2, rows - 5], torch.bfloat16, rows=rows, k=2048, n=768)
        with sanitized():
            self.assertCorrectness(ragged_group_gemm, ragged_reference, kwargs, {"backend": "cutile"}, gradient=True)

    @gpu
    def test_graph_capture(self):
        kwargs = arguments([0, 100, 300], torch.bfloat16, rows=300, k=512, n=256)

        def call(a, b, offsets):
            return ragged_group_gemm(a, b, offsets, backend="cutile")

        self.assertCaptures(call, kwargs["a"], kwargs["b"], kwargs["offsets"])

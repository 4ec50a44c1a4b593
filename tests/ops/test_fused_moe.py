import contextlib
from unittest import mock

import cuda.tile as ct
import pytest
import torch
from common import ARCHITECTURES
from common import PyTestCase
from common import assert_compiles
from common import assert_launches_compile
from common import backends
from common import dtypes
from common import gpu
from common import randn
from common import recorded_launches
from common import some
from torch.utils._python_dispatch import TorchDispatchMode

from tilegym.ops import fused_moe
from tilegym.ops.cutile import moe_backward
from tilegym.ops.cutile import moe_experts
from tilegym.ops.cutile import moe_one_token
from tilegym.ops.cutile.moe_gemm import product
from tilegym.ops.cutile.moe_gemm import store_rows
from tilegym.ops.pytorch import moe_experts as pytorch_experts
from tilegym.ops.pytorch.moe_experts import ACTIVATIONS
from tilegym.ops.pytorch.moe_experts import fused_moe as reference

# Tokens, experts a token, experts, H, I. The first two take products of matrix and vector, the third all tokens.
SIZES = [(1, 2, 6, 48, 24), (2, 2, 17, 40, 33), (7, 3, 5, 33, 20), (40, 2, 3, 48, 24)]
# Qwen3-30B-A3B, Mixtral-8x7B (a quarter of its width), gpt-oss-20b.
GPU_SIZES = [(t, 8, 128, 2048, 768) for t in (1, 2, 16, 300, 2048)] + [(5, 2, 8, 1024, 3584), (64, 4, 32, 2880, 2880)]
BEYOND_INT32 = (2**32, torch.iinfo(torch.int64).min, -(2**40), 2**32 + 1)
LAYOUTS = {
    "concatenated": {},
    "interleaved": {"interleaved": True},
    "transposed": {"transposed": True},
    "gpt-oss": {"interleaved": True, "transposed": True, "biased": True, "activation": "gpt_oss", "limit": 1.0},
    "biased": {"biased": True},
    "separate": {"separate": True},
    "separate transposed": {"separate": True, "transposed": True},
    "no gate": {"gated": False, "activation": "relu2"},
}


@ct.kernel(occupancy=2)
def waiting_kernel(x, w, ids, out):
    """Whether to multiply at all depends on a reduction."""
    some = ct.gather(ids, ct.arange(128, dtype=ct.int32))
    if ct.max(ct.where(some == ct.bid(0), 1, 0)) > 0:
        acc = product(x, w, ct.bid(0), 0, ct.bid(1), 16, 64, 128, False, True, False)
        store_rows(out, ct.bid(0), ct.bid(1), acc, True)


def choice(tokens, top_k, experts, seed=0):
    """Different experts for each token."""
    return torch.stack([randn(experts, seed=seed + t).topk(top_k).indices for t in range(tokens)])


def arguments(size, dtype, gated=True, separate=False, biased=False, transposed=False, **options):
    tokens, top_k, experts, width, inner = size
    wide = 2 * inner if gated and not separate else inner
    weights = {"w1": randn(experts, wide, width, dtype=dtype, seed=1) * width**-0.5}
    weights["w2"] = randn(experts, width, inner, dtype=dtype, seed=2) * inner**-0.5
    if separate:
        weights["w1_up"] = randn(experts, wide, width, dtype=dtype, seed=3) * width**-0.5
    if transposed:
        weights = {name: w.mT.contiguous() for name, w in weights.items()}
    if biased:
        weights |= {"b1": randn(experts, wide, dtype=dtype, seed=4), "b2": randn(experts, width, dtype=dtype, seed=5)}
    return options | weights | {
        "hidden_states": randn(tokens, width, dtype=dtype, seed=6),
        "topk_weights": randn(tokens, top_k, seed=7).softmax(-1).to(dtype),
        "topk_ids": choice(tokens, top_k, experts),
        "transposed": transposed,
    }  # fmt: skip


@contextlib.contextmanager
def gpu_plans(hopper: bool):
    """Tensors on the CPU get the tiles that a GPU's would."""
    real, of_one = moe_experts.choose.__wrapped__, moe_one_token.plan.__wrapped__

    def chosen(*args, **kwargs):
        return real(*args[:5], 0, **kwargs)

    with (
        mock.patch.object(moe_experts, "choose", chosen),
        mock.patch.object(moe_backward, "choose", chosen),
        mock.patch.object(moe_one_token, "plan", lambda *args: of_one(*args[:-1], 0)),
        mock.patch.object(moe_experts, "is_hopper", lambda device: hopper),
    ):
        yield


def real_arguments(tokens, oss, top_k=8):
    """Of the launch functions, in Qwen3-30B-A3B's sizes and its layout or gpt-oss's; the tensors have no contents."""

    def empty(*size):
        return torch.empty(size, dtype=torch.bfloat16)

    w1, w2 = empty(128, 1536, 2048), empty(128, 2048, 768)
    routed = torch.empty(tokens, top_k), torch.zeros(tokens, top_k, dtype=torch.int64)
    if not oss:
        return empty(tokens, 2048), w1, w2, *routed, 0, None, None, None, False, False, 1.0, None
    biases = empty(128, 1536), empty(128, 2048)
    w1, w2 = w1.view(128, 2048, 1536), w2.view(128, 768, 2048)
    return empty(tokens, 2048), w1, w2, *routed, 5, None, *biases, True, True, 1.7, 7.0


class Unread(TorchDispatchMode):
    """Refuses what brings a value of a GPU to the host, or a shape that depends on one."""

    def __enter__(self):
        self.tolist = mock.patch.object(torch.Tensor, "tolist", mock.Mock(side_effect=AssertionError("the host looks")))
        self.tolist.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.tolist.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert not any(part in name for part in ("local_scalar", "nonzero", "unique")), f"the host looks at {name}"
        return function(*args, **(kwargs or {}))


paths = pytest.mark.parametrize("size", [SIZES[0], *SIZES[2:]], ids=["vectors", "few", "sorted"])


class Test_FusedMoE(PyTestCase):
    @backends("fused_moe")
    @dtypes()
    @pytest.mark.parametrize("size", SIZES, ids=str)
    def test_op(self, backend, dtype, size):
        self.assertCorrectness(fused_moe, reference, arguments(size, dtype), {"backend": backend})

    @paths
    @pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
    def test_layouts(self, layout, size):
        kwargs = arguments(size, torch.bfloat16, **LAYOUTS[layout])
        self.assertCorrectness(fused_moe, reference, kwargs, {"backend": "cutile"})

    @pytest.mark.parametrize("layout", some(LAYOUTS, "interleaved", "gpt-oss", "separate transposed", "no gate"))
    def test_gradients(self, layout):
        """With pairs that are left out, experts without a token, and what is added at the end."""
        kwargs = arguments((24, 2, 5, 48, 24), torch.float32, **LAYOUTS[layout])
        kwargs["topk_ids"][3], kwargs["topk_ids"][4, 0] = 5, -1
        kwargs["topk_ids"][kwargs["topk_ids"] == 2] = 1
        kwargs["shared_output"] = randn(24, 48, seed=9)
        self.assertCorrectness(fused_moe, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("limit", [None, 0.5], ids=["", "clamped"])
    def test_activations(self, activation, limit):
        kwargs = arguments((24, 2, 3, 40, 24), torch.float32, activation=activation, limit=limit)
        self.assertCorrectness(fused_moe, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @dtypes(*some((torch.float16, torch.bfloat16), torch.bfloat16))
    def test_gradients_of_halves(self, dtype):
        kwargs = arguments((40, 2, 3, 48, 32), dtype)
        kwargs["topk_weights"] = kwargs["topk_weights"].float()  # as Mixtral's router gives them
        self.assertCorrectness(fused_moe, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("frozen", ["hidden_states", "w1", "w2", "topk_weights", "b1", "b2"])
    def test_gradients_of_some(self, frozen):
        kwargs = arguments((9, 2, 3, 24, 16), torch.float32, biased=True)
        wanted = tuple({"hidden_states", "w1", "w2", "topk_weights", "b1", "b2"} - {frozen})
        self.assertCorrectness(fused_moe, reference, kwargs, {"backend": "cutile"}, gradient=wanted)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_pytorch_while_a_graph_is_captured(self, layout, monkeypatch):
        """The host looks at no value, since replays have others, and finds what it finds by looking."""

        def unread(**kwargs):
            with monkeypatch.context() as patch, Unread():
                patch.setattr(pytorch_experts, "can_be_read", lambda ids: False)
                return reference(**kwargs)

        for dtype in (torch.float32, torch.bfloat16):
            kwargs = arguments((3, 2, 5, 48, 24), dtype, **LAYOUTS[layout])
            kwargs["topk_ids"][1] = torch.tensor([5, -1])
            kwargs["shared_output"] = randn(3, 48, dtype=dtype, seed=9)
            self.assertCorrectness(unread, reference, kwargs, gradient=True)
        with pytest.raises(AssertionError, match="the host looks"), Unread():
            reference(**kwargs)

    @gpu
    @pytest.mark.parametrize("backend", ["pytorch", "cutile"])
    @dtypes()
    def test_captured(self, backend, dtype):
        kwargs = arguments((3, 2, 5, 48, 24), dtype)
        hidden = kwargs.pop("hidden_states")
        del kwargs["topk_ids"], kwargs["topk_weights"]

        def call(hidden, scores):
            chosen = scores.topk(2, dim=-1)  # replays choose other experts
            return fused_moe(hidden, topk_ids=chosen.indices, topk_weights=chosen.values, **kwargs, backend=backend)

        self.assertCaptures(call, hidden, randn(3, 5, dtype=dtype, seed=10), exact=backend == "cutile")

    @paths
    @pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
    def test_left_out_and_shared(self, size, transposed):
        kwargs = arguments(size, torch.bfloat16, transposed=transposed)
        kwargs["topk_ids"][0] = torch.tensor([-1, size[2], 0])[: size[1]]
        kwargs["shared_output"] = randn(size[0], size[3], dtype=torch.bfloat16, seed=9)
        self.assertCorrectness(fused_moe, reference, kwargs, {"backend": "cutile"})
        for left_out in (size[2], *BEYOND_INT32):
            kwargs["topk_ids"][:] = left_out
            assert torch.equal(fused_moe(**kwargs, backend="cutile"), kwargs["shared_output"])

    @paths
    def test_nothing_of_what_is_left_out_shows(self, size):
        """Neither its weight, nor a bias, in results and gradients; the low halves of some ids are an expert's."""
        kwargs = arguments(size, torch.float32, biased=True)
        ids, weights = kwargs["topk_ids"], kwargs["topk_weights"]
        ids[ids == 0] = -1
        ids[0, 0], ids[-1, 1] = BEYOND_INT32[0], BEYOND_INT32[1]
        kwargs["b2"][0] = float("inf")
        weights[(ids < 0) | (ids >= size[2])] = float("nan")
        self.assertCorrectness(fused_moe, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @paths
    @pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
    def test_not_contiguous(self, size, transposed):
        kwargs = arguments(size, torch.float32, transposed=transposed)
        kwargs |= {name: kwargs[name].mT.contiguous().mT for name in ("w1", "w2", "topk_ids", "topk_weights")}
        kwargs["hidden_states"] = kwargs["hidden_states"].repeat(1, 2)[:, ::2]
        self.assertCorrectness(fused_moe, reference, kwargs, {"backend": "cutile"})

    @pytest.mark.parametrize("size", [(t, 2, 3, 24, 16) for t in (1, 9, 20)], ids=["vectors", "few", "sorted"])
    def test_nan_stays_with_its_expert(self, size):
        kwargs = arguments(size, torch.float32)
        kwargs["w1"][kwargs["topk_ids"][0, 0], 3, 1] = float("nan")
        kwargs["hidden_states"][-1, 2] = float("inf")
        self.assertCorrectness(fused_moe, reference, kwargs, {"backend": "cutile"})

    def test_many_experts_of_few_tokens(self):
        """Their pairs are more than a block of the alignment takes."""
        kwargs = arguments((16, 10, 12, 24, 16), torch.bfloat16)
        self.assertCorrectness(fused_moe, reference, kwargs, {"backend": "cutile"})
        kwargs["topk_ids"][3], kwargs["topk_ids"][:, 1] = 5, 2  # as often as it is named
        self.assertCorrectness(fused_moe, reference, kwargs, {"backend": "cutile"})

    @pytest.mark.parametrize("layout", LAYOUTS)
    @dtypes(torch.float16, torch.bfloat16)
    def test_as_many_blocks_as_run_at_once(self, dtype, layout):
        """Blocks with several tiles each, and those for experts that no token chose."""
        tile = moe_experts.Tile(32, 32)
        plan = moe_experts.Plan(16, False, tile, tile, persistent=True)
        kwargs = arguments((40, 2, 7, 72, 48), dtype, **LAYOUTS[layout])
        kwargs["topk_ids"][kwargs["topk_ids"] == 3] = -1
        with (
            mock.patch.object(moe_experts, "choose", lambda *_, **__: plan),
            mock.patch.object(moe_experts, "sm_count", lambda device: 3),
        ):
            self.assertCorrectness(fused_moe, reference, kwargs, {"backend": "cutile"})

    def test_weights_are_read_for_few_rows_only(self):
        """Decoding must not compute 128 rows an expert."""
        with gpu_plans(hopper=True):
            heights = {
                tokens: moe_experts.choose(tokens, 8, 128, 2, False, 0).rows for tokens in (1, 16, 64, 512, 8192)
            }
            alone = moe_experts.choose(1, 2, 8, 2, False, 0).rows, moe_experts.choose(1, 8, 128, 4, False, 0).rows
        assert heights == {1: 16, 16: 16, 64: 16, 512: 64, 8192: 128}
        assert alone == (0, 0)

    def test_without_tensor_cores_tokens_are_no_rows_of_16(self):
        with gpu_plans(hopper=True):
            rows = {
                (tokens, transposed, tensor_cores): moe_experts.choose(
                    tokens, 6, 64, 4, transposed, 0, tensor_cores=tensor_cores
                ).rows
                for tokens in (4, 5, 128, 129)
                for transposed in (False, True)
                for tensor_cores in (False, True)
            }
        vectors = {key for key, height in rows.items() if height == 0}
        assert vectors == {(4, False, False), (4, True, False), (5, False, False), (128, False, False)}

    def test_most_experts_have_one_block(self):
        """Two blocks read a weight twice."""
        with gpu_plans(hopper=True):
            assert [moe_experts.choose(tokens, 2, 8, 2, False, 0).rows for tokens in (192, 256, 512)] == [64, 128, 128]
        with gpu_plans(hopper=False):
            assert moe_experts.choose(512, 2, 8, 2, False, 0).rows == 64

    @pytest.mark.parametrize("alone", [False, True])
    def test_the_backward_pass_keeps_blocks_of_64_rows(self, alone):
        """And so do products by group that have a bias."""
        with gpu_plans(hopper=True):
            plans = [
                moe_experts.choose(n, 1, 8, 2, False, 0, as_vectors=False, alone=alone) for n in (504, 512, 1024, 1032)
            ]
        assert [plan.rows for plan in plans] == [64, *((128, 128) if alone else (64, 64)), 128]
        assert [plan.persistent for plan in plans] == [plan.rows == 128 for plan in plans]

    def test_three_runs_are_equal(self):
        kwargs = arguments((40, 3, 4, 48, 24), torch.bfloat16)
        first = fused_moe(**kwargs, backend="cutile")
        assert all(torch.equal(fused_moe(**kwargs, backend="cutile"), first) for _ in range(2))

    @backends("fused_moe")
    def test_wrong_arguments(self, backend):
        kwargs = arguments(SIZES[2], torch.float32) | {"backend": backend}
        for changed, error, text in (
            ({"w1": kwargs["w1"][:, 1:]}, ValueError, "w1 .* does not fit w2"),
            ({"w1": kwargs["w1"][..., 1:]}, ValueError, "do not fit hidden_states"),
            ({"topk_weights": kwargs["topk_weights"][:, 1:]}, ValueError, r"must be \[7, k\]"),
            ({"w1": kwargs["w1"][1:]}, ValueError, "w1 has 4 experts, w2 has 5"),
            (
                {n: kwargs[n].int() for n in ("hidden_states", "w1", "w2")},
                TypeError,
                "hidden_states is torch.int32, it must be floating point",
            ),
            ({"activation": "swish"}, ValueError, "activation must be one of"),
            ({"w1": kwargs["w1"][:0], "w2": kwargs["w2"][:0]}, ValueError, "has no experts"),
            ({"b1": randn(5, 3)}, ValueError, r"b1 must be \[5, 40\]"),
            ({"shared_output": randn(5, 3)}, ValueError, "shared_output must be"),
            ({"w1_up": kwargs["w1"]}, ValueError, "does not fit"),
            ({"w2": kwargs["w2"].half()}, TypeError, "w2 is torch.float16"),
            ({"topk_ids": kwargs["topk_weights"]}, TypeError, "topk_ids are"),
        ):
            with pytest.raises(error, match=text):
                fused_moe(**kwargs | changed)

    def test_double_falls_back(self):
        kwargs = arguments(SIZES[2], torch.float64)
        with pytest.warns(match="not fp32, fp16 or bf16"):
            assert torch.equal(fused_moe(**kwargs, backend="cutile"), reference(**kwargs))

    @paths
    def test_operator(self, size):
        kwargs = arguments(size, torch.float32, biased=True)
        tensors = [kwargs[name] for name in ("hidden_states", "w1", "w2", "topk_weights", "topk_ids")]
        options = (None, kwargs["b1"], kwargs["b2"], False, False, 1.0, None)
        torch.library.opcheck(moe_experts.moe_forward.operator, (*tensors, 0, *options, None))

    def test_compiled(self):
        kwargs = arguments((9, 2, 5, 24, 16), torch.float32)

        def call(hidden_states, w1, w2, topk_weights):
            given = {"hidden_states": hidden_states * 2, "w1": w1, "w2": w2, "topk_weights": topk_weights}
            return fused_moe(**kwargs | given, backend="cutile").relu()

        self.assertCompiledEqualsEager(call, *(kwargs[n] for n in ("hidden_states", "w1", "w2", "topk_weights")))

    @pytest.mark.parametrize("layout", ["concatenated", "gpt-oss"])
    @pytest.mark.parametrize(("tokens", "top_k"), [(1, 2), (1, 8), (16, 8), (32, 8), (4096, 8)])
    def test_compiles_for_every_architecture(self, tokens, top_k, layout):
        """The kernels for Qwen3-30B-A3B's sizes."""
        oss = layout == "gpt-oss"
        # With Hopper's plan a kernel of many rows takes long to compile, and twice as long for the others.
        architectures = ("sm_90",) if tokens > 1000 and not oss else ARCHITECTURES
        with gpu_plans(hopper=len(architectures) == 1):
            args = real_arguments(tokens, oss, top_k)
            assert_launches_compile(lambda: moe_experts.moe_forward(*args, None), architectures)

    def test_kernels_that_would_wait_for_registers_do_not_pass(self):
        x, w = torch.empty(16, 2048, dtype=torch.bfloat16), torch.empty(8, 768, 2048, dtype=torch.bfloat16)
        args = (x, w, torch.zeros(128, dtype=torch.int64), x.new_empty(128, 768))
        with pytest.raises(AssertionError, match="wait for registers"):
            assert_compiles(waiting_kernel, args, ("sm_90",))

    @pytest.mark.parametrize(
        ("tokens", "top_k", "oss", "count"),
        [
            (1, 2, False, 2),
            (1, 8, False, 2),
            (1, 2, True, 3),
            (16, 8, False, 4),
            (512, 8, False, 6),
            (4096, 8, True, 7),
        ],
    )
    def test_overlapping_launches_compile(self, tokens, top_k, oss, count):
        """OVERLAP, every kernel's last argument, needs compute capability 9.0."""
        with gpu_plans(hopper=True), recorded_launches() as launches:
            moe_experts.moe_forward(*real_arguments(tokens, oss, top_k), None)
        assert len(launches) == count
        for kernel, args in launches:
            assert args[-1] is False
            assert_compiles(kernel, (*args[:-1], True), ("sm_90",))

    def test_gradients_compile_for_every_architecture(self):
        hidden, *others = real_arguments(16, True)
        with gpu_plans(hopper=False), recorded_launches() as launches:
            _, g = moe_backward.moe_forward_for_gradients(hidden, *others, None)
            moe_backward.moe_backward(hidden, hidden, *others[:4], g, *others[4:], [True] * 7)
        once = {kernel._pyfunc.__name__: (kernel, args) for kernel, args in launches}
        for forward in ("grouped_gemm_kernel", "moe_align_kernel", "moe_combine_kernel"):
            del once[forward]
        assert len(once) == 5
        for kernel, args in once.values():
            assert_compiles(kernel, args)

    @gpu
    @pytest.mark.parametrize("size", GPU_SIZES, ids=str)
    def test_real_sizes(self, size):
        kwargs = arguments(size, torch.bfloat16, activation="gpt_oss" if size[2] == 32 else "silu")
        self.assertCorrectness(fused_moe, reference, kwargs, {"backend": "cutile"}, gradient=size[0] > 100)

    @gpu
    @pytest.mark.parametrize("layout", ["concatenated", "gpt-oss"])
    def test_more_rows_than_blocks_run_at_once(self, layout):
        kwargs = arguments((1100, 4, 32, 512, 288), torch.bfloat16, **LAYOUTS[layout])
        self.assertCorrectness(fused_moe, reference, kwargs, {"backend": "cutile"})

    @gpu
    @pytest.mark.parametrize("tokens", [1, 16, 512])
    def test_graph_capture(self, tokens):
        kwargs = arguments((tokens, 4, 32, 512, 256), torch.bfloat16)

        def call(hidden_states, topk_ids):
            return fused_moe(**kwargs | {"hidden_states": hidden_states, "topk_ids": topk_ids}, backend="cutile")

        self.assertCaptures(call, kwargs["hidden_states"], kwargs["topk_ids"])

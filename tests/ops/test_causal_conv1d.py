import functools

import pytest
import torch
from common import ARCHITECTURES
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

from tilegym.backend import dispatcher
from tilegym.errors import FallbackWarning
from tilegym.ops import causal_conv1d_fn
from tilegym.ops import causal_conv1d_update
from tilegym.ops.cutile import causal_conv1d
from tilegym.ops.cutile.causal_conv1d import SMALL_SPAN
from tilegym.ops.cutile.causal_conv1d import SPAN
from tilegym.ops.cutile.causal_conv1d import Walk
from tilegym.ops.cutile.causal_conv1d import conv_backward
from tilegym.ops.cutile.causal_conv1d import conv_forward
from tilegym.ops.cutile.causal_conv1d import conv_update
from tilegym.ops.pytorch.causal_conv1d import causal_conv1d_fn as reference
from tilegym.ops.pytorch.causal_conv1d import causal_conv1d_update as update_reference

SHAPES = [(2, 37, 45, 4), (1, 8, 1, 4), (3, 5, 2, 3), (1, 130, 300, 2)]  # B, C, T, K
GPU_SHAPES = [(1, 8192, 8192, 4), (4, 6144, 513, 4), (2, 1000, 4099, 3)]
UPDATES = [
    (2, 37, 1, 4, 4),
    (3, 5, 1, 3, 4),
    (1, 8, 3, 2, 2),
    (2, 9, 7, 5, 4),
    (1, 4, 2, 1, 2),
    (2, 9, 1, 2, 2),
]  # B, C, T, L, K


def channels_last(x):
    """The same values, side by side in memory those of a token, as behind a linear layer."""
    return x.mT.contiguous().mT


def arguments(batch, channels, tokens, taps, dtype=torch.float32, bias=True, activation="silu", layout=channels_last):
    return dict(
        hidden_states=layout(randn(batch, channels, tokens, dtype=dtype)),
        weight=randn(channels, taps, dtype=dtype, seed=1),
        bias=randn(channels, dtype=dtype, seed=2) if bias else None,
        activation=activation,
    )


def update_arguments(batch, channels, tokens, length, taps, dtype=torch.float32, **options):
    kwargs = arguments(batch, channels, tokens, taps, dtype, **options)
    return kwargs | {"conv_state": randn(batch, channels, length, dtype=dtype, seed=3)}


def with_state(update):
    """``update`` as a function that returns the state too, and leaves the one that it is given alone."""

    @functools.wraps(update)
    def call(conv_state, **kwargs):
        state = conv_state.clone()
        return update(conv_state=state, **kwargs), state

    return call


class Test_CausalConv1d(PyTestCase):
    @backends("causal_conv1d_fn")
    @dtypes()
    @pytest.mark.parametrize("layout", [channels_last, torch.Tensor.contiguous], ids=["channels_last", "contiguous"])
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, layout, shape):
        kwargs = arguments(*shape, dtype=dtype, layout=layout)
        self.assertCorrectness(causal_conv1d_fn, reference, kwargs, {"backend": backend}, gradient=True)

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("activation", [None, "silu", "swish"])
    def test_options(self, bias, activation):
        kwargs = arguments(2, 12, 21, 4, bias=bias, activation=activation)
        wanted = ("hidden_states", "weight", *(("bias",) if bias else ()))
        self.assertCorrectness(causal_conv1d_fn, reference, kwargs, {"backend": "cutile"}, gradient=wanted)

    @pytest.mark.parametrize("frozen", ["hidden_states", "weight", "bias"])
    def test_gradients_of_some(self, frozen):
        wanted = tuple({"hidden_states", "weight", "bias"} - {frozen})
        self.assertCorrectness(
            causal_conv1d_fn, reference, arguments(2, 12, 21, 4), {"backend": "cutile"}, gradient=wanted
        )

    def test_weight_of_another_dtype(self):
        kwargs = arguments(2, 12, 21, 4, dtype=torch.bfloat16)
        kwargs["weight"], kwargs["bias"] = kwargs["weight"].float(), kwargs["bias"].float()
        self.assertCorrectness(causal_conv1d_fn, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize(
        "view",
        [lambda x: x[:, ::2], lambda x: x[:, :, ::3], lambda x: x[:, 3:11, 5:], lambda x: x[:1].expand(2, -1, -1)],
        ids=["every_other_channel", "every_third_token", "slice", "expanded"],
    )
    def test_not_contiguous(self, view):
        kwargs = arguments(2, 16, 40, 4)
        kwargs["hidden_states"] = view(kwargs["hidden_states"])
        channels = kwargs["hidden_states"].shape[1]
        kwargs |= {"weight": kwargs["weight"][:channels], "bias": kwargs["bias"][:channels]}
        self.assertCorrectness(causal_conv1d_fn, reference, kwargs, {"backend": "cutile"}, gradient=True)

    def test_kernels_load_no_tiles_of_expanded_tensors(self):
        x, dy, w = randn(1, 12, 1).cpu().expand(2, 12, 9), randn(1, 1, 1).cpu().expand(2, 12, 9), randn(12, 4).cpu()
        with recorded_launches() as launches:
            conv_forward(x, w, None, True)
            conv_backward(dy, x, w, None, True)
        tensors = [t for _, args in launches for t in args if torch.is_tensor(t)]
        assert tensors and all(0 not in t.stride() for t in tensors)

    def test_layout_of_the_output(self):
        x = arguments(2, 12, 21, 4)["hidden_states"]
        assert causal_conv1d_fn(x, randn(12, 4), backend="cutile").stride() == x.stride()

    @pytest.mark.parametrize("shape", [(2, 70, 130), (1, 1, 5), (3, 8, 1)], ids=str)
    def test_gradients_in_the_other_layout(self, shape):
        x, dy = randn(*shape), randn(*shape, seed=3)
        w, b = randn(shape[1], 4, seed=1), randn(shape[1], seed=2)
        for of_x, of_dy in ((channels_last, torch.Tensor.contiguous), (torch.Tensor.contiguous, channels_last)):
            got = conv_backward(of_dy(dy), of_x(x), w, b, True)
            for a, b_ in zip(got, conv_backward(of_x(dy), of_x(x), w, b, True), strict=True):
                assert torch.equal(a, b_)

    def test_gradients_are_read_in_the_layout_of_the_input(self):
        x, w = randn(2, 12, 9).cpu(), randn(12, 4).cpu()
        for of_x, of_dy in ((channels_last, torch.Tensor.contiguous), (torch.Tensor.contiguous, channels_last)):
            with recorded_launches() as launches:
                conv_backward(of_dy(x), of_x(x), w, None, True)
            _, (dy, read, *_) = launches[-2]
            assert dy.stride() == read.stride()

    @pytest.mark.parametrize("layout", [channels_last, torch.Tensor.contiguous], ids=["channels_last", "contiguous"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -100.0], ids=str)
    def test_special_values(self, value, layout):
        kwargs = arguments(2, 12, 21, 4, layout=layout)
        kwargs["hidden_states"][0, 3, 5] = value
        kwargs["hidden_states"][1, 4, 20] = value  # the last token
        self.assertCorrectness(causal_conv1d_fn, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @backends("causal_conv1d_fn")
    @pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)], ids=str)
    def test_empty(self, backend, shape):
        kwargs = arguments(*shape, 4)
        self.assertCorrectness(causal_conv1d_fn, reference, kwargs, {"backend": backend}, gradient=True)

    def test_packed_sequences_come_from_pytorch(self):
        """Each sequence as it is alone."""
        kwargs = arguments(1, 6, 15, 4)
        seq_idx = torch.tensor([[0] * 5 + [1] * 2 + [2] * 8], device=kwargs["weight"].device)
        dispatcher._warned.clear()
        with pytest.warns(FallbackWarning, match="seq_idx"):
            got = causal_conv1d_fn(**kwargs, seq_idx=seq_idx, backend="cutile")
        x = kwargs.pop("hidden_states")
        alone = [reference(part, **kwargs) for part in x.split([5, 2, 8], dim=2)]
        torch.testing.assert_close(got, torch.cat(alone, dim=2))

    def test_unsupported_falls_back(self):
        dispatcher._warned.clear()
        with pytest.warns(FallbackWarning, match="taps"):
            self.assertCorrectness(causal_conv1d_fn, reference, arguments(1, 3, 9, 6), {"backend": "cutile"})
        with pytest.warns(FallbackWarning, match="not fp32"):
            causal_conv1d_fn(randn(1, 3, 9).double(), randn(3, 4).double(), backend="cutile")

    @backends("causal_conv1d_fn")
    @pytest.mark.parametrize(
        "wrong",
        [
            {"hidden_states": randn(4, 3)},
            {"weight": randn(5, 4)},
            {"bias": randn(3)},
            {"activation": "gelu"},
        ],
        ids=lambda wrong: next(iter(wrong)),
    )
    def test_wrong_arguments(self, backend, wrong):
        with pytest.raises(ValueError, match=f"causal_conv1d_fn: {next(iter(wrong))}"):
            causal_conv1d_fn(**arguments(2, 4, 3, 4) | wrong, backend=backend)

    @pytest.mark.filterwarnings("ignore::tilegym.errors.FallbackWarning")
    @backends("causal_conv1d_fn")
    @pytest.mark.parametrize("taps", [4, 6])
    def test_bias_of_another_dtype(self, backend, taps):
        """Whoever would compute it, and before a state is written."""
        kwargs = arguments(2, 4, 3, taps)
        kwargs["bias"] = kwargs["bias"].half()
        for options in ({}, {"seq_idx": torch.zeros(2, 3, dtype=torch.int32, device=device())}):
            with pytest.raises(TypeError, match="causal_conv1d_fn: weight is torch.float32, bias is torch.float16"):
                causal_conv1d_fn(**kwargs, **options, backend=backend)
        state = randn(2, 4, taps, seed=7)
        before = state.clone()
        with pytest.raises(TypeError, match="causal_conv1d_update: weight is torch.float32, bias is torch.float16"):
            causal_conv1d_update(**kwargs, conv_state=state, backend=backend)
        assert torch.equal(state, before)

    @pytest.mark.filterwarnings("ignore::tilegym.errors.FallbackWarning")
    @backends("causal_conv1d_fn")
    def test_wrong_seq_idx(self, backend):
        with pytest.raises(ValueError, match="seq_idx must be"):
            causal_conv1d_fn(**arguments(2, 4, 3, 4), seq_idx=torch.zeros(2, 4), backend=backend)

    @pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # that they are not fp64
    def test_gradcheck(self):
        inputs = tuple(t.requires_grad_() for t in (randn(2, 3, 6), randn(3, 4, seed=1), randn(3, seed=2)))
        torch.autograd.gradcheck(
            lambda x, w, b: causal_conv1d_fn(x, w, b, "silu", backend="cutile"),
            inputs, eps=1e-2, atol=1e-2, rtol=1e-2, nondet_tol=0.0,
        )  # fmt: skip

    def test_compiled(self):
        def call(x, w, b):
            return causal_conv1d_fn((x * 2).mT, w, b, "silu", backend="cutile").sin()

        self.assertCompiledEqualsEager(call, randn(2, 9, 12), randn(12, 4), randn(12, seed=1))

    def test_operators(self):
        x, w, b = randn(2, 12, 9), randn(12, 4), randn(12, seed=1)
        torch.library.opcheck(conv_forward.operator, (x, w, b, True))
        torch.library.opcheck(conv_backward.operator, (randn(2, 12, 9, seed=3), channels_last(x), w, None, True))
        torch.library.opcheck(conv_update.operator, (x[:, :, :1], randn(2, 12, 4), w, b, True))

    @pytest.mark.parametrize(
        ("layout", "architectures"),
        [(channels_last, ARCHITECTURES), (torch.Tensor.contiguous, ("sm_90",))],
        ids=["channels_last", "contiguous"],
    )
    def test_compiles_for_every_architecture(self, layout, architectures):
        x, w = layout(torch.empty(1, 8192, 64, dtype=torch.bfloat16)), torch.empty(8192, 4, dtype=torch.bfloat16)
        assert_launches_compile(lambda: conv_forward(x, w, None, True), architectures)
        assert_launches_compile(lambda: conv_backward(x, x, w, w[:, 0], True), architectures)

    @pytest.mark.parametrize("layout", [channels_last, torch.Tensor.contiguous], ids=["channels_last", "contiguous"])
    def test_entries_too_large_for_one_launch(self, layout, monkeypatch):
        """As those of more than 2^31 elements are; the strides within them are not too large."""
        monkeypatch.setattr(causal_conv1d, "INT32_MAX", 12 * 9 - 1)
        kwargs = {"hidden_states": layout(randn(3, 12, 9)), "weight": randn(12, 4), "bias": randn(12, seed=1)}
        with recorded_launches(run=True) as launches:
            causal_conv1d_fn(**{name: t.cpu() for name, t in kwargs.items()}, backend="cutile")
        assert len(launches) == 3 and all(t.stride(0) < 108 for t in (launches[0][1][0], launches[0][1][3]))
        self.assertCorrectness(causal_conv1d_fn, reference, kwargs, {"backend": "cutile"}, gradient=True)

    @pytest.mark.parametrize("shape", [(2, 32, 24, 4), (1, 30, 45, 3), (1, 16, 3, 4), (2, 17, 8, 2)])
    @pytest.mark.parametrize("walk", [Walk(16, 4, 2), Walk(32, 4, 1), Walk(16, 4, 9)])
    def test_walks(self, walk, shape, monkeypatch):
        """Other tiles than those for an H200, and blocks that walk along several of them."""
        monkeypatch.setattr(causal_conv1d, "BACKWARD", walk)
        self.assertCorrectness(causal_conv1d_fn, reference, arguments(*shape), {"backend": "cutile"}, gradient=True)

    @dtypes()
    @pytest.mark.parametrize("multiprocessors", [0, 132])
    @pytest.mark.parametrize(
        "shape", [(2, 32, 64, 4), (2, 128, 35, 3), (1, 128, 9, 4), (1, 256, 3, 2), (1, 300, 32, 4)]
    )
    def test_blocks_full_of_channels_or_tokens(self, dtype, shape, multiprocessors, monkeypatch):
        """Of channels, of tokens, or of both: of what is full no bounds are checked. Wide and small blocks."""
        monkeypatch.setattr(causal_conv1d, "sm_count", lambda _: multiprocessors)
        causal_conv1d.pieces_plan.cache_clear()
        with recorded_launches(run=True) as launches:
            kwargs = {name: t.cpu() if torch.is_tensor(t) else t for name, t in arguments(*shape, dtype=dtype).items()}
            causal_conv1d_fn(**kwargs, backend="cutile")
        (_, args), length = launches[0], SMALL_SPAN if multiprocessors else SPAN
        assert args[6] == length and args[-2] == (shape[1] == 300 or shape[2] < length)  # SPAN and CHECK
        self.assertCorrectness(causal_conv1d_fn, reference, arguments(*shape, dtype=dtype), {"backend": "cutile"})
        causal_conv1d.pieces_plan.cache_clear()

    @pytest.mark.parametrize("shape", [(5, 8, 64, 4), (7, 6, 3, 4)])
    def test_more_blocks_than_along_one_axis(self, shape, monkeypatch):
        monkeypatch.setattr(causal_conv1d, "MAX_BLOCKS", 3)
        causal_conv1d.pieces_plan.cache_clear()
        self.assertCorrectness(causal_conv1d_fn, reference, arguments(*shape), {"backend": "cutile"})
        causal_conv1d.pieces_plan.cache_clear()

    @gpu
    def test_more_than_32_bits_of_elements(self):
        w = randn(4096, 4, dtype=torch.bfloat16)
        self.assertLargeInput(
            lambda x: causal_conv1d_fn(x.view(1, -1, 4096).mT, w, backend="cutile").mT[0], 2**19 + 5, 4096
        )

    @gpu
    def test_graph_capture(self):
        self.assertCaptures(
            lambda x, w: causal_conv1d_fn(x.mT, w, None, "silu", backend="cutile"),
            randn(2, 64, 512, dtype=torch.bfloat16), randn(512, 4, dtype=torch.bfloat16),
        )  # fmt: skip


class Test_CausalConv1dUpdate(PyTestCase):
    @backends("causal_conv1d_update")
    @dtypes()
    @pytest.mark.parametrize("shape", UPDATES + ([(64, 8192, 1, 4, 4)] if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        self.assertCorrectness(
            with_state(causal_conv1d_update), with_state(update_reference), update_arguments(*shape, dtype=dtype),
            {"backend": backend},
        )  # fmt: skip

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("activation", [None, "silu"])
    def test_options(self, bias, activation):
        kwargs = update_arguments(2, 37, 1, 4, 4, bias=bias, activation=activation)
        self.assertCorrectness(
            with_state(causal_conv1d_update), with_state(update_reference), kwargs, {"backend": "cutile"}
        )

    def test_strides_and_dtypes(self):
        kwargs = update_arguments(2, 37, 3, 4, 4, dtype=torch.bfloat16)
        kwargs["conv_state"] = channels_last(kwargs["conv_state"].float())
        kwargs["hidden_states"] = kwargs["hidden_states"][:, :, ::2]
        self.assertCorrectness(
            with_state(causal_conv1d_update), with_state(update_reference), kwargs, {"backend": "cutile"}
        )

    @backends("causal_conv1d_update")
    def test_continues_the_convolution(self, backend):
        """Token by token behind a prompt: what the convolution of the whole gives."""
        kwargs = arguments(2, 12, 11, 4)
        whole = causal_conv1d_fn(**kwargs, backend=backend)
        x = kwargs.pop("hidden_states")
        state = x[:, :, 2:6].clone()
        for t in range(6, 11):
            with sanitized():
                out = causal_conv1d_update(x[:, :, t : t + 1], state, **kwargs, backend=backend)
            torch.testing.assert_close(out, whole[:, :, t : t + 1])
        assert torch.equal(state, x[:, :, 7:])

    @pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
    def test_special_values(self, value):
        kwargs = update_arguments(2, 12, 1, 4, 4)
        kwargs["hidden_states"][0, 3] = value
        kwargs["conv_state"][1, 4, 2] = value
        self.assertCorrectness(
            with_state(causal_conv1d_update), with_state(update_reference), kwargs, {"backend": "cutile"}
        )

    @backends("causal_conv1d_update")
    @pytest.mark.parametrize("shape", [(0, 4, 1, 4, 4), (2, 4, 0, 4, 4)], ids=str)
    def test_empty(self, backend, shape):
        kwargs = update_arguments(*shape)
        before = kwargs["conv_state"].clone()
        assert causal_conv1d_update(**kwargs, backend=backend).shape == shape[:3]
        assert torch.equal(kwargs["conv_state"], before)

    def test_gradients_and_many_tokens_come_from_pytorch(self):
        kwargs = update_arguments(1, 3, 1, 4, 4)
        kwargs["weight"].requires_grad_()
        dispatcher._warned.clear()
        with pytest.warns(FallbackWarning, match="no backward kernel"):
            assert causal_conv1d_update(**kwargs, backend="cutile").requires_grad
        with pytest.warns(FallbackWarning, match="new tokens"):
            causal_conv1d_update(**update_arguments(1, 3, 80, 4, 4), backend="cutile")

    @backends("causal_conv1d_update")
    @pytest.mark.parametrize("state", [(2, 4, 2), (1, 4, 4), (2, 4)], ids=str)
    def test_wrong_state(self, backend, state):
        kwargs = update_arguments(2, 4, 1, 4, 4) | {"conv_state": randn(*state)}
        with pytest.raises(ValueError, match="causal_conv1d_update: conv_state must be \\[2, 4, 3 or more\\]"):
            causal_conv1d_update(**kwargs, backend=backend)

    def test_compiled(self):
        """The state is changed in place in compiled code too."""
        x, w = randn(2, 12, 1), randn(12, 4)
        results = []
        torch.compiler.reset()

        def call(x, state):
            return causal_conv1d_update(x * 2, state, w, None, "silu", backend="cutile").sin()

        for run in (call, torch.compile(call, fullgraph=True, backend="inductor" if HAS_GPU else "aot_eager")):
            state = randn(2, 12, 4)
            results.append((run(x, state), state))
        torch.testing.assert_close(*results)
        assert not torch.equal(results[0][1], randn(2, 12, 4))

    def test_compiles_for_every_architecture(self):
        x, state, w = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((2, 8192, 1), (2, 8192, 4), (8192, 4)))
        assert_launches_compile(lambda: conv_update(x, state, w, None, True))

    @gpu
    def test_graph_capture(self):
        """Replayed twice, the state moves on by two tokens."""
        x, state, w = randn(2, 512, 1), randn(2, 512, 4), randn(512, 4)
        expected = [state.clone(), None]
        causal_conv1d_update(x, state.clone(), w, None, "silu", backend="cutile")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = causal_conv1d_update(x, state, w, None, "silu", backend="cutile")
        for _ in range(2):
            graph.replay()
            expected[1] = update_reference(x, expected[0], w, None, "silu")
        torch.testing.assert_close(out, expected[1])
        assert torch.equal(state, expected[0])

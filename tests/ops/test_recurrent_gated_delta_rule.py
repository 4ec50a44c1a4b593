import math

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
from common import some
from delta_rule import EMPTY
from delta_rule import arguments
from delta_rule import final_in_dtype
from delta_rule import floating
from delta_rule import in_one_dtype
from delta_rule import without_none

from tilegym.backend import dispatcher
from tilegym.errors import FallbackWarning
from tilegym.ops import chunk_gated_delta_rule
from tilegym.ops import recurrent_gated_delta_rule
from tilegym.ops.cutile import gated_delta_rule as cutile
from tilegym.ops.cutile.gated_delta_rule import recurrent_forward
from tilegym.ops.pytorch.gated_delta_rule import recurrent_gated_delta_rule as reference

# B, T, Hk, Hv, Dk, Dv
SHAPES = [(2, 1, 2, 4, 64, 64), (1, 5, 1, 1, 16, 32), (3, 2, 2, 6, 20, 7), (1, 1, 1, 2, 256, 128)]
GPU_SHAPES = [(1, 1, 16, 32, 128, 128), (64, 1, 16, 32, 128, 128), (2, 16, 16, 16, 128, 128)]


class Test_RecurrentGatedDeltaRule(PyTestCase):
    def check(self, kwargs, backend="cutile"):
        self.assertCorrectness(
            without_none(recurrent_gated_delta_rule), without_none(reference), kwargs, {"backend": backend}
        )

    @backends("recurrent_gated_delta_rule")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        self.check(arguments(*shape, dtype=dtype), backend)

    @pytest.mark.parametrize("state", ["none", "initial", "final"])
    @pytest.mark.parametrize("normalize", [True, False])
    def test_options(self, state, normalize):
        kwargs = arguments(*SHAPES[0], normalize=normalize) | {"output_final_state": state == "final"}
        if state == "none":
            kwargs["initial_state"] = None
        self.check(kwargs)

    def test_dtypes_of_gates_and_state(self):
        kwargs = arguments(*SHAPES[0], dtype=torch.bfloat16)
        kwargs["beta"] = kwargs["beta"].bfloat16()
        kwargs["initial_state"] = kwargs["initial_state"].bfloat16()
        self.check(kwargs)

    def test_not_contiguous(self):
        """As the model passes them: slices of one tensor whose channels lie far apart."""
        mixed = randn(2, 3 * 4 * 16, 6).mT.unflatten(-1, (3, 4, 16))
        kwargs = arguments(2, 6, 4, 4, 16, 16) | dict(query=mixed[:, :, 0], key=mixed[:, :, 1], value=mixed[:, :, 2])
        kwargs["g"], kwargs["beta"] = -randn(2, 4, 6).mT.abs(), randn(2, 6, 8)[:, :, ::2].sigmoid()
        kwargs["initial_state"] = kwargs["initial_state"].mT
        self.check(kwargs)

    def test_initial_state_is_left_alone(self):
        kwargs = arguments(*SHAPES[0])
        before = kwargs["initial_state"].clone()
        recurrent_gated_delta_rule(**kwargs, backend="cutile")
        assert torch.equal(kwargs["initial_state"], before)

    @pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], torch.bfloat16), ids=str)
    def test_gradients(self, dtype):
        """They are the chunked op's, whose tests say more."""
        kwargs = in_one_dtype(arguments(2, 5, 2, 4, 16, 16, dtype=dtype))
        self.assertCorrectness(
            final_in_dtype(recurrent_gated_delta_rule), final_in_dtype(reference), kwargs, {"backend": "cutile"},
            gradient=True,
        )  # fmt: skip

    def test_steps_add_up(self):
        """A sequence token by token, the state handed on: what one call gives, bit for bit."""
        kwargs = arguments(2, 6, 2, 4, 16, 16, dtype=torch.bfloat16)
        out, final = recurrent_gated_delta_rule(**kwargs, backend="cutile")
        for t in range(6):
            step = {k: kwargs[k][:, t : t + 1] for k in ("query", "key", "value", "g", "beta")}
            part, kwargs["initial_state"] = recurrent_gated_delta_rule(**kwargs | step, backend="cutile")
            assert torch.equal(part, out[:, t : t + 1])
        assert torch.equal(kwargs["initial_state"], final)

    @pytest.mark.parametrize("g", [0.0, -1e-30, -200.0, -3e38, -math.inf])
    def test_extreme_decays(self, g):
        kwargs = arguments(*SHAPES[1])
        kwargs["g"][:, ::2] = g
        self.check(kwargs)

    @pytest.mark.parametrize("where", ["query", "key", "value", "g", "beta", "initial_state"])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_nan_and_infinity(self, where, value):
        """They come out where PyTorch has them. Where a head's key is not finite, its state is no number at all."""
        kwargs = arguments(1, 3, 1, 2, 16, 16)
        kwargs[where].view(-1)[kwargs[where].numel() // 2] = value
        got = recurrent_gated_delta_rule(**kwargs, backend="cutile")
        for x, expected in zip(got, reference(**kwargs), strict=True):
            finite = expected.isfinite()
            assert torch.equal(x.isfinite(), finite)
            torch.testing.assert_close(x[finite], expected[finite])

    @backends("recurrent_gated_delta_rule")
    @pytest.mark.parametrize("shape", EMPTY, ids=str)
    def test_empty(self, backend, shape):
        kwargs = arguments(*shape)
        self.check(kwargs, backend)
        state = recurrent_gated_delta_rule(**kwargs, backend=backend)[1]
        assert state.data_ptr() != kwargs["initial_state"].data_ptr() or not state.numel()

    def test_packed_sequences_come_from_pytorch(self):
        """Each sequence as it is alone, with a state of its own."""
        kwargs = arguments(1, 9, 2, 4, 16, 16)
        kwargs["initial_state"] = randn(3, 4, 16, 16)
        cu_seqlens = torch.tensor([0, 4, 4, 9], device=device())
        dispatcher._warned.clear()
        with pytest.warns(FallbackWarning, match="cu_seqlens"):
            out, final = recurrent_gated_delta_rule(**kwargs, cu_seqlens=cu_seqlens, backend="cutile")
        assert torch.equal(final[1], kwargs["initial_state"][1])
        for n, part in ((0, slice(0, 4)), (2, slice(4, 9))):
            alone = {k: kwargs[k][:, part] for k in ("query", "key", "value", "g", "beta")}
            alone["initial_state"] = kwargs["initial_state"][n : n + 1]
            alone_out, alone_final = reference(**kwargs | alone)
            assert torch.equal(out[:, part], alone_out) and torch.equal(final[n], alone_final[0])

    @pytest.mark.parametrize("op", [recurrent_gated_delta_rule, chunk_gated_delta_rule])
    def test_packed_sequences_that_do_not_fit(self, op):
        kwargs = arguments(1, 9, 1, 2, 8, 8) | {"initial_state": None}
        for ends in ([2, 9], [0, 5, 3, 9], [0, 12], [-1, 9]):
            with pytest.raises(ValueError, match=f"{op.__name__}: cu_seqlens must start at 0, never fall"):
                op(**kwargs, cu_seqlens=torch.tensor(ends, device=device()), backend="pytorch")
        for dtype in (torch.bool, torch.float32, torch.uint8):
            with pytest.raises(TypeError, match=f"{op.__name__}: cu_seqlens must be int32 or int64"):
                op(**kwargs, cu_seqlens=torch.tensor([0, 1], dtype=dtype, device=device()))
        out, _ = op(**kwargs, cu_seqlens=torch.tensor([0, 3, 7], device=device()), backend="pytorch")
        whole, _ = op(**kwargs, cu_seqlens=torch.tensor([0, 3, 7, 9], device=device()), backend="pytorch")
        assert torch.equal(out[:, :7], whole[:, :7]) and out.shape == whole.shape and not out[:, 7:].any()

    def test_unsupported_falls_back(self):
        dispatcher._warned.clear()
        with pytest.warns(FallbackWarning, match="not all fp32"):
            self.check(arguments(*SHAPES[1]) | {"key": randn(1, 5, 1, 16).bfloat16()})
        with pytest.warns(FallbackWarning, match="head dimensions"):
            self.check(arguments(1, 1, 1, 1, 257, 4))

    @backends("recurrent_gated_delta_rule")
    @pytest.mark.parametrize(
        ("wrong", "match"),
        [
            ({"key": randn(2, 1, 2, 32)}, "query and key must be"),
            ({"value": randn(2, 2, 4, 64)}, "value must be"),
            ({"value": randn(2, 1, 3, 64)}, "value has 3 heads"),
            ({"beta": randn(2, 1, 2)}, "g and beta must be"),
            ({"initial_state": randn(2, 4, 64, 32)}, "initial_state must be"),
            ({"cu_seqlens": torch.tensor([0, 1])}, "with cu_seqlens the batch must be 1"),
            ({"cu_seqlens": torch.tensor([0])}, r"cu_seqlens must be \[N"),
        ],
        ids=lambda x: "" if isinstance(x, dict) else x,
    )
    def test_wrong_arguments(self, backend, wrong, match):
        with pytest.raises(ValueError, match=f"recurrent_gated_delta_rule: {match}"):
            recurrent_gated_delta_rule(**arguments(*SHAPES[0]) | wrong, backend=backend)

    def test_compiled(self):
        kwargs = arguments(*SHAPES[0])

        def call(query, value, initial_state):
            changed = {"query": query * 2, "value": value, "initial_state": initial_state}
            out, final = recurrent_gated_delta_rule(**kwargs | changed, backend="cutile")
            return out.relu(), final

        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True, backend="inductor" if HAS_GPU else "aot_eager")
        inputs = (kwargs["query"], kwargs["value"], kwargs["initial_state"])
        torch.testing.assert_close(compiled(*inputs), call(*inputs), rtol=0, atol=0)

    def test_operator(self):
        tensors = floating(arguments(*SHAPES[0]))
        torch.library.opcheck(recurrent_forward.operator, (*tensors, True, True))
        torch.library.opcheck(recurrent_forward.operator, (*tensors[:5], None, False, False))

    def test_blocks_for_every_multiprocessor(self, monkeypatch):
        monkeypatch.setattr(cutile, "sm_count", lambda index: 132)
        cutile.recurrent_tiles.cache_clear()
        assert cutile.recurrent_tiles(32, 128, 128, 0) == (128, 16)
        assert cutile.recurrent_tiles(2048, 128, 128, 0) == (128, 64)
        assert cutile.recurrent_tiles(1, 80, 20, 0) == (128, 16)
        cutile.recurrent_tiles.cache_clear()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_compiles_for_every_architecture(self, dtype):
        tensors = [t.cpu() for t in floating(arguments(1, 1, 16, 32, 128, 128, dtype=dtype))]
        assert_launches_compile(lambda: recurrent_forward(*tensors, True, True))

    @gpu
    def test_graph_capture(self):
        self.assertCaptures(
            lambda *tensors: recurrent_gated_delta_rule(*tensors, True, True, backend="cutile"),
            *floating(arguments(2, 1, 16, 32, 128, 128, dtype=torch.bfloat16)),
        )

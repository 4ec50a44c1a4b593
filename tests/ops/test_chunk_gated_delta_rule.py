import math

import pytest
import torch
from common import ARCHITECTURES
from common import HAS_GPU
from common import TORCH
from common import PyTestCase
from common import assert_compiles
from common import assert_launches_compile
from common import backends
from common import device
from common import dtypes
from common import gpu
from common import randn
from common import recorded_launches
from common import sanitized
from common import some
from delta_rule import EMPTY
from delta_rule import arguments
from delta_rule import final_in_dtype
from delta_rule import floating
from delta_rule import in_one_dtype
from tensor_cores import tensor_cores
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from tilegym.backend import dispatcher
from tilegym.errors import FallbackWarning
from tilegym.ops import chunk_gated_delta_rule
from tilegym.ops import recurrent_gated_delta_rule
from tilegym.ops.cutile import gated_delta_rule_chunk as cutile
from tilegym.ops.cutile.gated_delta_rule_chunk import chunk_backward
from tilegym.ops.cutile.gated_delta_rule_chunk import chunk_forward
from tilegym.ops.pytorch.gated_delta_rule import chunk_gated_delta_rule as reference
from tilegym.ops.pytorch.gated_delta_rule import recurrent_gated_delta_rule as recurrence

# B, T, Hk, Hv, Dk, Dv
SHAPES = [(2, 130, 1, 2, 32, 32), (1, 7, 2, 2, 20, 36), (1, 64, 1, 3, 64, 16)]
GPU_SHAPES = [(1, 2048, 16, 32, 128, 128), (3, 777, 4, 8, 64, 128), (1, 300, 2, 2, 256, 256)]


def sizes_differ(t):
    """``t`` with rows of very different lengths."""
    return t * torch.linspace(-4, 3, t.shape[1], device=t.device).exp()[None, :, None, None]


def repeated_keys(dtype, seed):
    kwargs = arguments(1, 128, 1, 1, 32, 16, dtype=dtype, seed=seed)
    kwargs["key"] = kwargs["key"][:, :1].expand(-1, 128, -1, -1)
    return kwargs | {"beta": torch.ones_like(kwargs["beta"]), "g": torch.zeros_like(kwargs["g"])}


def as_transformers_does(**kwargs):
    """Qwen3-Next's own, whose decays are differences of one sum."""
    groups = kwargs["value"].shape[2] // kwargs["key"].shape[2]
    for name in ("query", "key"):
        kwargs[name] = kwargs[name].repeat_interleave(groups, dim=2)
    return final_in_dtype(torch_chunk_gated_delta_rule)(**kwargs)


class Test_ChunkGatedDeltaRule(PyTestCase):
    def check(self, kwargs, backend="cutile", gradient=True):
        """In the working dtype, the final state too: for 16 bits the kernels multiply in tf32."""
        others = (as_transformers_does,) if kwargs["key"].numel() else ()  # it takes nothing that is empty
        self.assertCorrectness(
            final_in_dtype(chunk_gated_delta_rule), final_in_dtype(reference), in_one_dtype(kwargs),
            {"backend": backend}, gradient=gradient, other_ref_fns=others,
        )  # fmt: skip

    @backends("chunk_gated_delta_rule")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        self.check(arguments(*shape, dtype=dtype), backend, gradient=shape[4] <= 128)

    def test_wide_heads(self):
        kwargs = arguments(1, 66, 1, 1, 256, 128, dtype=torch.bfloat16)
        self.check(kwargs, gradient=False)
        kwargs["query"].requires_grad_()
        dispatcher._warned.clear()
        with pytest.warns(FallbackWarning, match="keys up to 128 wide"):
            chunk_gated_delta_rule(**kwargs, backend="cutile")

    @pytest.mark.parametrize("state", ["none", "initial", "final"])
    @pytest.mark.parametrize("normalize", [True, False])
    def test_options(self, state, normalize):
        kwargs = arguments(*SHAPES[0], normalize=normalize) | {"output_final_state": state == "final"}
        if state == "none":
            kwargs["initial_state"] = None
        wanted = tuple(k for k, v in kwargs.items() if isinstance(v, torch.Tensor))
        self.check(kwargs, gradient=wanted)

    def test_gates_in_fp32_beside_bf16(self):
        """As the models call it: the output is bf16, and as good as the reference's."""
        kwargs = arguments(*SHAPES[0], dtype=torch.bfloat16) | {"output_final_state": False}
        self.assertCorrectness(
            final_in_dtype(chunk_gated_delta_rule), final_in_dtype(reference), kwargs, {"backend": "cutile"}
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_error_of_the_state(self, dtype):
        kwargs = arguments(*SHAPES[0], dtype=dtype)
        exact = reference(**{k: v.double() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()})[1]
        state = chunk_gated_delta_rule(**kwargs, backend="cutile")[1]
        assert state.dtype == torch.float32
        # X comes from products in tf32, with 11 bits; what follows has 16. In fp32 they have 22.
        bound = 1e-4 if dtype == torch.bfloat16 else 1e-6
        assert (state - exact).norm() < bound * exact.norm()

    @pytest.mark.parametrize("frozen", ["query", "value", "initial_state"])
    def test_gradients_of_some(self, frozen):
        kwargs = arguments(*SHAPES[1])
        self.check(kwargs, gradient=tuple(k for k, v in kwargs.items() if torch.is_tensor(v) and k != frozen))

    @pytest.mark.parametrize("which", [0, 1])
    def test_gradient_through_one_output(self, which):
        def only(op):
            return lambda **kwargs: final_in_dtype(op)(**kwargs)[which]

        kwargs = arguments(*SHAPES[1])
        wanted = tuple(k for k in kwargs if torch.is_tensor(kwargs[k]) and (which == 0 or k != "query"))
        self.assertCorrectness(
            only(chunk_gated_delta_rule), only(reference), kwargs, {"backend": "cutile"}, gradient=wanted
        )

    @pytest.mark.parametrize("seed", [0, 2])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_repeated_keys(self, dtype, seed):
        """All tokens alike and nothing forgotten, where sums of powers of the system lose all digits."""
        self.check(repeated_keys(dtype, seed))

    @pytest.mark.skipif(HAS_GPU, reason="it has tensor cores")
    @pytest.mark.parametrize("seed", some([0, 2], 2))
    def test_repeated_keys_on_tensor_cores(self, seed):
        """What they cut off of a token's numbers beside another's, one after the other, adds up."""
        with tensor_cores():
            self.check(repeated_keys(torch.float32, seed))

    @backends("chunk_gated_delta_rule")
    @pytest.mark.parametrize(
        "g", some([0.0, -1e-30, -30.0, -1e4, -1e12, -3e38, -math.inf], 0.0, -1e-30, -30.0, -3e38, -math.inf)
    )
    def test_extreme_decays(self, backend, g):
        """Decays whose quotients would overflow, and sums that leave those of the other tokens no digits."""
        kwargs = arguments(*SHAPES[0])
        kwargs["g"][:, 1::3] = g

        def results(op, kwargs, **options):
            leaves = [t.requires_grad_() for t in floating(kwargs)]
            results = op(**kwargs, **options)
            return *results, *torch.autograd.grad([x.sum() for x in results], leaves)

        exact = results(recurrence, {k: v.double() if torch.is_tensor(v) else v for k, v in kwargs.items()})
        for x, expected in zip(results(chunk_gated_delta_rule, kwargs, backend=backend), exact, strict=True):
            torch.testing.assert_close(x.double(), expected, rtol=0, atol=2e-6 * expected.abs().max().item())

    def test_lengths_of_rows(self):
        """Normalised keys and queries, whatever they were before."""
        kwargs = arguments(*SHAPES[0])
        self.check(kwargs | {k: sizes_differ(kwargs[k]) for k in ("query", "key")})

    def test_not_contiguous(self):
        """As the model passes them: slices of one tensor, whose dimensions can lie far apart."""
        for mixed in (randn(2, 3 * 2 * 16, 70).mT, randn(2, 70, 3 * 2 * 16)):
            mixed = mixed.unflatten(-1, (3, 2, 16))
            kwargs = arguments(2, 70, 2, 2, 16, 16)
            kwargs |= dict(query=mixed[:, :, 0], key=mixed[:, :, 1], value=mixed[:, :, 2])
            kwargs["g"] = -randn(2, 2, 70).mT.abs()
            kwargs["initial_state"] = kwargs["initial_state"].mT
            self.check(kwargs)

    @backends("chunk_gated_delta_rule")
    def test_agrees_with_the_recurrence(self, backend):
        kwargs = arguments(*SHAPES[0])
        with sanitized():
            chunked = chunk_gated_delta_rule(**kwargs, chunk_size=32, backend=backend)
        torch.testing.assert_close(chunked, recurrent_gated_delta_rule(**kwargs), atol=2e-6, rtol=1e-4)

    def test_gradients_are_the_same_every_time(self):
        runs = []
        for _ in range(3):
            kwargs = arguments(*SHAPES[0], dtype=torch.bfloat16)
            leaves = [t.requires_grad_() for t in floating(kwargs)]
            out, final = chunk_gated_delta_rule(**kwargs, backend="cutile")
            runs.append((out, final, *torch.autograd.grad([out, final], leaves, [out.detach(), final.detach()])))
        for other in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))

    @pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # that they are not fp64
    @pytest.mark.parametrize("normalize", [True, False])
    def test_gradcheck(self, normalize):
        kwargs = arguments(1, 5, 1, 2, 4, 3, normalize=normalize)
        names = [k for k, v in kwargs.items() if torch.is_tensor(v)]

        def call(*tensors):
            return chunk_gated_delta_rule(**kwargs | dict(zip(names, tensors, strict=True)), backend="cutile")

        leaves = tuple(kwargs[k].requires_grad_() for k in names)
        torch.autograd.gradcheck(call, leaves, eps=1e-2, atol=1e-2, rtol=1e-2, nondet_tol=0.0, fast_mode=True)

    @pytest.mark.parametrize("where", ["query", "key", "value", "g", "beta", "initial_state"])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_nan_and_infinity(self, where, value):
        """In the second of three chunks: the first stays as it is, and nothing is finite where PyTorch has NaN."""
        kwargs = arguments(1, 150, 1, 1, 16, 16)
        tensor = kwargs[where]
        if where == "initial_state":
            tensor[0, 0, 3, 5] = value
        else:
            tensor.view(150, -1)[100, 0] = value
        got = chunk_gated_delta_rule(**kwargs, backend="cutile")
        for x, expected in zip(got, reference(**kwargs), strict=True):
            assert torch.equal(x.isfinite(), expected.isfinite())
            torch.testing.assert_close(x[x.isfinite()], expected[x.isfinite()], atol=1e-5, rtol=1e-4)

    @backends("chunk_gated_delta_rule")
    @pytest.mark.parametrize("shape", EMPTY, ids=str)
    def test_empty(self, backend, shape):
        if TORCH < (2, 10) and 0 in shape[-2:]:
            pytest.skip("PyTorch 2.9 pads no tensor without columns")
        kwargs = arguments(*shape)
        self.check(kwargs, backend)
        state = chunk_gated_delta_rule(**kwargs, backend=backend)[1]
        assert state.data_ptr() != kwargs["initial_state"].data_ptr() or not state.numel()

    def test_packed_sequences_come_from_pytorch(self):
        """Each sequence as it is alone, with a state of its own."""
        kwargs = arguments(1, 90, 2, 4, 16, 16)
        kwargs["initial_state"] = randn(3, 4, 16, 16)
        cu_seqlens = torch.tensor([0, 70, 70, 90], device=device())
        dispatcher._warned.clear()
        with pytest.warns(FallbackWarning, match="cu_seqlens"):
            out, final = chunk_gated_delta_rule(**kwargs, cu_seqlens=cu_seqlens, backend="cutile")
        assert torch.equal(final[1], kwargs["initial_state"][1])
        for n, part in ((0, slice(0, 70)), (2, slice(70, 90))):
            alone = {k: kwargs[k][:, part] for k in ("query", "key", "value", "g", "beta")}
            alone["initial_state"] = kwargs["initial_state"][n : n + 1]
            alone_out, alone_final = reference(**kwargs | alone)
            assert torch.equal(out[:, part], alone_out) and torch.equal(final[n], alone_final[0])

    @backends("chunk_gated_delta_rule")
    @pytest.mark.parametrize(
        ("wrong", "match"),
        [
            ({"chunk_size": 0}, "chunk_size is 0"),
            ({"query": randn(1, 7, 1, 20)}, "query and key must be"),
            ({"value": randn(1, 7, 3, 36)}, "value has 3 heads"),
            ({"initial_state": randn(1, 2, 36, 20)}, "initial_state must be"),
        ],
        ids=lambda x: "" if isinstance(x, dict) else x,
    )
    def test_wrong_arguments(self, backend, wrong, match):
        with pytest.raises(ValueError, match=f"chunk_gated_delta_rule: {match}"):
            chunk_gated_delta_rule(**arguments(*SHAPES[1]) | wrong, backend=backend)

    def test_compiled(self):
        def call(query, key, value, g, beta, state):
            out, final = chunk_gated_delta_rule(
                query * 2, key, value, -g.abs(), beta.sigmoid(), initial_state=state, output_final_state=True,
                use_qk_l2norm_in_kernel=True, backend="cutile",
            )  # fmt: skip
            return out.sin(), final

        self.assertCompiledEqualsEager(call, *floating(arguments(*SHAPES[1])))

    def test_compiled_without_states(self):
        """As models train: compiled code gives gradients for results that nobody uses, too."""

        def call(query, key, value, g, beta):
            return chunk_gated_delta_rule(query * 2, key, value, g * 0.5, beta * 0.5, backend="cutile")[0] * 3

        self.assertCompiledEqualsEager(call, *floating(arguments(*SHAPES[1]))[:5])

    def test_operators(self):
        tensors = floating(arguments(*SHAPES[0]))
        dout = torch.ones_like(tensors[2])
        torch.library.opcheck(chunk_forward.operator, (*tensors, True, True))
        torch.library.opcheck(chunk_forward.operator, (*tensors[:5], None, False, False))
        torch.library.opcheck(chunk_backward.operator, (dout, tensors[5], *tensors, True))
        torch.library.opcheck(chunk_backward.operator, (dout, None, *tensors[:5], None, False))

    def test_blocks_for_every_multiprocessor(self, monkeypatch):
        monkeypatch.setattr(cutile, "sm_count", lambda index: 132)
        cutile.scan_tiles.cache_clear()
        assert cutile.scan_tiles(32, 128, 128, 0) == (128, 32)
        assert cutile.scan_tiles(64, 128, 128, 0) == (128, 64)  # one wave instead of two
        assert cutile.scan_tiles(256, 128, 128, 0) == (128, 64)
        assert cutile.scan_tiles(1, 5, 3, 0) == (32, 16)
        cutile.scan_tiles.cache_clear()

    @pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
    def test_narrow_tiles_beside_both_states(self):
        tensors = floating(arguments(1, 64, 1, 1, 64, 64, dtype=torch.bfloat16))
        for final, width in ((tensors[5], 32), (None, 64)):
            with recorded_launches() as launches:
                chunk_backward(tensors[2], final, *tensors, True)
            assert [args[-5] for kernel, args in launches if kernel is cutile.backward_scan_kernel] == [64]
            assert [args[-4] for kernel, args in launches if kernel is cutile.backward_scan_kernel] == [width]

    @pytest.mark.slow
    @pytest.mark.parametrize("backward", [False, True])
    @pytest.mark.parametrize(
        ("dtype", "dim", "architectures"),
        [
            (torch.bfloat16, 32, ARCHITECTURES),
            (torch.float32, 16, ("sm_90",)),
            # Of this size, in 16 bits, tileiras 13.4 crashes at programs that differ little.
            (torch.bfloat16, 128, ("sm_90",)),
            (torch.float16, 128, ("sm_90",)),
        ],
        ids=str,
    )
    def test_compiles(self, dtype, dim, architectures, backward):
        tensors = [t.cpu() for t in floating(arguments(1, 128, 2, 4, dim, dim, dtype=dtype))]
        if backward:
            assert_launches_compile(lambda: chunk_backward(tensors[2], tensors[5], *tensors, True), architectures)
        else:
            assert_launches_compile(lambda: chunk_forward(*tensors, True, True), architectures)

    def test_keys_of_64_for_compute_capability_8(self, monkeypatch):
        """In tiles twice as wide, of which the kernel is made for it, and computes the same."""
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
        assert [cutile.tile_in_chunk(width, 0) for width in (32, 64, 128)] == [32, 128, 128]
        assert cutile.tile_in_chunk(64, -1) == 64
        monkeypatch.undo()
        monkeypatch.setattr(cutile, "tile_in_chunk", lambda tile_k, device: 128)
        self.check(arguments(*SHAPES[2], dtype=torch.bfloat16))
        tensors = [t.cpu() for t in floating(arguments(1, 64, 1, 1, 64, 16, dtype=torch.bfloat16))]
        with recorded_launches() as launches:
            chunk_backward(tensors[2], tensors[5], *tensors, True)
        assert_compiles(*launches[-1], ("sm_80",))

    @gpu
    def test_graph_capture(self):
        self.assertCaptures(
            lambda *tensors: chunk_gated_delta_rule(*tensors[:5], 64, tensors[5], True, True, backend="cutile"),
            *floating(arguments(2, 200, 4, 8, 128, 128, dtype=torch.bfloat16)),
        )

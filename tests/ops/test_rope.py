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

from tilegym.backend import use_backend
from tilegym.errors import FallbackWarning
from tilegym.ops import apply_rope_base
from tilegym.ops.cutile import rope
from tilegym.ops.cutile.rope import rope_forward
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.pytorch.rope import apply_rope_base as reference

# B, Hq, Hkv, S, D: grouped queries, one token, dims and halves that are not powers of two.
SHAPES = [(1, 1, 1, 1, 2), (2, 4, 2, 9, 64), (1, 5, 1, 33, 80), (3, 3, 3, 2, 96), (1, 32, 8, 1, 128)]
GPU_SHAPES = [(4, 32, 8, 4096, 128), (8, 32, 8, 1, 128), (2, 40, 40, 1000, 256)]
Q_AND_K = ("q", "k")


def tables(batch, tokens, width, dtype=torch.float32, halves=2):
    """cos and sin of random angles, [batch, tokens, halves * width]."""
    angles = (randn(batch, tokens, width) * 3).repeat(1, 1, halves)
    return {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}


def table_of_positions(dtype):
    """cos and sin of 9 positions, [9, 16], and position_ids of 5 tokens in dtype."""
    ids = torch.arange(5, device=device()).view(1, 5).to(dtype)
    return {name: table[0] for name, table in tables(1, 9, 8).items()} | {"position_ids": ids}


def arguments(b, hq, hk, s, d, dtype=torch.float32, **options):
    q, k = randn(b, hq, s, d, dtype=dtype), randn(b, hk, s, d, dtype=dtype, seed=1)
    return {"q": q, "k": k, **tables(1, s, d // 2, dtype)} | options


class Test_RoPE(PyTestCase):
    @backends("apply_rope_base")
    @dtypes()
    @pytest.mark.parametrize("shape", SHAPES + (GPU_SHAPES if HAS_GPU else []), ids=str)
    def test_op(self, backend, dtype, shape):
        kwargs = arguments(*shape, dtype=dtype)
        self.assertCorrectness(apply_rope_base, reference, kwargs, {"backend": backend}, gradient=Q_AND_K)

    def test_reference_is_the_models(self):
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        kwargs = arguments(2, 4, 2, 9, 64, dtype=torch.bfloat16)
        for got, expected in zip(reference(**kwargs), apply_rotary_pos_emb(**kwargs), strict=True):
            assert torch.equal(got, expected)

    @pytest.mark.parametrize("batch", [1, 3])
    @pytest.mark.parametrize("halves", [1, 2])
    @pytest.mark.parametrize("factor", [1.0, 0.5, 0.375])
    def test_tables(self, batch, halves, factor):
        kwargs = arguments(3, 4, 2, 7, 32, partial_rotary_factor=factor)
        kwargs |= tables(batch, 7, int(32 * factor) // 2, halves=halves)
        self.assertCorrectness(apply_rope_base, reference, kwargs, {"backend": "cutile"}, gradient=Q_AND_K)

    def test_fp32_tables_for_bf16(self):
        kwargs = arguments(2, 4, 2, 9, 64, dtype=torch.bfloat16) | tables(2, 9, 32)
        self.assertCorrectness(apply_rope_base, reference, kwargs, {"backend": "cutile"}, gradient=Q_AND_K)

    @pytest.mark.parametrize("batch", [1, 2])
    def test_position_ids(self, batch):
        cos_sin = {name: table[0] for name, table in tables(1, 50, 32).items()}
        positions = torch.tensor([[40, 0, 7], [49, 48, 3]], device=device())[:batch]
        kwargs = arguments(2, 4, 2, 3, 64, position_ids=positions) | cos_sin
        self.assertCorrectness(apply_rope_base, reference, kwargs, {"backend": "cutile"}, gradient=Q_AND_K)

    @backends("apply_rope_base")
    def test_unsqueeze_dim(self, backend):
        kwargs = arguments(2, 4, 2, 9, 64)
        swapped = kwargs | {name: kwargs[name].transpose(1, 2) for name in Q_AND_K}
        for got, expected in zip(
            apply_rope_base(**swapped, unsqueeze_dim=2, backend=backend),
            apply_rope_base(**kwargs, backend=backend),
            strict=True,
        ):
            assert torch.equal(got.transpose(1, 2), expected)

    @pytest.mark.parametrize("heads", [4, 5])
    def test_projections_layout(self, heads):
        """q and k as a model has them: slices of one [B, S, H * D] tensor, heads and tokens swapped."""
        packed = randn(2, 9, (heads + 2) * 64, dtype=torch.bfloat16).view(2, 9, heads + 2, 64).transpose(1, 2)
        kwargs = arguments(2, heads, 2, 9, 64, dtype=torch.bfloat16) | {"q": packed[:, :heads], "k": packed[:, heads:]}
        self.assertCorrectness(apply_rope_base, reference, kwargs, {"backend": "cutile"}, gradient=Q_AND_K)

    @pytest.mark.parametrize(
        "batch, most, axes",
        [(7, 65535, (0, 1, 2)), (7, 6, (1, 2, 0)), (2, 4, (1, 0, 2)), (1, 65535, (1, 2, -1)), (1, 4, (1, 0, -1))],
        ids=str,
    )
    @pytest.mark.parametrize("heads_inside", [False, True])
    def test_axes_of_the_grid(self, batch, most, axes, heads_inside, monkeypatch):
        """Of 4 tiles of heads, 5 of tokens, and sequences the second and third axis take at most so many."""
        monkeypatch.setattr(rope, "MAX_BLOCKS", most)
        monkeypatch.setattr(rope, "plan", rope.plan.__wrapped__)
        kwargs = arguments(batch, 3, 1, 19, 256, dtype=torch.bfloat16)
        if heads_inside:
            kwargs |= {name: kwargs[name].transpose(1, 2).contiguous().transpose(1, 2) for name in Q_AND_K}
        grid, constants, _ = rope.plan(batch, 3, 1, 19, 128, heads_inside)
        assert constants[4:7] == axes and max(grid[1:]) <= most and math.prod(grid) == batch * 4 * 5
        self.assertCorrectness(apply_rope_base, reference, kwargs, {"backend": "cutile"}, gradient=Q_AND_K)

    @pytest.mark.parametrize(
        "tokens, elements, hints", [(5, 512, {}), (513, 2048, {"num_worker_warps": 8}), (9000, 1024, {})]
    )
    def test_blocks_by_size(self, tokens, elements, hints):
        _, (_, heads, _, tile, *_), kernel = rope.plan(1, 8, 2, tokens, 64, True)
        assert heads * tile * 64 == elements
        assert kernel is (hinted(rope.rope_kernel, **hints) if hints else rope.rope_kernel)
        if tokens < 9000:
            kwargs = arguments(1, 8, 2, tokens, 128, dtype=torch.bfloat16)
            self.assertCorrectness(apply_rope_base, reference, kwargs, {"backend": "cutile"}, gradient=Q_AND_K)

    def test_too_many_blocks_fall_back(self, monkeypatch):
        monkeypatch.setattr(rope, "MAX_BLOCKS", 3)
        monkeypatch.setattr(rope, "plan", rope.plan.__wrapped__)
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="a grid cannot have 4 x 5 x 1 blocks"):
            apply_rope_base(**arguments(1, 3, 1, 19, 256))

    def test_inputs_stay_as_they_were(self):
        kwargs = arguments(1, 2, 1, 5, 16)
        before = kwargs["q"].clone(), kwargs["k"].clone()
        apply_rope_base(**kwargs, backend="cutile")
        assert torch.equal(kwargs["q"], before[0]) and torch.equal(kwargs["k"], before[1])

    @pytest.mark.parametrize("wanted", [("q",), ("k",)])
    def test_gradient_of_one(self, wanted):
        kwargs = arguments(1, 2, 1, 5, 16)
        self.assertCorrectness(apply_rope_base, reference, kwargs, {"backend": "cutile"}, gradient=wanted)

    @pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # that they are not fp64
    def test_gradcheck(self):
        kwargs = arguments(1, 2, 1, 3, 4)
        inputs = tuple(kwargs.pop(name).requires_grad_() for name in Q_AND_K)
        torch.autograd.gradcheck(
            lambda q, k: apply_rope_base(q, k, **kwargs, backend="cutile"), inputs, eps=1e-2, atol=1e-3, rtol=1e-3
        )

    @pytest.mark.parametrize("shape", [(0, 2, 1, 5, 16), (2, 2, 1, 0, 16)], ids=str)
    def test_empty(self, shape):
        kwargs = arguments(*shape)
        self.assertCorrectness(apply_rope_base, reference, kwargs, {"backend": "cutile"}, gradient=Q_AND_K)

    def test_special_values(self):
        kwargs = arguments(1, 2, 1, 5, 16)
        for i, value in enumerate((float("nan"), float("inf"), float("-inf"))):
            kwargs["q"][0, 0, i, i] = value
        self.assertCorrectness(apply_rope_base, reference, kwargs, {"backend": "cutile"})

    def test_offsets_beyond_32_bits(self):
        """Three heads, each 2^30 elements after the other; only what is touched takes memory."""
        stride = 2**30 + 64
        q = torch.empty(2 * stride + 64, dtype=torch.bfloat16).as_strided((1, 3, 2, 32), (64, stride, 32, 1))
        q.copy_(randn(1, 3, 2, 32, dtype=q.dtype))
        kwargs = {name: x.cpu() for name, x in arguments(1, 3, 1, 2, 32, dtype=torch.bfloat16).items()} | {"q": q}
        self.assertCorrectness(apply_rope_base, reference, kwargs, {"backend": "cutile"})

    def test_unsupported_falls_back(self):
        kwargs = arguments(1, 2, 1, 5, 16)
        kwargs["cos"].requires_grad_()
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="cos or sin requires a gradient"):
            q, _ = apply_rope_base(**kwargs)
        q.sum().backward()
        assert kwargs["cos"].grad is not None
        with use_backend("cutile"), pytest.warns(FallbackWarning, match="not fp32, fp16 or bf16"):
            apply_rope_base(**arguments(1, 2, 1, 5, 16, dtype=torch.float64))

    @backends("apply_rope_base")
    @pytest.mark.parametrize(
        "wrong, error, message",
        [
            ({"unsqueeze_dim": 3}, ValueError, "unsqueeze_dim is 3"),
            ({"q": randn(2, 5, 16)}, ValueError, "must have 4"),
            ({"k": randn(1, 1, 6, 16)}, ValueError, "may differ in dimension 1 only"),
            ({"k": randn(1, 1, 5, 16, dtype=torch.float16)}, TypeError, "k is torch.float16"),
            ({"cos": randn(1, 5, 12)}, ValueError, "16 or 8 columns"),
            ({"partial_rotary_factor": 0.2}, ValueError, "3 of 16 dimensions"),
            (tables(1, 4, 8), ValueError, "cos has shape"),
            (tables(3, 5, 8), ValueError, "cos has shape"),
            (table_of_positions(torch.float32), TypeError, "position_ids are torch.float32"),
            (table_of_positions(torch.bool), TypeError, "position_ids are torch.bool"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_wrong_arguments(self, backend, wrong, error, message):
        with pytest.raises(error, match=message):
            apply_rope_base(**arguments(1, 2, 1, 5, 16) | wrong, backend=backend)

    @pytest.mark.parametrize("unsqueeze_dim", [1, 2])
    def test_compiled(self, unsqueeze_dim):
        kwargs = arguments(1, 4, 4, 4, 16, unsqueeze_dim=unsqueeze_dim)
        q, k = kwargs.pop("q"), kwargs.pop("k")

        def call(q, k):
            return apply_rope_base(q * 2, k, **kwargs, backend="cutile")

        self.assertCompiledEqualsEager(call, q, k)

    def test_compiled_with_open_numbers(self):
        """dynamic=True leaves the default of the factor open, but not what dimensions a view names."""

        def call(q, k, cos, sin):
            q, k = (x.view(1, -1, 2, 16).transpose(1, 2) for x in (q, k))
            return apply_rope_base(q, k, cos.view(1, -1, 16), sin.view(1, -1, 16), backend="cutile")

        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
        for tokens in (5, 9):
            inputs = randn(tokens, 32), randn(tokens, 32, seed=1), *(randn(tokens * 16, seed=n) for n in (2, 3))
            torch.testing.assert_close(compiled(*inputs), call(*inputs), rtol=0, atol=0)

    def test_operator(self):
        kwargs = arguments(2, 4, 2, 9, 16)
        q = kwargs.pop("q").transpose(1, 2).contiguous().transpose(1, 2)
        torch.library.opcheck(rope_forward.operator, (q, *kwargs.values(), 8, False, False))

    @pytest.mark.parametrize("tokens, dim, rotary", [(4, 128, 128), (512, 128, 128), (4, 80, 20)])
    def test_compiles_for_every_architecture(self, tokens, dim, rotary):
        q, k, t = (torch.empty(1, h, tokens, d, dtype=torch.bfloat16) for h, d in ((8, dim), (2, dim), (1, rotary)))
        assert_launches_compile(lambda: rope_forward(q, k, t[0], t[0].clone(), rotary, False, False))

    @gpu
    def test_more_than_32_bits_of_elements(self):
        self.assertLargeInput(
            lambda x: apply_rope_base(x, x[:, :1], *tables(1, 1, 64).values(), backend="cutile")[0],
            2**19 + 5,
            32,
            1,
            128,
        )

    @gpu
    def test_graph_capture(self):
        kwargs = arguments(1, 32, 8, 1, 128, dtype=torch.bfloat16)
        self.assertCaptures(lambda *args: apply_rope_base(*args, backend="cutile"), *kwargs.values())

"""rope_and_cache: norms, the rotation and the write to the cache of one new token."""

import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import assert_launches_compile
from common import backends
from common import device
from common import distinct
from common import dtypes
from common import randn
from common import recorded_launches
from common import some

from tilegym.interpreter import compile_kernel
from tilegym.ops import modules
from tilegym.ops import rope_and_cache
from tilegym.ops.cutile.rope_cache import rope_cache_forward
from tilegym.ops.pytorch.rms_norm import rms_norm as rms_reference
from tilegym.ops.pytorch.rope_cache import rope_and_cache as rope_reference


class Test_RopeAndCache(PyTestCase):
    @backends("rope_and_cache")
    @dtypes()
    @pytest.mark.parametrize(("dim", "rotary"), [(16, 16), (24, 16), (80, 80), (12, 6)])
    @pytest.mark.parametrize("batch", [1, 3])
    @pytest.mark.parametrize("one_half", [False, True], ids=["", "one_half"])
    @pytest.mark.parametrize(("pairs", "v_dim"), [("", 0), ("kept", 40), ("to halves", 0)], ids=str)
    def test_op(self, backend, dtype, dim, rotary, batch, one_half, pairs, v_dim):
        """q and the whole of both caches are those of the reference; neighbours are not touched."""
        # As a model has them: heads behind tokens in memory.
        v_dim = v_dim or dim
        sizes = (6, dim), (2, dim), (2, v_dim)
        q, k, v = (randn(batch, 1, *size, dtype=dtype, seed=s).transpose(1, 2) for s, size in enumerate(sizes))
        angles = randn(batch, 1, rotary // 2, seed=5).repeat(1, 1, 1 if one_half else 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        caches = [randn(batch, 2, 7, d, dtype=dtype, seed=s) for s, d in ((6, dim), (7, v_dim))]

        def call(function, **options):
            def run(q, k, v, cos, sin, keys, values, **rest):
                keys, values = keys.clone(), values.clone()
                position = torch.tensor([5], device=device())
                out = function(q, k, v, cos, sin, keys, values, position, one_half, pairs, **rest)
                return out, keys, values

            return run

        kwargs = dict(q=q, k=k, v=v, cos=cos, sin=sin, keys=caches[0], values=caches[1])
        self.assertCorrectness(call(rope_and_cache), call(rope_reference), kwargs, {"backend": backend})

    @backends("rope_and_cache")
    @dtypes()
    @pytest.mark.parametrize(("dim", "rotary"), [(16, 16), (24, 16), (80, 80), (12, 6)])
    @pytest.mark.parametrize("pairs", ["", "kept", "to halves"])
    @pytest.mark.parametrize("form", [(0.5, 0.0, "llama"), (0.5, 1.0, "gemma")], ids=str)
    def test_norms(self, backend, dtype, dim, rotary, pairs, form):
        """Of each head of q and k and all of its elements; results and both caches are those of separate ops."""
        q, k, v = (randn(2, 1, h, dim, dtype=dtype, seed=h).transpose(1, 2) * 3 for h in (6, 2, 2))
        angles = randn(2, 1, rotary // 2, seed=5).repeat(1, 1, 2)
        weights = [randn(dim, dtype=dtype, seed=s) * 0.3 + 1 for s in (20, 21)]
        caches = [randn(2, 2, 7, dim, dtype=dtype, seed=s) for s in (6, 7)]
        position, (eps, offset, casting) = torch.tensor([5], device=device()), form

        def fused(q, k, v, cos, sin, keys, values, q_norm, k_norm, **rest):
            keys, values = keys.clone(), values.clone()
            norms = (q_norm, k_norm, *form)
            out = rope_and_cache(q, k, v, cos, sin, keys, values, position, False, pairs, *norms, **rest)
            return out, keys, values

        def separate(q, k, v, cos, sin, keys, values, q_norm, k_norm):
            q, k = (
                rms_reference(x, w.shape, w, eps, None, None, offset, casting) for x, w in ((q, q_norm), (k, k_norm))
            )
            keys, values = keys.clone(), values.clone()
            return rope_reference(q, k, v, cos, sin, keys, values, position, False, pairs), keys, values

        kwargs = dict(q=q, k=k, v=v, cos=angles.cos().to(dtype), sin=angles.sin().to(dtype), keys=caches[0])
        kwargs |= dict(values=caches[1], q_norm=weights[0], k_norm=weights[1])
        self.assertCorrectness(fused, separate, kwargs, {"backend": backend})

    @backends("rope_and_cache")
    @pytest.mark.parametrize("name", ["apply_rotary_emb", "apply_rotary_pos_emb_interleave"])
    def test_pairs_are_those_of_deepseek(self, backend, name):
        """V2's complex numbers, and V3's neighbours that come out as halves, of parts of heads."""
        q, k = randn(1, 4, 1, 24)[..., 16:], randn(1, 1, 1, 8, seed=1)
        angles, zero = randn(1, 1, 4, seed=2), torch.tensor([0], device=device())
        cos, sin = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))
        kept = name == "apply_rotary_emb"
        embeddings = (torch.polar(torch.ones_like(angles), angles),) if kept else (cos, sin)
        expected = getattr(modules, name)(q, k, *embeddings, backend="pytorch")
        keys, values, pairs = randn(1, 1, 3, 8), randn(1, 1, 3, 6), "kept" if kept else "to halves"
        out = rope_and_cache(q, k, values[:, :, 2:].clone(), cos, sin, keys, values, zero, pairs=pairs, backend=backend)
        torch.testing.assert_close((out, keys[:, :, :1]), expected)

    @backends("rope_and_cache")
    def test_position_of_32_bits(self, backend):
        q, k, angle = randn(1, 4, 1, 8), randn(1, 2, 1, 8), randn(1, 1, 8)
        caches = [randn(1, 2, 5, 8) for _ in range(2)]
        for cache, dtype in zip(caches, (torch.int32, torch.int64), strict=True):
            position = torch.tensor([3], dtype=dtype, device=device())
            rope_and_cache(q, k, k, angle, angle, cache, cache.clone(), position, backend=backend)
        assert torch.equal(*caches)

    @backends("rope_and_cache")
    def test_wrong_arguments(self, backend):
        q, k, cache, angle = randn(1, 4, 1, 8), randn(1, 2, 1, 8), randn(1, 2, 5, 8), randn(1, 1, 8)
        position = torch.tensor([0], device=device())
        for change, match in (
            (dict(q=randn(1, 4, 2, 8)), "q must be"),
            (dict(q=randn(1, 4, 1, 16)), "differ in batch or head dimension"),
            (dict(q=randn(2, 4, 1, 8)), "differ in batch or head dimension"),
            (dict(cos=randn(3, 1, 8), sin=randn(3, 1, 8)), "cos and sin must be"),
            (dict(cos=randn(0, 1, 8), sin=randn(0, 1, 8)), "cos and sin must be"),
            (dict(v=randn(1, 2, 1)), "v .*; they are"),
            (dict(keys=randn(1, 3, 5, 8)), "keys and values must be"),
            (dict(position=torch.tensor([0, 1], device=device())), "position must hold one number"),
            (dict(cos=randn(1, 1, 10), sin=randn(1, 1, 10)), "cos and sin must be"),
            (dict(cos=randn(1, 1, 5), sin=randn(1, 1, 5)), "must be two halves"),
            (dict(one_half=True), "R <= 4"),
            (dict(v=randn(1, 2, 1, 6)), "with D 8 and 6"),
            (dict(pairs="interleaved"), "pairs must be one of '', 'kept', 'to halves'"),
            (dict(q_norm=randn(8)), r"rope_and_cache: k_norm must be \[8\] like the other norm, it is None"),
            (dict(q_norm=randn(4), k_norm=randn(8)), r"q_norm must be \[8\]"),
            (dict(casting="qwen"), "rope_and_cache: casting is 'qwen', allowed are 'llama', 'gemma'"),
        ):
            arguments = dict(q=q, k=k, v=k, cos=angle, sin=angle, keys=cache, values=cache, position=position) | change
            with pytest.raises(ValueError, match=match):
                rope_and_cache(**arguments, backend=backend)
        with pytest.raises(TypeError, match="rope_and_cache: q is"):
            rope_and_cache(q.half(), k, k, angle, angle, cache, cache, position, backend=backend)
        with pytest.raises(TypeError, match="rope_and_cache: position must be int32 or int64"):
            rope_and_cache(q, k, k, angle, angle, cache, cache, position.float(), backend=backend)
        with pytest.raises(TypeError, match="rope_and_cache: k_norm is torch.float16, k is"):
            norms = {"q_norm": randn(8), "k_norm": randn(8).half()}
            rope_and_cache(q, k, k, angle, angle, cache, cache, position, **norms, backend=backend)


NO_NORMS = (None, None, 1e-6, 0.0, True)


def launches():
    q, k = torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16), torch.zeros(1, 2, 1, 128, dtype=torch.bfloat16)
    cache, angle = torch.zeros(1, 2, 300, 128, dtype=torch.bfloat16), torch.zeros(1, 1, 128, dtype=torch.bfloat16)
    args = (q, k, k, angle, angle, cache, cache, torch.zeros(1, dtype=torch.int64))
    rope_cache_forward(*args, False, "", *NO_NORMS)
    rope_cache_forward(*args, False, "", angle[0, 0], angle[0, 0], 1e-6, 0.0, True)
    args = (*args[:3], angle[..., :96], angle[..., :96], *args[5:])
    rope_cache_forward(*args, False, "kept", angle[0, 0], angle[0, 0], 1e-6, 1.0, False)


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
def test_compiles_for_every_architecture():
    assert_launches_compile(launches)


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
def test_overlapping_launches_compile():
    """OVERLAP, the kernel's last argument, needs compute capability 9.0."""
    with recorded_launches() as recorded:
        launches()
    for kernel, args in distinct(recorded):
        assert args[-1] is False
        assert compile_kernel(kernel, (*args[:-1], True), "sm_90")[:4] == b"\x7fELF"


@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], torch.bfloat16))
def test_operator(dtype):
    q, k, cache, angle = (randn(1, *s, dtype=dtype) for s in ((4, 1, 8), (2, 1, 8), (2, 5, 8), (1, 8)))
    position = torch.tensor([3], device=device())
    given = (q, k, k, angle, angle, cache, cache.clone(), position, False, "kept")
    torch.library.opcheck(rope_cache_forward.operator, (*given, *NO_NORMS))
    torch.library.opcheck(rope_cache_forward.operator, (*given, angle[0, 0], angle[0, 0], 1e-6, 1.0, False))

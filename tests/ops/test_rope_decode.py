"""rope_fmha_decode: rotation, the write to the cache and attention of one new token."""

import pytest
import torch
from common import HAS_GPU
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

from tilegym.backend import recording
from tilegym.ops import fmha_decode
from tilegym.ops import rope_and_cache
from tilegym.ops import rope_fmha_decode
from tilegym.ops.cutile import rope_decode
from tilegym.ops.cutile.rope_cache import rope_cache_kernel
from tilegym.ops.cutile.rope_decode import rope_decode_forward
from tilegym.ops.cutile.rope_decode import tile_n_of
from tilegym.ops.cutile.tiling import hinted
from tilegym.ops.pytorch.rope_decode import rope_fmha_decode as reference

# (batch, query heads, kv heads, D, what is rotated of it, capacity, position): within a tile, in its last and its first
# row, at both ends of the cache, as many splits as there may be, and what the kernel leaves to separate ops.
CASES = [
    (1, 8, 2, 32, 32, 100, 37),
    (1, 8, 2, 32, 32, 100, 0),
    (3, 4, 4, 32, 32, 40, 39),
    (2, 6, 2, 64, 64, 50, 15),
    (1, 16, 1, 64, 64, 50, 16),
    (1, 4, 2, 32, 32, 250, 249),
    (1, 4, 2, 32, 32, 9000 if HAS_GPU else 300, 258),
    (2, 4, 2, 80, 80, 40, 21),
    (1, 4, 2, 64, 32, 40, 21),
    (1, 34, 2, 32, 32, 40, 21),
]
GPU_CASES = [
    (1, 32, 8, 128, 128, 768, 512),
    (1, 32, 8, 128, 128, 8192, 4999),
    (4, 16, 8, 256, 256, 700, 640),
    (1, 8, 2, 32, 32, 512, 130),
]
cases = pytest.mark.parametrize("case", CASES + (GPU_CASES if HAS_GPU else []), ids=str)


def arguments(case, dtype, seed=0, behind=3e4):
    """As a model has them: heads behind tokens in memory. What the cache holds from ``position`` on, ``behind``, is not
    to be read."""
    batch, heads, kv_heads, dim, rotary, capacity, position = case
    q, k, v = (
        randn(batch, 1, h, dim, dtype=dtype, seed=seed + s).transpose(1, 2)
        for s, h in enumerate((heads, kv_heads, kv_heads))
    )
    angles = randn(batch, 1, rotary // 2, seed=seed + 5).repeat(1, 1, 2)
    keys, values = (randn(batch, kv_heads, capacity, dim, dtype=dtype, seed=seed + s) for s in (6, 7))
    keys[:, :, position:], values[:, :, position:] = behind, behind
    return dict(q=q, k=k, v=v, cos=angles.cos().to(dtype), sin=angles.sin().to(dtype), keys=keys, values=values)


def called(function, position, **options):
    """``function`` on copies of the caches: its result, and what they hold then."""

    def run(q, k, v, cos, sin, keys, values, **rest):
        keys, values = keys.clone(), values.clone()
        out = function(q, k, v, cos, sin, keys, values, torch.tensor([position], device=device()), **rest, **options)
        return out, keys, values

    return run


class Test_RopeFMHADecode(PyTestCase):
    @backends("rope_fmha_decode")
    @dtypes()
    @cases
    def test_op(self, backend, dtype, case):
        ours, theirs = called(rope_fmha_decode, case[-1]), called(reference, case[-1])
        self.assertCorrectness(ours, theirs, arguments(case, dtype), {"backend": backend})

    @backends("rope_fmha_decode")
    @dtypes()
    @pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3], CASES[7]], ids=str)
    def test_norms(self, backend, dtype, case):
        """Of each head of q and k, as Qwen3's; by one launch, and by separate ops."""
        q_norm, k_norm = (randn(case[3], dtype=dtype, seed=s) * 0.3 + 1 for s in (20, 21))
        options = {"eps": 0.5}
        ours, theirs = called(rope_fmha_decode, case[-1], **options), called(reference, case[-1], **options)
        kwargs = arguments(case, dtype) | {"q_norm": q_norm, "k_norm": k_norm}
        self.assertCorrectness(ours, theirs, kwargs, {"backend": backend})

    @backends("rope_fmha_decode")
    @dtypes()
    @pytest.mark.parametrize("window", [None, 1, 16, 17, 33, 1000, 2**40])
    @pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[5], CASES[6], CASES[7]], ids=str)
    def test_windows_and_sinks(self, backend, dtype, case, window):
        """As gpt-oss has them, with the first half of cos and sin; a window alone, and its own key alone."""
        given = arguments(case, dtype)
        for sinks in (None, randn(case[1], dtype=dtype, seed=20)):
            one_half = sinks is not None
            if one_half:
                given |= {name: given[name][..., : case[4] // 2] for name in ("cos", "sin")} | {"sinks": sinks}
            options = {"window_size": window, "one_half": one_half}
            ours, theirs = called(rope_fmha_decode, case[-1], **options), called(reference, case[-1], **options)
            self.assertCorrectness(ours, theirs, given, {"backend": backend})

    @backends("rope_fmha_decode")
    @dtypes()
    @pytest.mark.parametrize("pairs", ["", "kept", "to halves"])
    @pytest.mark.parametrize("rotary", [2, 16, 30, 32])
    def test_rotations(self, backend, dtype, rotary, pairs):
        """Of a part of a head, and of neighbours, as GLM-4's; with norms too, and of a whole table or its half."""
        given = arguments((1, 8, 2, 32, rotary, 40, 21), dtype)
        norms = {name: randn(32, dtype=dtype, seed=s) * 0.3 + 1 for s, name in enumerate(("q_norm", "k_norm"))}
        for more, one_half in (({}, False), (norms, True)):
            if one_half:
                given |= {name: given[name][..., : rotary // 2] for name in ("cos", "sin")}
            options = {"one_half": one_half, "pairs": pairs, "eps": 0.1}
            ours, theirs = called(rope_fmha_decode, 21, **options), called(reference, 21, **options)
            self.assertCorrectness(ours, theirs, given | more, {"backend": backend})

    @backends("rope_fmha_decode")
    @pytest.mark.parametrize(("offset", "casting"), [(1.0, "gemma"), (0.0, "gemma")])
    def test_forms_of_norms(self, backend, offset, casting):
        for case in (CASES[0], CASES[7]):
            norms = {name: randn(case[3], dtype=torch.bfloat16, seed=s) for s, name in enumerate(("q_norm", "k_norm"))}
            options = {"eps": 0.1, "offset": offset, "casting": casting}
            ours, theirs = called(rope_fmha_decode, case[-1], **options), called(reference, case[-1], **options)
            self.assertCorrectness(ours, theirs, arguments(case, torch.bfloat16) | norms, {"backend": backend})

    @pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
    def test_of_a_window_the_cache_may_be_long(self):
        """Of which the tiles that a window reaches are all that there are blocks for."""
        given = arguments((1, 4, 2, 32, 32, 600, 401), torch.bfloat16)
        for window, splits in ((None, None), (1, 1), (2, 2), (17, 2), (18, 3), (128, 9), (226, 16), (300, None)):
            recording.forget()
            with recorded_launches() as launched, torch.no_grad():
                called(rope_fmha_decode, 401, window_size=window, backend="cutile")(**given)
            kernels = [kernel for kernel, _ in launched]
            if splits is None:
                assert kernels[0] is rope_cache_kernel
            else:
                assert rope_decode.splits_of(600, 16, window) == splits
                own = [hinted(rope_decode.rope_decode_kernel, num_worker_warps=4)]
                assert kernels == own + [rope_decode.merge_kernel] * (splits > 1)

    def test_a_window_has_blocks_for_all_its_keys(self):
        for window in (1, 2, 15, 16, 17, 31, 32, 33, 100):
            needed = max(token // 16 - max(token + 1 - window, 0) // 16 + 1 for token in range(200))
            assert rope_decode.splits_of(200, 16, window) == needed

    @pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
    def test_norms_are_no_launches_of_their_own(self):
        """Where separate ops serve it: the heads' norms are in the launch that rotates."""
        given = arguments(CASES[7], torch.bfloat16)
        norms = {name: randn(80, dtype=torch.bfloat16) for name in ("q_norm", "k_norm")}
        recording.forget()
        with recorded_launches(run=True) as plain, torch.no_grad():
            called(rope_fmha_decode, 21, backend="cutile")(**given)
        recording.forget()
        with recorded_launches(run=True) as normed, torch.no_grad():
            called(rope_fmha_decode, 21, backend="cutile")(**given, **norms)
        assert [kernel for kernel, _ in normed] == [kernel for kernel, _ in plain] and rope_cache_kernel is plain[0][0]

    @backends("rope_fmha_decode")
    @pytest.mark.parametrize("settled", [False, True])
    def test_scale_and_settled(self, backend, settled):
        case = (1, 8, 2, 32, 32, 70, 45)
        options = {"sm_scale": 0.5}
        ours, theirs = called(rope_fmha_decode, 45, settled=settled, **options), called(reference, 45, **options)
        self.assertCorrectness(ours, theirs, arguments(case, torch.bfloat16), {"backend": backend})

    @backends("rope_fmha_decode")
    @pytest.mark.parametrize("batch", [1, 3])
    def test_number_of_keys_at_hand(self, backend, batch):
        """By separate ops, which need it."""
        case = (batch, 4, 2, 24, 24, 40, 21)
        given = arguments(case, torch.bfloat16)
        kv_len = torch.full((batch,), 22, dtype=torch.int32, device=device())
        with torch.no_grad():
            results = [called(rope_fmha_decode, 21, kv_len=n, backend=backend)(**given) for n in (None, kv_len)]
        torch.testing.assert_close(*results, rtol=0, atol=0)

    @backends("rope_fmha_decode")
    def test_wrong_arguments(self, backend):
        q, k, cache, angle = randn(1, 4, 1, 8), randn(1, 2, 1, 8), randn(1, 2, 5, 8), randn(1, 1, 8)
        position = torch.tensor([0], device=device())
        for change, match in (
            (dict(q=randn(1, 4, 2, 8)), "rope_fmha_decode: q must be"),
            (dict(q=randn(1, 3, 1, 8)), "heads of q"),
            (dict(q=randn(2, 4, 1, 8)), "batch"),
            (dict(cos=randn(3, 1, 8), sin=randn(3, 1, 8)), "rope_fmha_decode: cos and sin must be"),
            (dict(q=randn(1, 4, 1, 16)), "head dimension"),
            (dict(keys=randn(1, 2, 0, 8), values=randn(1, 2, 0, 8)), "must have room"),
            (dict(keys=randn(1, 3, 5, 8)), "rope_fmha_decode: keys and values must be"),
            (dict(position=torch.tensor([0, 1], device=device())), "rope_fmha_decode: position must hold one number"),
            (dict(kv_len=position), "rope_fmha_decode: kv_len must be"),
        ):
            given = dict(q=q, k=k, v=k, cos=angle, sin=angle, keys=cache, values=cache, position=position) | change
            with pytest.raises(ValueError, match=match):
                rope_fmha_decode(**given, backend=backend)
        given = (q, k, k, angle, angle, cache, cache, position)
        with pytest.raises(ValueError, match="rope_fmha_decode: window_size must be at least 1"):
            rope_fmha_decode(*given, window_size=0, backend=backend)
        with pytest.raises(ValueError, match=r"rope_fmha_decode: sinks must be \[4\]"):
            rope_fmha_decode(*given, sinks=randn(2), backend=backend)
        with pytest.raises(ValueError, match="casting"):
            rope_fmha_decode(*given, casting="else", backend=backend)
        for norms in ((randn(8), None), (None, randn(8)), (randn(8), randn(4)), (randn(1, 8), randn(8))):
            with pytest.raises(ValueError, match=r"rope_fmha_decode: [qk]_norm must be \[8\]"):
                rope_fmha_decode(*given, q_norm=norms[0], k_norm=norms[1], backend=backend)
        with pytest.raises(TypeError, match="rope_fmha_decode: k_norm is"):
            rope_fmha_decode(*given, q_norm=randn(8), k_norm=randn(8).half(), backend=backend)
        with pytest.raises(TypeError, match="rope_fmha_decode: q is"):
            rope_fmha_decode(q.half(), k, k, angle, angle, cache, cache, position, backend=backend)


def two_ops(q, k, v, cos, sin, keys, values, position):
    q = rope_and_cache(q, k, v, cos, sin, keys, values, position, backend="cutile")
    filled = (position + 1).to(torch.int32).expand(q.shape[0]).contiguous()
    per_split = tile_n_of(q.shape[3], q.get_device())
    return fmha_decode(q, keys, values, None, per_split, filled, backend="cutile")


CLOSE = {"rtol": 2**-7, "atol": 2**-9}  # scores are sums over the two halves of D


@pytest.mark.parametrize("dim", some([32, 128], 128))
@pytest.mark.parametrize("capacity", some([40, 240], 40))
def test_it_is_the_two_ops(capacity, dim):
    """Steps one after the other, what the caches hold to the last bit."""
    case = (1, 8, 2, dim, dim, capacity, 3)
    given = arguments(case, torch.bfloat16, behind=float("nan"))
    caches = [(given["keys"].clone(), given["values"].clone()) for _ in range(2)]
    with torch.no_grad(), sanitized():
        for position in range(3, 39, 5 if dim > 32 else 1):
            step = arguments(case, torch.bfloat16, seed=10 * position)
            results = []
            for (keys, values), function in zip(caches, (rope_fmha_decode, two_ops), strict=True):
                token = step | {"keys": keys, "values": values, "position": torch.tensor([position], device=device())}
                keys[:, :, 3:position].nan_to_num_(), values[:, :, 3:position].nan_to_num_()
                options = {"backend": "cutile", "settled": True} if function is rope_fmha_decode else {}
                results.append(function(**token, **options))
            torch.testing.assert_close(*results, **CLOSE)
            torch.testing.assert_close(*caches, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("position", [-3, 70, 2**40])
def test_a_position_outside_of_the_cache_touches_no_other_memory(position):
    """A kernel cannot raise: the token goes to the nearest end."""
    given = arguments((1, 8, 2, 32, 32, 60, 59), torch.bfloat16)
    whole = [randn(1, 2, 80, 32, dtype=torch.bfloat16, seed=s) for s in (6, 7)]
    before = [t.clone() for t in whole]
    given |= {"keys": whole[0][:, :, 10:70], "values": whole[1][:, :, 10:70]}
    with torch.no_grad():
        rope_fmha_decode(**given, position=torch.tensor([position], device=device()), backend="cutile")
    own = 10 if position < 0 else 69
    for now, then in zip(whole, before, strict=True):
        same = (now == then).all(3)
        assert same[:, :, :own].all() and not same[:, :, own].any() and same[:, :, own + 1 :].all()


PLAIN = (1e-6, 0.0, True, False, False, None, None)  # eps and form of the norms, of the rotation, window and sinks


SHAPES = [(8, 2, 128, 250), (32, 8, 128, 16), (4, 2, 64, 200)]  # query heads, kv heads, D, capacity


def launches(heads, kv_heads, dim, capacity):
    q, k = (torch.zeros(1, h, 1, dim, dtype=torch.bfloat16) for h in (heads, kv_heads))
    cache = torch.zeros(1, kv_heads, capacity, dim, dtype=torch.bfloat16)
    angle, position = torch.zeros(1, 1, dim, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    given = (q, k, k, angle, angle, cache, cache.clone(), position, 0.1, True)
    for norm in (None, torch.zeros(dim, dtype=torch.bfloat16)):
        rope_decode_forward(*given, norm, norm, *PLAIN)
    sinks = torch.zeros(heads, dtype=torch.bfloat16)
    rope_decode_forward(*given, norm, norm, 1e-6, 1.0, False, True, False, 20, sinks)
    narrow = (*given[:3], angle[..., :32], angle[..., :32], *given[5:])
    for pairs in (False, True):
        for weight in (None, norm):
            rope_decode_forward(*narrow, weight, weight, 1e-6, 0.0, True, False, pairs, None, None)


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
@pytest.mark.parametrize("shape", some(SHAPES, *SHAPES[:2]), ids=str)
def test_compiles_for_every_architecture(shape):
    """As each launches it: from compute capability 9.0 on, all launches overlap."""
    with recorded_launches() as recorded:
        launches(*shape)
    for kernel, args in distinct(recorded):
        merges = kernel is rope_decode.merge_kernel
        assert args[-1] is False and (merges or args[-2] is True)  # overlap, settled
        assert_compiles(kernel, args, ("sm_80",))
        assert_compiles(kernel, (*args[:-1], True), ("sm_90", "sm_100", "sm_120"))
        if not merges:
            assert_compiles(kernel, (*args[:-2], False, True), ("sm_90",))


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
def test_the_count_of_what_is_filled_compiles_for_every_architecture():
    position = torch.zeros(1, dtype=torch.int64)
    assert_launches_compile(lambda: rope_decode.filled_to(position, torch.zeros(3)))


def test_operator():
    given = arguments((1, 4, 2, 32, 32, 40, 21), torch.bfloat16)
    position = torch.tensor([21], device=device())
    torch.library.opcheck(rope_decode_forward.operator, (*given.values(), position, 0.2, False, None, None, *PLAIN))
    norm = randn(32, dtype=torch.bfloat16)
    torch.library.opcheck(rope_decode_forward.operator, (*given.values(), position, 0.2, False, norm, norm, *PLAIN))
    torch.library.opcheck(rope_decode.filled_to.operator, (position, given["q"]))


def test_compiled():
    given = arguments((1, 4, 2, 32, 32, 40, 21), torch.bfloat16)
    position = torch.tensor([21], device=device())

    def call(q, k, v, cos, sin, keys, values):
        return rope_fmha_decode(q, k, v, cos, sin, keys, values, position, backend="cutile") * 2

    torch.compiler.reset()
    results = []
    with torch.no_grad(), sanitized():
        for function in (call, torch.compile(call, fullgraph=True, backend="inductor" if HAS_GPU else "aot_eager")):
            caches = {name: given[name].clone() for name in ("keys", "values")}
            results.append((function(**(given | caches)), *caches.values()))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@gpu
def test_a_graph_counts_on():
    """Captured once; position and what the cache holds change between replays."""
    case = (1, 32, 8, 128, 128, 768, 500)
    given = arguments(case, torch.bfloat16)
    caches = [(given["keys"].clone(), given["values"].clone()) for _ in range(2)]
    position = torch.tensor([500], device=device())
    token = {name: given[name] for name in ("q", "k", "v", "cos", "sin")}

    def step():
        out = rope_fmha_decode(**token, keys=caches[0][0], values=caches[0][1], position=position, backend="cutile")
        position.add_(1)
        return out

    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        stream.synchronize()
        position.fill_(500)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        position.fill_(500)
        for n in range(500, 560):
            for name, tensor in token.items():
                tensor.copy_(arguments(case, torch.bfloat16, seed=n)[name])
            graph.replay()
            at = torch.tensor([n], device=device())
            expected = two_ops(**token, keys=caches[1][0], values=caches[1][1], position=at)
            torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(*caches, rtol=0, atol=0, equal_nan=True)

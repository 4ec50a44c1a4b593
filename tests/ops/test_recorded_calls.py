"""What calls of ops leave behind for later ones is for calls of the same kind, and gives the same results."""

from collections.abc import Callable

import pytest
import samples
import torch
import torch.utils._pytree as pytree
from common import PyTestCase
from common import device
from common import randn
from common import recorded_launches
from common import sanitized

from tilegym import ops
from tilegym.backend import recording
from tilegym.backend import use_backend
from tilegym.ops.pytorch.attention import fmha as attention_reference
from tilegym.ops.pytorch.flash_decode import fmha_decode as decode_reference

# Calls of these compute with PyTorch in between.
NOT_RECORDED = {"fused_linear_cross_entropy", "moe_align_block_size"}
every_op = pytest.mark.parametrize("op", sorted(samples.SAMPLES))


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would be checked instead of the kernel."""
    monkeypatch.setenv("DISABLE_FALLBACK", "1")


def sample(op: str, seed: int, dtype: torch.dtype = torch.bfloat16, gradients: bool = False) -> Callable:
    """The call of an op's sample with this seed, on tensors of its own."""
    args, kwargs = samples.SAMPLES[op](samples.Make(tokens=6, dtype=dtype, seed=seed))
    if not gradients:
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))

    def call():
        results = getattr(ops, op)(*args, **kwargs, backend="cutile")
        if not gradients:
            return results
        outputs = [t for t in pytree.tree_leaves(results) if t is not None and t.requires_grad]
        wanted = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
        upstream = [torch.linspace(-1, 2, t.numel()).view(t.shape).to(t) for t in outputs]
        return *(t.detach() for t in outputs), *torch.autograd.grad(outputs, wanted, upstream)

    return call


def recorded(op: str) -> list[recording.Recording]:
    """The recordings of calls of this op."""
    (recordings,) = getattr(ops, op).op.named_recordings.values()
    return [known for known in recordings.known.values() if isinstance(known, recording.Recording)]


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "training"])
@every_op
def test_later_calls_give_the_same_results(op, gradients):
    if gradients and op in samples.NOT_DIFFERENTIABLE:
        pytest.skip("not differentiable")
    first, other = sample(op, 0, gradients=gradients), sample(op, 1, gradients=gradients)
    with sanitized():
        expected = [first(), other()]
        recording.forget()
        first(), first()
        assert len(recorded(op)) == (not gradients and op not in NOT_RECORDED)
        results = [first(), other()]
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
    for result, like in zip(pytree.tree_leaves(results), pytree.tree_leaves(expected), strict=True):
        assert result is None or result.stride() == like.stride()


def test_ops_that_change_their_arguments():
    """The cache of a decoder and the state of a convolution, four tokens one after the other."""

    def steps(forget: bool) -> list[torch.Tensor]:
        keys, values = (randn(1, 2, 8, 16, dtype=torch.bfloat16, seed=n) for n in (1, 2))
        state, weight = randn(2, 8, 3, dtype=torch.bfloat16), randn(8, 4, dtype=torch.bfloat16)
        results = [keys, values, state]
        for n in range(4):
            if forget:
                recording.forget()
            q, k, v = (randn(1, h, 1, 16, dtype=torch.bfloat16, seed=10 * n + h) for h in (4, 2, 1))
            cos, sin = (randn(1, 1, 16, dtype=torch.bfloat16, seed=20 * n + m) for m in (0, 1))
            position = torch.tensor([n], device=device())
            with use_backend("cutile"):
                token = q, k, v.repeat(1, 2, 1, 1), cos, sin, keys, values, position
                results.append((ops.rope_and_cache if n % 2 else ops.rope_fmha_decode)(*token))
                results.append(ops.causal_conv1d_update(randn(2, 8, 1, dtype=torch.bfloat16, seed=n), state, weight))
        return results

    torch.testing.assert_close(steps(forget=False), steps(forget=True), rtol=0, atol=0)


def tensors(keys: int = 20, dtype: torch.dtype = torch.bfloat16, queries: int = 9) -> dict[str, torch.Tensor]:
    lengths = {"q": queries, "k": keys, "v": keys}
    return {name: randn(1, 2, n, 16, dtype=dtype, seed=ord(name)) for name, n in lengths.items()}


def changes(queries: int) -> dict[str, dict]:
    """Calls of an attention that differ from ``tensors(queries=queries)``, by how."""
    of = {"queries": queries}
    kv_len = torch.tensor([13], dtype=torch.int32, device=device())
    return {
        "values": {name: 2 * t for name, t in tensors(**of).items()},
        "strides": {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in tensors(**of).items()},
        "every second element": {name: t.repeat_interleave(2, 3)[..., ::2] for name, t in tensors(**of).items()},
        "dtype": tensors(dtype=torch.float16, **of),
        "keys": tensors(33, **of),
        "window": tensors(**of) | {"window_size": 7},
        "soft cap": tensors(**of) | {"soft_cap": 1.5},
        "sinks": tensors(**of) | {"sinks": randn(2, dtype=torch.bfloat16)},
        "lengths": tensors(**of) | {"kv_len": kv_len},
        "mask": tensors(**of) | {"attention_mask": randn(20) > 0},
        "additive mask": tensors(**of) | {"attention_mask": randn(2, queries, 20, dtype=torch.bfloat16)},
    }


class Test_Kinds(PyTestCase):
    @pytest.mark.parametrize("change", changes(9))
    def test_attention(self, change):
        for _ in range(3):
            ops.fmha(**tensors(), backend="cutile")
        for _ in range(3):
            self.assertCorrectness(ops.fmha, attention_reference, changes(9)[change], {"backend": "cutile"})
        # What a kernel does not take as it is PyTorch copies: such calls are not recorded.
        assert len(recorded("fmha")) == (1 if change in ("values", "every second element") else 2)

    @pytest.mark.parametrize("change", changes(1))
    def test_decoding(self, change):
        for _ in range(3):
            ops.fmha_decode(**tensors(queries=1), backend="cutile")
        for _ in range(3):
            self.assertCorrectness(ops.fmha_decode, decode_reference, changes(1)[change], {"backend": "cutile"})

    def test_gradients_after_a_recording(self):
        for _ in range(3):
            ops.fmha(**tensors(), backend="cutile")
        self.assertCorrectness(ops.fmha, attention_reference, tensors(), {"backend": "cutile"}, gradient=True)

    def test_wrong_arguments_after_a_recording(self):
        for _ in range(3):
            ops.fmha(**tensors(), backend="cutile")
        with pytest.raises(TypeError, match="one dtype"):
            ops.fmha(**tensors() | {"v": tensors()["v"].half()}, backend="cutile")
        with pytest.raises(ValueError, match="expected q"):
            ops.fmha(**tensors() | {"v": tensors(33)["v"]}, backend="cutile")
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'v'"):
            ops.fmha(tensors()["q"], tensors()["k"], backend="cutile")
        with pytest.raises(TypeError, match="unexpected keyword argument 'mask'"):
            ops.fmha(**tensors(), mask=None, backend="cutile")

    def test_the_precision_of_fp32_products_is_asked_for_at_every_call(self):
        x, weight = randn(3, 32).cpu(), randn(24, 32).cpu()
        seen, settings = [], torch.backends.cuda.matmul
        before = settings.fp32_precision
        try:
            for precision in ("ieee", "tf32"):
                settings.fp32_precision = precision
                seen += [launched(lambda: ops.linear(x, weight, backend="cutile"))[0][1][-2] for _ in range(3)]
        finally:
            settings.fp32_precision = before
        assert seen == [False] * 3 + [True] * 3


def launched(call: Callable) -> list[tuple]:
    """(kernel, args) of what a call on CPU tensors launches; none of it runs."""
    with recorded_launches() as launches:
        call()
    return launches

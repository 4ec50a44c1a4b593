"""gated_delta_step: what a layer of linear attention computes of one token between its projections."""

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

from tilegym.backend import dispatcher
from tilegym.errors import FallbackWarning
from tilegym.interpreter import compile_kernel
from tilegym.ops import gated_delta_step
from tilegym.ops import rms_norm_gated
from tilegym.ops.cutile import gated_delta_step as implementation
from tilegym.ops.cutile.gated_delta_heads import delta_heads_kernel
from tilegym.ops.cutile.gated_delta_step import delta_step_forward
from tilegym.ops.pytorch.gated_delta_step import gated_delta_step as reference

# (batch, key heads, value heads, Dk, Dv, taps, former inputs): one to three value heads a key head, as many states as
# registers have room for and one more, other taps; and what the kernel leaves to PyTorch.
CASES = [
    (1, 2, 2, 16, 8, 4, 4),
    (2, 3, 6, 8, 16, 4, 4),
    (1, 2, 6, 16, 16, 2, 2),
]
SEPARATE = [(1, 2, 2, 12, 8, 4, 4), (1, 2, 2, 8, 8, 3, 3), (2, 1, 1, 8, 8, 4, 3), (1, 1, 1, 8, 8, 4, 7)]
GPU_CASES = [(1, 16, 16, 128, 128, 4, 4), (1, 16, 48, 128, 128, 4, 4), (3, 16, 32, 128, 128, 4, 4)]
ALL = CASES + (GPU_CASES if HAS_GPU else [])
STATES = "conv_state", "state"


def arguments(case, dtype, seed=0, bias=False, decays=torch.float32):
    batch, key_heads, heads, key_dim, value_dim, taps, former = case
    channels = 2 * key_heads * key_dim + heads * value_dim
    return dict(
        qkv=randn(batch, 1, channels, dtype=dtype, seed=seed),
        z=randn(batch, 1, heads * value_dim, dtype=dtype, seed=seed + 1),
        b=randn(batch, 1, heads, dtype=dtype, seed=seed + 2),
        a=4 * randn(batch, 1, heads, dtype=dtype, seed=seed + 3),
        conv_state=randn(batch, channels, former, dtype=dtype, seed=4),
        state=randn(batch, heads, key_dim, value_dim, seed=5),
        conv_weight=randn(channels, taps, dtype=dtype, seed=6),
        conv_bias=randn(channels, dtype=dtype, seed=7) if bias else None,
        a_log=randn(heads, dtype=decays, seed=8),
        dt_bias=randn(heads, dtype=decays, seed=9),
        norm_weight=randn(value_dim, dtype=dtype, seed=10),
        eps=1e-6,
    )


def called(function, **options):
    """``function`` on copies of the states: its result, and what they hold then, in the dtype of the inputs."""

    def run(**kwargs):
        states = {name: kwargs[name].clone() for name in STATES}
        return function(**(kwargs | states | options)), *(t.to(kwargs["qkv"].dtype) for t in states.values())

    return run


@pytest.fixture(params=[False, True], ids=["key heads", "heads"])
def blocks(request, monkeypatch):
    """What has blocks of its own in the kernels: each key head, or each head with a state."""
    monkeypatch.setattr(implementation, "wants_heads", lambda *sizes: request.param)
    return request.param


class Test_GatedDeltaStep(PyTestCase):
    @backends("gated_delta_step")
    @dtypes()
    @pytest.mark.parametrize("case", ALL, ids=str)
    def test_op(self, backend, dtype, case, blocks):
        given = arguments(case, dtype)
        self.assertCorrectness(called(gated_delta_step), called(reference), given, {"backend": backend})

    @backends("gated_delta_step")
    @pytest.mark.parametrize("settled", [False, True])
    @pytest.mark.parametrize("decays", [torch.float32, torch.bfloat16], ids=str)
    def test_bias_and_parameters_in_bf16(self, backend, settled, decays, blocks):
        given = arguments(CASES[1], torch.bfloat16, bias=True, decays=decays)
        ours = called(gated_delta_step, settled=settled)
        self.assertCorrectness(ours, called(reference), given, {"backend": backend})

    @backends("gated_delta_step")
    @pytest.mark.parametrize("step", [-90.0, -30.0, -3.0, 0.0, 3.0, 30.0, 300.0])
    def test_decays_of_any_size(self, backend, step, blocks):
        given = arguments(CASES[0], torch.float32)
        given |= {"a": torch.full_like(given["a"], step), "dt_bias": torch.zeros_like(given["dt_bias"])}
        self.assertCorrectness(called(gated_delta_step), called(reference), given, {"backend": backend})

    @pytest.mark.parametrize("case", SEPARATE, ids=str)
    def test_other_sizes_are_served_by_pytorch(self, case):
        given = arguments(case, torch.float32)
        dispatcher._warned.clear()
        with torch.no_grad():
            expected = called(reference)(**given)
            with pytest.warns(FallbackWarning, match="gated_delta_step.* it takes"):
                got = called(gated_delta_step, backend="cutile")(**given)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)

    @backends("gated_delta_step")
    def test_wrong_arguments(self, backend):
        given = arguments(CASES[1], torch.float32)
        for name, wrong, match in (
            ("state", given["state"][0], "state must be"),
            ("conv_weight", given["conv_weight"][:-1], "channels of conv_weight must be"),
            ("qkv", given["qkv"][:, :, 1:], r"qkv must be \[2, 1,"),
            ("qkv", given["qkv"].expand(2, 2, -1), r"qkv must be \[2, 1,"),
            ("z", given["z"][:1], "z must be"),
            ("b", given["b"][..., :-1], "b must be"),
            ("a", given["a"][:, 0], "a must be"),
            ("a_log", given["a_log"][1:], "a_log must be"),
            ("dt_bias", given["dt_bias"][None], "dt_bias must be"),
            ("norm_weight", given["norm_weight"][1:], "norm_weight must be"),
            ("conv_bias", given["a_log"], "conv_bias must be"),
            ("conv_state", given["conv_state"][:, :, :2], r"conv_state must be \[2, \d+, 3 or more\]"),
        ):
            with pytest.raises(ValueError, match=f"gated_delta_step: .*{match}"):
                gated_delta_step(**(given | {name: wrong}), backend=backend)
        states = given["conv_state"].clone(), given["state"].clone()
        with pytest.raises(TypeError, match="gated_delta_step: norm_weight is torch.int32, it must be floating"):
            gated_delta_step(**(given | {"norm_weight": given["norm_weight"].int()}), backend=backend)
        assert torch.equal(given["conv_state"], states[0]) and torch.equal(given["state"], states[1])
        with pytest.raises(TypeError, match="gated_delta_step: qkv is torch.float32, z torch.float16"):
            gated_delta_step(**(given | {"z": given["z"].half()}), backend=backend)


@pytest.mark.parametrize("backend", ["cutile", "pytorch"])
def test_steps_are_those_of_a_model(backend, blocks):
    """One token behind the other, against the layer's formulas written out for one head."""
    case = (1, 1, 1, 8, 8, 4, 4)
    given = arguments(case, torch.float32)
    inputs, state = given["conv_state"][0].clone(), given["state"][0, 0].clone()
    states = {name: given[name].clone() for name in STATES}
    for n in range(6):
        token = arguments(case, torch.float32, seed=20 * n)
        with torch.no_grad():
            got = gated_delta_step(**(token | states), backend=backend)
        inputs = torch.cat([inputs[:, 1:], token["qkv"][0].mT], 1)
        mixed = torch.nn.functional.silu((inputs * given["conv_weight"]).sum(1))
        q, k, v = mixed.split(8)
        q, k = (x / (x.square().sum() + 1e-6).sqrt() for x in (q, k))
        state = state * torch.exp(-given["a_log"].exp() * (1 + (token["a"][0, 0] + given["dt_bias"]).exp()).log())
        state = state + torch.outer(k, token["b"].sigmoid().view(()) * (v - k @ state))
        out = rms_norm_gated((q @ state) / 8**0.5, token["z"].view(8), given["norm_weight"], 1e-6, backend="pytorch")
        torch.testing.assert_close(got.view(8), out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states["state"][0, 0], state, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states["conv_state"][0], inputs, rtol=0, atol=0)


def test_a_gradient_is_pytorchs():
    given = arguments(CASES[0], torch.float32)
    given["z"].requires_grad_()
    with pytest.warns(FallbackWarning, match="no backward kernel"):
        dispatcher._warned.clear()
        assert gated_delta_step(**given, backend="cutile").requires_grad


def launches():
    for case in ((1, 16, 16, 128, 128, 4, 4), (1, 16, 48, 128, 128, 4, 4), (2, 2, 4, 64, 128, 2, 2)):
        for bias in (False, True):
            given = arguments(case, torch.bfloat16, bias=bias)
            delta_step_forward(*given.values(), True)


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
def test_compiles_for_every_architecture(blocks):
    assert_launches_compile(launches)


@pytest.mark.skipif(HAS_GPU, reason="records launches on CPU tensors")
def test_overlapping_launches_compile(blocks):
    with recorded_launches() as recorded:
        launches()
    if blocks:
        recorded = [call for call in recorded if call[0]._pyfunc is delta_heads_kernel._pyfunc]
    assert len(recorded) == 6
    for kernel, args in recorded[::2]:
        for rest in ((True,),) if blocks else ((True, True), (False, True)):
            assert compile_kernel(kernel, (*args[: -len(rest)], *rest), "sm_90")[:4] == b"\x7fELF"


def test_who_has_blocks():
    """A block for each key head is enough where that is one for each state, and where all of them run at once."""
    one = implementation.wants_heads(1, 1, 1, -1)
    assert not one and implementation.wants_heads(1, 1, 2, -1) and implementation.wants_heads(2, 1, 1, -1)


def test_operator(blocks):
    given = arguments(CASES[0], torch.bfloat16)
    torch.library.opcheck(delta_step_forward.operator, (*given.values(), False))


def test_compiled(blocks):
    given = arguments(CASES[1], torch.bfloat16)

    def call(**kwargs):
        return gated_delta_step(**kwargs, backend="cutile") * 2

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="inductor" if HAS_GPU else "aot_eager")
    with torch.no_grad(), sanitized():
        results = [called(function)(**given) for function in (call, compiled)]
    torch.testing.assert_close(*results, rtol=0, atol=0)


@gpu
def test_a_graph_counts_on(blocks):
    """Captured once: the states change from replay to replay as they do step by step."""
    case = GPU_CASES[1]
    given = arguments(case, torch.bfloat16)
    states = [{name: given[name].clone() for name in STATES} for _ in range(2)]
    token = {name: given[name].clone() for name in ("qkv", "z", "b", "a")}

    def step(held):
        return gated_delta_step(**(given | token | held), settled=True, backend="cutile")

    with torch.no_grad():
        step({name: given[name].clone() for name in STATES})
        torch.cuda.synchronize(device())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step(states[0])
        for n in range(1, 20):
            for name, tensor in token.items():
                tensor.copy_(arguments(case, torch.bfloat16, seed=20 * n)[name])
            graph.replay()
            torch.testing.assert_close(out, step(states[1]), rtol=0, atol=0)
    for name in STATES:
        torch.testing.assert_close(states[0][name], states[1][name], rtol=0, atol=0)

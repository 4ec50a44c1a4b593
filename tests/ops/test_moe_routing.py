import pytest
import torch
from common import PyTestCase
from common import assert_launches_compile
from common import backends
from common import device
from common import dtypes
from common import gpu
from common import randn
from common import sanitized

from tilegym.ops import moe_topk_routing
from tilegym.ops.cutile.moe_routing import moe_topk_backward
from tilegym.ops.cutile.moe_routing import moe_topk_forward
from tilegym.ops.pytorch.moe_routing import moe_topk_routing as reference

TOKENS, EXPERTS = 13, 24
BIAS = torch.sin(torch.arange(EXPERTS)) * 0.1
ROUTERS = {
    "softmax": dict(top_k=2),
    "renormalized": dict(top_k=3, renormalize=True),
    "scaled": dict(top_k=6, scaling_factor=16.0),
    "topk_softmax": dict(top_k=4, scoring="topk_softmax"),
    "groups": dict(top_k=3, num_groups=4, topk_groups=2, scaling_factor=1.5),
    "sigmoid": dict(top_k=5, scoring="sigmoid"),
    "deepseek_v3": dict(
        top_k=3, scoring="sigmoid", renormalize=True, scaling_factor=2.5, num_groups=4, topk_groups=2,
        correction_bias=BIAS,
    ),
    # With which all choices are negative.
    "negative": dict(top_k=3, scoring="sigmoid", num_groups=3, topk_groups=2, correction_bias=BIAS - 2),
    "all": dict(top_k=EXPERTS, renormalize=True),
}  # fmt: skip


def options(name):
    return {k: v.to(device()) if isinstance(v, torch.Tensor) else v for k, v in ROUTERS[name].items()}


def weights_of(function):
    return lambda **kwargs: function(**kwargs)[0]


class Test_Routing(PyTestCase):
    @backends("moe_topk_routing")
    @dtypes()
    @pytest.mark.parametrize("name", ROUTERS)
    def test_op(self, backend, dtype, name):
        kwargs = options(name) | {"router_logits": randn(TOKENS, EXPERTS, dtype=dtype)}
        with sanitized():
            weights, ids = moe_topk_routing(**kwargs, backend=backend)
        expected, expected_ids = reference(**kwargs)
        assert weights.dtype == expected.dtype
        assert torch.equal(ids, expected_ids)
        ours, theirs = weights_of(moe_topk_routing), weights_of(reference)
        self.assertCorrectness(ours, theirs, kwargs, {"backend": backend}, gradient=("router_logits",))

    @pytest.mark.parametrize("model", ["mixtral", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss"])
    def test_as_transformers(self, model):
        """The routers of transformers, on their own weights."""
        transformers = pytest.importorskip("transformers")
        config, router, given = {
            "mixtral": ("MixtralConfig", "MixtralTopKRouter", dict(renormalize=True)),
            "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeTopKRouter", dict(renormalize=True, out_dtype=torch.bfloat16)),
            "olmoe": ("OlmoeConfig", "OlmoeTopKRouter", dict(out_dtype=torch.bfloat16)),
            "deepseek_v2": (
                "DeepseekV2Config",
                "DeepseekV2TopkRouter",
                dict(num_groups=4, topk_groups=2, scaling_factor=2.0),
            ),
            "deepseek_v3": (
                "DeepseekV3Config",
                "DeepseekV3TopkRouter",
                dict(scoring="sigmoid", renormalize=True, num_groups=4, topk_groups=2, scaling_factor=2.0),
            ),
            "gpt_oss": ("GptOssConfig", "GptOssTopKRouter", dict(scoring="topk_softmax")),
        }[model]
        module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
        sizes = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS)
        sizes |= dict(hidden_size=64, num_experts_per_tok=3, n_group=4, topk_group=2, routed_scaling_factor=2.0)
        sizes |= dict(topk_method="group_limited_greedy") if model == "deepseek_v2" else {}
        sizes |= dict(norm_topk_prob=given.get("renormalize", False)) if model != "mixtral" else {}
        made = getattr(module, router)(getattr(transformers, config)(**sizes))
        if model == "deepseek_v3":
            made.e_score_correction_bias.copy_(BIAS)
            given["correction_bias"] = BIAS.to(device())
        made = made.to(device(), torch.bfloat16 if not model.startswith("deepseek") else torch.float32)
        made.weight.data.copy_(randn(EXPERTS, 64, seed=3) * 0.1)
        logits, weights, ids = made(randn(TOKENS, 64, dtype=made.weight.dtype))
        got, got_ids = moe_topk_routing(logits, 3, **given, backend="cutile")
        # Some of them leave the order of the chosen open.
        order, got_order = ids.argsort(-1), got_ids.argsort(-1)
        assert torch.equal(ids.gather(1, order), got_ids.gather(1, got_order))
        assert got.dtype == weights.dtype
        torch.testing.assert_close(got.gather(1, got_order), weights.gather(1, order))

    @backends("moe_topk_routing")
    def test_ties_go_to_the_lower_expert(self, backend):
        logits = torch.zeros(3, EXPERTS, device=device())
        logits[1, 7] = logits[1, 9] = 1.0
        _, ids = moe_topk_routing(logits, 3, backend=backend)
        assert ids.tolist() == [[0, 1, 2], [7, 9, 0], [0, 1, 2]]

    def test_nan_and_infinities(self):
        logits = randn(4, EXPERTS)
        logits[0, 3], logits[1, 5], logits[2, :] = float("nan"), float("-inf"), float("-inf")
        for name in ("softmax", "renormalized", "topk_softmax", "sigmoid"):
            kwargs = options(name) | {"router_logits": logits}
            (weights, ids), (expected, expected_ids) = moe_topk_routing(**kwargs, backend="cutile"), reference(**kwargs)
            torch.testing.assert_close(weights, expected, equal_nan=True)
            assert torch.equal(ids[1], expected_ids[1]) and torch.equal(ids[3], expected_ids[3])
            assert ((ids >= 0) & (ids < EXPERTS)).all()

    @backends("moe_topk_routing")
    def test_gradient_of_what_is_not_chosen(self, backend):
        """It is zero also where that of the others is NaN."""
        logits = torch.tensor([[float("inf"), 1.0, 2.0, 0.0]], device=device(), requires_grad=True)
        moe_topk_routing(logits, 2, "topk_softmax", backend=backend)[0].sum().backward()
        assert logits.grad.isnan().tolist() == [[True, False, True, False]] and not logits.grad[0, 1::2].any()

    @pytest.mark.parametrize(
        "view",
        [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[:1].expand(9, 64)],
        ids=["transposed", "step", "expanded"],
    )
    def test_not_contiguous(self, view):
        kwargs = dict(router_logits=view(randn(64, 64)), top_k=4, renormalize=True)
        ours, theirs = weights_of(moe_topk_routing), weights_of(reference)
        self.assertCorrectness(ours, theirs, kwargs, {"backend": "cutile"}, gradient=("router_logits",))

    @backends("moe_topk_routing")
    @pytest.mark.parametrize("scoring, groups", [("softmax", 1), ("softmax", 2), ("sigmoid", 2)])
    def test_no_tokens(self, scoring, groups, backend):
        weights, ids = moe_topk_routing(randn(0, 8), 2, scoring, num_groups=groups, backend=backend)
        assert weights.shape == ids.shape == (0, 2)

    @backends("moe_topk_routing")
    def test_wrong_arguments(self, backend):
        x = randn(3, EXPERTS)
        for given, text in (
            (dict(top_k=0), "top_k must be"),
            (dict(top_k=7, num_groups=4, topk_groups=1), "top_k must be"),
            (dict(top_k=2, scoring="sort"), "scoring must be one of"),
            (dict(top_k=2, num_groups=5), "do not fall into 5 equal groups"),
            (dict(top_k=2, correction_bias=x[0]), "goes with scoring 'sigmoid' only"),
            (dict(top_k=2, scoring="topk_softmax", num_groups=2), "does not choose among 2 groups"),
        ):
            with pytest.raises(ValueError, match=text):
                moe_topk_routing(x, **given, backend=backend)
        with pytest.raises(TypeError, match="router_logits is torch.int64, it must be floating point"):
            moe_topk_routing(x.long(), 2, backend=backend)
        with pytest.raises(TypeError, match="out_dtype is torch.int32"):
            moe_topk_routing(x, 2, out_dtype=torch.int32, backend=backend)
        with pytest.raises(ValueError, match=r"must be \[T, E\]"):
            moe_topk_routing(x[0], 2, backend=backend)

    def test_many_experts_fall_back(self):
        x = randn(3, 1500)
        with pytest.warns(match="more than 1024 experts"):
            assert torch.equal(moe_topk_routing(x, 2, backend="cutile")[1], reference(x, 2)[1])

    def test_operators(self):
        x = randn(5, EXPERTS)
        weights, ids = moe_topk_forward(x, None, 3, 0, True, 1, 1, 1.0, torch.float32)
        torch.library.opcheck(moe_topk_forward.operator, (x, None, 3, 0, True, 1, 1, 1.0, torch.float32))
        torch.library.opcheck(moe_topk_backward.operator, (weights, x, ids, 0, True, 1.0))

    def test_compiled(self):
        def call(x):
            return moe_topk_routing(x * 2, 3, renormalize=True, backend="cutile")[0]

        self.assertCompiledEqualsEager(call, randn(TOKENS, EXPERTS))

    @pytest.mark.parametrize("name", ["renormalized", "topk_softmax", "deepseek_v3"])
    def test_compiles_for_every_architecture(self, name):
        kwargs = ROUTERS[name] | ({"correction_bias": torch.zeros(256)} if name == "deepseek_v3" else {})

        def call():
            x = torch.empty(64, 256, dtype=torch.bfloat16, requires_grad=True)
            weights, _ = moe_topk_routing(x, **kwargs, backend="cutile")
            weights.backward(torch.empty_like(weights))

        assert_launches_compile(call)

    @gpu
    @pytest.mark.parametrize("name", ["renormalized", "deepseek_v3"])
    def test_graph_capture(self, name):
        chosen = options(name)  # copies a bias to the GPU
        self.assertCaptures(lambda x: moe_topk_routing(x, **chosen, backend="cutile"), randn(64, EXPERTS))

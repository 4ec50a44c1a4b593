import pytest
import torch
from common import PyTestCase
from common import backends
from common import device
from common import randn
from common import sanitized
from common import some
from torch import nn

from tilegym.backend import use_backend
from tilegym.errors import UnsupportedError
from tilegym.ops import fused_moe
from tilegym.ops import moe_topk_routing
from tilegym.ops.moe_interface import experts_forward
from tilegym.ops.moe_interface import find_formula
from tilegym.ops.moe_interface import find_routing
from tilegym.ops.moe_interface import moe_interface
from tilegym.ops.moe_interface import prepare_experts
from tilegym.ops.moe_interface import prepare_router
from tilegym.ops.moe_interface import router_forward

transformers = pytest.importorskip("transformers")
moe = pytest.importorskip("transformers.integrations.moe")

TOKENS, WIDTH, INNER, EXPERTS = 12, 64, 24, 6


def hugging_face(name: str) -> nn.Module:
    """The experts of a model of transformers with random weights."""
    sizes = dict(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        moe_intermediate_size=INNER,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        n_routed_experts=EXPERTS,
    )
    folder, config, experts = {
        "mixtral": ("mixtral", "MixtralConfig", "MixtralExperts"),
        "qwen3_moe": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeExperts"),
        "olmoe": ("olmoe", "OlmoeConfig", "OlmoeExperts"),
        "deepseek_v2": ("deepseek_v2", "DeepseekV2Config", "DeepseekV2Experts"),
        "deepseek_v3": ("deepseek_v3", "DeepseekV3Config", "DeepseekV3Experts"),
        "gpt_oss": ("gpt_oss", "GptOssConfig", "GptOssExperts"),
    }[name]
    module = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    options = getattr(transformers, config)(**sizes)
    options._experts_implementation = "eager"
    made = getattr(module, experts)(options)
    for i, parameter in enumerate(made.parameters()):
        parameter.data = randn(*parameter.shape, seed=i) * parameter.shape[-1] ** -0.5
    return made


def routed(dtype=torch.float32):
    weights, ids = moe_topk_routing(randn(TOKENS, EXPERTS, seed=5), 2, backend="pytorch")
    return randn(TOKENS, WIDTH, dtype=dtype, seed=6), ids, weights.to(dtype)


class Test_Experts(PyTestCase):
    @backends("fused_moe")
    @pytest.mark.parametrize(
        "name",
        some(
            ["mixtral", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss"],
            "mixtral",
            "qwen3_moe",
            "deepseek_v3",
            "gpt_oss",
        ),
    )
    def test_op(self, backend, name):
        """As transformers' own, with gradients; in fp64 its loop over the experts is the oracle."""
        experts = hugging_face(name)
        if name == "gpt_oss":
            experts.limit = 1.0  # of 7, which these numbers stay below

        def call(hidden, weights, *parameters, forward):
            own = dict(zip(names, parameters, strict=True))
            with torch.nn.utils.stateless._reparametrize_module(experts, own):
                return forward(experts, hidden, ids, weights)

        hidden, ids, weights = routed()
        names = [name for name, _ in experts.named_parameters()]
        leaves = [hidden, weights, *(p.detach() for p in experts.parameters())]
        results = []
        for forward, dtype in (
            (experts_forward, torch.float32),
            (type(experts).forward, torch.float32),
            (type(experts).forward, torch.float64),
        ):
            inputs = [t.to(dtype).requires_grad_() for t in (t.detach().clone() for t in leaves)]
            with use_backend(backend), sanitized():
                out = call(*inputs, forward=forward)
                results.append((out, *torch.autograd.grad(out, inputs, randn(TOKENS, WIDTH, seed=7).to(dtype))))
        for name, *tensors in zip(["out", "hidden", "weights", *names], *results, strict=True):
            self.assertClose(name, *tensors)

    def test_registered(self, monkeypatch):
        experts = hugging_face("gpt_oss")
        hidden, ids, weights = routed()
        expected = experts(hidden, ids, weights)
        monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS, "tilegym_test", experts_forward)
        experts.config._experts_implementation = "tilegym_test"
        with use_backend("cutile"):
            got = experts(hidden, ids, weights)
        torch.testing.assert_close(got, expected)
        assert not torch.equal(got, expected), "transformers' own code ran"

    def test_without_gate(self):
        class Experts(nn.Module):
            def __init__(self, config):
                super().__init__()
                self.up_proj = nn.Parameter(randn(EXPERTS, INNER, WIDTH))
                self.down_proj = nn.Parameter(randn(EXPERTS, WIDTH, INNER, seed=1))
                self.num_experts, self.act_fn = EXPERTS, lambda x: torch.relu(x).square()

            def forward(self, *args):
                raise AssertionError

        made = moe.use_experts_implementation(Experts, has_gate=False)(transformers.PretrainedConfig())
        hidden, ids, weights = routed()
        assert find_formula(made).activation == "relu2"
        expected = moe.batched_mm_experts_forward(made, hidden, ids, weights)
        with use_backend("cutile"):
            torch.testing.assert_close(experts_forward(made, hidden, ids, weights), expected, rtol=1e-4, atol=1e-3)

    def test_experts_of_other_processes(self):
        experts = hugging_face("mixtral")
        hidden, ids, weights = routed()
        ids[:, 1], weights[:, 1] = EXPERTS, 0.0
        ids[3], weights[3] = EXPERTS, 0.0
        # Not all versions of transformers take such ids; what weighs nothing may be any expert.
        expected = experts(hidden, ids.where(ids < EXPERTS, 0), weights)
        with use_backend("cutile"), sanitized():
            got = experts_forward(experts, hidden, ids, weights)
        torch.testing.assert_close(got, expected)
        assert not got[3].any()

    def test_autocast(self):
        experts = hugging_face("mixtral").bfloat16()
        hidden, ids, weights = routed()
        with use_backend("cutile"), torch.autocast(device(), torch.bfloat16):
            out = experts_forward(experts, hidden, ids, weights)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, experts(hidden.bfloat16(), ids, weights).float(), rtol=0.05, atol=0.05)

    def test_unknown_activation(self):
        experts = hugging_face("mixtral")
        experts._apply_gate = lambda x: x.chunk(2, dim=-1)[0].tanh()
        with pytest.raises(UnsupportedError, match="none that fused_moe computes"):
            prepare_experts(experts)
        experts.has_post_expert_norm = True
        with pytest.raises(UnsupportedError, match="norm"):
            prepare_experts(experts)

    def test_formulas(self):
        assert find_formula(hugging_face("gpt_oss")) == ("gpt_oss", True, 1.702, 7.0)
        assert find_formula(hugging_face("olmoe"))[:2] == ("silu", False)

    def test_compiled(self):
        experts = hugging_face("gpt_oss")
        prepare_experts(experts)
        _, ids, weights = routed()

        def call(hidden):
            return experts_forward(experts, hidden * 2, ids, weights)

        with use_backend("cutile"):
            self.assertCompiledEqualsEager(call, randn(TOKENS, WIDTH))


MODELS = {
    "mixtral": ("Mixtral", {}),
    "qwen3_moe": ("Qwen3Moe", {"norm_topk_prob": True}),
    "olmoe": ("Olmoe", {"norm_topk_prob": False}),
    "deepseek_v2": ("DeepseekV2", {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}),
    "deepseek_v3": ("DeepseekV3", {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 2.5}),
    "gpt_oss": ("GptOss", {}),
}


def router(model, dtype):
    """A router of transformers with random weights."""
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    name, options = MODELS[model]
    sizes = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 12) | options
    config = getattr(transformers, f"{name}Config")(hidden_size=64, num_experts_per_tok=2, **sizes)
    made = next(cls for key, cls in vars(module).items() if key.lower() == f"{name}TopkRouter".lower())(config)
    if model == "deepseek_v3":
        made.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, 12))
    made.weight.data.copy_(torch.randn(12, 64, generator=torch.Generator().manual_seed(0)) * 0.2)
    return made.to(device(), dtype)


class Test_Router(PyTestCase):
    @backends("moe_topk_routing")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("model", MODELS)
    def test_op(self, backend, dtype, model):
        made, hidden = router(model, dtype), randn(20, 64, dtype=dtype)
        # That of gpt-oss takes them flat only.
        hidden = hidden if model == "gpt_oss" else hidden.view(2, 10, 64)
        logits, weights, ids = made(hidden)
        formula = prepare_router(made)
        assert formula.wide == model.startswith("deepseek")
        # Softmax over the chosen is the softmax over all, renormalized.
        assert formula.renormalize == (model in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"))
        assert formula.num_groups == (3 if model.startswith("deepseek") else 1)
        with use_backend(backend), sanitized():
            got_logits, got, got_ids = router_forward(made, hidden)
        torch.testing.assert_close(got_logits, logits)
        # In bf16 scores can be equal, and then the choice is open: the weights are the same all the same.
        torch.testing.assert_close(got.sort(-1).values, weights.sort(-1).values)
        same = (got_ids.sort(-1).values == ids.sort(-1).values).all(-1)
        assert same.all() if dtype == torch.float32 else same.sum() > 15

    @backends("linear")
    @pytest.mark.parametrize("model", ["deepseek_v2", "deepseek_v3"])
    def test_logits_of_one_token_are_not_rounded(self, backend, model):
        """In fp32 of bf16, also where a norm under autocast has left hidden states in fp32."""
        made, hidden = router(model, torch.bfloat16), randn(1, 64, dtype=torch.bfloat16)
        formula = prepare_router(made)
        for x in (hidden, hidden.float()):
            logits, _, _ = router_forward(made, x, formula=formula, backend=backend)
            assert logits.dtype == torch.float32
            torch.testing.assert_close(logits, made(x)[0], rtol=1e-5, atol=1e-5)

    @backends("linear")
    @pytest.mark.parametrize("tokens", [1, 20])
    @pytest.mark.parametrize("model", ["deepseek_v2", "deepseek_v3"])
    def test_a_weight_that_is_kept_in_fp32(self, backend, model, tokens):
        """As transformers loads it from checkpoints in 16 bits, whose hidden states then come in these."""
        made, hidden = router(model, torch.float32), randn(tokens, 64, dtype=torch.bfloat16)
        formula = prepare_router(made)
        with use_backend(backend):
            found, expected = router_forward(made, hidden, formula=formula), made(hidden)
        assert [t.dtype for t in found] == [t.dtype for t in expected]
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1].sort(-1).values, expected[1].sort(-1).values, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_weights_in_the_dtype_of_the_hidden_states(self, dtype):
        made, hidden = router("deepseek_v2", torch.float32), randn(9, 64, dtype=dtype)
        inner = made.forward

        def forward(x):
            logits, weights, ids = inner(x)
            return logits, weights.to(x.dtype), ids

        made.forward = forward
        found = router_forward(made, hidden, formula=find_routing(made))
        assert [t.dtype for t in found] == [torch.float32, dtype, torch.int64]

    def test_a_weight_that_is_rounded_to_the_hidden_states(self):
        made = router("mixtral", torch.float32)

        def forward(x):
            logits = nn.functional.linear(x, made.weight.to(x.dtype))
            return logits, *logits.softmax(-1).topk(2)

        made.forward = forward
        with pytest.raises(UnsupportedError, match="rounds its weight"):
            find_routing(made)

    def test_unknown_router(self):
        made = router("mixtral", torch.float32)
        with pytest.raises(UnsupportedError, match="not prepared"):
            router_forward(made, randn(3, 64))
        made.forward = lambda x: (x @ made.weight.t(), *((x @ made.weight.t()).abs().topk(2)))
        with pytest.raises(UnsupportedError, match="none that moe_topk_routing makes"):
            find_routing(made)
        with pytest.raises(UnsupportedError, match="logits, weights and indices"):
            find_routing(nn.Linear(64, 12))

    @pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
    def test_whole_model(self, model, monkeypatch):
        name, options = MODELS[model]
        config = getattr(transformers, f"{name}Config")(
            vocab_size=99,
            hidden_size=64,
            intermediate_size=32,
            moe_intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=12,
            num_local_experts=12,
            num_experts_per_tok=2,
            **options,
        )
        monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS, "tilegym_test", experts_forward)
        lm = transformers.AutoModelForCausalLM.from_config(config).to(device()).eval()
        ids = torch.arange(22, device=device()).view(2, 11)
        expected = lm(ids).logits
        lm.set_experts_implementation("tilegym_test")
        routers = [module for module in lm.modules() if type(module).__name__.endswith("TopKRouter")]
        assert len(routers) == 2
        for module in routers:
            prepare_router(module)
            module.forward = router_forward.__get__(module)
        with use_backend("cutile"):
            got = lm(ids).logits
        torch.testing.assert_close(got, expected)
        assert not torch.equal(got, expected), "transformers' own code ran"


class Test_Interface(PyTestCase):
    @backends("fused_moe")
    def test_op(self, backend):
        x, logits = randn(2, 5, WIDTH), randn(10, EXPERTS)
        w1, w2 = randn(EXPERTS, 2 * INNER, WIDTH), randn(EXPERTS, WIDTH, INNER)
        s1, s2 = randn(32, WIDTH), randn(WIDTH, 16)
        out = moe_interface(
            x,
            logits,
            w1,
            w2,
            3,
            routing={"renormalize": True},
            experts={"activation": "gelu"},
            shared_w1=s1,
            shared_w2=s2,
            backend=backend,
        )
        weights, ids = moe_topk_routing(logits, 3, renormalize=True, backend="pytorch")
        flat = x.view(10, WIDTH)
        gate, up = (flat @ s1.t()).chunk(2, dim=-1)
        shared = (nn.functional.silu(gate) * up) @ s2.t()
        expected = fused_moe(flat, w1, w2, weights, ids, "gelu", shared_output=shared, backend="pytorch")
        torch.testing.assert_close(out, expected.view(x.shape), rtol=1e-4, atol=1e-2)

    @backends("fused_moe")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_autocast(self, backend, dtype):
        """Weights in fp32, beside hidden states that a linear has given, or a norm in fp32."""
        x, logits, *weights = randn(5, WIDTH), randn(5, EXPERTS), *self.weights()
        expected = self.call(x.bfloat16(), logits, *(w.bfloat16().requires_grad_() for w in weights), backend)
        leaves = [w.requires_grad_() for w in weights]
        with torch.autocast(x.device.type, torch.bfloat16):
            out = self.call(x.to(dtype), logits, *leaves, backend)
        assert torch.equal(out, expected)
        assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.sum(), leaves))

    @staticmethod
    def weights():
        return (
            randn(EXPERTS, 2 * INNER, WIDTH), randn(EXPERTS, WIDTH, INNER), randn(EXPERTS, WIDTH),
            randn(32, WIDTH), randn(WIDTH, 16), randn(5, WIDTH),
        )  # fmt: skip

    @staticmethod
    def call(x, logits, w1, w2, b2, shared_w1, shared_w2, shared_output, backend):
        options = {"b2": b2, "shared_output": shared_output}
        return moe_interface(
            x, logits, w1, w2, 2, experts=options, shared_w1=shared_w1, shared_w2=shared_w2, backend=backend
        )

    @backends("fused_moe")
    def test_what_is_shared_adds_up(self, backend):
        x, logits, *weights = randn(5, WIDTH), randn(5, EXPERTS), *self.weights()
        without = moe_interface(
            x, logits, *weights[:2], 2, experts={"b2": weights[2]}, shared_w1=weights[3], shared_w2=weights[4],
            backend=backend,
        )  # fmt: skip
        torch.testing.assert_close(self.call(x, logits, *weights, backend), without + weights[-1], rtol=1e-5, atol=1e-3)
        alone = moe_interface(x, logits, *weights[:2], 2, experts={"shared_output": weights[-1]}, backend=backend)
        torch.testing.assert_close(
            alone, moe_interface(x, logits, *weights[:2], 2, backend=backend) + weights[-1], rtol=1e-5, atol=1e-3
        )

    def test_wrong_arguments(self):
        x = randn(2, WIDTH)
        with pytest.raises(ValueError, match="both shared_w1 and shared_w2"):
            moe_interface(x, x, x, x, 1, shared_w1=x)
        w1, w2 = self.weights()[:2]
        for tokens, experts in ((2, EXPERTS + 1), (2, EXPERTS - 1), (3, EXPERTS)):
            with pytest.raises(ValueError, match=r"moe_interface: router_logits must be \[2, 6\]"):
                moe_interface(x, randn(tokens, experts), w1, w2, 2)

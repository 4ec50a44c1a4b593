"""Models whose linear layers are quantised: by a class of its own, or by a weight that stands for other tensors."""

import pytest
import torch
from common import HAS_GPU
from common import device
from tiny_models import VOCAB
from tiny_models import assert_close
from tiny_models import tokens
from torch import Tensor
from torch import nn
from transformers import AutoConfig
from transformers import AutoModelForCausalLM

import tilegym
from tilegym.backend.wrapped import addresses_of
from tilegym.backend.wrapped import is_quantised
from tilegym.backend.wrapped import is_spread
from tilegym.transformers import decode_graph
from tilegym.transformers import monkey_patch
from tilegym.transformers.graph_capture import Fingerprint


class Int8(Tensor):
    """A weight as torchao's are: whole numbers and a factor for each row, of which a linear layer makes use."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> "Int8":
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data8, self.scale = data, scale

    @staticmethod
    def of(weight: Tensor) -> "Int8":
        scale = weight.abs().amax(1, keepdim=True) / 127
        return Int8((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self):
        return ["data8", "scale"], None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            x, weight, *bias = args
            return nn.functional.linear(x, weight.data8.to(x.dtype) * weight.scale, *bias)
        return super().__torch_function__(function, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Int8(args[0].data8, args[0].scale)
        raise NotImplementedError(f"{function} of a quantised weight")


class Linear8(nn.Module):
    """A layer as bitsandbytes' and HQQ's are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = nn.Parameter(Int8.of(linear.weight.detach()).data8.flatten(), requires_grad=False)
        self.scale = nn.Buffer(Int8.of(linear.weight.detach()).scale)
        self.bias = linear.bias
        self.method = "int8"

    def forward(self, x: Tensor) -> Tensor:
        weight = self.packed.view(self.out_features, self.in_features).to(x.dtype) * self.scale
        return nn.functional.linear(x, weight, self.bias)


SIZES = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


LATENT = dict(q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
OWN = {
    "qwen3_moe": dict(num_experts=4, head_dim=16) | EXPERTS,
    "deepseek_v3": dict(n_routed_experts=4, n_group=1, topk_group=1, num_key_value_heads=4, first_k_dense_replace=1)
    | LATENT
    | EXPERTS,
}


def made(family: str) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | OWN.get(family, {})))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(device())


def quantised(model: nn.Module, how: str) -> nn.Module:
    """All linear layers but the last; the config says so, as a loaded model's does."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear or child is model.get_output_embeddings():
                continue
            if how == "weight":
                child.weight = nn.Parameter(Int8.of(child.weight.detach()), requires_grad=False)
                child.extra_repr = lambda: "int8"
            else:
                setattr(module, name, Linear8(child))
    model.config.quantization_config = {"quant_method": how}
    return model


def answers(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits[:, 3:]
    given = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    return logits, model.generate(ids, attention_mask=mask, **given), model.generate(ids[1:], **given)


def assert_same(found: tuple, expected: tuple) -> None:
    assert_close(found[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(found[1:], expected[1:], strict=True))


@pytest.mark.parametrize("how", ["weight", "class"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "qwen3_moe"])
@pytest.mark.filterwarnings("error::tilegym.errors.FallbackWarning")
def test_a_family_with_a_patch(family, how):
    """What it computes stays, but for its products, as they were, all is served; steps may be captured."""
    model = quantised(made(family), how)
    expected = answers(model)
    with monkey_patch.apply(model, use_cutile=HAS_GPU) as report, decode_graph.eager_steps("cpu"):
        assert not decode_graph.suits(model)
        assert {"rms_norm", "rope", "attn", "graph", "loss"} <= {e.compute for e in report.patched}
        products = {e.module for e in report.patched if e.compute == "linear"}
        assert products == {"lm_head"}
        if how == "weight":
            why = {e.why for e in report.skipped if e.compute == "linear"}
            assert why == {"its weight is quantised"}
        assert_same(answers(model), expected)
    assert_same(answers(model), expected)


@pytest.mark.parametrize("how", ["weight", "class"])
@pytest.mark.parametrize("family", ["stablelm", "smollm3"])
def test_a_family_without_a_patch(family, how):
    """Its layers are recognised as those of a small model that is not quantised."""
    plain = tilegym.apply(made(family), use_cutile=HAS_GPU)
    model = quantised(made(family), how)
    expected = answers(model)
    report = tilegym.apply(model, use_cutile=HAS_GPU)
    served, usual = ({e.compute for e in r.patched} for r in (report, plain))
    assert served == usual and {"attn", "rope", "swiglu", "graph"} <= served
    assert {e.module for e in report.patched if e.compute == "linear"} == {"lm_head"}
    with decode_graph.eager_steps("cpu"):
        assert_same(answers(model), expected)
    report.revert()
    plain.revert()
    assert_same(answers(model), expected)


class Relaid(nn.Linear):
    """Its first call changes it, as that of bitsandbytes' on a CPU."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_no_layer_is_called_to_be_recognised():
    model = quantised(made("stablelm"), "class")
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, Relaid(64, 64, False).to(device()))
    report = tilegym.apply(model, use_cutile=HAS_GPU)
    assert "swiglu" in {e.compute for e in report.patched}
    assert not any(m.calls for m in model.modules() if isinstance(m, Relaid))
    report.revert()


def test_a_weight_that_stands_for_others():
    weight = Int8.of(torch.randn(4, 6, device=device()))
    assert is_quantised(weight) and not is_spread(weight)
    assert not is_quantised(weight.data8) and not is_quantised(3)
    assert addresses_of(weight) == (weight.data8.data_ptr(), weight.scale.data_ptr())
    assert addresses_of(weight.scale) == (weight.scale.data_ptr(),)


def test_a_graph_is_of_the_tensors_that_it_stands_for():
    model = quantised(made("llama"), "weight")
    taken = Fingerprint(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert taken.holds(model)
    weight.data8 = weight.data8.clone()
    assert not taken.holds(model)

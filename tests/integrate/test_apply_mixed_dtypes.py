"""Models from checkpoints in 16 bits, some of whose weights transformers keeps in fp32."""

import pytest
import torch
import transformers
from common import HAS_GPU
from common import device
from torch import nn
from transformers import AutoConfig
from transformers import AutoModelForCausalLM

import tilegym

SIZES = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=99, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
FAMILIES = {
    "glm4_moe": dict(n_routed_experts=4, first_k_dense_replace=1, n_group=1, topk_group=1) | EXPERTS,
    "ernie4_5_moe": dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_layer_start_index=0),
}


def loaded(made: nn.Module, folder, dtype: torch.dtype) -> nn.Module:
    """As ``from_pretrained`` gives what was saved in ``dtype``."""
    for parameter in made.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.05)
    made.to(dtype).save_pretrained(folder)
    return type(made).from_pretrained(folder, dtype=dtype).eval().to(device())


def outputs(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(3, 21, device=device()).view(2, 9)
    given = {"decoder_input_ids": ids} if hasattr(model, "decoder") else {}
    with torch.no_grad():
        return model(input_ids=ids, **given)[0]


def assert_served(model: nn.Module, computes: set[str], tolerance: float) -> None:
    assert {p.dtype for p in model.parameters()} > {torch.float32}
    expected = outputs(model)
    report = tilegym.apply(model, use_cutile=HAS_GPU)
    assert computes <= {e.compute for e in report.patched}, report
    found = outputs(model)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    report.revert()
    assert torch.equal(outputs(model), expected)


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "MT5EncoderModel", "UMT5ForConditionalGeneration"])
def test_hidden_states_that_change_their_dtype(name, tmp_path):
    """T5's in fp16 has MLPs whose last layer is in fp32, and norms that round to their weights' dtype."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    sizes = dict(vocab_size=99, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = loaded(cls(cls.config_class(**sizes)), tmp_path, torch.float16)
    assert_served(model, {"rms_norm"}, 2e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_in_fp32(family, tmp_path):
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **FAMILIES[family]))
    model = loaded(made, tmp_path, torch.bfloat16)
    if {p.dtype for p in model.parameters()} == {torch.bfloat16}:
        pytest.skip("this transformers keeps none of it in fp32")
    assert_served(model, {"rms_norm", "attn"}, 0.1)

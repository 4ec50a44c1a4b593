"""What research has to find in the default models of some families: every part, where, and with which constants."""

from tilegym.integrate.requirement import Requirement

# Parameters that say nothing where they have these values.
_USUAL = {
    "offset": 0.0, "softcap": None, "sinks": False, "window": None, "chunk": None, "scale": 1.0, "residual_scale": 1.0,
    "transposed": False, "shift": True, "ignore_index": -100, "tensors": 2, "heads_dim": 1, "mask": "causal",
    "causal": True, "shared_rope_dim": 0, "packed": "", "bias": False, "factor": 1.0, "per_channel": False,
    "norm": "rms_norm",
}  # fmt: skip


def told(requirement: Requirement) -> str:
    """A requirement in a line: kind, op, number of places, places, constants."""
    places = sorted({path.rpartition(".")[2] for path in requirement.layers})
    said = [f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in requirement.parameters.items()
            if (k, v) not in _USUAL.items()]  # fmt: skip
    roles = (
        ""
        if requirement.kind in ("linear", "rope", "loss")
        else ",".join(f"{role}:{name}" for role, name in requirement.roles.items() if role != name)
    )
    parts = [requirement.kind, f"[{requirement.op or '-'}]", f"{len(requirement.modules)}x", "/".join(places), roles]
    return " ".join(part for part in [*parts, *said] if part)


EXPECTED = {
    "llama": [
        "add_norm [fused_add_rms_norm] 64x input_layernorm/norm/post_attention_layernorm eps=1e-06 "
        "casting=llama size=4096",
        "attention [fmha] 32x self_attn scaling=0.0883883 heads=32 kv_heads=32 head_dim=128 value_dim=128",
        "gated_mlp [swiglu] 32x mlp gate:gate_proj,up:up_proj,down:down_proj activation=silu",
        "linear [linear] 225x down_proj/gate_proj/k_proj/lm_head/o_proj/q_proj/up_proj/v_proj",
        "linear_cross_entropy [fused_linear_cross_entropy] 1x lm_head",
        "loss [cross_entropy] 1x",
        "rms_norm [rms_norm] 65x input_layernorm/norm/post_attention_layernorm eps=1e-06 casting=llama size=4096",
        "rope [apply_rope_base] 32x self_attn style=half angles=full rotated=128 casting=input",
    ],
    "mistral": [
        "add_norm [fused_add_rms_norm] 64x input_layernorm/norm/post_attention_layernorm eps=1e-06 "
        "casting=llama size=4096",
        "attention [fmha] 32x self_attn scaling=0.0883883 window=4096 heads=32 kv_heads=8 head_dim=128 value_dim=128",
        "gated_mlp [swiglu] 32x mlp gate:gate_proj,up:up_proj,down:down_proj activation=silu",
        "linear [linear] 225x down_proj/gate_proj/k_proj/lm_head/o_proj/q_proj/up_proj/v_proj",
        "linear_cross_entropy [fused_linear_cross_entropy] 1x lm_head",
        "loss [cross_entropy] 1x",
        "rms_norm [rms_norm] 65x input_layernorm/norm/post_attention_layernorm eps=1e-06 casting=llama size=4096",
        "rope [apply_rope_base] 32x self_attn style=half angles=full rotated=128 casting=input",
    ],
    "qwen2": [
        "add_norm [fused_add_rms_norm] 64x input_layernorm/norm/post_attention_layernorm eps=1e-06 "
        "casting=llama size=4096",
        "attention [fmha] 32x self_attn scaling=0.0883883 heads=32 kv_heads=32 head_dim=128 value_dim=128",
        "gated_mlp [swiglu] 32x mlp gate:gate_proj,up:up_proj,down:down_proj activation=silu",
        "linear [linear] 129x down_proj/gate_proj/lm_head/o_proj/up_proj",
        "linear [linear] 96x k_proj/q_proj/v_proj bias=True",
        "linear_cross_entropy [fused_linear_cross_entropy] 1x lm_head",
        "loss [cross_entropy] 1x",
        "rms_norm [rms_norm] 65x input_layernorm/norm/post_attention_layernorm eps=1e-06 casting=llama size=4096",
        "rope [apply_rope_base] 32x self_attn style=half angles=full rotated=128 casting=input",
    ],
    "qwen3": [
        "add_norm [fused_add_rms_norm] 64x input_layernorm/norm/post_attention_layernorm eps=1e-06 "
        "casting=llama size=4096",
        "attention [fmha] 32x self_attn scaling=0.0883883 heads=32 kv_heads=32 head_dim=128 value_dim=128",
        "gated_mlp [swiglu] 32x mlp gate:gate_proj,up:up_proj,down:down_proj activation=silu",
        "linear [linear] 225x down_proj/gate_proj/k_proj/lm_head/o_proj/q_proj/up_proj/v_proj",
        "linear_cross_entropy [fused_linear_cross_entropy] 1x lm_head",
        "loss [cross_entropy] 1x",
        "qk_norm [dual_rms_norm] 32x self_attn q:q_norm,k:k_norm eps=1e-06 casting=llama size=128",
        "rms_norm [rms_norm] 64x k_norm/q_norm eps=1e-06 casting=llama size=128",
        "rms_norm [rms_norm] 65x input_layernorm/norm/post_attention_layernorm eps=1e-06 casting=llama size=4096",
        "rope [apply_rope_base] 32x self_attn style=half angles=full rotated=128 casting=input",
    ],
    "qwen3_moe": [
        "add_norm [fused_add_rms_norm] 48x input_layernorm/norm/post_attention_layernorm eps=1e-06 "
        "casting=llama size=2048",
        "attention [fmha] 24x self_attn scaling=0.125 heads=32 kv_heads=4 head_dim=64 value_dim=64",
        "experts [fused_moe] 24x experts gate_up_weight:gate_up_proj,down_weight:down_proj activation=silu "
        "packed=concatenated order=gate, up",
        "linear [linear] 97x k_proj/lm_head/o_proj/q_proj/v_proj",
        "linear_cross_entropy [fused_linear_cross_entropy] 1x lm_head",
        "loss [cross_entropy] 1x",
        "qk_norm [dual_rms_norm] 24x self_attn q:q_norm,k:k_norm eps=1e-06 casting=llama size=64",
        "rms_norm [rms_norm] 48x k_norm/q_norm eps=1e-06 casting=llama size=64",
        "rms_norm [rms_norm] 49x input_layernorm/norm/post_attention_layernorm eps=1e-06 casting=llama size=2048",
        "rope [apply_rope_base] 24x self_attn style=half angles=full rotated=64 casting=input",
        "routing [moe_topk_routing] 24x mlp weight:gate.weight scoring=softmax top_k=8 normalised=False",
    ],
    "qwen3_5_text": [
        "add_norm [fused_add_rms_norm] 64x input_layernorm/norm/post_attention_layernorm eps=1e-06 offset=1 "
        "casting=gemma size=4096",
        "attention [fmha] 8x self_attn scaling=0.0625 heads=16 kv_heads=4 head_dim=256 value_dim=256",
        "causal_conv1d [causal_conv1d_fn] 24x linear_attn x:hidden_states form=full activation=silu width=4",
        "causal_conv1d [causal_conv1d_update] 24x linear_attn x:hidden_states,state:conv_state form=update "
        "activation=silu width=4",
        "gate_mul [sigmoid_mul] 8x self_attn activation=sigmoid",
        "gated_delta_rule [chunk_gated_delta_rule] 24x linear_attn q:query,k:key,v:value l2norm=True "
        "state=False form=chunk",
        "gated_delta_rule [recurrent_gated_delta_rule] 24x linear_attn "
        "q:query,k:key,v:value,state:initial_state l2norm=True state=True form=recurrent",
        "gated_mlp [swiglu] 32x mlp gate:gate_proj,up:up_proj,down:down_proj activation=silu",
        "linear [linear] 249x "
        "down_proj/gate_proj/in_proj_a/in_proj_b/in_proj_qkv/in_proj_z/k_proj/lm_head/o_proj/out_proj/q_proj/up_proj/v_proj",
        "linear_cross_entropy [fused_linear_cross_entropy] 1x lm_head",
        "loss [cross_entropy] 1x",
        "qk_norm [dual_rms_norm] 8x self_attn q:q_norm,k:k_norm eps=1e-06 offset=1 casting=gemma size=256",
        "rms_norm [rms_norm] 16x k_norm/q_norm eps=1e-06 offset=1 casting=gemma size=256",
        "rms_norm [rms_norm] 65x input_layernorm/norm/post_attention_layernorm eps=1e-06 offset=1 "
        "casting=gemma size=4096",
        "rms_norm_gated [rms_norm_gated] 24x norm eps=1e-06 casting=llama size=128 activation=silu "
        "norm_before_gate=True",
        "rope [apply_rope_base] 8x self_attn style=half angles=full rotated=64 casting=input factor=0.25",
    ],
    "gemma3_text": [
        "add_norm [fused_add_rms_norm] 52x input_layernorm/norm/pre_feedforward_layernorm eps=1e-06 offset=1 "
        "casting=gemma size=2304",
        "attention [fmha] 22x self_attn scaling=0.0625 window=4096 heads=8 kv_heads=4 head_dim=256 value_dim=256",
        "attention [fmha] 4x self_attn scaling=0.0625 heads=8 kv_heads=4 head_dim=256 value_dim=256",
        "gated_mlp [geglu] 26x mlp gate:gate_proj,up:up_proj,down:down_proj activation=gelu_tanh",
        "linear [linear] 183x down_proj/gate_proj/k_proj/lm_head/o_proj/q_proj/up_proj/v_proj",
        "linear_cross_entropy [fused_linear_cross_entropy] 1x lm_head",
        "loss [cross_entropy] 1x",
        "qk_norm [dual_rms_norm] 26x self_attn q:q_norm,k:k_norm eps=1e-06 offset=1 casting=gemma size=256",
        "rms_norm [rms_norm] 105x "
        "input_layernorm/norm/post_attention_layernorm/post_feedforward_layernorm/pre_feedforward_layernorm "
        "eps=1e-06 offset=1 casting=gemma size=2304",
        "rms_norm [rms_norm] 52x k_norm/q_norm eps=1e-06 offset=1 casting=gemma size=256",
        "rope [apply_rope_base] 26x self_attn style=half angles=full rotated=256 casting=input",
    ],
    "phi3": [
        "add_norm [fused_add_rms_norm] 64x input_layernorm/norm/post_attention_layernorm eps=1e-05 "
        "casting=llama size=3072",
        "attention [fmha] 32x self_attn scaling=0.102062 heads=32 kv_heads=32 head_dim=96 value_dim=96",
        "gated_mlp [silu_and_mul] 32x mlp gate_up:gate_up_proj,down:down_proj activation=silu "
        "packed=concatenated order=gate, up",
        "linear [linear] 129x down_proj/gate_up_proj/lm_head/o_proj/qkv_proj",
        "linear_cross_entropy [fused_linear_cross_entropy] 1x lm_head",
        "loss [cross_entropy] 1x",
        "rms_norm [rms_norm] 65x input_layernorm/norm/post_attention_layernorm eps=1e-05 casting=llama size=3072",
        "rope [apply_rope_base] 32x self_attn style=half angles=full rotated=96 casting=input",
    ],
    "olmo2": [
        "add_norm [fused_add_rms_norm] 1x norm eps=1e-05 casting=gemma size=4096",
        "attention [fmha] 32x self_attn scaling=0.0883883 heads=32 kv_heads=32 head_dim=128 value_dim=128",
        "gated_mlp [swiglu] 32x mlp gate:gate_proj,up:up_proj,down:down_proj activation=silu",
        "linear [linear] 225x down_proj/gate_proj/k_proj/lm_head/o_proj/q_proj/up_proj/v_proj",
        "linear_cross_entropy [fused_linear_cross_entropy] 1x lm_head",
        "loss [cross_entropy] 1x",
        "qk_norm [dual_rms_norm] 32x self_attn q:q_norm,k:k_norm eps=1e-05 casting=gemma size=4096",
        "rms_norm [rms_norm] 129x k_norm/norm/post_attention_layernorm/post_feedforward_layernorm/q_norm "
        "eps=1e-05 casting=gemma size=4096",
        "rope [apply_rope_base] 32x self_attn style=half angles=full rotated=128 casting=input",
    ],
    "olmo3": [
        "add_norm [fused_add_rms_norm] 1x norm eps=1e-05 casting=gemma size=4096",
        "attention [fmha] 24x self_attn scaling=0.0883883 window=4096 heads=32 kv_heads=32 head_dim=128 value_dim=128",
        "attention [fmha] 8x self_attn scaling=0.0883883 heads=32 kv_heads=32 head_dim=128 value_dim=128",
        "gated_mlp [swiglu] 32x mlp gate:gate_proj,up:up_proj,down:down_proj activation=silu",
        "linear [linear] 225x down_proj/gate_proj/k_proj/lm_head/o_proj/q_proj/up_proj/v_proj",
        "linear_cross_entropy [fused_linear_cross_entropy] 1x lm_head",
        "loss [cross_entropy] 1x",
        "qk_norm [dual_rms_norm] 32x self_attn q:q_norm,k:k_norm eps=1e-05 casting=gemma size=4096",
        "rms_norm [rms_norm] 129x k_norm/norm/post_attention_layernorm/post_feedforward_layernorm/q_norm "
        "eps=1e-05 casting=gemma size=4096",
        "rope [apply_rope_base] 32x self_attn style=half angles=full rotated=128 casting=input",
    ],
    "olmoe": [
        "add_norm [fused_add_rms_norm] 32x input_layernorm/norm/post_attention_layernorm eps=1e-05 "
        "casting=llama size=2048",
        "attention [fmha] 16x self_attn scaling=0.0883883 heads=16 kv_heads=16 head_dim=128 value_dim=128",
        "experts [fused_moe] 16x experts gate_up_weight:gate_up_proj,down_weight:down_proj activation=silu "
        "packed=concatenated order=gate, up",
        "linear [linear] 65x k_proj/lm_head/o_proj/q_proj/v_proj",
        "linear_cross_entropy [fused_linear_cross_entropy] 1x lm_head",
        "loss [cross_entropy] 1x",
        "qk_norm [dual_rms_norm] 16x self_attn q:q_norm,k:k_norm eps=1e-05 casting=llama size=2048",
        "rms_norm [rms_norm] 65x input_layernorm/k_norm/norm/post_attention_layernorm/q_norm eps=1e-05 "
        "casting=llama size=2048",
        "rope [apply_rope_base] 16x self_attn style=half angles=full rotated=128 casting=input",
        "routing [moe_topk_routing] 16x mlp weight:gate.weight scoring=softmax top_k=8 normalised=False",
    ],
    "gpt_oss": [
        "add_norm [fused_add_rms_norm] 72x input_layernorm/norm/post_attention_layernorm eps=1e-05 "
        "casting=gemma size=2880",
        "attention [attention_sink] 18x self_attn scaling=0.125 sinks=True heads=64 kv_heads=8 head_dim=64 "
        "value_dim=64",
        "attention [attention_sink] 18x self_attn scaling=0.125 sinks=True window=128 heads=64 kv_heads=8 "
        "head_dim=64 value_dim=64",
        "experts [fused_moe] 36x experts "
        "gate_up_weight:gate_up_proj,down_weight:down_proj,gate_up_bias:gate_up_proj_bias,down_bias:down_proj_bias "
        "transposed=True activation=quick_gelu packed=interleaved order=gate, up limit=7",
        "linear [linear] 144x k_proj/o_proj/q_proj/v_proj bias=True",
        "linear [linear] 1x lm_head",
        "linear_cross_entropy [fused_linear_cross_entropy] 1x lm_head",
        "loss [cross_entropy] 1x",
        "rms_norm [rms_norm] 73x input_layernorm/norm/post_attention_layernorm eps=1e-05 casting=gemma size=2880",
        "rope [apply_rope_base] 36x self_attn style=half angles=half rotated=64 casting=input",
        "routing [moe_topk_routing] 36x mlp weight:router.weight,bias:router.bias scoring=softmax top_k=4 "
        "normalised=True bias=True",
    ],
    "deepseek_v2": [
        "add_norm [fused_add_rms_norm] 64x input_layernorm/norm/post_attention_layernorm eps=1e-06 "
        "casting=llama size=4096",
        "attention [mla] 32x self_attn scaling=0.0721688 heads=32 kv_heads=32 head_dim=192 value_dim=128 "
        "shared_rope_dim=64",
        "experts [fused_moe] 32x experts gate_up_weight:gate_up_proj,down_weight:down_proj activation=silu "
        "packed=concatenated order=gate, up",
        "gated_mlp [swiglu] 32x shared_experts gate:gate_proj,up:up_proj,down:down_proj activation=silu",
        "linear [linear] 257x "
        "down_proj/gate_proj/kv_a_proj_with_mqa/kv_b_proj/lm_head/o_proj/q_a_proj/q_b_proj/up_proj",
        "linear_cross_entropy [fused_linear_cross_entropy] 1x lm_head",
        "loss [cross_entropy] 1x",
        "rms_norm [rms_norm] 32x kv_a_layernorm eps=1e-06 casting=llama size=512",
        "rms_norm [rms_norm] 32x q_a_layernorm eps=1e-06 casting=llama size=1536",
        "rms_norm [rms_norm] 65x input_layernorm/norm/post_attention_layernorm eps=1e-06 casting=llama size=4096",
        "rope [apply_rope_base] 32x self_attn style=interleaved angles=complex rotated=64 casting=input",
        "routing [moe_topk_routing] 32x mlp weight:gate.weight scoring=softmax top_k=2 normalised=False",
    ],
    "deepseek_v3": [
        "add_norm [fused_add_rms_norm] 122x input_layernorm/norm/post_attention_layernorm eps=1e-06 "
        "casting=llama size=7168",
        "attention [mla] 61x self_attn scaling=0.0721688 heads=128 kv_heads=128 head_dim=192 value_dim=128 "
        "shared_rope_dim=64",
        "experts [fused_moe] 58x experts gate_up_weight:gate_up_proj,down_weight:down_proj activation=silu "
        "packed=concatenated order=gate, up",
        "gated_mlp [swiglu] 3x mlp gate:gate_proj,up:up_proj,down:down_proj activation=silu",
        "gated_mlp [swiglu] 58x shared_experts gate:gate_proj,up:up_proj,down:down_proj activation=silu",
        "linear [linear] 489x "
        "down_proj/gate_proj/kv_a_proj_with_mqa/kv_b_proj/lm_head/o_proj/q_a_proj/q_b_proj/up_proj",
        "linear_cross_entropy [fused_linear_cross_entropy] 1x lm_head",
        "loss [cross_entropy] 1x",
        "rms_norm [rms_norm] 123x input_layernorm/norm/post_attention_layernorm eps=1e-06 casting=llama size=7168",
        "rms_norm [rms_norm] 61x kv_a_layernorm eps=1e-06 casting=llama size=512",
        "rms_norm [rms_norm] 61x q_a_layernorm eps=1e-06 casting=llama size=1536",
        "rope [apply_rope_base] 61x self_attn style=interleaved_to_half angles=full rotated=64 casting=input",
        "routing [moe_topk_routing] 58x mlp weight:gate.weight,correction:gate.e_score_correction_bias "
        "scoring=sigmoid top_k=8 normalised=True scaling=2.5 groups=8 top_groups=4 group_score=top2 "
        "correction=True",
    ],
    "mixtral": [
        "add_norm [fused_add_rms_norm] 64x input_layernorm/norm/post_attention_layernorm eps=1e-05 "
        "casting=llama size=4096",
        "attention [fmha] 32x self_attn scaling=0.0883883 heads=32 kv_heads=8 head_dim=128 value_dim=128",
        "experts [fused_moe] 32x experts gate_up_weight:gate_up_proj,down_weight:down_proj activation=silu "
        "packed=concatenated order=gate, up",
        "linear [linear] 129x k_proj/lm_head/o_proj/q_proj/v_proj",
        "linear_cross_entropy [fused_linear_cross_entropy] 1x lm_head",
        "loss [cross_entropy] 1x",
        "rms_norm [rms_norm] 65x input_layernorm/norm/post_attention_layernorm eps=1e-05 casting=llama size=4096",
        "rope [apply_rope_base] 32x self_attn style=half angles=full rotated=128 casting=input",
        "routing [moe_topk_routing] 32x mlp weight:gate.weight scoring=softmax top_k=2 normalised=True",
    ],
    "glm4": [
        "add_norm [fused_add_rms_norm] 80x input_layernorm/norm/post_attention_layernorm eps=1.5625e-07 "
        "casting=llama size=4096",
        "attention [fmha] 40x self_attn scaling=0.0883883 heads=32 kv_heads=2 head_dim=128 value_dim=128",
        "gated_mlp [silu_and_mul] 40x mlp gate_up:gate_up_proj,down:down_proj activation=silu "
        "packed=concatenated order=gate, up",
        "linear [linear] 120x k_proj/q_proj/v_proj bias=True",
        "linear [linear] 121x down_proj/gate_up_proj/lm_head/o_proj",
        "linear_cross_entropy [fused_linear_cross_entropy] 1x lm_head",
        "loss [cross_entropy] 1x",
        "rms_norm [rms_norm] 161x "
        "input_layernorm/norm/post_attention_layernorm/post_mlp_layernorm/post_self_attn_layernorm "
        "eps=1.5625e-07 casting=llama size=4096",
        "rope [apply_rope_base] 40x self_attn style=interleaved angles=full rotated=64 casting=input factor=0.5",
    ],
    "granite": [
        "add_norm [fused_add_rms_norm] 64x input_layernorm/norm/post_attention_layernorm eps=1e-06 "
        "casting=llama size=4096",
        "attention [fmha] 32x self_attn scaling=1 heads=32 kv_heads=32 head_dim=128 value_dim=128",
        "gated_mlp [swiglu] 32x mlp gate:gate_proj,up:up_proj,down:down_proj activation=silu",
        "linear [linear] 225x down_proj/gate_proj/k_proj/lm_head/o_proj/q_proj/up_proj/v_proj",
        "linear_cross_entropy [fused_linear_cross_entropy] 1x lm_head",
        "loss [cross_entropy] 1x",
        "rms_norm [rms_norm] 65x input_layernorm/norm/post_attention_layernorm eps=1e-06 casting=llama size=4096",
        "rope [apply_rope_base] 32x self_attn style=half angles=full rotated=128 casting=input",
    ],
}

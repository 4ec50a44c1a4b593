"""The op library: dispatched functions, and the modules and getters built on them."""

import importlib

from tilegym.backend import is_backend_available
from tilegym.ops.attention_ops import attention_sink
from tilegym.ops.attention_ops import attention_sink_decode
from tilegym.ops.attention_ops import gemma_attention
from tilegym.ops.attention_ops import gemma_attention_decode
from tilegym.ops.attention_ops import mla
from tilegym.ops.attention_ops import mla_decoding
from tilegym.ops.attention_ops import mla_decoding_split_kv
from tilegym.ops.decode_ops import argmax
from tilegym.ops.decode_ops import linear_add
from tilegym.ops.decode_ops import rms_norm_add
from tilegym.ops.decode_ops import rms_norm_linear
from tilegym.ops.decode_ops import rms_norm_swiglu
from tilegym.ops.decode_ops import rope_and_cache
from tilegym.ops.decode_ops import rope_fmha_decode
from tilegym.ops.fused_swiglu import get_fused_swiglu_module
from tilegym.ops.modules import get_apply_rope_func
from tilegym.ops.modules import get_rms_norm_module
from tilegym.ops.modules import get_swiglu
from tilegym.ops.modules import get_swiglu_module
from tilegym.ops.moe_ops import fused_moe
from tilegym.ops.moe_ops import group_gemm
from tilegym.ops.moe_ops import moe_align_block_size
from tilegym.ops.moe_ops import moe_topk_routing
from tilegym.ops.moe_ops import ragged_group_gemm
from tilegym.ops.norm_ops import dual_rms_norm
from tilegym.ops.norm_ops import group_norm
from tilegym.ops.norm_ops import rms_norm_gated
from tilegym.ops.norm_ops import sigmoid_mul
from tilegym.ops.ops import apply_rope_base
from tilegym.ops.ops import bmm
from tilegym.ops.ops import cross_entropy
from tilegym.ops.ops import dropout
from tilegym.ops.ops import fmha
from tilegym.ops.ops import fmha_decode
from tilegym.ops.ops import fused_add_rms_norm
from tilegym.ops.ops import fused_linear_cross_entropy
from tilegym.ops.ops import geglu
from tilegym.ops.ops import gelu
from tilegym.ops.ops import layer_norm
from tilegym.ops.ops import linear
from tilegym.ops.ops import matmul
from tilegym.ops.ops import relu
from tilegym.ops.ops import rms_norm
from tilegym.ops.ops import silu_and_mul
from tilegym.ops.ops import softmax
from tilegym.ops.ops import splitk_reduce
from tilegym.ops.ops import swiglu
from tilegym.ops.packed_ops import fmha_paged_decode
from tilegym.ops.packed_ops import fmha_varlen
from tilegym.ops.quantized_ops import quantized_linear
from tilegym.ops.recurrent_ops import causal_conv1d_fn
from tilegym.ops.recurrent_ops import causal_conv1d_update
from tilegym.ops.recurrent_ops import chunk_gated_delta_rule
from tilegym.ops.recurrent_ops import gated_delta_step
from tilegym.ops.recurrent_ops import recurrent_gated_delta_rule

importlib.import_module("tilegym.ops.pytorch")
if is_backend_available("cutile"):
    importlib.import_module("tilegym.ops.cutile")

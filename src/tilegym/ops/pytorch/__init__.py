"""The reference implementations in plain PyTorch, which are also the fallback."""

from tilegym.ops.pytorch import activations
from tilegym.ops.pytorch import attention
from tilegym.ops.pytorch import bmm
from tilegym.ops.pytorch import causal_conv1d
from tilegym.ops.pytorch import cross_entropy
from tilegym.ops.pytorch import dropout
from tilegym.ops.pytorch import flash_decode
from tilegym.ops.pytorch import fused_add_rms_norm
from tilegym.ops.pytorch import fused_linear_cross_entropy
from tilegym.ops.pytorch import gated_delta_rule
from tilegym.ops.pytorch import geglu
from tilegym.ops.pytorch import group_gemm
from tilegym.ops.pytorch import layer_norm
from tilegym.ops.pytorch import linear
from tilegym.ops.pytorch import matmul
from tilegym.ops.pytorch import mla
from tilegym.ops.pytorch import mla_decoding
from tilegym.ops.pytorch import moe_align
from tilegym.ops.pytorch import moe_experts
from tilegym.ops.pytorch import moe_routing
from tilegym.ops.pytorch import rms_norm
from tilegym.ops.pytorch import rope
from tilegym.ops.pytorch import silu_and_mul
from tilegym.ops.pytorch import softmax
from tilegym.ops.pytorch import splitk_reduce
from tilegym.ops.pytorch import swiglu

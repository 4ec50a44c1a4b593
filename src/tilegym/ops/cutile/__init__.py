"""The cuTile implementations: one file an op with its kernels, launch, autograd and registration."""

from tilegym.ops.cutile import activations
from tilegym.ops.cutile import attention
from tilegym.ops.cutile import attention_sink
from tilegym.ops.cutile import bmm
from tilegym.ops.cutile import causal_conv1d
from tilegym.ops.cutile import cross_entropy
from tilegym.ops.cutile import dropout
from tilegym.ops.cutile import flash_decode
from tilegym.ops.cutile import fused_add_rms_norm
from tilegym.ops.cutile import fused_linear_cross_entropy
from tilegym.ops.cutile import gated_delta_rule
from tilegym.ops.cutile import geglu
from tilegym.ops.cutile import gemma_attention
from tilegym.ops.cutile import layer_norm
from tilegym.ops.cutile import linear
from tilegym.ops.cutile import matmul
from tilegym.ops.cutile import mla
from tilegym.ops.cutile import mla_decoding
from tilegym.ops.cutile import rms_norm
from tilegym.ops.cutile import rope
from tilegym.ops.cutile import silu_and_mul
from tilegym.ops.cutile import softmax
from tilegym.ops.cutile import splitk_reduce
from tilegym.ops.cutile import swiglu

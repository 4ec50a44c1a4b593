"""TileGym in Hugging Face transformers: :mod:`monkey_patch` to patch models, :mod:`patching` for patches of your own.

Importing this does not import transformers.
"""

from tilegym.transformers import monkey_patch
from tilegym.transformers.monkey_patch import apply
from tilegym.transformers.monkey_patch import apply_tilegym_kernel_to_gemma3
from tilegym.transformers.monkey_patch import apply_tilegym_kernel_to_glm4
from tilegym.transformers.monkey_patch import apply_tilegym_kernel_to_gpt_oss
from tilegym.transformers.monkey_patch import apply_tilegym_kernel_to_granite
from tilegym.transformers.monkey_patch import apply_tilegym_kernel_to_llama
from tilegym.transformers.monkey_patch import apply_tilegym_kernel_to_mistral
from tilegym.transformers.monkey_patch import apply_tilegym_kernel_to_mixtral
from tilegym.transformers.monkey_patch import apply_tilegym_kernel_to_olmo2
from tilegym.transformers.monkey_patch import apply_tilegym_kernel_to_olmo3
from tilegym.transformers.monkey_patch import apply_tilegym_kernel_to_olmoe
from tilegym.transformers.monkey_patch import apply_tilegym_kernel_to_phi3
from tilegym.transformers.monkey_patch import apply_tilegym_kernel_to_qwen2
from tilegym.transformers.monkey_patch import apply_tilegym_kernel_to_qwen3
from tilegym.transformers.monkey_patch import apply_tilegym_kernel_to_qwen3_moe
from tilegym.transformers.monkey_patch import revert
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet

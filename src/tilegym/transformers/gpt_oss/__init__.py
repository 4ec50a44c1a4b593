"""gpt-oss (``model_type`` "gpt_oss"): attention sinks, layers that see a window, experts with biases and clamps."""

from tilegym.transformers.computes import WITH_EXPERTS
from tilegym.transformers.family import Family

FAMILY = Family("gpt_oss", "GptOss", WITH_EXPERTS, decode_step=True)

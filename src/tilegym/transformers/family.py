"""What there is to patch in a model family that follows transformers' Llama layout."""

import importlib
import types
from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Names in one modeling module of transformers.

    Attributes:
        model_type: ``config.model_type``, and the folder under ``transformers.models``.
        prefix: what the family's class names start with.
        norms: the attributes of a model that hold RMS norms.
        mlp: the attribute of a layer that holds its gated MLP.
        attention: the attribute of a layer that holds its attention.
        rope: the module's function that rotates queries and keys.
    """

    model_type: str
    prefix: str
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm", "norm")
    mlp: str = "mlp"
    attention: str = "self_attn"
    rope: str = "apply_rotary_pos_emb"

    @property
    def modeling(self) -> types.ModuleType:
        return importlib.import_module(f"transformers.models.{self.model_type}.modeling_{self.model_type}")

    def class_of(self, kind: str) -> type:
        """The family's class for ``kind``: "RMSNorm", "MLP", "Attention" or "PreTrainedModel"."""
        return getattr(self.modeling, self.prefix + kind)

"""What there is to patch in a model family of transformers."""

import importlib
import types
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from tilegym.errors import PatchError
from tilegym.transformers.patching import PatchSet


def model_in(model: nn.Module) -> nn.Module:
    """The model of transformers in a model of peft's; any other model itself.

    Raises:
        PatchError: it is no ``torch.nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise PatchError(f"kernels are patched into a torch.nn.Module, this is {type(model).__name__}")
    return model.get_base_model() if hasattr(type(model), "get_base_model") else model


@dataclass(frozen=True)
class Compute:
    """One thing that is patched, behind a flag of its name. Those that families share are in :mod:`.computes`.

    Attributes:
        name: of the flag, and of the compute in the report.
        in_model: patches one model, given (patches, family, backend, model).
        in_class: patches transformers itself, given (patches, family, backend); None if that cannot be.
    """

    name: str
    in_model: Callable[[PatchSet, "Family", str | None, nn.Module], None]
    in_class: Callable[[PatchSet, "Family", str | None], None] | None = None


@dataclass(frozen=True)
class Family:
    """Names in one modeling module of transformers.

    Attributes:
        model_type: ``config.model_type``.
        prefix: what the family's class names start with.
        computes: what is patched, in this order.
        package: the folder under ``transformers.models``, and the name in ``apply_tilegym_kernel_to_<name>``; None
            where it is the model type.
        norms: the attributes of a model that hold RMS norms.
        mlp: the attribute of a layer that holds its gated MLP; None where it may hold something else.
        attention: the attribute of a layer that holds its attention.
        rope: the module's function that rotates queries and keys.
        decode_step: whether a layer's parts are laid out as :mod:`.decode_layer` knows, so that it may run its decoding
            step.
    """

    model_type: str
    prefix: str
    computes: tuple[Compute, ...]
    package: str | None = None
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm", "norm")
    mlp: str | None = "mlp"
    attention: str = "self_attn"
    rope: str = "apply_rotary_pos_emb"
    decode_step: bool = False

    @property
    def name(self) -> str:
        return self.package or self.model_type

    @property
    def modeling(self) -> types.ModuleType:
        return importlib.import_module(f"transformers.models.{self.name}.modeling_{self.name}")

    def class_of(self, kind: str) -> type:
        """The family's class for ``kind``: "RMSNorm", "MLP", "Attention", "PreTrainedModel", ..."""
        return getattr(self.modeling, self.prefix + kind)

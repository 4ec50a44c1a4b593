"""Prompts that leave room, for layers of linear attention: what comes behind the prompt would change their states.

So what fills the room comes before it in them, as zeros: what transformers shows them of a sequence that is padded on
the left. Of zeros the convolution and the delta rule make nothing.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch import nn

from tilegym.transformers.decode_cache import DecodeCache


def linear_attentions(model: nn.Module) -> list[nn.Module]:
    """The layers that zeros pass by without a trace, by what the families with a delta rule call them."""
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] == "linear_attn"]


@contextlib.contextmanager
def room_comes_first(layers: list[nn.Module], cache: DecodeCache, last: Tensor, room: int) -> Iterator[None]:
    """Within it ``layers``, where they are called with ``cache``, get their tokens [B, room] in another order: those
    behind ``last`` [1] first, as zeros. What they give is in the former order again."""
    if not layers:
        yield
        return
    places = torch.arange(room, device=last.device)
    taken = places + (last + 1 - room)  # negative: room
    empty, there, back = (taken < 0)[:, None], taken % room, (places + (room - 1 - last)) % room

    # The model's forward may run in another thread too, over another cache.
    def is_ours(kwargs: dict[str, Any]) -> bool:
        return any(value is cache for value in kwargs.values())

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if not is_ours(kwargs):
            return None
        hidden, mask = kwargs["hidden_states"], kwargs.get("attention_mask")
        nothing = empty.to(hidden.device)  # the layer may be on another GPU
        moved = {"hidden_states": hidden.index_select(1, there.to(hidden.device)).masked_fill(nothing, 0)}
        if mask is not None:
            moved["attention_mask"] = mask.index_select(1, there.to(mask.device))
        return args, kwargs | moved

    def behind(module: nn.Module, args: tuple, kwargs: dict[str, Any], out: Tensor) -> Tensor | None:
        return out.index_select(1, back.to(out.device)) if is_ours(kwargs) else None

    with contextlib.ExitStack() as stack:
        for layer in layers:
            for handle in (
                layer.register_forward_pre_hook(before, with_kwargs=True),
                layer.register_forward_hook(behind, with_kwargs=True),
            ):
                stack.callback(handle.remove)
        yield

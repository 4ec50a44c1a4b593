"""Prompts that leave room, for layers of linear attention: to their states no token may be added behind the prompt.

What fills the room goes to them as padding before it. So they see what transformers shows them of a batch with left
padding: zeros, of which the convolution and the delta rule make nothing, and behind them the prompt.
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
    """Within it ``layers`` get the tokens [B, room] that are called with ``cache`` in another order, and what they give
    is put back: those behind ``last`` [1] come first, as zeros."""
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
        moved = {"hidden_states": hidden.index_select(1, there).masked_fill(empty, 0)}
        if mask is not None:
            moved["attention_mask"] = mask.index_select(1, there)
        return args, kwargs | moved

    def behind(module: nn.Module, args: tuple, kwargs: dict[str, Any], out: Tensor) -> Tensor | None:
        return out.index_select(1, back) if is_ours(kwargs) else None

    with contextlib.ExitStack() as stack:
        for layer in layers:
            for handle in (
                layer.register_forward_pre_hook(before, with_kwargs=True),
                layer.register_forward_hook(behind, with_kwargs=True),
            ):
                stack.callback(handle.remove)
        yield

"""Calls of ``fmha`` that look like an earlier one go straight to its launch: to check and to plan takes as long."""

from typing import NamedTuple

import cuda.tile as ct
import torch

from tilegym.backend.cutile.autotuner import Autotuner
from tilegym.backend.cutile.launch import launch
from tilegym.ops.cutile.attention_common import with_unit_stride
from tilegym.ops.cutile.attention_tiles import mask_of_rows
from tilegym.ops.cutile.matmul import uses_tf32
from tilegym.ops.cutile.tiling import INT32_MAX

MAX_PLANS = 4096


class Plan(NamedTuple):
    """The launch of attention_kernel, but for its arrays."""

    grid: tuple[int, ...]
    kernel: ct.kernel
    numbers: tuple  # the kernel's arguments behind its arrays
    shape: tuple[int, ...]  # of the output
    strides: tuple[int, ...]
    tuner: Autotuner
    version: int  # of the tuner's results


_plans: dict[tuple, Plan] = {}


def plan_key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None,
    is_causal: bool,
    window_size: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    kv_len: torch.Tensor | None,
) -> tuple:
    """What calls have in common that are checked, planned and launched alike."""
    dtype = q.dtype
    return (
        q.shape,
        k.shape,
        v.shape,
        dtype,
        k.dtype,
        v.dtype,
        q.get_device(),
        scaling,
        is_causal,
        window_size,
        soft_cap,
        uses_tf32(dtype),
        None if sinks is None else sinks.shape,
        None if attention_mask is None else (attention_mask.shape, attention_mask.dtype),
        None if kv_len is None else (kv_len.shape, kv_len.dtype),
    )


def remember(key: tuple, tuner: Autotuner, kernel: ct.kernel, tuned: tuple, args_fn, arrays: int) -> None:
    """Keeps the plan of a call that was launched by ``tuner`` with the key ``tuned`` and the arguments of ``args_fn``.

    ``arrays``: how many of the arguments are arrays, the fourth of them the output.
    """
    choice = tuner.known(kernel, tuned)
    if choice is None:  # not measured yet
        return
    args = args_fn(choice.config)
    out = args[3]
    if any(x.numel() > INT32_MAX for x in args[:4]):  # their strides have to be looked at every time
        return
    if len(_plans) >= MAX_PLANS:
        _plans.clear()
    _plans[key] = Plan(choice.grid, choice.kernel, args[arrays:], out.shape, out.stride(), tuner, tuner.version)


def launch_planned(
    key: tuple,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    kv_len: torch.Tensor | None,
) -> torch.Tensor | None:
    """The output of a call that looks like an earlier one; None if none is known."""
    plan = _plans.get(key)
    if plan is None or plan.version != plan.tuner.version:
        return None
    out = q.new_empty_strided(plan.shape, plan.strides)
    arrays = (
        with_unit_stride(q),
        with_unit_stride(k),
        with_unit_stride(v),
        out,
        0 if attention_mask is None else mask_of_rows(attention_mask, k.shape[2])[1],
        0 if sinks is None else sinks,
        0 if kv_len is None else kv_len,
        0,  # lse, which the backward pass would want
    )
    launch(out, plan.grid, plan.kernel, arrays + plan.numbers)
    return out

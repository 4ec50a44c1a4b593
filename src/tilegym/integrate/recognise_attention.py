"""Recognises calls of transformers' attention interface: scaling, mask, window, soft cap, sinks, latent keys."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tilegym.integrate import formulas_sequence as formulas
from tilegym.integrate.formulas import Formula
from tilegym.integrate.probe import Match
from tilegym.integrate.probe import best
from tilegym.integrate.trace import Call


def is_attention(call: Call) -> bool:
    """Whether a call has the attention interface's form: (module, query, key, value, attention_mask, ...)."""
    first = list(call.values.values())[:4]
    return (
        len(first) == 4
        and isinstance(first[0], nn.Module)
        and all(isinstance(t, torch.Tensor) and t.ndim == 4 and t.is_floating_point() for t in first[1:])
    )


def recognise_attention(call: Call) -> Match | None:
    """What the call computes, by running it again as a formula; ``what`` has the requirement's parameters.

    The mask is not taken on trust: whether it is causal, how wide its window or chunk is, is read off its entries.
    """
    module, q, k, v, *_ = call.arguments.values()
    q, k, v = list(call.values.values())[1:4]
    output = call.output[0] if isinstance(call.output, tuple) else call.output
    mask = call.values.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        mask = mask[..., : k.shape[2]]
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    pattern = mask_pattern(mask, q.shape[2], k.shape[2])
    values = {"q": q, "k": k, "v": v, "mask": mask}
    sinks = next((t for t in (call.values.get("s_aux"), getattr(module, "sinks", None)) if t is not None), None)
    if isinstance(sinks, torch.Tensor) and sinks.shape == (q.shape[1],):
        values["sinks"] = sinks.detach()

    def candidates() -> Iterator[tuple[Formula, dict[str, Any]]]:
        scalings = [call.values.get("scaling"), getattr(module, "scaling", None), q.shape[-1] ** -0.5, 1.0]
        for scaling in dict.fromkeys(float(s) for s in scalings if isinstance(s, (float, int))):
            for softcap in dict.fromkeys((call.values.get("softcap"), None)):
                for with_sinks in (True, False) if "sinks" in values else (False,):
                    said = {"scaling": scaling, "softcap": softcap, "sinks": with_sinks, **pattern}
                    explicit = pattern["mask"] != "none" and not pattern["causal"]
                    formula = formulas.attention(
                        scaling, pattern["causal"], pattern["window"], pattern["chunk"], softcap, with_sinks, explicit
                    )
                    yield formula, said

    match = best({torch.float32: output}, candidates(), lambda f, w, d: {n: values[n] for n in f.inputs})
    if match is None:
        return None
    sizes = {"heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[-1], "value_dim": v.shape[-1]}
    what = match.what | sizes | {"shared_rope_dim": _shared(k) if q.shape[-1] != v.shape[-1] else 0}
    return Match(match.formula, match.errors, what)


def mask_pattern(mask: torch.Tensor | None, queries: int, keys: int) -> dict[str, Any]:
    """What an additive mask [B or 1, H or 1, Sq, Skv] says: "none", "causal" (with window or chunk), or "other"."""
    pattern: dict[str, Any] = {"mask": "none", "causal": False, "window": None, "chunk": None}
    if not isinstance(mask, torch.Tensor):
        return pattern
    pattern["mask"] = "other"
    visible = mask > -1e4
    if (mask.masked_fill(~visible, 0.0) != 0).any() or (visible != visible[:1, :1]).any():
        return pattern
    visible = visible[0, 0]
    key = torch.arange(keys)
    query = key[keys - queries :, None]
    width = int(visible[-1].sum())
    causal = key <= query
    for name, candidate, said in (
        ("causal", causal, {}),
        ("causal", causal & (query - key < width), {"window": width}),
        *(("causal", causal & (query // c == key // c), {"chunk": c}) for c in range(1, keys)),
    ):
        if torch.equal(visible, candidate):
            return pattern | {"mask": name, "causal": True} | said
    if bool(visible.all()):
        pattern["mask"] = "none"
    return pattern


def _shared(k: torch.Tensor) -> int:
    """How many of the last numbers of a key are the same in all heads."""
    if k.shape[1] < 2:
        return 0
    same = (k == k[:, :1]).all(0).all(0).all(0)  # [D]
    return int(same.flip(0).long().cumprod(0).sum())

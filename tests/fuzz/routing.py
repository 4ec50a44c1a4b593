"""Routing chooses experts: where scores are as good as equal, backends may choose differently."""

from typing import Any

import torch

from fuzz.comparing import Failure

CLOSE = 3e-7  # scores so near to each other, in fp32, may be in either order
IDS = "output 1"


def settle_choices(
    got: dict[str, torch.Tensor],
    reference: dict[str, torch.Tensor],
    oracle: dict[str, torch.Tensor],
    args: dict[str, Any],
) -> None:
    """Compares the chosen experts, and leaves of the results those rows that were chosen alike."""
    ids, expected = got[IDS], reference[IDS]
    if ids.shape != expected.shape or ids.dtype != expected.dtype:
        raise Failure(f"ids {ids.dtype} {tuple(ids.shape)}, pytorch's {expected.dtype} {tuple(expected.shape)}")
    differ = (ids != expected).any(-1)
    if differ.any():
        _check_choices(ids, expected, differ, args)
    if IDS in oracle:
        differ |= (oracle[IDS] != expected).any(-1)
    for results in (got, reference, oracle):
        results.pop(IDS, None)
        for name, t in results.items():
            results[name] = _rows(t, ~differ)


def _check_choices(ids: torch.Tensor, expected: torch.Tensor, differ: torch.Tensor, args: dict[str, Any]) -> None:
    scores = args["router_logits"].double()
    if args["scoring"] != "topk_softmax":
        scores = scores.sigmoid() if args["scoring"] == "sigmoid" else scores.softmax(-1)
    if args.get("correction_bias") is not None:
        scores = scores + args["correction_bias"].double()
    if ids.min() < 0 or ids.max() >= scores.shape[1]:
        raise Failure(f"ids out of range: {ids.min().item()} to {ids.max().item()}")
    a, b = scores.gather(1, ids), scores.gather(1, expected)
    far = ((a - b).abs() > CLOSE * (1 + b.abs())) & differ[:, None] & ~(a.isnan() & b.isnan())
    if args["num_groups"] == 1 and far.any():
        row = far.any(-1).nonzero()[0].item()
        raise Failure(f"row {row}: chose {ids[row].tolist()}, pytorch {expected[row].tolist()}")


def _rows(t: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """Those rows; nothing of what is not by rows, as the gradient of the memory around a view."""
    return t[which] if t.dim() and t.shape[0] == which.shape[0] else t[:0]

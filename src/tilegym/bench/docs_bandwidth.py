"""The section of ``docs/benchmarks.md`` that sums up the ops that memory bounds, where no cache helps."""

import statistics

from tilegym.bench.merge import Merged
from tilegym.bench.report import Result
from tilegym.bench.report import markdown
from tilegym.bench.runner import COPY
from tilegym.bench.spec import OURS

OPS = (
    "rms_norm",
    "layer_norm",
    "fused_add_rms_norm",
    "dual_rms_norm",
    "rms_norm_gated",
    "silu_and_mul",
    "swiglu",
    "geglu",
    "gelu",
    "relu",
    "sigmoid_mul",
    "softmax",
    "apply_rope_base",
    "cross_entropy",
    "dropout",
)
L2_CACHES = 4  # what counts as beyond the L2 cache: so many times its size
PEERS = ("liger", "torch.compile")

HEADING = f"""\
## Beyond the L2 cache

Elementwise ops and ops on rows, at those sizes of the tables below that move at least {L2_CACHES} times what the L2
cache holds: the time of a copy of as many bytes over TileGym's, so that 1.00 is as fast as the copy, and the times of
Liger and torch.compile as multiples of TileGym's. The least of each, and where it was measured. Above 1.00 is what
counts a tensor twice that is written once: both gradients of `fused_add_rms_norm` are one.
"""


def section(merged: Merged) -> str:
    """The table, or an empty string where no run has measured such sizes beside a copy."""
    found: dict[tuple[str, str], dict[str, dict[str, Result]]] = {}
    # All runs are of one kind of GPU, and old ones do not tell.
    l2_bytes = next((run.machine["l2_bytes"] for run in merged.runs if run.machine.get("l2_bytes")), None)
    for (op, mode, shape), (_, row) in merged.cases.items():
        if op in OPS and _is_beyond(row, l2_bytes):
            found.setdefault((op, mode), {})[shape] = row
    lines = []
    for (op, mode), rows in found.items():
        shares = {shape: row[COPY].seconds / row[OURS].seconds for shape, row in rows.items()}
        line = [op, mode, str(len(rows)), _least(shares), f"{statistics.median(shares.values()):.2f}"]
        for peer in PEERS:
            times = {s: row[peer].seconds / row[OURS].seconds for s, row in rows.items() if _is_measured(row, peer)}
            line.append(_least(times))
        lines.append(line)
    header = ("Op", "Pass", "Sizes", "Copy over TileGym, least", "Median", *(f"{peer}, least" for peer in PEERS))
    return f"{HEADING}\n{markdown(header, lines)}" if lines else ""


def _is_measured(row: dict[str, Result], provider: str) -> bool:
    return provider in row and row[provider].measured


def _is_beyond(row: dict[str, Result], l2_bytes: int | None) -> bool:
    if not l2_bytes or not (_is_measured(row, OURS) and _is_measured(row, COPY)):
        return False
    ours = row[OURS]
    return (ours.bytes_per_second or 0) * ours.seconds >= L2_CACHES * l2_bytes


def _least(values: dict[str, float]) -> str:
    if not values:
        return "-"
    shape = min(values, key=values.__getitem__)
    return f"{values[shape]:.2f} ({shape})"

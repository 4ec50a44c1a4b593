"""The section of ``docs/benchmarks.md`` that compares training passes with Liger, in time and memory."""

import textwrap
from collections import Counter

from tilegym.bench.merge import Merged
from tilegym.bench.report import Result
from tilegym.bench.report import beside
from tilegym.bench.report import markdown
from tilegym.bench.report import microseconds
from tilegym.bench.spec import BOTH
from tilegym.bench.spec import IN_PLACE
from tilegym.bench.spec import OURS

MORE = 1.01  # what needs up to this multiple of another's memory does not count as needing more

TRAINING = """\
## Training ops against Liger

Forward and backward together: time, and peak memory beyond the inputs. Above 1.00x TileGym is faster, or needs less.
"""

WRITTEN_OVER = """\
*In place* is TileGym under `tilegym.set_gradients_in_place(True)`; in brackets Liger's figure as a multiple of it. Its
activations are results of another operation, as in a model, and their gradients are written over them, or over what
the op made of them. In the other columns inputs are leaves; where Liger writes over these, or over the upstream
gradients, it does so in any case. In all columns both are there before the pass and until after it: they are not
counted, and what is written over them adds nothing. They are restored between calls, outside the time measured.
"""


def section(merged: Merged) -> str:
    """Ours beside Liger's, forward and backward together, where both were measured; "" where none was.

    Ours in place has its columns if any of these rows has it.
    """
    rows = [
        (op, shape, number, row)
        for (op, mode, shape), (number, row) in merged.cases.items()
        if mode == BOTH and all(name in row and row[name].measured for name in (OURS, "liger"))
    ]
    if not rows:
        return ""
    in_place = any(IN_PLACE in row for *_, row in rows)
    header = ["Op", "Shape", "TileGym, us", "Liger, us", *(["In place, us"] if in_place else [])]
    header += ["TileGym's peak memory, MB", "Liger's, MB", *(["In place, MB"] if in_place else [])]
    header += ["Run"] if len(merged.runs) > 1 else []
    lines = []
    for op, shape, number, row in rows:
        ours, liger, over = row[OURS], row["liger"], row.get(IN_PLACE)
        known = ours.peak_bytes is not None and liger.peak_bytes is not None
        line = [op, shape, microseconds(ours.seconds), beside(liger, ours)]
        line += [_time_in_place(over, liger)] if in_place else []
        line += [_megabytes(ours), _megabytes(liger, liger, ours)] if known else ["-", "-"]
        line += [_megabytes(over, liger, over)] if in_place else []
        lines.append(line + ([merged.run_of(number)] if len(merged.runs) > 1 else []))
    parts = [TRAINING, *([WRITTEN_OVER] if in_place else []), _memory(rows), markdown(header, lines)]
    return "\n".join(part for part in parts if part)


def _time_in_place(result: Result | None, liger: Result) -> str:
    if result is None or not result.measured:
        return beside(result, None)
    return f"{microseconds(result.seconds)} ({liger.seconds / result.seconds:.2f}x)"


def _megabytes(result: Result | None, above: Result | None = None, below: Result | None = None) -> str:
    """The peak memory; behind it what multiple ``above``'s is of ``below``'s, where that is a number."""
    if not _has_memory(result):
        return "-"
    told = f"{result.peak_bytes / 1e6:.0f}"
    if above is None or above.peak_bytes is None or not below.peak_bytes:
        return told
    return f"{told} ({above.peak_bytes / below.peak_bytes:.2f}x)"


def _has_memory(result: Result | None) -> bool:
    return result is not None and result.measured and result.peak_bytes is not None


def _memory(rows: list[tuple]) -> str:
    """In how many rows ours needs more memory than Liger: of all, and of those that have it in place too."""
    known = [(op, row) for op, _, _, row in rows if _has_memory(row[OURS]) and _has_memory(row["liger"])]
    if not known:
        return ""
    found = _where(known, OURS)
    text = (
        f"TileGym needs over {MORE - 1:.0%} more memory than Liger in {len(found)} of {len(known)} rows{_by_op(found)}."
    )
    both = [(op, row) for op, row in known if _has_memory(row.get(IN_PLACE))]
    if both:
        over = _where(both, IN_PLACE)
        most = max(row[IN_PLACE].peak_bytes - row["liger"].peak_bytes for _, row in both) / 1e6
        by = f", by at most {most:.1f} MB" if over else ""
        text += f" Of the {len(both)} rows measured in place too, it does in {len(over)} in place{_by_op(over)}{by},"
        text += f" and in {len(_where(both, OURS))} as it comes."
    return textwrap.fill(text, 120) + "\n"


def _where(rows: list[tuple[str, dict[str, Result]]], name: str) -> list[str]:
    """The op of each row in which ``name`` needs more than Liger."""
    return [op for op, row in rows if row[name].peak_bytes > MORE * row["liger"].peak_bytes]


def _by_op(found: list[str]) -> str:
    """ " (geglu 2, swiglu 1)": how often each op is in ``found``."""
    return f" ({', '.join(f'{op} {count}' for op, count in Counter(found).items())})" if found else ""

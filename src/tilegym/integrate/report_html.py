"""The report as one HTML page: no scripts, no links to anything that it would have to load; pictures are SVG."""

from collections.abc import Iterable
from html import escape
from typing import Any

from tilegym.integrate import report

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #1b1f24; }
h1 { font-size: 1.6em; margin-bottom: .2em; } h2 { font-size: 1.15em; margin-top: 2.2em; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: .35em .8em .35em 0; border-bottom: 1px solid #d8dee4; vertical-align: top; }
th { color: #57606a; font-weight: 600; } code, pre { font: 13px/1.5 ui-monospace, monospace; }
pre { background: #f6f8fa; padding: 1em; overflow-x: auto; } .note { color: #7d4e00; } .dim { color: #57606a; }
.verdict { border-left: 4px solid #1a7f37; padding: .4em 1em; background: #f2f9f4; }
.bad { color: #a40e26; } .ok { color: #1a7f37; } svg { display: block; margin: .8em 0; max-width: 100%; }
.pair { display: flex; gap: 2em; flex-wrap: wrap; }
"""
_BEFORE, _AFTER, _LIMIT = "#8c959f", "#2f81f7", "#cf222e"


_LETTER = 8  # pixels that a letter takes at most on average, in whatever font there is


def _room(texts: Iterable[str]) -> int:
    """Pixels for the longest of ``texts``, and a gap."""
    return _LETTER * max(map(len, texts), default=0) + 10


def bars(rows: list[tuple[str, float, str, str]], width: int = 460) -> str:
    """A horizontal bar for each (name, value, text, colour)."""
    rows = [(name if len(name) <= 26 else name[:25] + "…", *rest, name) for name, *rest in rows]
    top = max((value for _, value, *_ in rows), default=0.0) or 1.0
    label, parts = _room(row[0] for row in rows), []
    room = width - label - _room(row[2] for row in rows)
    for index, (shown, value, text, colour, name) in enumerate(rows):
        y, length = 24 * index, max(1.0, room * value / top)
        parts.append(
            f'<g><title>{escape(name)}: {escape(text)}</title><text x="{label - 8}" y="{y + 16}" text-anchor="end">'
            f'{escape(shown)}</text><rect x="{label}" y="{y + 4}" width="{length:.1f}" height="16" fill="{colour}"/>'
            f'<text x="{label + length + 6:.1f}" y="{y + 16}">{escape(text)}</text></g>'
        )
    return _svg(width, 24 * len(rows), "".join(parts))


def _svg(width: int, height: int, content: str) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg {size} role="img" font-size="13" font-family="system-ui, sans-serif" fill="#1b1f24">{content}</svg>'


def limits(rows: list[tuple[str, float, float]], width: int = 940) -> str:
    """For each (name, error, allowed) a bar of the share of what is allowed, with the limit as a line."""
    texts = [f"{error:.2g} of {allowed:.2g}" for _, error, allowed in rows]
    label, height, parts = _room(name for name, *_ in rows), 24 * len(rows) + 20, []
    room = width - label - _room(texts)
    for index, ((name, error, allowed), text) in enumerate(zip(rows, texts, strict=True)):
        y, length = 24 * index, max(1.0, room * min(error / allowed, 1.0))
        parts.append(
            f'<text x="{label - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{label}" y="{y + 4}" width="{length:.1f}" height="16" fill="{_AFTER}"/>'
            f'<text x="{label + room + 8}" y="{y + 16}">{text}</text>'
        )
    line = f'<line x1="{label + room}" x2="{label + room}" y1="0" y2="{height - 18}" stroke="{_LIMIT}"/>'
    text = f'<text x="{label + room}" y="{height - 3}" text-anchor="middle">allowed</text>'
    return _svg(width, height, "".join([*parts, line, text]))


def _table(header: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(text: str) -> str:
    style = (
        "ok" if text in ("verified", "equal") else "bad" if text.startswith(("unsuitable", "dropped", "differ")) else ""
    )
    return f'<span class="{style}">{escape(text)}</span>' if style else escape(text)


def _where_time_goes(measured: dict[str, Any]) -> str:
    pictures = []
    for label, side, colour in (("unpatched", "unpatched", _BEFORE), ("with TileGym", "patched", _AFTER)):
        rows = [(name, share, f"{share:.1%}", colour) for name, share in measured[side]["time"]]
        pictures.append(f"<div><b>{label}</b>{bars(rows)}</div>")
    return f'<div class="pair">{"".join(pictures)}</div>'


def _speed(measured: dict[str, Any]) -> str:
    pictures = []
    for label, key, form in (
        ("tokens a second", "throughput_tokens_per_second", "{:.1f}"),
        ("ms to the first token", "time_to_first_token_ms", "{:.1f} ms"),
    ):
        sides = (("unpatched", "unpatched", _BEFORE), ("TileGym", "patched", _AFTER))
        rows = [(name, measured[side][key], form.format(measured[side][key]), colour) for name, side, colour in sides]
        pictures.append(f"<div><b>{label}</b>{bars(rows)}</div>")
    return f'<div class="pair">{"".join(pictures)}</div>'


def _flags(measured: dict[str, Any]) -> str:
    base = measured["unpatched"]["throughput_tokens_per_second"]
    sides = {"none": measured["unpatched"], **measured["alone"], "all": measured["patched"]}
    rows = []
    for name, side in sides.items():
        rate = side["throughput_tokens_per_second"]
        rows.append((name, rate, f"{rate:.1f} ({rate / base:.2f}x)", _BEFORE if name == "none" else _AFTER))
    return bars(rows, width=700)


def _coverage(after: dict[str, Any]) -> str:
    total = after["coverage_percent"]
    spent = sum(seconds for _, _, seconds in after["own"]) or 1.0
    rows = [
        (name, seconds / spent * total, f"{seconds / spent * total:.1f}%", _AFTER) for name, _, seconds in after["own"]
    ]
    rows.append(("everything else", 100 - total, f"{100 - total:.1f}%", _BEFORE))
    return bars(rows, width=700)


def page(data: dict[str, Any]) -> str:
    """The whole page."""
    plan, measured = data["plan"], data["measured"]
    weights = ", random weights" if data["random_weights"] else ""
    about = (
        f"{plan['architecture']} ({plan['family']}){weights}, {data['precision']}, on {data['device']}; transformers "
        f"{plan['transformers']}, torch {data['torch']}, TileGym {data['tilegym']}"
    )
    rows = report.plan_rows(data)
    errors = [
        (f"{key} ({call})", error, allowed) for key, call, _, error, allowed in report.error_rows(data["verified"])
    ]
    missed = "".join(
        f"<li><code>{escape(m['implementation'])}</code>: {escape(m['why'])}</li>" for m in plan["unrecognised"]
    )
    texts = "".join(
        f"<p><b>{side}:</b> <span class=dim>{escape(o['prompt'])}</span>{escape(o['text'])}</p>"
        for side, o in zip(("unpatched", "TileGym"), data["outputs"], strict=True)
    )
    notes = "".join(f'<p class="note">Note: {escape(notice)}.</p>' for notice in data["notices"])
    flags = report.flag_rows(measured, data["accepted"])
    body = [
        f"<h1>TileGym in {escape(data['model'])}</h1><p class=dim>{escape(about)}</p>{notes}",
        f'<p class="verdict">{escape(report.verdict(data))}</p>',
        f"<h2>Before and after: {data['output_length']} tokens, backend {escape(data['backend'])}</h2>",
        _speed(measured),
        _table(["", "unpatched", "TileGym", "speed-up"], report.speed_rows(measured, data["device"])),
        "<h2>Each flag by itself, in tokens a second</h2>",
        _flags(measured) + _table(["flag", "tokens/s", "against unpatched", "greedy tokens"], flags),
        "<h2>Where the time goes</h2>" + _where_time_goes(measured),
        f"<h2>Coverage: {measured['patched']['coverage_percent']:.1f}%</h2>",
        f"<p class=dim>{escape(measured['patched']['coverage_measure'])}</p>" + _coverage(measured["patched"]),
        "<h2>What was found and what serves it</h2>",
        _table(["compute", "where", "kernel", "fit", "result"], rows),
        f"<p>Not recognised, and left as it is:</p><ul>{missed}</ul>" if missed else "",
        "<h2>Errors on captured tensors, against what is allowed</h2>",
        "<p class=dim>Against float64, of the result that comes nearest to the limit: twice the error that the model's "
        "own code makes in its dtype, and four roundings in any case. "
        f"{escape(report.compile_line(data['compiled']))}</p>",
        limits(errors),
        f"<h2>The text</h2>{texts}",
        f"<h2>How to use it</h2><p>The patches are in <code>{escape(data['package'])}</code>.</p>",
        f"<pre>{escape(report.use(data))}</pre>",
    ]
    title = f"TileGym in {escape(data['model'])}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )

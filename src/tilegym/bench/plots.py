"""Draws a run: one picture for each op and pass, every provider against the line of the roofline."""

from pathlib import Path

from tilegym.bench.report import Result
from tilegym.bench.report import Run
from tilegym.bench.report import cases

PANELS = {
    "memory": ("GB/s", "bytes_per_second", 1e9, "bandwidth", "copy bandwidth"),
    "compute": ("TFLOP/s", "flops_per_second", 1e12, "rate", "GEMM rate"),
}


def _bound(row: dict[str, Result]) -> str:
    return next((result.bound for result in row.values() if result.bound), "")


def plot(run: Run, folder: Path) -> list[Path]:
    """Writes ``<op>_<mode>.png`` to ``folder`` for whatever was measured; returns the files."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pictures: dict[tuple[str, str], dict[str, dict[str, dict[str, Result]]]] = {}
    for (op, mode, shape), row in cases(run.results).items():
        if _bound(row):
            pictures.setdefault((op, mode), {}).setdefault(_bound(row), {})[shape] = row
    written = []
    for (op, mode), panels in pictures.items():
        widest = max(len(shapes) for shapes in panels.values())
        figure = Figure(figsize=(max(7.0, 0.4 * widest + 2), 5.5 * len(panels)), layout="constrained")
        FigureCanvasAgg(figure)
        column = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axes, (bound, shapes) in zip(column, panels.items(), strict=True):
            _panel(axes, bound, shapes, run)
        figure.suptitle(f"{op}, {mode}, {run.settings['dtype']}, {run.machine['device_name']}")
        path = folder / f"{op}_{mode}.png"
        figure.savefig(path, dpi=120)
        written.append(path)
    return written


def _panel(axes, bound: str, shapes: dict[str, dict[str, Result]], run: Run) -> None:
    unit, figure, scale, ceiling, label = PANELS[bound]
    top = run.roofline[ceiling] / scale
    axes.axhline(top, color="black", linestyle="--", linewidth=1, label=f"{label} {top:.4g} {unit}")
    highest = top
    names = dict.fromkeys(name for row in shapes.values() for name in row)
    for name in names:
        points = [
            (position, row[name])
            for position, row in enumerate(shapes.values())
            if name in row and row[name].measured and getattr(row[name], figure)
        ]
        if points:
            middle = [getattr(result, figure) / scale for _, result in points]
            # The slow end of the spread gives the low end of the rate.
            below = [m * (1 - r.seconds / r.high) for m, (_, r) in zip(middle, points, strict=True)]
            above = [m * (r.seconds / r.low - 1) for m, (_, r) in zip(middle, points, strict=True)]
            highest = max(highest, *map(sum, zip(middle, above, strict=True)))
            axes.errorbar([x for x, _ in points], middle, yerr=(below, above), marker="o", capsize=2, label=name)
    axes.set_xticks(range(len(shapes)), list(shapes), rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_ylabel(unit)
    axes.set_ylim(0, 1.05 * highest)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)

"""What is made from the ledger: ``results.md``, a page with two curves, and a Trace for every experiment."""

import datetime
import html
import json
import uuid
from pathlib import Path
from typing import Any

from tilegym.autokernel.ledger import KEEP
from tilegym.autokernel.ledger import Experiment
from tilegym.autokernel.ledger import Ledger
from tilegym.autokernel.protocol import Task
from tilegym.bench import machine
from tilegym.inventory import Trace
from tilegym.inventory import Workload
from tilegym.inventory.schema import Correctness
from tilegym.inventory.schema import Environment
from tilegym.inventory.schema import Evaluation
from tilegym.inventory.schema import Performance
from tilegym.inventory.schema import RandomInput
from tilegym.inventory.schema import ScalarInput

_HEADER = ("experiment", "commit", "coverage", "throughput", "x unpatched", "status", "description")
# The statuses of FlashInfer-Bench.
_OF_TRACES = {KEEP: "PASSED", "timeout": "TIMEOUT", "incorrect": "INCORRECT_NUMERICAL", "crash": "RUNTIME_ERROR"}
_WIDTH, _HEIGHT, _MARGIN = 640, 220, 48


def write(folder: Path, ledger: Ledger) -> None:
    """Writes ``results.md`` and ``results.html`` into ``folder``."""
    baseline = ledger.fact("baseline")
    if baseline is None:
        return
    experiments = [e for e in ledger.experiments() if e.state == "finished"]
    _replace(folder / "results.md", results(ledger, baseline, experiments))
    _replace(folder / "results.html", page(baseline, experiments))


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def way(found: dict[str, Any]) -> str:
    """How gate 8 has measured, in words, by what it found; "" where it does not say."""
    why = f" ({found['why']})" if found.get("why") else ""
    return f"{found['way']}{why}" if "way" in found else ""


def gain(found: dict[str, Any]) -> float | None:
    """How many times as fast as the unpatched model in the same turns, by what gate 8 found; None where it found none.

    Tokens/s of two experiments cannot be compared: hours may lie between them, and a machine has faster hours.
    """
    return found.get("ratio_to_original")


def times(found: dict[str, Any]) -> str:
    """:func:`gain` in words; "" where there is none."""
    return "" if gain(found) is None else f"{gain(found):.2f}x"


def results(ledger: Ledger, baseline: dict[str, Any], experiments: list[Experiment]) -> str:
    """The table of all experiments, and of the regions, in Markdown."""
    settings = ledger.fact("settings")
    rows = [("0", "", "0.0%", f"{baseline['throughput']:.2f}", "1.00x", "baseline", "the unpatched model")]
    for e in experiments:
        throughput = "" if e.throughput is None else f"{e.throughput:.2f}"
        description = e.description if e.status == KEEP else f"{e.proposer}, {e.gate}: {e.description}"
        if e.model.get("way") != baseline.get("way") and way(e.model):
            description = f"throughput {way(e.model)}; {description}"
        commit = (e.kept_commit or e.commit_id)[:12]
        measured = f"{e.coverage or 0:.1%}", throughput, times(e.model)
        rows.append((str(e.number), commit, *measured, e.status, _line(description)))
    lines = [f"# Auto-kernelize: {settings['model']['spec']['model_id']}", ""]
    lines += [_row(_HEADER), _row(["---"] * len(_HEADER)), *map(_row, rows), ""]
    how = f" is of runs that are {way(baseline)}, and" if way(baseline) else ""
    turns = "differs with the state of the machine; its ratio to the unpatched model's is of the same turns"
    lines += [f"Throughput{how} {turns}.", ""]
    if settings.get("device") == "cpu":
        lines += ["Kernels run in the interpreter here: throughput says nothing of them, and does not decide.", ""]
    if baseline.get("integration"):
        lines += [f"Before any of these kernels {baseline['integration']}.", ""]
    lines += ["## Regions", ""]
    head = ("region", "modules", "share", "bound", "state")
    lines += [_row(head), _row(["---"] * len(head))]
    kept = {e.region: e for e in experiments if e.status == KEEP}
    for region in ledger.regions():
        modules = len(Task.from_json(region.task).modules) if region.task else ""
        state = f"kept: {kept[region.key].number}" if region.key in kept else _line(region.closed) or "open"
        share = region.seconds / baseline["profiled_seconds"]
        bound = f"{region.bound / region.seconds:.0%}" if region.seconds else ""
        lines.append(_row((region.key, str(modules), f"{share:.1%}", bound, state)))
    stopped = ledger.fact("stopped")
    return "\n".join([*lines, "", *([f"Stopped: {stopped}."] if stopped else []), ""])


def _row(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def _line(text: str) -> str:
    return " ".join(text.split())[:160].replace("|", "\\|")


def page(baseline: dict[str, Any], experiments: list[Experiment]) -> str:
    """A page with coverage and throughput over the experiments: what was kept as a line, what was not as points."""
    coverage, gains, points = [(0, 0.0)], [(0, 1.0)], []
    for e in experiments:
        coverage.append((e.number, e.coverage or 0.0))
        if gain(e.model) is not None and e.model.get("way") == baseline.get("way"):
            (gains if e.status == KEEP else points).append((e.number, gain(e.model)))
    last = max([1, *(e.number for e in experiments)])
    gains.append((last, gains[-1][1]))
    curves = _curve("Displaced coverage", coverage, [], last, 1.0, "{:.0%}")
    top = 1.1 * max(value for _, value in (*gains, *points))
    curves += _curve("Throughput over the unpatched model's", gains, points, last, top, "{:.2f}x")
    rows = "".join(
        f"<tr><td>{e.number}</td><td>{e.status}</td><td>{html.escape(e.name)}</td>"
        f"<td>{html.escape(_line(e.description))}</td></tr>"
        for e in experiments
    )
    style = "body{font:15px sans-serif;margin:2em;max-width:60em}td{padding:2px 12px 2px 0;vertical-align:top}"
    return (
        f"<!doctype html><meta charset='utf-8'><title>Auto-kernelize</title><style>{style}</style>"
        f"<h1>Auto-kernelize</h1>{curves}<table>{rows}</table>\n"
    )


def _curve(title: str, line: list, points: list, last: int, top: float, form: str) -> str:
    def place(number: int, value: float) -> tuple[float, float]:
        x = _MARGIN + (_WIDTH - 2 * _MARGIN) * number / last
        return round(x, 1), round(_HEIGHT - _MARGIN - (_HEIGHT - 2 * _MARGIN) * value / (top or 1.0), 1)

    steps, former = [], None
    for number, value in line:
        if former is not None:
            steps.append(place(number, former))
        steps.append(place(number, value))
        former = value
    drawn = " ".join(f"{x},{y}" for x, y in steps)
    dots = "".join(
        f"<circle cx='{x}' cy='{y}' r='3' fill='#b44'/>" for x, y in (place(n, value) for n, value in points)
    )
    low, high = place(0, 0.0), place(last, top)
    frame = f"<polyline points='{low[0]},{high[1]} {low[0]},{low[1]} {high[0]},{low[1]}' fill='none' stroke='#888'/>"
    labels = (
        f"<text x='4' y='{high[1] + 4}'>{form.format(top)}</text><text x='4' y='{low[1]}'>{form.format(0)}</text>"
        f"<text x='{high[0]}' y='{low[1] + 18}'>{last}</text>"
    )
    return (
        f"<h2>{title}</h2><svg viewBox='0 0 {_WIDTH} {_HEIGHT}' width='{_WIDTH}' font-size='12'>{frame}{labels}"
        f"<polyline points='{drawn}' fill='none' stroke='#27c' stroke-width='2'/>{dots}</svg>"
    )


def write_trace(folder: Path, experiment: Experiment, device: str) -> None:
    """Writes the experiment as FlashInfer-Bench's Trace, to ``<number>.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / f"{experiment.number}.json", trace(experiment, device).to_json())


def trace(experiment: Experiment, device: str) -> Trace:
    """The Trace of an experiment; everything that the gates found stands in its log."""
    definition, verdict = experiment.proposal.definition, experiment.verdict
    inputs = {
        name: ScalarInput(value=1) if spec.shape is None else RandomInput() for name, spec in definition.inputs.items()
    }
    name = f"{experiment.number} {experiment.commit_id}"
    workload = Workload(
        axes=dict.fromkeys(definition.var_axes, 1), inputs=inputs, uuid=str(uuid.uuid5(uuid.NAMESPACE_OID, name))
    )
    status = _OF_TRACES.get(experiment.status, "PASSED" if verdict.timing else "RUNTIME_ERROR")
    if status == "INCORRECT_NUMERICAL" and verdict.gate == "G8":
        status = "RUNTIME_ERROR"  # the kernel's own numbers were right
    correctness = Correctness(max_absolute_error=verdict.max_error)
    timing = verdict.timing
    kernel, plain = 1e3 * timing.get("kernel", 0.0), 1e3 * timing.get("reference", 0.0)
    performance = Performance(
        latency_ms=kernel, reference_latency_ms=plain, speedup_factor=plain / kernel if kernel else 0.0
    )
    found = machine.describe()
    libs = {name: str(found[name]) for name in ("torch", "tilegym", "cuda_tile", "transformers") if found.get(name)}
    log = {
        "gates": [[g.gate, g.passed, g.detail[:500], round(g.seconds, 3)] for g in verdict.gates],
        "status": experiment.status,
        "model": experiment.model,
        "confined": verdict.confined,
        "device": device,
    }
    evaluation = Evaluation(
        status=status,
        environment=Environment(hardware=str(found["device_name"]), libs=libs),
        timestamp=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        log=json.dumps(log),
        correctness=correctness if status in ("PASSED", "INCORRECT_NUMERICAL") else None,
        performance=performance if status == "PASSED" else None,
    )
    return Trace(
        definition=definition.name, workload=workload, solution=experiment.proposal.solution.name, evaluation=evaluation
    )

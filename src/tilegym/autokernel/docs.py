"""Puts measured runs into docs/autokernel.md: ``python -m tilegym.autokernel.docs FOLDER ... [--generated FILE]``.

A folder is what a run left behind (``out/autokernel/RUN``); the file is what ``bench_generated.py`` wrote. The text
between two marks in the page is replaced.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tilegym.autokernel.ledger import KEEP
from tilegym.autokernel.ledger import Ledger
from tilegym.autokernel.report import gain
from tilegym.autokernel.report import times as gains
from tilegym.autokernel.report import way
from tilegym.errors import AutokernelError

PAGE = Path(__file__).parents[3] / "docs" / "autokernel.md"
BEGIN, END = "<!-- measured: written by tilegym.autokernel.docs -->", "<!-- end of what was measured -->"

_HEADER = (
    "experiment",
    "region",
    "proposer",
    "status",
    "kernel, ms a run",
    "PyTorch, ms a run",
    "coverage",
    "tokens/s",
    "x unpatched",
)


def run_section(folder: Path) -> list[str]:
    """A run in Markdown: both curves and what was tried, by experiment.

    Raises:
        AutokernelError: there is no ledger with a baseline in ``folder``.
    """
    path = folder / "ledger.sqlite"
    ledger = Ledger(path) if path.is_file() else None
    baseline = ledger.fact("baseline") if ledger else None
    if baseline is None:
        raise AutokernelError(f"{folder} holds no ledger with a baseline: give the folder of a run, out/autokernel/RUN")
    settings, machine = ledger.fact("settings"), ledger.fact("machine") or {}
    model = settings["model"]
    finished = [e for e in ledger.experiments() if e.state == "finished"]
    kept = [e for e in finished if e.status == KEEP]
    coverage = max([0.0, *(e.coverage or 0.0 for e in finished)])
    comparable = [e for e in kept if e.model.get("way") == baseline.get("way") and gain(e.model)]
    best = comparable[-1].throughput if comparable else baseline["throughput"]
    ratio = gain(comparable[-1].model) if comparable else 1.0
    how = ", ".join([f"{ratio:.2f}x", *filter(None, [way(baseline)]), "in the same turns"])
    seconds = ledger.fact("seconds") or 0.0
    device, date = machine.get("device_name") or "", (machine.get("date") or "")[:10]
    where = ", ".join(filter(None, (device, date)))
    lines = [
        f"### {model['spec']['model_id']}",
        "",
        f"{where + ': ' if where else ''}{model['spec']['precision']}, prompts of {model['input_length']} tokens and"
        f" more, {model['output_length']} generated; {len(finished)} experiments in {seconds / 60:.0f} minutes,"
        f" {len(kept)} kept. Displaced coverage {coverage:.1%}; throughput {best / ratio:.1f} to {best:.1f}"
        f" tokens/s ({how}), {baseline['noise']:.1%} being noise. Regions"
        f" together are {baseline['in_regions']:.1%} of the model's time.",
        "",
        _row(_HEADER),
        _row(["---"] * len(_HEADER)),
        _row(("0", "the unpatched model", "", "", "", "", "0.0%", f"{baseline['throughput']:.1f}", "1.00x")),
    ]
    for e in finished:
        timing = e.verdict.timing if e.verdict else {}
        status = e.status if e.status == KEEP else f"{e.status}, {e.gate}"
        times = [f"{1e3 * timing[name]:.3f}" if name in timing else "" for name in ("kernel", "reference")]
        throughput = "" if e.throughput is None else f"{e.throughput:.1f}"
        region = e.region.rpartition(".")[2]
        found = f"{e.coverage or 0:.1%}", throughput, gains(e.model)
        lines.append(_row((str(e.number), region, e.proposer, status, *times, *found)))
    return [*lines, ""]


def generated_section(found: dict[str, Any]) -> list[str]:
    """The comparison with torch.compile in Markdown."""
    right = [row for row in found["rows"] if row.get("correct")]
    means = ", ".join(f"{what} {value:.2f}x" for what, value in found["means"].items() if value)
    machine = found["machine"]
    lines = [
        "### Generated kernels and torch.compile",
        "",
        f"{machine['device_name']}, {machine['date'][:10]}, torch {machine.get('torch')}: the time of torch.compile's"
        f" code over that of the generated kernels, a cold cache, bf16. Geometric means: {means}. {len(right)} of"
        f" {len(found['rows'])} figures are of results that are right, and only these are here.",
        "",
        _row(("region", "tokens", "pass", "generated, us", "torch.compile, us", "ratio")),
        _row(["---"] * 6),
    ]
    rows = sorted(right, key=lambda row: (row["pass"] != "forward", row["region"], row["tokens"]))
    for row in rows:
        times = f"{row['generated_us']:.1f}", f"{row['compile_us']:.1f}", f"{row['ratio']:.2f}"
        lines.append(_row((row["region"], str(row["tokens"]), row["pass"], *times)))
    return [*lines, ""]


def _row(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def write(page: Path, folders: list[Path], generated: Path | None) -> None:
    """Replaces what stands between the marks of ``page``.

    Raises:
        AutokernelError: the page has no marks, or a folder no run.
    """
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise AutokernelError(f"{page} has no place for what was measured: it has to hold {BEGIN} and {END}")
    lines = [line for folder in folders for line in run_section(folder)]
    if generated is not None:
        try:
            rows = json.loads(generated.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = f"it has to be the JSON that tests/benchmark/bench_generated.py wrote: {error}"
            raise AutokernelError(f"--generated {generated}: {reason}") from error
        lines += generated_section(rows)
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text("\n".join([before + BEGIN, "", *lines, END]) + after, encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Entry point."""
    generated = None
    if "--generated" in arguments:
        at = arguments.index("--generated")
        if at + 1 == len(arguments):
            sys.exit("error: --generated wants the JSON file that tests/benchmark/bench_generated.py wrote")
        generated = Path(arguments[at + 1])
        arguments = arguments[:at] + arguments[at + 2 :]
    if {"-h", "--help"} & set(arguments) or (not arguments and generated is None):
        sys.exit(__doc__)
    try:
        write(PAGE, [Path(folder) for folder in arguments], generated)
    except AutokernelError as error:
        sys.exit(f"error: {error}")
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main(sys.argv[1:])

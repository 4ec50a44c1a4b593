"""``tilegym infer``: run a Hugging Face causal language model, with and without TileGym's kernels."""

import contextlib
import json
import sys
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from tilegym import interrupts
from tilegym.bench import job
from tilegym.bench import models
from tilegym.bench import terminal
from tilegym.bench.compare import CRITERION
from tilegym.bench.prompts import TEXT
from tilegym.errors import ModelError
from tilegym.errors import TileGymError

EXIT_DISAGREE = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


# Options that `tilegym train` has, too.
MODEL_ID = typer.Option(
    ...,
    "--model_id",
    help="Hub id or local folder; with --random_weights also a config file or a preset: " + ", ".join(models.presets()),
)
RANDOM_WEIGHTS = typer.Option(False, "--random_weights", help="Build from the config; download no weights.")
USE_TILEGYM = typer.Option(False, "--use_tilegym", help="Patch the model with TileGym's ops.")
USE_CUTILE = typer.Option(
    False, "--use_cutile", help="Take the cuTile kernels; without a supported GPU the pytorch backend, and say so."
)
USE_ATTN = typer.Option(False, "--use_attn", help="Patch attention too.")
INTERPRET = typer.Option(
    False, "--interpret", help="Run the cuTile kernels on the CPU, in the interpreter: exact, but slow."
)
REPORT_KERNEL_COVERAGE = typer.Option(
    False,
    "--report_kernel_coverage",
    help="The share of GPU time in TileGym's own kernels; on a CPU, of the time in dispatched ops.",
)
TRUST_REMOTE_CODE = typer.Option(
    False, "--trust-remote-code", "--trust_remote_code", help="Run code that comes with the model. Read it first."
)
SUMMARY_FILE = typer.Option(None, "--summary_file", help="Write all results to this file, as JSON.")
AS_JSON = typer.Option(False, "--json", help="Print all results as JSON to stdout, and nothing else there.")


def infer(
    model_id: str = MODEL_ID,
    random_weights: bool = RANDOM_WEIGHTS,
    use_tilegym: bool = USE_TILEGYM,
    use_cutile: bool = USE_CUTILE,
    use_attn: bool = USE_ATTN,
    interpret: bool = INTERPRET,
    compare: bool = typer.Option(
        False,
        "--compare",
        help="Run the unpatched model too; exit status 1 if the two disagree. Alone it stands for all --use_* flags. "
        f"Criterion: {CRITERION}.",
    ),
    input_text: str | None = typer.Option(None, "--input_text", help=f"The prompt. Default: {TEXT}"),
    sentence_file: Path | None = typer.Option(None, "--sentence_file", help="A text file with one prompt a line."),
    input_length: int | None = typer.Option(
        None, "--input_length", min=1, help="Cut or repeat every prompt to this many tokens."
    ),
    output_length: int = typer.Option(64, "--output_length", min=1, help="New tokens of each sequence, end or no end."),
    batch_size: int | None = typer.Option(
        None, "--batch_size", min=1, help="Sequences at a time; fewer prompts are repeated. Default: all prompts."
    ),
    image: list[str] = typer.Option(
        [],
        "--image",
        help="A picture before every prompt, of a model that reads them: a file, or a size such as 896x896 for noise. "
        "May be repeated.",
    ),
    gpus: int = typer.Option(
        1, "--gpus", min=1, help="Spread the layers over so many GPUs; with more than one, accelerate has to be there."
    ),
    precision: str = typer.Option("bfloat16", "--precision", help=", ".join(models.PRECISIONS)),
    num_runs: int = typer.Option(3, "--num_runs", min=1, help="Timed runs."),
    warmup_runs: int = typer.Option(
        2,
        "--warmup_runs",
        min=0,
        help="Runs before them that do not count: the first compiles, the second is recorded.",
    ),
    show_outputs: bool = typer.Option(False, "--show_outputs", help="Print the generated text."),
    peer: str | None = typer.Option(
        None,
        "--peer",
        help="Measure the unpatched model with this too: compile (transformers' static cache, with which it compiles "
        "decoding on a GPU).",
    ),
    profile: bool = typer.Option(
        False, "--profile", help=f"Profile one run: a table, and a Chrome trace in {job.PROFILE_DIR}/."
    ),
    report_kernel_coverage: bool = REPORT_KERNEL_COVERAGE,
    trust_remote_code: bool = TRUST_REMOTE_CODE,
    summary_file: Path | None = SUMMARY_FILE,
    as_json: bool = AS_JSON,
) -> None:
    """Run a Hugging Face model, with and without TileGym's kernels, and measure it.

    Exit status: 0 all well; 1 patched and unpatched disagree; 2 the input cannot be used; 130 interrupted.
    """
    if compare and not (use_tilegym or use_cutile or use_attn):
        use_tilegym = use_cutile = use_attn = True
    options = job.Options(
        model_id=model_id,
        random_weights=random_weights,
        use_tilegym=use_tilegym,
        use_cutile=use_cutile,
        use_attn=use_attn,
        interpret=interpret,
        compare=compare,
        input_text=input_text,
        sentence_file=sentence_file,
        input_length=input_length,
        output_length=output_length,
        batch_size=batch_size,
        image=tuple(image),
        gpus=gpus,
        precision=precision,
        num_runs=num_runs,
        warmup_runs=warmup_runs,
        peer=peer,
        profile=profile,
        report_kernel_coverage=report_kernel_coverage,
        trust_remote_code=trust_remote_code,
    )
    run(options, lambda result, console: terminal.show(result, console, show_outputs), as_json, summary_file)


def run(
    options: job.ModelOptions,
    show: Callable[[Any, Console], None],
    as_json: bool,
    summary_file: Path | None = None,
    work: Callable[[Any, Callable[[str], None]], Any] = job.run_job,
) -> None:
    """Does a command's ``work``: progress and warnings go to stderr, what ``show`` prints of the result, or its JSON,
    to stdout; ends the process with the statuses of :func:`infer`."""
    # Width: a pipe has none, and 80 columns would cut the tables.
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 120)
    progress = Console(stderr=True)

    def tell(line: str) -> None:
        progress.print(f"[dim]... {escape(line)}[/dim]", highlight=False, soft_wrap=True)

    try:
        if summary_file is not None:
            _check_writable(summary_file)
        with interrupts.Interrupts(), models.quiet_transformers(), _warnings_told(tell):
            result = work(options, tell)
        show(result, console)
        summary = json.dumps(result.summary(), indent=2, allow_nan=False)
        if summary_file is not None:
            _write(summary_file, summary + "\n")
            console.print(f"results written to {summary_file}", highlight=False, soft_wrap=True)
    except TileGymError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        print(summary)
    if result.failed:
        raise typer.Exit(EXIT_DISAGREE)


def _check_writable(path: Path) -> None:
    """Raises ModelError now, not after minutes of work, if ``path`` cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        with path.open("a"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:  # a full disk shows only now
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"--summary_file {path} cannot be written: {error.strerror}; name another file")


@contextlib.contextmanager
def _warnings_told(tell: Callable[[str], None]) -> Iterator[None]:
    """Shows warnings as lines of progress, without the source line they came from."""

    def show(message: Any, *_: Any, **__: Any) -> None:
        tell(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        # Ctrl-C within cuTile's front end leaves such.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        yield

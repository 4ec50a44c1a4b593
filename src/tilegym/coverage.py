"""``tilegym coverage``: how much of a model's work TileGym's kernels do, kernel by kernel."""

import typer

from tilegym import infer
from tilegym.bench import job
from tilegym.bench import models
from tilegym.bench import terminal
from tilegym.bench.prompts import TEXT


def coverage(
    model_id: str = typer.Argument(
        metavar="MODEL", help="Hub id or local folder; with --random-weights also a config file or a preset."
    ),
    random_weights: bool = typer.Option(
        False, "--random-weights", "--random_weights", help="Build from the config; download no weights."
    ),
    input_text: str | None = typer.Option(None, "--input-text", "--input_text", help=f"The prompt. Default: {TEXT}"),
    input_length: int | None = typer.Option(
        None, "--input-length", "--input_length", min=1, help="Cut or repeat the prompt to this many tokens."
    ),
    output_length: int = typer.Option(32, "--output-length", "--output_length", min=1, help="New tokens."),
    precision: str = typer.Option("bfloat16", help=", ".join(models.PRECISIONS)),
    interpret: bool = typer.Option(False, "--interpret", help="Run the cuTile kernels on the CPU, in the interpreter."),
    trust_remote_code: bool = typer.Option(
        False, "--trust-remote-code", "--trust_remote_code", help="Run code that comes with the model. Read it first."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print all results as JSON to stdout, and nothing else there."),
) -> None:
    """Patch a model with all kernels, generate once, and tell which share of the time each kernel took.

    On a GPU the share of GPU time, by the kernels' symbols; on a CPU that of the time in dispatched ops. The same as
    ``tilegym infer --use_tilegym --use_cutile --use_attn --report_kernel_coverage``, without the timed runs.
    Exit status: 0 all well; 2 the input cannot be used.
    """
    options = job.Options(
        model_id=model_id,
        random_weights=random_weights,
        use_tilegym=True,
        use_cutile=True,
        use_attn=True,
        interpret=interpret,
        input_text=input_text,
        input_length=input_length,
        output_length=output_length,
        precision=precision,
        num_runs=1,
        warmup_runs=1,
        report_kernel_coverage=True,
        trust_remote_code=trust_remote_code,
    )
    infer.run(options, terminal.show_coverage, as_json)

"""``tilegym train``: training steps of a Hugging Face causal language model, with and without TileGym's kernels."""

from pathlib import Path

import typer

from tilegym import infer
from tilegym.bench import train_job
from tilegym.bench import train_peer
from tilegym.bench import train_terminal
from tilegym.bench import training
from tilegym.bench.gradients import CRITERION


def train(
    model_id: str = infer.MODEL_ID,
    random_weights: bool = infer.RANDOM_WEIGHTS,
    num_layers: int | None = typer.Option(
        None, "--num_layers", min=1, help="Cut the model to its first so many layers, so that a large one fits."
    ),
    use_tilegym: bool = infer.USE_TILEGYM,
    use_cutile: bool = infer.USE_CUTILE,
    use_attn: bool = infer.USE_ATTN,
    interpret: bool = infer.INTERPRET,
    compare: bool = typer.Option(
        False,
        "--compare",
        help="Run the unpatched model too; exit status 1 if gradients disagree. Alone it stands for all --use_* flags. "
        f"Criterion: {CRITERION}.",
    ),
    peer: str | None = typer.Option(
        None,
        "--peer",
        help=f"Measure another library's kernels too, if it is installed: {', '.join(train_peer.PEERS)}.",
    ),
    input_text: str | None = typer.Option(
        None, "--input_text", help="The text to train on. Without any: random tokens, the same batch in every step."
    ),
    sentence_file: Path | None = typer.Option(None, "--sentence_file", help="A text file with one sequence a line."),
    batch_size: int = typer.Option(4, "--batch_size", min=1, help="Sequences of a step; fewer texts are repeated."),
    sequence_length: int = typer.Option(
        2048, "--sequence_length", min=2, help="Cut or repeat every sequence to this many tokens."
    ),
    steps: int = typer.Option(10, "--steps", min=1, help="Timed steps."),
    warmup_steps: int = typer.Option(
        3, "--warmup_steps", min=0, help="Steps before them that do not count: the first compiles and tunes."
    ),
    precision: str = typer.Option("bfloat16", "--precision", help="Of weights and computation: bfloat16, float32."),
    optimizer: str = typer.Option(training.ADAMW, "--optimizer", help=", ".join(training.OPTIMIZERS)),
    learning_rate: float = typer.Option(5e-5, "--learning_rate", help="Of the optimizer."),
    gradient_checkpointing: bool = typer.Option(
        False, "--gradient_checkpointing", help="Compute the layers' activations again instead of keeping them."
    ),
    gradients_in_place: bool = typer.Option(
        False, "--gradients_in_place", help="Patched: write gradients over activations (set_gradients_in_place)."
    ),
    graph: bool = typer.Option(
        False, "--graph", help="Patched: replay the passes through the layers as CUDA graphs (graph_training)."
    ),
    compile_layers: bool = typer.Option(
        False, "--compile", help="All variants: compile the model's layers with torch.compile (layer.compile())."
    ),
    report_kernel_coverage: bool = infer.REPORT_KERNEL_COVERAGE,
    trust_remote_code: bool = infer.TRUST_REMOTE_CODE,
    summary_file: Path | None = infer.SUMMARY_FILE,
    as_json: bool = infer.AS_JSON,
) -> None:
    """Train a Hugging Face model for some steps, with and without TileGym's kernels, and measure them.

    Every variant begins with the same weights and sees the same batches; the text is its own label.
    Exit status: 0 all well; 1 the patched gradients are wrong; 2 the input cannot be used; 130 interrupted.
    """
    if compare and not (use_tilegym or use_cutile or use_attn):
        use_tilegym = use_cutile = use_attn = True
    options = train_job.Options(
        model_id=model_id,
        random_weights=random_weights,
        num_layers=num_layers,
        use_tilegym=use_tilegym,
        use_cutile=use_cutile,
        use_attn=use_attn,
        interpret=interpret,
        compare=compare,
        peer=peer,
        input_text=input_text,
        sentence_file=sentence_file,
        batch_size=batch_size,
        sequence_length=sequence_length,
        steps=steps,
        warmup_steps=warmup_steps,
        precision=precision,
        optimizer=optimizer,
        learning_rate=learning_rate,
        gradient_checkpointing=gradient_checkpointing,
        gradients_in_place=gradients_in_place,
        graph=graph,
        compile=compile_layers,
        report_kernel_coverage=report_kernel_coverage,
        trust_remote_code=trust_remote_code,
    )
    infer.run(options, train_terminal.show, as_json, summary_file, train_job.run_job)

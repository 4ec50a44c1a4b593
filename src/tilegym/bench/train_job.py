"""Trains a model for some steps as it is, with TileGym's kernels, and with a peer's, and says what came of it."""

import contextlib
import math
import os
import shutil
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import torch

import tilegym
from tilegym.bench import gradients
from tilegym.bench import job
from tilegym.bench import models
from tilegym.bench import prompts
from tilegym.bench import train_peer
from tilegym.bench import training
from tilegym.bench.compare import plain
from tilegym.bench.compare import release
from tilegym.bench.coverage import Coverage
from tilegym.bench.coverage import measure_coverage
from tilegym.errors import ModelError

Tell = Callable[[str], None]

SMALLER = (
    "take a smaller --batch_size, --sequence_length or --num_layers, --gradient_checkpointing, --gradients_in_place, "
    "or --optimizer none"
)


@dataclass(frozen=True, kw_only=True)
class Options(job.ModelOptions):
    """What to train on and how; the command line's flags without their dashes."""

    peer: str | None = None
    input_text: str | None = None
    sentence_file: Path | None = None
    batch_size: int = 4
    sequence_length: int = 2048
    num_layers: int | None = None
    steps: int = 10
    warmup_steps: int = 3
    optimizer: str = training.ADAMW
    learning_rate: float = 5e-5
    gradient_checkpointing: bool = False
    gradients_in_place: bool = False
    graph: bool = False
    compile: bool = False

    def check(self) -> None:
        """Raises ModelError if the flags contradict each other, or name what is not there."""
        super().check()
        if self.gradients_in_place and not self.use_tilegym:
            raise ModelError("--gradients_in_place does nothing without --use_tilegym: add --use_tilegym")
        if self.graph and not self.use_attn:
            raise ModelError("--graph does nothing without --use_tilegym and --use_attn: add both")
        if self.graph and self.gradient_checkpointing:
            raise ModelError("--graph keeps what --gradient_checkpointing computes again: leave one of them out")
        if self.dtype is torch.float16:
            raise ModelError(
                "training in float16 needs a scaled loss, which there is none of: take --precision bfloat16 or float32"
            )
        if self.optimizer not in training.OPTIMIZERS:
            raise ModelError(f"--optimizer {self.optimizer!r} is none of {', '.join(training.OPTIMIZERS)}")
        if not 0 < self.learning_rate < math.inf:
            raise ModelError(f"--learning_rate {self.learning_rate} is no rate: give a number above 0, such as 5e-5")
        if self.peer is not None:
            train_peer.check(self.peer)


@dataclass
class Result:
    """What a job found. ``unpatched``, ``patched`` and ``peer`` are None where that variant was not run."""

    options: Options
    device: torch.device
    backend: str | None
    model: dict[str, Any]
    notices: list[str] = field(default_factory=list)
    patches: Any | None = None
    unpatched: training.Measurement | None = None
    patched: training.Measurement | None = None
    coverage: Coverage | None = None
    check: gradients.Check | None = None
    peer: dict[str, Any] | None = None

    @property
    def largest_loss_difference(self) -> float | None:
        """Between the unpatched and the patched model, of all steps."""
        if self.unpatched is None or self.patched is None:
            return None
        return max(loss_differences(self.unpatched.losses, self.patched.losses))

    @property
    def failed(self) -> bool:
        return self.check is not None and not (self.check.passed and math.isfinite(self.largest_loss_difference))

    @property
    def reason(self) -> str:
        """Why the patched model passes, or does not."""
        if self.failed and self.check.passed:
            return "the losses of one of the two models are not finite, the other's are"
        return self.check.reason

    def summary(self) -> dict[str, Any]:
        """Everything as plain data, for ``--json`` and ``--summary_file``."""
        options = self.options
        return {
            "tilegym": tilegym.__version__,
            "torch": torch.__version__,
            "device": job.device_name(self.device),
            "backend": self.backend,
            "interpreted": options.interpret,
            "model": self.model,
            "num_layers": options.num_layers,
            "precision": options.dtype_name,
            "batch_size": options.batch_size,
            "sequence_length": options.sequence_length,
            "steps": options.steps,
            "warmup_steps": options.warmup_steps,
            "optimizer": options.optimizer,
            "learning_rate": options.learning_rate,
            "gradient_checkpointing": options.gradient_checkpointing,
            "gradients_in_place": options.gradients_in_place,
            "graph": options.graph,
            "compile": options.compile,
            "notices": self.notices,
            "patched_modules": job.entries(self.patches, "patched"),
            "skipped_modules": job.entries(self.patches, "skipped"),
            "unpatched": self.unpatched.summary() if self.unpatched else None,
            "patched": self.patched.summary() if self.patched else None,
            "peer": self.peer,
            "kernel_coverage": self.coverage.summary() if self.coverage else None,
            "largest_loss_difference": plain(self.largest_loss_difference),
            "gradient_check": self.check.summary() if self.check else None,
            "passed": not self.failed if self.check else None,
            "reason": self.reason if self.check else None,
        }


def loss_differences(these: list[float], those: list[float]) -> list[float]:
    """Step by step; what is not finite is infinitely far off, unless it is in both."""
    return [
        0.0 if not math.isfinite(a) and not math.isfinite(b) else abs(a - b) if math.isfinite(a - b) else math.inf
        for a, b in zip(these, those, strict=True)
    ]


def run_job(options: Options, tell: Tell = lambda line: None) -> Result:
    """Runs the job; ``tell`` gets a line whenever a step that takes time begins or ends.

    Raises:
        ModelError: the input cannot be used; the message is one sentence with the remedy.
    """
    options.check()
    device, backend, notice = job.choose_device(options)
    if options.compile and device.type == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        raise ModelError("--compile on a CPU needs a C++ compiler: install g++, set CXX, or leave out --compile")
    config = load_config(options, device)
    job.tell_of_patch(config, options, tell)
    tell(f"{'building' if options.random_weights else 'loading'} {options.model_id} on {job.device_name(device)}")
    with models.out_of_memory_is_explained(device, SMALLER):
        session = Session(options, config, device)
        result = Result(options, device, backend, session.description, session.notices)
        result.notices += [notice] if notice else []
        with job.fallbacks_noted(result.notices):
            _own_variants(session, result, tell)
    if options.peer is not None:
        session.end()
        result.peer = train_peer.run(options, tell)
    return result


def run_peer(options: Options, tell: Tell) -> dict[str, Any]:
    """What ``options.peer`` makes of the same job, in this process, which it patches for good: plain data."""
    device, _, _ = job.choose_device(options)
    with models.out_of_memory_is_explained(device, SMALLER):
        session = Session(options, load_config(options, device), device)
        checked = _unpatched_errors(session, lambda line: None) if options.compare else None
        version = train_peer.patch(options.peer, session.model)
        with session.compiled():
            check = checked[0].judge(checked[1], checked[0].errors(session.model), options.dtype) if checked else None
            del checked
            measured = session.measure(options.peer, tell)
    return {
        "name": options.peer,
        "version": version,
        "error": None,
        "measurement": measured.summary(),
        "gradient_check": check.summary() if check else None,
    }


def load_config(options: Options, device: torch.device) -> Any:
    """The model's config, cut to ``--num_layers``.

    Raises:
        ModelError: there is no such model; a sequence is too long for it; or the device is too small for it.
    """
    from tilegym.integrate.steps import refuse_encoder

    config = models.load_config(options.model_id, options.random_weights, options.trust_remote_code)
    refuse_encoder(config, options.model_id, options.trust_remote_code)
    if options.num_layers is not None:
        models.cut_layers(config, options.num_layers)
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and options.sequence_length > limit:
        raise ModelError(
            f"--sequence_length {options.sequence_length} exceeds the model's {limit} positions: take at most these"
        )
    models.check_training_memory(config, options.dtype, device, options.optimizer == training.ADAMW)
    return config


class Session:
    """A model in training mode, the batches of its steps, and the weights with which every variant begins."""

    def __init__(self, options: Options, config: Any, device: torch.device) -> None:
        self.options = options
        off = _drop_nothing(config)
        self.notices = [f"{' and '.join(off)} of the model is off: all variants are to compute the same"] if off else []
        trusted = options.trust_remote_code
        loaded = models.load(
            options.model_id, options.dtype, device, options.random_weights, config, trust_remote_code=trusted
        )
        self.description = job.describe(loaded)
        self.model = loaded.model.train()
        if options.gradient_checkpointing:
            _checkpoint(self.model, options.model_id)
        self.batches = [batch.to(device) for batch in _batches(options, loaded.tokenizer, config)]
        self._parameters = list(self.model.parameters())
        changed = options.optimizer != training.NO_OPTIMIZER
        self._weights = [p.detach().to("cpu", copy=True) for p in self._parameters] if changed else None

    @torch.no_grad()
    def restart(self) -> None:
        """Gives the model its first weights again, and the memory that a variant leaves behind back to the device."""
        if self._weights is not None:
            for parameter, weights in zip(self._parameters, self._weights, strict=True):
                parameter.copy_(weights)
        release(self.model.device)

    def end(self) -> None:
        """Gives the device its memory back, for another process, although the report of patches holds the model."""
        for parameter in self._parameters:
            parameter.data = parameter.data.new_empty(0)
        release(self.model.device)

    @contextlib.contextmanager
    def compiled(self) -> Iterator[None]:
        """With ``--compile``: within the block the layers are compiled, those that are alike once."""
        if not self.options.compile:
            yield
            return
        from transformers.modeling_layers import GradientCheckpointingLayer

        layers = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not layers:
            name = type(self.model).__name__
            raise ModelError(f"transformers marks no modules of {name} as its layers: leave out --compile")
        for layer in layers:
            layer.compile()
        try:
            yield
        finally:
            for layer in layers:
                vars(layer).pop("_compiled_call_impl", None)
            torch.compiler.reset()

    def trainer(self) -> training.Trainer:
        return training.Trainer(self.model, self.batches, self.options.optimizer, self.options.learning_rate)

    def measure(self, label: str, tell: Tell) -> training.Measurement:
        """Steps from the first weights on."""
        options = self.options
        tell(f"{label}: {options.warmup_steps} warm-up and {options.steps} timed steps")
        release(self.model.device)
        measured = training.measure(self.trainer(), options.steps, options.warmup_steps)
        self.restart()
        tell(f"{label}: {measured.summary()['step_ms']:.1f} ms a step")
        return measured


def _own_variants(session: Session, result: Result, tell: Tell) -> None:
    """Measures, and with ``--compare`` checks, the model unpatched and patched."""
    options, model, checked = session.options, session.model, None
    if not options.use_tilegym or options.compare:
        with job.failures_are_the_models(options.model_id, "train"):
            checked = _unpatched_errors(session, tell) if options.compare else None
            with session.compiled():
                result.unpatched = session.measure("unpatched", tell)
    if not options.use_tilegym:
        with session.compiled():
            _observe(session, result, tell)
        return
    in_place = tilegym.set_gradients_in_place(True) if options.gradients_in_place else contextlib.nullcontext()
    if options.graph and result.device.type != "cuda":
        result.notices.append("--graph: steps are replayed on a GPU only")
    graph = tilegym.graph_training if options.graph else contextlib.nullcontext
    with job.patched(model, options, result.backend) as result.patches, in_place, session.compiled(), graph(model):
        if checked is not None:
            tell("TileGym: loss and gradients")
            (oracle, errors), checked = checked, None
            for _ in range(2 * options.graph):  # from the third on they are replayed
                oracle.errors(model)
            result.check = oracle.judge(errors, oracle.errors(model), model.dtype)
            del oracle
        result.patched = session.measure("TileGym", tell)
        _observe(session, result, tell)


def _unpatched_errors(session: Session, tell: Tell) -> tuple[gradients.Oracle, gradients.Errors]:
    """What is right, of the first batch or as much of it as there is memory for, and the unpatched model's errors."""
    tell("unpatched: loss and gradients, in a higher precision too")
    oracle = gradients.Oracle.of(session.model, session.batches[0])
    return oracle, oracle.errors(session.model)


def _observe(session: Session, result: Result, tell: Tell) -> None:
    """A step for coverage, apart from the timed ones, which observation would slow."""
    if session.options.report_kernel_coverage:
        tell("measuring kernel coverage")
        result.coverage = measure_coverage(session.trainer().step, result.device)
        session.restart()


def _batches(options: Options, tokenizer: Any | None, config: Any) -> list[prompts.Batch]:
    """The batches of the steps: of the text, each sequence as long as asked for; without a text one of random tokens.

    Sequences that do not fill a batch are left out.
    """
    rows, length = options.batch_size, options.sequence_length
    config = config.get_text_config(decoder=True)
    if options.input_text is None and options.sentence_file is None:
        return [prompts.random_batch(rows, length, config.vocab_size)]
    texts = prompts.read_prompts(options.input_text, options.sentence_file)
    batches = prompts.make_batches(texts, tokenizer, config, rows, length)
    return [batch for batch in batches if batch.size == rows]


def _drop_nothing(config: Any) -> list[str]:
    """Sets every rate of dropout in ``config`` to 0; returns the names of those that were not."""
    text = config.get_text_config(decoder=True)
    rates = [name for name, value in vars(text).items() if "drop" in name and isinstance(value, float) and value > 0]
    for name in rates:
        setattr(text, name, 0.0)
    return rates


def _checkpoint(model: Any, model_id: str) -> None:
    """Lets the layers of ``model`` compute their activations again in the backward pass, instead of keeping them."""
    # The second is the first's name in versions of transformers before it.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except ValueError as error:
        raise ModelError(
            f"transformers cannot checkpoint {model_id} ({models.first_sentence(error)}): "
            "leave out --gradient_checkpointing"
        ) from error

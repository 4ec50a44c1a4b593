"""The main job: run a model as it is, with TileGym's kernels, or both, and say what came of it."""

import contextlib
import inspect
import platform
import tempfile
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import torch

import tilegym
from tilegym.backend import selector
from tilegym.backend import use_backend
from tilegym.bench import generate
from tilegym.bench import generate_peer
from tilegym.bench import images
from tilegym.bench import models
from tilegym.bench import placement
from tilegym.bench import prompts
from tilegym.bench.compare import Comparison
from tilegym.bench.compare import collect_logits
from tilegym.bench.compare import compare
from tilegym.bench.compare import compared_steps
from tilegym.bench.coverage import Coverage
from tilegym.bench.coverage import measure_coverage
from tilegym.bench.coverage import profile_run
from tilegym.errors import FallbackWarning
from tilegym.errors import ModelError

PROFILE_DIR = Path("out")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model to run, and with which kernels; the command line's flags without their dashes."""

    model_id: str
    random_weights: bool = False
    use_tilegym: bool = False
    use_cutile: bool = False
    use_attn: bool = False
    interpret: bool = False
    compare: bool = False
    precision: str = "bfloat16"
    report_kernel_coverage: bool = False
    trust_remote_code: bool = False
    gpus: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return models.PRECISIONS[self.precision]

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def check(self) -> None:
        """Raises ModelError if the flags contradict each other."""
        for flag in ("use_cutile", "use_attn", "compare", "interpret"):
            if getattr(self, flag) and not self.use_tilegym:
                raise ModelError(f"--{flag} does nothing without --use_tilegym: add --use_tilegym")
        if self.interpret and not self.use_cutile:
            raise ModelError("--interpret runs the cuTile kernels: add --use_cutile")
        if self.precision not in models.PRECISIONS:
            raise ModelError(f"--precision {self.precision!r} is none of {', '.join(models.PRECISIONS)}")


@dataclass(frozen=True, kw_only=True)
class Options(ModelOptions):
    """What to generate."""

    input_text: str | None = None
    sentence_file: Path | None = None
    input_length: int | None = None
    output_length: int = 64
    batch_size: int | None = None
    image: tuple[str, ...] = ()
    num_runs: int = 3
    warmup_runs: int = 2
    profile: bool = False
    peer: str | None = None

    def check(self) -> None:
        super().check()
        if self.gpus > 1 and self.interpret:
            raise ModelError("--interpret runs on the CPU: leave out --gpus")
        placement.check(self.gpus)
        generate_peer.check(self.peer)
        images.check(self.image)


@dataclass
class Result:
    """What a job found. ``unpatched``, ``patched`` and ``peer`` are None where that side was not run."""

    options: Options
    device: torch.device
    backend: str | None
    model: dict[str, Any]
    batches: list[prompts.Batch]
    notices: list[str] = field(default_factory=list)
    patches: Any | None = None
    unpatched: generate.Measurement | None = None
    patched: generate.Measurement | None = None
    peer: generate_peer.Peer | None = None
    coverage: Coverage | None = None
    comparison: Comparison | None = None
    profile_table: str | None = None
    profile_file: Path | None = None
    outputs: list[dict[str, str]] = field(default_factory=list)

    @property
    def main(self) -> generate.Measurement:
        return self.patched or self.unpatched

    @property
    def failed(self) -> bool:
        return self.comparison is not None and not self.comparison.passed

    def summary(self) -> dict[str, Any]:
        """Everything as plain data, for ``--json`` and ``--summary_file``."""
        return {
            "tilegym": tilegym.__version__,
            "torch": torch.__version__,
            "device": device_name(self.device, self.options.gpus),
            "backend": self.backend,
            "interpreted": self.options.interpret,
            "model": self.model,
            "precision": self.options.dtype_name,
            "batch_sizes": [batch.size for batch in self.batches],
            "prompt_lengths": [batch.prompt_length for batch in self.batches],
            "images": list(self.options.image),
            "output_length": self.options.output_length,
            "num_runs": self.options.num_runs,
            "warmup_runs": self.options.warmup_runs,
            "notices": self.notices,
            "patched_modules": entries(self.patches, "patched"),
            "skipped_modules": entries(self.patches, "skipped"),
            "unpatched": self.unpatched.summary() if self.unpatched else None,
            "patched": self.patched.summary() if self.patched else None,
            "peer": self.peer.summary() if self.peer else None,
            "kernel_coverage": self.coverage.summary() if self.coverage else None,
            "comparison": self.comparison.summary() if self.comparison else None,
            "profile_file": str(self.profile_file) if self.profile_file else None,
            "outputs": self.outputs,
        }


def device_name(device: torch.device, gpus: int = 1) -> str:
    if device.type == "cuda":
        return f"{gpus} x {torch.cuda.get_device_name(device)}" if gpus > 1 else torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads)"


def choose_device(options: ModelOptions) -> tuple[torch.device, str | None, str | None]:
    """Where to run and with which backend: the device, the backend (None: unpatched), and a notice for the user."""
    device = torch.device("cuda" if torch.cuda.is_available() and not options.interpret else "cpu")
    if not options.use_tilegym:
        return device, None, None
    if options.interpret:
        selector.assert_backend_available("cutile")
        return device, "cutile", "the cuTile kernels run in the interpreter, on the CPU: exact, but slow"
    if not options.use_cutile:
        return device, selector.get_current_backend(), None
    default, why = selector.default_backend()
    if default == "cutile":
        return device, "cutile", None
    return (
        device,
        "pytorch",
        f"{why}, so TileGym's pytorch backend runs instead of the cuTile kernels; "
        "add --interpret to run them on the CPU (slow), or use a machine with a GPU that cuTile supports",
    )


@contextlib.contextmanager
def patched(model: Any, options: ModelOptions, backend: str) -> Iterator[Any]:
    """The model with TileGym's kernels on ``backend`` within the block; yields the report of what was patched."""
    from tilegym.transformers import monkey_patch

    with use_backend(backend):
        if _patch_of(model.config):
            report = monkey_patch.apply(model, use_cutile=backend == "cutile", use_attn=options.use_attn)
        else:
            flags = {} if options.use_attn else {"attn": False}
            report = tilegym.apply(model, use_cutile=backend == "cutile", **flags)
        try:
            yield report
        finally:
            report.revert()


def _patch_of(config: Any) -> str:
    """Where the patch for a model's family comes from: by hand, or the folder it was written to; "" without one.

    A folder is looked for where ``tilegym integrate`` puts it by default; patches in the package are found anyway.
    """
    from tilegym.integrate.plan import family_of
    from tilegym.transformers import generated
    from tilegym.transformers import monkey_patch

    if config.model_type in monkey_patch.FAMILIES:
        return "by hand"
    written = generated.find(config.model_type)
    folder = Path(f"tilegym_{family_of(config.model_type)}")
    if written is None and (folder / "__init__.py").is_file():
        generated.register(folder)
        written = generated.find(config.model_type)
    return str(Path(inspect.getfile(written)).parent) if written is not None else ""


def tell_of_patch(config: Any, options: ModelOptions, tell: Callable[[str], None]) -> None:
    """Tells which patch the model will get, where that is not one by hand."""
    if options.use_tilegym and not (source := _patch_of(config)):
        tell(f"no patch for {config.model_type}: its parts are found out and served where a kernel computes the same")
    elif options.use_tilegym and source != "by hand":
        tell(f"the patch for {config.model_type} is the one in {source}")


def run_job(options: Options, tell: Callable[[str], None] = lambda line: None) -> Result:
    """Runs the job; ``tell`` gets a line whenever a step that takes time begins or ends.

    Raises:
        ModelError: the input cannot be used; the message is one sentence with the remedy.
    """
    from tilegym.integrate.steps import refuse_encoder

    options.check()
    if options.profile:
        _check_profile_dir()
    texts = prompts.read_prompts(options.input_text, options.sentence_file)
    device, backend, notice = choose_device(options)
    dtype, trusted = options.dtype, options.trust_remote_code
    config = models.load_config(options.model_id, options.random_weights, trusted, bool(options.image))
    refuse_encoder(config, options.model_id, trusted)
    tell_of_patch(config, options, tell)
    # Before the prompts are repeated to fill the batch: at least this much.
    fewest = (options.input_length or 1) + options.output_length
    models.check_cache_memory(config, dtype, device, options.batch_size or 1, fewest, options.gpus)
    where = device_name(device, options.gpus)
    tell(f"{'building' if options.random_weights else 'loading'} {options.model_id} on {where}")
    loaded = models.load(
        options.model_id, dtype, device, options.random_weights, config, trust_remote_code=trusted,
        images=bool(options.image), gpus=options.gpus,
    )  # fmt: skip
    sizes, text_config = (options.batch_size, options.input_length), config.get_text_config(decoder=True)
    if options.image:
        batches = images.make_batches(texts, options.image, loaded, *sizes)
    else:
        batches = prompts.make_batches(texts, loaded.tokenizer, text_config, *sizes)
    prompts.check_length(batches, options.output_length, text_config)
    for batch in batches:
        models.check_cache_memory(
            config, dtype, device, batch.size, batch.prompt_length + options.output_length, options.gpus
        )
    result = Result(options, device, backend, describe(loaded), batches)
    if notice:
        result.notices.append(notice)
    with models.out_of_memory_is_explained(device), fallbacks_noted(result.notices):
        _measure(loaded.model, result, tell)
    result.outputs = list(_outputs(result, loaded.tokenizer))
    return result


def _check_profile_dir() -> None:
    """Raises ModelError now, not after minutes of work, if no profile can be written."""
    try:
        PROFILE_DIR.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=PROFILE_DIR):
            pass
    except OSError as error:
        raise ModelError(
            f"--profile writes to the folder {PROFILE_DIR.absolute()}, which cannot be written: {error.strerror}; "
            "start from another folder"
        ) from error


def _measure(model: Any, result: Result, tell: Callable[[str], None]) -> None:
    options, batches = result.options, result.batches

    def measured(label: str, **how: Any) -> generate.Measurement:
        tell(f"{label}: {options.warmup_runs} warm-up and {options.num_runs} timed runs")
        return generate.measure(
            model,
            batches,
            options.output_length,
            options.num_runs,
            options.warmup_runs,
            lambda line: tell(f"{label}: {line}"),
            **how,
        )

    _measure_sides(model, result, measured, tell)
    if options.peer is not None:
        result.peer = generate_peer.run(model, options.peer, measured)
        if result.peer.error is not None:
            result.notices.append(f"--peer {options.peer} could not be measured: {result.peer.error}")
        elif not result.peer.compiled:
            result.notices.append(f"--peer {options.peer}: a static cache alone, transformers compiled nothing here")


def _measure_sides(
    model: Any, result: Result, measured: Callable[..., generate.Measurement], tell: Callable[[str], None]
) -> None:
    options, batches = result.options, result.batches
    if not options.use_tilegym or options.compare:
        with failures_are_the_models(options.model_id, "generate"):
            result.unpatched = measured("unpatched")
    if not options.use_tilegym:
        _observe(model, result, tell)
        return
    with patched(model, options, result.backend) as report:
        result.patches = report
        result.patched = measured("TileGym")
        _observe(model, result, tell)
        if options.compare:
            vocabulary = model.config.get_text_config(decoder=True).vocab_size
            steps = compared_steps(batches, options.output_length, vocabulary, model.dtype)
            tell(f"comparing the logits of {steps} steps")
            logits = collect_logits(model, batches, result.unpatched.tokens, steps)
    if options.compare:
        result.comparison = compare(model, batches, result.unpatched.tokens, result.patched.tokens, logits)


def _observe(model: Any, result: Result, tell: Callable[[str], None]) -> None:
    """The runs for coverage and profile, apart from the timed ones, which observation would slow."""
    options = result.options

    def run() -> None:
        generate.run_once(model, result.batches, options.output_length)

    if options.report_kernel_coverage:
        tell("measuring kernel coverage")
        result.coverage = measure_coverage(run, result.device)
    if options.profile:
        tell("profiling")
        result.profile_file = PROFILE_DIR / f"profile-{Path(options.model_id).name}.json"
        result.profile_table = profile_run(run, result.device, result.profile_file)


@contextlib.contextmanager
def failures_are_the_models(model_id: str, does: str) -> Iterator[None]:
    """Turns what fails in the block, where nothing of TileGym runs, into a ModelError: it does not "generate"."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ModelError) or models.is_out_of_memory(error):
            raise
        raise ModelError(
            f"{model_id} does not {does} in transformers itself, unpatched ({models.first_sentence(error)}): "
            "correct its config, or take another model"
        ) from error


@contextlib.contextmanager
def fallbacks_noted(notices: list[str]) -> Iterator[None]:
    """Adds to ``notices`` which ops did not run on the backend that was asked for."""
    show_others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        if issubclass(category, FallbackWarning):
            notices.append(str(message))
        else:
            show_others(message, category, *rest)

    with warnings.catch_warnings():
        warnings.simplefilter("default", FallbackWarning)  # whatever warnings the user hides: it is part of a result
        warnings.showwarning = show
        yield


def describe(loaded: models.LoadedModel) -> dict[str, Any]:
    """The model as plain data, for summaries."""
    config = loaded.model.config
    text = config.get_text_config(decoder=True)
    return {
        "id": loaded.name,
        "type": config.model_type,
        "parameters": loaded.model.num_parameters(),
        "random_weights": loaded.random_weights,
        "layers": getattr(text, "num_hidden_layers", None),
        "hidden_size": getattr(text, "hidden_size", None),
    }


def _outputs(result: Result, tokenizer: Any | None) -> Iterator[dict[str, str]]:
    """Prompt and continuation of every sequence; token numbers where there is no tokenizer."""
    for batch, tokens in zip(result.batches, result.main.tokens, strict=True):
        for ids, mask, row in zip(batch.input_ids, batch.attention_mask, tokens.tolist(), strict=True):
            prompt = ids[mask.bool()].tolist()
            if tokenizer is None:
                yield {"prompt": " ".join(map(str, prompt)), "text": "".join(f" {token}" for token in row)}
                continue
            # Runs go on past the end token, so that all are equally long; what a reader sees ends there.
            if tokenizer.eos_token_id in row:
                row = row[: row.index(tokenizer.eos_token_id)]
            yield {"prompt": tokenizer.decode(prompt, skip_special_tokens=True), "text": tokenizer.decode(row)}


def entries(patches: Any | None, kind: str) -> list[dict[str, Any]]:
    """The report's entries of a ``kind``, "patched" or "skipped", as plain data; none without a report."""
    return [asdict(entry) for entry in getattr(patches, kind)] if patches is not None else []

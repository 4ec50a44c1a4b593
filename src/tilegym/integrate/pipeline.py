"""The pipeline of ``tilegym integrate``: plan, capture, verify, write, aggregate, measure, report; step by step."""

import contextlib
import importlib.metadata
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tilegym
from tilegym.backend import selector
from tilegym.bench import models
from tilegym.bench import prompts
from tilegym.bench.job import device_name
from tilegym.errors import ModelError
from tilegym.errors import PatchError
from tilegym.integrate import capture
from tilegym.integrate import emit
from tilegym.integrate import steps
from tilegym.integrate.aggregate import GRAPH
from tilegym.integrate.aggregate import drop_culprits
from tilegym.integrate.aggregate import drop_culprits_or_graph
from tilegym.integrate.aggregate import judge
from tilegym.integrate.aggregate import patched
from tilegym.integrate.aggregate import without_effect
from tilegym.integrate.measure import measure
from tilegym.integrate.plan import Plan
from tilegym.integrate.plan import make_plan
from tilegym.integrate.report import write_report
from tilegym.integrate.state import State
from tilegym.integrate.state import alone_in
from tilegym.integrate.state import code_digest
from tilegym.transformers import generated
from tilegym.transformers.general import Place

PROMPT = "The capital of France is"
SECOND = "The capital of France is a large city on both banks of a river, and the people who live there"
SHORT = "Once"


@dataclass(frozen=True)
class Options:
    """What to do; the command line's flags."""

    model_id: str
    random_weights: bool = False
    plan_only: bool = False
    output: Path | None = None
    force: bool = False
    restart: bool = False
    trust_remote_code: bool = False
    precision: str = "bfloat16"
    output_length: int = 32
    num_runs: int = 3


@dataclass
class Outcome:
    """What a run found; ``report`` and ``package`` are None where it ended before."""

    options: Options
    plan: Plan
    device: torch.device
    backend: str
    notices: list[str] = field(default_factory=list)
    checks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    accepted: dict[str, tuple[Place, ...]] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    graph: str = ""  # what came of decoding as CUDA graphs
    compiled: dict[str, str] = field(default_factory=dict)
    together: dict[str, Any] | None = None
    measured: dict[str, Any] | None = None
    outputs: list[dict[str, str]] = field(default_factory=list)
    folder: Path | None = None
    package: Path | None = None
    reports: list[Path] = field(default_factory=list)
    continued: bool = False


def integrate(options: Options, tell: Callable[[str], None] = lambda line: None) -> Outcome:
    """Runs the pipeline, or what is left of it.

    Args:
        tell: gets a line whenever a step begins or ends.

    Raises:
        ModelError: the input cannot be used; the message is one sentence with the remedy.
    """
    if options.precision not in models.PRECISIONS:
        raise ModelError(f"--precision {options.precision!r} is none of {', '.join(models.PRECISIONS)}")
    config = models.load_config(options.model_id, options.random_weights, options.trust_remote_code)
    steps.check_kind(config, options.model_id, options.trust_remote_code)
    device, backend, notice = choose_backend()
    tell(f"research: building a small {config.model_type} and probing its parts")
    plan = make_plan(steps.laid_out(config, options), options.trust_remote_code)
    outcome = Outcome(options, plan, device, backend, [notice] if notice else [])
    if options.plan_only or (plan.by_hand and not options.force):
        return outcome
    outcome.folder = options.output or Path(f"tilegym_{plan.family}")
    outcome.package = package_folder(plan, options, outcome.folder)
    emit.refuse_what_is_not_ours(outcome.folder)
    with alone_in(outcome.folder):
        state = State(outcome.folder, _fingerprint(options, config, device), options.restart)
        outcome.continued = state.continues
        if state.continues:
            tell(f"continuing the run in {outcome.folder}; --restart begins anew")
        emit.write(outcome.package, {})
        tell(f"{'building' if options.random_weights else 'loading'} {options.model_id} on {device_name(device)}")
        loaded = models.load(
            options.model_id,
            models.PRECISIONS[options.precision],
            device,
            options.random_weights,
            config,
            trust_remote_code=options.trust_remote_code,
        )
        with models.out_of_memory_is_explained(device):
            _integrate(outcome, loaded, config, state, tell)
    return outcome


def _integrate(
    outcome: Outcome, loaded: models.LoadedModel, config: Any, state: State, tell: Callable[[str], None]
) -> None:
    def batch(*texts: str) -> prompts.Batch:
        return prompts.make_batches(list(texts), loaded.tokenizer, config.get_text_config(decoder=True), None, None)[0]

    model = loaded.model
    batches = {"prompt": batch(PROMPT), "padded batch": batch(PROMPT, SHORT), "second length": batch(SECOND)}
    _capture(outcome, model, batches, state, tell)
    _verify(outcome, model, state, tell)
    if not outcome.accepted:
        raise ModelError(
            f"nothing in {outcome.options.model_id} can be served by TileGym's kernels: "
            f"see what was tried with `tilegym integrate {outcome.options.model_id} --plan-only`"
        )
    _aggregate(outcome, model, list(batches.values())[:2], state, tell)
    if not outcome.accepted:
        raise ModelError(f"no set of kernels leaves {outcome.options.model_id} as exact as it was: nothing was written")
    _write(outcome, config, tell)
    _measure(outcome, model, batches["prompt"], loaded.tokenizer, state, tell)
    state.forget_tensors()
    outcome.reports = write_report(outcome)
    tell(f"report: {outcome.reports[0].parent}")


def choose_backend() -> tuple[torch.device, str, str]:
    """Where to run, on which backend it is measured, and a notice for the user."""
    default, why = selector.default_backend()
    if torch.cuda.is_available() and default == "cutile":
        return torch.device("cuda"), "cutile", ""
    selector.assert_backend_available("cutile")
    missing = why if torch.cuda.is_available() else "no GPU"
    how = "kernels are verified in the interpreter and compiled ahead; speed is that of the pytorch backend"
    return torch.device("cpu"), "pytorch", f"{missing}: {how}"


def package_folder(plan: Plan, options: Options, folder: Path) -> Path:
    """Where the patches go: into a checkout's package, unless a folder is named or the family is patched by hand."""
    source = Path(tilegym.__file__).parent
    checkout = (source.parents[1] / ".git").exists() and (source.parents[1] / "pyproject.toml").is_file()
    if options.output is not None or plan.by_hand or not checkout:
        return folder
    return source / "transformers" / plan.family


def _fingerprint(options: Options, config: Any, device: torch.device) -> dict[str, Any]:
    return {
        "model": options.model_id,
        "random_weights": options.random_weights,
        "precision": options.precision,
        "output_length": options.output_length,
        "num_runs": options.num_runs,
        "config": config.to_dict(),
        "device": device_name(device),
        "versions": {
            "tilegym": tilegym.__version__,
            "code": code_digest(),
            "torch": torch.__version__,
            "transformers": importlib.metadata.version("transformers"),
        },
    }


def _points(plan: Plan) -> dict[str, tuple[Place, str]]:
    """The integration points: by the item's key its place and the first module that it stands in."""
    return {item.key: (item.candidates[0].place, item.requirement.modules[0]) for item in plan.items if item.candidates}


def _capture(outcome: Outcome, model: nn.Module, batches: dict, state: State, tell: Callable[[str], None]) -> None:
    missing = {
        key: point
        for key, point in _points(outcome.plan).items()
        if state.get("verified", key) is None and not state.tensors(key).exists()
    }
    if missing:
        tell(f"capture: {len(missing)} integration points while the model generates")
        for key, calls in capture.capture(model, missing, batches).items():
            capture.save(calls, state.tensors(key))


def _verify(outcome: Outcome, model: nn.Module, state: State, tell: Callable[[str], None]) -> None:
    plan = outcome.plan
    points = _points(plan)
    outcome.compiled = state.get("compiled") or {}
    for index, (key, (_, path)) in enumerate(points.items()):
        item = next(item for item in plan.items if item.key == key)
        checks = state.get("verified", key)
        if checks is None:
            calls = capture.load(state.tensors(key), outcome.device)
            launches: list = []
            checks = []
            for candidate in item.candidates:
                check = steps.verify_candidate(model, candidate.place, path, calls, launches)
                why = check.why
                if not why:
                    outcome.compiled, why = steps.compiled(
                        launches, outcome.compiled, outcome.notices, binding=outcome.device.type == "cpu"
                    )
                    state.put("compiled", outcome.compiled)
                checks.append({"candidate": asdict(candidate), "passed": not why, "why": why, **steps.summary(check)})
                if not why:
                    break
            state.put("verified", checks, key)
            state.tensors(key).unlink(missing_ok=True)
        outcome.checks[key] = checks
        last = checks[-1]
        verdict = "verified" if last["passed"] else f"unsuitable: {last['why']}"
        tell(f"verify {index + 1}/{len(points)}: {key}: {verdict}")
        if last["passed"]:
            place = item.candidates[len(checks) - 1].place
            known = outcome.accepted.get(item.compute, ())
            outcome.accepted[item.compute] = known if place in known else (*known, place)
    if "attn" in outcome.accepted:
        outcome.accepted[GRAPH], outcome.graph = (), "verified"


def _aggregate(outcome: Outcome, model: nn.Module, batches: list, state: State, tell: Callable[[str], None]) -> None:
    backend = steps.whole_backend(model, outcome.backend)
    length = outcome.options.output_length if outcome.device.type == "cuda" else 6

    def why_not(names: tuple[str, ...]) -> str:
        key = ",".join(names)
        found = state.get("together", key)
        if found is None:
            tell(f"aggregate: {key}, together in the whole model on {backend}, {length} tokens")
            chosen = {name: outcome.accepted[name] for name in names}
            try:
                comparison = judge(model, batches, length, lambda: patched(model, chosen, backend))
                found = {"why": "" if comparison.passed else comparison.reason, "comparison": comparison.summary()}
            except Exception as error:  # whatever a patched model does wrong
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                found = {"why": f"{type(error).__name__}: {models.first_sentence(error)}", "comparison": None}
            state.put("together", found, key)
        return found["why"]

    idle = without_effect(model, outcome.accepted, backend)
    if GRAPH in idle:
        outcome.graph = f"unsuitable: {idle.pop(GRAPH)}"
        del outcome.accepted[GRAPH]
    names = [name for name in outcome.accepted if name not in idle]
    kept, dropped = (drop_culprits_or_graph if GRAPH in names else drop_culprits)(names, why_not)
    outcome.dropped = {name: f"nothing is patched: {why}" for name, why in idle.items()} | dropped
    for name, why in outcome.dropped.items():
        tell(f"aggregate: {name} is dropped, {why}")
    outcome.accepted = {name: outcome.accepted[name] for name in kept}
    if GRAPH in outcome.dropped:
        outcome.graph = f"dropped: {outcome.dropped[GRAPH]}"
    outcome.together = state.get("together", ",".join(kept)) if kept else None
    if outcome.together:
        outcome.together["backend"] = backend


def _write(outcome: Outcome, config: Any, tell: Callable[[str], None]) -> None:
    plan, model_id = outcome.plan, outcome.options.model_id
    architecture = plan.research.architecture
    remote = ""
    if steps.is_remote(config):  # a folder is found from anywhere
        remote = str(Path(model_id).resolve()) if Path(model_id).exists() else model_id
    files = {} if remote else {emit.CONFIG: emit.config_text(config)}
    for compute, places in outcome.accepted.items():
        patch = emit.graph_text(architecture) if compute == GRAPH else emit.patch_text(compute, architecture, places)
        files[f"monkey_patch_{compute}.py"] = patch
        files[f"test_monkey_patch_{compute}.py"] = emit.test_text(compute, remote)
    files["__init__.py"] = emit.aggregate_text(
        plan.family, plan.research.model_type, architecture, list(outcome.accepted)
    )
    emit.remove(outcome.package, sorted({GRAPH, *(item.compute for item in plan.items)} - set(outcome.accepted)))
    written = emit.write(outcome.package, files)
    emit.write_drafts(outcome.folder, [item.requirement.definition for item in plan.items])
    generated.register(outcome.package)
    tell(f"wrote {len(written)} files to {outcome.package}")


def _measure(
    outcome: Outcome, model: nn.Module, batch: Any, tokenizer: Any, state: State, tell: Callable[[str], None]
) -> None:
    options, names = outcome.options, list(outcome.accepted)
    aggregate = generated.register(outcome.package)

    @contextlib.contextmanager
    def flags(*chosen: str) -> Iterator[None]:
        wanted = {name: name in chosen for name in names}
        with selector.use_backend(outcome.backend):
            with aggregate(**wanted, model=model, use_cutile=outcome.backend == "cutile"):
                yield

    def measured(key: str, *chosen: str, observe: bool = False) -> dict[str, Any] | None:
        found = state.get("measured", key)
        if found is None:
            tell(f"measure: {key}")
            try:
                with flags(*chosen) if chosen else contextlib.nullcontext():
                    found = measure(model, [batch], options.output_length, options.num_runs, observe)
            except PatchError:  # a flag that does nothing while the model generates
                return None
            state.put("measured", found, key)
        return found

    before, after = measured("unpatched", observe=True), measured("patched", *names, observe=True)
    alone = {name: measured(f"{name} alone", name) for name in names if name not in ("loss", GRAPH)}
    if GRAPH in names:
        alone["attn and graph"] = measured("attn and graph alone", "attn", GRAPH)
    # What else a machine does in the meantime must not tell against one side alone.
    before = steps.faster(before, measured("unpatched again"))
    after = steps.faster(after, measured("patched again", *names))
    outcome.measured = {"unpatched": before, "patched": after, "alone": {n: m for n, m in alone.items() if m}}
    outcome.outputs = [steps.text(batch, tokenizer, side["tokens"]) for side in (before, after)]

"""Before the first experiment: the baseline, the regions, and a task for each."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tilegym.autokernel import profile
from tilegym.autokernel.judging_inputs import save_recording
from tilegym.autokernel.ledger import RegionRow
from tilegym.autokernel.model_judge import ModelJudge
from tilegym.autokernel.model_judge import ModelSettings
from tilegym.autokernel.model_worker import batches_of
from tilegym.autokernel.protocol import Task
from tilegym.autokernel.regions import find_regions
from tilegym.bench import generate
from tilegym.bench.prompts import check_length
from tilegym.bench.roofline import measure_roofline
from tilegym.bench.timing import CpuTimer
from tilegym.bench.timing import CudaTimer
from tilegym.errors import InventoryError
from tilegym.errors import TileGymError
from tilegym.integrate.apply import apply

# A region that runs at this share of what its bytes and operations allow has nothing to gain.
NEAR_BOUND = 0.9


def recording_path(folder: Path, key: str) -> Path:
    """Where the recorded calls of a region lie."""
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.safetensors"


def integration(model: torch.nn.Module) -> str:
    """What of ``model`` TileGym's own kernels serve already, in words; the model is as it was afterwards.

    Whoever runs the model with :func:`tilegym.apply` has these without any new kernel.
    """
    try:
        # Nothing is tuned: the GPU is not this process's alone, and what was measured now would be kept for good.
        with mock.patch.dict(os.environ, {"TILEGYM_DISABLE_AUTOTUNE": "1"}), apply(model) as report:
            computes = sorted({entry.compute for entry in report.patched})
            return f"TileGym serves {len(report.patched)} of its parts: {', '.join(computes)}"
    except TileGymError as error:
        return f"TileGym serves none of its parts: {str(error).splitlines()[0]}"


def survey(
    settings: ModelSettings,
    device: torch.device,
    architectures: tuple[str, ...],
    folder: Path,
    recordings: Path,
    tell: Callable[[str], None] = lambda line: None,
    models: ModelJudge | None = None,
) -> tuple[list[RegionRow], dict[str, Any]]:
    """Runs the unpatched model, and writes down what its regions are, what they are called with and what they take.

    Args:
        settings: the model, and how it is run.
        device: where.
        architectures: of the tasks.
        folder: where, in the repository, kernels for it belong.
        recordings: where the recorded calls are put.
        tell: is told what was done.
        models: makes what the baseline needs ready while nothing is timed.

    Returns:
        (the regions, what was found about the whole: total seconds and the share in regions).

    Raises:
        ModelError: the model cannot be used.
    """
    model, tokenizer = settings.spec.load(device)
    tell("the model is loaded")
    batches = batches_of(model, tokenizer, settings.input_length)
    check_length(batches, settings.output_length, model.config.get_text_config(decoder=True))
    if models is not None:
        models.load_ahead(sum(t.nbytes for t in (*model.parameters(), *model.buffers())))

    def run(tokens: int) -> None:
        generate.run_once(model, batches, tokens)

    recordings.mkdir(parents=True, exist_ok=True)
    recorded = profile.record(model, [lambda: run(settings.output_length)])
    tell(f"{len(recorded)} regions are called")
    if models is not None:
        models.run_ahead(wait=True)
    profiled = profile.profile(model, run, settings.output_length, device)
    timer = CudaTimer(0.2) if device.type == "cuda" else CpuTimer(0.05)
    roofline = measure_roofline(timer, model.dtype)
    tell("profiled")
    if models is not None:
        models.run_ahead()
    integrated = integration(model)
    tell(integrated)
    family = model.config.get_text_config(decoder=True).model_type
    rows = []
    for region in find_regions(model):
        recording = recorded[region.key]
        seconds = profiled.seconds.get(region.key, 0.0)
        try:
            definition = profile.draft(region, recording, family)
            profile.check_draft(definition, recording, device)
        except InventoryError as error:
            rows.append(RegionRow(region.key, "", seconds, 0.0, str(error).removeprefix(f"{region.key}: ")))
            continue
        needed = profile.work(definition, recording)
        bound = max(needed.bytes / roofline.bandwidth, needed.flops / roofline.rate)
        task = Task(
            definition=definition,
            region=region.key,
            modules=tuple(region.modules),
            samples=profile.samples(definition, recording),
            architectures=architectures,
            folder=folder.as_posix().replace("{family}", family),
            trains=recording.trains,
            bound_seconds=bound,
            seconds=seconds,
        )
        save_recording(recording_path(recordings, region.key), definition, recording)
        closed = f"at {bound / seconds:.0%} of its bound" if seconds and bound >= NEAR_BOUND * seconds else ""
        rows.append(RegionRow(region.key, task.to_json(), seconds, bound, closed))
    groups = {group for group, _ in profiled.inside}
    in_regions = sum(row.seconds for row in rows if row.key not in groups)
    inside = [[*pair, seconds] for pair, seconds in profiled.inside.items()]
    whole = {"profiled_seconds": profiled.total, "in_regions": in_regions / profiled.total, "inside": inside}
    return rows, whole | {"family": family, "integration": integrated}

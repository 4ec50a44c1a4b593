"""The checks in the tests that integration writes: a patch gives what it stands in for, on a small model."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from tilegym.backend.selector import default_backend
from tilegym.bench.generate import run_once
from tilegym.bench.prompts import Batch
from tilegym.errors import PatchError
from tilegym.integrate.aggregate import GRAPH
from tilegym.integrate.aggregate import patched
from tilegym.integrate.capture import capture
from tilegym.integrate.inputs import example
from tilegym.integrate.small_model import small_model
from tilegym.integrate.verify import untuned
from tilegym.integrate.verify import verify
from tilegym.transformers.general import Place
from tilegym.transformers.general import callers
from tilegym.transformers.general import resolve


def module_of(model: nn.Module, place: Place) -> str:
    """The path of the first module that a place is in.

    Raises:
        PatchError: there is none.
    """
    target = resolve(place.of)
    if place.put == "loss":
        return ""
    if place.put == "forward":
        found = (path for path, module in model.named_modules() if type(module) is target)
    else:
        held = {p for p, m in model.named_modules() for value in vars(m).values() if value is target}
        using = callers(model, target)
        found = (path for path, _ in model.named_modules() if path in using or path in held)
    path = next(found, None)
    if path is None:
        raise PatchError(f"there is no {place.of} in {type(model).__name__}")
    return path


def check_patch(places: tuple[Place, ...], config: Path | str | Any, backend: str = "cutile") -> None:
    """Runs a small model of ``config`` and compares each place's kernel with what it stands in for.

    Args:
        places: of a generated patch.
        config: a config.json, the id of a model that brings code of its own, or a config.
        backend: of the kernels; "cutile" runs in the interpreter where there is no GPU.

    Raises:
        AssertionError: a result is further off than rounding explains.
    """
    model, batch = _small(config, backend)
    at = {str(i): (place, module_of(model, place)) for i, place in enumerate(places)}
    calls = capture(model, at, {"prompt": batch})
    for key, (place, path) in at.items():
        check = verify(model, place, path, calls[key], backend)
        assert check.passed, f"{place.of}, {place.kernel}: {check.why}"


def check_decoding(attention: tuple[Place, ...], config: Path | str | Any, length: int = 8) -> None:
    """Runs a small model of ``config`` and compares what it generates with and without replayed decoding steps.

    Args:
        attention: of the generated patch of the attention, without which steps are not replayed.
        config: as for :func:`check_patch`.
        length: how many tokens.

    Raises:
        AssertionError: the tokens differ, or the steps of this model cannot be captured.
    """
    backend = default_backend()[0]
    model, batch = _small(config, backend, torch.float32)
    with untuned():
        (expected,) = run_once(model, [batch], length).tokens
        with patched(model, {"attn": attention, GRAPH: ()}, backend) as patches:
            assert any(entry.compute == GRAPH for entry in patches.patched), patches.skipped
            (got,) = run_once(model, [batch], length).tokens
    assert torch.equal(got, expected), f"{got.tolist()} instead of {expected.tolist()}"


def _small(config: Path | str | Any, backend: str, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Batch]:
    """A small model where its kernels run, in fp32 on the CPU, and a prompt for it."""
    model = small_model(_config(config), trust_remote_code=isinstance(config, str)).model
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    ids = example(model, batch=1)
    if backend == "cutile" and default_backend()[0] == "cutile":
        model = model.to("cuda", dtype)
    return model, Batch(ids, torch.ones_like(ids))


def _config(config: Path | str | Any) -> Any:
    from transformers import AutoConfig

    if isinstance(config, str):
        return AutoConfig.from_pretrained(config, trust_remote_code=True)
    return AutoConfig.from_pretrained(config) if isinstance(config, Path) else config

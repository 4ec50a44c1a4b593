"""Inputs and outputs around integration points: recorded while the real model generates, kept as safetensors."""

import contextlib
import json
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilegym.bench.prompts import Batch
from tilegym.errors import ModelError
from tilegym.transformers.forwards import function_of_forward
from tilegym.transformers.forwards import with_globals
from tilegym.transformers.general import Place
from tilegym.transformers.general import callers
from tilegym.transformers.general import resolve
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet

_MAX_BYTES = 1 << 30  # what the calls of one integration point may take

TRAINING = "training"
MODULE = "\0module"  # stands for the module itself among a function's arguments


@dataclass
class Recorded:
    """One call of a part, without the part: positional and named arguments, and what kind of step it was in."""

    label: str
    args: list[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)


def capture(
    model: nn.Module,
    places: dict[str, tuple[Place, str]],
    batches: dict[str, Batch | dict[str, torch.Tensor]],
    trains: bool = True,
) -> dict[str, list[Recorded]]:
    """Lets ``model`` generate, or runs it once, and keeps the calls around each place.

    Args:
        places: by key a place and the path of the module in which it is recorded.
        batches: by name the prompts; of each the prefill and one decoding step are kept. Or the arguments of a forward
            pass, for a model that does not continue text.
        trains: also a call of the loss.

    Returns:
        By key the calls, in order; no calls where the part did not run.

    Raises:
        ModelError: the model cannot generate.
    """
    found: dict[str, list[Recorded]] = {key: [] for key in places}
    label: list[str] = [""]
    with contextlib.ExitStack() as stack:
        patches = stack.enter_context(PatchSet(model, maker=__name__))
        if any(place.put == "attention" for place, _ in places.values()):
            # Eager attention is plain PyTorch that gets every mask and option as an argument.
            patches.use_attention(model, "eager", Entry("", "capture"))
        for key, (place, path) in places.items():
            stack.enter_context(_recording(model, place, path, found[key], label, patches))
        for name, batch in batches.items():
            if isinstance(batch, Batch):
                _generate(model, batch.to(model.device), name, label)
            else:
                _forward(model, batch, name, label)
        if trains and any(place.put == "loss" for place, _ in places.values()):
            label[0] = TRAINING
            ids = next(iter(batches.values())).input_ids.to(model.device)
            with torch.no_grad():
                model(input_ids=ids, labels=ids, use_cache=False)
    return found


def _generate(model: nn.Module, batch: Batch, name: str, label: list[str]) -> None:
    """A prefill and one decoding step, each with its label."""
    steps = iter((f"{name}, prefill", f"{name}, decode"))

    def count(module: nn.Module, args: tuple, kwargs: dict) -> None:
        label[0] = next(steps, "")

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        with torch.no_grad():
            model.generate(
                input_ids=batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=2, min_new_tokens=2,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
    except Exception as error:  # whatever a foreign model's code does
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"the model cannot generate ({line}): integrate needs a model that does, if only in another precision"
        ) from error
    finally:
        handle.remove()
        label[0] = ""


def _forward(model: nn.Module, inputs: dict[str, torch.Tensor], name: str, label: list[str]) -> None:
    label[0] = name
    try:
        with torch.no_grad():
            model(**{n: t.to(model.device, model.dtype if t.is_floating_point() else None) for n, t in inputs.items()})
    finally:
        label[0] = ""


@contextlib.contextmanager
def _recording(
    model: nn.Module, place: Place, path: str, calls: list[Recorded], label: list[str], patches: PatchSet
) -> Iterator[None]:
    def keep(args: tuple, kwargs: dict) -> None:
        wanted = label[0] and (label[0] == TRAINING) == (place.put == "loss")
        if wanted and all(call.label != label[0] for call in calls):
            call = Recorded(label[0], [_kept(a, owner) for a in args], {n: _kept(v, owner) for n, v in kwargs.items()})
            if _size(call) <= _MAX_BYTES:
                calls.append(call)

    owner = model.get_submodule(path)
    if place.put == "forward":
        handle = owner.register_forward_pre_hook(lambda module, args, kwargs: keep(args, kwargs), with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
        return
    function = resolve(place.of)

    def recorder(*args, **kwargs):
        keep(args, kwargs)
        return function(*args, **kwargs)

    _install(model, function, recorder, path, patches, place.put == "loss")
    yield  # the set puts everything back


def _install(
    model: nn.Module, function: Callable, recorder: Callable, path: str, patches: PatchSet, loss: bool
) -> None:
    entry = Entry(path, "capture")
    if loss:
        model.loss_function = recorder
        patches.on_revert(lambda: vars(model).pop("_loss_function", None))
        return
    module = model.get_submodule(path)
    for name, value in list(vars(module).items()):
        if value is function:
            patches.replace_attribute(module, name, recorder, entry)
    names = callers(module, function)
    if "" in names:
        patches.replace_forward(module, with_globals(function_of_forward(module), ((names[""][1], recorder),)), entry)


def _kept(value: Any, owner: nn.Module) -> Any:
    """What is kept of an argument: tensors, plain values and nested ones; the module itself; nothing of the rest."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, nn.Module):
        return MODULE
    if isinstance(value, (tuple, list)):
        return [_kept(item, owner) for item in value]
    return value if isinstance(value, (int, float, str, bool)) else None


def _size(call: Recorded) -> int:
    return sum(t.numel() * t.element_size() for t in _tensors((call.args, list(call.kwargs.values()))))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def save(calls: list[Recorded], path: Path) -> None:
    """Writes calls to a safetensors file.

    Raises:
        ModelError: there is no room for it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}

    def packed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = str(len(tensors))
            tensors[name] = (torch.view_as_real(value) if value.is_complex() else value).contiguous().cpu()
            return {"tensor": name, "complex": value.is_complex()}
        return [packed(item) for item in value] if isinstance(value, (tuple, list)) else value

    described = [[c.label, packed(c.args), {n: packed(v) for n, v in c.kwargs.items()}] for c in calls]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        save_file(tensors, partial, {"calls": json.dumps(described)})
    except SafetensorError as error:  # of a disk that is full, which every other library calls an OSError
        partial.unlink(missing_ok=True)
        raise ModelError(
            f"captured tensors cannot be written to {path.parent} ({error}): free the disk, or name another folder "
            "with --output; the same command continues"
        ) from error
    partial.replace(path)


def load(path: Path, device: torch.device) -> list[Recorded]:
    """Reads what :func:`save` wrote."""
    from safetensors import safe_open

    with safe_open(path, "pt", device=str(device)) as file:

        def unpacked(value: Any) -> Any:
            if isinstance(value, dict):
                tensor = file.get_tensor(value["tensor"])
                return torch.view_as_complex(tensor) if value["complex"] else tensor
            return [unpacked(item) for item in value] if isinstance(value, list) else value

        calls = json.loads(file.metadata()["calls"])
        return [
            Recorded(label, unpacked(args), {n: unpacked(v) for n, v in named.items()}) for label, args, named in calls
        ]

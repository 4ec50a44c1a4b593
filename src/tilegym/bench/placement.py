"""Where a model is put: on a device, or over several GPUs, and what is free there."""

import importlib.util
from pathlib import Path

import torch
from torch import nn

from tilegym.errors import ModelError


def check(gpus: int) -> None:
    """Raises ModelError if a model cannot be spread over so many GPUs here; one, or a CPU, is always possible."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus > 1 and gpus > there:
        remedy = f"take --gpus {there}" if there > 1 else "leave it out"
        raise ModelError(f"--gpus {gpus}: this machine has {there or 'no'} GPU{'s' * (there > 1)} to use; {remedy}")
    if gpus > 1 and importlib.util.find_spec("accelerate") is None:
        raise ModelError(f"--gpus {gpus} needs accelerate: pip install accelerate")


def devices_of(device: torch.device, gpus: int) -> list[torch.device]:
    """Where a model is put that runs on ``device``: there, or on the first GPUs."""
    return [device] if gpus == 1 else [torch.device("cuda", index) for index in range(gpus)]


def places_of(model: nn.Module, dtype: torch.dtype, devices: list[torch.device]) -> dict[str, torch.device]:
    """A device map that gives each of ``devices`` about as many bytes of ``model``, layers in their order.

    Args:
        model: it may be on the meta device.
        dtype: of the weights.
    """
    import accelerate
    from accelerate.utils import compute_module_sizes

    whole = list(getattr(model, "_no_split_modules", None) or ())
    model.tie_weights()
    sizes = compute_module_sizes(model, dtype=dtype)
    largest = max((sizes[name] for name, m in model.named_modules() if type(m).__name__ in whole), default=sizes[""])
    # Room for the layer that crosses the border; what is left is the last one's.
    share = sizes[""] // len(devices) + largest
    most = dict.fromkeys(range(len(devices) - 1), share) | {len(devices) - 1: 2 * sizes[""]}
    found = accelerate.infer_auto_device_map(model, max_memory=most, no_split_module_classes=whole, dtype=dtype)
    return {name: devices[index] for name, index in found.items()}


def put(model: nn.Module, places: dict[str, torch.device]) -> nn.Module:
    """Spreads a model, with hooks of accelerate's that bring to each layer what it is called with."""
    import accelerate

    skipped = getattr(model, "_skip_keys_device_placement", None)
    return accelerate.dispatch_model(model, places, main_device=next(iter(places.values())), skip_keys=skipped)


def filled(model: nn.Module, places: dict[str, torch.device]) -> nn.Module:
    """A model on the meta device with memory on its GPUs, and the random weights of its class in it."""
    for path, device in places.items():
        model.get_submodule(path).to_empty(device=device)
    for module in model.modules():
        model._init_weights(module)
    model.tie_weights()
    return put(model, places)


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on ``device``; None where the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)

"""What a measurement has to say about the machine and the software that it was made with."""

import datetime
import importlib.metadata
import platform
import shutil
import subprocess
from typing import Any

import torch

PACKAGES = {
    "torch": "torch",
    "tilegym": "tilegym",
    "cuda_tile": "cuda-tile",
    "triton": "triton",
    "transformers": "transformers",
    "liger_kernel": "liger-kernel",
}


def _version(distribution: str) -> str | None:
    if distribution == "tilegym":
        from tilegym import __version__

        return __version__  # also right for a checkout that is only on the path
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.split("\n")[0].strip() or None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def describe() -> dict[str, Any]:
    """GPU, driver, CUDA, processor and package versions, and the date; None for what there is not."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device_name": _processor(),
        "gpu": None,
        "driver": None,
        "cuda": torch.version.cuda,
        "processor": _processor(),
        "python": platform.python_version(),
    }
    found |= {key: _version(distribution) for key, distribution in PACKAGES.items()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {
            "device_name": properties.name,
            "gpu": properties.name,
            "driver": _driver(),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found

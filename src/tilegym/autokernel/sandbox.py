"""What a worker process gives up before it loads a candidate. ``docs/autokernel.md`` says what this does not stop."""

import contextlib
import ctypes
import os
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

# Variables that a worker may see; everything else, tokens and passwords among it, is not handed on.
ENVIRONMENT = (
    "PATH",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
)
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_MAX_FILE = 8 << 30  # bytes of one file that a worker may write: the tensors that it hands back


@dataclass(frozen=True)
class Limits:
    """What one worker may use.

    Attributes:
        memory: bytes beyond what it has when it starts; on a GPU also of GPU memory for kernels.
        seconds: of the wall clock for one request.
        network: whether it keeps the network. False takes it away where the system lets it.
    """

    memory: int = 4 << 30
    seconds: float = 120.0
    network: bool = False


def environment(folder: Path, device: str) -> dict[str, str]:
    """The environment of workers whose private files lie in ``folder``.

    ``device`` is "cpu", or a GPU's UUID or index.
    """
    kept = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    names = "HOME", "TMPDIR", "XDG_CACHE_HOME", "TILEGYM_CACHE_DIR", "CUDA_CACHE_PATH", "TRITON_CACHE_DIR"
    private = dict.fromkeys(names, str(folder))
    kept["CUDA_TILE_CACHE_DIR"] = str(folder / "cutile")
    kept["TILEGYM_DISABLE_AUTOTUNE"] = "1"  # a candidate is judged as it is; measuring takes its time limit
    kept |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONDONTWRITEBYTECODE": "1"}
    kept["CUDA_VISIBLE_DEVICES"] = "" if device == "cpu" else device
    return kept | private


def confine(limits: Limits, on_gpu: bool) -> dict[str, bool]:
    """Confines this process, for good: its memory, its files, the network; ends it with its parent.

    Args:
        limits: what it may use.
        on_gpu: then address space is not limited, since CUDA reserves more than there is; the judge watches what is
            resident instead.

    Returns:
        What came about: "memory", "network".
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE, _MAX_FILE))
    if not on_gpu:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + limits.memory, used + limits.memory))
    return {"memory": not on_gpu, "network": not limits.network and _leave_network(libc)}


def _leave_network(libc: ctypes.CDLL) -> bool:
    """Moves this process into an empty network of its own; False if the system does not allow it."""
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return False
    with contextlib.suppress(OSError):  # without the maps the process only has no name in its own namespace
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def resident(pid: int) -> int:
    """Bytes of memory that process ``pid`` has in use; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0

"""Another library's kernels in the same training job, in a process of their own: they patch transformers for good."""

import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tilegym.errors import ModelError

LIGER = "liger"
PEERS = (LIGER,)


def check(name: str) -> None:
    """Raises ModelError if there is no peer called ``name``, or if it is not installed."""
    if name not in PEERS:
        raise ModelError(f"--peer {name!r} is none of {', '.join(PEERS)}")
    if importlib.util.find_spec("liger_kernel") is None:
        raise ModelError(f"--peer {name} needs Liger-Kernel: pip install liger-kernel, or leave out --peer")


def patch(name: str, model: Any) -> str:
    """Puts the peer's kernels into ``model``, and into transformers; returns the peer's version.

    Raises:
        ModelError: it has none for this family.
    """
    check(name)
    liger = importlib.import_module("liger_kernel.transformers.monkey_patch")
    family = model.config.model_type
    if family not in liger.MODEL_TYPE_TO_APPLY_LIGER_FN:  # it would leave the model as it is, and only log that
        raise ModelError(f"Liger-Kernel has no kernels for {family}: leave out --peer")
    liger._apply_liger_kernel_to_instance(model=model)
    try:
        return importlib.metadata.version("liger-kernel")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def run(options: Any, tell: Callable[[str], None]) -> dict[str, Any]:
    """What the peer makes of the job ``options`` (:class:`~tilegym.bench.train_job.Options`), as plain data.

    Its failures are its own: they are told in ``error``, and nothing is measured then.
    """
    tell(f"{options.peer}: in a process of its own")
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        text = json.dumps(asdict(options), default=str)
        command = [sys.executable, "-m", __name__, str(answer)]
        done = subprocess.run(command, input=text, text=True, stdout=subprocess.DEVNULL, check=False)
        if answer.is_file():
            return json.loads(answer.read_text(encoding="utf-8"))
    return failed(options.peer, f"its process ended with status {done.returncode}")


def failed(name: str, reason: str) -> dict[str, Any]:
    return {"name": name, "version": None, "error": reason, "measurement": None, "gradient_check": None}


def main() -> None:
    """The peer's process: options as JSON on stdin, progress on stderr, the answer in the file that it is told."""
    from tilegym.bench import models
    from tilegym.bench import train_job

    known = json.load(sys.stdin)
    known["sentence_file"] = known["sentence_file"] and Path(known["sentence_file"])
    options = train_job.Options(**known)
    try:
        with models.quiet_transformers():
            found = train_job.run_peer(options, lambda line: print(f"... {line}", file=sys.stderr, flush=True))
    except Exception as error:  # whatever another library may raise
        found = failed(options.peer, models.first_sentence(error))
    Path(sys.argv[1]).write_text(json.dumps(found, allow_nan=False), encoding="utf-8")


if __name__ == "__main__":
    main()

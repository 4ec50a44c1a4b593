"""The worker's side: ``python -m tilegym.autokernel.worker FD DEVICE`` forks a confined child for every request.

The first process imports what all children need, runs no candidate, and forks; so that a child is there in
milliseconds (on a GPU in seconds: there it starts anew). Each child talks to the judge over a socket of its own: a line
of JSON in, a line of JSON out.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

import cuda.tile
import torch

import tilegym.ops
from tilegym.autokernel import harness
from tilegym.autokernel.model_worker import ModelRuns
from tilegym.autokernel.model_worker import ReferenceRuns
from tilegym.autokernel.sandbox import Limits
from tilegym.autokernel.sandbox import confine


def serve(control: socket.socket, device: str) -> None:
    """Forks a child for every socket that comes over ``control``; answers with its process id, or how one ended."""
    children: set[int] = set()
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        except OSError:
            break
        if not message:
            break
        request = json.loads(message)
        number = {"number": request.pop("number")}
        if "wait" in request:
            status = 0
            with contextlib.suppress(ChildProcessError):  # somebody has asked before, and not heard the answer
                status = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
            children.discard(request["wait"])
            control.sendall(json.dumps(number | {"status": status}).encode() + b"\n")
            continue
        pid = os.fork()
        if pid == 0:
            os.setsid()
            control.close()
            if device != "cpu":
                # Whatever has touched the driver in this process would be broken in a copy of it.
                os.set_inheritable(descriptors[0], True)
                if request["kind"] == "kernel":  # models share what they compile: their kernels have been judged
                    os.environ["CUDA_TILE_CACHE_DIR"] = os.path.join(request["folder"], "cutile")
                arguments = ["child", str(descriptors[0]), device, json.dumps(request)]
                os.execv(sys.executable, [sys.executable, "-m", "tilegym.autokernel.worker", *arguments])
            _child(socket.socket(fileno=descriptors[0]), device, request)
        os.close(descriptors[0])
        children.add(pid)
        control.sendall(json.dumps(number | {"pid": pid}).encode() + b"\n")
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _child(channel: socket.socket, device: str, request: dict[str, Any]) -> None:
    code = 1
    try:
        os.chdir(request["folder"])
        os.environ |= own_folders(request["kind"], request["folder"], device)
        log = os.open(os.path.join(request["folder"], "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
            os.dup2(descriptor, target)
        limits = Limits(**request["limits"])
        confined = confine(limits, device != "cpu")
        if device != "cpu":
            total = torch.cuda.get_device_properties(0).total_memory
            if request["kind"] == "kernel":
                torch.cuda.set_per_process_memory_fraction(min(1.0, limits.memory / total))
            else:
                _import_for_models()
        _answer(channel, device, confined)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def own_folders(kind: str, folder: str, device: str) -> dict[str, str]:
    """The variables that name a child's own folders.

    On a GPU what drivers and compilers keep is a kernel's own, and that of all models together: theirs have been
    judged, and making it anew takes every one of them seconds.
    """
    own = ["HOME", "TMPDIR", "TILEGYM_CACHE_DIR"]
    if kind == "kernel" or device == "cpu":
        own += ["XDG_CACHE_HOME", "CUDA_CACHE_PATH", "TRITON_CACHE_DIR"]
    return dict.fromkeys(own, folder)


def _import_for_models() -> None:
    """What takes seconds, before anybody waits for it."""
    import transformers.generation
    import transformers.modeling_utils
    import transformers.models.auto.modeling_auto

    from tilegym.autokernel import regions
    from tilegym.autokernel import replay
    from tilegym.bench import compare

    assert transformers and regions and replay and compare


def _answer(channel: socket.socket, device: str, confined: dict[str, bool]) -> None:
    """Serves one child's requests until the judge hangs up."""
    reader = channel.makefile("rb")
    torch_device = "cpu" if device == "cpu" else "cuda"
    subject: Any = None
    _say(channel, {"confined": confined})
    for line in reader:
        request = json.loads(line)
        command, arguments = request["command"], request["arguments"]
        try:
            if command == "candidate":
                subject, result = harness.Candidate(device=torch_device, **arguments), {}
            elif command == "model":
                subject, result = ModelRuns(device=torch_device, **arguments), {}
            elif command == "reference":
                subject, result = ReferenceRuns(device=torch_device, **arguments), {}
            elif command in ("compile", "run", "gradients", "time", "check", "generate", "logits"):
                result = getattr(subject, command)(**arguments)
            else:
                result = {"error": f"there is no command {command!r}"}
        except BaseException as error:  # the candidate may raise anything; the judge decides what it means
            message = f"{type(error).__name__}: {str(error)[:4000]}"
            result = {"error": message, "trace": traceback.format_exc()[-4000:]}
            if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in message:
                result["memory"] = True
        _say(channel, result)


def _say(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")


def main() -> None:
    """Entry point."""
    torch.set_num_threads(1)
    assert cuda.tile and tilegym.ops  # imported for the children
    if sys.argv[1] == "child":
        _child(socket.socket(fileno=int(sys.argv[2])), sys.argv[3], json.loads(sys.argv[4]))
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])


if __name__ == "__main__":
    main()

"""``tilegym autokernel MODEL``: the auto-kernelize loop from the command line."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import typer

from tilegym import interrupts
from tilegym.errors import AutokernelError

PROPOSERS = ("reuse", "generate", "tune", "agent")
# What tileiras 13.4 knows.
ARCHITECTURES = tuple(f"sm_{n}" for n in (80, 86, 87, 88, 89, 90, 100, 103, 107, 110, 120, 121))
_SANDBOX = (
    "Every proposed kernel runs in a process of its own, with limits on time, memory and environment, and without a "
    "network where the system allows that. This stops mistakes and the usual ways to cheat. It is no boundary against "
    "hostile code: that process runs as you and can read your files. Let agents that you do not trust work in a "
    "container or a virtual machine."
)


def autokernel(
    model: str = typer.Argument(
        metavar="MODEL", help="A Hub id, folder, config file or preset; or FILE.py::FUNCTION that returns a model."
    ),
    random_weights: bool = typer.Option(False, "--random-weights", "--random_weights", help="A config is enough."),
    precision: str = typer.Option("bfloat16", help="Of weights and computation: bfloat16, float16 or float32."),
    num_layers: int | None = typer.Option(
        None, "--num-layers", "--num_layers", min=1, help="Keep only this many layers."
    ),
    run: str = typer.Option(
        "", "--run", help="The run's name; the same name goes on with a run. Default: the model's."
    ),
    repository: Path = typer.Option(Path("."), help="The git repository in which kernels are kept, on a branch."),
    folder: str = typer.Option(
        "src/tilegym/transformers/{family}", help="Where in it; {family} stands for the model's type."
    ),
    out: Path | None = typer.Option(None, help="For ledger, reports and recordings. Default: out/autokernel/RUN."),
    device: list[str] = typer.Option(
        ["auto"],
        "--device",
        help="'cpu', or a GPU by UUID or index among those that CUDA_VISIBLE_DEVICES leaves; several times for more. "
        "Default: all of these.",
    ),
    ray: str = typer.Option("", "--ray", help="Judge kernels on the Ray cluster at this address."),
    arch: list[str] = typer.Option(
        ["sm_80", "sm_90", "sm_100", "sm_120"], "--arch", help="What every kernel has to compile for."
    ),
    experiments: int = typer.Option(50, min=1, help="The budget: how many experiments."),
    minutes: float = typer.Option(240.0, help="The budget: how many minutes, all parts of a run together."),
    width: int = typer.Option(4, min=1, help="How many regions a round tries, however many devices there are."),
    proposers: str = typer.Option(
        "reuse,generate,tune", help=f"Who proposes, in order; 'agent' needs --agent. {_SANDBOX}"
    ),
    agent: Path | None = typer.Option(None, help="A JSON file that says how the agent is called; see the docs."),
    input_length: int = typer.Option(64, "--input-length", "--input_length", min=1, help="Tokens of the prompts."),
    output_length: int = typer.Option(64, "--output-length", "--output_length", min=2, help="Tokens to generate."),
    resolve_commits: bool = typer.Option(
        False,
        "--resolve-commits",
        help="Ask GitHub once which commit the installed transformers release is, for links that never change.",
    ),
    seconds: float = typer.Option(120.0, min=1.0, help="The limit of one request to a kernel's worker."),
    memory: float | None = typer.Option(None, help="GiB that a kernel's worker may use. Default: 4, on a GPU 32."),
    trust_remote_code: bool = typer.Option(
        False, "--trust-remote-code", "--trust_remote_code", help="Run code that comes with the model. Read it first."
    ),
) -> None:
    """Finds what a model still computes in PyTorch, has kernels proposed for it, judges them, keeps what is better.

    Exit status: 0 the run has ended, or its budget is spent; 130 interrupted: the same command goes on.
    """
    from tilegym.autokernel.devices import LocalDevices
    from tilegym.autokernel.devices import RayDevices
    from tilegym.autokernel.loop import BY_HAND
    from tilegym.autokernel.loop import Loop
    from tilegym.autokernel.loop import Settings
    from tilegym.autokernel.model_judge import ModelJudge
    from tilegym.autokernel.model_judge import ModelRules
    from tilegym.autokernel.model_judge import ModelSettings
    from tilegym.autokernel.model_worker import ModelSpec
    from tilegym.autokernel.repository import Repository
    from tilegym.autokernel.sandbox import Limits
    from tilegym.autokernel.timing import Rules
    from tilegym.autokernel.workers import WorkerHost
    from tilegym.bench.models import PRECISIONS
    from tilegym.integrate.source_regions import look_up_commit

    if precision not in PRECISIONS:
        raise AutokernelError(f"--precision is {precision!r}, it has to be one of {', '.join(PRECISIONS)}")
    if not minutes > 0:
        raise AutokernelError(f"--minutes is {minutes:g}, it has to be more than 0")
    if memory is not None and not 0 < memory < float("inf"):
        raise AutokernelError(f"--memory is {memory:g}, it has to be more than 0")
    names = _devices(device)
    on_gpu = names[0] != "cpu"
    if on_gpu:  # before anything asks CUDA: this process uses no other GPU either
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    _check_compiler(arch)
    name = run or re.sub(r"[^A-Za-z0-9._-]+", "-", model.rpartition("/")[2].replace(".py::", "-")).strip("-.")
    _check_name(name)
    if Path(folder).is_absolute() or ".." in Path(folder).parts or Path(folder) == Path("."):
        raise AutokernelError(f"--folder is {folder!r}, it has to be a folder within the repository")
    out = (out or Path("out") / "autokernel" / name).resolve()
    repo = Repository(repository, name, out / "worktrees")
    repo.check_clean()
    if "::" in model:
        path, _, function = model.partition("::")
        model = f"{Path(path).resolve()}::{function}"
    elif (local := Path(model).expanduser()).exists():
        model = str(local.resolve())  # workers run in folders of their own
    spec = ModelSpec(model, precision, random_weights, num_layers, trust_remote_code=trust_remote_code)
    spec.config()  # before anything is written: a name that is spelt wrong leaves no run
    chosen = ModelSettings(spec, input_length, output_length)
    limits = Limits(int((memory or (32.0 if on_gpu else 4.0)) * 2**30), seconds)
    rules = Rules() if on_gpu else Rules(slowdown=1000.0)
    turns = min(ModelRules.seconds, 3 * minutes)  # a comparison takes a twentieth of the budget at most
    model_rules = ModelRules(seconds=turns) if on_gpu else ModelRules(rounds=2, throughput=False)
    model_limits = Limits(1 << 40, max(1800.0, seconds))
    each = min(width, _processors() // 4) if on_gpu else 1
    devices = RayDevices(ray, names[0], limits, rules) if ray else LocalDevices(names, limits, rules, max(each, 1))
    host = WorkerHost(names[0], limits)
    room = _room if on_gpu else lambda size: 0
    if resolve_commits and not look_up_commit():
        typer.echo("GitHub does not say which commit this transformers is: Definitions link to the tag of its release")
    try:
        loop = Loop(
            settings=Settings(chosen, "cuda" if on_gpu else "cpu", tuple(arch), folder, experiments, minutes, width),
            folder=out,
            repository=repo,
            proposers=_proposers(proposers, agent, repo),
            devices=devices,
            model_judge=ModelJudge(host, chosen, model_rules, model_limits, out / "baseline", room),
            tell=typer.echo,
            checkpoint=interrupts.check,  # of a step's name
        )
        typer.echo(f"{_SANDBOX}\n")
        typer.echo(f"run {name} on {', '.join(names)}, branch {repo.branch}, ledger {loop.ledger.path}")
        if on_gpu and not ray:
            host.prepare("model", model_limits, 2)
            devices.prepare()
        with interrupts.Interrupts():
            stop = loop.run()
    finally:
        devices.close()
        host.close()
    kept = loop.ledger.kept()
    typer.echo(f"{stop}: {len(kept)} kernels kept on {repo.branch}, displaced coverage {loop.coverage():.1%}")
    if loop.ledger.fact("baseline") is not None:
        typer.echo(f"see {out / 'results.md'} and {out / 'results.html'}")
    if stop == BY_HAND:
        raise typer.Exit(130)


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def _room(size: int) -> int:
    """How many models of ``size`` bytes can be made ready at once: the first GPU's memory, and processors, allow it."""
    import torch

    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    needs = 1.25 * size + (3 << 30)  # what captured graphs and a process of CUDA take beside it, generously
    return min(int((free - 0.1 * total) // needs), _processors() // 2)


def _check_name(run: str) -> None:
    """A run's name is part of a branch's, and of a folder's."""
    if not re.fullmatch(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]|[.](?!\.|lock$|$))*", run):
        raise AutokernelError(f"--run is {run!r}; a name has letters, digits, '_', '-' and single dots within")


def _check_compiler(architectures: list[str]) -> None:
    from tilegym import interpreter

    name = architectures[0]
    try:
        import cuda.tile as ct
        import torch

        @ct.kernel
        def probe(x):
            ct.store(x, (0,), ct.full((16,), 1.0, ct.float32))

        for name in architectures:
            interpreter.compile_kernel(probe, (torch.zeros(16),), name)
    except Exception as error:  # without tileiras, with one that is too old, or for what there is not
        why = str(error).partition("\n")[0]
        remedy = "see `tilegym doctor`" if name in ARCHITECTURES else f"--arch takes {', '.join(ARCHITECTURES)}"
        raise AutokernelError(f"cuTile's compiler does not work for {name} ({why}): {remedy}") from error


def _devices(asked: list[str]) -> tuple[str, ...]:
    """The devices to judge on: "cpu", or GPUs by UUID."""
    gpus = _gpus()
    if asked == ["auto"]:
        return tuple(gpus.values()) or ("cpu",)
    found = []
    for name in asked:
        if name != "cpu" and name not in gpus and name not in gpus.values():
            known = ", ".join(f"{index} ({uuid})" for index, uuid in gpus.items()) or "no GPU"
            raise AutokernelError(f"--device {name!r} is not here: there is {known}, and 'cpu'")
        found.append(gpus.get(name, name))
    if "cpu" in found and set(found) != {"cpu"}:
        raise AutokernelError("--device cpu and GPUs do not go together: choose one kind")
    return tuple(found)


def _gpus() -> dict[str, str]:
    """The UUIDs of the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, by index among these, in its order.

    Without nvidia-smi they are called as that variable calls them.
    """
    import torch

    program = shutil.which("nvidia-smi")
    if program is None:
        names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        return {str(i): names[i] if names else str(i) for i in range(torch.cuda.device_count())}
    query = [program, "--query-gpu=index,uuid", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    rows = [line.split(", ") for line in done.stdout.splitlines() if ", " in line]
    return _visible({index: uuid for index, uuid in rows}) if done.returncode == 0 else {}


def _visible(gpus: dict[str, str]) -> dict[str, str]:
    """Those of ``gpus`` that ``CUDA_VISIBLE_DEVICES`` names, by their index among these.

    As CUDA reads it: indices or beginnings of UUIDs; the first name of no GPU ends the list, and one that stands there
    twice leaves none. Parts of a GPU (MIG) are taken as they are called.
    """
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return gpus
    found: list[str] = []
    for name in (part.strip() for part in asked.split(",")):
        if name.startswith("MIG-"):
            named = [name]
        else:
            named = [u for i, u in gpus.items() if name == i or (name.startswith("GPU-") and u.startswith(name))]
        if len(named) != 1:
            break
        found += named
    return {str(i): uuid for i, uuid in enumerate(found)} if len(set(found)) == len(found) else {}


def _proposers(asked: str, agent: Path | None, repo) -> list:
    from tilegym.autokernel import proposers as known
    from tilegym.autokernel.proposers.agent import worktrees

    if agent is not None and "agent" not in [n.strip() for n in asked.split(",")]:
        raise AutokernelError("--agent does nothing without agent in --proposers: add it there, or leave out --agent")
    chosen = []
    for name in [n.strip() for n in asked.split(",") if n.strip()]:
        if name not in PROPOSERS:
            raise AutokernelError(f"--proposers: there is no {name!r}; there are {', '.join(PROPOSERS)}")
        if name == "agent":
            if agent is None:
                raise AutokernelError("--proposers agent needs --agent: the file that says how the agent is called")
            config = known.AgentConfig.from_file(agent)
            config.check(repo.root)
            chosen.append(known.Agent(config, worktrees(repo)))
        else:
            chosen.append({"reuse": known.Reuse, "generate": known.Generate, "tune": known.Tune}[name]())
    if not chosen:
        raise AutokernelError(f"--proposers names nobody; there are {', '.join(PROPOSERS)}")
    return chosen

"""The section of ``docs/benchmarks.md`` that tells on which machine and with what its runs were made."""

from tilegym.bench.merge import Merged
from tilegym.bench.report import Run
from tilegym.bench.report import markdown


def section(merged: Merged) -> str:
    """A table of what all runs have in common, and one with a line for each run of what they do not."""
    runs = [_machine(run) for run in merged.runs]
    names = [name for name in runs[0] if any(run[name] != "-" for run in runs)]
    common = [name for name in names if len({run[name] for run in runs}) == 1]
    several = len(runs) > 1
    parts = [
        "## The machine, and its ceilings in " + ("each run" if several else "this run"),
        markdown(("", "All runs" if several else ""), ((name, runs[0][name]) for name in common)),
    ]
    if several:
        differing = [name for name in names if name not in common]
        lines = ([merged.run_of(i), *(run[name] for name in differing)] for i, run in enumerate(runs))
        parts.append(markdown(("Run", *differing), lines))
    if runs[0]["GPU"] == "-":
        parts.append("Without a GPU these figures say nothing about the kernels.\n")
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _machine(run: Run) -> dict[str, str]:
    machine = run.machine
    known = {
        "Date": machine["date"],
        "GPU": machine.get("gpu"),
        "Compute capability": machine.get("compute_capability"),
        "Driver": machine.get("driver"),
        "CUDA (torch's)": machine.get("cuda"),
        "cuDNN": machine.get("cudnn"),
        "Processor": machine.get("processor"),
        "Python": machine.get("python"),
        "TileGym": machine.get("tilegym"),
        "torch": machine.get("torch"),
        "cuda-tile": machine.get("cuda_tile"),
        "Triton": machine.get("triton"),
        "Liger-Kernel": machine.get("liger_kernel"),
        "transformers": machine.get("transformers"),
        "dtype": run.settings.get("dtype"),
        "Backend": run.settings.get("backend"),
        "Copy bandwidth (large)": None,
        "GEMM of the vendor's library": None,
    }
    if run.roofline:
        copied, size = run.roofline["copied_bytes"] / 2**20, run.roofline["gemm_size"]
        known["Copy bandwidth (large)"] = f"{run.roofline['bandwidth'] / 1e9:.0f} GB/s ({copied:.0f} MiB)"
        known["GEMM of the vendor's library"] = f"{run.roofline['rate'] / 1e12:.3g} TFLOP/s ({size}x{size}x{size})"
    return {name: "-" if value is None else str(value) for name, value in known.items()}

"""From a region to the text of a file with its kernels."""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from tilegym.autokernel.generate.graph import Region
from tilegym.autokernel.generate.module import ModuleWriter
from tilegym.autokernel.generate.module import identifier
from tilegym.autokernel.generate.plan import Tuning
from tilegym.autokernel.generate.trace import trace


@dataclass(frozen=True)
class GeneratedKernel:
    """A file that computes a region.

    Attributes:
        source: its text.
        entry_point: the function in it that has the region's signature.
        inputs: the names of the entry point's parameters, in order.
        dtypes: the working dtypes that it serves.
        trains: whether it has a backward pass.
        rationale: which kernels it has and why, for the record.
        tuning: the tiles and hints that were chosen.
    """

    source: str
    entry_point: str
    inputs: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    trains: bool
    rationale: str
    tuning: Tuning
    region: Region = dataclasses.field(repr=False)


def generate(
    region: Callable | torch.nn.Module | ExportedProgram,
    inputs: Sequence[Any],
    name: str | None = None,
    trains: bool = True,
) -> GeneratedKernel:
    """Writes cuTile kernels for a region.

    Args:
        region: a function, a module, or what torch.export made of one, in which case its dtypes and what it says of
            sizes hold. A module's parameters and buffers become inputs, behind its own.
        inputs: examples of its inputs: tensors, and numbers, for which the kernels are written.
        name: of the entry point; that of the region if None.
        trains: whether a backward pass is wanted, where there can be one.

    Raises:
        Unsupported: the region is none that kernels are generated for.
    """
    if isinstance(region, ExportedProgram):
        region, name = region.module(check_guards=False), name or "region"
    own = region if hasattr(region, "__name__") else type(region)
    read = trace(region, inputs, identifier(name or own.__name__))
    return write(read, Tuning(), trains)


def variants(kernel: GeneratedKernel) -> list[GeneratedKernel]:
    """The same kernels with other tiles and hints, those that differ the least from what was chosen first."""
    made = {kernel.source: kernel}
    for changes in ALTERNATIVES:
        other = write(kernel.region, dataclasses.replace(kernel.tuning, **changes), kernel.trains)
        made.setdefault(other.source, other)
    return list(made.values())[1:]


ALTERNATIVES: tuple[dict[str, int], ...] = (
    {"elements": 8192},
    {"elements": 2048},
    {"registers": 32768},
    {"registers": 8192},
    {"eight_warps": 4096},
    {"eight_warps": 16384},
    {"wide": 8192, "wide_occupancy": 1},
    {"wide": 2048, "wide_warps": 4, "wide_occupancy": 4},
    {"gemv_n": 8},
    {"gemv_n": 8, "gemv_k_bytes": 512},
    {"gemv_occupancy": 6},
    {"gemv_occupancy": 3},
    {"tile_n": 256, "warps": 8},
    {"tile_m": 64},
    {"tile_n": 64},
    {"tile_k_bytes": 64},
)


def write(region: Region, tuning: Tuning, trains: bool) -> GeneratedKernel:
    """Writes the file of a region that was read, with ``tuning``."""
    writer = ModuleWriter(region, tuning, trains)
    kinds = ", ".join(name.removeprefix(f"{region.name}_") for name in writer.names)
    backward = "with its backward pass" if writer.gradient is not None else f"forward only: {writer.why_not}"
    rationale = f"{len(region.values)} steps fused into {kinds}; {backward}."
    return GeneratedKernel(
        writer.source,
        region.name,
        tuple(region.signature),
        region.dtypes,
        writer.gradient is not None,
        rationale,
        tuning,
        region,
    )

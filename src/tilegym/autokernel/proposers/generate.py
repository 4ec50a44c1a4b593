"""Proposes what the code generator writes for a region, and when that was too slow, the same with other tiles."""

from typing import Any

import torch

from tilegym.autokernel.protocol import Attempt
from tilegym.autokernel.protocol import Proposal
from tilegym.autokernel.protocol import Task
from tilegym.autokernel.protocol import TensorInfo
from tilegym.autokernel.tensors import torch_dtype
from tilegym.bench.deadline import Late
from tilegym.bench.deadline import at_most
from tilegym.inventory import BuildSpec
from tilegym.inventory import Solution
from tilegym.inventory import SourceFile
from tilegym.inventory.schema import CUDA_TILE

_SECONDS = 30.0  # for one region; some graphs with many variable sizes would take minutes
_SLOW = ("G7", "G8", "keep")


class Generate:
    """The code generator; a kernel of its own that was right and too slow is tried again with other tiles."""

    name = "generate"

    def propose(self, task: Task) -> Proposal | None:
        """The generated kernel or its next variant; None if the region is beyond the generator, or all was tried."""
        from tilegym.autokernel.generate import Unsupported
        from tilegym.autokernel.generate import generate
        from tilegym.autokernel.generate import variants

        own = [attempt for attempt in task.history if attempt.proposer == self.name]
        if own and not all(map(_only_slow, own)):
            return None
        tried = {text for attempt in own for text in attempt.files.values()}
        try:
            with at_most(_SECONDS):
                first = generate(task.run(), examples(task), name=task.definition.name, trains=task.trains)
        except (Unsupported, Late):
            return None
        for kernel in (first, *(variants(first) if own else ())):
            if kernel.source not in tried:
                return proposal_of(task, kernel)
        return None


def _only_slow(attempt: Attempt) -> bool:
    return attempt.status == "discard" and attempt.gate in _SLOW


def examples(task: Task) -> list[Any]:
    """Inputs like those of the task's first sample; numbers are what they were.

    A variable axis is never 1 there, nor as long as another one: torch.export would take that for a rule.
    """
    sample, sizes = task.samples[0], dict(task.definition.const_axes)
    for axis in task.definition.var_axes:
        size = sample.axes[axis]
        while size == 1 or size in sizes.values():
            size += 1
        sizes[axis] = size
    generator = torch.Generator().manual_seed(0)
    made = []
    for value, spec in zip(sample.inputs.values(), task.definition.inputs.values(), strict=True):
        if isinstance(value, TensorInfo):
            shape, dtype = [sizes[axis] for axis in spec.shape], torch_dtype(value.dtype)
            made.append(torch.rand(shape, generator=generator).to(dtype))
        else:
            made.append(value)
    return made


def proposal_of(task: Task, kernel: Any) -> Proposal:
    """A generated kernel as a proposal."""
    name = task.definition.name
    path = f"{task.folder}/kernels/{name}.py"
    solution = Solution(
        name=f"{name}_generated",
        definition=name,
        author="tilegym",
        spec=BuildSpec(
            language=CUDA_TILE,
            target_hardware=["NVIDIA GPU of compute capability 8.0 or later", "cpu"],
            entry_point=f"{path}::{kernel.entry_point}",
            dependencies=["torch", CUDA_TILE, "tilegym"],
            destination_passing_style=False,
        ),
        sources=[SourceFile(path=path)],
        description=kernel.rationale or None,
    )
    return Proposal(task.definition, solution, {path: kernel.source}, kernel.rationale)

"""Whose measurements serve a GPU for which the package ships none: those of a GPU with the same chip.

An H100 (SXM), an H200 and a GH200 differ in memory, not in multiprocessors. Of 128 tuning results of an H200 for
products of matrices and attention an H100 took more than 3% longer with 15: large products, by up to 29%, for which it
has its own, and launches of 10 to 40 us.
"""

import functools

import torch

GH100 = ((9, 0), 132)  # compute capability and multiprocessors
CHIPS = {"NVIDIA H200": GH100, "NVIDIA H100 80GB HBM3": GH100}  # of all GPUs that results are shipped for


@functools.cache
def others_like(gpu: str) -> tuple[str, ...]:
    """The other GPUs in :data:`CHIPS` that have the chip of ``gpu``, which is one of them or of this machine's."""
    chip = CHIPS.get(gpu)
    for found in map(torch.cuda.get_device_properties, range(torch.cuda.device_count())):
        if chip is None and found.name == gpu:
            chip = (found.major, found.minor), found.multi_processor_count
    return tuple(name for name, other in CHIPS.items() if other == chip and name != gpu)

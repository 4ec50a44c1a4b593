"""Launching a cuTile kernel where its tensors are: on their GPU and its current stream, or in the interpreter."""

from typing import Any

import cuda.tile as ct
import torch

from tilegym.backend import allocation
from tilegym.backend import recording
from tilegym.backend.cutile import direct_launch
from tilegym.backend.recording_writer import Submission
from tilegym.errors import UnsupportedError

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device = getattr(torch._C, "_cuda_getDevice", None)


def launch(
    like: torch.Tensor, grid: tuple[int, ...], kernel: ct.kernel, args: tuple[Any, ...], overlap: bool = False
) -> None:
    """Runs ``kernel`` over ``grid`` on the device of ``like``, without waiting for it.

    Args:
        like: a tensor of the launch; all tensors in ``args`` are on its device.
        grid: number of blocks along up to three axes; with a zero among them nothing is launched.
        kernel: a ``@ct.kernel`` function, its hints already chosen.
        args: the kernel's arguments in order. On a GPU none may require grad within autograd's sight: call this
            from an ``autograd.Function`` or with detached tensors.
        overlap: the kernel may begin before its predecessor on the stream has ended (programmatic dependent launch,
            compute capability 9.0), since it waits itself before it touches what others write.

    Raises:
        UnsupportedError: the tensors are on a device that is neither a CUDA GPU nor the CPU.
    """
    if 0 in grid:
        return
    if like.is_cuda:
        how, index = _ONE_GPU if allocation.one_gpu() else _SEVERAL_GPUS, like.get_device()
    elif like.device.type == "cpu":
        how, index = _INTERPRETER, -1
    else:
        raise UnsupportedError(f"cuTile kernels do not run on {like.device.type} tensors")
    recorder = recording.active
    if recorder is None:
        how.submit(index, grid, kernel, args, overlap)
    else:
        recorder.launch(how, index, grid, kernel, args, overlap)


def _to_one_of_several_gpus(
    index: int, grid: tuple[int, ...], kernel: ct.kernel, args: tuple[Any, ...], overlap: bool
) -> None:
    if index == _current_device():
        _to_gpu(index, grid, kernel, args, overlap)
        return
    with torch.cuda.device(index):
        ct.launch(_raw_stream(index), grid, kernel, args)


def _to_gpu(index: int, grid: tuple[int, ...], kernel: ct.kernel, args: tuple[Any, ...], overlap: bool) -> None:
    try:
        # A raw stream handle: torch.cuda.current_stream() costs as much as the launch.
        if overlap:
            ct.launch(_raw_stream(index), grid, kernel, args, programmatic_dependent_launch=True)
        else:
            ct.launch(_raw_stream(index), grid, kernel, args)
    except RuntimeError as error:
        if "invalid device context" not in str(error):
            raise
        # The thread, such as one of autograd's, has not called the CUDA runtime yet, which would have made the
        # device's context current. This call does, and does not wait for the device.
        torch.cuda.mem_get_info(index)
        ct.launch(_raw_stream(index), grid, kernel, args)


def _to_interpreter(index: int, grid: tuple[int, ...], kernel: ct.kernel, args: tuple[Any, ...], overlap: bool) -> None:
    # Imported here: a GPU user never needs the interpreter.
    from tilegym import interpreter

    interpreter.launch(grid, kernel, args)


_ONE_GPU = Submission(_to_gpu, direct_launch.prepare)
_SEVERAL_GPUS = Submission(_to_one_of_several_gpus, direct_launch.prepare)
_INTERPRETER = Submission(_to_interpreter, None)

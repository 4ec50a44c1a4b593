"""Ahead-of-time compilation of a kernel from example arguments, without a GPU."""

from __future__ import annotations

import io

from cuda.tile.compilation import export_kernel

from .signature import kernel_signature


def compile_kernel(kernel, args, arch: str = "sm_90") -> bytes:
    """Compiles ``kernel`` as a launch with ``args`` would, for ``arch`` ("sm_80", "sm_90", "sm_100", "sm_120").

    Returns the cubin. Needs tileiras (TileGym's extra of that name), not a GPU. ``args`` may be CPU tensors.
    Raises cuTile's own error, with its line, for a kernel that the compiler rejects.
    """
    cubin = io.BytesIO()
    export_kernel(kernel, [kernel_signature(kernel, args)], cubin, gpu_code=arch, output_format="cubin")
    return cubin.getvalue()

"""Whether kernels may read weights before the launch in front of them has ended.

A kernel that overlaps its predecessor (programmatic dependent launch) waits before it reads what others write. Weights
are written by none of a decoding step's launches, so a captured step can have them on their way by then: on an H200 a
layer of Llama-3.1-8B takes 107.5 us instead of 113.1. Anywhere else a weight may just have been written, by an
optimizer or as the product of a parametrization, and is waited for like the rest.
"""

import contextlib
import threading
from collections.abc import Iterator

_here = threading.local()


@contextlib.contextmanager
def stay(whether: bool = True) -> Iterator[None]:
    """Within it, on this thread, no launch changes the weights of the layers that are called (if ``whether``)."""
    before = staying()
    _here.stay = whether
    try:
        yield
    finally:
        _here.stay = before


def staying() -> bool:
    """Whether this thread is within :func:`stay`."""
    return getattr(_here, "stay", False)

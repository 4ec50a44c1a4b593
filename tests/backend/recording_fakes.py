"""An op with a cuTile implementation that counts its calls, and launches by addresses, for the tests of recordings."""

import contextlib
import ctypes
from collections.abc import Iterator

import cuda.tile as ct
import torch

from tilegym import backend
from tilegym.backend import dispatcher
from tilegym.backend.cutile.launch import launch

Tensor = torch.Tensor


@ct.kernel
def add_kernel(x, number, y, by: float, TILE: ct.Constant[int]):
    ct.store(y, (ct.bid(0),), ct.load(x, (ct.bid(0),), (TILE,)) + by + number)


def add(x: Tensor, y: Tensor, by: float) -> None:
    launch(x, (x.shape[0] // 4,), add_kernel, (x, 1, y, by, 4))


class ByAddress:
    """Stands in for :func:`direct_launch.prepare`, on the CPU: what it prepares adds eight floats a launch.

    ``errors``: what the next launches return instead of launching. ``prepares``: whether it does.
    """

    def __init__(self) -> None:
        self.launches, self.errors, self.prepares = [], [], True

    def prepare(self, index, grid, kernel, args, overlap):
        if not self.prepares:
            return None
        count, plus = args[0].shape[0], args[3] + args[1]

        def submit(*addresses: int) -> int:
            if self.errors and (error := self.errors.pop(0)):
                return error
            self.launches.append(addresses)
            source, target = (ctypes.cast(a, ctypes.POINTER(ctypes.c_float)) for a in addresses)
            for i in range(count):
                target[i] = source[i] + plus
            return 0

        return submit, (0, 2)


class Served:
    """An op of ``x``, ``by`` and ``other``; ``calls`` counts those that its implementation serves."""

    def __init__(self) -> None:
        self.calls = 0
        self.serve = self.plain

        @backend.dispatch("recorded_for_test")
        def op(x: Tensor, by: float = 0.5, other: Tensor | None = None, several: list[Tensor] = ()) -> Tensor:
            """x + by + 1, or what a test makes of it."""

        @backend.register_impl("recorded_for_test", "pytorch")
        def _(x: Tensor, by: float = 0.5, other: Tensor | None = None, several: list[Tensor] = ()) -> Tensor:
            return x + by + 1

        @backend.register_impl("recorded_for_test", "cutile")
        def _(x: Tensor, by: float = 0.5, other: Tensor | None = None, several: list[Tensor] = ()) -> Tensor:
            self.calls += 1
            return self.serve(x, by, other, several)

        self.op = op

    def __call__(self, *args, **kwargs):
        return self.op(*args, **{"backend": "cutile"} | kwargs)

    @staticmethod
    def plain(x, by, other, several):
        y = torch.empty_like(x)
        add(x, y, by)
        return y

    def calls_of(self, *calls) -> list[int]:
        """How many calls the implementation has served after each of these; checks their results."""
        counts = []
        for args in calls:
            assert torch.equal(self(*args), args[0] + (args[1] if len(args) > 1 else 0.5) + 1)
            counts.append(self.calls)
        return counts


@contextlib.contextmanager
def served_op() -> Iterator[Served]:
    """The op, removed again afterwards."""
    try:
        yield Served()
    finally:
        dispatcher._ops.pop("recorded_for_test")
        dispatcher._warned.clear()


def x(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape or (8,), generator=torch.Generator().manual_seed(seed))

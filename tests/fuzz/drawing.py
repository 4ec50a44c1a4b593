"""What generators draw: sizes, options, layouts and data, and the case that they make of them."""

import math
import random
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
F8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SIZES = (1, 2, 3, 7, 8, 16, 17, 32, 64, 127, 128, 129, 255, 1000, 1024, 4097)
# Ops of rows, which are to hold also where squares overflow or vanish.
ROWS = frozenset(
    "swiglu geglu gelu relu sigmoid_mul silu_and_mul dropout rms_norm fused_add_rms_norm layer_norm rms_norm_gated "
    "dual_rms_norm group_norm rms_norm_add softmax argmax".split()
)
GENERATORS: dict[str, Callable[["Draw"], "Case"]] = {}
FUNCTIONS: dict[str, Callable] = {}  # what is called, of what is no function of tilegym.ops


@dataclass
class Case:
    """A call of an op, and how its results are compared."""

    args: dict[str, Any]
    grad: Sequence[str] = ()  # arguments that gradients can be asked for
    mutated: Sequence[str] = ()  # arguments that the op writes to
    oracle: dict[str, Any] = field(default_factory=dict)  # arguments that differ in fp64
    exact: bool = False  # whether results are equal bit for bit
    # By result, or "gradients": an error that is allowed, relative to the largest number.
    floor: dict[str, float] = field(default_factory=dict)
    cancelled: float = 0.3  # an error of gradients that cancel, in roundings of the largest argument
    eps: float = 0.0  # of the dtype in which it is computed, where results may have a wider one
    rowwise: bool = False  # whether each row of the outputs is compared by itself, too
    settle: Callable[..., None] | None = None  # takes out of the results what may differ
    broken: str | None = None  # which argument was made wrong, and how

    def __post_init__(self) -> None:
        self.grad = [name for name in self.grad if self.args.get(name) is not None]


def generates(make: Callable[["Draw"], Case]) -> Callable[["Draw"], Case]:
    """Registers the generator of the op that is called as ``make`` is."""
    GENERATORS[make.__name__] = make
    return make


def calls(function: Callable) -> Callable[[Callable[["Draw"], Case]], Callable[["Draw"], Case]]:
    """As :func:`generates`, of calls of ``function``."""

    def register(make: Callable[["Draw"], Case]) -> Callable[["Draw"], Case]:
        FUNCTIONS[make.__name__] = function
        return generates(make)

    return register


class Draw:
    """Random choices for one case of an op: ``choices`` for shapes, dtypes and options, ``data`` for all else.

    With ``reuse`` there are only so many different ``choices`` for a thousand seeds: those that leave the same
    remainder share them.
    """

    def __init__(self, op: str, seed: int, device: str, reuse: int = 0) -> None:
        self.op, self.device = op, device
        self.gpu = device != "cpu"  # where sizes are larger
        self.choices = random.Random(f"{op}/pool/{seed // 1000}/{seed % reuse}" if reuse else f"{op}/own/{seed}")
        self.data = random.Random(f"{op}/data/{seed}")
        self.generator = torch.Generator().manual_seed(self.data.getrandbits(48))
        self.dtype = self.choices.choice(DTYPES)
        self.magnitude = self.data.choices([1.0, 0.01, 30.0, 1000.0, 0.0], [80, 5, 8, 5, 2])[0]
        if op in ROWS and self.data.random() < 0.04:
            self.magnitude = self.data.choice([1e15, 1e18, 1e-15])
        self.nan = self.data.random() < 0.08  # whether NaN may be strewn in
        # Everything contiguous; with reuse more often, since each layout is compiled anew.
        self.plain = self.data.random() < 0.6 if reuse else self.choices.random() < 0.3
        self.notes: list[str] = []

    def chance(self, probability: float) -> bool:
        return self.choices.random() < probability

    def one(self, *values: Any) -> Any:
        return self.choices.choice(values)

    def limit(self, most: float) -> None:
        """Numbers of the case are at most about ``most``."""
        self.magnitude = min(self.magnitude, most)

    def other_dtype(self, probability: float = 0.15) -> torch.dtype:
        """Mostly the case's, sometimes another."""
        return self.one(*DTYPES) if self.chance(probability) else self.dtype

    def size(self, most: int = 200, zero: float = 0.03) -> int:
        """Up to ``most``, mostly near a power of two; 0 with probability ``zero``."""
        if self.chance(zero):
            return 0
        return self.one(*(n for n in SIZES if n <= most)) if self.chance(0.75) else self.choices.randint(1, most)

    def lead(self, most: int = 150) -> tuple[int, ...]:
        """Leading dimensions, none to three, their product ``most`` at most."""
        dims = self.choices.choices([0, 1, 2, 3], [1, 4, 4, 2])[0]
        left, shape = most, []
        for i in range(dims):
            n = self.size(max(1, left if i == dims - 1 else min(left, 5)), 0.02)
            left //= max(n, 1)
            shape.append(n)
        return tuple(shape)

    def numbers(self, shape: Sequence[int], scale: float = 1.0) -> torch.Tensor:
        """Normal random numbers, in fp32 on the CPU."""
        return torch.randn(tuple(shape), generator=self.generator) * scale

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Integers from ``low`` to below ``high``, in some layout."""
        numbers = torch.randint(low, max(high, low + 1), shape, generator=self.generator)
        return self.laid_out(numbers.to(dtype), expand=False)

    def weight(self, *shape: int, **options: Any) -> torch.Tensor:
        """As :meth:`tensor`, of numbers whose magnitude is not the case's."""
        return self.tensor(*shape, magnitude=1.0, **options)

    def tensor(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        scale: float | None = None,
        magnitude: float | None = None,
        values: torch.Tensor | None = None,
        expand: bool = True,
        nan: bool = False,
    ) -> torch.Tensor:
        """Random numbers, or ``values``, in the case's dtype and some layout.

        ``expand``: the layout may give several elements the same memory. ``nan``: one may be NaN or infinite.
        """
        dtype = dtype or self.dtype
        if values is None:
            values = self.numbers(shape, scale or 1.0) * (self.magnitude if magnitude is None else magnitude)
        if nan and self.nan and values.numel():
            where = tuple(self.data.randrange(n) for n in values.shape)
            values[where] = self.data.choice([math.nan, math.inf, -math.inf])
            self.notes.append(f"{values[where]:g} at {where}")
        if dtype in (torch.float16, *F8) and not self.nan:
            values = values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        return self.laid_out(values.to(dtype), expand)

    def laid_out(self, x: torch.Tensor, expand: bool = True) -> torch.Tensor:
        """The values of ``x`` in some layout; memory around them is NaN, or large numbers."""
        layout = "contiguous"
        if not self.plain:
            layouts = ["contiguous", "offset", "columns", "permuted", "steps", "expanded", "rows"]
            layout = self.data.choices(layouts, [6, 3, 3, 3, 2, 2 if expand else 0, 2])[0]
        if layout == "contiguous" or x.dim() == 0 or (x.dtype in F8 and layout != "permuted"):
            return x.contiguous().to(self.device)
        if layout == "expanded":
            dims = [i for i in range(x.dim()) if x.shape[i] > 0]
            if not dims:
                return x.contiguous().to(self.device)
            return x.narrow(self.data.choice(dims), 0, 1).contiguous().to(self.device).expand(x.shape)
        if layout == "permuted":
            order = list(range(x.dim()))
            self.data.shuffle(order)
            back = [order.index(i) for i in range(x.dim())]
            return x.permute(order).contiguous().to(self.device).permute(back)
        return self._within(x.shape, x.dtype, layout).copy_(x)

    def _within(self, shape: Sequence[int], dtype: torch.dtype, layout: str) -> torch.Tensor:
        """A tensor that is part of a larger one."""
        if layout == "offset":
            offset, size = self.data.choice([1, 1, 2, 3, 8]), math.prod(shape)
            return self._filled(dtype, offset + size + 5)[offset : offset + size].view(shape)
        if layout == "columns":
            more = self.data.choice([1, 3, 8, 16])
            offset = self.data.choice([0, 1, more])
            return self._filled(dtype, *shape[:-1], shape[-1] + more)[..., offset : offset + shape[-1]]
        if layout == "rows":
            return self._filled(dtype, shape[0] + 2, *shape[1:])[1 : 1 + shape[0]]
        dim = self.data.randrange(len(shape))  # every other element
        wide = [2 * n if i == dim else n for i, n in enumerate(shape)]
        return self._filled(dtype, *wide)[tuple(slice(None, None, 2 if i == dim else 1) for i in range(len(shape)))]

    def _filled(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """What an op must not use."""
        value = math.nan if dtype.is_floating_point else True if dtype == torch.bool else 2**30
        return torch.full(shape, value, dtype=dtype, device=self.device)

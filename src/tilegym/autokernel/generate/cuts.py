"""What is cut along its columns, in autograd: as a whole, so that its gradient is written once, where it belongs.

A view of some columns has a backward pass of its own in PyTorch: zeros for the whole, a copy, and a sum over the views.
"""

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace

from tilegym.autokernel.generate.graph import Cut
from tilegym.autokernel.generate.graph import Output
from tilegym.autokernel.generate.graph import Region
from tilegym.autokernel.generate.graph import Value
from tilegym.autokernel.generate.kernels import ROW_NORMS
from tilegym.autokernel.generate.launches import Imports
from tilegym.autokernel.generate.plan import Kernel


def gradient_name(name: str) -> str:
    """What the gradient of ``name`` is called."""
    return f"d{name}" if len(name) == 1 else f"d_{name}"


@dataclass(frozen=True)
class Wholes:
    """The arguments of a region that autograd is given as a whole; ``cuts``: the parts of all of them, by name."""

    cuts: dict[str, Cut] = field(default_factory=dict)

    def merged(self, names: list[str]) -> list[str]:
        """``names`` with the whole in the place of its parts."""
        return list(dict.fromkeys(self.cuts[n].source if n in self.cuts else n for n in names))

    def merged_gradients(self, names: list[str]) -> list[str]:
        """The same with the names of gradients."""
        of = {gradient_name(n): gradient_name(c.source) for n, c in self.cuts.items()}
        return list(dict.fromkeys(of.get(n, n) for n in names))

    def views(self, names: list[str]) -> list[str]:
        """The statements that cut those of ``names`` out that are parts."""
        return [f"{n} = {self.cuts[n].of(self.cuts[n].source)}" for n in names if n in self.cuts]

    def allocated(
        self, outputs: list[Output], make: Callable[[Output], str], imports: Imports
    ) -> tuple[dict[str, str], list[str]]:
        """Expressions for what is allocated, by name, and the statements that cut ``outputs`` out of it.

        Args:
            make: gives the expression for a result that is no part.
        """
        of = {gradient_name(n): c for n, c in self.cuts.items()}
        made, views = {}, []
        for output in outputs:
            cut = of.get(output.name)
            if cut is None:
                made[output.name] = make(output)
                continue
            source, name = cut.source, gradient_name(cut.source)
            if name not in made and sum(len(c.columns) for c in of.values() if c.source == source) == cut.width:
                imports.add((ROW_NORMS, "contiguous_like"))
                made[name] = f"contiguous_like({source})"
            made.setdefault(name, f"{source}.new_zeros({source}.shape)")
            views.append(f"{output.name} = {cut.of(name)}")
        return made, views

    def pairs(self, kernel: Kernel) -> dict[str, tuple[str, str]]:
        """The arrays whose columns are two inputs' or outputs' of ``kernel`` in turns, by name.

        Read by themselves these take two bytes at a time, and each line twice.
        """
        names = [*kernel.inputs, *(o.name for o in kernel.outputs)]
        if kernel.kind != "flat":
            return {}
        of = self.cuts | {gradient_name(n): replace(c, source=gradient_name(c.source)) for n, c in self.cuts.items()}
        found: dict[str, dict[int, str]] = {}
        for name in names:
            if name in of and of[name].columns.step == 2 and of[name].width == 2 * len(of[name].columns):
                found.setdefault(of[name].source, {})[of[name].columns.start] = name
        pairs = {array: (halves[0], halves[1]) for array, halves in found.items() if len(halves) == 2}
        # Some array has to be one of the tile's own columns.
        return pairs if len(names) > 2 * len(pairs) else {}

    def checks(self) -> list[str]:
        """Conditions under which a width is not the one that the parts were cut from."""
        return list(dict.fromkeys(f"{c.source}.shape[-1] != {c.width}" for c in self.cuts.values() if c.width))


def wholes_of(region: Region, inputs: dict[str, Value], computed: list[Output]) -> Wholes:
    """The arguments all of whose parts are tiles with gradients of their own, no column being in two of them.

    The backward pass has to read one of the parts: then the whole is kept for it anyhow.

    Args:
        region: what is differentiated.
        inputs: what its backward pass reads.
        computed: what that computes.
    """
    made = {o.name: o for o in computed}
    found: dict[str, Cut] = {}
    for source in dict.fromkeys(c.source for c in region.cuts.values()):
        cuts = {n: c for n, c in region.cuts.items() if c.source == source}
        outputs = [made.get(gradient_name(n)) for n in cuts]
        columns = [i for c in cuts.values() for i in c.columns]
        apart = len(set(columns)) == len(columns)
        tiles = all(o is not None and o.value.cols and not o.vector for o in outputs)
        if apart and tiles and any(n in inputs for n in cuts) and source not in region.inputs:
            found |= cuts
    return Wholes(found)


def pairs_of(region: Region) -> Wholes:
    """The arguments that are cut into every other column, where there is no backward pass."""
    cuts = {n: c for n, c in region.cuts.items() if c.columns.step == 2}
    return Wholes({n: c for n, c in cuts.items() if c.source not in region.inputs})

"""Generated kernels compute what their regions compute, forward and backward, as exactly as PyTorch."""

import functools
import sys
import types

import pytest
import torch
from common import PyTestCase
from common import dtypes
from common import randn
from generate_regions import CASES

from tilegym.autokernel.generate import GeneratedKernel
from tilegym.autokernel.generate import generate


def loaded(kernel: GeneratedKernel):
    """The entry point of a generated file."""
    import linecache

    name = f"generated_{kernel.entry_point}_{abs(hash(kernel.source))}"
    module = types.ModuleType(name)
    module.__file__ = f"<{name}>"
    linecache.cache[module.__file__] = (len(kernel.source), None, kernel.source.splitlines(True), module.__file__)
    sys.modules[name] = module
    exec(compile(kernel.source, module.__file__, "exec"), module.__dict__)
    return getattr(module, kernel.entry_point)


@functools.cache
def case(name: str):
    """The kernel of a region, its entry point, and the region as a function of all of its inputs, by name."""
    chosen = CASES[name]
    region = chosen.make()
    inputs = [randn(*shape, dtype=torch.bfloat16) for shape in chosen.inputs]
    if isinstance(region, torch.nn.Module):
        region = region.to(torch.bfloat16)
    kernel = generate(region, inputs, name)
    return kernel, loaded(kernel), region


def arguments(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    kernel, _, region = case(name)
    chosen = CASES[name]
    tensors = [chosen.scale * randn(*s, dtype=torch.float32, seed=i) for i, s in enumerate(chosen.inputs)]
    if isinstance(region, torch.nn.Module):
        tensors += [t.detach() for t in (*region.parameters(), *region.buffers())]
    return {n: t.to(dtype) for n, t in zip(kernel.inputs, tensors, strict=True)}


def reference(name: str):
    kernel, _, region = case(name)

    def run(**tensors):
        if not isinstance(region, torch.nn.Module):
            return region(*tensors.values())
        own = [*dict(region.named_parameters()), *dict(region.named_buffers())]
        values = list(tensors.values())
        count = len(values) - len(own)
        return torch.func.functional_call(region, dict(zip(own, values[count:], strict=True)), tuple(values[:count]))

    return run


class Test_Generate(PyTestCase):
    @dtypes(torch.float32, torch.bfloat16)
    @pytest.mark.parametrize("name", CASES)
    def test_op(self, name, dtype):
        kernel, entry, _ = case(name)
        assert dtype in kernel.dtypes and kernel.trains == bool(CASES[name].gradient)
        self.assertCorrectness(entry, reference(name), arguments(name, dtype), gradient=CASES[name].gradient)

    @pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.exact])
    def test_exact_steps_give_equal_bits(self, name):
        _, entry, _ = case(name)
        for dtype in (torch.bfloat16, torch.float16):
            given = arguments(name, dtype)
            torch.testing.assert_close(entry(**given), reference(name)(**given), rtol=0, atol=0)

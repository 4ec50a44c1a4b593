"""Launch functions are operators of their own for torch.compile, whatever else is called the same."""

import importlib.util
import sys

import torch

from tilegym.ops.cutile.rms_norm import rms_norm_forward

SOURCE = """
import torch
from tilegym.backend.cutile.library import compilable

@compilable(fake=torch.empty_like)
def rms_norm_forward(x: torch.Tensor) -> torch.Tensor:
    return x * {factor}
"""


def loaded(folder, name, factor):
    file = folder / f"{name}.py"
    file.write_text(SOURCE.format(factor=factor))
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.rms_norm_forward


def test_functions_of_one_name_in_several_files_do_not_replace_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # read again for a file of the same second and size
    two, three = loaded(tmp_path, "two", 2), loaded(tmp_path, "three", 3)
    x = torch.ones(4)

    def both(x):
        return two(x), three(x)

    for call in (both, torch.compile(both, backend="eager", fullgraph=True)):
        assert [y[0].item() for y in call(x)] == [2, 3]
    # Nor TileGym's own.
    assert len(torch.ops.tilegym.rms_norm_forward.default._schema.arguments) == 7
    torch.library.opcheck(rms_norm_forward.operator, (torch.randn(2, 8), None, None, 1e-6, None, 0.0, True))
    # A file that is loaded again is the same one.
    again = loaded(tmp_path, "two", 5)
    assert again.operator.name() == two.operator.name()
    assert torch.compile(lambda x: again(x), backend="eager", fullgraph=True)(x)[0].item() == 5

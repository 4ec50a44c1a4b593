"""How the forward passes of rms_norm, layer_norm and fused_add_rms_norm count their blocks."""

import pytest
import torch
from common import randn

from tilegym.backend import recording
from tilegym.ops import fused_add_rms_norm
from tilegym.ops import layer_norm
from tilegym.ops import rms_norm
from tilegym.ops.cutile import fused_add_rms_norm as add_rms_norm_module
from tilegym.ops.cutile import layer_norm as layer_norm_module
from tilegym.ops.cutile import rms_norm as rms_norm_module
from tilegym.ops.cutile import row_norms

CALLS = {
    "rms_norm": (rms_norm_module, lambda x, w: rms_norm(x, x.shape[-1], w, 1e-6, backend="cutile")),
    "layer_norm": (layer_norm_module, lambda x, w: layer_norm(x, x.shape[-1], w, backend="cutile")),
    "add_rms_norm": (add_rms_norm_module, lambda x, w: fused_add_rms_norm(x, x, w, 1e-6, backend="cutile")[0]),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", [(37, 300), (410, 2600)], ids=["whole", "pieces"])
def test_more_blocks_than_the_second_axis_holds(name, shape, monkeypatch):
    """They are counted along the first axis then, with the same results."""
    module, call = CALLS[name]
    monkeypatch.setattr(module, "forward_plan", module.forward_plan.__wrapped__)
    grids, real = [], module.launch
    monkeypatch.setattr(module, "launch", lambda like, grid, *args: (grids.append(grid), real(like, grid, *args)))
    x, w = randn(*shape, dtype=torch.bfloat16), randn(shape[-1], dtype=torch.bfloat16, seed=1)
    recording.forget()  # a call that repeats a recorded one launches by itself
    expected = call(x, w)
    monkeypatch.setattr(row_norms, "MAX_BLOCKS", 2)
    recording.forget()
    assert torch.equal(call(x, w), expected)
    assert grids[0][0] == 1 and grids[1] == (grids[0][1],)


def test_blocks_that_run_at_once(monkeypatch):
    """One for each multiprocessor, or four where their rows leave them registers."""
    monkeypatch.setattr(row_norms, "sm_count", lambda device: 10)
    assert [row_norms.at_once(rows, 4096, 0) for rows in (1, 10, 11, 40, 41)] == [1, 1, 4, 4, 0]
    assert [row_norms.at_once(rows, 8192, 0) for rows in (10, 11)] == [1, 0]

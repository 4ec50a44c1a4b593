"""Generated kernels move no byte more than they have to, and leave no multiprocessor idle that could work."""

import inspect

import pytest
import torch
from common import PyTestCase
from common import randn
from common import recorded_launches
from test_generated_kernels import arguments
from test_generated_kernels import case
from test_generated_kernels import loaded
from test_generated_kernels import product

from tilegym.autokernel.generate import generate
from tilegym.errors import UnsupportedError


def some_columns(x):
    return torch.sigmoid(x[..., :8]) * x[..., 16:24]


def overlapping_columns(x):
    return torch.sigmoid(x[..., :8]) * x[..., 4:12]


def every_other_column(x):
    return torch.sigmoid(x[..., ::2]) * x[..., 1::2]


@pytest.mark.parametrize("region", [some_columns, overlapping_columns, every_other_column], ids=lambda r: r.__name__)
def test_gradients_of_parts_are_written_to_the_whole(region):
    given = {"x": randn(3, 5, 24, dtype=torch.bfloat16)}
    entry = loaded(generate(region, [given["x"]]))
    PyTestCase().assertCorrectness(entry, region, given, gradient=True)
    if region is overlapping_columns:
        return
    leaf = given["x"].cpu().requires_grad_()
    with recorded_launches() as launches:
        y = entry(leaf)
        (gradient,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
    taken = [a for a in launches[-1][1] if isinstance(a, torch.Tensor)]
    places = [t.untyped_storage().data_ptr() for t in taken]
    assert places.count(gradient.untyped_storage().data_ptr()) == (2 if region is some_columns else 1)
    if region is every_other_column:  # two bytes of each four would be read and written by themselves
        assert all(a.is_contiguous() for _, args in launches for a in args if isinstance(a, torch.Tensor))
        strided = {"x": randn(5, 3, 24, dtype=torch.bfloat16).transpose(0, 1)}
        PyTestCase().assertCorrectness(entry, region, strided, gradient=True)
        alone = loaded(generate(region, [given["x"]], "alone", trains=False))
        PyTestCase().assertCorrectness(alone, region, given)
    wider = {"x": randn(3, 5, 26, dtype=torch.bfloat16)}
    if region is some_columns:
        PyTestCase().assertCorrectness(entry, region, wider, gradient=True)
    else:
        with pytest.raises(UnsupportedError, match="shapes"):
            entry(**wider)


def test_a_gradient_of_two_inputs_is_written_once():
    kernel, entry, _ = case("add_rms_norm")
    leaves = [t.requires_grad_() for t in arguments("add_rms_norm", torch.bfloat16).values()]
    outputs = entry(*leaves)
    gradients = torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs])
    assert gradients[0].data_ptr() == gradients[1].data_ptr()
    assert kernel.source.count("store(d_") == 1


@pytest.mark.parametrize("m, n, blocks", [(512, 1024, 128), (512, 4096, 128), (8192, 4096, 2048), (16, 1024, 16)])
def test_tiles_of_products_are_smaller_where_multiprocessors_would_be_idle(m, n, blocks, monkeypatch):
    entry = product("linear_gelu")[1]
    plan_of = inspect.unwrap(entry.__globals__["gemm_plan"])
    monkeypatch.setitem(entry.__globals__, "sm_count", lambda device: 132)
    _, grid, tile_m, tile_n, tile_k = plan_of(m, n, 16, 0)
    assert grid == (blocks,) and tile_m * tile_n * blocks == m * n
    assert tile_k == (128 if tile_m * tile_n <= 4096 else 64)


def test_what_is_needed_behind_a_reduction_is_asked_for_before_it():
    """Where all blocks run at once; where there are more, others have work while one waits."""
    kernel, entry, region = case("glm4_post_norm")
    body = kernel.source[kernel.source.index("@ct.kernel") :]
    reduction = body.index("ct.sum(")
    for name in ("residual", "weight"):
        assert body.index(f"behind(hidden_states_loaded, {name}_loaded)") < reduction
    names = list(kernel.inputs)
    for rows, at_once in ((1, True), (199, False)):
        given = dict(zip(names, (randn(rows, 77, dtype=torch.bfloat16) for _ in names), strict=True))
        given["weight"] = given["weight"][0]
        given["weight"][:3] = torch.tensor([float("nan"), float("inf"), -0.0])  # is no part of any other column
        given = {n: t.cpu() for n, t in given.items()}
        with recorded_launches(run=True) as launches:
            y = entry(**given)
        assert launches[-1][1][-1] is at_once
        expected = region(**given)
        assert torch.equal(y.isnan(), expected.isnan()) and y[:, 3:].isfinite().all()

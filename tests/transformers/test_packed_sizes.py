"""Parts for images of any sizes, one behind the other, as graphs: what they find on the host is found before."""

import inspect

import pytest
import torch
from common import HAS_GPU
from common import some
from models_with_images import PACKED
from models_with_images import make
from test_forward_graph import graphs  # noqa: F401
from transformers.utils.generic import get_max_seqlen

import tilegym
from tilegym.errors import FallbackWarning
from tilegym.transformers import attention
from tilegym.transformers import forward_graph
from tilegym.transformers import graph_calls
from tilegym.transformers import packed_sizes

SAME, OTHER, LAST = [[1, 4, 4], [1, 4, 4]], [[1, 2, 8], [1, 4, 4]], [[1, 4, 4], [1, 8, 2]]  # of as many patches
MORE = [[1, 4, 4], [1, 2, 4], [1, 2, 4]]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """PyTorch takes images one by one, which on a CPU is no matter."""
    if not HAS_GPU:
        monkeypatch.setattr(attention, "by_kernel", lambda backend: True)


def call(part, grid, seed):
    patches = sum(t * h * w for t, h, w in grid)
    pixels = torch.randn(patches, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(seed))
    at = next(part.parameters()).device
    with torch.no_grad():
        return graph_calls.leaves_of(part(pixels.to(at), grid_thw=torch.tensor(grid, device=at)))


@pytest.mark.parametrize("name", some(PACKED, "qwen2_5_vl", "qwen3_vl"))
def test_same_features(name, graphs):  # noqa: F811
    model = make(name)
    part = model.model.visual
    calls = list(enumerate([SAME, SAME, SAME, SAME, OTHER, OTHER, LAST, MORE, SAME]))
    expected = [call(part, grid, seed) for seed, grid in calls]
    with tilegym.apply(model, use_cutile=HAS_GPU):
        for (seed, grid), features in zip(calls, expected, strict=True):
            for got, wanted in zip(call(part, grid, seed), features, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
        kept = forward_graph._kept[part]
        assert not kept.failed and kept.sizes is not None
        # The first call is watched, the third one of a form captured; windows of other sizes are of another form.
        assert graphs and sum(graphs) >= 4
    assert part not in forward_graph._kept and "forward" not in vars(part)


def test_nothing_is_read_from_the_device_in_a_replay(graphs, monkeypatch):  # noqa: F811
    model = make("qwen2_5_vl")
    part = model.model.visual
    with tilegym.apply(model, use_cutile=HAS_GPU):
        for seed in range(3):
            call(part, SAME, seed)
        assert len(graphs) == 1
        sizes = forward_graph._kept[part].sizes
        names = {name for _, names, _ in sizes._calls for name in names}
        assert {"cu_seqlens", "cu_window_seqlens", "window_index", "position_ids"} <= names
        module = inspect.getmodule(type(part))
        for function, asked, _ in sizes._calls:
            monkeypatch.setattr(module, function.__name__, only_looks(function, asked))
        call(part, SAME, 3)
        assert graphs == [2]
        with pytest.raises(AssertionError, match="looks itself"):
            type(part).forward(part, torch.zeros(32, 1176).to(model.device), grid_thw=torch.tensor(SAME))


def only_looks(function, names):
    def looks(*args, kwargs, **options):
        name = options.get("kwarg_name", "max_seqlen") if function is get_max_seqlen else names[0]
        known = kwargs.get(name) is not None
        assert known, f"{function.__name__} looks itself"
        return function(*args, kwargs=kwargs, **options)

    return looks


def test_results_of_other_sizes_are_compared(monkeypatch):
    model = make("qwen2_5_vl")
    part = model.model.visual
    expected = [call(part, grid, 0) for grid in (SAME, OTHER)]
    of = packed_sizes.Sizes.of
    with tilegym.apply(model, use_cutile=HAS_GPU):
        for _ in range(3):
            call(part, SAME, 0)
        held = of(forward_graph._kept[part].sizes, "first", {"grid_thw": torch.tensor(SAME).to(model.device)})
        monkeypatch.setattr(packed_sizes.Sizes, "of", lambda *_: held)
        with pytest.warns(FallbackWarning, match="images of other sizes"):
            got = call(part, OTHER, 0)
        for _ in range(3):
            for grid, features in zip((SAME, OTHER), expected, strict=True):
                for a, b in zip(call(part, grid, 0), features, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        for a, b in zip(got, expected[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "call, match",
    [
        (("cu_seqlens",), "tensor of its own"),
        ((), "no names"),
        (("cu_seqlens", "max_seqlen"), "no names"),
    ],
)
def test_what_cannot_be_found_before(call, match):
    grid = torch.tensor(SAME)
    argument = torch.tensor(SAME) if "own" in match else grid
    seen = [packed_sizes._Seen(len, {"grid_thw": argument}, call, (grid,))] if call else []
    with pytest.raises(ValueError, match=match):
        packed_sizes.Sizes(seen, {"grid_thw": grid})


def test_values_of_few_sizes_are_kept():
    counted = []

    def count(grid_thw):
        counted.append(grid_thw)
        return grid_thw.sum()

    grid = torch.tensor(SAME)
    sizes = packed_sizes.Sizes([packed_sizes._Seen(count, {"grid_thw": grid}, ("n",), (grid,))], {"grid_thw": grid})
    for step in [0, 0, *range(packed_sizes.MOST_SIZES + 1), 0]:
        inputs = {"grid_thw": grid + step}
        assert sizes.of(sizes.key(inputs), inputs)["n"] == (grid + step).sum()
    assert len(sizes._kept) == packed_sizes.MOST_SIZES and len(counted) == packed_sizes.MOST_SIZES + 2

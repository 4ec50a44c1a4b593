"""No part of cuda.tile's language is missing: what the other tests leave out, and a list of all there is."""

import re
from pathlib import Path
from typing import Annotated

import cuda.tile as ct
import pytest
import torch

from tilegym.interpreter import compile_kernel
from tilegym.interpreter import launch

from . import test_documented_examples as documented

# Names that mean nothing inside a kernel, by what they are for.
AROUND_KERNELS = {
    "launch": {"launch", "compilation", "compiler_timeout", "tune"},
    "errors": {name for name in dir(ct) if name.endswith(("Error", "Exception"))},
    "types": {"Array", "DType", "Scalar", "Tile", "TiledView", "ConstantAnnotation", "ListAnnotation"},
}
DTYPES = {name for name in dir(ct) if isinstance(getattr(ct, name), ct.DType)}


def test_no_name_is_left_out():
    texts = [path.read_text() for path in Path(__file__).parent.glob("*.py")]
    texts += [example.values[1] for example in documented.examples()]
    used = set(re.findall(r"\bct\.(\w+)", "\n".join(texts)))
    tested_by_table = DTYPES | set().union(*AROUND_KERNELS.values())
    assert {name for name in dir(ct) if not name.startswith("_")} - used - tested_by_table == set()


@ct.kernel
def raw_atomics(x, old):
    memory, lane = x.get_raw_memory(), ct.arange(4, dtype=ct.int32)
    update = (lane + 1).astype(x.dtype)
    order, scope = ct.MemoryOrder.RELAXED, ct.MemoryScope.BLOCK
    ct.store(old, (0, 0), memory.atomic_add_offset(lane, update, memory_order=order, memory_scope=scope)[None, :])
    ct.store(old, (1, 0), memory.atomic_max_offset(lane + 4, update, mask=lane > 1)[None, :])
    ct.store(old, (2, 0), memory.atomic_min_offset(lane + 8, update)[None, :])
    ct.store(old, (3, 0), memory.atomic_and_offset(lane + 12, update)[None, :])
    ct.store(old, (4, 0), memory.atomic_or_offset(lane + 16, update)[None, :])
    ct.store(old, (5, 0), memory.atomic_xor_offset(lane + 20, update)[None, :])
    ct.store(old, (6, 0), memory.atomic_xchg_offset(lane + 24, update)[None, :])
    ct.store(old, (7, 0), memory.atomic_cas_offset(lane + 28, 3, 7)[None, :])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_atomics_of_raw_memory(dtype):
    before = (torch.arange(32) % 5).to(dtype).reshape(8, 4)
    x, old, y = before.clone(), torch.full((8, 4), -1, dtype=dtype), torch.arange(1, 5, dtype=dtype)
    launch((1,), raw_atomics, (x.view(-1), old))
    masked = torch.tensor([False, False, True, True])
    want = [before[0] + y, torch.where(masked, torch.maximum(before[1], y), before[1]), torch.minimum(before[2], y)]
    want += [before[3] & y, before[4] | y, before[5] ^ y, y, torch.where(before[7] == 3, 7, before[7])]
    assert torch.equal(x, torch.stack(want))
    assert torch.equal(old[masked.expand(8, 4)], before[masked.expand(8, 4)])
    assert torch.equal(old[[0, *range(2, 8)]], before[[0, *range(2, 8)]])


@ct.kernel
def view_atomics(highest, lowest, common, any_of, parity, updates):
    update = ct.load(updates, (ct.bid(0),), (4,))
    highest.tiled_view((4,)).atomic_store_max((0,), update)
    lowest.tiled_view((4,)).atomic_store_min((0,), update)
    common.tiled_view((4,)).atomic_store_and((0,), update)
    any_of.tiled_view((4,)).atomic_store_or((0,), update)
    view = parity.tiled_view((4,), traversal_steps=(2,))
    sizes, steps = view.tile_shape, view.traversal_steps
    ct.static_assert(sizes[0] == 4 and steps[0] == 2)
    view.atomic_store_xor((1,), update)


def test_atomics_of_views():
    updates = torch.tensor([1, 2, 3, 4, 5, 6, 7, 9], dtype=torch.int32)
    start = [torch.full((6,), value, dtype=torch.int32) for value in (0, 100, -1, 0, 0)]
    launch((2,), view_atomics, (*start, updates))
    highest, lowest, common, any_of, parity = (x.tolist() for x in start)
    assert highest == [5, 6, 7, 9, 0, 0] and lowest == [1, 2, 3, 4, 100, 100]
    assert common == [1 & 5, 2 & 6, 3 & 7, 4 & 9, -1, -1] and any_of == [5, 6, 7, 13, 0, 0]
    assert parity == [0, 0, 1 ^ 5, 2 ^ 6, 3 ^ 7, 4 ^ 9]


@ct.kernel
def powers(x, y, z):
    ct.store(z, (0,), ct.pow(ct.load(x, (0,), (8,)), ct.load(y, (0,), (8,))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_powers(dtype):
    x = torch.tensor([0, 1, 2, 3, -2, 0.5, 9, -3], dtype=dtype)
    y = torch.tensor([0, 2, -3, 1, 3, 2, 0.5, 0.5], dtype=dtype)
    z = torch.empty_like(x)
    launch((1,), powers, (x, y, z))
    torch.testing.assert_close(z, torch.pow(x.double(), y.double()).to(dtype), equal_nan=True)


def test_what_the_bytecode_cannot_say_is_rejected_as_the_compiler_does():
    args = [torch.ones(8, dtype=torch.int32)] * 3
    with pytest.raises(ct.TileError, match=r"Missing binary arithmetic implementation for pow, int\s.*line \d+"):
        launch((1,), powers, args)
    with pytest.raises(ct.TileError, match="Missing binary arithmetic implementation for pow, int"):
        compile_kernel(powers, args)


@ct.function
def halves(x, by=2):
    return divmod(x, by)


@ct.kernel
def quotients(x, y, z, n: ct.Constant[int]):
    size = ct.ensure_constant(n * 4)
    left, right = ct.load(x, (0,), (size,)), ct.load(y, (0,), (size,))
    quotient, remainder = ct.divmod(left, right)
    ct.store(z, (0, 0), quotient[None, :])
    ct.store(z, (1, 0), remainder[None, :])
    half, odd = halves(left, by=ct.static_eval({"two": n}["two"]))
    ct.store(z, (2, 0), half[None, :])
    ct.store(z, (3, 0), odd[None, :])


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_quotients(dtype):
    x = torch.tensor([0, 1, 2, 3, -2, 5, 9, -4], dtype=dtype)
    y = torch.tensor([1, 2, 3, -2, 3, 2, -4, 3], dtype=dtype)
    z = torch.zeros(4, 8, dtype=dtype)
    launch((1,), quotients, (x, y, z, 2))
    two = torch.full_like(y, 2)
    assert torch.equal(z[0::2], torch.stack([x.div(y, rounding_mode="floor"), x.div(two, rounding_mode="floor")]))
    assert torch.equal(z[1::2], torch.stack([x.remainder(y), x.remainder(two)]))


@ct.kernel
def sizes_compiled_in(x: Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,), static_stride_dims=(0,))], y):
    ct.store(y, (0,), ct.load(x, (0,), (ct.static_eval(x.shape[0]),)) + ct.static_eval(x.strides[0]))


def test_annotated_arrays():
    for step in (1, 3):
        x, y = torch.arange(8.0 * step)[::step], torch.zeros(8)
        launch((1,), sizes_compiled_in, (x, y))
        assert torch.equal(y, x + step)


@ct.kernel
def product(x, y, z):
    ct.store(z, (0, 0), ct.matmul(ct.load(x, (0, 0), (4, 8)), ct.load(y, (0, 0), (8, 4))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8])
def test_products_without_an_accumulator(dtype):
    x, y = torch.arange(32).reshape(4, 8) % 5 - 2, torch.arange(32).reshape(8, 4) % 3 - 1
    z = torch.zeros(4, 4, dtype=torch.float64)
    launch((1,), product, (x.to(dtype), y.to(dtype), z))
    assert torch.equal(z, (x @ y).double())


@ct.kernel
def logic(x, y, z):
    a, b = ct.load(x, (0,), (4,)), ct.load(y, (0,), (4,))
    ct.store(z, (0, 0), (a & b)[None, :])
    ct.store(z, (1, 0), (a | b)[None, :])
    ct.store(z, (2, 0), (a ^ b)[None, :])
    ct.store(z, (3, 0), (~a)[None, :])
    ct.store(z, (4, 0), ct.where(a, b, True)[None, :])
    ct.store(z, (5, 0), (a >= b)[None, :])
    ct.store(z, (6, 0), ct.broadcast_to(ct.reduce(b, 0, lambda left, right: left | right, False), (1, 4)))


def test_booleans():
    a, b, z = torch.tensor([0, 0, 1, 1]).bool(), torch.tensor([0, 1, 0, 1]).bool(), torch.zeros(7, 4).bool()
    launch((1,), logic, (a, b, z))
    want = [a & b, a | b, a ^ b, ~a, torch.where(a, b, True), a >= b, b.any().expand(4)]
    assert torch.equal(z, torch.stack(want))


@ct.kernel(occupancy=ct.ByTarget(sm_90=2, default=1))
def chosen_pointer(x, y, z, size: ct.Constant[int]):
    pointer = ct.where(ct.bid(0) == 0, x.foreign_pointer, y.foreign_pointer)
    ct.static_assert(pointer.dtype == ct.foreign_pointer_dtype(x.dtype))
    if ct.bid(0) == 2:
        pointer = z.foreign_pointer
    array = ct.Array.from_foreign(pointer, (size,), (2,))
    ct.store(z, (ct.bid(0),), ct.load(array, (0,), (size,)))


def test_pointers():
    x, y, z = torch.arange(8.0), -torch.arange(8.0), torch.zeros(12)
    launch((3,), chosen_pointer, (x, y, z, 4))
    assert z.tolist() == [0, 2, 4, 6, 0, -2, -4, -6, 0, 4, 0, -4]


@ct.kernel
def tile_of_pointers(x, y, z):
    pointers = ct.where(ct.arange(2, dtype=ct.int32) == 0, x.foreign_pointer, y.foreign_pointer)
    array = ct.Array.from_foreign(pointers.extract((0,), (1,)).item(), (4,), (1,))
    ct.store(z, (0,), ct.load(array, (0,), (4,)))


def test_a_tile_of_pointers_is_refused():
    with pytest.raises(NotImplementedError, match=r"has to be of one, not of a tile \(.*test_language.py:\d+\)"):
        launch((1,), tile_of_pointers, (torch.zeros(4), torch.zeros(4), torch.zeros(4)))

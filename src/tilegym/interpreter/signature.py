"""The KernelSignature that a launch with given arguments would have, without a GPU.

The compiler is told about each array what holds for the tensor at hand: strides equal to one, dimensions of size one,
divisibility of shape, strides and address by 16 elements or bytes. cuTile derives this in C++ from CUDA arrays; the
same rules are stated here for any tensor, so that the interpreter sees the code that the GPU would run and tests can
compile ahead of time from example arguments.
"""

from __future__ import annotations

import numpy as np
import torch
from cuda import tile as ct
from cuda.tile.compilation import ArrayConstraint
from cuda.tile.compilation import CallingConvention
from cuda.tile.compilation import ConstantConstraint
from cuda.tile.compilation import KernelSignature
from cuda.tile.compilation import ListConstraint
from cuda.tile.compilation import ScalarConstraint
from cuda.tile.compilation import TupleConstraint

from . import _cutile
from .dtypes import FROM_TORCH
from .dtypes import integer_range

_INT32_MAX = 2**31 - 1
_DIVISOR = 16  # bytes for addresses and strides, elements for shapes


def kernel_signature(kernel, args) -> KernelSignature:
    """The signature of ``kernel`` launched with ``args``: tensors on any device (data is not read), numpy arrays,
    numbers, tuples, lists of arrays. Its symbol is the kernel's name.

    Raises TypeError for a wrong number of arguments or an argument that no kernel takes, OverflowError for an int
    that does not fit its parameter, ValueError for a numpy array that cannot be written.
    """
    annotations = _cutile.parameter_annotations(kernel)
    if len(args) != len(annotations):
        raise TypeError(f"Expected {len(annotations)} kernel arguments, got {len(args)}")
    constraints = [_constraint(arg, annotation) for arg, annotation in zip(args, annotations, strict=True)]
    return KernelSignature(constraints, CallingConvention.cutile_python_v2(), _cutile.kernel_name(kernel))


def _constraint(arg, annotation):
    if isinstance(arg, tuple):
        return _tuple_constraint(arg, annotation)
    if not isinstance(annotation, _cutile.LeafAnnotationNode):
        raise TypeError("Non-tuple parameter is annotated as a tuple")
    if annotation.constant:
        if not _cutile.is_constant_value(arg):
            raise TypeError(f"Unsupported type of constant argument: {type(arg).__name__}")
        return ConstantConstraint(arg)
    if isinstance(arg, bool):
        return ScalarConstraint(ct.bool_)
    if isinstance(arg, int):
        dtype = annotation.scalar.dtype if annotation.scalar else ct.int32
        low, high = integer_range(dtype)
        if not low <= arg <= high:
            raise OverflowError(f"{arg} does not fit a kernel parameter of type {dtype}")
        return ScalarConstraint(dtype)
    if isinstance(arg, float):
        return ScalarConstraint(ct.float32)
    if isinstance(arg, list):
        return _list_constraint(arg, annotation)
    if isinstance(arg, (torch.Tensor, np.ndarray)):
        return _array_constraint(arg, annotation.array)
    raise TypeError(f"Unsupported kernel argument type '{type(arg).__name__}'")


def _tuple_constraint(arg: tuple, annotation) -> TupleConstraint:
    if type(arg) is not tuple:
        raise TypeError(f"Unsupported kernel argument type '{type(arg).__name__}'")
    if isinstance(annotation, _cutile.HeterogeneousTupleNode):
        items = annotation.items
        if len(items) != len(arg):
            raise TypeError(f"Received a tuple of length {len(arg)} but the annotation implies length {len(items)}")
    elif isinstance(annotation, _cutile.HomogeneousTupleNode):
        items = [annotation.each] * len(arg)
    else:
        items = [annotation] * len(arg)
    return TupleConstraint([_constraint(value, item) for value, item in zip(arg, items, strict=True)])


def _array_constraint(array, annotation) -> ArrayConstraint:
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError("A numpy array that is a kernel argument has to be writable: pass a copy of this one")
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    annotation = annotation or ct.ArrayAnnotation()
    dtype = FROM_TORCH.get(tensor.dtype)
    if dtype is None:
        raise TypeError(f"Unsupported dtype of a kernel argument: {tensor.dtype}")
    shape, strides = list(tensor.shape), list(tensor.stride())
    rank = len(shape)
    if dtype == ct.float4_e2m1fn:  # torch counts pairs
        shape[-1] *= 2
        strides = [stride * 2 for stride in strides[:-1]] + [1]
    if annotation.index_dtype == ct.int32 and any(extent > _INT32_MAX for extent in shape + strides):
        raise OverflowError(
            f"A kernel argument of shape {tuple(shape)} needs int64 indices: annotate it IndexedWithInt64"
        )
    static_shape = {axis % rank for axis in annotation.static_shape_dims}
    static_stride = {axis % rank for axis in annotation.static_stride_dims}
    elements_per_16_bytes = _DIVISOR * 8 // dtype.bitwidth
    return ArrayConstraint(
        dtype,
        rank,
        index_dtype=annotation.index_dtype,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=not _is_disjoint(shape, strides),
        stride_constant=[
            stride if axis in static_stride or (stride == 1 and not static_stride) else None
            for axis, stride in enumerate(strides)
        ],
        shape_constant=[size if axis in static_shape or size == 1 else None for axis, size in enumerate(shape)],
        stride_divisible_by=[elements_per_16_bytes if stride % elements_per_16_bytes == 0 else 1 for stride in strides],
        shape_divisible_by=[_DIVISOR if size % _DIVISOR == 0 else 1 for size in shape],
        base_addr_divisible_by=_DIVISOR if tensor.data_ptr() % _DIVISOR == 0 else 1,
    )


def _is_disjoint(shape: list, strides: list) -> bool:
    """Whether distinct indices surely have distinct addresses."""
    by_stride = sorted(zip(strides, shape, strict=True))
    if by_stride and by_stride[0][0] <= 0:
        return False
    return all(
        stride > 0 and stride >= inner_stride * inner_size
        for (inner_stride, inner_size), (stride, _) in zip(by_stride, by_stride[1:], strict=False)
    )


def _list_constraint(arrays: list, annotation) -> ListConstraint:
    if not arrays:
        raise TypeError("Empty lists are not supported as kernel arguments")
    for array in arrays:
        if not isinstance(array, (torch.Tensor, np.ndarray)):
            raise TypeError(f"A list as a kernel argument holds arrays, not '{type(array).__name__}'")
    element = annotation.list.element if annotation.list else annotation.array
    items = [_array_constraint(array, element) for array in arrays]
    first = items[0]
    if any(item.dtype != first.dtype for item in items):
        raise TypeError("Arrays in list vary in data type")
    if any(item.ndim != first.ndim for item in items):
        raise TypeError("Arrays in list vary in rank")
    for field, what, axes in (
        ("shape_constant", "shape", getattr(element, "static_shape_dims", ())),
        ("stride_constant", "stride", getattr(element, "static_stride_dims", ())),
    ):
        for axis in axes:
            if len({getattr(item, field)[axis] for item in items}) > 1:
                raise ValueError(f"Arrays in list vary in static {what} at axis {axis}")

    def common(field, otherwise):
        columns = zip(*(getattr(item, field) for item in items), strict=True)
        return [column[0] if len(set(column)) == 1 else otherwise for column in columns]

    merged = ArrayConstraint(
        first.dtype,
        first.ndim,
        index_dtype=first.index_dtype,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=any(item.may_alias_internally for item in items),
        stride_constant=common("stride_constant", None),
        shape_constant=common("shape_constant", None),
        stride_divisible_by=common("stride_divisible_by", 1),
        shape_divisible_by=common("shape_divisible_by", 1),
        base_addr_divisible_by=min(item.base_addr_divisible_by for item in items),
    )
    return ListConstraint(merged, alias_groups=(), elements_may_alias=True)

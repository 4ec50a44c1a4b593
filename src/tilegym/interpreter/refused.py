"""What cuTile's front end lets pass and tileiras, which the interpreter does without, refuses for every architecture.

Found by compiling (tileiras 13.4); a kernel that runs here is to compile there.
"""

from __future__ import annotations

from cuda import tile as ct
from cuda.tile import PaddingMode
from cuda.tile import RoundingMode

from . import _cutile
from ._cutile import arithmetic_ops as A
from ._cutile import ops as O
from .program import dtype_of
from .program import result_dtype

_COMPUTED = ("float16", "bfloat16", "float32", "float64")


def _no_arithmetic(dtype) -> bool:
    return _cutile.is_float(dtype) and dtype.name not in _COMPUTED


def _arithmetic(op) -> str:
    dtype = dtype_of(next(op.all_inputs()))
    if _no_arithmetic(dtype):
        return f"{op.fn} of {dtype.name} does not compile: convert with ct.astype to a wider float first"
    if getattr(op, "fn", "") == "floordiv" and not (_cutile.is_signed(dtype) or _cutile.is_float(dtype)):
        return "" if _cutile.is_boolean(dtype) else "floor division of unsigned integers does not compile"
    return ""


def _reduction(op) -> str:
    for x in op.xs:
        if _no_arithmetic(dtype_of(x)):
            return f"a reduction or scan of {dtype_of(x).name} does not compile: convert with ct.astype first"
    return ""


def _where(op) -> str:
    dtype = result_dtype(op)
    if not _cutile.is_pointer_dtype(dtype) and dtype.name == "float4_e2m1fn":
        return "ct.where of float4_e2m1fn does not compile: convert with ct.astype first"
    return ""


def _astype(op) -> str:
    source, target = dtype_of(op.x), result_dtype(op)
    if target.name == "float8_e8m0fnu" and not _cutile.is_float(source):
        return "integers do not convert to float8_e8m0fnu: convert to float32 first"
    nearest_or_zero = (None, RoundingMode.RN, RoundingMode.RZ)
    if (source.name, target.name) == ("bfloat16", "float16") and op.rounding_mode not in nearest_or_zero:
        return (
            f"bfloat16 does not convert to float16 with {op.rounding_mode}: take RN or RZ, or convert to float32 first"
        )
    return ""


def _bitcast(op) -> str:
    names = dtype_of(op.x).name, result_dtype(op).name
    return "tfloat32 does not bitcast: its width is 19 bits" if "tfloat32" in names and names[0] != names[1] else ""


def _padding(op) -> str:
    dtype, mode = result_dtype(op), op.view.get_type().padding_mode
    if mode in (PaddingMode.UNDETERMINED, PaddingMode.ZERO):
        return ""
    if not _cutile.is_float(dtype):
        return f"padding_mode {mode.name} is for floats, the array has {dtype.name}: take ZERO"
    if dtype.name == "float8_e4m3fn" and mode in (PaddingMode.POS_INF, PaddingMode.NEG_INF):
        return f"padding_mode {mode.name} does not compile for float8_e4m3fn, which has no infinity"
    return ""


_RULES = {
    **dict.fromkeys((A.Unary, A.RawBinaryArithmeticOperation, A.RawComparisonOperation), _arithmetic),
    **dict.fromkeys((O.TileReduce, O.TileScan), _reduction),
    A.RawWhereOperation: _where,
    A.TileAsType: _astype,
    O.TileBitCast: _bitcast,
    O.TileLoad: _padding,
}


def check(block) -> None:
    """Raises ``ct.TileUnsupportedFeatureError``, with its line, for an operation of the IR that does not compile."""
    for op in block.traverse():
        rule = _RULES.get(type(op))
        why = rule(op) if rule is not None else ""
        if why:
            raise ct.TileUnsupportedFeatureError(why, loc=op.loc)

"""What generators of several families draw."""

from typing import Any

from fuzz.drawing import Draw


def width(draw: Draw) -> int:
    """A number of columns of a row."""
    return draw.size(9000 if draw.gpu else 1100, 0.015)


def shape_any(draw: Draw, most: int | None = None) -> tuple[int, ...]:
    """Leading dimensions and columns."""
    n = draw.size(most or (5000 if draw.gpu else 1100))
    return (*draw.lead(400 if draw.gpu else 20), n)


def norm_options(draw: Draw) -> dict[str, Any]:
    """How weights enter a norm."""
    return {"offset": draw.one(0.0, 0.0, 1.0, 0.5), "casting": draw.one("llama", "gemma")}


def eps_of(draw: Draw) -> float:
    """An eps; not so small that rows of zeros are undefined."""
    return draw.one(1e-6, 1e-5, 1e-12, 0.1, 0.0) if draw.magnitude else 1e-6

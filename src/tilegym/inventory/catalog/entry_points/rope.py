"""Entry points of Solutions: rotary position embeddings."""

from tilegym.backend import use_backend
from tilegym.ops import get_apply_rope_func


def rope(q, k, cos, sin):
    with use_backend("cutile"):
        return get_apply_rope_func("llama")(q, k, cos, sin)


def rope_partial(q, k, cos, sin):
    return rope(q, k, cos, sin)


def rope_neighbours(q, k, cos, sin):
    with use_backend("cutile"):
        return get_apply_rope_func("glm4")(q, k, cos, sin)


def rope_neighbours_to_halves(q, k, cos, sin):
    with use_backend("cutile"):
        return get_apply_rope_func("deepseek_v3")(q, k, cos, sin)

"""What the tests of the gated delta rule share: arguments as a model makes them."""

import functools

import torch
from common import randn

# No sequence, no token, keys without a dimension: B, T, Hk, Hv, Dk, Dv
EMPTY = [(0, 3, 2, 4, 16, 16), (2, 0, 2, 4, 16, 16), (2, 3, 1, 2, 0, 16)]


def arguments(batch, tokens, key_heads, heads, key_dim, value_dim, dtype=torch.float32, normalize=True, seed=0):
    """Keyword arguments of both ops, with a state from before, and the state behind the last token asked for."""
    seed *= 100
    query, key = (randn(batch, tokens, key_heads, key_dim, dtype=dtype, seed=seed + i) for i in (0, 1))
    if not normalize:  # longer keys than that make the state grow without bound
        key = key / key_dim**0.5
    return dict(
        query=query,
        key=key,
        value=randn(batch, tokens, heads, value_dim, dtype=dtype, seed=seed + 2),
        g=-0.3 * randn(batch, tokens, heads, seed=seed + 3).exp(),
        beta=randn(batch, tokens, heads, seed=seed + 4).sigmoid(),
        initial_state=randn(batch, heads, key_dim, value_dim, seed=seed + 5),
        output_final_state=True,
        use_qk_l2norm_in_kernel=normalize,
    )


def floating(kwargs):
    """The tensors among ``kwargs``."""
    return tuple(value for value in kwargs.values() if isinstance(value, torch.Tensor))


def without_none(op):
    """``op`` without the final state that was not asked for."""

    @functools.wraps(op)
    def call(**kwargs):
        return tuple(x for x in op(**kwargs) if x is not None)

    return call


def in_one_dtype(kwargs):
    """``kwargs`` with gates and state in the dtype of the query."""
    dtype = kwargs["query"].dtype
    return {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}


def final_in_dtype(op):
    """``op`` with the final state in the dtype of the query, so that it is measured in the working dtype."""

    @functools.wraps(op)
    def call(**kwargs):
        return tuple(x.to(kwargs["query"].dtype) for x in op(**kwargs) if x is not None)

    return call

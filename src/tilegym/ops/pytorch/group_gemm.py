"""``group_gemm`` and ``ragged_group_gemm`` in plain PyTorch: one product after the other."""

import torch

from tilegym.backend import register_impl
from tilegym.ops.pytorch.checks import check_same_dtype


def check_group(group_A: list[torch.Tensor], group_B: list[torch.Tensor], transpose_b: bool) -> None:
    """Raises ValueError or TypeError unless every product is defined."""
    if len(group_A) != len(group_B):
        raise ValueError(f"group_gemm: group_A has {len(group_A)} matrices, group_B {len(group_B)}")
    for i, (a, b) in enumerate(zip(group_A, group_B, strict=True)):
        if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1 if transpose_b else 0]:
            raise ValueError(
                f"group_gemm: pair {i} does not fit: A {tuple(a.shape)}, B {tuple(b.shape)}, transpose_b={transpose_b}"
            )
        if a.dtype != group_A[0].dtype or b.dtype != group_A[0].dtype:
            raise TypeError(f"group_gemm: all matrices must have one dtype, pair {i} has {a.dtype} and {b.dtype}")


@register_impl("group_gemm", "pytorch")
def group_gemm(
    group_A: list[torch.Tensor], group_B: list[torch.Tensor], transpose_b: bool = False
) -> list[torch.Tensor]:
    check_group(group_A, group_B, transpose_b)
    return [a @ (b.t() if transpose_b else b) for a, b in zip(group_A, group_B, strict=True)]


def check_ragged(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, transpose_b: bool, bias: torch.Tensor | None
) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    if a.dim() != 2 or b.dim() != 3 or a.shape[1] != b.shape[2 if transpose_b else 1]:
        raise ValueError(
            f"ragged_group_gemm: expected a [T, K] and b [E, {'N, K' if transpose_b else 'K, N'}], "
            f"got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if offsets.shape != (b.shape[0] + 1,):
        raise ValueError(f"ragged_group_gemm: offsets must be [{b.shape[0] + 1}], they are {tuple(offsets.shape)}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ragged_group_gemm: offsets must be int32 or int64, they are {offsets.dtype}")
    check_same_dtype("ragged_group_gemm", a=a, b=b, bias=bias)
    size = (b.shape[0], b.shape[1 if transpose_b else 2])
    if bias is not None and bias.shape != size:
        raise ValueError(f"ragged_group_gemm: bias must be {list(size)}, it is {tuple(bias.shape)}")


@register_impl("ragged_group_gemm", "pytorch")
def ragged_group_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: torch.Tensor,
    transpose_b: bool = True,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    check_ragged(a, b, offsets, transpose_b, bias)
    bounds, pieces = offsets.tolist(), []
    weight = b.mT if transpose_b else b
    pieces.append(a.new_zeros(bounds[0], weight.shape[2]))
    for expert, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        product = a[begin:end] @ weight[expert]
        pieces.append(product if bias is None else product + bias[expert])
    if not b.shape[0]:  # nothing, in which all take part for the sake of their gradients
        product = a[:0] @ weight.sum(0)
        pieces.append(product if bias is None else product + bias.sum(0))
    pieces.append(a.new_zeros(a.shape[0] - bounds[-1], weight.shape[2]))
    return torch.cat(pieces)

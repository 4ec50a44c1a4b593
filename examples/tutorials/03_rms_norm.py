"""Tutorial 3: a kernel that can be trained: RMSNorm, its gradients, and sums over blocks without a race.

Run it with ``python examples/tutorials/03_rms_norm.py``, with or without a GPU.
"""

import cuda.tile as ct
import lesson
import torch
from torch.nn import functional as F

from tilegym import interpreter
from tilegym.backend.cutile.launch import launch

Int = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO


# y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps): the norm of Llama, Qwen, Mistral and most others.
@ct.kernel
def rms_norm_kernel(x, weight, y, rstd, eps, N: Int, TILE: Int):
    row = ct.bid(0)
    tile = ct.load(x, (row, 0), (1, TILE), padding_mode=ZERO).astype(ct.float32)
    w = ct.load(weight, (0,), (TILE,), padding_mode=ZERO).astype(ct.float32)
    # Padding is zero, so it adds nothing to the sum; but the mean is over N elements, not over TILE.
    r = ct.rsqrt(ct.sum(tile * tile, axis=1, keepdims=True) / N + eps)
    ct.store(y, (row, 0), (tile * r * w).astype(y.dtype))
    ct.store(rstd, (row,), r.reshape((1,)))  # four bytes a row save the backward pass a reduction


# A fixed number of blocks; each takes every num_blocks-th row ("persistent": tutorial 4 has more on that). So a block
# can sum the weight's gradient over all its rows in registers and write it once, into a row of its own.
@ct.kernel
def rms_norm_backward_kernel(dy, x, weight, rstd, dx, partial_dweight, N: Int, TILE: Int):
    w = ct.load(weight, (0,), (TILE,), padding_mode=ZERO).astype(ct.float32)
    dw = ct.zeros((1, TILE), ct.float32)
    for row in range(ct.bid(0), x.shape[0], ct.num_blocks(0)):
        up = ct.load(dy, (row, 0), (1, TILE), padding_mode=ZERO).astype(ct.float32)
        r = ct.load(rstd, (row,), (1,)).reshape((1, 1))
        xhat = ct.load(x, (row, 0), (1, TILE), padding_mode=ZERO).astype(ct.float32) * r
        g = up * w
        grad = r * (g - xhat * (ct.sum(g * xhat, axis=1, keepdims=True) / N))
        ct.store(dx, (row, 0), grad.astype(dx.dtype))
        dw = dw + up * xhat
    ct.store(partial_dweight, (ct.bid(0), 0), dw)


# What one is tempted to write: every block adds to the one gradient. But a load, an addition and a store of several
# blocks interleave, and then one of the additions is lost.
@ct.kernel
def racing_dweight_kernel(dy, x, rstd, dweight, TILE: Int):
    row = ct.bid(0)
    up = ct.load(dy, (row, 0), (1, TILE), padding_mode=ZERO)
    xhat = ct.load(x, (row, 0), (1, TILE), padding_mode=ZERO) * ct.load(rstd, (row,), (1,)).reshape((1, 1))
    so_far = ct.load(dweight, (0,), (TILE,), padding_mode=ZERO)
    ct.store(dweight, (0,), so_far + (up * xhat).reshape((TILE,)))


BLOCKS = 256 if lesson.ON_GPU else 4  # of the backward pass; about two for each multiprocessor


class RMSNorm(torch.autograd.Function):
    """How torch learns of the gradient: autograd cannot look into a kernel, so it is told what to launch."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        m, n = x.shape
        y, rstd = torch.empty_like(x), torch.empty(m, device=x.device)
        launch(x, (m,), rms_norm_kernel, (x, weight, y, rstd, eps, n, tile_of(n)))
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        n, blocks = x.shape[1], min(BLOCKS, x.shape[0])
        dx, partial = torch.empty_like(x), torch.empty(blocks, n, device=x.device)
        args = (dy.contiguous(), x, weight, rstd, dx, partial, n, tile_of(n))
        launch(x, (blocks,), rms_norm_backward_kernel, args)
        # The second half of the reduction, in a fixed order: the same bits in every run, which atomics do not give.
        return dx, partial.sum(0).to(weight.dtype), None


def tile_of(n: int) -> int:
    return 1 << (n - 1).bit_length()


def with_gradients(norm, x, weight, dy):
    """What ``norm(x, weight)`` returns, and its gradients for an incoming gradient ``dy``."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = norm(x, weight)
    return (y.detach(), *torch.autograd.grad(y, (x, weight), dy))


def main() -> None:
    lesson.title("RMSNorm: forward and backward")

    def ours(x, weight):
        return RMSNorm.apply(x, weight, 1e-6)

    def torchs(x, weight):
        return F.rms_norm(x, weight.shape, weight, 1e-6)

    lesson.step(
        "The formulas",
        """
        Forward: xhat = x * rstd, y = xhat * weight. Backward, with dy the gradient that comes in and g = dy * weight:

            dx      = rstd * (g - xhat * mean(g * xhat))     one row at a time, like the forward pass
            dweight = sum over all rows of dy * xhat         across rows, so across blocks

        37 rows of 100, tile (1, 128):
        """,
    )
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, dy = (
            lesson.randn(37, 100, dtype=dtype),
            lesson.randn(100, dtype=dtype, seed=1),
            lesson.randn(37, 100, dtype=dtype, seed=2),
        )
        exact = with_gradients(torchs, x.double(), weight.double(), dy.double())
        for name, got, reference, truth in zip(
            ("y", "dx", "dweight"),
            with_gradients(ours, x, weight, dy),
            with_gradients(torchs, x, weight, dy),
            exact,
            strict=True,
        ):
            lesson.check(f"{name:7} {str(dtype).removeprefix('torch.'):8}", got, reference, truth)

    lesson.step(
        "The race, and the way around it",
        """
        Blocks run in no order and at the same time, and may not write what another one writes. The tempting kernel,
        in which all add to one dweight, even passes a test that runs block after block. The sanitizer objects:
        """,
    )
    x, dy = lesson.randn(4, 100).cpu(), lesson.randn(4, 100, seed=1).cpu()
    try:
        args = (dy, x, torch.ones(4), torch.zeros(100), 128)
        interpreter.launch((4,), racing_dweight_kernel, args, sanitize=True)
    except interpreter.WriteConflictError as error:
        print(f"WriteConflictError: {error}")
    else:
        raise AssertionError("the race was not noticed")
    lesson.explain(
        """
        ct.atomic_add would make it right, but the order of the additions, and with it the rounding, would differ from
        run to run. One partial sum for each block, added up afterwards, gives the same bits every time:
        """
    )
    x, weight, dy = lesson.randn(64, 256), lesson.randn(256, seed=1), lesson.randn(64, 256, seed=2)
    runs = [with_gradients(ours, x, weight, dy)[2] for _ in range(3)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    print("ok    three backward passes, bit for bit the same dweight")

    lesson.step(
        "How fast?", "Memory again: the forward pass reads x and writes y, the backward pass reads dy and x, writes dx."
    )
    m, n = (8192, 4096) if lesson.ON_GPU else (16, 128)
    x, weight, dy = (lesson.randn(*s, dtype=torch.bfloat16) for s in ((m, n), (n,), (m, n)))
    lesson.measure("GB/s", 2 * x.nbytes, forward_torch=lambda: torchs(x, weight), forward_ours=lambda: ours(x, weight))
    a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y_torch, y_ours = torchs(a, b), ours(a, b)
    lesson.measure(
        "GB/s",
        3 * x.nbytes,
        backward_torch=lambda: torch.autograd.grad(y_torch, (a, b), dy, retain_graph=True),
        backward_ours=lambda: torch.autograd.grad(y_ours, (a, b), dy, retain_graph=True),
    )
    lesson.end(
        """
        tilegym.ops.rms_norm (src/tilegym/ops/cutile/rms_norm.py) is this kernel with what production adds: several
        rows a block, rows of any length, strides, biases, torch.compile. Next: 04_matmul.py.
        """
    )


if __name__ == "__main__":
    main()

"""Training steps compiled with dynamic=True, which leaves numbers open: modules' attributes, defaults of parameters."""

import pytest
import torch
from common import device
from common import randn

from tilegym import ops

WIDTH = 16


def heads(m, x):
    q, k = x.view(1, -1, 2, WIDTH // 2), x.view(1, -1, 2, WIDTH // 2)
    return ops.dual_rms_norm(q, k, m.weight[: WIDTH // 2], m.bias[: WIDTH // 2], m.eps, backend="cutile")


LAYERS = {
    "rms_norm": lambda m, x: ops.rms_norm(x, (WIDTH,), m.weight, m.eps, backend="cutile"),
    "rms_norm with an offset": lambda m, x: ops.rms_norm(x, (WIDTH,), m.weight, m.eps, offset=m.one, backend="cutile"),
    "fused_add_rms_norm": lambda m, x: ops.fused_add_rms_norm(x, x * 3, m.weight, m.eps, backend="cutile")[0],
    "layer_norm": lambda m, x: ops.layer_norm(x, (WIDTH,), m.weight, m.bias, m.eps, backend="cutile"),
    "layer_norm, default": lambda m, x: ops.layer_norm(x, (WIDTH,), m.weight, m.bias, backend="cutile"),
    "group_norm": lambda m, x: ops.group_norm(x[None], 2, backend="cutile")[0],
    "dual_rms_norm": lambda m, x: heads(m, x)[0].view(-1, WIDTH),
}


class Layer(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.ones(WIDTH, device=device())) for _ in range(2))
        self.norm, self.eps, self.one = norm, 1e-5, 1.0

    def forward(self, x):
        return self.norm(self, x * 2)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_share_open_numbers(name):
    model, x = torch.nn.Sequential(*(Layer(LAYERS[name]) for _ in range(3))), randn(4, WIDTH).requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    gradients = []
    for call in (model, compiled):
        y = call(x)
        gradients.append((y, *torch.autograd.grad((y * y).sum(), (x, model[0].weight), allow_unused=True)))
    torch.testing.assert_close(gradients[1][:2], gradients[0][:2], rtol=0, atol=0)

"""Single parts are recognised by what they compute, whatever they are called, and nothing else is taken for them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tilegym.integrate.probe import distance
from tilegym.integrate.recognise_attention import mask_pattern
from tilegym.integrate.recognise_experts import recognise_experts
from tilegym.integrate.recognise_experts import recognise_routing
from tilegym.integrate.recognise_functions import recognise_delta_rule
from tilegym.integrate.recognise_functions import recognise_rope
from tilegym.integrate.recognise_mlps import recognise_activation
from tilegym.integrate.recognise_mlps import recognise_linear
from tilegym.integrate.recognise_mlps import recognise_mlp
from tilegym.integrate.recognise_norms import recognise_norm
from tilegym.integrate.trace import Call

WIDTH = 32


class Module(nn.Module):
    """A module that computes a function of itself and its inputs."""

    def __init__(self, function, **held):
        super().__init__()
        self.function = function
        for name, value in held.items():
            setattr(self, name, nn.Parameter(value) if isinstance(value, torch.Tensor) else value)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def _rms(x, eps):
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)


NORMS = {
    "llama": (lambda m, x: m.w * _rms(x, m.e).to(x.dtype), dict(kind="rms_norm", casting="llama", offset=0.0)),
    "gemma": (lambda m, x: (_rms(x, m.e) * (1 + m.w.float())).to(x.dtype), dict(casting="gemma", offset=1.0)),
    "once": (lambda m, x: (_rms(x, m.e) * m.w.float()).to(x.dtype), dict(casting="gemma", offset=0.0)),
    "offset, rounded first": (lambda m, x: (1.0 + m.w) * _rms(x, m.e).to(x.dtype), dict(casting="llama", offset=1.0)),
    "layer": (lambda m, x: F.layer_norm(x, x.shape[-1:], m.w, None, m.e), dict(kind="layer_norm", bias="")),
    "groups": (
        lambda m, x: m.w * _rms(x.unflatten(-1, (m.parts, -1)), m.e).flatten(-2).to(x.dtype),
        dict(groups=4, kind="rms_norm"),
    ),
}


@pytest.mark.parametrize("case", NORMS)
def test_norms(case):
    function, expected = NORMS[case]
    match = recognise_norm(Module(function, w=torch.ones(WIDTH), e=1e-5, parts=4), WIDTH, False)
    assert {name: match.what[name] for name in expected} == expected
    assert match.what["eps"] == 1e-5 and match.what["weight"] == "w"
    assert match.errors["bfloat16"] == 0.0


@pytest.mark.parametrize(
    "order, function",
    [
        ("after", lambda m, x, g: (m.w * _rms(x, m.e).to(x.dtype) * F.silu(g.float())).to(x.dtype)),
        ("before", lambda m, x, g: m.w * _rms(x.float() * F.silu(g.float()), m.e).to(x.dtype)),
    ],
)
def test_gated_norms(order, function):
    match = recognise_norm(Module(function, w=torch.ones(WIDTH), e=1e-6), WIDTH, True)
    assert (match.what["gate"], match.what["act"], match.what["eps"]) == (order, "silu", 1e-6)


NOT_NORMS = {
    "unbiased": lambda m, x: m.w * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + m.e),
    "eps outside": lambda m, x: m.w * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + m.e),
    "sum, not mean": lambda m, x: m.w * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + m.e),
    "clamped": lambda m, x: (m.w * _rms(x, m.e).to(x.dtype)).clamp(-0.9, 0.9),
    "twice the weight": lambda m, x: 2 * m.w * _rms(x, m.e).to(x.dtype),
    "nothing": lambda m, x: x,
}


@pytest.mark.parametrize("case", NOT_NORMS)
def test_what_is_no_norm(case):
    assert recognise_norm(Module(NOT_NORMS[case], w=torch.ones(WIDTH), e=1e-3), WIDTH, False) is None


def _mlp(function, **held):
    return Module(
        function,
        **held,
        a=nn.Linear(WIDTH, 48),
        b=nn.Linear(WIDTH, 48, bias=False),
        c=nn.Linear(48, WIDTH),
    )


MLPS = {
    "a gates": (lambda m, x: m.c(F.silu(m.a(x)) * m.b(x)), dict(gate="a", up="b", down="c"), dict(activation="silu")),
    "b gates": (lambda m, x: m.c(F.gelu(m.b(x)) * m.a(x)), dict(gate="b", up="a", down="c"), dict(activation="gelu")),
    "clamped": (
        lambda m, x: m.c(F.silu(m.a(x).clamp(max=m.top)) * m.b(x).clamp(-m.top, m.top)),
        dict(gate="a", up="b", down="c"),
        dict(activation="silu", limit=3.0),
    ),
    "scaled": (
        lambda m, x: m.c(F.silu(m.a(x) * m.top) * m.b(x)),
        dict(gate="a", up="b", down="c"),
        dict(activation="silu", gate_scale=3.0),
    ),
}


@pytest.mark.parametrize("case", MLPS)
def test_gated_mlps(case):
    function, roles, said = MLPS[case]
    match = recognise_mlp(_mlp(function, top=3.0), dict.fromkeys("abc", False), WIDTH)
    assert match.what == {"roles": roles, **said}


@pytest.mark.parametrize("packed", ["concatenated", "interleaved"])
@pytest.mark.parametrize("order", ["gate, up", "up, gate"])
def test_packed_mlps(packed, order):
    def forward(m, x):
        h = m.a(x)
        first, second = h.chunk(2, -1) if packed == "concatenated" else (h[..., ::2], h[..., 1::2])
        gate, up = (first, second) if order == "gate, up" else (second, first)
        return m.b(F.gelu(gate, approximate="tanh") * up)

    module = Module(forward, a=nn.Linear(WIDTH, 96), b=nn.Linear(48, WIDTH))
    match = recognise_mlp(module, {"a": False, "b": False}, WIDTH)
    assert match.what == {
        "roles": {"gate_up": "a", "down": "b"}, "activation": "gelu_tanh", "packed": packed, "order": order
    }  # fmt: skip


@pytest.mark.parametrize("act, function", [("relu2", lambda x: F.relu(x).square()), ("gelu", F.gelu)])
def test_plain_mlps(act, function):
    module = Module(lambda m, x: m.b(function(m.a(x))), a=nn.Linear(WIDTH, 96), b=nn.Linear(96, WIDTH))
    match = recognise_mlp(module, {"b": False, "a": False}, WIDTH)
    assert match.what == {"roles": {"up": "a", "down": "b"}, "activation": act}


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.c(F.silu(m.a(x)) * m.b(x)) + x,
        lambda m, x: m.c(F.mish(m.a(x)) * m.b(x)),
        lambda m, x: m.c(F.silu(m.a(x)) * m.b(x).clamp(-1, 1)),
        lambda m, x: m.c(F.silu(m.a(x)) + m.b(x)),
    ],
)
def test_what_is_no_gated_mlp(function):
    assert recognise_mlp(_mlp(function), dict.fromkeys("abc", False), WIDTH) is None


def test_linear_layers_and_activations():
    assert recognise_linear(nn.Linear(8, 8)).what == {"bias": True, "transposed": False}
    transposed = Module(lambda m, x: x @ m.weight, weight=torch.randn(8, 8))
    assert recognise_linear(transposed).what == {"bias": False, "transposed": True}
    assert recognise_linear(Module(lambda m, x: 2 * x @ m.weight.T, weight=torch.randn(8, 8))) is None
    assert recognise_activation(nn.SiLU()).what == "silu"
    assert recognise_activation(nn.GELU(approximate="tanh")).what == "gelu_tanh"
    assert recognise_activation(nn.Mish()) is None


def _call(function, **arguments):
    return Call(function, "", arguments, arguments, "prefill", output=function(**arguments))


def _rotation(style, heads_dim, rotated):
    def rotate(a, b, cos, sin):
        cos, sin = cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)

        def one(x):
            part, rest = x[..., :rotated], x[..., rotated:]
            x1, x2 = part.chunk(2, -1) if style == "half" else (part[..., ::2], part[..., 1::2])
            y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
            y = torch.cat((y1, y2), -1) if style == "half" else torch.stack((y1, y2), -1).flatten(-2)
            return torch.cat((y, rest), -1)

        return one(a), one(b)

    return rotate


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("heads_dim", [1, 2])
@pytest.mark.parametrize("rotated", [8, 16])
@pytest.mark.parametrize("swapped", [False, True])
def test_rotations(style, heads_dim, rotated, swapped):
    shape = (2, 4, 5, 16) if heads_dim == 1 else (2, 5, 4, 16)
    angle = torch.randn(2, 5, rotated // 2)
    angles = {"sin": angle.sin(), "cos": angle.cos()} if swapped else {"cos": angle.cos(), "sin": angle.sin()}
    call = _call(_rotation(style, heads_dim, rotated), a=torch.randn(shape), b=torch.randn(shape), **angles)
    what = recognise_rope(call).what
    assert (what["style"], what["heads_dim"], what["rotated"], what["angles"]) == (style, heads_dim, rotated, "half")
    assert what["factor"] == rotated / 16
    assert what["arguments"] == {"q": "a", "k": "b", "cos": "cos", "sin": "sin"}


def test_what_is_no_rotation():
    def shear(a, b, cos, sin):
        return a + cos[:, None] * b, b + sin[:, None] * a

    x, angle = torch.randn(2, 4, 5, 16), torch.randn(2, 5, 16)
    assert recognise_rope(_call(shear, a=x, b=x + 1, cos=angle.cos(), sin=angle.sin())) is None


def test_masks_are_read():
    def additive(visible):
        return torch.zeros(1, 1, *visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)

    key = torch.arange(10)
    causal = key <= key[:, None]
    window = causal & (key[:, None] - key < 4)
    chunk = causal & (key[:, None] // 4 == key // 4)
    for visible, window_size, chunk_size in ((causal, None, None), (window, 4, None), (chunk, None, 4)):
        pattern = mask_pattern(additive(visible), 10, 10)
        assert pattern == {"mask": "causal", "causal": True, "window": window_size, "chunk": chunk_size}
    assert mask_pattern(additive(causal.flip(0)), 10, 10)["mask"] == "other"
    assert mask_pattern(additive(torch.ones(10, 10, dtype=torch.bool)), 10, 10)["mask"] == "none"
    assert mask_pattern(additive(causal) * 0 + 0.5, 10, 10)["mask"] == "other", "a bias that is no mask"
    assert mask_pattern(None, 10, 10)["mask"] == "none"


@pytest.mark.parametrize("transposed", [False, True])
def test_experts(transposed):
    def forward(m, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(4):
            token, slot = torch.where(ids == e)
            first, second = (w[e] if transposed else w[e].T for w in (m.one, m.two))
            up, gate = (x[token] @ first + m.one_b[e]).chunk(2, -1)
            y.index_add_(0, token, (F.silu(gate) * up @ second) * weights[token, slot, None])
        return y

    shapes = ((4, 32, 48), (4, 24, 32)) if transposed else ((4, 48, 32), (4, 32, 24))
    one, two = (torch.randn(shape) for shape in shapes)
    what = recognise_experts(
        Module(forward, one=one, two=two, one_b=torch.randn(4, 48)), ["x", "ids", "weights"], 32
    ).what
    assert what["roles"] == {"gate_up_weight": "one", "down_weight": "two", "gate_up_bias": "one_b"}
    assert (what["transposed"], what["packed"], what["order"]) == (transposed, "concatenated", "up, gate")


def test_routing():
    x, matrix, correction = torch.randn(40, 32), torch.randn(8, 32), torch.randn(8)
    block = Module(lambda m, x: x, matrix=matrix, shift=correction)
    scores = torch.sigmoid(x @ matrix.T)
    ids = (scores + correction).topk(3).indices
    weights = scores.gather(1, ids)
    what = recognise_routing(block, x, ids, weights / weights.sum(-1, keepdim=True) * 2.5, {"any": 2.5}).what
    assert what == {
        "roles": {"weight": "matrix", "correction": "shift"}, "scoring": "sigmoid", "top_k": 3, "normalised": True,
        "scaling": 2.5, "correction": True,
    }  # fmt: skip
    assert recognise_routing(block, x, ids, weights.square(), {"any": 2.5}) is None


def test_routing_to_the_only_expert():
    """Its matrix has one row, as a bias would."""
    x, block = torch.randn(40, 32), Module(lambda m, x: x, matrix=torch.randn(1, 32))
    what = recognise_routing(block, x, torch.zeros(40, 1, dtype=torch.int64), torch.ones(40, 1), {}).what
    assert what["roles"] == {"weight": "matrix"} and what["top_k"] == 1


def test_a_delta_rule_with_another_gate_is_refused():
    def rule(q, k, v, g, beta):
        return torch.einsum("bshd,bshd,bshe->bshe", q, k, v) * g.exp()[..., None] * beta[..., None]

    q, v = torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
    call = _call(rule, q=q, k=q + 1, v=v, g=-torch.rand(1, 6, 2), beta=torch.rand(1, 6, 2))
    assert recognise_delta_rule(call) is None


def test_distance_counts_rounding():
    one = torch.ones(4)
    assert distance(one, one) == 0
    assert distance(one + 2**-23, one) == pytest.approx(1)
    assert distance(one.to(torch.bfloat16), one) == float("inf"), "another dtype is another computation"
    assert distance(torch.tensor([float("nan")]), one[:1]) == float("inf")

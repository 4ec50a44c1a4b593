"""Matching: Solutions are found by what is computed, and the adapter that comes with them makes the call."""

import pytest
import torch
from common import randn
from common import sanitized

from tilegym.errors import InventoryError
from tilegym.inventory import COMPATIBLE
from tilegym.inventory import EXACT
from tilegym.inventory import Definition
from tilegym.inventory import load
from tilegym.inventory import load_solution
from tilegym.inventory import match
from tilegym.inventory import matching
from tilegym.inventory import reference
from tilegym.inventory.inputs import cases
from tilegym.inventory.verify import difference
from tilegym.inventory.verify import outputs_of

CATALOG = load()


def required(inputs: dict, outputs: dict, body: str, axes: dict | None = None, constraints: tuple = ()) -> Definition:
    """A Definition that no catalog has seen: tensors as "bfloat16 B S H", numbers as "float32", a body for run."""

    def specs(tensors: dict) -> dict:
        return {
            name: {"shape": text.split()[1:] if " " in text else None, "dtype": text.split()[0]}
            for name, text in tensors.items()
        }

    used = {axis for text in (*inputs.values(), *outputs.values()) for axis in text.split()[1:]}
    declared = {a: {"type": "const", "value": axes[a]} if a in (axes or {}) else {"type": "var"} for a in sorted(used)}
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    text = f"import torch\n\n\ndef run({', '.join(inputs)}):\n{lines}    return {', '.join(outputs)}\n"
    return Definition.model_validate(
        {
            "name": "needed",
            "op_type": "unknown",
            "axes": declared,
            "inputs": specs(inputs),
            "outputs": specs(outputs),
            "reference": text,
            "constraints": list(constraints),
        }
    )


NORM = """
x = h.float()
y = w * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(h.dtype)
"""
ATTENTION = """
groups = queries.shape[2] // keys.shape[2]
keys, values = (t.repeat_interleave(groups, 2).transpose(1, 2) for t in (keys, values))
scores = queries.transpose(1, 2) @ keys.transpose(2, 3) * queries.shape[-1] ** -0.5
hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + scores.shape[-1] - scores.shape[-2])
p = scores.masked_fill(hidden, float("-inf")).float().softmax(-1).to(queries.dtype)
o = (p @ values).transpose(1, 2)
"""
HALVES = tuple(f"{t}[..., D // 2 :] == {t}[..., : D // 2]" for t in ("cosine", "sine"))
ROTATION = """
def turned(x):
    half = x.shape[-1] // 2
    return x * cosine[:, None] + torch.cat((-x[..., half:], x[..., :half]), -1) * sine[:, None]

b, a = turned(k), turned(q)
"""
NEEDED = {
    "norm, constants in the reference": (
        required({"h": "bfloat16 B S H", "w": "bfloat16 H"}, {"y": "bfloat16 B S H"}, NORM, {"H": 4096}),
        ("rms_norm", COMPATIBLE, ["eps = 1e-06", "constant H = 4096 for variable H"]),
    ),
    "norm of heads, four dimensions": (
        required({"h": "bfloat16 B N S D", "w": "bfloat16 D"}, {"y": "bfloat16 B N S D"}, NORM),
        ("rms_norm", COMPATIBLE, ["merge the first 2 dimensions of h", "give y its shape back"]),
    ),
    "norm of rows in fp32": (
        required({"h": "float32 T H", "w": "float32 H"}, {"y": "float32 T H"}, NORM),
        ("rms_norm", COMPATIBLE, ["put 1 dimension in front of h", "h is float32, declared for bfloat16"]),
    ),
    "gate and up packed, up first": (
        required(
            {"both": "bfloat16 B S N"},
            {"y": "bfloat16 B S I"},
            "up, gate = both.chunk(2, -1)\ny = torch.nn.functional.silu(gate) * up",
            constraints=("N == 2 * I",),
        ),
        ("swiglu", COMPATIBLE, ["split both: part 2 of 2", "split both: part 1 of 2"]),
    ),
    "gate and up packed in rows": (
        required(
            {"both": "bfloat16 T N"},
            {"y": "bfloat16 T I"},
            "up, gate = both.chunk(2, -1)\ny = torch.nn.functional.silu(gate) * up",
            {"N": 512, "I": 256},
        ),
        ("swiglu", COMPATIBLE, ["split both: part 2 of 2", "split both: part 1 of 2", "put 1 dimension in front"]),
    ),
    "gate and up alternate": (
        required(
            {"both": "bfloat16 B S N"},
            {"y": "bfloat16 B S I"},
            "y = torch.nn.functional.silu(both[..., ::2]) * both[..., 1::2]",
            constraints=("N == 2 * I",),
        ),
        ("swiglu", COMPATIBLE, ["split both: 1 of every 2", "split both: 2 of every 2"]),
    ),
    "a loss whose ignored index is PyTorch's": (
        required(
            {"scores": "float32 M V", "labels": "int64 M"},
            {"loss": "float32 "},
            "loss = torch.nn.functional.cross_entropy(scores, labels)",
            constraints=("0 <= labels < V",),
        ),
        ("cross_entropy", COMPATIBLE, ["ignore_index = -100"]),
    ),
    "operands in the other order": (
        required(
            {"u": "bfloat16 B S I", "g": "bfloat16 B S I"},
            {"y": "bfloat16 B S I"},
            "y = torch.nn.functional.silu(g) * u",
        ),
        ("swiglu", COMPATIBLE, ["inputs in the order g, u"]),
    ),
    "attention, tokens before heads": (
        required(
            {"queries": "bfloat16 B S N D", "keys": "bfloat16 B T G D", "values": "bfloat16 B T G D"},
            {"o": "bfloat16 B S N D"},
            ATTENTION,
            constraints=("N % G == 0", "S <= T"),
        ),
        ("attention", COMPATIBLE, ["permute queries to [0, 2, 1, 3]", "scaling = D ** -0.5", "is_causal = True"]),
    ),
    "rotation of k and q": (
        required(
            {"k": "bfloat16 B G S D", "q": "bfloat16 B N S D", "cosine": "bfloat16 B S D", "sine": "bfloat16 B S D"},
            {"b": "bfloat16 B G S D", "a": "bfloat16 B N S D"},
            ROTATION,
            constraints=("D % 2 == 0", *HALVES),
        ),
        ("rope", EXACT, []),  # q and k are alike
    ),
    "a sum and its norm": (
        required(
            {"x": "bfloat16 B S H", "r": "bfloat16 B S H", "w": "bfloat16 H", "eps": "float32"},
            {"s": "bfloat16 B S H", "y": "bfloat16 B S H"},
            "s = r + x\nx = s.float()\ny = w * (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()).to(s.dtype)",
            constraints=("0 < eps < 0.1",),
        ),
        ("fused_add_rms_norm", COMPATIBLE, ["outputs in the order [1, 0]"]),
    ),
}


@pytest.mark.parametrize("name", NEEDED)
def test_what_is_found_and_how_it_is_called(name):
    definition, (target, kind, steps) = NEEDED[name]
    best = match(definition)[0]
    assert (best.target.name, best.kind) == (target, kind)
    for step in steps:
        assert any(step in said for said in best.steps), best.steps
    assert best.same_rounding and not best.assumes
    # The Solution's own code, through the adapter, computes what was required.
    run = reference.load(definition.reference, definition.name)
    call = best.adapter.wrap(load_solution(best.solution))
    if "H" in definition.const_axes:
        calls = [{"h": randn(2, 3, 4096, dtype=torch.bfloat16), "w": randn(4096, dtype=torch.bfloat16)}]
    else:
        calls = [case.inputs for case in list(cases(definition))[:2]]
    for inputs in calls:
        with sanitized():
            got = call(*inputs.values())
        wide = {
            k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()
        }
        results = (outputs_of(definition, r) for r in (got, run(*inputs.values()), run(*wide.values())))
        for values in zip(*results, strict=True):
            assert difference(*values) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CATALOG.definitions))
def test_every_definition_of_the_catalog_is_its_own_best_match(name):
    best = match(CATALOG.definitions[name], CATALOG)[0]
    assert (best.target.name, best.kind, best.steps) == (name, EXACT, ())


X = {"a": "bfloat16 B S H", "b": "bfloat16 B S H"}
Y = {"y": "bfloat16 B S H"}


@pytest.mark.parametrize(
    "inputs, body",
    [
        ({"a": X["a"]}, "y = torch.relu(a).square()"),
        (X, "y = torch.nn.functional.silu(a).clamp(max=1.0) * b"),
        (X, "y = a.sigmoid() * 1.5 * b"),
        ({"h": X["a"], "w": "bfloat16 H"}, NORM.replace("x.square()", "(x - x.mean(-1, keepdim=True)).abs()")),
        ({"h": X["a"], "w": "bfloat16 H"}, NORM.replace("w *", "(0.5 + w) *")),
    ],
    ids=["relu squared", "clamped", "scaled", "another mean", "another offset"],
)
def test_what_is_nearly_the_same_is_not_found(inputs, body):
    assert match(required(inputs, Y, body)) == []


def test_a_norm_that_rounds_once_is_found_before_one_that_rounds_twice():
    once = NORM.replace("w * (x *", "(w * (x *").replace(".to(h.dtype)", ").to(h.dtype)")
    found = match(required({"h": "bfloat16 B S H", "w": "bfloat16 H"}, Y, once))
    assert found[0].target.name == "rms_norm_fp32_weight" and found[0].same_rounding
    for other in found[1:]:
        assert other.target.name == "rms_norm" and not other.same_rounding and other.kind == COMPATIBLE


def test_assumptions_about_values_are_named():
    definition, _ = NEEDED["rotation of k and q"]
    promised = definition.model_copy(update={"constraints": ["D % 2 == 0"]})
    best = match(promised)[0]
    assert best.target.name == "rope" and best.kind == COMPATIBLE
    assert any("cos[..., D // 2 :]" in assumed for assumed in best.assumes)


CAPPED = """
s = q @ k.transpose(2, 3) * 0.25
s = torch.tanh(s / 50.0) * 50.0
distance = torch.arange(s.shape[-1])[-s.shape[-2] :, None] - torch.arange(s.shape[-1])
s = s.masked_fill((distance < 0) | (distance >= 4096), torch.finfo(s.dtype).min)
o = s.float().softmax(-1).to(q.dtype) @ v
"""


@pytest.mark.parametrize(
    "left_out, found",
    [
        (None, {"gemma_attention"}),
        pytest.param("tanh", {"attention_window"}, marks=pytest.mark.slow),
        pytest.param("4096", {"gemma_attention"}, marks=pytest.mark.slow),
    ],
    ids=["cap and window", "window alone", "cap alone"],
)
def test_limits_that_short_calls_do_not_reach_are_not_overlooked(left_out, found):
    body = CAPPED
    if left_out == "tanh":
        body = body.replace("s = torch.tanh(s / 50.0) * 50.0\n", "")
    elif left_out == "4096":
        body = body.replace(" | (distance >= 4096)", "")
    tensors = {"q": "bfloat16 B N S D", "k": "bfloat16 B N T D", "v": "bfloat16 B N T D"}
    matches = match(required(tensors, {"o": "bfloat16 B N S D"}, body, constraints=("S <= T",)))
    assert {m.target.name for m in matches} == found
    window = "window = T" if left_out == "4096" else "window = 4096"
    assert window in matches[0].steps


def test_names_do_not_matter():
    rms_norm = CATALOG.definitions["rms_norm"]
    renamed = rms_norm.model_copy(update={"name": "swiglu", "op_type": "gated_activation"})
    assert match(renamed)[0].target.name == "rms_norm"


def test_a_reference_that_fails_is_an_error():
    broken = required({"a": X["a"]}, Y, "y = a @ a @ torch.ones(3, 3)")
    with pytest.raises(InventoryError, match="the reference of 'needed' fails"):
        match(broken)
    with pytest.raises(InventoryError, match="reference is no Python: '\\(' was never closed"):
        match(broken.model_copy(update={"reference": "def run(a, b:\n"}))


def test_an_adapter_takes_the_inputs_by_position_or_by_name():
    definition, _ = NEEDED["operands in the other order"]
    call = match(definition)[0].adapter.wrap(lambda gate, up: gate - up)
    u, g = torch.tensor(1.0), torch.tensor(5.0)
    assert call(u, g) == call(g=g, u=u) == 4.0
    with pytest.raises(TypeError, match="needed takes u, g"):
        call(u)


def test_large_experts_are_tried_small():
    """Axes of which one is twice another stay so: at their real sizes the tensors would take gigabytes."""
    shipped = CATALOG.definitions["fused_moe"]
    sizes = {"E": 64, "H": 2880, "I": 2880, "N": 5760}
    axes = {n: {"type": "const", "value": sizes[n]} if n in sizes else {"type": "var"} for n in shipped.axes}
    large = Definition.model_validate({**shipped.model_dump(), "name": "large_moe", "axes": axes})
    required = matching._Required(large, {1})
    assert required.samples and all(case.axes["N"] == 2 * case.axes["I"] < 100 for case, *_ in required.samples)
    assert "fused_moe_cutile" in [found.solution.name for found in match(large)]

"""Goes over a small model and its trace, and tries on every part the formulas that may fit."""

import itertools
import re
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from typing import Any

import torch
from torch import nn

from tilegym.integrate.formulas import Formula
from tilegym.integrate.formulas import elementwise_gate
from tilegym.integrate.probe import Match
from tilegym.integrate.probe import floats_of
from tilegym.integrate.recognise_attention import is_attention
from tilegym.integrate.recognise_attention import recognise_attention
from tilegym.integrate.recognise_experts import expert_arguments
from tilegym.integrate.recognise_experts import recognise_experts
from tilegym.integrate.recognise_experts import recognise_routing
from tilegym.integrate.recognise_functions import recognise_conv
from tilegym.integrate.recognise_functions import recognise_delta_rule
from tilegym.integrate.recognise_functions import recognise_rope
from tilegym.integrate.recognise_mlps import recognise_activation
from tilegym.integrate.recognise_mlps import recognise_linear
from tilegym.integrate.recognise_mlps import recognise_mlp
from tilegym.integrate.recognise_norms import recognise_norm
from tilegym.integrate.recognise_pairs import gates
from tilegym.integrate.recognise_pairs import query_key_norms
from tilegym.integrate.recognise_pairs import recognise_loss
from tilegym.integrate.recognise_pairs import residual_of
from tilegym.integrate.trace import Call
from tilegym.integrate.trace import Trace
from tilegym.integrate.trace import tensors


@dataclass
class Finding:
    """A part of the small model that a formula reproduces; the fields as in a Requirement."""

    kind: str
    callee: Any
    path: str
    parameters: dict[str, Any]
    match: Match
    roles: dict[str, str] = field(default_factory=dict)

    @property
    def formula(self) -> Formula:
        return self.match.formula


@dataclass(frozen=True)
class Missed:
    """A part that no formula reproduces, why, and the kind that it resembles, "" for none."""

    callee: Any
    path: str
    why: str
    resembles: str = ""


@dataclass
class Findings:
    """What was found in a small model, and what was not."""

    found: list[Finding] = field(default_factory=list)
    missed: list[Missed] = field(default_factory=list)

    def at(self, path: str, *kinds: str) -> Finding | None:
        """What of these kinds the module at ``path`` is."""
        return next((f for f in self.found if f.path == path and f.kind in kinds), None)


class _Memory:
    """Remembers results for instances that are alike, so that each kind of part is probed once."""

    def __init__(self) -> None:
        self.known: dict[Any, Match | None] = {}

    def get(self, key: Any, recognise: Callable[[], Match | None]) -> Match | None:
        if key not in self.known:
            self.known[key] = recognise()
        return self.known[key]


_FLAG = re.compile("^(use|has|is|no|with|enable)_|rope")  # integers that stand for yes and no


def signature(module: nn.Module, sizes: bool = True, quantised: bool = False) -> tuple:
    """What tells instances apart that compute different things: class, plain attributes, parameters, children.

    Args:
        sizes: whether integers and shapes count; without them a full-size module equals its small counterpart.
        quantised: it is of a model in which others may have taken the place of linear layers: they count as these.
    """
    plain = []
    if quantised and _stands_for_linear(module):
        own = (("weight", 2),) if getattr(module, "bias", None) is None else (("weight", 2), ("bias", 1))
        return nn.Linear, (("in_features", "int"), ("out_features", "int")), own, ()
    # Of a layer with adapters of peft's the one in it counts: what calls it computes the same as with that one.
    children = [(n, getattr(m, "base_layer", m)) for n, m in module.named_children()]
    for name, value in sorted(vars(module).items()):
        # "forward" is what hooks and patches leave in an instance.
        if name.startswith("_") or name in ("layer_idx", "layer_id", "training", "layer_number", "forward"):
            continue
        if value is None or isinstance(value, (str, bool)) or (type(value) is int and sizes):
            plain.append((name, value))
        elif type(value) is float and (sizes or not children):
            plain.append((name, value))
        elif type(value) is int:
            flag = value in (0, 1) and _FLAG.search(name)
            plain.append((name, value if flag else "int"))
        elif callable(value) and not isinstance(value, nn.Module):
            plain.append((name, getattr(value, "__qualname__", type(value).__qualname__)))
    own = tuple((n, tuple(p.shape) if sizes else p.ndim) for n, p in module.named_parameters(recurse=False))
    return type(module), tuple(plain), own, tuple((n, signature(m, sizes, quantised)) for n, m in children)


def _stands_for_linear(module: nn.Module) -> bool:
    """As classes of bitsandbytes, quanto, HQQ and others do, and linear layers whose weight torchao has replaced."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    return all(isinstance(size, int) for size in sizes) and not isinstance(module, nn.Bilinear)


def find(model: nn.Module, trace: Trace) -> Findings:
    """Everything that can be recognised in ``model`` from one run of it."""
    findings, memory = Findings(), _Memory()
    first: dict[str, Call] = {}
    for call in trace.modules:
        first.setdefault(call.path, call)
    linears = dict(_linears(model, memory))
    for path, match in linears.items():
        said = {"transposed": match.what["transposed"], "bias": match.what["bias"]}
        roles = {"weight": "weight"} | ({"bias": "bias"} if match.what["bias"] else {})
        findings.found.append(Finding("linear", type(model.get_submodule(path)), path, said, match, roles))
    for path, call in first.items():
        if path not in linears:
            finding = _module(call, linears, memory)
            if finding:
                findings.found.append(finding)
    _functions(trace, findings)
    _routing(model, trace, findings)
    _pairs(model, trace, findings)
    _drop_parts(findings)
    _missed(model, first, findings)
    return findings


def _linears(model: nn.Module, memory: _Memory) -> Iterator[tuple[str, Match]]:
    for path, module in model.named_modules():
        if isinstance(getattr(module, "weight", None), nn.Parameter) and not isinstance(module, nn.Embedding):
            match = memory.get(("linear", signature(module)), lambda m=module: recognise_linear(m))
            if match:
                yield path, match


def _module(call: Call, linears: dict[str, Match], memory: _Memory) -> Finding | None:
    """The norm, activation, MLP or bank of experts that the called module is."""
    module, cls = call.callee, type(call.callee)
    given = [v for v in call.arguments.values() if isinstance(v, torch.Tensor)]
    # A decoder's layers and the model itself take positions, caches and more.
    if not given or not given[0].is_floating_point() or len(call.arguments) > 4:
        return None
    width = given[0].shape[-1]
    key = signature(module), width, len(given)
    routed = expert_arguments(list(call.arguments.values()))
    if routed is not None:
        what = {id(t): name for t, name in zip(routed, ("x", "ids", "weights"), strict=True)}
        order = [
            what[id(v)] if n.isdecimal() else f"{n}={what[id(v)]}" for n, v in call.arguments.items() if id(v) in what
        ]
        match = memory.get(("experts", *key), lambda: recognise_experts(module, order, width))
        if match:
            said = dict(match.what)
            return Finding("experts", cls, call.path, said, match, said.pop("roles"))
        return None
    if len(given) <= 2 and len(call.arguments) <= 2:
        match = memory.get(("norm", *key), lambda: recognise_norm(module, width, len(given) == 2))
        if match:
            return _norm(call, match)
    if len(given) != 1:
        return None
    match = memory.get(("activation", *key), lambda: recognise_activation(module))
    if match:
        return Finding("activation", cls, call.path, {"activation": match.what}, match)
    below = {p[len(call.path) + 1 :]: m.what["transposed"] for p, m in linears.items() if p.startswith(f"{call.path}.")}
    match = memory.get(("mlp", *key), lambda: recognise_mlp(module, below, width))
    if match:
        said = dict(match.what)
        roles = said.pop("roles")
        dropout = _dropout(module)
        said |= {"dropout": dropout} if dropout else {}  # in training; nothing in the formula
        return Finding(
            "gated_mlp" if "gate" in roles or "gate_up" in roles else "mlp", cls, call.path, said, match, roles
        )
    return None


def _dropout(module: nn.Module) -> float:
    """The largest rate of dropout within, of modules and of those that call the function with a rate of their own."""
    rates = [m.p for m in module.modules() if isinstance(m, nn.Dropout)]
    rates += [v for m in module.modules() for name, v in floats_of(m).items() if "dropout" in name]
    return max(rates, default=0.0)


def _norm(call: Call, match: Match) -> Finding:
    what = match.what
    roles = {role: what[role] for role in ("weight", "bias") if what[role]}
    said = {"eps": what["eps"], "offset": what["offset"], "casting": what["casting"], "size": what["size"]}
    said |= {"groups": what["groups"]} if what["groups"] > 1 else {}
    kind = what["kind"]
    if what["gate"]:
        kind = "rms_norm_gated" if kind == "rms_norm" else "layer_norm_gated"
        said |= {"activation": what["act"], "norm_before_gate": what["gate"] == "after"}
    return Finding(kind, type(call.callee), call.path, said, match, roles)


def _functions(trace: Trace, findings: Findings) -> None:
    """Calls of functions: each once for each module and stage that matters."""
    seen, known = set(), set()
    for call in trace.functions:
        if call.within is not None and (id(call.within) in known or is_attention(call.within)):
            known.add(id(call))  # a helper of something recognised
            continue
        key = call.callee, call.path, call.stage == "decode"
        if is_attention(call):
            known.add(id(call))
            if call.stage != "decode" and key not in seen:
                seen.add(key)
                match = recognise_attention(call)
                if match:
                    dropout = getattr(next(iter(call.values.values())), "attention_dropout", 0.0)
                    said = match.what | ({"dropout": dropout} if isinstance(dropout, float) and dropout else {})
                    findings.found.append(Finding("attention", call.callee, call.path, said, match))
                else:
                    why = "no formula of attention gives what it gives"
                    findings.missed.append(Missed(call.callee, call.path, why, "attention"))
            continue
        kind, match = _function(call)
        if match is None:
            continue
        known.add(id(call))
        said = dict(match.what)
        arguments = said.pop("arguments")
        if kind == "gated_delta_rule":
            said["form"] = "recurrent" if call.stage == "decode" else "chunk"
        once = key if kind != "rope" else key[:2]
        if once not in seen:
            seen.add(once)
            findings.found.append(Finding(kind, call.callee, call.path, said, match, arguments))
    claimed = {(f.callee, f.path) for f in findings.found}
    for call in trace.functions:
        inner = id(call) in known or call.within is not None or (call.callee, call.path) in claimed
        if not inner and call.stage == "prefill" and not _is_trivial(call):
            kind = "rope" if re.search("rotary|rope", call.callee.__name__) else ""
            why = "no formula known here gives what this function gives"
            findings.missed.append(Missed(call.callee, call.path, why, kind))


def _is_trivial(call: Call) -> bool:
    """Whether a function only adds, moves or hands on its arguments."""
    given = [t for t in tensors(call.values) if t.is_floating_point()]
    output = next(tensors(call.output), None)
    if not given or output is None or not output.is_floating_point():
        return True
    if any(output.shape == t.shape and torch.equal(output, t) for t in given):
        return True
    if torch.equal(output.unique(), given[0].unique()):
        return True
    pairs = itertools.combinations([t for t in given if t.shape == output.shape], 2)
    return any(torch.equal(output, a + b) for a, b in pairs)


def _function(call: Call) -> tuple[str, Match | None]:
    for kind, recognise in (
        ("rope", recognise_rope),
        ("causal_conv1d", recognise_conv),
        ("gated_delta_rule", recognise_delta_rule),
    ):
        match = recognise(call)
        if match:
            return kind, match
    return "", None


def _settings(model: nn.Module) -> dict[str, float]:
    config = model.config.get_text_config(decoder=True)
    return {n: float(v) for n, v in vars(config).items() if type(v) in (int, float) and not n.endswith("token_id")}


def _routing(model: nn.Module, trace: Trace, findings: Findings) -> None:
    """The routing in front of each bank of experts, in the module that calls it."""
    done, settings = set(), _settings(model)
    for call in trace.modules:
        routed = expert_arguments(list(call.arguments.values()))
        block = call.path.rpartition(".")[0]
        if routed is None or block in done or call.stage != "prefill":
            continue
        done.add(block)
        module = model.get_submodule(block)
        near = settings | floats_of(module) | {k: v for m in module.modules() for k, v in floats_of(m).items()}
        match = recognise_routing(module, *routed, near)
        if match:
            said = dict(match.what)
            roles = said.pop("roles")
            findings.found.append(Finding("routing", type(module), block, said, match, roles))
        else:
            why = "no formula of routing gives the experts that it chooses"
            findings.missed.append(Missed(type(module), block, why, "routing"))


def _pairs(model: nn.Module, trace: Trace, findings: Findings) -> None:
    producers, consumers = trace.producers(), trace.consumers()
    norms = {f.path: f for f in findings.found if f.kind in ("rms_norm", "layer_norm")}
    prefill = [c for c in trace.modules if c.stage == "prefill"]
    for call in prefill:
        residual = residual_of(call, producers) if call.path in norms else None
        if residual:
            norm = norms[call.path]
            where = type(model.get_submodule(residual.pop("residual_in")))
            said = {"norm": norm.kind, **norm.parameters, **residual}
            findings.found.append(Finding("add_norm", where, call.path, said, norm.match, norm.roles))
    mixers = set()
    for call in trace.functions:
        if call.stage != "prefill" or not (is_attention(call) or findings.at(call.path, "gated_delta_rule")):
            continue
        mixers.add(call.path)
        if is_attention(call):
            inside = [c for c in prefill if c.path in norms and c.path.startswith(f"{call.path}.")]
            pair = query_key_norms(call, inside, consumers)
            if pair and norms[pair[0].path].parameters == norms[pair[1].path].parameters:
                norm = norms[pair[0].path]
                roles = {r: c.path[len(call.path) + 1 :] for r, c in zip(("q", "k"), pair, strict=True)}
                owner, said = type(model.get_submodule(call.path)), {"norm": norm.kind, **norm.parameters}
                findings.found.append(Finding("qk_norm", owner, call.path, said, norm.match, roles))
    for path, act in dict(gates(trace, mixers, producers)).items():
        match = Match(elementwise_gate(act), {}, None)
        findings.found.append(Finding("gate_mul", type(model.get_submodule(path)), path, {"activation": act}, match))
    if not any(c.stage == "train" for c in trace.modules):
        return
    head = model.get_output_embeddings()
    path = next((p for p, m in model.named_modules() if m is head), "")
    loss = next((c for c in trace.functions if c.stage == "train" and "loss" in c.callee.__name__.lower()), None)
    if loss is None:  # written out in the model's forward
        whole = next(c for c in trace.modules if c.callee is model and c.stage == "train")
        values = {"logits": whole.output.logits, "labels": whole.arguments["labels"]}
        loss = Call(type(model).forward, "", values, values, "train", output=whole.output.loss)
    calls = [c for c in trace.modules if c.callee is head and c.stage == "train"]
    both = recognise_loss(loss, head, calls, _settings(model))
    if both is None:
        findings.missed.append(Missed(loss.callee, loss.path, "no formula of a loss gives what it gives", "loss"))
        return
    findings.found.append(Finding("loss", loss.callee, loss.path, dict(both[0].what), both[0]))
    findings.missed = [m for m in findings.missed if m.callee is not loss.callee]
    if both[1]:
        said, roles = dict(both[1].what), {"weight": "weight"} | ({"bias": "bias"} if head.bias is not None else {})
        findings.found.append(Finding("linear_cross_entropy", type(model), path, said, both[1], roles))


def _drop_parts(findings: Findings) -> None:
    """Activations inside of recognised MLPs and experts are part of them."""
    whole = [f.path for f in findings.found if f.kind in ("gated_mlp", "mlp", "experts")]
    findings.found = [
        f for f in findings.found if f.kind != "activation" or not any(f.path.startswith(f"{w}.") for w in whole)
    ]


_HINTS = re.compile(
    r"(?P<attention>attention)|(?P<experts>experts)|(?P<routing>router)|(?P<norm>norm$)|(?P<mlp>mlp$)", re.I
)


def _missed(model: nn.Module, first: dict[str, Call], findings: Findings) -> None:
    """Modules that compute something themselves and were not recognised: by their parameters, or, a hint, by name."""
    claimed = {f.path for f in findings.found} | {m.path for m in findings.missed}
    routing = [f"{f.path}.{r}" for f in findings.found if f.kind == "routing" for r in f.roles.values()]
    inside = [f.path for f in findings.found if f.kind in ("gated_mlp", "mlp", "experts", "attention")]
    for path, call in first.items():
        module = call.callee
        own = [n for n, _ in module.named_parameters(recurse=False)]
        if not path or path in claimed or isinstance(module, (nn.Embedding, nn.Dropout, nn.Identity)):
            continue
        if any(r.startswith(f"{path}.") for r in routing) or any(path.startswith(f"{p}.") for p in inside) and not own:
            continue
        hint = _HINTS.search(type(module).__name__)
        kind = _resembles(hint.lastgroup, module, call) if hint else ""
        if own:
            why = f"no formula known here uses its {', '.join(own)} as it does"
            findings.missed.append(Missed(type(module), path, why, kind))
        elif hint and not _composed(path, findings):
            why = "it is called like a part known here, and computes another"
            findings.missed.append(Missed(type(module), path, why, kind))


def _resembles(kind: str, module: nn.Module, call: Call) -> str:
    """The kind that a module with such a name would be of, if its form fits too."""
    given, output = next(tensors(call.arguments), None), next(tensors(call.output), None)
    if kind in ("norm", "mlp"):
        same = given is not None and output is not None and given.shape == output.shape
        return ({"norm": "rms_norm"}.get(kind, kind)) if same else ""
    # Attention and experts of their own do not go through transformers' interfaces.
    return kind if kind == "experts" and hasattr(module, "is_transposed") else ""


def _composed(path: str, findings: Findings) -> bool:
    """Whether a module does its work through others that were recognised, besides linear layers."""
    return any(f.path.startswith(f"{path}.") and f.kind not in ("linear", "activation") for f in findings.found)

"""From the small model back to the real one: where each finding stands there, and with which numbers."""

import re
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tilegym.integrate import formulas
from tilegym.integrate import formulas_experts
from tilegym.integrate import formulas_sequence
from tilegym.integrate.findings import Finding
from tilegym.integrate.findings import Findings
from tilegym.integrate.findings import Missed
from tilegym.integrate.findings import signature
from tilegym.integrate.formulas import Formula
from tilegym.integrate.probe import floats_of

# Kinds that are one module by itself; the others belong to the module that calls a function or other modules.
_NORMS = ("rms_norm", "layer_norm", "rms_norm_gated", "layer_norm_gated")
OF_MODULES = (*_NORMS, "gated_mlp", "mlp", "activation", "linear", "experts")

# Parameters that are sizes, and the names under which configs hold them.
_FROM_CONFIG = {
    "window": "sliding_window|window_size|local_attention|window_len",
    "chunk": "attention_chunk_size",
    "top_k": "experts_per_tok|moe_top_?k|moe_k",
    "groups": "^n_group$|num_expert_group",
    "top_groups": "topk_group",
}


class Places:
    """The modules of the real model that are like those of the small one.

    Two modules are alike if they agree in everything but sizes: class, attributes, parameters' names, children, and
    the kind of layer that they stand in. Where no layer of the small model is of the same kind, one that is otherwise
    equal will do, and for a module without children one anywhere.

    Attributes:
        modules: of the real model, by path.
        strangers: the paths of those that are like nothing in the small model.
    """

    def __init__(self, small: nn.Module, real: nn.Module) -> None:
        self.small, self.real = small, real
        self.modules = dict(real.named_modules())
        lists = [
            {name: v for name, v in vars(m.config.get_text_config(decoder=True)).items() if isinstance(v, list)}
            for m in (small, real)
        ]
        layers = [getattr(m.config.get_text_config(decoder=True), "num_hidden_layers", -1) for m in (small, real)]
        # The lists that hold something for each layer.
        self.lists = [
            {n: v for n, v in own.items() if all(n in o and len(o[n]) == k for o, k in zip(lists, layers, strict=True))}
            for own in lists
        ]
        self.keys = {path: self._keys(small, path, module, 0) for path, module in small.named_modules()}
        known: list[dict[tuple, tuple]] = [{}, {}, {}]
        for keys in self.keys.values():
            for level, key in zip(known, keys, strict=True):
                level.setdefault(key, keys)
        self.alike: dict[tuple, list[str]] = {}
        self.strangers: list[str] = []
        for path, module in self.modules.items():
            keys = self._keys(real, path, module, 1)
            like = next((level[key] for level, key in zip(known, keys, strict=True) if key in level), None)
            if like is None:
                self.strangers.append(path)
            else:
                self.alike.setdefault(like[0], []).append(path)

    def _keys(self, model: nn.Module, path: str, module: nn.Module, which: int) -> tuple[tuple, tuple, tuple]:
        """What two modules have to agree in: with the kind of layer, without it, and, for leaves, without the path."""
        layer, kind = re.search(r"\.(\d+)(?=\.|$)", path), []
        if layer is not None:
            for name, values in sorted(self.lists[which].items()):
                item = values[int(layer[1])] if int(layer[1]) < len(values) else None
                kind.append((name, item if isinstance(item, (str, bool)) or item in (0, 1) else None))
            owner = vars(model.get_submodule(path[: layer.end()]))
            plain = {n: v for n, v in owner.items() if isinstance(v, (str, bool)) and n[0] != "_" and n != "training"}
            kind += sorted(plain.items())
        quantised = getattr(model.config, "quantization_config", None) is not None
        own, where = signature(module, sizes=False, quantised=quantised), generic(path)
        leaf = own if not any(True for _ in module.children()) else (own, where)
        return (own, where, tuple(map(str, kind))), (own, where), (leaf,)

    def of(self, path: str) -> list[str]:
        """The real model's modules that are like the small one's at ``path``."""
        return self.alike.get(self.keys[path][0], [])


def generic(path: str) -> str:
    """Where a module stands: its path from the list of layers on, with "*" for numbers; outside of layers its name.

    What comes before the layers differs between a language model and the same inside of a model of several modalities.
    """
    parts = path.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join("*" if part.isdecimal() else part for part in parts[first - 1 :])


def place(findings: Findings, places: Places, changes: dict[str, Any]) -> list[tuple[Finding, str]]:
    """Each finding, with the real model's numbers, at each of its places in the real model, in the model's order."""
    placed: dict[tuple, tuple[Finding, Finding, str]] = {}

    def put(finding: Finding, targets: list[str], again: bool = True) -> None:
        for path in targets:
            key = finding.kind, finding.callee, path, finding.parameters.get("form")
            if key not in placed:
                real = restated(finding, places.small, places.real, path, changes)
                placed[key] = finding, real, path
            elif again and placed[key][0].parameters != finding.parameters:
                why = f"layers that look alike differ: {placed[key][0].parameters} and {finding.parameters}"
                findings.missed.append(Missed(finding.callee, finding.path, why, finding.kind))

    pairs = [finding for finding in findings.found if finding.kind == "add_norm"]
    for finding in findings.found:
        if finding.kind != "add_norm":
            put(finding, places.of(finding.path) if finding.path else [""])
    for finding in pairs:
        put(finding, _not_first(finding.path, places.of(finding.path), pairs))
    for finding in pairs:
        put(finding, _not_first(finding.path, _same_position(finding.path, places), pairs), again=False)
    order = {path: i for i, path in enumerate(places.modules)}
    return sorted(((real, path) for _, real, path in placed.values()), key=lambda item: order[item[1]])


def _same_position(path: str, places: Places) -> list[str]:
    """Norms behind an addition, in layers of every kind."""
    where, cls = generic(path), type(places.small.get_submodule(path))
    return [p for p, module in places.modules.items() if generic(p) == where and type(module) is cls]


def _not_first(path: str, targets: list[str], pairs: list[Finding]) -> list[str]:
    """Without the first layer's norm, if it stands behind the embeddings there instead of an addition."""
    first = re.sub(r"\.\d+(?=\.)", ".0", path, count=1)
    if any(finding.path == first for finding in pairs):
        return targets
    return [t for t in targets if not re.match(r"[^\d]*\.0\.", t)]


def restated(finding: Finding, small: nn.Module, real: nn.Module, path: str, changes: dict[str, Any]) -> Finding:
    """The finding with the sizes of the real model's module at ``path`` in its parameters and its formula."""
    said = dict(finding.parameters)
    for name, pattern in _FROM_CONFIG.items():
        for changed, value in changes.items():
            former, now = value if isinstance(value, tuple) else (value, value)
            if (
                said.get(name) == now
                and type(now) is int
                and former is not None
                and re.search(pattern, changed.rpartition(".")[2])
            ):
                said[name] = former
    module, twin = real.get_submodule(path), small.get_submodule(finding.path)
    if finding.kind in (*_NORMS, "add_norm", "qk_norm"):
        _restate_norm(said, finding, module, twin)
    elif finding.kind == "attention":
        _restate_attention(said, module, twin, real)
    elif finding.kind == "rope":
        _restate_rope(said, module, real)
    formula = formula_of(finding.kind, said, finding.roles, module) or finding.formula
    return Finding(finding.kind, finding.callee, path, said, replace(finding.match, formula=formula), finding.roles)


def _restate_norm(said: dict[str, Any], finding: Finding, module: nn.Module, twin: nn.Module) -> None:
    if finding.kind == "qk_norm":
        module, twin = module.get_submodule(finding.roles["q"]), twin.get_submodule(finding.roles["q"])
    weight = getattr(module, finding.roles.get("weight", "weight"), None)
    if isinstance(weight, torch.Tensor):
        said["size"] = weight.shape[-1]
    else:  # a norm without weights works on any width
        said["size"] = None
    if "groups" in said and said["size"]:
        before, after = floats_of(twin), floats_of(module)
        for name, value in before.items():
            if value == said["groups"]:
                said["groups"] = int(after[name])
                break
            if value and finding.parameters["size"] / value == said["groups"]:
                said["groups"] = said["size"] // int(after[name])
                break


def _restate_attention(said: dict[str, Any], module: nn.Module, twin: nn.Module, real: nn.Module) -> None:
    config = getattr(module, "config", None) or real.config.get_text_config(decoder=True)
    before, after = floats_of(twin), floats_of(module)
    small = dict(said)
    for name in ("head_dim", "value_dim", "kv_heads", "heads"):
        hints = {
            "head_dim": ("qk_head_dim", "head_dim", "head_size"),
            "value_dim": ("v_head_dim", "head_dim", "head_size"),
            "heads": ("num_heads", "num_attention_heads", "n_heads"),
            "kv_heads": ("num_key_value_heads", "num_kv_heads"),
        }[name]
        held = next((after[h] for h in hints if before.get(h) == small[name]), None)
        if held is None:
            held = next((v for h in hints if type(v := _setting(config, h)) is int), None)
        said[name] = int(held) if held is not None else None
    if said["kv_heads"] is None:
        said["kv_heads"] = said["heads"]
    if said["head_dim"] is None and said["heads"]:
        said["head_dim"] = config.hidden_size // said["heads"]
    if small["value_dim"] == small["head_dim"]:
        said["value_dim"] = said["head_dim"]
    if small["shared_rope_dim"]:
        said["shared_rope_dim"] = _setting(config, "qk_rope_head_dim") or small["shared_rope_dim"]
    held = next((after[n] for n, v in before.items() if v == small["scaling"] and n in after and "scal" in n), None)
    if held is not None:
        said["scaling"] = held
    elif abs(small["scaling"] - small["head_dim"] ** -0.5) < 1e-9 and said["head_dim"]:
        said["scaling"] = said["head_dim"] ** -0.5


def _setting(config: Any, name: str) -> Any:
    """What a config holds under ``name``; None where it holds nothing, or a value for each layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # configs with values for each layer refuse, with an error of their own
        return None


def _restate_rope(said: dict[str, Any], module: nn.Module, real: nn.Module) -> None:
    """The number of rotated dimensions is twice the number of frequencies that the model holds."""
    lengths = {len(b) for name, b in real.named_buffers() if name.endswith("inv_freq")}
    config = real.config.get_text_config(decoder=True)
    width = floats_of(module).get("head_dim") or _setting(config, "head_dim")
    if len(lengths) == 1 and said["factor"] == 1.0:
        said["rotated"] = 2 * lengths.pop()
    elif len(lengths) == 1 and width:
        said["rotated"] = 2 * lengths.pop()
        said["factor"] = said["rotated"] / width
    elif width:
        said["rotated"] = int(width * said["factor"])


def formula_of(kind: str, said: dict[str, Any], roles: dict[str, str], module: nn.Module) -> Formula | None:
    """The formula of a kind with the given parameters; None where the small model's says it already."""
    if kind in _NORMS:
        gate = {None: "", True: "after", False: "before"}[said.get("norm_before_gate")]
        return formulas.norm(
            kind.removesuffix("_gated"), said["eps"], said["casting"], said["offset"], "weight" in roles,
            "bias" in roles, said.get("groups", 1), gate, said.get("activation", "silu"),
        )  # fmt: skip
    if kind == "add_norm":
        return formulas.add_norm(said["norm"], said["eps"], said["casting"], said["offset"], "weight" in roles,
                                 "bias" in roles, said["residual_scale"])  # fmt: skip
    if kind == "qk_norm":
        return formulas.qk_norm(said["norm"], said["eps"], said["casting"], said["offset"])
    if kind == "attention" and said["mask"] != "other":
        return formulas_sequence.attention(
            said["scaling"], said["causal"], said["window"], said["chunk"], said["softcap"], said["sinks"], False
        )
    if kind == "rope":
        names = ("q", "k") if said["tensors"] == 2 else ("x",)
        return formulas_sequence.rope(
            said["style"], said["angles"], said["rotated"], said["heads_dim"], said["casting"], names
        )
    if kind == "routing":
        fields = formulas_experts.Routing.__dataclass_fields__
        return formulas_experts.routing(formulas_experts.Routing(**{k: v for k, v in said.items() if k in fields}))
    return None

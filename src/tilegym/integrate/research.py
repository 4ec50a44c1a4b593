"""Research: what a model computes, found out by running a small copy of it and probing its parts."""

import contextlib
import copy
import json
from typing import Any

import torch
import transformers
from torch import nn

from tilegym.errors import ModelError
from tilegym.integrate.drafts import constants
from tilegym.integrate.drafts import draft
from tilegym.integrate.exchange import attention_misfit
from tilegym.integrate.findings import Finding
from tilegym.integrate.findings import Findings
from tilegym.integrate.findings import find
from tilegym.integrate.placing import OF_MODULES
from tilegym.integrate.placing import Places
from tilegym.integrate.placing import place
from tilegym.integrate.requirement import Requirement
from tilegym.integrate.requirement import Research
from tilegym.integrate.requirement import Source
from tilegym.integrate.requirement import Unrecognised
from tilegym.integrate.small_config import twice_as_deep
from tilegym.integrate.small_model import SmallModel
from tilegym.integrate.small_model import default_config
from tilegym.integrate.small_model import small_model
from tilegym.integrate.source_regions import source_of
from tilegym.integrate.trace import record


def research(model: nn.Module | Any, trust_remote_code: bool = False, seed: int = 0) -> Research:
    """Finds out what a model of transformers computes.

    A small model of the same family is built from the config and run once. Each of its parts is compared with
    formulas on random numbers, in fp32 and bf16; a part is recognised only if a formula reproduces it to rounding.
    What is found is then looked up in the model itself, whose weights are neither read nor run.

    Args:
        model: a model; or a config of transformers, whose causal language model is laid out without memory; or a
            ``model_type``.
        trust_remote_code: whether code that comes with the config may run.
        seed: of the small model's weights.

    Raises:
        ModelError: a config's family has no causal language model; or a model cannot be made small.
    """
    config = default_config(model) if isinstance(model, str) else getattr(model, "config", model)
    arguments = config, seed, trust_remote_code, type(model) if isinstance(model, nn.Module) else None
    small = small_model(*arguments)
    real = model if isinstance(model, nn.Module) else _laid_out(small)
    findings, places = _observed(small, real)
    if _unlike(findings, places):
        # Layers such as those that others share keys with are of one kind only if there are more of them.
        with contextlib.suppress(ModelError):
            deeper = small_model(*arguments, recipes=(twice_as_deep,))
            observed = _observed(deeper, real)
            if len(_unlike(*observed)) < len(_unlike(findings, places)):
                small, (findings, places) = deeper, observed
    placed = place(findings, places, small.changes)
    dtype = str(getattr(config, "dtype", None) or torch.bfloat16).removeprefix("torch.")
    text = real.config.get_text_config(decoder=True)
    requirements = _requirements(placed, real, text.model_type, dtype)
    return Research(
        model_type=text.model_type,
        architecture=type(real).__name__,
        transformers=transformers.__version__,
        requirements=requirements,
        unrecognised=_unrecognised(findings, places),
        changes={name: list(change) for name, change in small.changes.items() if _is_plain(change)},
        attention=attention_misfit(small.model) if any(r.kind == "attention" for r in requirements) else "",
    )


def _observed(small: SmallModel, real: nn.Module) -> tuple[Findings, Places]:
    """What the small model computes, and where that stands in the real one."""
    with torch.device("cpu"):  # whatever the default is
        return find(small.model, record(small.model)), Places(small.model, real)


def _unlike(findings: Findings, places: Places) -> list[tuple[str, str]]:
    """The modules of the real model that are like none of the small one but for their class: path, and what that is."""
    probed = {type(places.small.get_submodule(f.path)): f.kind for f in findings.found if f.path}
    return [(path, probed[cls]) for path in places.strangers if (cls := type(places.modules[path])) in probed]


def _is_plain(change: Any) -> bool:
    return all(isinstance(v, (int, float, str, bool, type(None))) for v in change)


def _laid_out(small: SmallModel) -> nn.Module:
    """The model of the whole config without memory for its weights."""
    try:
        with torch.device("meta"):
            return small.make(copy.deepcopy(small.config))
    except Exception as error:  # a config that contradicts itself fails anywhere in the model's constructor
        raise ModelError(
            f"a model of type {small.config.model_type!r} can be made small but not laid out in full ({error}): "
            "check the sizes in its config"
        ) from error


def _requirements(placed: list[tuple[Finding, str]], real: nn.Module, family: str, dtype: str) -> tuple:
    groups: dict[str, list[tuple[Finding, str, dict[str, int]]]] = {}
    for finding, path in placed:
        sizes = constants(finding, real.get_submodule(path))
        key = finding.kind, implementation(finding.callee), finding.roles, finding.parameters, sizes
        groups.setdefault(json.dumps(key, sort_keys=True, default=str), []).append((finding, path, sizes))
    found, names = [], set()
    for group in groups.values():
        finding, _, sizes = group[0]
        source, op = source_of(_region(finding, real, group[0][1])), op_of(finding)
        definition = draft(finding, sizes, family, dtype, source, op)
        while definition["name"] in names:
            definition["name"] += "_other"
        names.add(definition["name"])
        errors = {d: max(f.match.errors[d] for f, _, _ in group) for d in finding.match.errors}
        found.append(
            Requirement(
                kind=finding.kind,
                implementation=implementation(finding.callee),
                modules=tuple(path for _, path, _ in group),
                roles=dict(finding.roles),
                parameters=dict(finding.parameters),
                op=op,
                source=source,
                definition=definition,
                errors=errors,
            )
        )
    return tuple(found)


def _region(finding: Finding, real: nn.Module, path: str) -> Any:
    """The class or function in whose text the finding is written; of what spans modules, the forward around them."""
    if finding.kind in OF_MODULES or not isinstance(finding.callee, type):
        return finding.callee
    return finding.callee.forward


def implementation(callee: Any) -> str:
    """The qualified name of a class or function."""
    return f"{callee.__module__}.{callee.__qualname__}"


def op_of(finding: Finding) -> str:
    """The name of the op of TileGym that computes a finding; "" if there is none."""
    said, kind = finding.parameters, finding.kind
    gelu = said.get("activation") in ("gelu", "gelu_tanh")
    plain = not any(said.get(name) for name in ("limit", "alpha", "shift", "gate_scale", "down_scale"))
    if kind in ("rms_norm", "rms_norm_gated", "layer_norm"):
        return kind if said.get("groups", 1) == 1 else ""
    if kind in ("gated_mlp", "mlp", "activation"):
        return _activation_op(kind, said, gelu) if plain else ""
    if kind == "attention":
        return _attention_op(said)
    if kind == "gated_delta_rule":
        return "" if said["per_channel"] else f"{said['form']}_gated_delta_rule"
    if kind in ("add_norm", "qk_norm"):
        fused = {"add_norm": "fused_add_rms_norm", "qk_norm": "dual_rms_norm"}[kind]
        return fused if said["norm"] == "rms_norm" and said.get("residual_scale", 1.0) == 1.0 else ""
    if kind == "linear_cross_entropy":
        return "fused_linear_cross_entropy" if said["softcap"] is None and said["scale"] == 1.0 else ""
    if kind == "gate_mul":
        return {"sigmoid": "sigmoid_mul", "silu": "swiglu"}.get(said["activation"], "")
    if kind == "causal_conv1d":
        return "causal_conv1d_update" if said["form"] == "update" else "causal_conv1d_fn"
    known = {"linear": "linear", "rope": "apply_rope_base", "experts": "fused_moe", "routing": "moe_topk_routing"}
    return (known | {"loss": "cross_entropy"}).get(kind, "")


def _activation_op(kind: str, said: dict[str, Any], gelu: bool) -> str:
    if kind != "gated_mlp":
        return "gelu" if gelu else "relu" if said["activation"] == "relu" else ""
    if said["activation"] == "silu":
        usual = said.get("packed") == "concatenated" and said.get("order") == "gate, up"
        return "silu_and_mul" if usual else "swiglu"
    return "geglu" if gelu else ""


def _attention_op(said: dict[str, Any]) -> str:
    if said["chunk"] or said["mask"] == "other":
        return ""
    if said["shared_rope_dim"]:
        return "mla"
    return "attention_sink" if said["sinks"] else "gemma_attention" if said["softcap"] else "fmha"


def _unrecognised(findings: Findings, places: Places) -> tuple[Unrecognised, ...]:
    found: dict[tuple, tuple[Source | None, list[str]]] = {}
    for missed in findings.missed:
        key = implementation(missed.callee), missed.why, missed.resembles
        entry = found.setdefault(key, (source_of(missed.callee), []))
        entry[1].extend(p for p in (places.of(missed.path) if missed.path else [""]) if p not in entry[1])
    for path, kind in _unlike(findings, places):
        cls = type(places.modules[path])
        key = implementation(cls), "no layer of the small model is like this one", kind
        found.setdefault(key, (source_of(cls), []))[1].append(path)
    return tuple(
        Unrecognised(name, tuple(paths), why, resembles, source)
        for (name, why, resembles), (source, paths) in found.items()
    )

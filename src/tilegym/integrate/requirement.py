"""What a model computes, as data: the requirements that research finds, and what it could not recognise.

Plain dataclasses that survive ``to_json`` and ``from_json``; nothing here needs torch or transformers.
"""

import json
import re
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from typing import Any

# What a Requirement's ``kind`` can be, and what its ``roles`` and ``parameters`` then say.
KINDS = {
    "rms_norm": "root-mean-square norm; roles weight, bias; parameters eps, offset, casting, size, groups",
    "rms_norm_gated": "rms_norm with a gate; parameters besides activation, norm_before_gate",
    "layer_norm": "layer norm; roles weight, bias; parameters eps, casting, size",
    "gated_mlp": "down(act(gate(x)) * up(x)); roles gate, up or gate_up, and down; parameters activation, order, limit",
    "mlp": "down(act(up(x))); roles up, down; parameters activation",
    "activation": "an elementwise activation outside of what is recognised as an MLP; parameters activation",
    "linear": "x @ weight.T + bias; roles weight, bias; parameters transposed",
    "rope": "rotary function of a modeling file; parameters style, factor, heads_dim, arguments",
    "attention": "a call of the attention interface; parameters scaling, window, softcap, sinks, causal, heads, dims",
    "experts": "a bank of experts; roles gate_up or up, down and their biases; parameters activation, layout, limit",
    "routing": "choice and weights of the experts; parameters scoring, top_k, normalised, scaling, groups",
    "causal_conv1d": "depthwise causal convolution over the tokens; parameters activation, width",
    "gated_delta_rule": "linear attention by the gated delta rule; parameters form, l2norm",
    "qk_norm": "two norms, one of the queries and one of the keys; roles q, k; parameters as of the norm",
    "add_norm": "a residual addition and the norm behind it; parameters as of the norm",
    "gate_mul": "x * activation(gate) behind attention; parameters activation",
    "loss": "the loss of training; parameters softcap, scale, shift, ignore_index",
    "linear_cross_entropy": "the output layer and the loss together; parameters as of the loss",
}


@dataclass(frozen=True)
class Source:
    """The region of source text that computes something.

    Attributes:
        file: path below the package's parent ("transformers/models/llama/modeling_llama.py").
        first, last: line numbers in the installed file, both inclusive, decorators included.
        qualname: of the class or function.
        url: a permalink to these lines, "" for code that is in no release.
        immutable: whether ``url`` names a commit; else it names the tag of the release.
    """

    file: str
    first: int
    last: int
    qualname: str
    url: str = ""
    immutable: bool = False


@dataclass(frozen=True)
class Requirement:
    """One thing that the model computes, in however many places.

    Attributes:
        kind: a key of :data:`KINDS`.
        implementation: qualified name of the class or function in transformers.
        modules: the paths of the modules that compute it: of the module itself, or, for a function, a call of an
            interface and what spans several modules, of the module that calls it or stands last.
        roles: where in such a module the operands are: role ("gate", "weight") to attribute path ("gate_proj").
        parameters: the constants of the formula, all of them checked by running it.
        op: the op of TileGym that computes it; "" if there is none.
        source: where it is written.
        definition: a draft Definition in FlashInfer-Bench's JSON, whose ``reference`` was run against the model.
        errors: for each dtype that was tried, how far ``reference`` and model were apart at most, in units of the
            dtype's rounding at the result's largest magnitude.
    """

    kind: str
    implementation: str
    modules: tuple[str, ...]
    roles: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    op: str = ""
    source: Source | None = None
    definition: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def layers(self) -> tuple[str, ...]:
        """``modules`` with the layer numbers as "*", each once."""
        return tuple(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path) for path in self.modules))


@dataclass(frozen=True)
class Unrecognised:
    """Something that the model computes and that matches no formula known here, and why not.

    ``resembles`` is the kind that it looks like, by its name or its class; "" if it is like nothing known here.
    """

    implementation: str
    modules: tuple[str, ...]
    why: str
    resembles: str = ""
    source: Source | None = None


@dataclass(frozen=True)
class Research:
    """What one model computes.

    Attributes:
        model_type, architecture: of its config, and the model's class.
        transformers: the version that was read and run.
        requirements: what was recognised; of each kind in the order of the forward pass.
        unrecognised: what was not. Modules that do nothing but call others are in neither list.
        changes: what was changed in the config to make the model small enough to run.
        attention: why the model's attention cannot be exchanged through transformers' interface; "" if it can be.
    """

    model_type: str
    architecture: str
    transformers: str
    requirements: tuple[Requirement, ...]
    unrecognised: tuple[Unrecognised, ...] = ()
    changes: dict[str, Any] = field(default_factory=dict)
    attention: str = ""

    def of_kind(self, kind: str) -> tuple[Requirement, ...]:
        """The requirements of one kind."""
        return tuple(r for r in self.requirements if r.kind == kind)

    def to_json(self) -> str:
        """JSON text, from which :meth:`from_json` makes an equal object."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Research":
        """Reads what :meth:`to_json` wrote."""
        data = json.loads(text)
        data["requirements"] = tuple(_read(Requirement, item) for item in data["requirements"])
        data["unrecognised"] = tuple(_read(Unrecognised, item) for item in data["unrecognised"])
        return cls(**data)


def _read(cls: type, item: dict[str, Any]) -> Any:
    source = item["source"] and Source(**item["source"])
    return cls(**{**item, "modules": tuple(item["modules"]), "source": source})

"""Forwards and functions for any family, made of TileGym's ops by what they are told about a part.

:data:`KERNELS` has them by name. Each comes with inputs for :func:`agrees`, which compares it with the part that it
shall replace, on the part's own weights, before anything is replaced: the names and numbers that one model's patch was
written with must not change another model silently.
"""

import contextlib
import inspect
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import torch
from torch import Tensor
from torch import nn

from tilegym import ops
from tilegym.errors import UnsupportedError
from tilegym.transformers.forwards import reproducible
from tilegym.transformers.general_rope import rope
from tilegym.transformers.general_rope import rope_sample
from tilegym.transformers.late_logits import LateLogits

_GATED = {"silu": ops.swiglu, "gelu": ops.geglu, "gelu_tanh": ops.geglu}
_GELU = {"gelu": "none", "gelu_tanh": "tanh"}


def _number(of: Any, value: str | float) -> float:
    """A number, or what the module holds under a name."""
    return getattr(of, value) if isinstance(value, str) else value


def rms_norm(
    weight: str,
    eps: str | float,
    offset: float = 0.0,
    casting: str = "llama",
    bias: str = "",
    narrow: bool = False,
    backend: str | None = None,
) -> Callable:
    """Forward of an RMS norm: names of weight and bias ("" for none), eps or its name, the rest as the op has it.

    ``narrow``: for a weight in 16 bits wider hidden states are rounded to its dtype before it multiplies them, as T5's.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        scale, shift = getattr(self, weight) if weight else None, getattr(self, bias) if bias else None
        width, number = hidden_states.shape[-1:], _number(self, eps)
        if scale is None or (scale.ndim == 1 and scale.dtype is hidden_states.dtype):
            return ops.rms_norm(
                hidden_states, width, scale, number, shift, offset=offset, casting=casting, backend=backend
            )
        if narrow and scale.itemsize == 2 and scale.ndim == 1:
            y = ops.rms_norm(hidden_states, width, None, number, backend=backend).to(scale.dtype)
            y = (offset + scale if offset else scale) * y
            return y if shift is None else y + shift
        return _apart(hidden_states, ops.rms_norm, number, scale, shift, offset, casting, backend)

    return forward


def layer_norm(
    weight: str,
    eps: str | float,
    bias: str = "",
    casting: str = "gemma",
    offset: float = 0.0,
    backend: str | None = None,
) -> Callable:
    """Forward of a layer norm over the last dimension: names of its weight and bias ("" for none), eps or its name.

    ``offset`` is added to the weight, in the weight's dtype.
    """

    def normed(x, width, _, number, backend):
        return ops.layer_norm(x, width, None, None, number, backend=backend)

    def forward(self, hidden_states: Tensor) -> Tensor:
        scale, shift = getattr(self, weight) if weight else None, getattr(self, bias) if bias else None
        scale = scale + offset if offset else scale
        width, number = hidden_states.shape[-1:], _number(self, eps)
        together = casting == "gemma" and (scale is None or (scale.ndim == 1 and scale.dtype is hidden_states.dtype))
        if together or scale is None:
            return ops.layer_norm(hidden_states, width, scale, shift, number, backend=backend)
        return _apart(hidden_states, normed, number, scale, shift, 0.0, casting, backend)

    return forward


def _apart(x: Tensor, norm: Callable, eps: float, scale: Tensor, shift: Tensor | None, offset, casting, backend):
    """A norm whose weight the op does not take: of another dtype, or one for each head."""
    if casting == "gemma":
        y = norm(x.float(), x.shape[-1:], None, eps, backend=backend) * (offset + scale.float())
        return (y if shift is None else y + shift.float()).to(x.dtype)
    y = norm(x, x.shape[-1:], None, eps, backend=backend)
    y = (offset + scale if offset else scale) * y
    return y if shift is None else y + shift


def rms_norm_gated(
    weight: str, eps: str | float, activation: str = "silu", norm_before_gate: bool = True, backend: str | None = None
) -> Callable:
    """Forward of an RMS norm with a gate as its second argument."""

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return ops.rms_norm_gated(
            hidden_states, gate, getattr(self, weight), _number(self, eps), norm_before_gate, None, activation,
            backend=backend,
        )  # fmt: skip

    return forward


def _submodule(path: str) -> Callable[[nn.Module], nn.Module]:
    """``operator.attrgetter(path)``, which torch.compile cannot trace."""
    names = path.split(".")

    def submodule(module: nn.Module) -> nn.Module:
        for name in names:
            module = getattr(module, name)
        return module

    return submodule


def gated_mlp(gate: str, up: str, down: str, activation: str, backend: str | None = None) -> Callable:
    """Forward of ``down(act(gate(x)) * up(x))``; the linear layers are called, so that hooks and LoRA keep working."""
    first, second, last = map(_submodule, (gate, up, down))
    op, form = _GATED[activation], () if activation == "silu" else (_GELU[activation],)

    def forward(self, x: Tensor) -> Tensor:
        return last(self)(op(first(self)(x), second(self)(x), *form, backend=backend))

    return forward


def packed_mlp(
    gate_up: str, down: str, activation: str, order: str = "gate, up", backend: str | None = None
) -> Callable:
    """Forward of a gated MLP whose gate and other half come out of one linear layer."""
    both, last = map(_submodule, (gate_up, down))
    op, form = _GATED[activation], () if activation == "silu" else (_GELU[activation],)
    usual = activation == "silu" and order == "gate, up"

    def forward(self, x: Tensor) -> Tensor:
        packed = both(self)(x)
        if usual:
            return last(self)(ops.silu_and_mul(packed, backend=backend))
        a, b = packed.chunk(2, -1)
        return last(self)(op(*((a, b) if order == "gate, up" else (b, a)), *form, backend=backend))

    return forward


def _elementwise(activation: str, backend: str | None) -> Callable[[Tensor], Tensor]:
    if activation == "relu":
        return lambda x: ops.relu(x, backend=backend)
    return lambda x: ops.gelu(x, _GELU[activation], backend=backend)


def mlp(up: str, down: str, activation: str, backend: str | None = None) -> Callable:
    """Forward of ``down(act(up(x)))``."""
    first, last, act = _submodule(up), _submodule(down), _elementwise(activation, backend)

    def forward(self, x: Tensor) -> Tensor:
        return last(self)(act(first(self)(x)))

    return forward


def activation(activation: str, backend: str | None = None) -> Callable:
    """Forward of an activation: "gelu", "gelu_tanh" or "relu"."""
    act = _elementwise(activation, backend)

    def forward(self, x: Tensor) -> Tensor:
        return act(x)

    return forward


def linear(backend: str | None = None) -> Callable:
    """Forward of an ``nn.Linear``."""
    from tilegym.transformers.layers import linear_forward

    return linear_forward(backend)


def experts(
    gate_up: str, down: str, activation: str, gate_up_bias: str = "", down_bias: str = "", interleaved: bool = False,
    transposed: bool = False, limit: float = 0.0, alpha: float = 0.0, backend: str | None = None,
) -> Callable:  # fmt: skip
    """Forward of a bank of experts, called with hidden states [T, H], ids and weights [T, k]."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        biases = {name: getattr(self, path) for name, path in (("b1", gate_up_bias), ("b2", down_bias)) if path}
        options = {"alpha": alpha} if alpha else {}
        return ops.fused_moe(
            hidden_states, getattr(self, gate_up), getattr(self, down), top_k_weights, top_k_index, activation,
            interleaved=interleaved, transposed=transposed, limit=limit or None, backend=backend, **biases, **options,
        )  # fmt: skip

    return forward


def attention(backend: str | None = None) -> Callable:
    """Stands in for ``eager_attention_forward(module, query, key, value, attention_mask, ...)``."""
    from transformers import AttentionInterface

    from tilegym.transformers.attention import NAMES

    return AttentionInterface._global_mapping[NAMES.get(backend, NAMES[None])]


def cross_entropy(shift: bool = True, backend: str | None = None) -> Callable:
    """Stands in for transformers' ``ForCausalLMLoss``; of late logits it needs no more than what they are made of."""

    def loss(logits, labels, vocab_size=None, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs):
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift else labels
        target = shift_labels.reshape(-1)
        options = {"reduction": "mean" if num_items_in_batch is None else "sum", "backend": backend}
        if isinstance(logits, LateLogits) and logits.gives_factors:
            hidden, weight, bias = logits.factors()
            hidden = hidden.reshape(-1, hidden.shape[-1])
            target = target.to(hidden.device)  # where the output layer is: late logits may have been moved
            total = ops.fused_linear_cross_entropy(hidden, weight, target, bias, ignore_index, **options)
            total = total.to(logits.device)
        else:
            target = target.to(logits.device)
            total = ops.cross_entropy(logits.reshape(-1, logits.shape[-1]), target, ignore_index, **options)
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total if num_items_in_batch is None else total / num_items_in_batch

    return loss


# What layers hand on to every function, and these functions do not look at.
_FOR_OTHERS = {"position_embeddings", "position_ids", "cache_position"}


def _same_arguments(op: Callable) -> Callable[..., Callable]:
    known = frozenset(inspect.signature(op).parameters)

    def make(original: str = "", backend: str | None = None) -> Callable:
        """``original``: the qualified name of the function, which gets the calls with arguments that the op has not."""

        def function(*args, **kwargs):
            given = {name: value for name, value in kwargs.items() if name in known}
            # One by one: torch.compile of PyTorch 2.11 knows no difference of keys and a set.
            for name, value in kwargs.items():
                if name not in known and name not in _FOR_OTHERS and not (value is None or isinstance(value, bool)):
                    if not original:
                        raise UnsupportedError(
                            f"{op.__name__} has no argument {name!r}: revert the patch for such calls"
                        )
                    from tilegym.transformers.general import resolve

                    return resolve(original)(*args, **kwargs)
            return op(*args, backend=backend, **given)

        return function

    return make


# Inputs for a part by itself.


def _numbers(*shape: int, like: Tensor) -> Tensor:
    """Numbers between -2 and 2, with rows so small that eps weighs, on the device and in the dtype of ``like``."""
    x = 2 * torch.sin(torch.arange(1.0, torch.Size(shape).numel() + 1, device="cpu", dtype=torch.float32)).view(shape)
    x[-1] *= 1e-3
    return x.to(like.device, like.dtype)


def _norm_sample(count: int) -> Callable:
    def sample(module: nn.Module, options: dict[str, Any], like: Tensor) -> tuple:
        scale = getattr(module, options["weight"]) if options["weight"] else None
        shape = getattr(module, "normalized_shape", (64,)) if scale is None else tuple(scale.shape)
        return tuple(_numbers(3, *shape, like=like) for _ in range(count))

    return sample


def _mlp_sample(module: nn.Module, options: dict[str, Any], like: Tensor) -> tuple:
    first = _submodule(options.get("gate_up") or options["up"])(module)
    width = getattr(first, "in_features", None) or first.weight.shape[0 if hasattr(first, "nf") else 1]
    return (_numbers(3, 1, width, like=like),)


def _experts_sample(module: nn.Module, options: dict[str, Any], like: Tensor) -> tuple:
    bank = getattr(module, options["gate_up"])
    x = _numbers(3, bank.shape[1 if options.get("transposed") else 2], like=like)
    ids = torch.arange(6, device=like.device).view(3, 2) % bank.shape[0]
    return x, ids, _numbers(3, 2, like=like).abs()


def _elements_sample(module: nn.Module, options: dict[str, Any], like: Tensor) -> tuple:
    return (_numbers(3, 32, like=like),)


class Kernel(NamedTuple):
    """What makes the replacement, and ``sample(module, options, like)``: inputs to try it on; None: nothing to try."""

    make: Callable[..., Callable]
    sample: Callable[..., tuple] | None = None


KERNELS = {
    "rms_norm": Kernel(rms_norm, _norm_sample(1)),
    "layer_norm": Kernel(layer_norm, _norm_sample(1)),
    "rms_norm_gated": Kernel(rms_norm_gated, _norm_sample(2)),
    "gated_mlp": Kernel(gated_mlp, _mlp_sample),
    "packed_mlp": Kernel(packed_mlp, _mlp_sample),
    "mlp": Kernel(mlp, _mlp_sample),
    "activation": Kernel(activation, _elements_sample),
    "linear": Kernel(linear),
    "experts": Kernel(experts, _experts_sample),
    "rope": Kernel(rope, rope_sample),
    "attention": Kernel(attention),
    "cross_entropy": Kernel(cross_entropy),
    "chunk_gated_delta_rule": Kernel(_same_arguments(ops.chunk_gated_delta_rule)),
    "recurrent_gated_delta_rule": Kernel(_same_arguments(ops.recurrent_gated_delta_rule)),
    "causal_conv1d_fn": Kernel(_same_arguments(ops.causal_conv1d_fn)),
    "causal_conv1d_update": Kernel(_same_arguments(ops.causal_conv1d_update)),
}


@reproducible
def kernel(name: str, options: tuple[tuple[str, Any], ...], backend: str | None) -> Callable:
    """The replacement called ``name`` with ``options``, on ``backend`` (None: on that of the moment)."""
    return KERNELS[name].make(**dict(options), backend=backend)


def agrees(name: str, options: dict[str, Any], original: Callable, module: nn.Module | None, like: Tensor) -> str:
    """Why the replacement does not give what ``original`` gives, on a few numbers; "" if it does.

    Args:
        original: called with ``module`` first, if there is one.
        like: a tensor of the model's dtype and device.

    With a module also whether both draw as many random numbers in training: dropout that the replacement leaves out
    would be lost.
    """
    sample = KERNELS[name].sample
    if sample is None:
        return ""
    own = () if module is None else (module,)
    try:
        with torch.no_grad(), torch.autocast(like.device.type, enabled=False), _training(module, False):
            given = sample(module, options, like)
            replacement = kernel(name, tuple(options.items()), "pytorch")
            expected, got = (function(*own, *given) for function in (original, replacement))
            drawn = [] if module is None else [_drawn(f, module, given, like) for f in (original, replacement)]
    except Exception as error:  # whatever the part does with what it was not called with before
        return f"it could not be checked to compute {name}: {type(error).__name__}: {str(error).splitlines()[0]}"
    pairs = list(zip(_tensors(got), _tensors(expected), strict=False))
    same = bool(pairs) and len(_tensors(got)) == len(_tensors(expected)) and all(_close(g, e) for g, e in pairs)
    if not same:
        return f"it does not compute {name} with {', '.join(f'{k}={v!r}' for k, v in options.items())}"
    return "" if all(map(torch.equal, drawn[:1], drawn[1:])) else "its dropout in training stands between the parts"


def takes(name: str, options: dict[str, Any], original: Callable, module: nn.Module, like: Tensor) -> bool:
    """Whether ``original`` computes anything of numbers in the dtype of ``like``."""
    try:
        with torch.no_grad(), torch.autocast(like.device.type, enabled=False), _training(module, False):
            original(module, *KERNELS[name].sample(module, options, like))
    except RuntimeError:  # dtypes that differ
        return False
    return True


@contextlib.contextmanager
def _training(module: nn.Module | None, training: bool) -> Iterator[None]:
    """Within the block a module and all in it train, or do not."""
    modes = [] if module is None else [(part, part.training) for part in module.modules()]
    try:
        for part, _ in modes:
            part.training = training
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _drawn(function: Callable, module: nn.Module, given: tuple, like: Tensor) -> Tensor:
    """The state of the random numbers behind a call in training: the more of them it draws, the further on."""
    cuda = like.device.type == "cuda"
    with _training(module, True), torch.random.fork_rng(devices=[like.device] if cuda else ()):
        torch.manual_seed(0)
        function(module, *given)
        return torch.cuda.get_rng_state(like.device) if cuda else torch.get_rng_state()


def _tensors(value: Any) -> list[Tensor]:
    return [v for v in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(v, Tensor)]


def _close(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape or got.dtype is not expected.dtype or not torch.isfinite(expected).all():
        return False
    # fp32: sums in another order; below: one rounding more or less.
    units = 64 if expected.dtype in (torch.float32, torch.float64) else 4
    limit = units * torch.finfo(expected.dtype).eps * expected.abs().amax(-1, keepdim=True).double()
    return bool(((got.double() - expected.double()).abs() <= limit + 1e-30).all())

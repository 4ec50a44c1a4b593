"""Logits that are computed when somebody reads them.

A model that is trained needs a loss, for which all its logits need not exist at a time
(:func:`tilegym.ops.fused_linear_cross_entropy`). Within a forward pass with labels the output layer therefore returns
:class:`LateLogits`: a tensor with the shape, dtype, device and gradient of its logits, from which the loss takes what
they are the product of. Whatever else is done with it is done with the logits themselves, computed then.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only

from tilegym.errors import LateLogitsError
from tilegym.ops.autocast import is_autocast
from tilegym.ops.modules import is_hooked
from tilegym.transformers.forwards import has_its_class_forward
from tilegym.transformers.forwards import is_bound
from tilegym.transformers.forwards import only_moves_inputs
from tilegym.transformers.forwards import place_of_forward

_aten = torch.ops.aten
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class _Steps:
    """How often optimizers have stepped: those that are fused do not count in the versions of parameters."""

    taken = 0


@register_optimizer_step_post_hook
def _count_step(*_) -> None:
    _Steps.taken += 1


class _Product:
    """``hidden @ weight.T + bias`` in ``dtype``: what logits are computed from, with the graph behind it, if they are
    ``attached`` to that."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.given, self.dtype = (hidden, weight, bias), dtype
        self.attached = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in self.given)
        self.returned = False  # by the forward pass that they are the logits of, with its loss
        self._bare = hidden.detach()  # below autograd, where logits are detached, it would have versions of its own
        self.states, self._steps = self._states(), _Steps.taken
        self._is_trained = weight.requires_grad

    def detached(self) -> "_Product":
        """The same without the graph, and without holding the activations that are saved there."""
        product = copy.copy(self)
        product.given, product.attached = (self._bare, *self.given[1:]), False
        return product

    def _states(self) -> list[int]:
        """What differs once one of them holds other numbers, as far as versions tell."""
        states = []
        for t in self.given:
            if t is not None:
                states += t.data_ptr(), 0 if t.is_inference() else t._version
        return states

    def _may_have_been_stepped(self) -> bool:
        return self._steps != _Steps.taken and (self._is_trained or self.given[1].requires_grad)

    def factors(self, in_backward: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states, weight and bias in the dtype of the product, as autocast would have them.

        ``in_backward``: what versions tell is enough, as for all that autograd saves.

        Raises:
            LateLogitsError: they do not hold any more what they held.
        """
        if self._states() != self.states or (not in_backward and self._may_have_been_stepped()):
            raise LateLogitsError(
                "these logits were not computed in the forward pass, which needed the loss alone, and cannot be any "
                "more: the output layer's weight, or the hidden states, have changed since, as by an optimizer's step. "
                "Read outputs.logits before that, or patch the model with loss=False"
            )
        given = self.given if self.attached else (t if t is None else t.detach() for t in self.given)
        return tuple(t if t is None or t.dtype is self.dtype else t.to(self.dtype) for t in given)


class _Late(torch.autograd.Function):
    """The linear layer, to autograd: its forward pass computes nothing."""

    @staticmethod
    def forward(ctx, product, hidden, weight, bias):
        ctx.product = product
        return LateLogits(product)

    @staticmethod
    def backward(ctx, grad):
        with torch.autocast(grad.device.type, enabled=False):
            hidden, weight, _ = ctx.product.factors(in_backward=True)
            rows, needed = grad.reshape(-1, grad.shape[-1]), ctx.needs_input_grad[1:]
            computed = (
                lambda: grad @ weight,
                lambda: rows.t() @ hidden.reshape(-1, hidden.shape[-1]),
                lambda: rows.sum(0),
            )
            grads = (
                f().to(t.dtype) if n else None for f, t, n in zip(computed, ctx.product.given, needed, strict=True)
            )
            return None, *grads


class LateLogits(Tensor):
    """The logits [..., V] of a :class:`_Product`, and of ``steps`` behind it (casts to fp32, constant factors, moves to
    another GPU)."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, product: _Product, steps: tuple = (), box: list | None = None) -> "LateLogits":
        hidden, weight, _ = product.given
        made = {"dtype": product.dtype, "device": hidden.device}
        for _, _, options in steps:
            made |= {name: value for name, value in options.items() if name in made}
        return Tensor._make_wrapper_subclass(cls, (*hidden.shape[:-1], len(weight)), storage_size=0, **made)

    def __init__(self, product: _Product, steps: tuple = (), box: list | None = None) -> None:
        self._product, self._steps = product, steps
        self._box = [] if box is None else box  # the logits once they are there; shared by what shares memory

    @property
    def is_whole(self) -> bool:
        return bool(self._box)

    def whole(self) -> Tensor:
        """The logits themselves, without their graph; computed by the first call."""
        if not self._box:
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
                logits = nn.functional.linear(*self._product.factors())
                self._box.append(self._behind(logits, _aten._to_copy.default, *_FACTORS))
        return self._box[0]

    @property
    def gives_factors(self) -> bool:
        """Whether a loss may be one of :meth:`factors`: not where a gradient is to come to these logits themselves."""
        product = self._product
        return not self._box and product.attached == self.requires_grad and not (product.attached and product.returned)

    def set_returned(self) -> None:
        """The forward pass has ended: who computes another loss does so from logits, and may want their gradient."""
        self._product.returned = True

    def factors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states, weight and bias with which a linear layer gives these logits, with their graph."""
        hidden, weight, bias = self._product.factors()
        return self._behind(hidden, *_FACTORS), weight, None if bias is None else self._behind(bias, *_FACTORS)

    def _behind(self, x: Tensor, *functions: Callable) -> Tensor:
        for function, arguments, options in self._steps:
            if function in functions:
                x = function(x, *arguments, **options)
        return x

    def _late(self, function: Callable, arguments: tuple, options: dict[str, Any]) -> "LateLogits | None":
        """What the function gives if that can be late, too."""
        if self._box:
            return None
        if function is _aten.detach.default:
            return LateLogits(self._product.detached(), self._steps, self._box)
        product = self._product if torch.is_grad_enabled() else self._product.detached()
        if function is _aten.clone.default:  # as DistributedDataParallel does
            return LateLogits(product, self._steps)
        copied = function is _aten._to_copy.default
        to_fp32 = copied and options == {"dtype": torch.float32}
        device, same = options.get("device"), {"dtype": self.dtype, "layout": self.layout}
        kept = {name: value for name, value in options.items() if name not in ("device", "non_blocking")}
        moved = copied and device is not None and device.type == self.device.type and kept.items() <= same.items()
        scaled = function in _FACTORS and type(arguments[0]) in (int, float) and not options
        if to_fp32 or moved or scaled:
            return LateLogits(product, (*self._steps, (function, arguments, options)))
        return None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(args[0] if args else None, cls):
            late = args[0]._late(function, args[1:], kwargs)
            if late is not None:
                return late
        known: list[LateLogits] = []

        def whole(t: LateLogits) -> Tensor:
            known.append(t)
            return t.whole()

        args, kwargs = tree_map_only(cls, whole, (args, kwargs))
        out = function(*args, **kwargs)
        # What writes into its argument returns that.
        return next((t for t in known if t.whole() is out), out)

    def retain_grad(self) -> None:
        """Raises an error: no gradient comes here from the loss, which is not computed from logits."""
        raise LateLogitsError(
            "the loss was not computed from these logits, and gives them no gradient: patch the model with loss=False"
        )

    def __reduce_ex__(self, protocol):
        return self.whole().detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return super().__deepcopy__(memo) if self.requires_grad else copy.deepcopy(self.whole(), memo)

    def __repr__(self, **options):
        return repr(self.whole())

    # What reads memory without a function of PyTorch's in between.
    def numpy(self, *, force: bool = False):
        return self._memory(force).numpy(force=force)

    def tolist(self):
        return self.whole().tolist()

    def __array__(self, *args, **kwargs):
        return self._memory().__array__(*args, **kwargs)

    def __dlpack__(self, *args, **kwargs):
        return self._memory().__dlpack__(*args, **kwargs)

    @property
    def __cuda_array_interface__(self):
        return self._memory().__cuda_array_interface__

    def data_ptr(self) -> int:
        return self.whole().data_ptr()

    def untyped_storage(self):
        return self.whole().untyped_storage()

    def _memory(self, force: bool = False) -> Tensor:
        """The logits, which say that they need a gradient where these do, and PyTorch's error then."""
        return self.whole().detach().requires_grad_(self.requires_grad and not force)


_FACTORS = (_aten.div.Tensor, _aten.mul.Tensor)


def late_linear(head: nn.Linear, hidden: Tensor) -> Tensor:
    """The output of ``head``, late if what it is given is as usual."""
    weight, bias, kind = head.weight, head.bias, hidden.device.type
    if kind == "meta" or torch._C._are_functorch_transforms_active():
        return head(hidden)
    if "_hf_hook" in vars(head):
        hidden = hidden.to(weight.device)
    casts = is_autocast(hidden)
    dtype = torch.get_autocast_dtype(kind) if casts else hidden.dtype
    usual = dtype in DTYPES and hidden.dim() > 1
    for t in (hidden, weight) if bias is None else (hidden, weight, bias):
        usual = usual and type(t) in (Tensor, nn.Parameter) and t.device == hidden.device
        usual = usual and t.dtype in (DTYPES if casts else (dtype,))
    if not usual:
        return head(hidden)
    return _Late.apply(_Product(hidden, weight, bias, dtype), hidden, weight, bias)


def is_plain(head: nn.Module | None) -> bool:
    """Whether it is a linear layer and nothing but that: no adapter, quantisation, hook, or forward of others. A hook
    of accelerate's may take hidden states to it."""
    if type(head) is not nn.Linear or not only_moves_inputs(head):
        return False
    own = vars(head).get(place_of_forward(head))
    ours = is_bound(own) and getattr(own.__func__, "is_linear", False)
    return (has_its_class_forward(head) or ours) and not is_hooked(head)


def twin_of(module: nn.Module, **own: Any) -> nn.Module:
    """Another module object with everything that ``module`` has, but for its ``own``."""
    twin = object.__new__(type(module))  # FSDP2 gives classes a __new__ that makes another model
    twin.__dict__ = {**vars(module), **own}
    return twin

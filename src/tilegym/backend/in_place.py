"""Gradients that are written over the activations that they belong to, so that a training step takes less memory."""

import operator
import sys

import torch
from torch.multiprocessing import reductions
from torch.utils._python_dispatch import _disable_current_modes

# Where hooks save tensors autograd cannot tell who else needs them: then these may share memory with no others.
# UNSEEN: only over what the graph alone holds.
ALWAYS, ALONE, UNSEEN = 1, 2, 3
_mode: bool | None = None  # of this process: what is recomputed in a backward pass runs in autograd's own threads


class set_gradients_in_place:
    """Whether ops of the ``cutile`` backend write gradients over their inputs. For the process.

    Called it stays; in a ``with`` statement it holds for the block, as :class:`torch.set_grad_enabled` does. What holds
    when a forward pass runs decides for its backward pass too:

    - ``swiglu``, ``geglu``, ``silu_and_mul``, ``rms_norm``, ``layer_norm``, ``fused_add_rms_norm`` and
      ``cross_entropy`` write the gradients of activations over these in the backward pass (``fused_add_rms_norm``: over
      the sum that it returned);
    - ``apply_rope_base`` rotates q and k in the forward pass where they are.

    The activations have then changed for everybody who holds them. Tensors are left alone that autograd did not compute
    (parameters and other leaves, views of them), that share memory or have gaps in it, that another operation saved
    and needs still, or of which the graph may be needed once more (``retain_graph=True``); where hooks save tensors, as
    in non-reentrant checkpointing, also q and k, and all that other tensors share memory with; and everything in code
    that torch.compile compiles, which plans memory itself. Autograd raises its error where an operation saved q or k
    before they are rotated, and where one saved its own result (``torch.exp``, the sum of ``fused_add_rms_norm``) that
    another op has written over.

    Unless set, ``swiglu``, ``geglu`` and ``silu_and_mul`` write over activations that nothing but the graph holds: no
    variable, hook or view that could tell. Only what looks at them without holding them does: another stream that is
    still reading (``record_stream``), and a hook of the op's own node in the graph.

    Args:
        mode: whether to write in place; None: where nothing can tell, as unless set.

    Raises:
        TypeError: it is none of these.
    """

    def __init__(self, mode: bool | None) -> None:
        global _mode
        if mode is not None and not isinstance(mode, bool):
            raise TypeError(f"set_gradients_in_place: mode must be True, False or None, it is {mode!r}")
        self._before = _mode
        _mode = mode

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_) -> None:
        global _mode
        _mode = self._before


def wanted(unless_set: int = 0) -> int:
    """How the forward pass that now runs shall have its gradients written in place: 0 (not), ALWAYS, ALONE or UNSEEN.

    Args:
        unless_set: what holds where the user has not said anything, 0 or UNSEEN.
    """
    if torch.compiler.is_compiling():
        return 0
    if _mode:
        return ALONE if hooks_save() else ALWAYS
    return unless_set if _mode is None else 0


def hooks_save() -> bool:
    """Whether hooks save what the forward pass that now runs keeps, as in non-reentrant checkpointing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def may_run_again() -> bool:
    """Whether the graph that now runs backward may do so again, and what it saved has to stay as it is."""
    return torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()


def are_activations(*tensors: torch.Tensor) -> bool:
    """Whether all are results of autograd's, with memory of their own, none of it for two of their elements."""
    if len({t.untyped_storage().data_ptr() for t in tensors}) < len(tensors):
        return False
    for t in tensors:
        base = t if t._base is None else t._base
        if t.grad_fn is None or base.grad_fn is None or torch._debug_has_internal_overlap(t) != 0:
            return False
    return all(map(_has_memory_of_pytorch, tensors))


def _has_memory_of_pytorch(t: torch.Tensor) -> bool:
    """Whether no array, file, or other process may share the memory, of which PyTorch counts no references."""
    storage = t.untyped_storage()
    if not storage.resizable():
        return False
    if not t.is_cuda:
        return not storage.is_shared()
    return not any(sent.cdata == storage._cdata for sent in list(reductions.shared_cache.values()))


def may_overwrite(how: int, *saved: torch.Tensor) -> bool:
    """Whether the backward pass that now runs may write over what its forward pass saved, row by row.

    Args:
        how: what :func:`wanted` returned in the forward pass.
    """
    if not how or may_run_again() or not are_activations(*saved):
        return False
    # Of others, and of more dimensions, kernels would get copies. Who has not asked gets gradients laid out as ever.
    if not all(t.is_contiguous() or (t.dim() == 2 and how != UNSEEN) for t in saved):
        return False
    if how != ALWAYS and not all(map(_is_alone, saved)):
        return False
    return how == ALONE or all(map(_saved_once, saved))


def unpack(ctx: torch.autograd.function.FunctionCtx) -> tuple[tuple[torch.Tensor, ...], bool]:
    """What the Function of ``ctx`` saved, and by its ``in_place`` :func:`may_overwrite` of all of it.

    It asks for what is saved itself: another reference to it would be taken for somebody else's, and non-reentrant
    checkpointing gives it out once.
    """
    saved = ctx.saved_tensors
    if ctx.in_place == UNSEEN and any(map(operator.gt, _references(saved), _REFERENCES_OF_SAVED)):
        return saved, False
    return saved, may_overwrite(ctx.in_place, *saved)


def _references(tensors: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """The most references that Python has to one of ``tensors``, and to one of their storages."""
    storages = [sys.getrefcount(t.untyped_storage()) for t in tensors]
    return max(sys.getrefcount(tensors[i]) for i in range(len(tensors))), max(storages)


def _references_to_what_only_torch_holds() -> tuple[int, int]:
    # Modes may keep what is made.
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        holder = torch.zeros((), device="cpu")
        holder.grad = torch.zeros((), device="cpu")
        return _references((holder.grad,))


_REFERENCES_OF_SAVED = _references_to_what_only_torch_holds()


def _saved_once(t: torch.Tensor) -> bool:
    """Whether no other operation has saved it, or a view of it, and needs it still; but for one whose result it is."""
    return t._use_count() <= 2  # by this operation, which may hold a copy, and by Python


def _is_alone(t: torch.Tensor) -> bool:
    storage = t.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) == 2  # the tensor and ``storage``


def overwritten(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors with what a kernel has written over them, as new ones; autograd is told that the old have changed."""
    torch.autograd.graph.increment_version(tensors)
    return tuple(t.detach() for t in tensors)

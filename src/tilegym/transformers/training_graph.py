"""Training steps whose forward and backward pass through a model's layers are replayed as CUDA graphs.

The host takes longer to launch a small model's training step than the GPU to run it. The second call in a row of one
form (shapes, dtypes, options) is captured: the model's forward pass, without its head and loss, as one graph, the
backward pass as another. From then on such calls are replayed, within an ``autograd.Function`` whose inputs are the
parameters, so that gradients are accumulated, and hooks on parameters run, as ever.

What could differ from a run of the model's code runs it, and a warning says why, once. A captured pair is compared with
the model's code before it is used: results, and gradients of all parameters.
"""

import contextlib
import functools
import inspect
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any
from typing import NamedTuple

import numpy
import torch
from torch import Tensor
from torch import nn
from torch.autograd import forward_ad

from tilegym.backend import in_place
from tilegym.backend.wrapped import is_wrapped
from tilegym.backend.wrapped import unreadable
from tilegym.errors import PatchError
from tilegym.errors import UnsupportedError
from tilegym.transformers.attention import NAMES
from tilegym.transformers.attention import full_masks
from tilegym.transformers.family import model_in
from tilegym.transformers.first_call import unchanged
from tilegym.transformers.forwards import function_of_forward
from tilegym.transformers.forwards import is_made_by
from tilegym.transformers.forwards import place_of_forward
from tilegym.transformers.forwards import reproducible
from tilegym.transformers.graph_calls import Form
from tilegym.transformers.graph_calls import Unsuitable
from tilegym.transformers.graph_calls import form_of
from tilegym.transformers.graph_calls import leaves_of
from tilegym.transformers.graph_calls import mapped
from tilegym.transformers.graph_calls import may_replay
from tilegym.transformers.graph_calls import with_mask
from tilegym.transformers.graph_capture import BY_LENGTH
from tilegym.transformers.graph_capture import Fingerprint
from tilegym.transformers.graph_capture import capture_in_turn
from tilegym.transformers.graph_capture import is_hooked
from tilegym.transformers.graph_capture import rotates_by_length
from tilegym.transformers.graph_capture import warn
from tilegym.transformers.patching import ALREADY_PATCHED
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet

COMPUTE = "training_graph"
MOST_STEPS = 2  # forms of one model, each with memory for all gradients; calls of further ones run its code
MOST_DIFFERENCE = 0.1  # of all gradients together, from run to run
_AGAIN = "give the model's forward pass anew, or undo graph_training"


class _Turn:
    """A forward pass: alive for as long as its backward pass may come."""

    over = False


class _Step:
    """One captured form of a call: its forward and its backward pass."""

    def __init__(self, inputs: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        self.inputs = {
            n: torch.empty_like(v).requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v
            for n, v in inputs.items()
        }
        self.wanted = [v for v in self.inputs.values() if isinstance(v, Tensor) and v.requires_grad] + parameters
        self.upstream: list[Tensor] = []  # of the results that have gradients
        self.forward: torch.cuda.CUDAGraph | None = None
        self.backward: torch.cuda.CUDAGraph | None = None
        self.results: Any = None
        self.with_gradient: list[bool] = []  # of the leaves of results
        self.gradients: tuple[Tensor | None, ...] = ()  # of wanted

    @torch.no_grad()
    def fill(self, inputs: dict[str, Any]) -> None:
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                self.inputs[name].copy_(value)

    def run(self, model: nn.Module, forward: Callable, device: torch.device) -> Any:
        """The model's code on the step's inputs."""
        cast = _autocast_dtype(device)
        # Weights are cast anew: what autocast has kept of them is of this step.
        kind = torch.autocast(device.type, cast, cache_enabled=False) if cast else contextlib.nullcontext()
        with kind:
            return forward(model, **self.inputs)

    def run_backward(self, results: Any) -> tuple[Tensor | None, ...]:
        ends = [t for t in leaves_of(results) if t.requires_grad]
        with torch.autocast(ends[0].device.type, enabled=False):  # outside of which autograd runs it
            return torch.autograd.grad(ends, self.wanted, self.upstream, allow_unused=True)


class _Steps:
    """What is kept for one model: its steps by form of call.

    Steps share their memory: while one waits for its backward pass, no other may be replayed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.fingerprint = Fingerprint(model)
        self.forms: dict[Form, _Step] = {}
        self.latest: Form | None = None  # of the call before
        self.pool: Any = None
        self.turn: Callable[[], _Turn | None] = lambda: None
        self.failed = False

    def waits(self) -> bool:
        turn = self.turn()
        return turn is not None and not turn.over


_kept: "weakref.WeakKeyDictionary[nn.Module, _Steps]" = weakref.WeakKeyDictionary()
_locks: "weakref.WeakKeyDictionary[nn.Module, Any]" = weakref.WeakKeyDictionary()
_told: "weakref.WeakKeyDictionary[nn.Module, set[str]]" = weakref.WeakKeyDictionary()


def graph_training(model: nn.Module) -> PatchSet:
    """Lets training steps of ``model`` be replayed as CUDA graphs; patch it before (``tilegym.apply``).

    From the second call in a row of one shape on, in training mode, with gradients and without a cache, the forward
    pass through the layers and its backward pass are one launch each for the host. Steps keep their activations'
    memory, and as much more as the gradients take. Other calls run the model's code. See docs/training.md.

    Args:
        model: a model of transformers, with a head or without, or one of peft's around it; on a GPU when it runs.

    Returns:
        The report; ``revert()`` on it, or using it as a context manager, undoes it and frees the memory.

    Raises:
        PatchError: it is no model of transformers, or one whose passes no graph can hold.
    """
    whole = model_in(model)
    body = getattr(whole, "base_model", None)
    if not isinstance(body, nn.Module) or not hasattr(body, "config"):
        raise PatchError(f"graph_training takes a model of transformers, this is a {type(whole).__name__}")
    patches = PatchSet(whole, maker=__name__)
    path = next((name for name, module in whole.named_modules() if module is body and name), type(body).__name__)
    with patches.all_or_nothing():
        _put(patches, body, Entry(path, COMPUTE))
        patches.require_match(type(whole).__name__)
    return patches


def _put(patches: PatchSet, body: nn.Module, where: Entry) -> None:
    current = vars(body).get(place_of_forward(body))
    forward = function_of_forward(body)
    if is_made_by(replaying, current):
        patches.skip(where, ALREADY_PATCHED)
    elif (
        "attention_mask" in inspect.signature(forward).parameters
        and body.config._attn_implementation not in NAMES.values()
    ):
        patches.skip(where, "its attention is not TileGym's: patch it first, with tilegym.apply(model)")
    elif rotates_by_length(body):
        patches.skip(where, BY_LENGTH)
    elif patches.replace_forward(body, replaying(forward), where):
        patches.on_revert(functools.partial(forget, body))


@reproducible
def replaying(forward: Callable) -> Callable:
    """``forward``, as a function of the module and its arguments, that replays training steps where it can."""
    known = inspect.signature(forward).parameters
    names = [p.name for p in known.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    may_cache = "use_cache" in known

    @functools.wraps(forward)
    def replayed_forward(self, *args, **kwargs):
        trains = not torch.compiler.is_compiling() and self.training and torch.is_grad_enabled()
        if not trains or len(args) > len(names) or getattr(self, "_is_replica", False):
            return forward(self, *args, **kwargs)
        if unreadable((*args, *kwargs.values())) is not None or forward_ad._current_level >= 0:
            return forward(self, *args, **kwargs)
        named = dict(zip(names, args, strict=False))
        if named.keys() & kwargs.keys():
            return forward(self, *args, **kwargs)  # says what is wrong
        return _forward(self, forward, named | kwargs, may_cache)

    return replayed_forward


def forget(model: nn.Module) -> None:
    """Frees what was kept for ``model``."""
    _kept.pop(model, None)
    _told.pop(model, None)


def _forward(model: nn.Module, forward: Callable, inputs: dict[str, Any], may_cache: bool) -> Any:
    first = next((v for v in inputs.values() if isinstance(v, Tensor)), None)
    if first is None or not may_replay(first, inputs):
        return forward(model, **inputs)
    why = _misfit(model, inputs, may_cache)
    if why:
        _tell(model, why)
        return forward(model, **inputs)
    with _locks.setdefault(model, threading.RLock()):
        kept = _kept.get(model)
        if kept is None or not kept.fingerprint.holds(model):
            kept = None  # drops its memory first
            _kept.pop(model, None)
            _kept[model] = kept = _Steps(model)
        parameters = [p for p in model.parameters() if p.requires_grad]
        form = _form(model, inputs, first.device, parameters)
        # Twice in a row: batches of varying lengths are alike by chance.
        known, kept.latest = form == kept.latest, form
        room = len(kept.forms) < MOST_STEPS and not kept.failed and not kept.waits()
        if known and room and form not in kept.forms:
            _capture(model, forward, inputs, kept, form, parameters)
        step = kept.forms.get(form)
        if step is None:
            return forward(model, **inputs)
        if kept.waits():
            _tell(model, "an earlier forward pass still waits for its backward pass")
            return forward(model, **inputs)
        return _replay(step, kept, inputs, parameters)


def _misfit(model: nn.Module, inputs: dict[str, Any], may_cache: bool) -> str:
    """Why a call in training is not one to replay, if that is worth telling."""
    use_cache = inputs.get("use_cache")
    if may_cache and (getattr(model.config, "use_cache", False) if use_cache is None else use_cache):
        return "it keeps a cache: give use_cache=False, or set model.config.use_cache = False"
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return "it checkpoints activations"
    if in_place.hooks_save():
        return "hooks save what its backward pass needs"
    processes = torch.distributed.is_available() and torch.distributed.is_initialized()
    if processes and torch.distributed.get_world_size() > 1:
        return "several processes train it"
    return ""


def _tell(model: nn.Module, why: str) -> None:
    told = _told.setdefault(model, set())
    if why and why not in told:
        told.add(why)
        warn(model, "trains", Unsuitable(why))


def _form(model: nn.Module, inputs: dict[str, Any], device: torch.device, parameters: list[nn.Parameter]) -> Form:
    form = form_of(model, inputs, device)
    cast = _autocast_dtype(device)
    gradients = tuple(n for n, v in inputs.items() if isinstance(v, Tensor) and v.requires_grad)
    return form._replace(switches=(*form.switches, cast, in_place.wanted(), gradients, tuple(map(id, parameters))))


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _has_hooks(model: nn.Module) -> bool:
    return is_hooked(model) or any(m._backward_hooks or m._backward_pre_hooks for m in model.modules())


def _capture(
    model: nn.Module, forward: Callable, inputs: dict[str, Any], kept: _Steps, form: Form, parameters: list
) -> None:
    """Keeps the graphs of such a step, or notes that there can be none."""
    device = next(v.device for v in inputs.values() if isinstance(v, Tensor))
    try:
        if _has_hooks(model):
            raise Unsuitable("there are hooks on its modules")
        if any(p.device != device or is_wrapped(p) for p in model.parameters()):
            raise Unsuitable("its weights are spread over devices or processes")
        given = with_mask(forward, inputs)
        step = _Step(given, parameters)
        step.fill(given)
        run = [lambda _: step.run(model, forward, device), step.run_backward]
        with full_masks(form.full), torch.autograd.set_multithreading_enabled(False), unchanged(model, device):
            expected = _run(step, run, device)
            usual = _differences(_run(step, run, device), expected)
            if usual.whole > MOST_DIFFERENCE:
                raise Unsuitable(f"its gradients differ by {usual.whole:.1%} from run to run")
            others = _run(step, run, device, seed=1)
            if _differences(others, expected).are_like(usual):
                others = None  # no dropout, whose numbers are to be others in each replay
            kept.pool = torch.cuda.graph_pool_handle() if kept.pool is None else kept.pool
            (step.forward, made), (step.backward, step.gradients) = capture_in_turn(run, device, kept.pool)
            step.with_gradient = [t.requires_grad for t in leaves_of(made)]
            step.results = mapped(made, Tensor.detach)
            del made
            _check(step, device, 0, expected, usual)
            if others is not None:
                _check(step, device, 1, others, usual)
    except Exception as error:  # whatever a model does that a graph cannot hold
        warn(model, "trains", error)
        kept.failed = True
        kept.forms.clear()
    else:
        kept.forms[form] = step


def _seed(device: torch.device, seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def _host_numbers(device: torch.device) -> tuple:
    """The states of the generators that no graph knows of."""
    _, keys, position, *rest = numpy.random.get_state()
    of_torch = () if device.type == "cpu" else (torch.default_generator.get_state().numpy().tobytes(),)
    return random.getstate(), keys.tobytes(), position, *rest, *of_torch


def _check(step: _Step, device: torch.device, seed: int, expected: list, usual: "_Differences") -> None:
    """Raises Unsuitable unless replays give what the model's code has given with the random numbers of ``seed``."""
    _seed(device, seed)
    step.forward.replay()
    step.backward.replay()
    found = _differences([*leaves_of(step.results), *step.gradients], expected)
    if not found.are_like(usual):
        raise Unsuitable(f"its gradients differ by {found.whole:.1%} from those of the model's code")


def _run(step: _Step, run: list[Callable], device: torch.device, seed: int = 0) -> list[Tensor | None]:
    """The results of the model's own code, and its gradients, with the random numbers of ``seed``."""
    _seed(device, seed)
    before = _host_numbers(device)
    results = run[0](None)
    if _host_numbers(device) != before:
        raise Unsuitable("it draws random numbers on the host, which would be the same in every replay")
    leaves = leaves_of(results)
    ends = [t for t in leaves if t.requires_grad]
    if not ends:
        raise Unsuitable("none of its results has a gradient")
    step.upstream = step.upstream or [_numbers_like(t) for t in ends]
    return [*(t.detach().clone() for t in leaves), *run[1](results)]


def _numbers_like(t: Tensor) -> Tensor:
    """Numbers between -1 and 1 of which no two neighbours are alike, for gradients of which none cancels out."""
    numbers = torch.sin(torch.arange(t.numel(), device=t.device, dtype=torch.float32) * 1.7)
    return numbers.view(t.shape).to(t.dtype)


class _Differences(NamedTuple):
    """Between results and gradients of two runs, each root mean squares."""

    of_each: Tensor  # [N]
    sizes: Tensor  # [N]

    @property
    def whole(self) -> float:
        """Relative to their size, all together."""
        return (self.of_each.norm() / self.sizes.norm()).item() if self.of_each.any() else 0.0

    def are_like(self, usual: "_Differences") -> bool:
        """Whether they are what runs differ by, or less than rounding; what is near 0 itself, as the gradients of
        keys' biases are, is rounding."""
        allowed = torch.maximum(2e-2 * self.sizes, 3 * usual.of_each) + 1e-3 * self.sizes.mean()
        return bool((self.of_each <= allowed).all()) and self.whole <= MOST_DIFFERENCE


def _differences(some: list[Tensor | None], others: list[Tensor | None]) -> _Differences:
    if [a is None for a in some] != [b is None for b in others]:
        raise Unsuitable("not the same of its inputs and weights have gradients in each run")
    pairs = [(a, b) for a, b in zip(some, others, strict=True) if a is not None and a.numel()]
    of_each = torch.stack([_size(a.float() - b) for a, b in pairs])
    return _Differences(of_each, torch.stack([_size(b.float()) for _, b in pairs]))


def _size(t: Tensor) -> Tensor:
    return t.square().mean().sqrt()


def _replay(step: _Step, kept: _Steps, inputs: dict[str, Any], parameters: list[nn.Parameter]) -> Any:
    turn = _Turn()
    kept.turn = weakref.ref(turn)
    given = [v for v in inputs.values() if isinstance(v, Tensor) and v.requires_grad]
    made = _Replay.apply(step, turn, inputs, *given, *parameters)
    by_leaf = dict(zip(map(id, leaves_of(step.results)), made, strict=True))
    return mapped(step.results, lambda t: by_leaf[id(t)])


class _Replay(torch.autograd.Function):
    """A step: from its inputs and the parameters to the leaves of its results."""

    @staticmethod
    def forward(ctx, step, turn, inputs, *wanted):
        ctx.step, ctx.turn = step, turn
        ctx.save_for_backward(*wanted)  # so that it is noticed if one has changed when the backward pass comes
        step.fill(inputs)
        step.forward.replay()
        copies = tuple(t.clone() for t in leaves_of(step.results))
        ctx.mark_non_differentiable(*(c for c, has in zip(copies, step.with_gradient, strict=True) if not has))
        return copies

    @staticmethod
    def backward(ctx, *upstream):
        if torch.is_grad_enabled():
            raise UnsupportedError("a replayed training step has no second derivatives: undo graph_training for it")
        if ctx.turn.over:
            raise UnsupportedError(f"a replayed training step runs backward once: {_AGAIN}")
        _ = ctx.saved_tensors
        ctx.turn.over = True
        step = ctx.step
        wanted = [t for t, has in zip(upstream, step.with_gradient, strict=True) if has]
        for held, gradient in zip(step.upstream, wanted, strict=True):
            held.zero_() if gradient is None else held.copy_(gradient)
        step.backward.replay()
        # In few launches; autograd keeps what nobody else holds as it is.
        copies = iter(torch._foreach_mul([t for t in step.gradients if t is not None], 1.0))
        return None, None, None, *(None if t is None else next(copies) for t in step.gradients)

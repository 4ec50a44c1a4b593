"""``fused_moe`` in plain PyTorch: expert after expert, with the casts of Hugging Face's experts.

In fp32 on a GPU, all of them in one call of PyTorch's. While a CUDA graph is captured, pair after pair of token and
expert, without a look at the choice on the host.
"""

import torch
import torch.nn.functional as F

from tilegym.backend import register_impl
from tilegym.backend.wrapped import is_wrapped
from tilegym.ops.pytorch.checks import can_be_read
from tilegym.ops.pytorch.checks import check_floating

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "gpt_oss")


def check_fused_moe(
    hidden: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    w1_up: torch.Tensor | None,
    b1: torch.Tensor | None,
    b2: torch.Tensor | None,
    interleaved: bool,
    transposed: bool,
    shared_output: torch.Tensor | None,
) -> bool:
    """Whether the experts have a gate. Raises ValueError or TypeError for arguments that no backend accepts."""
    if hidden.dim() != 2 or w1.dim() != 3 or w2.dim() != 3 or topk_ids.dim() != 2:
        raise ValueError(
            "fused_moe: expected hidden_states [T, H], w1 and w2 with three dimensions and topk_ids [T, k], got "
            f"{tuple(hidden.shape)}, {tuple(w1.shape)}, {tuple(w2.shape)}, {tuple(topk_ids.shape)}"
        )
    check_floating("fused_moe", hidden_states=hidden)
    (tokens, width), experts, inner = hidden.shape, w2.shape[0], w2.shape[1 if transposed else 2]
    wide = w1.shape[2 if transposed else 1]
    if experts == 0:
        raise ValueError(f"fused_moe: w2 {tuple(w2.shape)} has no experts")
    if w1.shape[0] != experts:
        raise ValueError(f"fused_moe: w1 has {w1.shape[0]} experts, w2 has {experts}")
    gated = w1_up is not None or wide == 2 * inner
    if wide not in (inner, 2 * inner) or (w1_up is not None and (wide != inner or w1_up.shape != w1.shape)):
        raise ValueError(
            f"fused_moe: w1 {tuple(w1.shape)} does not fit w2 {tuple(w2.shape)} (transposed={transposed}, "
            f"w1_up {'none' if w1_up is None else tuple(w1_up.shape)})"
        )
    if (
        w1.shape != ((experts, width, wide) if transposed else (experts, wide, width))
        or w2.shape[2 if transposed else 1] != width
    ):
        raise ValueError(
            f"fused_moe: w1 {tuple(w1.shape)} and w2 {tuple(w2.shape)} do not fit hidden_states {tuple(hidden.shape)} "
            f"(transposed={transposed})"
        )
    if topk_ids.shape[0] != tokens or topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"fused_moe: topk_weights {tuple(topk_weights.shape)} and topk_ids {tuple(topk_ids.shape)} must be "
            f"[{tokens}, k]"
        )
    if activation not in ACTIVATIONS or (activation == "gpt_oss" and not gated):
        raise ValueError(
            f"fused_moe: activation must be one of {', '.join(ACTIVATIONS)} ('gpt_oss' with a gate), "
            f"it is {activation!r}"
        )
    if (interleaved and (w1_up is not None or not gated)) or (b1 is not None and w1_up is not None):
        raise ValueError("fused_moe: w1_up goes neither with interleaved nor with b1, and interleaved needs a gate")
    for name, bias, size in (("b1", b1, (experts, wide)), ("b2", b2, (experts, width))):
        if bias is not None and bias.shape != size:
            raise ValueError(f"fused_moe: {name} must be {list(size)}, it is {tuple(bias.shape)}")
    if shared_output is not None and shared_output.shape != hidden.shape:
        raise ValueError(f"fused_moe: shared_output must be {tuple(hidden.shape)}, it is {tuple(shared_output.shape)}")
    for name, t in (("w1", w1), ("w2", w2), ("w1_up", w1_up), ("b1", b1), ("b2", b2), ("shared_output", shared_output)):
        if t is not None and t.dtype != hidden.dtype:
            raise TypeError(f"fused_moe: {name} is {t.dtype}, hidden_states are {hidden.dtype}; they must be the same")
    if topk_ids.dtype not in (torch.int32, torch.int64) or not topk_weights.is_floating_point():
        raise TypeError(f"fused_moe: topk_ids are {topk_ids.dtype}, topk_weights {topk_weights.dtype}; "
                        "they must be int32 or int64, and floating point")  # fmt: skip
    return gated


def activate(gate: torch.Tensor, up: torch.Tensor | None, activation: str, alpha: float, limit: float | None):
    """act(gate) * up, or act(gate) where there is no up."""
    if limit is not None:
        gate = gate.clamp(max=limit)
        up = None if up is None else up.clamp(min=-limit, max=limit)
    if activation == "gpt_oss":
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))
    if activation == "silu":
        value = F.silu(gate)
    elif activation == "relu":
        value = F.relu(gate)
    elif activation == "relu2":
        value = F.relu(gate).square()
    else:
        value = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return value if up is None else value * up


@register_impl("fused_moe", "pytorch")
def fused_moe(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
    w1_up: torch.Tensor | None = None,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    interleaved: bool = False,
    transposed: bool = False,
    alpha: float = 1.702,
    limit: float | None = None,
    shared_output: torch.Tensor | None = None,
) -> torch.Tensor:
    gated = check_fused_moe(
        hidden_states, w1, w2, topk_weights, topk_ids, activation, w1_up, b1, b2, interleaved, transposed, shared_output
    )

    if not can_be_read(topk_ids):
        return _of_gathered(
            hidden_states, w1, w2, topk_weights, topk_ids, activation, w1_up, b1, b2, interleaved, transposed, alpha,
            limit, shared_output, gated,
        )  # fmt: skip

    if _are_groups(hidden_states, w1, w2, w1_up, topk_weights, b1, b2):
        return _of_groups(
            hidden_states, w1, w2, topk_weights, topk_ids, activation, w1_up, b1, b2, interleaved, transposed, alpha,
            limit, shared_output, gated,
        )  # fmt: skip

    def projected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, expert: int) -> torch.Tensor:
        w, b = weight[expert], None if bias is None else bias[expert]
        if not transposed:
            return F.linear(x, w, b)
        return x @ w if b is None else x @ w + b

    out, weights = torch.zeros_like(hidden_states), topk_weights.reshape(-1, 1)
    order, bounds = _by_expert(topk_ids, len(w2))
    experts = range(len(w2))
    if not torch.compiler.is_compiling():  # what is compiled has the same loop for all choices
        # One expert at least, so that the result depends on the weights for autograd also where there is no token.
        experts = [e for e in experts if bounds[e] < bounds[e + 1]] or [0]
    for expert in experts:
        pairs = order[bounds[expert] : bounds[expert + 1]]
        token = pairs // topk_ids.shape[1]
        x = hidden_states[token]
        gate = projected(x, w1, b1, expert)
        gate, up = _halves(gate, None if w1_up is None else projected(x, w1_up, None, expert), interleaved, gated)
        y = projected(activate(gate, up, activation, alpha, limit), w2, b2, expert)
        out = out.index_add(0, token, (y * weights[pairs]).to(out.dtype))
    return out if shared_output is None else out + shared_output


def _by_expert(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, list[int]]:
    """The (token, expert) pairs sorted by expert, and where each expert's begin and end among them."""
    _, order, bounds = _ranked(ids, experts)
    return order, bounds.tolist()


def _ranked(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The experts in order, ``experts`` for those left out, the pairs that chose them, and their bounds, tensors."""
    ids = torch.where((ids < 0) | (ids >= experts), experts, ids).reshape(-1)
    ranked, order = torch.sort(ids, stable=True)
    return ranked, order, torch.searchsorted(ranked, torch.arange(experts + 1, device=ids.device, dtype=ids.dtype))


def _halves(
    gate: torch.Tensor, up: torch.Tensor | None, interleaved: bool, gated: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gate and up, of which the first product may hold both."""
    if up is not None or not gated:
        return gate, up
    return (gate[..., ::2], gate[..., 1::2]) if interleaved else gate.chunk(2, dim=-1)


def _are_groups(hidden: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether ``grouped_mm`` multiplies these. In 16 bits it sums in another order than Hugging Face's experts."""
    given = [t for t in (hidden, w1, w2, *others) if t is not None]
    if torch.compiler.is_compiling() or not (hidden.is_cuda and hidden.dtype == torch.float32):
        return False
    if torch._C._are_functorch_transforms_active() or any(map(is_wrapped, given)):
        return False
    whole = all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in given if t.dim() == 3)
    aligned = all(size % 4 == 0 for t in (w1, w2) for size in t.shape[1:])
    return whole and aligned and all(t.numel() for t in given) and hasattr(F, "grouped_mm")


def _of_groups(hidden, w1, w2, weights, ids, activation, w1_up, b1, b2, interleaved, transposed, alpha, limit,
               shared, gated):  # fmt: skip
    """The same with the tokens of all experts in a row; the host waits for their numbers within ``grouped_mm``."""
    (tokens, top_k), experts = ids.shape, len(w2)
    ranked, order, bounds = _ranked(ids, experts)
    ends, left_out, expert = bounds[1:].to(torch.int32), (ranked >= experts)[:, None], ranked.clamp(max=experts - 1)
    given = (hidden, w1, w2, weights, w1_up, b1, b2)
    training = torch.is_grad_enabled() and any(t.requires_grad for t in given if t is not None)

    def projected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = F.grouped_mm(kept(x), weight if transposed else weight.mT, offs=ends)
        return kept(y) if bias is None else kept(y) + bias[expert]

    def kept(t: torch.Tensor) -> torch.Tensor:
        """Without what nobody writes behind the last expert's pairs, in ``t`` or in its gradient."""
        return t.masked_fill(left_out, 0) if training else t

    if training:  # from copies of the pairs' own, so that gradients of a token meet in one order
        x = hidden[:, None].expand(-1, top_k, -1).reshape(tokens * top_k, -1).index_select(0, order)
    else:
        x = hidden[order // top_k]
    gate, up = _halves(projected(x, w1, b1), None if w1_up is None else projected(x, w1_up, None), interleaved, gated)
    y = projected(activate(gate, up, activation, alpha, limit), w2, b2)
    y = y * kept(weights.reshape(-1, 1).index_select(0, order))
    y = y.masked_fill(left_out, 0).to(hidden.dtype)
    out = torch.empty_like(y).index_copy_(0, order, y).view(tokens, top_k, -1).sum(1)
    return out if shared is None else out + shared


def _of_gathered(hidden, w1, w2, weights, ids, activation, w1_up, b1, b2, interleaved, transposed, alpha, limit,
                 shared, gated):  # fmt: skip
    """The same where the host cannot know who chose which expert: each pair has a copy of its expert's matrices.

    Meant for the few tokens of a decoding step. Rounds and adds up as the loop over the experts does.
    """
    (tokens, top_k), experts = ids.shape, len(w2)
    ids, order = ids.sort(dim=1)
    valid = ((ids >= 0) & (ids < experts))[..., None]
    weights = weights.gather(1, order)[..., None].masked_fill(~valid, 0)
    pairs = ids.clamp(0, experts - 1).reshape(-1)

    def projected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        w, b = weight[pairs], None if bias is None else bias[pairs][:, None]
        if transposed or b is None:
            y = torch.bmm(x, w if transposed else w.mT)
            return y if b is None else y + b
        return torch.baddbmm(b, x, w.mT)

    x = hidden[:, None].expand(-1, top_k, -1).reshape(tokens * top_k, 1, hidden.shape[1])
    gate, up = _halves(projected(x, w1, b1), None if w1_up is None else projected(x, w1_up, None), interleaved, gated)
    y = projected(activate(gate, up, activation, alpha, limit), w2, b2).view(tokens, top_k, hidden.shape[1])
    y = (y.masked_fill(~valid, 0) * weights).to(hidden.dtype)
    out = torch.zeros_like(hidden)
    for slot in range(top_k):
        out = out + y[:, slot]
    return out if shared is None else out + shared

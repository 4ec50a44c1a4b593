"""The gated delta rule in PyTorch, with the steps and the fp32 of the Hugging Face models; fp64 is computed in fp64."""

import torch
import torch.nn.functional as F

from tilegym.backend import register_impl

NORM_EPS = 1e-6


def check_delta_rule(
    op: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> None:
    """Raises ValueError or TypeError for arguments that no backend accepts."""
    of_key, of_value = key.shape, value.shape
    if len(of_key) != 4 or query.shape != of_key:
        raise ValueError(
            f"{op}: query and key must be [B, T, Hk, Dk], they are {tuple(query.shape)} and {tuple(of_key)}"
        )
    batch, tokens, key_heads, key_dim = of_key
    if len(of_value) != 4 or of_value[0] != batch or of_value[1] != tokens:
        raise ValueError(f"{op}: value must be [{batch}, {tokens}, Hv, Dv], it is {tuple(of_value)}")
    heads = of_value[2]
    if key_heads < 1 or heads % key_heads:
        raise ValueError(f"{op}: value has {heads} heads, a multiple of the {key_heads} heads of key is needed")
    if not (query.is_floating_point() and key.is_floating_point() and value.is_floating_point()):
        raise TypeError(f"{op}: query, key and value must be floating point, not {query.dtype}, {value.dtype}")
    if g.shape != of_value[:3] or beta.shape != of_value[:3]:
        raise ValueError(
            f"{op}: g and beta must be {tuple(of_value[:3])}, they are {tuple(g.shape)} and {tuple(beta.shape)}"
        )
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            raise ValueError(f"{op}: cu_seqlens must be [N + 1], it is {tuple(cu_seqlens.shape)}")
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{op}: cu_seqlens must be int32 or int64, it is {cu_seqlens.dtype}")
        if batch != 1:
            raise ValueError(f"{op}: with cu_seqlens the batch must be 1, it is {batch}")
        batch = cu_seqlens.shape[0] - 1
    if initial_state is not None and initial_state.shape != (batch, heads, key_dim, of_value[3]):
        raise ValueError(
            f"{op}: initial_state must be {(batch, heads, key_dim, of_value[3])}, it is {tuple(initial_state.shape)}"
        )


def _prepared(query, key, value, g, beta, initial_state, normalize):
    """All in fp32 as [B, Hv, T, ...], query and key normalised and repeated for the value heads, query not scaled."""
    compute = torch.float64 if value.dtype == torch.float64 else torch.float32
    heads, key_heads = value.shape[2], key.shape[2]
    if heads != key_heads:
        query, key = (x.repeat_interleave(heads // key_heads, dim=2) for x in (query, key))
    query, key, value, g, beta = (
        x.transpose(1, 2).to(compute, memory_format=torch.contiguous_format) for x in (query, key, value, g, beta)
    )
    if normalize:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS) for x in (query, key))
    if initial_state is None:
        state = value.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1])
    else:
        state = initial_state.to(value)
    return query, key, value, g, beta, state


def _recurrent(query, key, value, g, beta, initial_state, normalize):
    dtype = query.dtype
    query, key, value, g, beta, state = _prepared(query, key, value, g, beta, initial_state, normalize)
    query = query / query.shape[-1] ** 0.5
    out = []
    for t in range(key.shape[2]):
        k = key[:, :, t, :, None]  # [B, Hv, Dk, 1]
        state = state * g[:, :, t].exp()[..., None, None]
        held = (state * k).sum(-2)
        correction = (value[:, :, t] - held) * beta[:, :, t, None]
        state = state + k * correction.unsqueeze(-2)
        out.append((state * query[:, :, t, :, None]).sum(-2))
    if out:
        out = torch.stack(out, dim=1)  # [B, T, Hv, Dv]
    else:  # nothing, in which all take part for the sake of their gradients
        out = (value * ((query * key).sum(-1) * g * beta).unsqueeze(-1)).transpose(1, 2)
        state = state.clone()  # which may be initial_state itself
    return out.to(dtype), state


def _chunked(query, key, value, g, beta, initial_state, normalize, chunk):
    dtype, tokens = query.dtype, query.shape[1]
    if tokens == 0:
        return _recurrent(query, key, value, g, beta, initial_state, normalize)
    query, key, value, g, beta, state = _prepared(query, key, value, g, beta, initial_state, normalize)
    query = query * max(1, query.shape[-1]) ** -0.5
    padding = -tokens % chunk
    query, key, value = (F.pad(x, (0, 0, 0, padding)) for x in (query, key, value))
    beta, g = (F.pad(x, (0, padding)) for x in (beta, g))
    beta = beta.unsqueeze(-1)
    query, key, k_beta, v_beta = (
        x.unflatten(2, (-1, chunk)) for x in (query, key, key * beta, value * beta)
    )  # [B, Hv, chunks, chunk, D]
    g = g.unflatten(2, (-1, chunk))
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    # The sum from each token on by itself: in differences of sums a large decay costs small ones their digits, and an
    # infinite one all of them. Masked before exp.
    between = g.unsqueeze(-1).expand(*g.shape, chunk).tril(-1).cumsum(-2).masked_fill(later, float("-inf")).exp()
    decay = g.cumsum(-1).exp().unsqueeze(-1)  # since the start of the chunk
    system = (k_beta @ key.mT) * between
    scores = (query @ key.mT) * between
    corrections = torch.linalg.solve_triangular(system, v_beta, upper=False, unitriangular=True)
    reads = torch.linalg.solve_triangular(system, k_beta * decay, upper=False, unitriangular=True)
    query = query * decay
    key = key * between[..., -1, :].unsqueeze(-1)
    whole = decay[..., -1:, :]
    out = []
    for i in range(corrections.shape[2]):
        new = corrections[:, :, i] - reads[:, :, i] @ state
        out.append(query[:, :, i] @ state + scores[:, :, i] @ new)
        state = state * whole[:, :, i] + key[:, :, i].mT @ new
    out = torch.cat(out, dim=2)[:, :, :tokens]
    return out.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format), state


def _packed(op, function, tensors, initial_state, cu_seqlens, *options):
    """``function`` for each of the sequences that are packed in a batch of one; zeros behind the last."""
    ends, tokens = cu_seqlens.tolist(), tensors[0].shape[1]
    if ends[0] != 0 or ends[-1] > tokens or any(start > end for start, end in zip(ends, ends[1:], strict=False)):
        raise ValueError(
            f"{op}: cu_seqlens must start at 0, never fall, and end at {tokens} at most, the number of tokens; "
            f"it goes from {ends[0]} to {ends[-1]}"
        )
    outs, states = [], []
    for n, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        state = None if initial_state is None else initial_state[n : n + 1]
        out, state = function(*(x[:, start:end] for x in tensors), state, *options)
        outs.append(out)
        states.append(state)
    out = torch.cat(outs, dim=1)
    if ends[-1] < tokens:
        out = F.pad(out, (0, 0, 0, 0, 0, tokens - ends[-1]))
    return out, torch.cat(states)


@register_impl("recurrent_gated_delta_rule", "pytorch")
def recurrent_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    op, tensors = "recurrent_gated_delta_rule", (query, key, value, g, beta)
    check_delta_rule(op, *tensors, initial_state, cu_seqlens)
    if cu_seqlens is None:
        out, state = _recurrent(*tensors, initial_state, use_qk_l2norm_in_kernel)
    else:
        out, state = _packed(op, _recurrent, tensors, initial_state, cu_seqlens, use_qk_l2norm_in_kernel)
    return out, (state if output_final_state else None)


@register_impl("chunk_gated_delta_rule", "pytorch")
def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    op, tensors = "chunk_gated_delta_rule", (query, key, value, g, beta)
    check_delta_rule(op, *tensors, initial_state, cu_seqlens)
    check_chunk(chunk_size)
    if cu_seqlens is None:
        out, state = _chunked(*tensors, initial_state, use_qk_l2norm_in_kernel, chunk_size)
    else:
        out, state = _packed(op, _chunked, tensors, initial_state, cu_seqlens, use_qk_l2norm_in_kernel, chunk_size)
    return out, (state if output_final_state else None)


def check_chunk(chunk_size: int) -> None:
    """Raises ValueError for a size that no chunk has."""
    if chunk_size < 1:
        raise ValueError(f"chunk_gated_delta_rule: chunk_size is {chunk_size}, it must be at least 1")

"""Candidate formulas of what mixes tokens: rotations, attention, convolutions, linear attention, the loss."""

from tilegym.integrate.formulas import Formula
from tilegym.integrate.formulas import activation

ROTATIONS = {
    # How pairs are taken from the rotated part of x, and how they are put back.
    "half": ("x1, x2 = x[..., :{h}], x[..., {h}:{r}]", "torch.cat((y1, y2, x[..., {r}:]), -1)"),
    "interleaved": (
        "x1, x2 = x[..., :{r}:2], x[..., 1:{r}:2]",
        "torch.cat((torch.stack((y1, y2), -1).flatten(-2), x[..., {r}:]), -1)",
    ),
    # The last numbers of x are rotated, not the first.
    "interleaved_tail": (
        "x1, x2 = x[..., -{r}::2], x[..., -{r} + 1 :: 2]",
        "torch.cat((x[..., :-{r}], torch.stack((y1, y2), -1).flatten(-2)), -1)",
    ),
    "half_tail": (
        "x1, x2 = x[..., -{r} : -{h}], x[..., -{h}:]",
        "torch.cat((x[..., :-{r}], y1, y2), -1)",
    ),
    # The other way round: by the negative angle.
    "half_reversed": ("x2, x1 = x[..., :{h}], x[..., {h}:{r}]", "torch.cat((y2, y1, x[..., {r}:]), -1)"),
    "interleaved_to_half": ("x1, x2 = x[..., :{r}:2], x[..., 1:{r}:2]", "torch.cat((y1, y2, x[..., {r}:]), -1)"),
}
# Which of the given angles belong to the pairs.
ANGLES = {"half": "", "full": "[..., :{h}]", "repeated": "[..., ::2]"}


def rope(
    style: str,
    angles: str,
    rotated: int,
    heads_dim: int | None,
    casting: str,
    names: tuple[str, ...],
    shared: str = "B",
) -> Formula:
    """A rotary position embedding of one or several tensors.

    Args:
        style: a key of ``ROTATIONS``.
        angles: how cos and sin hold an angle for each pair: a key of ``ANGLES``, or "complex": one tensor of
            complex numbers in their place.
        rotated: how many of the last dimension's numbers are rotated, the first ones.
        heads_dim: where the heads' dimension is put into the angles; None: they have it already.
        casting: "input": computed in the dtype of x and of the angles; "float32": in fp32 and rounded once.
        names: of the tensors that are rotated.
        shared: the name of the angles' first axis: "B", or "ONE" where it is 1.
    """
    half = rotated // 2
    lines = []
    given = ("freqs",) if angles == "complex" else ("cos", "sin")
    if angles == "complex":
        lines.append("cos, sin = freqs.real, freqs.imag")
    elif ANGLES[angles]:
        cut = ANGLES[angles].format(h=half)
        lines.append(f"cos, sin = cos{cut}, sin{cut}")
    if heads_dim is not None:
        lines.append(f"cos, sin = cos.unsqueeze({heads_dim}), sin.unsqueeze({heads_dim})")
    if casting == "float32":
        lines.append("cos, sin = cos.float(), sin.float()")
    take, give = (text.format(h=half, r=rotated) for text in ROTATIONS[style])
    lines += ["", "def rotate(x):", f"    {take}"]
    if casting == "float32":
        lines.append("    x1, x2 = x1.float(), x2.float()")
    lines += ["    y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin"]
    lines += [f"    return {give}.to(x.dtype)", "", f"return {', '.join(f'rotate({name})' for name in names)}"]
    tokens = ("B", "S", "{H}", "D") if heads_dim == 2 else ("B", "{H}", "S", "D")
    inputs: dict[str, tuple[str, ...] | None] = {
        name: tuple(axis.format(H=f"H{name}") for axis in tokens) for name in names
    }
    width = "C" if heads_dim is not None else "D"
    inputs |= {name: (shared, "S", width) if heads_dim is not None else tokens for name in given}
    constraints = ()
    if angles == "full":  # transformers makes both halves equal
        constraints = tuple(f"{name}[..., {half} : {rotated}] == {name}[..., :{half}]" for name in given)
    outputs = {f"{name}_rotated": inputs[name] for name in names}
    return Formula("rope", inputs, outputs, "\n".join(lines), constraints=constraints)


def attention(
    scaling: float, causal: bool, window: int | None, chunk: int | None, softcap: float | None, sinks: bool, mask: bool
) -> Formula:
    """Attention of q [B, Hq, Sq, D] over k and v [B, Hkv, Skv, D], as [B, Sq, Hq, Dv]; the last query at the last key.

    Args:
        window: how many keys a query sees, its own included.
        chunk: keys in the query's own chunk of this many alone.
        mask: an additive mask is an input, in the place of causal, window and chunk.
    """
    inputs: dict[str, tuple[str, ...] | None] = {
        "q": ("B", "Hq", "Sq", "D"),
        "k": ("B", "Hkv", "Skv", "D"),
        "v": ("B", "Hkv", "Skv", "Dv"),
    }
    if sinks:
        inputs["sinks"] = ("Hq",)
    if mask:
        inputs["mask"] = ("Bm", "Hm", "Sq", "Skv")
    lines = [
        "groups = q.shape[1] // k.shape[1]",
        "k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)",
        f"s = q @ k.transpose(-1, -2) * {scaling!r}",
    ]
    if softcap:
        lines.append(f"s = torch.tanh(s / {softcap!r}) * {softcap!r}")
    if mask:
        lines.append("s = s + mask")
    elif causal:
        lines += ["key = torch.arange(k.shape[2], device=q.device)", "query = key[-q.shape[2] :, None]"]
        visible = "(key <= query)"
        if window:
            visible += f" & (query - key < {window})"
        if chunk:
            visible += f" & (query // {chunk} == key // {chunk})"
        lines.append(f"s = s.masked_fill(~({visible}), torch.finfo(s.dtype).min)")
    if sinks:
        lines.append("s = torch.cat((s, sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)), -1)")
    lines.append("p = torch.softmax(s.float(), -1).to(q.dtype)")
    lines.append(f"return ({'p[..., :-1]' if sinks else 'p'} @ v).transpose(1, 2)")
    constraints = ("Hq % Hkv == 0",)
    return Formula("gqa", inputs, {"o": ("B", "Sq", "Hq", "Dv")}, "\n".join(lines), constraints=constraints)


def causal_conv1d(form: str, act: str, bias: bool) -> Formula:
    """A depthwise causal convolution of x [B, C, S] with weight [C, K].

    Args:
        form: "full": zeros before the first token; "update": ``state`` [B, C, L] holds the tokens before.
    """
    inputs: dict[str, tuple[str, ...] | None] = {"x": ("B", "C", "S"), "weight": ("C", "K")}
    if form == "update":
        inputs["state"] = ("B", "C", "L")
    if bias:
        inputs["bias"] = ("C",)
    before = "state.to(x.dtype)" if form == "update" else "x.new_zeros(*x.shape[:2], weight.shape[1] - 1)"
    lines = [
        f"y = torch.cat(({before}, x), -1).to(weight.dtype)",
        f"y = F.conv1d(y, weight.unsqueeze(1), {'bias' if bias else None}, groups=x.shape[1])[..., -x.shape[2] :]",
        f"return ({activation(act, 'y')}).to(x.dtype)",
    ]
    return Formula("conv1d", inputs, {"y": ("B", "C", "S")}, "\n".join(lines))


def gated_delta_rule(l2norm: bool, per_channel: bool, state: bool) -> Formula:
    """Linear attention by the gated delta rule, token by token, in fp32 (Yang et al. 2024, arXiv:2412.06464).

    Args:
        l2norm: q and k are normalised first.
        per_channel: g has a decay for each dimension of the keys.
        state: the state before the first token is an input.
    """
    inputs: dict[str, tuple[str, ...] | None] = {
        "q": ("B", "S", "Hk", "Dk"),
        "k": ("B", "S", "Hk", "Dk"),
        "v": ("B", "S", "Hv", "Dv"),
        "g": ("B", "S", "Hv", "Dk") if per_channel else ("B", "S", "Hv"),
        "beta": ("B", "S", "Hv"),
    }
    if state:
        inputs["state"] = ("B", "Hv", "Dk", "Dv")
    lines = ["dtype, groups = q.dtype, v.shape[2] // q.shape[2]"]
    lines.append("q, k, v, g, beta = (t.transpose(1, 2).float() for t in (q, k, v, g, beta))")
    if l2norm:
        lines.append("q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))")
    lines += [
        "q, k = ((t).repeat_interleave(groups, 1) for t in (q * q.shape[-1] ** -0.5, k))",
        "s = state.float()" if state else "s = q.new_zeros(*v.shape[:2], q.shape[-1], v.shape[-1])",
        "o = []",
        "for t in range(q.shape[2]):",
        f"    s = s * g[:, :, t].exp(){'[..., None]' if per_channel else '[..., None, None]'}",
        "    delta = (v[:, :, t] - (s * k[:, :, t, :, None]).sum(-2)) * beta[:, :, t, None]",
        "    s = s + k[:, :, t, :, None] * delta[..., None, :]",
        "    o.append((s * q[:, :, t, :, None]).sum(-2))",
        "return torch.stack(o, 1).to(dtype)",
    ]
    return Formula("gdn", inputs, {"o": ("B", "S", "Hv", "Dv")}, "\n".join(lines), constraints=("Hv % Hk == 0",))


def loss(shift: bool, ignore_index: int, softcap: float | None, scale: float, weight: bool, bias: bool) -> Formula:
    """Mean cross entropy of logits [B, S, V], or, with ``weight``, of ``x @ weight.T + bias``, in fp32.

    Args:
        shift: the target of a token is the next one's.
        softcap, scale: logits become ``softcap * tanh(scale * logits / softcap)``.
    """
    inputs: dict[str, tuple[str, ...] | None] = {"x": ("B", "S", "H" if weight else "V")}
    lines = []
    if weight:
        inputs["weight"] = ("V", "H")
        if bias:
            inputs["bias"] = ("V",)
        lines.append(f"x = F.linear(x, weight{', bias' if bias else ''})")
    if scale != 1.0:
        lines.append(f"x = x * {scale!r}")
    if softcap:
        lines.append(f"x = torch.tanh(x / {softcap!r}) * {softcap!r}")
    inputs["target"] = ("B", "S")
    if shift:
        lines.append("x, target = x[:, :-1], target[:, 1:]")
    lines.append(f"return F.cross_entropy(x.flatten(0, 1).float(), target.flatten(), ignore_index={ignore_index})")
    dtypes = {"target": "int64", "loss": "float32"}
    return Formula("cross_entropy", inputs, {"loss": ()}, "\n".join(lines), dtypes)

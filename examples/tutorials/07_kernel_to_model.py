"""Tutorial 7: from a kernel to a model that runs on it: dispatch, patch, verify, measure.

Run it with ``python examples/tutorials/07_kernel_to_model.py``, with or without a GPU.
"""

import copy
import warnings

import cuda.tile as ct
import lesson
import torch
from torch import nn
from transformers import LlamaConfig
from transformers import LlamaForCausalLM

from tilegym import kernel
from tilegym.backend import dispatch
from tilegym.backend import register_impl
from tilegym.backend import slower
from tilegym.backend import use_backend
from tilegym.backend.cutile.launch import launch
from tilegym.errors import UnsupportedError
from tilegym.transformers import monkey_patch


# 1. An op is declared once: signature, defaults, contract. It has no body; implementations register for it.
@dispatch("relu_squared")
def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """``max(x, 0)^2``, the activation of Primer (arXiv:2109.08668); any shape, in the dtype of x."""


# 2. The reference: plain PyTorch. What the kernel is held against, and what serves the calls that it cannot.
@register_impl("relu_squared", "pytorch")
def relu_squared_pytorch(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).square()


# 3. The kernel, and the function that launches it.
@ct.kernel
def relu_squared_kernel(x, out, TILE: ct.Constant[int]):
    tile = ct.load(x, (ct.bid(0),), (TILE,), padding_mode=ct.PaddingMode.ZERO)
    positive = ct.maximum(tile, 0, propagate_nan=True)  # as torch does; by default the hardware prefers the number
    ct.store(out, (ct.bid(0),), positive * positive)


@register_impl("relu_squared", "cutile")
def relu_squared_cutile(x: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        # Refuse before doing anything, and the reference serves the call: slower, never wrong.
        raise UnsupportedError("it has no backward kernel")
    flat = x.contiguous().view(-1)
    out = torch.empty_like(flat)
    launch(x, (ct.cdiv(flat.numel(), 1024),), relu_squared_kernel, (flat, out, 1024))
    return out.view(x.shape)


# 4. A layer whose forward calls the op. It runs on the layer that it replaces and needs no constructor or state.
class ReLUSquaredKernel(nn.Module):
    def forward(self, x):
        return relu_squared(x)


class Activation(nn.Module):
    """Somebody's model code, which knows nothing of us."""

    def forward(self, x):
        return torch.relu(x) ** 2


def make_llama(hidden: int, layers: int, heads: int) -> LlamaForCausalLM:
    """A Llama with random weights, large enough that its attention is not flat: a wrong mask would show."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    attention = {"num_attention_heads": heads, "num_key_value_heads": 2}
    tokens = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = LlamaConfig(**sizes, **attention, **tokens, initializer_range=1.6 * hidden**-0.5)
    return LlamaForCausalLM(config).to(lesson.DEVICE).eval()


def dispatching() -> None:
    lesson.step(
        "Dispatch",
        """
        One name, several implementations. The call's backend= is the strongest word, then use_backend, set_backend
        and TILEGYM_BACKEND; without any it is cutile on a GPU that cuTile supports, else pytorch. On a CPU cutile is
        the same kernel in the interpreter: too slow to be a default, right for a test.
        """,
    )
    x = lesson.randn(3, 1000)
    exact = torch.relu(x.double()).square()
    lesson.check("backend='cutile'", relu_squared(x, backend="cutile"), relu_squared(x, backend="pytorch"), exact)
    with use_backend("cutile"), lesson.counted_calls() as counts:
        relu_squared(x)
    print(f"      calls: {dict(counts)}")
    lesson.explain("What the kernel does not support goes to PyTorch, and a warning says so, once:")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        relu_squared(leaf := x.clone().requires_grad_(), backend="cutile").sum().backward()
    print(f"      {caught[0].category.__name__}: {caught[0].message}")
    lesson.check("the gradient", leaf.grad, 2 * torch.relu(x), 2 * torch.relu(x.double()))


def any_model() -> None:
    lesson.step(
        "Patch any model",
        """
        The kernel registry binds a kernel's name to a class of layers. verify=True runs the model once and compares
        each kernel with the layer it replaces, on the very inputs that the layer got.
        """,
    )
    kernel.register_layer_kernel("ReLUSquared", layer_class=ReLUSquaredKernel, device=None)
    kernel.register_external_layer(Activation, "ReLUSquared")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96), Activation(), nn.Linear(96, 48)).to(lesson.DEVICE)
    x = lesson.randn(5, 48)
    with torch.no_grad(), use_backend("cutile"), lesson.counted_calls() as counts:
        before, exact = model(x), copy.deepcopy(model).double()(x.double())
        kernel.kernelize_model(model, mode="inference", verify=True, sample_inputs=x)
        counts.clear()
        after = model(x)
    print(kernel.report(model))
    assert counts == {("relu_squared", "cutile"): 1}, counts
    lesson.check("the model's output", after, before, exact)


def a_language_model() -> None:
    lesson.step(
        "Patch a language model",
        """
        For families that it knows, monkey_patch.apply replaces norms, rotations, MLPs and attention at once: it gives
        the modules of this one model other forwards, leaves weights and classes alone, and can undo it. A patch whose
        target changed in transformers is skipped and reported, not guessed.
        """,
    )
    model = make_llama(64, 2, heads=4)
    ids = torch.randint(2, 128, (2, 11), generator=torch.Generator().manual_seed(0)).to(lesson.DEVICE)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        logits, tokens = model(ids).logits, model.generate(ids, **options)
        exact = copy.deepcopy(model).double()(ids).logits
        patches = monkey_patch.apply(model, use_cutile=True, use_attn=True)
        print(patches)
        with slower.ignored(), lesson.counted_calls() as counts:
            patched_logits = model(ids).logits
            patched_tokens = model.generate(ids, **options)

    lesson.step(
        "Is it still the same model?",
        """
        Every patched call ran on cuTile kernels (a count that stays empty is how a patch fails in silence). That is
        because of slower.ignored(): else calls that were measured to be faster in PyTorch go there, as products in
        fp32 on an H200 do. The logits are as near to the fp64 model's as before, and greedy decoding gives the same
        tokens.
        """,
    )
    for (op, backend), count in sorted(counts.items()):
        print(f"      {op:16} on {backend}: {count} calls")
    assert {op for op, backend in counts if backend == "cutile"} >= {"rms_norm", "swiglu", "apply_rope_base", "fmha"}
    assert all(backend == "cutile" for _, backend in counts), counts
    lesson.check("logits", patched_logits, logits, exact)
    assert torch.equal(tokens, patched_tokens)
    print(f"ok    tokens: {patched_tokens[0, 11:].tolist()} and {patched_tokens[1, 11:].tolist()}, with and without")
    patches.revert()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)
    print("ok    revert(): bit for bit the model it was")


def measuring() -> None:
    lesson.step(
        "Measure the model, not the kernel",
        """
        A kernel that is twice as fast in a tenth of the time makes a model 5% faster. So: the whole model, prefill of
        2048 tokens, patched and not, in turns. `tilegym infer --use_tilegym --use_cutile --use_attn --compare
        --report_kernel_coverage` does this for real models, with generation, and a check of every logit.
        """,
    )
    hidden, layers, heads, tokens = (2048, 8, 16, 2048) if lesson.ON_GPU else (64, 1, 4, 8)
    model = make_llama(hidden, layers, heads).to(torch.bfloat16)
    patched = copy.deepcopy(model)
    monkey_patch.apply(patched, use_cutile=True, use_attn=True)
    ids = torch.randint(2, 128, (1, tokens)).to(lesson.DEVICE)
    with torch.no_grad():
        lesson.measure("tokens/s", tokens, unpatched=lambda: model(ids), patched=lambda: patched(ids))


def main() -> None:
    lesson.title("From kernel to model: dispatch, patch, verify, measure")
    dispatching()
    any_model()
    a_language_model()
    measuring()
    lesson.end(
        """
        docs/how-to-add-an-op.md, docs/how-to-add-a-model.md and docs/kernel-registry.md are the way from here to your
        own kernels, models and layers.
        """
    )


if __name__ == "__main__":
    main()

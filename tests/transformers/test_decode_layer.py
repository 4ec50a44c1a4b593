"""A layer's fused decoding step, within generate; on a CPU each step is run anew."""

import contextlib
import copy

import pytest
import torch
from common import HAS_GPU
from common import some
from test_decode_graph import generate
from test_decode_graph import logits_of_steps
from test_decode_graph import one_by_one
from tiny_models import backends
from tiny_models import make_model
from tiny_models import observed
from tiny_models import padded
from tiny_models import tokens

from tilegym import interpreter
from tilegym.backend.cutile import compile_ahead
from tilegym.transformers import decode_graph
from tilegym.transformers import decode_layer
from tilegym.transformers import decode_trial
from tilegym.transformers import monkey_patch

NORMS_BEHIND = ("gemma3", "glm4", "olmo2", "olmo3")  # attention and MLP


@contextlib.contextmanager
def decode_graph_off(model):
    """``generate`` as transformers has it."""
    patched = vars(model).pop("generate")
    try:
        yield
    finally:
        model.generate = patched


@pytest.fixture(autouse=True)
def on_every_device():
    with decode_graph.eager_steps("cpu"):
        yield


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"sliding_window": None}),
        ("mixtral", {"sliding_window": None}),
        ("gpt_oss", {}),
        ("phi3", {}),
        ("phi3", {"sliding_window": None}),
        ("gemma3", {}),
        ("olmo2", {}),
        ("olmo3", {}),
        ("glm4", {}),
        ("granite", {}),
    ],
    ids=str,
)
@backends
def test_one_sequence_decodes_by_fused_steps(family, options, backend):
    """As the layers do, padded or not; and what the fused step does not serve, the layers do."""
    model = make_model(family, **options)
    experts = not hasattr(model.model.layers[0].mlp, "down_proj")
    ids, mask = padded([5, 11, 8], "left")
    expected = one_by_one(model, ids, mask, max_new_tokens=14)
    with monkey_patch.apply(model, use_cutile=backend == "cutile") as report:
        assert len([e for e in report.patched if e.compute == "decode_step"]) == 2
        with observed() as calls:
            got = one_by_one(model, ids, mask, max_new_tokens=14)
        assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
        attends = {"rope_and_cache", "fmha_decode", "rope_fmha_decode"}  # the one launch knows nothing of padding
        rest = {"fused_moe"} if experts else {"rms_norm_swiglu"}
        behind = {"linear", "rms_norm_add"} if family in NORMS_BEHIND else {"linear_add"}
        assert {"rms_norm_linear", *attends, *behind, *rest} <= {op for op, _ in calls}
        first = model.model.layers[0]
        hooked = first.self_attn.o_proj if experts else first.mlp.down_proj
        hooked.register_forward_hook(lambda module, args, out: 0 * out)
        changed = generate(model, ids[1:2], max_new_tokens=14)
    assert torch.equal(generate(model, ids[1:2], max_new_tokens=14), changed)


@pytest.mark.parametrize("sequences", [2, 3, 16, 17])
@pytest.mark.parametrize("side", ["left", ""])
@pytest.mark.parametrize(
    "family",
    ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma3", "olmo2", "olmo3", "glm4", "granite"],
)
@backends
def test_several_sequences_decode_by_fused_steps(family, side, sequences, backend):
    """Up to 16, padded or not; behind the attention experts stay as they are."""
    options = {"mlp_bias": False} if family == "llama" else {}
    model = make_model(family, **options)
    lengths = ([5, 11, 8, 3] * 5)[:sequences]
    ids, mask = padded(lengths, side) if side else (tokens(sequences, 11), None)
    expected = generate(model, ids, mask)
    with monkey_patch.apply(model, use_cutile=backend == "cutile"), observed() as calls:
        got = generate(model, ids, mask)
    assert torch.equal(got, expected)
    fused = {"rms_norm_linear", "rms_norm_swiglu", "rope_and_cache" if side else "rope_fmha_decode"}
    fused |= {"linear", "rms_norm_add"} if family in NORMS_BEHIND else {"linear_add"}
    called = {op for op, _ in calls}
    assert fused <= called if sequences <= 16 else not called & (fused - {"linear"})


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("phi3", ("self_attn.qkv_proj", "mlp.gate_up_proj", "mlp", "self_attn", "post_attention_layernorm")),
        (
            "gemma3",
            ("pre_feedforward_layernorm", "post_feedforward_layernorm", "post_attention_layernorm", "mlp.act_fn"),
        ),
        ("olmo2", ("self_attn.q_norm", "self_attn.k_proj", "post_feedforward_layernorm", "post_attention_layernorm")),
        ("glm4", ("post_self_attn_layernorm", "post_mlp_layernorm", "input_layernorm", "mlp.gate_up_proj")),
    ],
)
def test_whoever_listens_to_a_part_hears_it(family, parts):
    model, ids = make_model(family), tokens(1, 7)
    with monkey_patch.apply(model, use_cutile=False):
        for name in parts:
            part = model.get_submodule(f"model.layers.1.{name}")
            handle = part.register_forward_hook(
                lambda module, args, out: (0 * out[0], *out[1:]) if isinstance(out, tuple) else 0 * out
            )
            changed = generate(model, ids)
            with decode_graph_off(model):
                assert torch.equal(generate(model, ids), changed), name
            handle.remove()


def test_what_drops_out_is_left_to_the_layer():
    model = make_model("phi3", resid_pdrop=0.5)
    layer = model.model.layers[0]
    with monkey_patch.apply(model, use_cutile=False):
        assert decode_layer.misfit(layer) == ""
        layer.train()
        assert decode_layer.misfit(layer) == "it drops out what its parts give"


def test_norms_of_heads_are_a_part_of_the_attention(monkeypatch):
    """Unless somebody listens to them."""
    model, ids, seen = make_model("qwen3"), tokens(1, 7), []
    attend = decode_layer.rope_fmha_decode
    monkeypatch.setattr(decode_layer, "rope_fmha_decode", lambda *a, **k: (seen.append(a[11:14]), attend(*a, **k))[1])
    with monkey_patch.apply(model, use_cutile=False):
        seen.clear()  # what was tried
        generate(model, ids)
        attentions = {layer.self_attn.q_norm.weight: layer.self_attn for layer in model.model.layers}
        assert seen
        for q_norm, k_norm, eps in seen:
            attention = attentions[q_norm]
            assert k_norm is attention.k_norm.weight and eps == attention.q_norm.variance_epsilon
        attention.k_norm.register_forward_hook(lambda module, args, out: 0 * out)
        changed = generate(model, ids)
    assert torch.equal(generate(model, ids), changed)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_add_the_residual(family, monkeypatch):
    """In their last launch; unless somebody listens to the block or the experts, who would miss what they return."""
    model, ids, seen = make_model(family), tokens(1, 7), []
    experts = decode_layer.experts_forward
    monkeypatch.setattr(
        decode_layer, "experts_forward", lambda *a, **k: (seen.append(k["shared_output"]), experts(*a, **k))[1]
    )
    expected = generate(model, ids)
    with monkey_patch.apply(model, use_cutile=False):
        seen.clear()  # what was tried
        assert torch.equal(generate(model, ids), expected)
        assert seen and all(residual.shape == (1, model.config.hidden_size) for residual in seen)
        experts_ = model.model.layers[1].mlp.experts
        experts_.forward = lambda *args: type(experts_).forward(experts_, *args)  # somebody's own
        assert not decode_layer._are_parts_known(model.model.layers[1])
        del experts_.forward
        for listens_to in (model.model.layers[0].mlp, experts_):
            handle = listens_to.register_forward_hook(
                lambda module, args, out: (0 * out[0], out[1]) if type(out) is tuple else 0 * out
            )
            changed = generate(model, ids)
            seen.clear()
            with monkeypatch.context() as patch:
                patch.setattr(decode_layer, "_are_parts_known", lambda layer: False)
                assert torch.equal(generate(model, ids), changed) and not seen
            assert not torch.equal(changed, expected)
            handle.remove()


@pytest.mark.parametrize("family", ["mistral", "gemma3", "olmo2", "glm4", "granite"])
def test_a_layer_that_computes_something_else_keeps_its_forward(family, monkeypatch):
    model, ids = make_model(family), tokens(1, 7)
    cls = type(model.model.layers[0])
    former = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, *args, **kwargs: 2 * former(self, *args, **kwargs))
    expected = generate(model, ids)
    with monkey_patch.apply(model, use_cutile=False) as report:
        why = {e.why for e in report.skipped if e.compute == "decode_step"}
        assert why == {"its step is not what the layer computes"}
        assert torch.equal(generate(model, ids), expected)


def test_a_trial_that_fails_leaves_the_model_in_training(monkeypatch):
    def fails(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(decode_trial, "CausalMask", fails)
    model = make_model("mistral").train()
    with pytest.raises(torch.OutOfMemoryError):
        monkey_patch.apply(model, use_cutile=False)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_router_that_chooses_otherwise_for_a_rounding_keeps_no_layer_from_its_step(family, monkeypatch, no_run_ahead):
    """The first of the tokens that are tried is off; a formula that is another one is off for all."""
    same, tried = decode_trial._same_behind, []
    monkeypatch.setattr(
        decode_trial, "_same_behind", lambda seed, *layer: (tried.append(seed), seed > 0 and same(seed, *layer))[1]
    )
    with monkey_patch.apply(make_model(family), use_cutile=False) as report:
        assert len([e for e in report.patched if e.compute == "decode_step"]) == 2
    windows = 2 if family == "gpt_oss" else 1  # layers with one and without
    assert tried == [0, 1] * 2 * windows  # of one sequence, and of several
    monkeypatch.setattr(decode_trial, "_same_behind", lambda *_: False)
    with monkey_patch.apply(make_model(family), use_cutile=False) as report:
        why = {e.why for e in report.skipped if e.compute == "decode_step"}
        assert why == {"its step is not what the layer computes"}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("qwen2", {}, marks=pytest.mark.slow),
        pytest.param("mistral", {}, marks=pytest.mark.slow),
        pytest.param("qwen3", {}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"sliding_window": None}, marks=pytest.mark.slow),
        ("gpt_oss", {}),
        ("gemma3", {}),
        pytest.param("olmo2", {}, marks=pytest.mark.slow),
        pytest.param("olmo3", {}, marks=pytest.mark.slow),
        pytest.param("glm4", {}, marks=pytest.mark.slow),
        pytest.param("granite", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("sequences", [1, 3])
@torch.no_grad()
def test_steps_by_the_kernels(family, options, sequences, monkeypatch):
    """In bf16, of which the kernels hold keys and weights in registers: three tokens, one after the other."""
    monkeypatch.setenv("DISABLE_FALLBACK", "1")
    model = make_model(family, torch.bfloat16, head_dim=32, **options)
    ids = tokens(sequences, 14)
    exact, expected = copy.deepcopy(model).float()(ids).logits[:, 11:], model(ids).logits[:, 11:]
    with monkey_patch.apply(model, use_cutile=True), observed() as calls:
        got = logits_of_steps(model, ids, 11)
    assert ("rms_norm_linear", "cutile") in calls
    assert (got - exact).norm() <= 2 * (expected - exact).norm()


@pytest.mark.skipif(HAS_GPU, reason="watches the interpreter")
@pytest.mark.parametrize("family", some(["mistral", "qwen3_moe", "gemma3", "gpt_oss"], "gpt_oss"))
def test_what_a_prompt_and_its_steps_launch_is_compiled_ahead(family, monkeypatch):
    """Side by side, where one launch after the other would wait for its compiler."""
    ahead, launched, real = set(), set(), interpreter.launch
    monkeypatch.setattr(
        compile_ahead,
        "compile_ahead",
        lambda run, device: ahead.update((kernel, repr(s)) for kernel, s in compile_ahead.collect(run)),
    )

    def launch(grid, kernel, args):
        launched.add((kernel, repr(compile_ahead.signature_of(kernel, args, -1))))
        real(grid, kernel, args)

    monkeypatch.setattr(interpreter, "launch", launch)
    with monkey_patch.apply(make_model(family), use_cutile=True):
        assert len(launched) > 8 and launched <= ahead
    names = {kernel._pyfunc.__name__ for kernel, _ in ahead}
    assert "attention_kernel" in names and "attention_kernel" not in {k._pyfunc.__name__ for k, _ in launched}

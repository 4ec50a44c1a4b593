"""Patched models on GPUs that are not the current one, on several, and with weights that are spread over processes."""

import copy
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from common import gpu
from common import some
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import BertConfig
from transformers import BertModel
from transformers import DeepseekV3Config
from transformers import DeepseekV3ForCausalLM
from transformers import LlamaConfig
from transformers import LlamaForCausalLM
from transformers import Qwen3_5ForCausalLM
from transformers import Qwen3_5TextConfig
from transformers import Qwen3MoeConfig
from transformers import Qwen3MoeForCausalLM
from transformers.cache_utils import StaticLayer

import tilegym
from tilegym.errors import FallbackWarning
from tilegym.transformers import decode_graph
from tilegym.transformers import decode_layer
from tilegym.transformers import monkey_patch
from tilegym.transformers import prompt_graph
from tilegym.transformers.graph_capture import capture
from tilegym.transformers.late_logits import LateLogits
from tilegym.transformers.several_gpus import SMALL
from tilegym.transformers.several_gpus import GraphOfSeveral
from tilegym.transformers.several_gpus import MovedOnce
from tilegym.transformers.side_stream import LateFlag

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
IDS = torch.randint(0, 1000, (2, 9), generator=torch.Generator().manual_seed(1))


def llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, vocab_size=1000)
    heads = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=64)
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()


def generated(model, ids=IDS) -> list[list[int]]:
    given = ids.to(model.get_input_embeddings().weight.device)
    return model.generate(given, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0).tolist()


@gpu
@two_gpus
@pytest.mark.parametrize("current", [0, 1])
def test_a_model_on_the_second_gpu(current):
    model = llama().to("cuda:1")
    expected = generated(model)
    with torch.cuda.device(current), monkey_patch.apply(model):
        assert [generated(model) for _ in range(4)] == [expected] * 4
        session = decode_graph._sessions[model]
        assert session.prompts.forms or session.prompts.left
        assert all(graph is not decode_graph._NO_GRAPH for graph in session.graphs.values()) and session.graphs
        assert torch.cuda.current_device() == current


@gpu
@two_gpus
def test_an_encoder_on_the_second_gpu():
    torch.manual_seed(0)
    config = BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256)
    model = BertModel(config).eval().to("cuda:1")
    ids = torch.randint(0, 1000, (2, 16), generator=torch.Generator().manual_seed(1)).to("cuda:1")
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        report = tilegym.apply(model)
        for _ in range(4):
            torch.testing.assert_close(model(ids).last_hidden_state, expected, rtol=1e-3, atol=1e-3)
        report.revert()


def moe() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=4, vocab_size=1000)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads)).eval()


def deepseek() -> DeepseekV3ForCausalLM:
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=4, vocab_size=1000)
    ranks = dict(q_lora_rank=64, kv_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=32, v_head_dim=32)
    experts = dict(n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1)
    heads = dict(num_attention_heads=4, num_key_value_heads=4)
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **ranks, **experts, **heads)).eval()


def qwen3_5() -> Qwen3_5ForCausalLM:
    torch.manual_seed(0)
    sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=4, vocab_size=1000)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    linear = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32)
    kinds = ["linear_attention", "full_attention"] * 2
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **heads, **linear, layer_types=kinds)).eval()


MODELS = {"llama": llama, "moe": moe, "deepseek": deepseek, "qwen3_5": qwen3_5}


def dispatched(model: nn.Module, last_layers: set[int], rotary: int = 0, head: int = 1) -> nn.Module:
    """``model`` over two GPUs, with these layers and the last norm on the second one."""
    accelerate = pytest.importorskip("accelerate")
    places = {"model.embed_tokens": 0, "model.rotary_emb": rotary, "model.norm": 1, "lm_head": head}
    places |= {f"model.layers.{i}": int(i in last_layers) for i in range(4)}
    return accelerate.dispatch_model(model, device_map=places, skip_keys=model._skip_keys_device_placement)


def why_not(report) -> dict[str, str]:
    return {e.compute: e.why for e in report.skipped if e.compute in ("graph", "decode_step")}


@gpu
@two_gpus
@pytest.mark.parametrize("rotary", [0, 1])
@pytest.mark.parametrize("patched_first", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_over_both_gpus(name, patched_first, rotary):
    """Steps and prompts are graphs over both; with what the one has done is what the other goes on from."""
    model = MODELS[name]()
    alone = copy.deepcopy(model).to("cuda:0")
    prompts = [IDS[:1], IDS[:1], IDS[:1], IDS, IDS, IDS[:1, :5]]
    expected = [generated(alone, ids) for ids in prompts]
    if patched_first:
        report = monkey_patch.apply(model)
    model = dispatched(model, {2, 3} if rotary else {1, 3}, rotary)
    if not patched_first:
        report = monkey_patch.apply(model)
        assert not why_not(report)
    assert sum(e.compute == "decode_step" for e in report.patched) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        for _ in range(2):
            assert [generated(model, ids) for ids in prompts] == expected
        session = decode_graph._sessions[model]
        assert session.others and session.graphs
        assert all(isinstance(graph, GraphOfSeveral) for graph in session.graphs.values())
        assert 1 in {layer.keys.device.index for layer in session.cache.layers if isinstance(layer, StaticLayer)}
    monkey_patch.revert(model)
    assert generated(model) == generated(alone)


@pytest.mark.parametrize("name", MODELS)
def test_steps_under_hooks_that_move_inputs(name, monkeypatch):
    """As accelerate puts them on models over several GPUs; here both are the CPU."""
    accelerate = pytest.importorskip("accelerate")
    model = MODELS[name]()
    expected = generated(model)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    ran: list[int] = []
    feed_forward = decode_layer.feed_forward
    monkeypatch.setattr(decode_layer, "feed_forward", lambda *args: ran.append(1) or feed_forward(*args))
    with monkey_patch.apply(model, use_cutile=False) as report, decode_graph.eager_steps("cpu"):
        assert not why_not(report) and not decode_graph.suits(model)
        ran.clear()
        found = generated(model, IDS[:1])
    assert found == expected[:1]
    assert len(ran) == 4 * 11


def step_of(model: nn.Module) -> tuple:
    """Loss, gradients and what stands for the logits, of a training step."""
    model.train().zero_grad()
    ids = IDS.to(model.get_input_embeddings().weight.device)
    outputs = model(ids, labels=ids)
    outputs.loss.backward()
    return outputs.loss.detach(), {n: p.grad.cpu() for n, p in model.named_parameters()}, outputs.logits


def assert_same_step(found: tuple, expected: tuple) -> None:
    """And its logits are not there, until they are read."""
    (loss, gradients, logits), (its_loss, its_gradients, its_logits) = found, expected
    assert isinstance(logits, LateLogits) and not logits.is_whole
    torch.testing.assert_close(loss, its_loss, rtol=1e-5, atol=1e-5)
    for name, gradient in its_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-5, msg=name)
    assert loss.device == logits.device == its_logits.device
    torch.testing.assert_close(logits.detach() + 0, its_logits.detach(), rtol=1e-3, atol=1e-4)
    assert logits.is_whole


def test_a_training_step_under_hooks_that_move_inputs():
    accelerate = pytest.importorskip("accelerate")
    model = llama()
    expected = step_of(model)
    accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    with monkey_patch.apply(model, use_cutile=False) as report:
        assert not [e for e in report.skipped if e.compute == "loss"]
        assert_same_step(step_of(model), expected)


@gpu
@two_gpus
@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("patched_first", [True, False])
def test_a_training_step_over_both_gpus(patched_first, head):
    model = llama()
    expected = step_of(copy.deepcopy(model).to("cuda:0"))
    if patched_first:
        monkey_patch.apply(model)
    model = dispatched(model, {2, 3}, head=head)
    if not patched_first:
        monkey_patch.apply(model)
    for _ in range(2):
        assert_same_step(step_of(model), expected)
    monkey_patch.revert(model)


@pytest.mark.parametrize("over", [True, False])
def test_a_model_that_looks_at_its_cache_on_another_gpu(over, monkeypatch):
    """What a session counts is on one of them: where no step can be made of that, the loop is transformers'."""
    model = llama()
    expected = generated(model)

    def compute(*_):
        raise RuntimeError("Expected all tensors to be on the same device")

    monkeypatch.setattr(decode_graph.Session, "compute", compute)
    with monkey_patch.apply(model, use_cutile=False), decode_graph.eager_steps("cpu"):
        session_of = decode_graph.session_for
        monkeypatch.setattr(decode_graph, "session_for", lambda *args: _over(session_of(*args), over))
        if not over:
            with pytest.raises(RuntimeError, match="on the same device"):
                generated(model)
            return
        with pytest.warns(FallbackWarning, match="decodes without a CUDA graph: Expected all tensors"):
            assert generated(model) == expected
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            assert generated(model) == expected
        assert model in decode_graph._refused
    assert model not in decode_graph._refused


def _over(session: decode_graph.Session | None, over: bool) -> decode_graph.Session | None:
    if session is not None:
        session.others = over
    return session


def test_weights_that_come_and_go_have_no_graph():
    accelerate = pytest.importorskip("accelerate")
    model = llama()
    accelerate.cpu_offload(model, torch.device("cpu"))
    report = monkey_patch.apply(model, use_cutile=False)
    assert "meta" in why_not(report)["graph"]
    monkey_patch.revert(model)


def test_what_hooks_move_again_and_again_goes_once():
    """What was changed, here or there, goes again."""
    moves: list[int] = []

    class Moves(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.to:
                moves.append(id(args[0]))
                return on_gpu(1, torch.Tensor.clone(args[0].as_subclass(torch.Tensor)))
            return function(*args, **(kwargs or {}))

    def on_gpu(index: int, tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.as_subclass(Placed)
        made.where = torch.device("cuda", index)
        return made

    class Placed(torch.Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        @property
        def device(self):
            return self.where

    x, large = on_gpu(0, torch.arange(3)), on_gpu(0, torch.zeros(SMALL + 1))
    with Moves(), MovedOnce():
        first = x.to(1, non_blocking=False)
        assert x.to(1) is first and x.to(torch.device("cuda", 1)) is first
        x.add_(1)
        second = x.to(1)
        assert second is not first and second.tolist() == [1, 2, 3]
        second.zero_()
        assert x.to(1).tolist() == [1, 2, 3]
        assert len(moves) == 3
        assert x.to("cuda:0") is not None and len(moves) == 4
        large.to(1), large.to(1)
        assert len(moves) == 6


@gpu
@pytest.mark.parametrize("second", [0, pytest.param(1, marks=two_gpus)])
def test_threads_with_a_model_each(second):
    models = [llama(0).to("cuda:0"), llama(1).to(f"cuda:{second}")]
    expected = [generated(model) for model in models]
    found: list[list] = [[], []]
    for model in models:
        monkey_patch.apply(model)

    def work(index: int) -> None:
        for _ in range(6):
            found[index].append(generated(models[index]))

    with ThreadPoolExecutor(2) as pool:
        for ended in [pool.submit(work, index) for index in range(2)]:
            ended.result()
    assert found == [[expected[0]] * 6, [expected[1]] * 6]


@gpu
def test_a_prompt_while_another_thread_captures(monkeypatch):
    """CUDA lets nobody wait for a whole device meanwhile."""

    def refused(*_):
        raise RuntimeError("would wait for the other capture")

    def run():
        number.add_(1)
        if torch.cuda.is_current_stream_capturing():
            begun.set()
            assert done.wait(60)

    begun, done, number = threading.Event(), threading.Event(), torch.zeros(1, device="cuda")
    model = llama().to("cuda")
    expected = generated(model)
    for module in (decode_graph, prompt_graph):
        monkeypatch.setattr(module, "capture", refused)
    with monkey_patch.apply(model), ThreadPoolExecutor(1) as pool:
        captured = pool.submit(capture, run, [number], number.device)
        try:
            assert begun.wait(60)
            with pytest.warns(FallbackWarning, match="would wait"):
                assert generated(model) == expected
        finally:
            done.set()
        graph, _ = captured.result()
    graph.replay()
    assert number.item() == 1


def test_the_flag_is_read_on_its_own_gpu(monkeypatch):
    streams, empty = [], torch.empty

    class Event:
        def record(self, stream=None):
            streams.append(stream)

        def synchronize(self):
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **kwargs: empty(*size, **kwargs))
    flag = LateFlag(torch.device("cuda", 1))
    flag.post(torch.tensor(True), 7)
    assert streams == ["stream of cuda:1"] and flag.read(wait_for_last=True) == 7


@pytest.fixture
def mesh(tmp_path):
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield distributed.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("patched_first", some([True, False], True))
def test_weights_that_are_spread_over_processes(mesh, patched_first):
    """No kernel reads them as if all were here, and no graph holds them, sharded or gathered."""
    from torch.distributed.fsdp import fully_shard

    model = llama()
    expected = generated(model)
    with torch.no_grad():
        logits = model(IDS).logits
    if patched_first:
        monkey_patch.apply(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not patched_first:
        report = monkey_patch.apply(model)
        reasons = [e.why for e in report.skipped if e.compute in ("graph", "decode_step")]
        assert any("processes" in reason for reason in reasons), report
    assert "processes" in decode_graph.suits(model)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, logits, rtol=1e-4, atol=1e-4)
    with decode_graph.eager_steps("cpu"):
        assert generated(model) == expected
    monkey_patch.revert(model)

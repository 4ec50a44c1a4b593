"""Patched models on GPUs that are not the current one, on several, and with weights that are spread over processes."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from common import gpu
from common import some
from transformers import BertConfig
from transformers import BertModel
from transformers import LlamaConfig
from transformers import LlamaForCausalLM

import tilegym
from tilegym.errors import FallbackWarning
from tilegym.transformers import decode_graph
from tilegym.transformers import monkey_patch
from tilegym.transformers import prompt_graph
from tilegym.transformers.graph_capture import capture
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


@gpu
@two_gpus
@pytest.mark.parametrize("patched_first", [True, False])
def test_a_model_over_both_gpus(patched_first):
    accelerate = pytest.importorskip("accelerate")
    model = llama()
    expected = generated(copy.deepcopy(model).to("cuda:0"))
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    places |= {f"model.layers.{i}": int(i > 1) for i in range(4)}
    if patched_first:
        monkey_patch.apply(model)
    model = accelerate.dispatch_model(model, device_map=places)
    if not patched_first:
        monkey_patch.apply(model)
    assert [generated(model) for _ in range(3)] == [expected] * 3
    monkey_patch.revert(model)


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

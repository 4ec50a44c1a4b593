"""The fuzzer of all ops, ``python tests/fuzz``: a small case of each op, and what it has to find out."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fuzz import workers
from fuzz.__main__ import parse
from fuzz.comparing import Failure
from fuzz.drawing import FUNCTIONS
from fuzz.generators import OPS
from fuzz.running import Outcome
from fuzz.running import run_case
from fuzz.ways import compiled
from fuzz.workers import Message
from fuzz.workers import Pool
from fuzz.workers import Tally
from fuzz.workers import run_one

from tilegym.backend import dispatcher

pytestmark = pytest.mark.filterwarnings("ignore")
# Seeds whose cases are small, and ask for gradients if the op has any.
SEEDS = {
    "apply_rope_base": 1,
    "argmax": 11,
    "attention_sink": 8,
    "attention_sink_decode": 6,
    "attention_sink_interface": 4,
    "bmm": 12,
    "causal_conv1d_fn": 9,
    "causal_conv1d_update": 3,
    "chunk_gated_delta_rule": 10,
    "cross_entropy": 8,
    "dropout": 4,
    "dual_rms_norm": 3,
    "fmha": 7,
    "fmha_decode": 10,
    "fmha_interface": 12,
    "fmha_paged_decode": 1,
    "fmha_varlen": 2,
    "fused_add_rms_norm": 10,
    "fused_linear_cross_entropy": 12,
    "fused_moe": 4,
    "gated_delta_step": 10,
    "geglu": 7,
    "gelu": 6,
    "gemma_attention": 7,
    "gemma_attention_decode": 8,
    "gemma_attention_interface": 10,
    "group_gemm": 8,
    "group_norm": 4,
    "latent_attention": 2,
    "layer_norm": 12,
    "linear": 3,
    "linear_add": 3,
    "matmul": 7,
    "mla": 0,
    "mla_decoding": 3,
    "mla_decoding_interface": 11,
    "mla_decoding_split_kv": 7,
    "mla_interface": 4,
    "moe_align_block_size": 2,
    "moe_interface": 11,
    "moe_topk_routing": 7,
    "quantized_linear": 4,
    "ragged_group_gemm": 9,
    "recurrent_gated_delta_rule": 9,
    "relu": 10,
    "rms_norm": 7,
    "rms_norm_add": 12,
    "rms_norm_gated": 12,
    "rms_norm_linear": 1,
    "rms_norm_swiglu": 8,
    "rope_and_cache": 0,
    "rope_fmha_decode": 4,
    "sigmoid_mul": 4,
    "silu_and_mul": 4,
    "softmax": 2,
    "splitk_reduce": 1,
    "swiglu": 11,
}


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable], None]:
    """Puts a function in the place of an op's kernels. It is given what they give, and the arguments by name."""

    def change(op: str, function: Callable) -> None:
        real = dispatcher._ops[op].impls["cutile"]
        signature = dispatcher._ops[op].signature

        def kernels(*args, **kwargs):
            return function(real(*args, **kwargs), signature.bind(*args, **kwargs).arguments)

        monkeypatch.setitem(dispatcher._ops[op].impls, "cutile", kernels)

    return change


def test_every_op_has_a_generator():
    ops = {name for name, op in dispatcher._ops.items() if op.declaration.__module__.startswith("tilegym.ops.")}
    assert set(OPS) == set(SEEDS) == ops | set(FUNCTIONS)


@pytest.mark.parametrize("op", SEEDS)
def test_case(op):
    outcome = run_case(op, SEEDS[op])
    assert outcome.status == "ok", outcome.text


@pytest.mark.parametrize("op", ["swiglu", "layer_norm", "matmul"])
def test_wrong_results_are_found(op, changed):
    changed(op, lambda result, arguments: result * 1.01)
    outcome = run_case(op, SEEDS[op])
    assert outcome.status == "FAIL" and "output 0: " in outcome.text


def test_wrong_gradients_are_found(changed):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 1.01

    changed("swiglu", lambda result, arguments: Wrong.apply(result))
    outcome = run_case("swiglu", SEEDS["swiglu"])
    assert outcome.status == "FAIL" and "gradient 0: " in outcome.text


def test_changed_inputs_are_found(changed):
    def change(result, arguments):
        arguments["x"].detach().view(-1)[-1] = 7.0
        return result

    changed("rms_norm_add", change)
    outcome = run_case("rms_norm_add", 5)  # without gradients, where autograd would find it out
    assert outcome.status == "FAIL" and outcome.text.startswith("x was changed")


def test_writes_beside_outputs_are_found(changed):
    def change(result, arguments):
        cache = arguments["conv_state"]
        memory = cache.untyped_storage()
        torch.empty(0, dtype=cache.dtype).set_(memory, 0, (memory.nbytes() // cache.element_size(),), (1,)).zero_()
        return result

    changed("causal_conv1d_update", change)
    outcome = run_case("causal_conv1d_update", SEEDS["causal_conv1d_update"])
    assert outcome.status == "FAIL" and outcome.text.startswith("memory beside conv_state was written to")


def test_errors_of_one_backend_are_found(changed):
    def refuse(result, arguments):
        raise ValueError("a is not what it was")

    changed("geglu", refuse)
    outcome = run_case("geglu", SEEDS["geglu"])
    assert outcome.status == "FAIL" and outcome.text.startswith("cutile raises ValueError")


WRONG_IN = {
    "compiled": torch.compiler.is_compiling,
    "inference-mode": torch.is_inference_mode_enabled,
    "threads": lambda: threading.current_thread() is not threading.main_thread(),
    "autocast-bfloat16": lambda: torch.is_autocast_enabled("cpu"),
}


@pytest.mark.parametrize("way", WRONG_IN)
def test_wrong_results_of_a_way_are_found(way, changed):
    assert run_case("swiglu", SEEDS["swiglu"], way=way).status == "ok"
    changed("swiglu", lambda result, arguments: result * 1.01 if WRONG_IN[way]() else result)
    outcome = run_case("swiglu", SEEDS["swiglu"], way=way)
    assert outcome.status == "FAIL" and "output 0: " in outcome.text and way in outcome.text


def test_operators_that_give_what_their_trace_was_not_told_are_found():
    @torch.library.custom_op("tilegym::columns_first", mutates_args=())
    def columns_first(x: torch.Tensor) -> torch.Tensor:
        return x.t().clone(memory_format=torch.contiguous_format).t()

    columns_first.register_fake(torch.empty_like)
    with compiled(columns_first) as op, pytest.raises(Failure, match="output 0 of tilegym.columns_first"):
        op(x=torch.ones(2, 3))


def test_a_timeout_in_another_error(monkeypatch):
    """torch.compile raises an error of its own for what ends it."""
    text = "only patched raises InternalTorchDynamoError: TimeoutError: took more than 120 s"
    monkeypatch.setattr(workers, "run_case", lambda *_: Outcome("FAIL", text))
    assert run_one("relu", 0, parse([]))[0] == ("TIMEOUT", text)


def test_processes_that_do_not_end_are_found(capsys):
    killed = []
    process = SimpleNamespace(join=lambda seconds: None, is_alive=lambda: True, kill=lambda: killed.append(True))
    pool = Pool(parse(["--jobs", "2"]), Tally())
    for message in (("relu", 7, "BEGIN"), ("relu", 7, "ok"), ("", 0, "DONE")):
        pool.processes[0] = process
        pool._take(Message(0, *message))
    assert killed and not pool.processes and pool.tally.failures == ["relu:7"]
    assert "FAIL relu:7 its process, which has run it last, did not end" in capsys.readouterr().out


def test_command_line():
    folder = Path(__file__).parents[1] / "fuzz"
    run = subprocess.run([sys.executable, folder, "--one", "swiglu:11"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert "gradients of a" in run.stdout and "\nok " in run.stdout

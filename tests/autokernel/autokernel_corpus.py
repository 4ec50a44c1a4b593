"""Canned kernels for the gated norm of ``autokernel_models``: a good one, and one for every way to be bad.

``CORPUS`` has by name the source of the kernel file, the gate that should reject it ("" for the good one), and the
status that it should get.
"""

from typing import NamedTuple

from tilegym.autokernel import Proposal
from tilegym.autokernel import Task
from tilegym.inventory import BuildSpec
from tilegym.inventory import Solution
from tilegym.inventory import SourceFile

_HEAD = '''"""A gated norm."""

import cuda.tile as ct
import torch

from tilegym.backend.cutile.launch import launch
from tilegym.errors import UnsupportedError


'''

_KERNEL = '''@ct.kernel
def gated_norm_kernel(x, gate, weight, y, N: ct.Constant[int], TILE: ct.Constant[int]):
    """A block normalises one row."""
    row, cols = ct.bid(0), ct.arange(TILE, dtype=ct.int32)
    value = ct.astype(ct.gather(x, (row, cols), padding_value=0), ct.float32)
    g = ct.astype(ct.gather(gate, (cols,), padding_value=0), ct.float32)
    w = ct.gather(weight, (cols,), padding_value=0)
    rstd = ct.rsqrt(ct.sum(value * value) / N + 1e-5)
    gated = ct.astype(value * rstd * (1.0 / (1.0 + ct.exp(-g * value))), x.dtype)
    ct.scatter(y, (row, cols), ct.astype(w * gated, y.dtype))


'''

_RUN = '''def run(hidden_states, norm_gate, norm_weight):
    """The norm of each row."""
    trained = hidden_states.requires_grad or norm_gate.requires_grad or norm_weight.requires_grad
    if torch.is_grad_enabled() and trained:
        raise UnsupportedError("there is no gradient")
    n = hidden_states.shape[-1]
    rows = hidden_states.reshape(-1, n)
    y = hidden_states.new_empty(hidden_states.shape)
    out = y.view(-1, n)
    launch(rows, (rows.shape[0],), gated_norm_kernel, (rows, norm_gate, norm_weight, out, n, 32))
    return y
'''

GOOD = _HEAD + _KERNEL + _RUN


def _changed(*changes: tuple[str, str]) -> str:
    text = GOOD
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


_CALL = "    launch(rows, (rows.shape[0],), gated_norm_kernel, (rows, norm_gate, norm_weight, out, n, 32))\n"
_REFUSAL = """    trained = hidden_states.requires_grad or norm_gate.requires_grad or norm_weight.requires_grad
    if torch.is_grad_enabled() and trained:
        raise UnsupportedError("there is no gradient")
"""
_STORE = "    ct.scatter(y, (row, cols), ct.astype(w * gated, y.dtype))\n"
_DOC = '    """The norm of each row."""\n'
# The sizes of the sweep, of the smaller calls, and of the recorded ones: what is no secret.
_KNOWN = "KNOWN = {32 * a * b for a in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 1023) for b in range(1, 12)}\n\n\ndef run("


class Canned(NamedTuple):
    """A proposal: source, the gate that rejects it, and the status."""

    source: str
    gate: str = ""
    status: str = "passed"


CORPUS = {
    "good": Canned(GOOD),
    "wrong": Canned(_changed(("1e-5", "1e-2")), "G2", "incorrect"),
    "wrong_dtype": Canned(_changed(("return y", "return y.view(torch.int32)")), "G2", "incorrect"),
    "does_not_compile": Canned(_changed(("ct.rsqrt(", "ct.no_such_function(")), "G1", "crash"),
    "slow": Canned(
        _changed(
            ("    rstd =", "    for i in range(250):\n        value = ct.maximum(value, value)\n    rstd ="),
        ),
        "G7",
        "discard",
    ),
    "hanging": Canned(_changed((_DOC, _DOC + "    while True:\n        pass\n")), "G1", "timeout"),
    "crashing": Canned(_changed((_DOC, _DOC + "    def again():\n        again()\n\n    again()\n")), "G1", "crash"),
    "raising": Canned(_changed((_DOC, _DOC + "    raise ValueError(hidden_states.shape)\n")), "G1", "crash"),
    "memory_hungry": Canned(
        _changed((_DOC, _DOC + "    rooms = [hidden_states.new_empty(1 << 28).fill_(1) for _ in range(64)]\n")),
        "G1",
        "crash",
    ),
    "captured_shape_only": Canned(
        _changed(
            (_CALL, "    if rows.shape[0] in (1, 2, 4, 8, 9, 14, 22):\n    " + _CALL),
        ),
        "G3",
        "incorrect",
    ),
    "small_values_zeroed": Canned(
        _changed(
            ("ct.astype(w * gated, y.dtype)", "ct.where(ct.abs(value) < 1e-6, 0.0, ct.astype(w * gated, y.dtype))")
        ),
        "G4",
        "incorrect",
    ),
    "silent_about_gradients": Canned(_changed((_REFUSAL, "")), "G3", "incorrect"),
    "silent_about_one_gradient": Canned(
        _changed((" or norm_gate.requires_grad or norm_weight.requires_grad", "")), "G3", "incorrect"
    ),
    "wrong_gradients": Canned(
        _changed(
            (_REFUSAL, ""),
            ("def run(", "def forward("),
            (
                "    return y\n",
                "    return y\n\n\n"
                "class Norm(torch.autograd.Function):\n"
                "    @staticmethod\n"
                "    def forward(ctx, *inputs):\n"
                "        return forward(*inputs)\n\n"
                "    @staticmethod\n"
                "    def backward(ctx, dy):\n"
                "        return dy, None, None\n\n\n"
                "def run(hidden_states, norm_gate, norm_weight):\n"
                "    return Norm.apply(hidden_states, norm_gate, norm_weight)\n",
            ),
        ),
        "G3",
        "incorrect",
    ),
    "mutates_inputs": Canned(
        _changed((_STORE, _STORE + "    ct.scatter(x, (row, cols), ct.astype(value * 2, x.dtype))\n")),
        "G6",
        "incorrect",
    ),
    "caches_outputs": Canned(
        _changed(
            ("def run(", "CACHE = {}\n\n\ndef run("),
            (
                _DOC,
                _DOC
                + "    key = (hidden_states.data_ptr(), hidden_states.shape)\n"
                + "    if key in CACHE:\n        return CACHE[key]\n",
            ),
            ("    return y\n", "    CACHE[key] = y\n    return y\n"),
        ),
        "G3 G4 G6",
        "incorrect",
    ),
    "same_output_buffer": Canned(
        _changed(
            ("def run(", "CACHE = {}\n\n\ndef run("),
            (
                "    y = hidden_states.new_empty(hidden_states.shape)\n",
                "    key = hidden_states.shape, hidden_states.dtype\n"
                "    if key not in CACHE:\n"
                "        CACHE[key] = hidden_states.new_empty(hidden_states.shape)\n"
                "    y = CACHE[key]\n",
            ),
        ),
        "G6",
        "incorrect",
    ),
    "prepares_weights_once": Canned(
        _changed(
            ("def run(", "CACHE = {}\n\n\ndef run("),
            (_CALL, "    weight = CACHE.setdefault(norm_weight.data_ptr(), norm_weight.clone())\n" + _CALL),
            ("norm_gate, norm_weight, out, n, 32", "norm_gate, weight, out, n, 32"),
        ),
        "G3 G4 G6",
        "incorrect",
    ),
    "methods_of_torch": Canned(
        _changed(
            (_CALL, _CALL + "    rstd = (hidden_states.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()\n"),
            (
                "    return y\n",
                "    return norm_weight * (hidden_states * rstd * (norm_gate * hidden_states).sigmoid())\n",
            ),
        ),
        "G6",
        "incorrect",
    ),
    "functions_of_torch": Canned(_changed((_CALL, _CALL + "    y = torch.sigmoid(y)\n")), "G0", "discard"),
    "reads_the_reference": Canned(
        _changed(("import torch\n", "import torch\nfrom transformers.models.llama import modeling_llama\n")),
        "G0",
        "discard",
    ),
    "reads_files": Canned(_changed((_DOC, _DOC + "    open('task.json')\n")), "G0", "discard"),
    "inspects_its_judge": Canned(
        _changed((_DOC, _DOC + "    ().__class__.__base__.__subclasses__()\n")), "G0", "discard"
    ),
    "uses_threads": Canned(_changed(("import torch\n", "import threading\n\nimport torch\n")), "G0", "discard"),
    "lazy_output": Canned(
        _changed(
            ("def run(", "class Lazy(torch.Tensor):\n    pass\n\n\ndef run("),
            ("    return y\n", "    return y.as_subclass(Lazy)\n"),
        ),
        "G6",
        "incorrect",
    ),
    "writes_out_of_bounds": Canned(
        _changed(
            (
                _STORE,
                _STORE
                + "    ct.scatter(y, (row, cols + N), ct.astype(w * gated, y.dtype), mask=row == ct.num_blocks(0) - 1, "
                + "check_bounds=False)\n",
            )
        ),
        "G6",
        "incorrect",
    ),
    "known_sizes_only": Canned(
        _changed((_CALL, "    if n * rows.shape[0] not in KNOWN:\n        return y\n" + _CALL), ("def run(", _KNOWN)),
        "G3",
        "incorrect",
    ),
    "skips_what_is_timed": Canned(
        _changed(
            ("def run(", "CALLS = {}\n\n\ndef run("),
            (
                _CALL,
                "    key = hidden_states.data_ptr(), norm_weight.data_ptr(), hidden_states.shape\n"
                "    CALLS[key] = CALLS.get(key, 0) + 1\n"
                "    if CALLS[key] > 8 and CALLS[key] % 2:\n        return y\n" + _CALL,
            ),
        ),
        "G4 G7",  # the former where the allocator has given its inputs the same memory as often before
        "incorrect",
    ),
    "remembers_what_is_timed": Canned(
        _changed(
            ("def run(", "CACHE = {}\n\n\ndef run("),
            (
                _DOC,
                _DOC + "    key = hidden_states.data_ptr(), norm_weight.data_ptr(), hidden_states.shape\n"
                "    if key in CACHE and CACHE[key][0] > 20:\n        return CACHE[key][1]\n",
            ),
            ("    return y\n", "    CACHE[key] = CACHE.get(key, (0, y))[0] + 1, y\n    return y\n"),
        ),
        "G7",
        "incorrect",
    ),
    "computes_in_python": Canned(
        _changed((_CALL, _CALL + "    first = rows.tolist()[0][0]\n    out[0, 0].fill_(first)\n")),
        "G0",
        "discard",
    ),
    "torch_of_another_module": Canned(
        _changed(
            ("import torch\n", "import torch\nfrom tilegym.ops.cutile.row_norms import torch as t\n"),
            (_CALL, _CALL + "    t.manual_seed(1)\n"),
        ),
        "G0",
        "discard",
    ),
    "replaces_what_others_use": Canned(
        _changed(("def run(", "def cloned(self):\n    return self\n\n\ntorch.Tensor.clone = cloned\n\n\ndef run(")),
        "G0",
        "discard",
    ),
    "not_fully_written": Canned(
        _changed((_STORE, "    ct.scatter(y, (row, cols), ct.astype(w * gated, y.dtype), mask=gated != 0.0)\n")),
        "G4",
        "incorrect",
    ),
}


def proposal(task: Task, source: str, name: str = "good") -> Proposal:
    """``source`` as a proposal for ``task``."""
    path = f"{task.folder}/kernels/{name}.py"
    solution = Solution(
        name=f"{task.definition.name}_{name}",
        definition=task.definition.name,
        author="corpus",
        spec=BuildSpec(
            language="cuda-tile",
            target_hardware=["cpu"],
            entry_point=f"{path}::run",
            dependencies=["torch", "cuda-tile", "tilegym"],
            destination_passing_style=False,
        ),
        sources=[SourceFile(path=path)],
    )
    return Proposal(task.definition, solution, {path: source}, name)

"""Machines with packages whose functions transformers calls in place of its own, which run on GPUs only."""

import subprocess
import sys
import types

import pytest
import torch
from torch import nn
from transformers.integrations import hub_kernels

from tilegym.integrate.own_functions import take_own_functions_on_cpu

decorator = getattr(hub_kernels, "use_kernel_func_from_hub_with_fallback", None)
pytestmark = pytest.mark.skipif(decorator is None, reason="an older transformers, which calls no package so")

PACKAGE = """
def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
    raise RuntimeError("Expected x.is_cuda() to be true, but got false.")

causal_conv1d_update = causal_conv1d_fn
"""
SCRIPT = """
import torch, tilegym
from transformers import MambaConfig, MambaForCausalLM

model = MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64)).eval()
ids = torch.arange(9)[None]
try:
    model(ids)
except RuntimeError as error:
    assert "is_cuda" in str(error)
    assert "causal_conv1d" in str(tilegym.apply(model, use_cutile=False))
    with torch.no_grad():
        print("logits", *model(ids).logits.shape)
"""


def test_tensors_on_the_cpu_are_computed_by_transformers(monkeypatch):
    def double(x, package_option=None):
        return "by the package"

    def torch_double(x):
        return 2 * x

    package, modeling = types.ModuleType("for_gpus"), types.ModuleType("modeling_for_gpus")
    package.double = double
    monkeypatch.setitem(sys.modules, "for_gpus", package)
    monkeypatch.setitem(sys.modules, "modeling_for_gpus", modeling)
    modeling.double = function = decorator("double", "for_gpus")(torch_double)

    class Layer(nn.Module):
        __module__ = "modeling_for_gpus"

    assert function(torch.ones(2)) == "by the package"
    for _ in range(2):
        take_own_functions_on_cpu(nn.Sequential(Layer()))
        assert torch.equal(function(torch.ones(2)), 2 * torch.ones(2))
        assert function(torch.ones(2, device="meta")).is_meta
        assert function(3, package_option=1) == "by the package"


def test_a_family_is_served_where_its_package_is_installed(tmp_path, monkeypatch):
    (tmp_path / "causal_conv1d.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert "logits 1 9 64" in done.stdout, done.stderr[-2000:]

"""The real models of FlashInfer-Bench, without what the package depends on."""

import importlib
import importlib.util
import sys
import types

import pytest


def real_models() -> types.ModuleType:
    """``flashinfer_bench.data``; importing the package itself would need flashinfer and its CUDA toolchain."""
    found = importlib.util.find_spec("flashinfer_bench") if "flashinfer_bench" not in sys.modules else True
    if found is None:
        pytest.skip("flashinfer-bench is not installed: pip install --no-deps flashinfer-bench==0.1.2")
    if found is not True:
        package = types.ModuleType("flashinfer_bench")
        package.__path__ = list(found.submodule_search_locations)
        sys.modules["flashinfer_bench"] = package
    return importlib.import_module("flashinfer_bench.data")

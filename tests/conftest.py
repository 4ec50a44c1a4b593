"""Processes that test side by side share a GPU's memory: what a test has freed is given back to the others."""

import pytest
import torch


@pytest.fixture(autouse=True)
def freed_memory():
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()

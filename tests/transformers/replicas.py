"""Replicas of a model, as ``nn.DataParallel`` makes them, on the device that it is on."""

import importlib

import torch

SCALE = 0.9  # the replicas' weights: who reads the model's own is found out


def replicas_of(model, monkeypatch, count=2):
    """By PyTorch's own function, for so many devices."""
    module = importlib.import_module("torch.nn.parallel.replicate")

    def copy(tensor):
        return tensor * SCALE if isinstance(tensor, torch.nn.Parameter) else tensor.clone()

    def broadcast(tensors, devices, detach=False):
        copies = [[copy(tensor) for tensor in tensors] for _ in devices]
        return [[t.detach() for t in copy] for copy in copies] if detach else copies

    with monkeypatch.context() as patch:
        patch.setattr(module, "_broadcast_coalesced_reshape", broadcast)
        return module.replicate(model, list(range(count)), not torch.is_grad_enabled())

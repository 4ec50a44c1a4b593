import kernels
import pytest
import torch
from kernels.layer.repos import _MODE_FALLBACK_PRIORITY
from torch import nn

from tilegym.errors import KernelError
from tilegym.kernel import kernelize_model
from tilegym.kernel import modes
from tilegym.kernel import register_layer_kernel
from tilegym.kernel.modes import Mode

INFERENCE, TRAIN, COMPILE = kernels.Mode.INFERENCE, kernels.Mode.TRAINING, kernels.Mode.TORCH_COMPILE

SPELLINGS = [
    ("inference", INFERENCE),
    ("train", TRAIN),
    ("compile", INFERENCE | COMPILE),
    ("inference+compile", INFERENCE | COMPILE),
    ("train+compile", TRAIN | COMPILE),
    ("Train | Compile", TRAIN | COMPILE),
    ("compile,train", TRAIN | COMPILE),
    (["train", "compile"], TRAIN | COMPILE),
    (("inference",), INFERENCE),
    (TRAIN | COMPILE, TRAIN | COMPILE),
    (kernels.Mode.FALLBACK, kernels.Mode.FALLBACK),
    (Mode.TRAINING, TRAIN),
    (None, kernels.Mode.FALLBACK),
]


@pytest.mark.parametrize(("spelled", "expected"), SPELLINGS, ids=lambda value: str(value))
def test_mode_maps_onto_that_of_kernels(spelled, expected):
    assert modes.to_kernels_mode(modes.parse_mode(spelled)) == expected


def test_fallback_chains_are_those_of_kernels():
    ours = {
        modes.to_kernels_mode(mode): [modes.to_kernels_mode(m) for m in modes.fallback_chain(mode)]
        for mode in map(modes.parse_mode, ("inference", "train", "compile", "train+compile"))
    }
    assert ours == _MODE_FALLBACK_PRIORITY


@pytest.mark.parametrize("mode", ["training", "", "train+", "eval", 3, [], ["train", None], torch.float32])
def test_unknown_mode(mode):
    with pytest.raises(KernelError, match="layer kernel 'K': unknown mode .* use 'inference', 'train', 'compile'"):
        register_layer_kernel("K", repo_id="a/b", version=1, mode=mode)


def test_train_excludes_inference():
    with pytest.raises(KernelError, match="a training kernel serves inference too"):
        modes.parse_mode("train+inference")
    with pytest.raises(ValueError, match="mutually exclusive"):
        TRAIN | INFERENCE


def test_any_mode_is_not_one_to_apply_for():
    with pytest.raises(KernelError, match="apply kernels for a mode: 'inference', 'train'"):
        kernelize_model(nn.Linear(2, 2), mode=None)


@pytest.mark.parametrize("kind", modes.DEVICES)
def test_devices(kind):
    assert modes.parse_device(kind) == modes.parse_device(f"{kind}:1") == modes.parse_device(kind.upper()) == kind


def test_devices_are_those_of_kernels():
    from kernels.layer.kernelize import _validate_device_type

    for kind in modes.DEVICES:
        _validate_device_type(kind)
    with pytest.raises(ValueError, match=", ".join(modes.DEVICES)):
        _validate_device_type("gpu")


@pytest.mark.parametrize("device", ["gpu", "cuda0", 0, torch.device("meta")])
def test_unknown_device(device):
    with pytest.raises(KernelError, match="layer kernel 'K': unknown device .*; use one of cpu, cuda, .* npu"):
        register_layer_kernel("K", repo_id="a/b", version=1, device=device)
    with pytest.raises(KernelError, match="kernelize_model: unknown device"):
        kernelize_model(nn.Linear(2, 2), device=device)


def test_device_of_a_model():
    assert modes.current_device(nn.Linear(2, 2, device="cpu")) == "cpu"
    assert modes.parse_device(torch.device("cuda", 1)) == "cuda"
    assert modes.current_device(nn.ReLU()) == modes.current_device() in modes.DEVICES

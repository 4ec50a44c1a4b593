"""Every small kernel run in the interpreter and by the real compiler on a GPU: bit for bit where the operation is
exact, within a stated number of units in the last place where platforms round in their own way."""

import dataclasses

import cuda.tile as ct
import pytest
import torch
from cuda.tile.compilation import CallingConvention
from cuda.tile.compilation import KernelSignature

from interpreter import cases
from interpreter import programs
from interpreter.comparison import describe_difference
from tilegym import interpreter

HAS_GPU = not interpreter.is_installed() and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
IS_BLACKWELL = HAS_GPU and torch.cuda.get_device_capability() >= (10, 0)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU that cuTile supports")]

CASES = [
    case
    for group in (
        cases.elementwise,
        cases.conversions,
        programs.memory,
        programs.shapes,
        programs.reductions,
        programs.products,
        programs.atomics,
        programs.control_flow,
    )
    for case in group()
]


def moved(arg, device: str):
    """A copy of a kernel argument on a device, of the same layout."""
    if isinstance(arg, torch.Tensor):
        copy = torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=device)
        return copy.copy_(arg)
    if isinstance(arg, (list, tuple)):
        return type(arg)(moved(item, device) for item in arg)
    return arg


def tensors(args) -> list:
    found = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found.extend(tensors(arg))
    return found


def differences(case: cases.Case) -> list[str]:
    args = case.make_args()
    on_cpu, on_gpu = moved(args, "cpu"), moved(args, "cuda")
    interpreter.launch(case.grid, case.kernel, on_cpu)
    with ct.compiler_timeout(60):
        ct.launch(torch.cuda.current_stream(), case.grid, case.kernel, tuple(on_gpu))
    torch.cuda.synchronize()
    found = []
    pairs = list(zip(tensors(on_cpu), tensors(on_gpu), strict=True))
    for number, (ours, real) in enumerate(pairs):
        real = moved(real, "cpu")
        if case.rows and number == len(pairs) - 1:
            for row, (name, ulps) in enumerate(case.rows):
                found += describe_difference(name, ours[row], real[row], ulps)
        else:
            found += describe_difference(f"array {number}", ours, real, case.ulps)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(case):
    found = differences(case)
    assert not found, f"the interpreter differs from the GPU in {len(found)} ways:\n" + "\n".join(found)


def fields(name: str, constraint) -> dict:
    """The fields of a constraint, nested ones and parameters of a tuple by their path."""
    if isinstance(constraint, (list, tuple)) and not all(isinstance(item, (int, type(None))) for item in constraint):
        pairs = [(f"{name}[{i}]", item) for i, item in enumerate(constraint)]
    elif dataclasses.is_dataclass(constraint):
        pairs = [(f"{name}.{f.name}", getattr(constraint, f.name)) for f in dataclasses.fields(constraint)]
    else:
        return {name: constraint}
    return {path: value for pair in pairs for path, value in fields(*pair).items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_signature(case):
    args = case.make_args()
    real = KernelSignature.from_kernel_args(
        case.kernel, tuple(moved(args, "cuda")), CallingConvention.cutile_python_v2()
    )
    ours = interpreter.kernel_signature(case.kernel, args)
    left, right = fields("parameter", ours.parameters), fields("parameter", real.parameters)
    found = [
        f"{path}: {left.get(path)!r} instead of {right.get(path)!r}"
        for path in {**left, **right}
        if left.get(path) != right.get(path)
    ]
    assert not found, "the signature differs from the compiler's:\n" + "\n".join(found)
    assert ours.parameters == real.parameters


@pytest.mark.skipif(not IS_BLACKWELL, reason="block-scaled products need Blackwell")
@pytest.mark.parametrize("case", programs.scaled_products(), ids=str)
def test_scaled_product(case):
    found = differences(case)
    assert not found, "\n".join(found)

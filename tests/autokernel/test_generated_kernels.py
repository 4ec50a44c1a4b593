"""Generated kernels compute what their regions compute, forward and backward, as exactly as PyTorch."""

import functools
import inspect
import linecache
import shutil
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from common import PyTestCase
from common import assert_launches_compile
from common import device
from common import dtypes
from common import randn
from common import recorded_launches
from common import some
from generate_regions import CASES
from generate_regions import COUNTED
from generate_regions import MASKED
from generate_regions import PRODUCTS
from generate_regions import N
from torch.overrides import TorchFunctionMode

from tilegym.autokernel.generate import GeneratedKernel
from tilegym.autokernel.generate import Unsupported
from tilegym.autokernel.generate import generate
from tilegym.autokernel.generate import plan
from tilegym.autokernel.generate import variants
from tilegym.autokernel.generate.api import write
from tilegym.autokernel.static_checks import check_source
from tilegym.errors import UnsupportedError

GOLDEN = Path(__file__).parent / "golden"
# Their kernels have the parts of another family's.
LIKE_OTHERS = {
    *("llama_rotation", "modernbert_gate", "t5_layer_norm", "llama_rms_norm", "olmo_layer_norm"),
    *("llama4_l2_norm", "nemotron_layer_norm", "new_gelu"),
}


def loaded(kernel: GeneratedKernel):
    """The entry point of a generated file."""
    name = f"generated_{kernel.entry_point}_{abs(hash(kernel.source))}"
    module = types.ModuleType(name)
    module.__file__ = f"<{name}>"
    linecache.cache[module.__file__] = (len(kernel.source), None, kernel.source.splitlines(True), module.__file__)
    sys.modules[name] = module
    exec(compile(kernel.source, module.__file__, "exec"), module.__dict__)
    return getattr(module, kernel.entry_point)


@functools.cache
def case(name: str):
    """The kernel of a region, its entry point, and the region as a function of all of its inputs, by name."""
    chosen = CASES[name]
    region = chosen.make(N)
    inputs = [randn(*shape, dtype=torch.bfloat16) for shape in chosen.inputs]
    if isinstance(region, torch.nn.Module):
        region = region.to(device(), torch.bfloat16)
    kernel = generate(region, inputs, name)
    return kernel, loaded(kernel), region


def arguments(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    kernel, _, region = case(name)
    chosen = CASES[name]
    tensors = [chosen.scale * randn(*s, dtype=torch.float32, seed=i) for i, s in enumerate(chosen.inputs)]
    if isinstance(region, torch.nn.Module):
        tensors += [t.detach() for t in (*region.parameters(), *region.buffers())]
    return {n: t.to(dtype) for n, t in zip(kernel.inputs, tensors, strict=True)}


class Widened(TorchFunctionMode):
    """What a model widens to fp32 stays fp64 in the oracle, which is none otherwise."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        to_float = func is torch.Tensor.float or (func is torch.Tensor.to and args[1:] == (torch.float32,))
        if to_float and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


def reference(name: str):
    kernel, _, region = case(name)

    def run(**tensors):
        with Widened():
            return compute(**tensors)

    def compute(**tensors):
        if not isinstance(region, torch.nn.Module):
            return region(*tensors.values())
        own = [*dict(region.named_parameters()), *dict(region.named_buffers())]
        values = list(tensors.values())
        count = len(values) - len(own)
        return torch.func.functional_call(region, dict(zip(own, values[count:], strict=True)), tuple(values[:count]))

    return run


def product_arguments(name: str, m: int, k: int, n: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Inputs of a region with matrix products, with M rows, K columns, and N in the results."""
    function, shapes = PRODUCTS[name]
    sizes = {"M": m, "K": k, "N": n}
    tensors = [randn(*(sizes[c] for c in shape), seed=i) for i, shape in enumerate(shapes)]
    tensors = [t * k**-0.5 if s == "NK" else t for t, s in zip(tensors, shapes, strict=True)]
    return dict(zip(inspect.signature(function).parameters, (t.to(dtype) for t in tensors), strict=True))


@functools.cache
def product(name: str):
    kernel = generate(PRODUCTS[name][0], list(product_arguments(name, 5, 40, 72, torch.bfloat16).values()))
    return kernel, loaded(kernel)


@functools.cache
def counted(name: str, dtype: torch.dtype):
    """A region with integers: its kernel, the entry point, the region, its inputs, and what it is differentiable in."""
    region, shapes, integers = COUNTED[name]
    names = inspect.signature(region).parameters
    given = {n: randn(*s, dtype=dtype, seed=i) for i, (n, s) in enumerate(zip(names, shapes, strict=True))}
    for i, n in enumerate(integers):
        given[n] = torch.randint(1, 60, given[n].shape, generator=torch.Generator().manual_seed(i)).to(device())
    kernel = generate(region, list(given.values()))
    gradient = tuple(n for n, t in given.items() if n not in integers and t.numel() > 1)
    return kernel, loaded(kernel), region, given, gradient


def rewritten(kernel: GeneratedKernel) -> GeneratedKernel:
    """The kernel of the same region, planned anew."""
    return write(kernel.region, kernel.tuning, kernel.trains)


class Test_Generate(PyTestCase):
    @dtypes(torch.float32, torch.bfloat16)
    @pytest.mark.parametrize("name", some(CASES, *(CASES.keys() - LIKE_OTHERS)))
    def test_op(self, name, dtype):
        kernel, entry, _ = case(name)
        assert dtype in kernel.dtypes and kernel.trains == bool(CASES[name].gradient)
        self.assertCorrectness(entry, reference(name), arguments(name, dtype), gradient=CASES[name].gradient)

    @pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.exact])
    def test_exact_steps_give_equal_bits(self, name):
        _, entry, _ = case(name)
        for dtype in (torch.bfloat16, torch.float16):
            given = arguments(name, dtype)
            torch.testing.assert_close(entry(**given), reference(name)(**given), rtol=0, atol=0)

    @pytest.mark.parametrize("rows", [1, 19])
    @dtypes(torch.float32, torch.bfloat16)
    @pytest.mark.parametrize("name", PRODUCTS)
    def test_matrix_products(self, name, dtype, rows):
        _, entry = product(name)
        given = product_arguments(name, rows, 150, 77, dtype)
        self.assertCorrectness(entry, PRODUCTS[name][0], given)

    @pytest.mark.parametrize("name", MASKED)
    def test_truth_values_are_read_as_bytes(self, name, monkeypatch):
        region, shapes, truths = MASKED[name]
        names = inspect.signature(region).parameters
        given = {n: randn(*s, dtype=torch.bfloat16, seed=i) for i, (n, s) in enumerate(zip(names, shapes, strict=True))}
        given |= {n: given[n] > 0 for n in truths}
        kernel = generate(region, list(given.values()))
        assert check_source(kernel.source) == [] and kernel.trains != ("linear" in name)
        gradient = tuple(n for n in names if n not in truths) if kernel.trains else False
        self.assertCorrectness(loaded(kernel), region, given, gradient=gradient)
        if kernel.trains:
            monkeypatch.setattr(plan, "MAX_CACHED", 64)
            monkeypatch.setattr(plan, "MAX_CACHED_BACKWARD", 64)
            self.assertCorrectness(loaded(rewritten(kernel)), region, given, gradient=gradient)
        leaves = [t.cpu().requires_grad_(kernel.trains and t.is_floating_point()) for t in given.values()]
        with recorded_launches() as launches:
            made = loaded(kernel)(*leaves)
            if kernel.trains:
                made.sum().backward()
        passed = {a.dtype for _, args in launches for a in args if isinstance(a, torch.Tensor)}
        assert torch.uint8 in passed and torch.bool not in passed

    @pytest.mark.parametrize("name", COUNTED)
    def test_integers(self, name):
        kernel, entry, region, given, gradient = counted(name, torch.bfloat16)
        assert check_source(kernel.source) == [] and kernel.trains
        self.assertCorrectness(entry, region, given, gradient=gradient)
        exact = {n: 2**24 + 1 + t if t.dtype == torch.int64 else t for n, t in given.items()}
        if name == "causal_softmax":  # integers that fp32 does not have are compared as integers
            torch.testing.assert_close(entry(**exact), region(**exact))
        wrong = {n: t.int() if t.dtype == torch.int64 else t for n, t in given.items()}
        with pytest.raises(UnsupportedError, match="dtype"):
            entry(**wrong)

    @pytest.mark.parametrize(
        "name", ["layer_norm_gelu", "eager_attention_probabilities", "norm_statistics", "normed_rotation"]
    )
    def test_rows_longer_than_a_block_holds(self, name, monkeypatch):
        cached = case(name)[0]
        monkeypatch.setattr(plan, "MAX_CACHED", 64 if cached.region.size is None else 8)
        monkeypatch.setattr(plan, "MAX_CACHED_BACKWARD", plan.MAX_CACHED)
        kernel = rewritten(cached)
        entry = loaded(kernel)
        assert "for i in range(tiles):" in kernel.source or name == "norm_statistics"
        for dtype in (torch.float32, torch.bfloat16):
            self.assertCorrectness(entry, reference(name), arguments(name, dtype), gradient=CASES[name].gradient)

    def test_longer_rows_than_the_kernels_are_for_are_refused(self):
        _, entry, _ = case("qwen3_next_l2norm")
        with pytest.raises(UnsupportedError, match="longer"):
            entry(torch.zeros(1, 20000))

    @pytest.mark.parametrize("name", ["granite_residual", "glm4_post_norm"])
    def test_strides_and_no_rows(self, name):
        _, entry, _ = case(name)
        given = arguments(name, torch.bfloat16)
        strided = {n: t.transpose(0, 1) if t.dim() == 3 else t for n, t in given.items()}
        self.assertCorrectness(entry, reference(name), strided, gradient=True)
        sliced = {n: torch.cat([t, t], -1)[..., : t.shape[-1]] if t.dim() == 3 else t for n, t in given.items()}
        self.assertCorrectness(entry, reference(name), sliced, gradient=True)
        empty = {n: t[:0] if t.dim() == 3 else t for n, t in given.items()}
        leaves = {n: t.clone().requires_grad_() for n, t in empty.items()}
        entry(**leaves).sum().backward()
        assert all(t.grad.shape == t.shape and not t.grad.any() for t in leaves.values())

    @pytest.mark.parametrize("shape", [(1, 1, 77), (5, 77), (2, 3, 4, 77)], ids=str)
    def test_other_ranks_and_sizes_than_the_examples(self, shape):
        _, entry, _ = case("glm4_post_norm")
        given = {"hidden_states": randn(*shape), "residual": randn(*shape, seed=1), "weight": randn(shape[-1], seed=2)}
        self.assertCorrectness(entry, reference("glm4_post_norm"), given, gradient=True)

    def test_rows_without_a_finite_value(self):
        _, entry, _ = case("eager_attention_probabilities")
        given = arguments("eager_attention_probabilities", torch.float32)
        given["attention_mask"][0, 0, 0] = -torch.inf
        given["attn_weights"][1, 0, 1, 3] = torch.nan
        given["attn_weights"][1, 0, 2, 3] = torch.inf
        self.assertCorrectness(entry, reference("eager_attention_probabilities"), given)

    def test_compiled_equals_eager(self):
        _, entry, _ = case("qwen3_next_rms_norm_gated")
        self.assertCompiledEqualsEager(entry, *arguments("qwen3_next_rms_norm_gated", torch.bfloat16).values())

    def test_second_derivatives_are_refused(self):
        _, entry, _ = case("qwen3_next_l2norm")
        x = randn(3, 9).requires_grad_()
        with pytest.raises(UnsupportedError, match="second"):
            torch.autograd.grad(entry(x).sum(), x, create_graph=True)

    def test_gradients_do_not_depend_on_the_run(self):
        _, entry, _ = case("qwen3_next_rms_norm_gated")
        runs = []
        for _ in range(2):
            leaves = [t.requires_grad_() for t in arguments("qwen3_next_rms_norm_gated", torch.bfloat16).values()]
            entry(*leaves).float().square().sum().backward()
            runs.append([t.grad for t in leaves])
        for first, second in zip(*runs, strict=True):
            torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["qwen3_next_rms_norm_gated", "eager_attention_probabilities", "qwen3_5_rotation"])
def test_kernels_compile_for_every_architecture(name):
    _, entry, _ = case(name)

    def call():
        leaves = [t.cpu().requires_grad_(i == 0) for i, t in enumerate(arguments(name, torch.bfloat16).values())]
        results = entry(*leaves)
        (results[0] if isinstance(results, tuple) else results).sum().backward()

    assert_launches_compile(call)


def test_kernels_of_integers_compile_for_every_architecture():
    _, entry, _, given, gradient = counted("llama_frequencies", torch.bfloat16)

    def call():
        results = entry(**{n: t.cpu().detach().requires_grad_(n in gradient) for n, t in given.items()})
        sum(r.sum() for r in (results if isinstance(results, tuple) else (results,))).backward()

    assert_launches_compile(call)


def test_matrix_products_compile_for_every_architecture():
    _, entry = product("rms_norm_linear")
    given = [product_arguments("rms_norm_linear", rows, 150, 77, torch.bfloat16) for rows in (1, 19)]
    assert_launches_compile(lambda: [entry(*(t.cpu() for t in tensors.values())) for tensors in given])


@pytest.mark.parametrize(
    "name", ["granite_residual", "qwen3_next_rms_norm_gated", "qwen3_5_rotation", "gated_mlp_half"]
)
def test_source_is_what_is_kept(name):
    kernel = product(name)[0] if name in PRODUCTS else case(name)[0]
    assert kernel.source == (GOLDEN / f"{name}.py").read_text(encoding="utf-8")


def test_sources_are_formatted_and_allowed(tmp_path):
    if shutil.which("ruff", path=sysconfig.get_path("scripts")) is None:
        pytest.skip("ruff is not installed")
    kernels = {name: case(name)[0] for name in CASES} | {name: product(name)[0] for name in PRODUCTS}
    for name, kernel in kernels.items():
        (tmp_path / f"{name}.py").write_text(kernel.source, encoding="utf-8")
        assert check_source(kernel.source) == []
    config = str(GOLDEN.parents[2] / "pyproject.toml")
    for command in (("check",), ("format", "--check")):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", config, str(tmp_path)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["granite_residual", "qwen3_next_l2norm"])
def test_variants_differ_and_compute_the_same(name):
    kernel, entry, _ = case(name)
    made = variants(kernel)
    assert made and len({v.source for v in made} | {kernel.source}) == len(made) + 1
    given = arguments(name, torch.bfloat16)
    for variant in made:
        torch.testing.assert_close(loaded(variant)(**given), entry(**given), rtol=0, atol=0)


def test_variants_of_matrix_products_differ():
    assert len(variants(product("linear_gelu")[0])) >= 6


def test_numbers_are_those_of_the_examples():
    def scale(x, factor):
        return x * factor

    kernel = generate(scale, [randn(3, 5), 0.5])
    entry = loaded(kernel)
    torch.testing.assert_close(entry(torch.ones(2, 5), 0.5), torch.full((2, 5), 0.5))
    with pytest.raises(UnsupportedError, match="number"):
        entry(torch.ones(2, 5), 0.25)


@pytest.mark.parametrize("size", [(2, 9, 64), (2, 9, 65)], ids=str)
def test_arguments_that_are_not_the_regions_are_refused(size):
    _, entry, _ = case("glm4_post_norm")
    with pytest.raises(UnsupportedError, match="shapes"):
        entry(randn(2, 9, 64), randn(*size), randn(63))
    with pytest.raises(UnsupportedError, match="dtype"):
        entry(randn(2, 9, 64), randn(2, 9, 64).bfloat16(), randn(64))


UNSUPPORTED = {
    "a sum over rows": (lambda x: x - x.mean(0, keepdim=True), [(4, 8)]),
    "a scan": (lambda x: x.cumsum(-1), [(4, 8)]),
    "rows and columns exchanged": (lambda x: x.reshape(8, 4).relu().reshape(4, 8) * 2.0, [(4, 8)]),
    "the number of rows as a number": (lambda x: x / x.shape[0], [(4, 8)]),
    "two matrix products in a row": (lambda x, a, b: F.linear(F.linear(x, a), b), [(4, 8), (8, 8), (8, 8)]),
    "a reduction behind a matrix product": (lambda x, a: F.softmax(F.linear(x, a), -1), [(4, 8), (6, 8)]),
    "parts beside a matrix product": (lambda x, a: F.linear(torch.cat((x, -x), -1), a), [(4, 8), (6, 16)]),
    "parts along rows": (lambda x, y: torch.cat((x, y), 0) * 2.0, [(4, 8), (4, 8)]),
    "a reduction of a part": (lambda x: torch.cat((x[..., :4], x - x[..., 4:].mean(-1, keepdim=True)), -1), [(4, 8)]),
    "rows counted by a statistic": (
        lambda x, s: torch.cat((x[..., 4:], x[..., :4]), -1) * s[..., None] / x.shape[1],
        [(2, 5, 8), (2, 5)],
    ),
    "a random number": (lambda x: x * torch.rand_like(x), [(4, 8)]),
}


OF_INTEGERS = {
    "a quotient that is rounded": lambda x, counts: x * (counts // 2),
    "a sum": lambda x, counts: x + counts.sum(-1, keepdim=True),
    "bits": lambda x, counts: torch.where((counts & 1) == 1, x, 0.0),
    "a truth value as a number": lambda x, counts: x * (counts > 3).long(),
    "two widths": lambda x, counts: x * (counts.int() + counts),
}


@pytest.mark.parametrize("what", OF_INTEGERS)
def test_what_integers_are_not_used_for_is_said(what):
    with pytest.raises(Unsupported):
        generate(OF_INTEGERS[what], [randn(4, 8), torch.arange(32).reshape(4, 8).to(device())], "region")


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_is_not_served_is_said(what):
    region, shapes = UNSUPPORTED[what]
    with pytest.raises(Unsupported):
        generate(region, [randn(*s) for s in shapes], "region")


def test_one_tensor_may_be_the_example_of_two_inputs():
    x = randn(3, 9)
    given = {"hidden_states": randn(5, 9), "residual": randn(5, 9, seed=1)}
    kernel = generate(CASES["granite_residual"].make(N), [x, x])
    PyTestCase().assertCorrectness(loaded(kernel), CASES["granite_residual"].make(N), given, gradient=True)


def test_exported_programs_are_read():
    x = randn(3, 9, dtype=torch.bfloat16)

    class Region(torch.nn.Module):
        def forward(self, x, y):
            return x + torch.tanh(y)

    program = torch.export.export(Region(), (x, x.clone()))
    kernel = generate(program, [x, x], "add_tanh")
    assert kernel.entry_point == "add_tanh" and torch.bfloat16 in kernel.dtypes
    PyTestCase().assertCorrectness(
        loaded(kernel),
        Region(),
        {"x": randn(5, 9, dtype=torch.bfloat16), "y": randn(5, 9, dtype=torch.bfloat16, seed=1)},
    )

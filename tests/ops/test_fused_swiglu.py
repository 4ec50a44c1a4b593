import copy
from types import SimpleNamespace

import pytest
import torch
from common import HAS_GPU
from common import PyTestCase
from common import device
from common import dtypes
from common import gpu
from common import randn
from common import recorded_launches
from common import sanitized
from torch.nn.modules.module import register_module_forward_hook

from tilegym.backend import get_available_backends
from tilegym.backend import use_backend
from tilegym.ops import get_fused_swiglu_module
from tilegym.ops import get_swiglu_module

NAMES = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
every_backend = pytest.mark.parametrize("backend", get_available_backends())


def make_config(bias=False, hidden=24, intermediate=40):
    return SimpleNamespace(hidden_size=hidden, intermediate_size=intermediate, hidden_act="silu", mlp_bias=bias)


def make(dtype=torch.float32, **config):
    torch.manual_seed(0)
    return get_fused_swiglu_module()(make_config(**config)).to(device(), dtype)


def plain_copy(mlp):
    """The same MLP with its projections one by one."""
    plain = get_swiglu_module()(mlp.config).to(device(), mlp.gate_proj.weight.dtype)
    plain.load_state_dict(mlp.state_dict())
    return plain


def shares_storage(mlp):
    gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    return gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()


class Test_FusedSwiGLU(PyTestCase):
    @every_backend
    @dtypes(torch.float32, torch.bfloat16)
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("shape", [(1, 24), (2, 9, 24), (0, 24)], ids=str)
    def test_forward_and_gradients(self, backend, dtype, bias, shape):
        mlp = make(dtype, bias=bias)
        plain = plain_copy(mlp)
        results = []
        for module in (mlp, plain):
            x = randn(*shape, dtype=dtype).requires_grad_()
            with use_backend(backend), sanitized():
                y = module(x)
                gradients = torch.autograd.grad(y, [x, *module.parameters()], randn(*shape, dtype=dtype, seed=5))
            results.append((y, *gradients))
        assert shares_storage(mlp)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)

    @pytest.mark.skipif(HAS_GPU, reason="records launches on the CPU")
    @pytest.mark.parametrize("tokens", [1, 20])
    def test_three_launches(self, tokens):
        mlp = make()
        with use_backend("cutile"), torch.no_grad(), recorded_launches(run=True) as launches:
            mlp(randn(tokens, 24))
        assert len(launches) == 3, "gate and up, the activation, down"

    def test_names_and_state_dict_stay(self):
        mlp = make()
        assert [name for name, _ in mlp.named_parameters()] == NAMES
        assert list(mlp.state_dict()) == NAMES
        other = make()
        other(randn(1, 24))  # on a GPU: after the move there took the weights apart
        other.load_state_dict({name: torch.full_like(value, 0.1) for name, value in mlp.state_dict().items()})
        assert shares_storage(other)
        assert torch.equal(other.up_proj.weight, torch.full_like(other.up_proj.weight, 0.1))

    def test_one_copy_of_the_weights(self):
        mlp = make(intermediate=400)
        mlp(randn(3, 24))
        weight = mlp.gate_proj.weight
        assert weight.untyped_storage().nbytes() == 2 * weight.nbytes

    @pytest.mark.parametrize(
        "change",
        [
            lambda mlp: mlp.to(torch.bfloat16).to(torch.float32),
            copy.deepcopy,
            lambda mlp: mlp.load_state_dict({k: v.clone() for k, v in mlp.state_dict().items()}, assign=True) and mlp,
            lambda mlp: setattr(mlp.up_proj, "weight", torch.nn.Parameter(mlp.up_proj.weight.clone())) or mlp,
        ],
        ids=["moved", "copied", "assigned", "replaced"],
    )
    def test_weights_that_were_moved_apart(self, change):
        mlp = change(make())
        x = randn(3, 24)
        expected = plain_copy(mlp)(x)
        torch.testing.assert_close(mlp(x), expected)
        with torch.no_grad():
            mlp.up_proj.weight *= 2  # as an optimizer does, in place
        torch.testing.assert_close(mlp(x), expected * 2)

    @pytest.mark.parametrize(
        "change",
        [
            lambda mlp: mlp.to(torch.bfloat16),
            copy.deepcopy,
            lambda mlp: mlp.load_state_dict({k: v.clone() for k, v in mlp.state_dict().items()}, assign=True) and mlp,
        ],
        ids=["moved", "copied", "assigned"],
    )
    def test_joined_again(self, change):
        used = make()
        used(randn(3, 24))  # from here on it takes its weights to be joined
        mlp = change(used)
        assert not shares_storage(mlp)
        mlp(randn(3, 24, dtype=mlp.gate_proj.weight.dtype))
        assert shares_storage(mlp)

    def test_from_meta(self):
        """As from_pretrained builds models: without memory first, parameters assigned then."""
        source = make()
        with torch.device("meta"):
            mlp = get_fused_swiglu_module()(make_config())
        mlp.load_state_dict({k: v.clone() for k, v in source.state_dict().items()}, assign=True)
        torch.testing.assert_close(mlp(randn(3, 24)), source(randn(3, 24)))
        assert shares_storage(mlp)

    def test_adapters_and_hooks_are_called(self):
        mlp, x = make(), randn(3, 24)
        calls = []
        handle = mlp.up_proj.register_forward_hook(lambda *_: calls.append("up"))
        expected = mlp(x)
        handle.remove()
        assert calls == ["up"]
        torch.testing.assert_close(mlp(x), expected)

        class Doubled(torch.nn.Linear):
            def forward(self, x):
                return 2 * super().forward(x)

        mlp.up_proj.__class__ = Doubled
        torch.testing.assert_close(mlp(x), 2 * expected)

    @every_backend
    @pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
    @pytest.mark.parametrize(
        "hook",
        [
            lambda m, seen: m.register_full_backward_hook(lambda *_: seen.append(1)),
            lambda m, seen: m.register_full_backward_pre_hook(lambda *_: seen.append(1)),
            lambda m, seen: register_module_forward_hook(lambda called, *_: seen.append(1) if called is m else None),
            lambda m, seen: setattr(m, "forward", lambda x: seen.append(1) or torch.nn.Linear.forward(m, x)),
        ],
        ids=["backward", "backward, before", "of all modules", "forward"],
    )
    def test_every_hook_is_called(self, backend, name, hook):
        mlp, seen = make(), []
        handle = hook(getattr(mlp, name), seen)
        with use_backend(backend):
            mlp(randn(3, 24).requires_grad_()).sum().backward()
        if handle is not None:
            handle.remove()
        assert seen == [1]

    def test_second_derivatives_are_pytorchs(self):
        mlp, x = make(), randn(3, 24).requires_grad_()
        seconds = []
        for module in (mlp, plain_copy(mlp)):
            with use_backend("pytorch"):
                (first,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
                seconds.append(torch.autograd.grad(first.square().sum(), x))
        torch.testing.assert_close(*seconds)

    def test_weights_are_saved(self, tmp_path):
        safetensors = pytest.importorskip("safetensors.torch")
        mlp = make()
        safetensors.save_file(mlp.state_dict(), tmp_path / "mlp")
        torch.testing.assert_close(safetensors.load_file(tmp_path / "mlp", device()), dict(mlp.state_dict()))

    def test_autocast(self):
        mlp = make()
        with torch.autocast(device(), torch.bfloat16):
            y = mlp(randn(3, 24))
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), mlp(randn(3, 24)), rtol=3e-2, atol=3e-2)

    def test_frozen_weights(self):
        mlp = make().requires_grad_(False)
        x = randn(3, 24).requires_grad_()
        torch.testing.assert_close(
            torch.autograd.grad(mlp(x).sum(), x), torch.autograd.grad(plain_copy(mlp)(x).sum(), x)
        )

    @every_backend
    def test_compiled(self, backend):
        mlp = make()
        with use_backend(backend):
            self.assertCompiledEqualsEager(lambda x: mlp(x * 2).sin(), randn(5, 24))

    def test_compiled_notices_new_weights(self):
        mlp, x = make(), randn(5, 24)
        torch.compiler.reset()
        compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            compiled(x)
            mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight * 3)
            torch.testing.assert_close(compiled(x), plain_copy(mlp)(x))

    @every_backend
    @pytest.mark.parametrize("compiled", [False, True])
    def test_transforms(self, backend, compiled):
        """The gradients of each of several samples."""
        mlp, samples = make(), randn(3, 5, 24)
        weights = {name: weight.detach() for name, weight in mlp.named_parameters()}

        def loss(weights, x):
            return torch.func.functional_call(mlp, weights, x).square().sum()

        step = torch.func.vmap(torch.func.grad(loss), (None, 0))
        with use_backend(backend):
            torch.compiler.reset()
            gradients = (torch.compile(step, backend="aot_eager") if compiled else step)(weights, samples)
            for i, x in enumerate(samples):
                expected = torch.autograd.grad(mlp(x).square().sum(), list(mlp.parameters()))
                for weight, gradient in zip(weights, expected, strict=True):
                    torch.testing.assert_close(gradients[weight][i], gradient, rtol=1e-4, atol=1e-4)

    def test_another_activation(self):
        config = make_config()
        config.hidden_act = "gelu"
        with pytest.raises(ValueError, match="hidden_act is 'gelu'"):
            get_fused_swiglu_module()(config)

    @gpu
    def test_graph_capture(self):
        mlp = make(torch.bfloat16, hidden=4096, intermediate=14336).requires_grad_(False)
        self.assertCaptures(mlp, randn(1, 4096, dtype=torch.bfloat16))

"""The primitives of tilegym.transformers.patching, on classes and modules made for the purpose."""

import copy
import functools
import io
import itertools
import pickle
import sys
import types
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from tiny_models import make_model
from tiny_models import tokens
from torch import nn

import tilegym
from tilegym.errors import PatchError
from tilegym.transformers import monkey_patch
from tilegym.transformers.forwards import is_bound
from tilegym.transformers.forwards import reproducible
from tilegym.transformers.forwards import with_globals
from tilegym.transformers.patching import Entry
from tilegym.transformers.patching import PatchSet

ENTRY = Entry("somewhere", "something", "pytorch")


def scale(x):
    return 2 * x


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return scale(x) * self.weight


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Scaled()
        self.second = Scaled()

    def forward(self, x):
        return self.second(self.first(x))


def plus_one(self, x):
    return x * self.weight + 1


@reproducible
def plus(n):
    def forward(self, x):
        return x * self.weight + n

    return forward


@pytest.fixture
def module():
    """A Python module of its own, with a class and a function."""
    made = types.ModuleType("made_for_test")
    made.Thing = type("Thing", (), {"method": lambda self: "old"})
    made.function = lambda: "old"
    made.number = 3
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def test_replace_class(module):
    old, new = module.Thing, type("NewThing", (), {})
    patches = PatchSet()
    assert patches.replace_class("made_for_test", "Thing", new, ENTRY)
    assert module.Thing is new
    assert patches.patched == [ENTRY]
    patches.revert()
    assert module.Thing is old


def test_replace_function(module):
    old = module.function
    with PatchSet() as patches:
        assert patches.replace_function(module, "function", lambda: "new", ENTRY)
        assert module.function() == "new"
    assert module.function is old


@pytest.mark.parametrize("name", ["missing", "number"])
@pytest.mark.parametrize("primitive", ["replace_class", "replace_function"])
def test_a_global_that_is_not_there_is_an_error(module, primitive, name):
    patches = PatchSet()
    with pytest.raises(PatchError, match=f"made_for_test has no .* {name!r}"):
        getattr(patches, primitive)(module, name, Scaled, ENTRY)
    assert not PatchSet.active()


def test_replace_method_own_and_inherited():
    class Base:
        def method(self):
            return "old"

    class Derived(Base):
        pass

    patches = PatchSet()
    patches.replace_method(Derived, "method", lambda self: "new", ENTRY)
    assert Derived().method() == "new" and Base().method() == "old"
    patches.replace_method(Base, "method", lambda self: "base", ENTRY)
    assert Base().method() == "base"
    patches.revert()
    assert Derived().method() == Base().method() == "old"
    assert "method" not in vars(Derived)
    with pytest.raises(PatchError, match="has no method 'other'"):
        patches.replace_method(Base, "other", scale, ENTRY)


def test_replace_forward_of_one_instance():
    net, x = Net(), torch.ones(3)
    before = str(net), list(net.state_dict()), net(x)
    patches = PatchSet(net)
    assert patches.replace_forward(net.first, plus_one, ENTRY)
    assert torch.equal(net.first(x), x + 1) and torch.equal(net.second(x), 2 * x)
    assert (str(net), list(net.state_dict())) == before[:2]
    assert isinstance(net.first, Scaled) and type(net.first) is Scaled
    patches.revert()
    assert torch.equal(net(x), before[2])
    assert "forward" not in vars(net.first) and not PatchSet.active(net)
    assert vars(net).keys() == vars(Net()).keys()


def test_hooks_of_a_patched_instance_run():
    net, seen = Net(), []
    net.first.register_forward_hook(lambda module, args, output: seen.append(output))
    with PatchSet(net) as patches:
        patches.replace_forward(net.first, plus_one, ENTRY)
        net(torch.ones(3))
    assert torch.equal(seen[0], torch.full((3,), 2.0))


def test_patching_twice_changes_nothing():
    net = Net()
    first, second = PatchSet(net), PatchSet(net)
    assert first.replace_forward(net.first, plus_one, ENTRY)
    assert not second.replace_forward(net.first, plus_one, ENTRY)
    assert second.skipped[0].why == "already patched" and not second.patched
    second.require_match("the net")  # being patched already counts as a match
    second.revert()
    assert torch.equal(net.first(torch.ones(3)), torch.full((3,), 2.0))
    first.revert()
    first.revert()  # nothing left to do
    assert "forward" not in vars(net.first)
    assert first.replace_forward(net.first, plus_one, ENTRY)  # and it can be patched again


def test_a_set_that_has_been_reverted_cannot_be_entered():
    net = Net()
    with PatchSet(net) as patches:
        patches.replace_forward(net.first, plus_one, ENTRY)
        patches.revert()  # and once more at the end, which does nothing
    with pytest.raises(PatchError, match="have been reverted: patch again"), patches:
        pass
    patches.replace_forward(net.first, plus_one, ENTRY)
    with patches:
        assert "forward" in vars(net.first)
    assert "forward" not in vars(net.first)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: monkey_patch.apply_tilegym_kernel_to_llama(model),
        lambda model: monkey_patch.apply_tilegym_kernel_to_llama(model=model, swiglu="no"),
        lambda model: monkey_patch.apply(model, "cutile"),
        lambda model: monkey_patch.apply(model, rms_norm=None),
        lambda model: tilegym.apply(model, by_hand=False, rope=0),
    ],
    ids=["a model in front", "a text", "a backend", "None", "0"],
)
def test_a_flag_that_is_neither_true_nor_false_is_an_error(call):
    model = make_model("llama")
    with pytest.raises(TypeError, match="apply.*: .* takes True or False, not") as error:
        call(model)
    assert ("give a model as model=" in str(error.value)) == ("rope takes True or False, not Llama" in str(error.value))
    assert not PatchSet.active() and not PatchSet.active(model)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_patches_on_one_target_revert_in_any_order(order):
    net, x = Net(), torch.ones(3)
    sets = PatchSet(net), PatchSet(net)
    for patches, n in zip(sets, (1, 10), strict=True):
        patches.replace_forward(net.first, plus(n), ENTRY)
    sets[order[0]].revert()
    assert torch.equal(net.first(x), x + (10 if order[0] == 0 else 1))
    sets[order[1]].revert()
    assert torch.equal(net.first(x), 2 * x)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_same_patch_below_and_above_another_one(order):
    net, x = Net(), torch.ones(3)
    sets = PatchSet(net), PatchSet(net), PatchSet(net)
    for patches, n in zip(sets, (1, 10, 1), strict=True):
        patches.replace_forward(net.first, plus(n), ENTRY)
    for count, i in enumerate(order, 1):
        sets[i].revert()
        left = [n for j, n in enumerate((1, 10, 1)) if j not in order[:count]]
        assert torch.equal(net.first(x), x + left[-1] if left else 2 * x)
    assert "forward" not in vars(net.first)


def test_what_others_have_replaced_since_is_left_alone_and_said():
    net, x = Net(), torch.ones(3)
    patches = PatchSet(net)
    patches.replace_forward(net.first, plus_one, ENTRY)
    patches.replace_forward(net.second, plus_one, ENTRY)
    net.first.forward = lambda x: 5 * x
    with pytest.raises(PatchError, match="Scaled.forward"):
        patches.revert()
    assert torch.equal(net.first(x), 5 * x) and torch.equal(net.second(x), 2 * x)


def test_an_exception_half_way_leaves_nothing(module):
    net, patches, old = Net(), PatchSet(), module.function
    with pytest.raises(KeyError), patches.all_or_nothing():
        patches.replace_function(module, "function", scale, ENTRY)
        patches.replace_forward(net.first, plus_one, ENTRY)
        raise KeyError
    assert module.function is old and "forward" not in vars(net.first) and not PatchSet.active()


def test_an_interrupt_right_behind_a_change_leaves_nothing():
    class Interrupted(Scaled):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "forward":
                raise KeyboardInterrupt

    layer, patches = Interrupted(), PatchSet()
    with pytest.raises(KeyboardInterrupt), patches.all_or_nothing():
        patches.replace_forward(layer, plus_one, ENTRY)
    assert "forward" not in vars(layer) and not PatchSet.active()


def test_a_forward_put_there_by_others_is_skipped():
    net, patches = Net(), PatchSet()
    net.first.forward = functools.partial(plus_one, net.first)
    assert not patches.replace_forward(net.first, scale, ENTRY)
    assert "has been replaced already, by" in patches.skipped[0].why and "plus_one" in patches.skipped[0].why
    with pytest.raises(PatchError, match="nothing was patched in the net: something at somewhere: its forward has"):
        patches.require_match("the net")


def _pickled(net):
    return pickle.loads(pickle.dumps(net))


def _saved(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _sent(net):
    """To another process, as multiprocessing does it."""
    sent = pickle.loads(ForkingPickler.dumps(net))
    for parameter in sent.parameters():
        parameter.data = parameter.data.clone()  # which both processes hold
    return sent


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _saved, _sent])
def test_a_copy_runs_the_patch_on_its_own_weights(copied):
    net, x = Net(), torch.ones(3)
    patches = PatchSet(net)
    patches.replace_forward(net.first, plus(1), ENTRY)
    patches.replace_forward(net.second, with_globals(Scaled.forward, (("scale", plus_one),)), ENTRY)
    other = copied(net)
    assert other.first.forward.__self__ is other.first and is_bound(other.second.forward)
    with torch.no_grad():
        other.first.weight.fill_(7)
    assert torch.equal(other.first(x), 7 * x + 1) and torch.equal(net.first(x), x + 1)
    patches.revert()
    assert torch.equal(other.first(x), 7 * x + 1)  # the copy's patch is its own
    PatchSet.active(other)[0].revert()
    assert torch.equal(other.first(x), 14 * x) and torch.equal(net.first(x), 2 * x)


def test_a_patched_model_goes_through_cloudpickle():
    """As Ray sends it: functions by value, which therefore hold nothing that cannot be pickled."""
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    model, ids = make_model("llama"), tokens(2, 8)
    plain = model(ids).logits
    tilegym.apply(model)
    sent = pickle.loads(cloudpickle.dumps(model))
    assert torch.equal(sent(ids).logits, model(ids).logits)
    assert is_bound(sent.model.norm.forward) and sent.model.norm.forward.__self__ is sent.model.norm
    for patches in PatchSet.active(sent):
        patches.revert()
    assert torch.equal(sent(ids).logits, plain)


def test_methods_of_others_are_pickled_as_ever():
    net = Net()
    for dump in (pickle.dumps, ForkingPickler.dumps):
        method = pickle.loads(dump(net.first.forward))
        assert method.__func__ is Scaled.forward and method.__self__ is not net.first


def test_what_wraps_a_patch_is_not_the_patch():
    """As accelerate wraps forwards: with all attributes of the function."""
    net = Net()
    PatchSet(net).replace_forward(net.first, plus(1), ENTRY)
    wrapped = functools.wraps(net.first.forward.__func__)(lambda self, x: x)
    assert is_bound(net.first.forward) and not is_bound(types.MethodType(wrapped, net.first))


def test_compiled_modules_share_code_if_they_compute_the_same():
    """torch.compile makes code once for modules of one patch, and again for one of another option of that."""
    nets, graphs, x = [Net() for _ in range(3)], [], torch.ones(3)

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for net, n in zip(nets, (1, 1, 2), strict=True):
        PatchSet(net).replace_forward(net.first, plus(n), ENTRY)
        net.compile(backend=backend)
    assert [net(x)[0].item() for net in nets] == [4.0, 4.0, 6.0]
    assert len(graphs) == 2


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled, _saved])
def test_two_patches_of_a_copy_revert_in_any_order(copied, first):
    net, x = Net(), torch.ones(3)
    for n in (1, 10):
        PatchSet(net).replace_forward(net.first, plus(n), ENTRY)
    other = copied(net)
    sets = PatchSet.active(other)
    sets[first].revert()
    assert torch.equal(other.first(x), x + (10 if first == 0 else 1)) and torch.equal(net.first(x), x + 10)
    sets[1 - first].revert()
    assert torch.equal(other.first(x), 2 * x) and torch.equal(net.first(x), x + 10)


def _decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs) + 100

    return wrapper


class Derived(Scaled):
    @_decorated
    def forward(self, x, *, factor=3):
        return super().forward(x) + (lambda: scale(x))() * factor


def test_with_globals_sees_through_decorators_super_and_nested_functions():
    layer, x = Derived(), torch.ones(3)
    new = with_globals(Derived.forward, (("scale", lambda x: 10 * x),))
    # super().forward is another function and keeps its own globals
    assert torch.equal(new(layer, x), torch.full((3,), 2.0 + 30 + 100))
    assert torch.equal(new(layer, x, factor=1), torch.full((3,), 2.0 + 10 + 100))
    assert torch.equal(layer(x), torch.full((3,), 2.0 + 6 + 100))
    assert new.__qualname__ == "Derived.forward" and new.__wrapped__ is Derived.forward.__wrapped__


def test_with_globals_refuses_a_function_that_does_not_use_them():
    with pytest.raises(PatchError, match="plus_one does not use the global scale"):
        with_globals(plus_one, (("scale", abs),))


def test_register_attention_and_take_it_back():
    transformers = pytest.importorskip("transformers")

    def function(*args):
        raise NotImplementedError

    tables = transformers.AttentionInterface._global_mapping, transformers.AttentionMaskInterface._global_mapping
    before = [dict(table) for table in tables]
    with PatchSet() as patches:
        assert patches.register_attention("sdpa", function, function, ENTRY)
        assert patches.register_attention("new", function, function, ENTRY)
        assert not patches.register_attention("new", function, function, ENTRY)
        assert [table["sdpa"] for table in tables] == [table["new"] for table in tables] == [function, function]
    assert [dict(table) for table in tables] == before


def test_the_report_is_a_table_with_layers_on_one_line():
    patches = PatchSet()
    assert str(patches) == "nothing patched"
    for layer in range(3):
        patches.patched.append(Entry(f"model.layers.{layer}.mlp", "swiglu", "cutile"))
    patches.skip(Entry("model.norm", "rms_norm", "cutile"), "it is odd")
    header, patched, skipped = str(patches).splitlines()
    assert header.split() == ["modules", "compute", "backend", "count", "why"]
    assert patched.split() == ["patched", "model.layers.*.mlp", "swiglu", "cutile", "3"]
    assert skipped.split() == ["skipped", "model.norm", "rms_norm", "cutile", "1", "it", "is", "odd"]

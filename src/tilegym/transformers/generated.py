"""Finds the patches that ``tilegym integrate`` has written: in this package, and in folders that are registered."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from torch import nn

from tilegym.errors import PatchError
from tilegym.transformers.family import model_in
from tilegym.transformers.patching import PatchSet

_folders: dict[str, Path] = {}


def register(folder: str | Path) -> Callable[..., PatchSet]:
    """Makes the patches in a folder that ``tilegym integrate`` has written known to ``monkey_patch.apply``.

    Returns:
        The folder's ``apply_tilegym_kernel_to_<family>``.

    Raises:
        PatchError: there are no such patches in it.
    """
    folder = Path(folder).resolve()
    module = _load(folder)
    _folders[module.MODEL_TYPE] = folder
    return _aggregate(module)


def find(model_type: str) -> Callable[..., PatchSet] | None:
    """The generated ``apply_tilegym_kernel_to_<family>`` of a model type: a registered folder's, or the package's."""
    if model_type in _folders:
        return _aggregate(_load(_folders[model_type]))
    name = f"{__package__}.{model_type.replace('-', '_')}"
    if not model_type.replace("-", "_").isidentifier() or importlib.util.find_spec(name) is None:
        return None
    module = importlib.import_module(name)
    return _aggregate(module) if getattr(module, "MODEL_TYPE", None) == model_type else None


def apply_all(
    model: nn.Module | None, wanted: dict[Callable[..., PatchSet], bool], use_cutile: bool, maker: str
) -> PatchSet:
    """Applies the generated patches that are wanted, all or none of them, as one set.

    Raises:
        PatchError: there is no model, or nothing in it could be patched.
    """
    if model is None:
        raise PatchError("generated patches are for one loaded model: pass model=")
    from tilegym.transformers import first_call

    model = model_in(model)
    patches = PatchSet(model, maker=maker)
    with patches.all_or_nothing():
        for patch, chosen in wanted.items():
            if chosen:
                patch(model, use_cutile, patches)
        patches.require_match(type(model).__name__)
        first_call.put(patches, model)
    return patches


def _aggregate(module: ModuleType) -> Callable[..., PatchSet]:
    return next(f for name, f in vars(module).items() if name.startswith("apply_tilegym_kernel_to_"))


def _load(folder: Path) -> ModuleType:
    """The package in ``folder``, whatever the folder is called."""
    name = f"tilegym_generated_{folder.name.replace('-', '_')}_{abs(hash(str(folder))):x}"
    if name in sys.modules:
        return sys.modules[name]
    file = folder / "__init__.py"
    if not file.is_file():
        raise PatchError(f"{folder} holds no patches: give a folder that `tilegym integrate` has written")
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[str(folder)])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    if not hasattr(module, "MODEL_TYPE"):
        del sys.modules[name]
        raise PatchError(f"{folder} holds no patches: give a folder that `tilegym integrate` has written")
    return module

"""What tensors take while a call runs, counted on a CPU."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors that were made within the block and are still there; ``peak`` is the most."""

    def __init__(self):
        super().__init__()
        self._storages, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in before:
                self._storages[key] = StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, self.now())
        return out

    def now(self):
        """The bytes that are there."""
        self._storages = {key: held for key, held in self._storages.items() if not held[0].expired()}
        return sum(size for _, size in self._storages.values())

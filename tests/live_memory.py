"""Count the bytes of live tensors on a machine whose allocator has no statistics."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts every storage once, from the operation that returns it until it is freed.

    Temporary memory within an operation is not seen. `bytes` is the size of the live storages,
    `peak` its maximum since it was last set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: set[int] = set()

    def add(self, *tensors: Tensor) -> None:
        """Count existing tensors."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self.bytes += size
                weakref.finalize(storage, self._forget, key, size)
        self.peak = max(self.peak, self.bytes)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.add(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)))
        return result

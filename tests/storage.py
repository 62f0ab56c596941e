"""How many bytes of tensors live at once, counted from outside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Follows the storages of all tensors that come out of an operation while the `with` lasts.

    Those of `before`, which were there already, do not count: a view of a weight takes nothing.
    """

    def __init__(self, before: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.bytes = 0
        self._before = {tensor.untyped_storage()._cdata for tensor in before}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._alive = {key: seen for key, seen in self._alive.items() if not seen[0].expired()}
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in self._before:
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.bytes = max(self.bytes, sum(size for _, size in self._alive.values()))
        return output

"""How many bytes of tensors live at once, counted from outside, and how many a fold of a sequence should take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def expected_peak(*, n: int, c: int, f: int, d: int, L: int, V: int) -> int:
    """Bytes above the model that `fold_sequence` takes at its peak: the formula of `docs/numerics.md`.

    For `n` solved positions, at most d, behind `c` context tokens, in float32, at sites `output`, where no norm follows
    the MLP. Numbers of a solve have eight bytes, those of a forward, of a patch and of logits four.
    """
    patch = 4 * L * n * (d + f)
    solve = 32 * n * f + 80 * n * d + 16 * n * n + 12 * (c + n) * d
    return patch + max(solve, 4 * d * f, 4 * n * V)


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

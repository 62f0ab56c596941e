"""A device that is not there: tensors that say they lie on a GPU, and are handled as if they did.

Every tensor of a `Machine` is an ordinary one in memory, and a note says where it is meant to lie. Every call from
Python is seen. It is refused where it brings tensors of both devices together, as PyTorch would on a GPU, or reads the
memory of the device; where the host waits for a value from there, that is counted, by place. What PyTorch does inside a
call is not seen, and neither are kernels: this finds code that forgets the device, and says nothing of its numbers.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

HERE, THERE = torch.device("cpu"), torch.device("cuda", 0)

WAITS = {"item", "tolist", "nonzero", "masked_select", "unique", "equal", "allclose",
         "__bool__", "__float__", "__int__", "__index__"}  # fmt: skip
"""Calls whose answer the host has to wait for."""

ACROSS = {"copy_", "__getitem__", "__setitem__", "index_put_", "data.__set__", "_has_compatible_shallow_copy_type"}
"""Calls that may be given tensors of both devices: copies, and an index from the host."""

NORMS = {"linalg_norm", "linalg_vector_norm", "linalg_matrix_norm"}
"""Of the calls that begin like those that factor a matrix, the ones that do not."""


class Machine(TorchFunctionMode):
    """Within it, `cuda` is a device like any other; `waits` counts by file and line.

    `capability`: that of the device, in CUDA's numbers. `solves` counts what is factored in float64, by where.
    """

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        super().__init__()
        self.capability = capability
        self.solves: Counter[torch.device] = Counter()
        self._there: dict[int, bool | None] = {}
        """By the address of its memory, whether a tensor is on the device; None where nobody can tell."""
        self.waits: Counter[str] = Counter()

    def __enter__(self) -> Machine:
        self._real = torch.cuda.get_device_capability
        torch.cuda.get_device_capability = lambda device=None: self.capability
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        torch.cuda.get_device_capability = self._real
        super().__exit__(*raised)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = _name(func)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = any(self.is_there(t) for t in tensors)
        if name in ("device.__get__", "is_cuda.__get__"):
            return (THERE if there else HERE) if name.startswith("device") else there
        if name == "to" or name == "cpu" or name == "cuda":
            return self._moved(func, name, args, kwargs, there)
        if name == "__deepcopy__":  # what was copied before comes with it
            return self._noted(func(*args, **kwargs), self.is_there(args[0]), tensors)
        if "device" in kwargs:
            asked = kwargs.pop("device")
            there = there if asked is None else _is_there(asked)
            return self._noted(func(*args, **kwargs), there, tensors)
        if name.startswith(("linalg_", "cholesky")) and name not in NORMS and tensors[0].dtype == torch.float64:
            self.solves[THERE if there else HERE] += 1
        self._check(name, tensors, args, there)
        return self._noted(func(*args, **kwargs), there, tensors)

    def is_there(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return bool(self._there.get(tensor.untyped_storage().data_ptr(), False)) if tensor.numel() else False

    def _is_here(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return tensor.numel() > 0 and self._there.get(tensor.untyped_storage().data_ptr(), False) is False

    def _moved(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], there: bool) -> Any:
        source, *rest = args
        there = self.is_there(source)
        wanted, kept = (name == "cuda") if name != "to" else there, []
        for value in rest if name == "to" else ():
            if isinstance(value, torch.device | str | int) and not isinstance(value, bool):
                wanted = _is_there(value)
            elif isinstance(value, Tensor):
                wanted = self.is_there(value)
                kept.append(value.dtype)
            elif isinstance(value, torch.dtype):
                kept.append(value)
        asked = kwargs.pop("device", None)
        wanted = wanted if asked is None else _is_there(asked)
        if wanted == there:
            moved = source.to(*kept, **kwargs) if kept or kwargs else source
        else:
            if there:
                self._wait()
            moved = source.to(*kept, **{**kwargs, "copy": True})
        return self._noted(moved, wanted, [])

    def _check(self, name: str, tensors: list[Tensor], args: Any, there: bool) -> None:
        if not there:
            return
        if name == "numpy":
            raise TypeError("can't convert a tensor of the device to numpy; use Tensor.cpu() first")
        if name in WAITS or (name == "__getitem__" and _masked(args)):
            self._wait()
        if name in ACROSS:
            if name == "__getitem__" and not self.is_there(args[0]):
                raise RuntimeError("indices should be on the same device as the indexed tensor, or on the host")
            return
        if any(t.dim() and self._is_here(t) for t in tensors):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")

    def _noted(self, result: Any, there: bool, given: list[Tensor]) -> Any:
        with torch._C.DisableTorchFunction():
            known = {t.untyped_storage().data_ptr() for t in given if t.numel()}
            empty = bool(given) and not known  # what comes of tensors without entries lies where those do
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.numel():
                    pointer = leaf.untyped_storage().data_ptr()
                    if pointer not in known:
                        self._there[pointer] = None if empty else there
        return result

    def _wait(self) -> None:
        for frame in _frames():
            if "/contextfold/" in frame.f_code.co_filename:
                self.waits[f"{frame.f_code.co_filename.rpartition('/contextfold/')[2]}:{frame.f_lineno}"] += 1
                return


def _frames() -> Iterator[Any]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _name(func: Any) -> str:
    name: str = func.__name__
    return f"{func.__self__.__name__}.{name}" if name in ("__get__", "__set__") else name


def _is_there(device: Any) -> bool:
    return torch.device(device).type == "cuda"


def _masked(args: Any) -> bool:
    return any(isinstance(t, Tensor) and t.dtype == torch.bool for t in tree_leaves(args[1:]))

"""Record one call of a decoder layer at operator level, and replay it with changes.

Every linear operation that multiplies an activation by a parameter is a *step*. Parameters are recognised by the
storage that they live in, also through views, casts and the gathering of experts. In a replay any step's result can be
replaced, so it can be asked which steps read which, with everything else held still.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from contextfold.anatomy.block import first_output
from contextfold.anatomy.discover.values import TOLERANCE

__all__ = ["LayerCall", "Passing", "Step", "Tape"]

LINEAR = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "linear", "convolution", "_grouped_mm", "_addmm_activation"}
)
"""Operators that multiply by a weight."""

Hook = torch.utils.hooks.RemovableHandle

Replace = Callable[[int, Tensor], Tensor]
"""Given the index of a step and its result, the result to go on with."""


@dataclass(frozen=True, eq=False)
class Step:
    """One linear operation: `result = read · parameter`."""

    parameters: tuple[str, ...]
    """Dotted names inside the layer."""
    read: Tensor
    result: Tensor
    weight: torch.Size
    """Shape of the weight that was read, which may be a slice of the parameter."""


@dataclass(frozen=True, eq=False)
class Passing:
    """One call of a module of the layer: what it was called on and what it gave."""

    module: str
    given: Tensor
    result: Tensor
    plain: bool
    """Called on one floating-point tensor, and no integers (an expert is called with indices, a branch is not)."""
    started: int
    """Place in the order in which calls began; `passings` are in the order in which they ended."""


@dataclass(eq=False)
class Tape:
    """Everything that one call of a layer did."""

    given: Tensor
    result: Tensor
    steps: list[Step] = field(default_factory=list)
    passings: list[Passing] = field(default_factory=list)
    started: int = 0


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A layer with the arguments of one real call; it can be called again."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tokens: int

    @property
    def limit(self) -> float:
        """Relative difference below which two values of this layer are called the same."""
        return TOLERANCE.get(next(iter(_tensors((self.args, dict(self.kwargs))))).dtype, 0.0)

    def play(self, replace: Replace | None = None, disturb_sides: float = 0.0, disturb: float = 0.0) -> Tape:
        """One call on copies of the arguments.

        `disturb` moves all rows but the last of the stream. `disturb_sides` does so to every side input that has a
        row per token: keys and values that come from another layer look like constants otherwise.
        """
        args, kwargs = _copied(self.args), _copied(dict(self.kwargs))
        given = next(iter(_tensors((args, kwargs))))
        if disturb:
            _move_others(given, self.tokens, disturb)
        if disturb_sides:
            for value in _tensors((args, kwargs)):
                if value is not given:
                    _move_others(value, self.tokens, disturb_sides)
        tape = Tape(given.clone(), given)
        entries: list[_Entry] = []
        with ExitStack() as stack:
            for name, module in self.layer.named_modules():
                for handle in _listen(module, name, tape, entries) if name else ():
                    stack.callback(handle.remove)
            stack.enter_context(torch.no_grad())
            stack.enter_context(_Recorder(self.layer, tape, replace))
            output = self.layer(*args, **kwargs)
        tape.result = first_output(output)
        return tape


@dataclass(frozen=True, eq=False)
class _Entry:
    given: Tensor | None
    plain: bool
    started: int


def _listen(module: nn.Module, name: str, tape: Tape, entries: list[_Entry]) -> Iterator[Hook]:
    """Note a call of the module when it begins, and keep it when it ends."""

    def begin(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        first = given[0].clone() if given and given[0].is_floating_point() else None
        plain = all(v.is_floating_point() for v in given)
        tape.started += 1
        entries.append(_Entry(first, plain, tape.started))

    def end(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        entry = entries.pop()
        results = [v for v in tree_flatten(output)[0] if isinstance(v, Tensor) and v.is_floating_point()]
        if entry.given is not None and results:
            result = results[0].clone()
            tape.passings.append(Passing(name, entry.given, result, entry.plain, entry.started))

    yield module.register_forward_pre_hook(begin, with_kwargs=True)
    yield module.register_forward_hook(end)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, layer: nn.Module, tape: Tape, replace: Replace | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        self.replace = replace
        self.kept: list[Tensor] = []
        self.names: dict[int, tuple[str, ...]] = {}
        for name, parameter in layer.named_parameters():
            self.names[parameter.untyped_storage().data_ptr()] = (name,)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [a for a in tree_flatten((args, kwargs or {}))[0] if isinstance(a, Tensor)]
        floats = [a for a in tensors if a.is_floating_point()]
        known = [self._of(a) for a in floats]
        operator = func._schema.name.split("::")[-1]
        if isinstance(out, Tensor) and operator in LINEAR and any(known) and not all(known):
            # The bias of `addmm` is a parameter too, but the weight comes last.
            weight, names = next((a, n) for a, n in zip(reversed(floats), reversed(known), strict=True) if n)
            reads = [a for a, found in zip(floats, known, strict=True) if not found]
            step = Step(names, reads[-1].detach().clone(), out.detach().clone(), weight.shape)
            self.tape.steps.append(step)
            if self.replace is not None:
                out = self.replace(len(self.tape.steps) - 1, out)
        elif isinstance(out, Tensor) and floats and all(known) and out.is_floating_point():
            self._derive(out, tuple(dict.fromkeys(name for names in known for name in names)))
        return out

    def _of(self, tensor: Tensor) -> tuple[str, ...]:
        return self.names.get(tensor.untyped_storage().data_ptr(), ())

    def _derive(self, tensor: Tensor, names: tuple[str, ...]) -> None:
        """Remember a cast or gathered copy of a parameter; it is kept, lest its address be used again."""
        self.kept.append(tensor)
        self.names.setdefault(tensor.untyped_storage().data_ptr(), names)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, (dict, UserDict)):
        yield from _tensors(list(value.values()))


def _copied(value: Any) -> Any:
    """Arguments that a call may change are copied, the dictionary of shared keys and values included."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple):
        parts = [_copied(part) for part in value]
        return type(value)(*parts) if "_fields" in vars(type(value)) else tuple(parts)
    if isinstance(value, list):
        return [_copied(part) for part in value]
    if isinstance(value, (dict, UserDict)):
        made = copy.copy(value)
        for key, part in value.items():
            made[key] = _copied(part)
        return made
    return value


def _move_others(value: Tensor, tokens: int, size: float) -> None:
    """Add noise to all rows but the last along an axis with one entry per token."""
    axes = [axis for axis in range(value.dim() - 1) if value.shape[axis] == tokens]
    if axes:
        rows = value.narrow(axes[-1], 0, tokens - 1)
        rows.add_(size * torch.randn(rows.shape, generator=torch.Generator().manual_seed(9)).to(rows))

"""Values of an expression at every part, and wanted values traced back from its output to the part that is edited.

Everything is float64, from the stored parameters as they are: after an edit was written, its rounding is part of what
is traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add, mul

import torch
from torch import Tensor, nn

from contextfold.calculus import (
    Affine,
    Bias,
    Chain,
    Expression,
    Given,
    Mark,
    Multiplier,
    Normalise,
    Path,
    Pointwise,
    Product,
    Scale,
    Skip,
    Sum,
)
from contextfold.errors import InputError, NotControllable
from contextfold.outcomes import Finding, Outcome
from contextfold.solving import solved

__all__ = ["Trace", "matrix", "trace"]

ZERO = 1e-12
"""A factor below this fraction of the largest counts as zero."""


@dataclass(frozen=True, eq=False)
class Trace:
    """What entered and left every part, `(n, ·)` in float64, by path; the whole expression stands at `()`."""

    block: nn.Module
    expression: Expression
    entered: dict[Path, Tensor] = field(default_factory=dict)
    left: dict[Path, Tensor] = field(default_factory=dict)

    def wanted(self, anchor: Path, path: Path, y_C: Tensor, in_context: Trace) -> Tensor:
        """What the part at `path` must give, `(n, ·)`, for the part at `anchor` to give what it gave in context.

        Where the anchor gives the output of the whole, that is `y_C` as measured. Raises `NotControllable` where a
        fixed factor is zero.
        """
        whole = all(self._last(anchor[:depth], index) for depth, index in enumerate(anchor))
        return self.traced_back(anchor, path, y_C.double() if whole else in_context.left[anchor])

    def _last(self, path: Path, index: int) -> bool:
        part = self.expression.at(path)
        return isinstance(part, Chain) and index == len(part.parts) - 1

    def traced_back(self, start: Path, path: Path, target: Tensor) -> Tensor:
        """What the part at `path` must give for the part at `start`, above it, to give `target`: level by level."""
        for depth in range(len(start), len(path)):
            here, index = path[:depth], path[depth]
            parts = self.expression.at(here).inside
            others = [self.left[*here, i] for i in range(len(parts)) if i != index]
            match self.expression.at(here):
                case Chain():
                    target = self.back(here, len(parts) - 1, index, target)
                case Sum():
                    target = target - reduce(add, others, torch.zeros_like(target))
                case Product():
                    target = _divided(str(here), target, reduce(mul, others, torch.ones_like(target)))
                case _:
                    raise InputError(f"path {path} does not lead to a stage")
        return target

    def back(self, chain: Path, start: int, stop: int, target: Tensor) -> Tensor:
        """Trace `target`, wanted behind part `start` of a chain, back to what is wanted behind part `stop`."""
        parts = self.expression.at(chain).inside
        for index in range(start, stop, -1):
            target = self._before(parts[index], target)
        return target

    def _before(self, stage: Expression, target: Tensor) -> Tensor:
        match stage:
            case Mark() | Skip():
                return target
            case Multiplier(alpha):
                return target / alpha
            case Bias():
                return target - _stored(self.block, stage)
            case Scale(offset=offset):
                return _divided(stage.module, target, _stored(self.block, stage) + offset)
            case Affine():
                right_inverse: Tensor = solved(torch.linalg.pinv, matrix(self.block, stage))
                return target @ right_inverse.T
            case _:
                raise InputError(f"nothing is traced back through {type(stage).__name__}")


def _divided(where: str, target: Tensor, factor: Tensor) -> Tensor:
    least, limit = float(factor.abs().min()), ZERO * float(factor.abs().max())
    if least <= limit:
        raise NotControllable([Finding(Outcome.ZERO_ENTRY, where, "min abs factor", least, limit)])
    return target / factor


def _stored(block: nn.Module, stage: Affine | Bias | Scale) -> Tensor:
    return block.get_submodule(stage.module).get_parameter(stage.parameter).data.double()


def matrix(block: nn.Module, stage: Affine) -> Tensor:
    """`W (out, in)` of an affine stage, float64."""
    W = _stored(block, stage)
    return W.T if stage.transposed else W


def trace(block: nn.Module, expression: Expression, values: Mapping[Given, Tensor]) -> Trace:
    """Evaluate `expression` from the given values, `(n, ·)` each."""
    record = Trace(block, expression)
    start = next(iter(values.values())).double()
    _evaluate(record, expression, (), start, values)
    return record


def _evaluate(record: Trace, part: Expression, path: Path, x: Tensor, values: Mapping[Given, Tensor]) -> Tensor:
    record.entered[path] = x
    match part:
        case Chain(parts):
            out = x
            for i, inner in enumerate(parts):
                out = _evaluate(record, inner, (*path, i), out, values)
        case Sum(parts):
            out = torch.stack(_branches(record, parts, path, x, values)).sum(0)
        case Product(parts):
            out = torch.stack(_branches(record, parts, path, x, values)).prod(0)
        case Given():
            out = values[part].double()
        case _:
            out = _stage(record.block, part, x)
    record.left[path] = out
    return out


def _branches(
    record: Trace, parts: Sequence[Expression], path: Path, x: Tensor, values: Mapping[Given, Tensor]
) -> list[Tensor]:
    return [_evaluate(record, inner, (*path, i), x, values) for i, inner in enumerate(parts)]


def _stage(block: nn.Module, stage: Expression, x: Tensor) -> Tensor:
    match stage:
        case Mark() | Skip():
            return x
        case Affine():
            return x @ matrix(block, stage).T
        case Bias():
            return x + _stored(block, stage)
        case Scale(offset=offset):
            return (_stored(block, stage) + offset) * x
        case Multiplier(alpha):
            return alpha * x
        case Normalise(eps, centred):
            centre = x - x.mean(-1, keepdim=True) if centred else x
            return centre / torch.sqrt(centre.square().mean(-1, keepdim=True) + eps)
        case Pointwise(name, function):
            if function is None:
                raise InputError(f"the function of {name!r} is not given; write Pointwise({name!r}, function)")
            out: Tensor = function(x)
            return out
        case _:
            raise InputError(
                f"a block of your own cannot be solved through {type(stage).__name__}; describe it by simpler stages"
            )

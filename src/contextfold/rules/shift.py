"""Edits of a bias: the one parameter that moves an output whatever the map reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from contextfold.calculus import Demand, Kind, Service
from contextfold.outcomes import Finding, Outcome
from contextfold.rules.base import RESIDUAL, UpdateRule, finite, refuse_if

__all__ = ["BiasSolution", "InputBias", "OutputBias"]


@dataclass(frozen=True, eq=False)
class BiasSolution:
    """The edit of one bias, `(out,)`."""

    delta: Tensor
    findings: Sequence[Finding]


def _shift(where: str, changes: Tensor) -> BiasSolution:
    """The one vector that all rows `changes (n, out)` want; their mean, refused when it is not theirs."""
    mean = changes.mean(0)
    total = float(changes.norm())
    residual = float((changes - mean).norm()) / total if total > 0 else 0.0
    refuse_if(residual > RESIDUAL, Finding(Outcome.INCONSISTENT, where, "relative residual", residual, RESIDUAL))
    return BiasSolution(mean, [])


@final
@dataclass(frozen=True)
class InputBias(UpdateRule):
    """The bias of an input map supplies what its weight does not read; z may be zero."""

    name: ClassVar[str] = "input bias"
    equation: ClassVar[str] = "db = W (z_C - z)"
    source: ClassVar[str] = "[ours]"
    condition: ClassVar[str] = "the map has a bias; several positions: all want the same shift"
    minimal: ClassVar[str] = "the only bias that does it"
    serves: ClassVar[Service] = Service(Demand.MATCH, Kind.BIAS)
    meets: ClassVar[tuple[Outcome, ...]] = (Outcome.INCONSISTENT, Outcome.NOT_FINITE)

    def solve(self, where: str, W: Tensor, z: Tensor, z_C: Tensor) -> BiasSolution:
        """`W (out, d)`, `z, z_C (n, d)`. Raises `NotControllable` when positions want different shifts."""
        finite(where, z=z, z_C=z_C)
        return _shift(where, (z_C - z).double() @ W.double().T)


@final
@dataclass(frozen=True)
class OutputBias(UpdateRule):
    """The bias behind everything gives the wanted branch, whatever h is."""

    name: ClassVar[str] = "output bias"
    equation: ClassVar[str] = "db = g - (W_out h + b)"
    source: ClassVar[str] = "[E] lemma on output bias; aimed at the measured g [ours]"
    condition: ClassVar[str] = "the map has a bias; several positions: all want the same shift"
    minimal: ClassVar[str] = "the only bias that does it"
    serves: ClassVar[Service] = Service(Demand.REACH, Kind.BIAS)
    meets: ClassVar[tuple[Outcome, ...]] = (Outcome.INCONSISTENT, Outcome.NOT_FINITE)

    def solve(self, where: str, branch: Tensor, g: Tensor) -> BiasSolution:
        """`branch (n, d)` as it is, `g (n, d)` as it should be. Raises `NotControllable` as `InputBias`."""
        finite(where, branch=branch, g=g)
        return _shift(where, (g - branch).double())

"""Edits of a scale alone: exact where no entry that it multiplies is zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from contextfold.calculus import Demand, Kind, Service
from contextfold.outcomes import Finding, Outcome
from contextfold.rules.base import RESIDUAL, UpdateRule, finite, refuse_if

__all__ = ["InputScale", "OutputScale", "ScaleSolution"]

ZERO = 1e-12
"""An entry below this fraction of its vector's RMS counts as zero; rounding seldom leaves an exact one."""


@dataclass(frozen=True, eq=False)
class ScaleSolution:
    """The new effective scale `(d,)`."""

    scale: Tensor
    findings: Sequence[Finding]


def _divide(where: str, units: Tensor, targets: Tensor, m: Tensor) -> ScaleSolution:
    """`m' (d,)` with `m' ⊙ units = targets` for every row `(n, d)`; a coordinate that is zero throughout keeps m.

    For one row `m' = target ⊘ unit`. For several it is the least-squares scale, refused when it does not meet all.
    """
    units, targets, m = units.double(), targets.double(), m.double()
    size = units.square().mean(1, keepdim=True).sqrt()
    dead = units.abs() <= ZERO * size
    stuck = dead & (targets != 0)
    least = float(units.abs().min())
    refuse_if(bool(stuck.any()), Finding(Outcome.ZERO_ENTRY, where, "min abs entry", least, ZERO * float(size.max())))
    power = units.square().sum(0)
    idle = dead.all(0)
    scale = torch.where(idle, m, (units * targets).sum(0) / torch.where(idle, torch.ones_like(power), power))
    total = float(targets.norm())
    residual = float((scale * units - targets).norm()) / total if total > 0 else 0.0
    refuse_if(residual > RESIDUAL, Finding(Outcome.INCONSISTENT, where, "relative residual", residual, RESIDUAL))
    return ScaleSolution(scale, [])


@final
@dataclass(frozen=True)
class InputScale(UpdateRule):
    """The scale of the norm before the MLP turns z into z_C, for every map that reads it."""

    name: ClassVar[str] = "input scale"
    equation: ClassVar[str] = "m_pre' = z_C ⊘ N_pre(s)"
    source: ClassVar[str] = "[E] lemma on norms; [ours]"
    condition: ClassVar[str] = "no entry of N_pre(s) is 0 where z_C is not; one position"
    minimal: ClassVar[str] = "the only scale that does it; no matrix is touched"
    serves: ClassVar[Service] = Service(Demand.MATCH, Kind.SCALE)
    meets: ClassVar[tuple[Outcome, ...]] = (Outcome.ZERO_ENTRY, Outcome.INCONSISTENT, Outcome.NOT_FINITE)

    def solve(self, where: str, unit: Tensor, z_C: Tensor, m_pre: Tensor) -> ScaleSolution:
        """`unit (n, d)` the norm's output without scale, `z_C (n, d)` without the norm's bias, `m_pre (d,)`.

        Raises `NotControllable` for a zero entry, or rows that want different scales.
        """
        finite(where, unit=unit, z_C=z_C)
        return _divide(where, unit, z_C, m_pre)


@final
@dataclass(frozen=True)
class OutputScale(UpdateRule):
    """A scale behind everything gives the wanted branch and nothing else moves."""

    name: ClassVar[str] = "output scale"
    equation: ClassVar[str] = "m' = g ⊘ u"
    source: ClassVar[str] = "[E] eq. 4, lemma on elementwise products; aimed at the measured g [ours]"
    condition: ClassVar[str] = "no u_i is 0 where g_i is not; one position"
    minimal: ClassVar[str] = "the only scale that does it; no matrix is touched"
    serves: ClassVar[Service] = Service(Demand.REACH, Kind.SCALE)
    meets: ClassVar[tuple[Outcome, ...]] = (Outcome.ZERO_ENTRY, Outcome.INCONSISTENT, Outcome.NOT_FINITE)

    def solve(self, where: str, u: Tensor, g: Tensor, m: Tensor) -> ScaleSolution:
        """`u (n, d)` what the scale multiplies, `g (n, d)` what should come out, `m (d,)` the scale as it is.

        Raises `NotControllable` as `InputScale`.
        """
        finite(where, u=u, g=g)
        return _divide(where, u, g, m)

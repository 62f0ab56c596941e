"""What every update rule is: one constructive proof, tensors in, edits out."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from contextfold.calculus import Service
from contextfold.errors import NotControllable
from contextfold.lowrank import Solution
from contextfold.outcomes import Finding, Outcome

__all__ = ["MATRIX", "NEAR_SINGULAR", "RESIDUAL", "UpdateRule", "finite", "judge", "refuse_if"]

NEAR_SINGULAR = 1e6
"""Condition number of the sources above which an edit is called near-singular."""

MATRIX = (Outcome.ZERO_SOURCE, Outcome.INCONSISTENT, Outcome.NEAR_SINGULAR, Outcome.NOT_FINITE)
"""What the solve of a matrix may meet."""

RESIDUAL = 1e-6
"""Relative residual above which dependent sources are called inconsistent (float64 solves)."""


class UpdateRule(ABC):
    """One constructive proof. Instances are immutable; a rule sees tensors and never a model."""

    name: ClassVar[str]
    """How the rule is called in tables, JSON and the plan of a patch."""
    equation: ClassVar[str]
    """The formula, in the letters of the equation sheet."""
    source: ClassVar[str]
    """Where the mathematics comes from."""
    condition: ClassVar[str]
    """When the edit is exact."""
    minimal: ClassVar[str]
    """In what sense nothing smaller would do."""
    serves: ClassVar[Service]
    """The ways of the calculus that it carries out."""
    meets: ClassVar[tuple[Outcome, ...]]
    """Outcomes other than exact that its solve may name."""


def refuse_if(bad: bool, finding: Finding) -> None:
    """Raise `NotControllable` with this one finding."""
    if bad:
        raise NotControllable([finding])


def finite(where: str, **tensors: Tensor) -> None:
    """Refuse activations that are infinite or not a number, by name."""
    for name, tensor in tensors.items():
        bad = int((~torch.isfinite(tensor)).sum())
        refuse_if(bad > 0, Finding(Outcome.NOT_FINITE, where, f"entries of {name} that are not finite", bad, 0))


def judge(where: str, sources: Tensor, changes: Tensor, solution: Solution) -> Sequence[Finding]:
    """Name how a matrix solve ended; refuse when it did not reach its target."""
    dead = (sources.double().norm(dim=1) == 0) & (changes.double().norm(dim=1) > 0)
    refuse_if(bool(dead.any()), Finding(Outcome.ZERO_SOURCE, where, "rows that read a zero vector", int(dead.sum()), 0))
    refuse_if(
        not solution.residual <= RESIDUAL,
        Finding(Outcome.INCONSISTENT, where, "relative residual", solution.residual, RESIDUAL),
    )
    if solution.condition > NEAR_SINGULAR:
        return [Finding(Outcome.NEAR_SINGULAR, where, "condition number", solution.condition, NEAR_SINGULAR)]
    return []

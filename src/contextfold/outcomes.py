"""How a solve ended, in words: an outcome is never a silent epsilon.

A rule returns the outcomes that it met beside its edits. An outcome that `refuses` means that no exact edit
exists under that rule; the door raises `NotControllable`, or falls back openly when it was told where to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

__all__ = ["Finding", "Outcome", "labels"]


class Outcome(Enum):
    """What a solve met. Each member: does it refuse, and the diagnosis with ways out."""

    EXACT = (False, "solved exactly")
    INNER_SKIPPED = (
        False,
        "the input of the MLP is zero, so its input maps cannot be steered by weight; they were left alone and "
        "the output map absorbed the whole difference",
    )
    FELL_BACK = (False, "the rule that was asked for is undefined here; the fallback rule was used instead")
    SINK_MOVED = (
        False,
        "the sink and the query read (nearly) the same vector here, so no edit moves one and not the other; the "
        "query was matched, and the sink moves with it",
    )
    LEAST_SQUARES = (
        False,
        "the positions read dependent vectors that want different changes, so no edit meets them all; the "
        "least-squares edit was taken, and the layers above take up the rest",
    )
    SCALE_INFEASIBLE = (
        False,
        "no positive scale lets every position reach its target; the nearest reachable branches were taken, and the "
        "layers above take up the rest. Fold fewer positions to be exact here",
    )
    LENGTH_FREED = (
        False,
        "no positive scale lets every position reach its target as it stands; since what follows reads only the "
        "direction of the finished sum, each was met in direction, with a length of its own",
    )
    SECULAR_HARD_CASE = (
        False,
        "the secular equation of the RMSNorm inversion has no root; its hard case was solved: the remaining norm "
        "was put on the coordinates of the smallest scale",
    )
    NEAR_SINGULAR = (
        False,
        "the sources are nearly dependent; the edit is exact but large and sensitive to rounding",
    )
    INCONSISTENT = (
        True,
        "dependent sources want different changes, so no edit meets them all; fold fewer positions, or accept "
        "the least-squares edit",
    )
    ZERO_SOURCE = (
        True,
        "the vector that the map reads is zero, so no change of its weight can move the output; edit a bias, or "
        "another site",
    )
    ZERO_ACTIVATION = (
        True,
        "an entry of the normalised branch u is zero but its target is not, so no scale reaches it (the paper's "
        "theorem needs every entry nonzero); use the rule 'floored' or 'flat'",
    )
    ZERO_ENTRY = (
        True,
        "an entry of the vector that a scale multiplies is zero but its target is not, so no scale reaches it; edit a "
        "weight or a bias instead",
    )
    GATE_SUM_ZERO = (
        True,
        "the gate weights of the active experts add up to zero, so an even share of the change has no effect; use the "
        "rule 'experts by least norm'",
    )
    EXPERT_FLIP = (
        False,
        "other experts are active than with the context, because rounding swapped them or because the router also "
        "reads something that no input map reads (the router below it); the output was aimed at with the experts that "
        "are really active",
    )
    TIED_ROUTER = (
        False,
        "the last selected and the first rejected expert have almost the same score, so rounding may swap them; the "
        "rule 'experts, output only' does not depend on the selection",
    )
    TINY_SCALE = (
        True,
        "an entry of the norm scale m is zero, which this rule divides by; use the rule 'floored' or 'flat'",
    )
    NOTHING_TO_AIM_AT = (
        True,
        "the wanted branch is zero, which a normalised branch reaches only by a zero scale; drop less context, "
        "or skip this layer",
    )
    OVERFLOW = (
        True,
        "the edited value does not fit into the storage dtype; use float32 or bfloat16, or the rule 'flat'",
    )
    NOT_FINITE = (
        True,
        "an activation is infinite or not a number, so there is nothing to solve; run the model in a wider dtype",
    )

    def __init__(self, refuses: bool, diagnosis: str) -> None:
        self.refuses = refuses
        self.diagnosis = diagnosis

    @property
    def label(self) -> str:
        """The name as it stands in tables and JSON: `zero source`."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class Finding:
    """One outcome, where it was met, and the number that triggered it.

    `value` is compared with `threshold`; both are in the unit that `quantity` names.
    """

    outcome: Outcome
    where: str
    quantity: str = ""
    value: float = float("nan")
    threshold: float = float("nan")

    def __str__(self) -> str:
        number = f" ({self.quantity} = {self.value:.3g}, limit {self.threshold:.3g})" if self.quantity else ""
        return f"{self.where}: {self.outcome.label}{number}: {self.outcome.diagnosis}"


def labels(findings: Iterable[Finding]) -> str:
    """What was met, in words and in order; `exact` when there was nothing to remark."""
    return ", ".join(sorted({finding.outcome.label for finding in findings})) or Outcome.EXACT.label

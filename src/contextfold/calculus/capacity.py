"""How many positions can be steered exactly, and what was asked: the small words of the calculus."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["ALWAYS", "NEVER", "UNLIMITED", "Capacity", "Demand", "Kind", "Verdict"]


class Demand(Enum):
    """What a part of a block is asked to do by a change of its parameters."""

    MATCH = "match"
    """Give on z what it gave on z_C: input controllability ([E] definition 3)."""
    REACH = "reach"
    """Give any wanted output: output controllability ([E] definition 4)."""


class Kind(Enum):
    """Which parameters a way moves."""

    WEIGHT = "weight"
    BIAS = "bias"
    SCALE = "scale"
    WEIGHT_AND_SCALE = "weight and scale"
    BIAS_AND_SCALE = "bias and scale"
    EXPERTS = "experts"
    MIXED = "mixed"
    """Parallel branches that are steered by different kinds of parameters."""


class Verdict(Enum):
    """The answer of the calculus for a number of positions."""

    YES = "yes"
    """For generic data: everywhere but on a set of measure zero, which the condition describes."""
    ASK = "ask"
    """The data decide."""
    NO = "no"


@dataclass(frozen=True)
class Capacity:
    """Positions that a stage steers exactly: `sure` for generic data, more (up to `maybe`) if the data allow it."""

    sure: int
    maybe: int
    condition: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.sure <= self.maybe:
            raise ValueError(f"a capacity needs 0 <= sure <= maybe, met {self.sure} and {self.maybe}")

    def at(self, positions: int) -> Verdict:
        """The verdict for `positions` at once."""
        if positions <= self.sure:
            return Verdict.YES
        return Verdict.ASK if positions <= self.maybe else Verdict.NO

    def together(self, other: Capacity) -> Capacity:
        """Both are needed."""
        return Capacity(
            min(self.sure, other.sure), min(self.maybe, other.maybe), _joined(self.condition, other.condition)
        )

    def asking(self, condition: str) -> Capacity:
        """The same, but the data must meet `condition` first, and generic data need not."""
        return Capacity(0, self.maybe, _joined(self.condition, condition))

    def __str__(self) -> str:
        if self.maybe == 0:
            return "never"
        if self.sure == self.maybe:
            return "any number" if self.sure == UNLIMITED else f"up to {self.sure}"
        sure = f"{self.sure} sure, " if self.sure else ""
        return f"{sure}up to {self.maybe} if the data allow"


def _joined(first: str, second: str) -> str:
    """Conditions side by side, none twice."""
    parts = [part for text in (first, second) for part in text.split("; ") if part]
    return "; ".join(dict.fromkeys(parts))


UNLIMITED = 2**31 - 1
"""Stands for any number of positions."""

NEVER = Capacity(0, 0)

ALWAYS = Capacity(UNLIMITED, UNLIMITED)
"""Nothing has to be steered."""

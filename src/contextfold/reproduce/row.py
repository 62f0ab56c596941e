"""One published figure beside ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Missing", "Row", "percent", "spread"]


@dataclass(frozen=True)
class Row:
    """`published` and `ours` are numbers in the unit that `section` or `figure` names, or words; None for none.

    `section` says what is compared, `figure` of which run."""

    section: str
    figure: str
    published: float | str | None
    ours: float | str | None
    note: str = ""

    @property
    def difference(self) -> float | None:
        """`ours - published`, where both are numbers."""
        both = (self.published, self.ours)
        if any(value is None or isinstance(value, str) for value in both):
            return None
        return float(self.ours) - float(self.published)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        return {
            "section": self.section,
            "figure": self.figure,
            "published": self.published,
            "ours": self.ours,
            "difference": self.difference,
            "note": self.note,
        }


@dataclass(frozen=True)
class Missing:
    """Something that a paper reports and that is not reproduced here."""

    what: str
    why: str


def percent(hits: Sequence[bool]) -> float:
    """Share of true ones, in percent. Of at least one."""
    return 100 * sum(hits) / len(hits)


def spread(hits: Sequence[bool]) -> str:
    """`k of n`, with the 95 % interval of Wilson (1927) for the share in percent."""
    n, z = len(hits), 1.96
    p = sum(hits) / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return (
        f"{sum(hits)} of {n}, 95 % interval {100 * max(middle - half, 0.0):.1f} to {100 * min(middle + half, 1.0):.1f}"
    )

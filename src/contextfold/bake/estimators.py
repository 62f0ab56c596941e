"""Ways to learn a reusable patch: where each edits, and who found it."""

from __future__ import annotations

from dataclasses import dataclass

from contextfold.bake.joint import ATTENTION, INNER, OUTPUT
from contextfold.errors import InputError

__all__ = ["ESTIMATORS", "Estimator", "estimator"]


@dataclass(frozen=True)
class Estimator:
    """A choice of places; all are solved by the same ridge, in the order in which a block runs them."""

    name: str
    roles: tuple[str, ...]
    source: str
    summary: str


ESTIMATORS = (
    Estimator(
        "two-sites", (ATTENTION, OUTPUT), "[ours]",
        "the attention output map, then the MLP output map for what is left; the heads carry what h has lost",
    ),
    Estimator("output", (OUTPUT,), "[P]", "ridge on the MLP output map"),
    Estimator("attention", (ATTENTION,), "[ours]", "ridge on the attention output map"),
    Estimator(
        "matrix", (INNER, OUTPUT), "[T]",
        "thought matrix: one solve on z for all input maps of a block, then the vector, put into the output map",
    ),
    Estimator("all", (ATTENTION, INNER, OUTPUT), "[ours]", "every place, one after the other"),
)  # fmt: skip
"""The estimators, the default first."""


def estimator(name: str) -> Estimator:
    """The estimator of that name. Raises `InputError` for other names."""
    for known in ESTIMATORS:
        if known.name == name:
            return known
    names = ", ".join(known.name for known in ESTIMATORS)
    raise InputError(f"estimator {name!r} is unknown; choose one of {names}")

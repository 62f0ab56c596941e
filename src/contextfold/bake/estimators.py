"""Ways to learn a reusable patch: where each edits, and who found it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contextfold.anatomy import Block, DenseBlock
from contextfold.bake.joint import ATTENTION, INNER, OUTPUT
from contextfold.errors import InputError

__all__ = ["AUTO", "ESTIMATORS", "Estimator", "estimator"]

AUTO = "auto"


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
    Estimator("matrix", (INNER,), "[T]", "thought matrix: one solve on z for all input maps of a block"),
    Estimator("all", (ATTENTION, INNER, OUTPUT), "[ours]", "every place, one after the other"),
)  # fmt: skip
"""The estimators, the best one for most models first."""


def estimator(name: str, blocks: Sequence[Block] = ()) -> Estimator:
    """The estimator of that name; `auto` is the best known one for a model of such blocks.

    Behind a norm an MLP can only answer by a branch of given length, and where a context does little its edit does more
    harm than good (docs/bake.md): there the attention output map alone is edited, where the anatomy names it. Raises
    `InputError` for other names.
    """
    if name == AUTO:
        behind = any(isinstance(b, DenseBlock) and b.norm_post is not None and b.attention_output for b in blocks)
        name = "attention" if behind else ESTIMATORS[0].name
    for known in ESTIMATORS:
        if known.name == name:
            return known
    names = ", ".join((AUTO, *(known.name for known in ESTIMATORS)))
    raise InputError(f"estimator {name!r} is unknown; choose one of {names}")

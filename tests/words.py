"""What the calculus says, in the words that a reader is shown, for tests of its stages and of how they compose."""

from __future__ import annotations

from contextfold.calculus import Demand

MATCH, REACH = Demand.MATCH, Demand.REACH
NOT_ZERO = "its input is not 0, several are linearly independent"
ONE_SCALE = "every entry of the vector that the scale multiplies is nonzero where its target is"
SKIP = "the skip carries the difference on and has no parameter, so another branch must reach any wanted value"


def fixed(name: str) -> str:
    return f"{name} depends on the context and has no parameter here; steer something that reads it"


def matrix(name: str, width: int) -> str:
    return (
        f"{name} reads {width} numbers, so it steers at most {width} positions; "
        "fold fewer positions, or ask for least squares"
    )

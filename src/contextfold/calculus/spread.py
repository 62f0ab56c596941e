"""How many linearly independent vectors can stand at a place of an expression."""

from __future__ import annotations

from dataclasses import dataclass

from contextfold.calculus.capacity import UNLIMITED
from contextfold.calculus.expression import Chain, Expression, Given, Product, Sum
from contextfold.calculus.stages import Affine, Bias, ExpertOutputs, Experts, Multiplier, Pointwise

__all__ = ["UNBOUNDED", "Spread"]


@dataclass(frozen=True)
class Spread:
    """How many linearly independent vectors stand at a place, however many positions: a bottleneck limits them."""

    sure: int = UNLIMITED
    maybe: int = UNLIMITED

    def behind(self, part: Expression) -> Spread:
        """The spread of what `part` gives, for generic parameters."""
        match part:
            case Given():
                return Spread()
            case Affine(inputs=inputs, outputs=outputs):
                widest = min(inputs, outputs)
                return Spread(min(self.sure, widest), min(self.maybe, widest))
            case Bias():
                # A shift can add the one direction that a subspace lacks.
                return Spread(max(self.sure, 1), self.maybe + 1)
            case Multiplier(alpha):
                return self if alpha != 0 else Spread(0, 0)
            case Experts(inputs=inputs):
                return Spread(min(self.sure, inputs), UNLIMITED)
            case Pointwise() | ExpertOutputs():
                # A curved function leaves the subspace; a piecewise linear one may leave it by little.
                return Spread(self.sure, UNLIMITED)
            case Sum(parts) | Product(parts):
                return Spread(max(self.through(inner).sure for inner in parts), UNLIMITED)
            case _:
                return self

    def through(self, part: Expression) -> Spread:
        """As `behind`, one stage of a chain after the other."""
        spread = self
        for stage in part.inside if isinstance(part, Chain) else (part,):
            spread = spread.behind(stage)
        return spread


UNBOUNDED = Spread()
"""Nothing is known to limit them yet."""

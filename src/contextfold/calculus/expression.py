"""What a stage is, and the three ways of putting stages together.

A stage knows nothing of its neighbours: it declares how many positions its parameters steer for either demand, and
whether a wanted output can be traced back to a wanted input through it with its parameters left alone. How such
declarations compose stands once, in `compose`.

    block = Chain.of(Given("v"), Sum.of(Skip(), Chain.of(norm, Affine(...), Pointwise("relu"), Affine(...))))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from contextfold.calculus.capacity import ALWAYS, NEVER, Capacity, Demand, Kind, Verdict

__all__ = ["OPEN", "Chain", "Expression", "Given", "Passage", "Product", "Stage", "Sum"]


class Expression(ABC):
    """A function of one position, built from stages; `a >> b` feeds a into b, `a + b` and `a * b` go side by side."""

    @property
    @abstractmethod
    def inside(self) -> tuple[Expression, ...]:
        """The parts that it is made of; none for a stage."""

    def at(self, path: Sequence[int]) -> Expression:
        """The part at `path`: which part to take at each level."""
        part: Expression = self
        for index in path:
            part = part.inside[index]
        return part

    def __rshift__(self, after: Expression) -> Chain:
        return Chain.of(self, after)

    def __add__(self, other: Expression) -> Sum:
        return Sum.of(self, other)

    def __mul__(self, other: Expression) -> Product:
        return Product.of(self, other)


@dataclass(frozen=True)
class Passage:
    """Whether every wanted output has an input that gives it, parameters left alone, and if not, why."""

    verdict: Verdict
    why: str = ""


OPEN = Passage(Verdict.YES)


class Stage(Expression):
    """A leaf. `address` names the parameter that it owns, `None` when it has none."""

    kind: ClassVar[Kind | None] = None

    @property
    @final
    def inside(self) -> tuple[Expression, ...]:
        return ()

    @property
    def address(self) -> tuple[str, str] | None:
        """Dotted name of the module and name of the parameter."""
        return None

    @abstractmethod
    def steers(self, demand: Demand) -> Capacity:
        """How many positions a change of its own parameter steers."""

    @abstractmethod
    def passes(self) -> Passage:
        """Whether a wanted output can be traced back through it."""

    @property
    @abstractmethod
    def stuck(self) -> str:
        """Why it cannot be steered (or not further), and what would help."""


@final
@dataclass(frozen=True)
class Given(Stage):
    """A value that comes from outside: the block's input, or what a contextual layer gave. It starts a chain.

    `changes` says whether the context changes it. The value is what `module` is called on, or, with `after`, what
    it gives; an empty module is the block itself.
    """

    name: str
    module: str = ""
    after: bool = False
    changes: bool = True

    def steers(self, demand: Demand) -> Capacity:
        return NEVER if self.changes or demand is Demand.REACH else ALWAYS

    def passes(self) -> Passage:
        return Passage(Verdict.NO, f"{self.name} is given")

    @property
    def stuck(self) -> str:
        return f"{self.name} depends on the context and has no parameter here; steer something that reads it"


@final
@dataclass(frozen=True)
class Chain(Expression):
    """One after the other."""

    parts: tuple[Expression, ...]

    def __post_init__(self) -> None:
        if any(isinstance(part, Given) for part in self.parts[1:]):
            raise ValueError("a given value can only start a chain")

    @property
    def inside(self) -> tuple[Expression, ...]:
        return self.parts

    @classmethod
    def of(cls, *parts: Expression) -> Chain:
        """Chains inside are opened: `(a >> b) >> c` and `a >> (b >> c)` are equal."""
        return cls(tuple(q for part in parts for q in (part.parts if isinstance(part, Chain) else (part,))))


@final
@dataclass(frozen=True)
class Sum(Expression):
    """Side by side on the same input, added: a residual block, or parallel branches."""

    parts: tuple[Expression, ...]

    @property
    def inside(self) -> tuple[Expression, ...]:
        return self.parts

    @classmethod
    def of(cls, *parts: Expression) -> Sum:
        return cls(tuple(q for part in parts for q in (part.parts if isinstance(part, Sum) else (part,))))


@final
@dataclass(frozen=True)
class Product(Expression):
    """Side by side on the same input, multiplied coordinate by coordinate: a gate."""

    parts: tuple[Expression, ...]

    @property
    def inside(self) -> tuple[Expression, ...]:
        return self.parts

    @classmethod
    def of(cls, *parts: Expression) -> Product:
        return cls(tuple(q for part in parts for q in (part.parts if isinstance(part, Product) else (part,))))

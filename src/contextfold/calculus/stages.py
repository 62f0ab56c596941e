"""Stages of a block, each with what it can do, and the three ways of putting them together.

A stage knows nothing of its neighbours: it declares how many positions its parameters steer for either demand, and
whether a wanted output can be traced back to a wanted input through it with its parameters left alone. How such
declarations compose stands once, in `compose`.

    block = Chain.of(Given("v"), Sum.of(Skip(), Chain.of(norm, Affine(...), Pointwise("relu"), Affine(...))))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

from torch import Tensor

from contextfold.calculus.capacity import ALWAYS, NEVER, Capacity, Demand, Kind, Verdict

__all__ = [
    "Affine", "Bias", "Chain", "Experts", "Expression", "Given", "Mark", "Multiplier", "Normalise", "Passage",
    "Pointwise", "Product", "Scale", "Skip", "Stage", "Sum",
]  # fmt: skip


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


@dataclass(frozen=True)
class _Owned(Stage):
    """A stage with one parameter of a named module."""

    module: str
    parameter: str = field(default="weight", kw_only=True)

    @property
    def address(self) -> tuple[str, str]:
        return self.module, self.parameter

    @property
    def subscript(self) -> str:
        """Last part of the module's name."""
        return self.module.rsplit(".", 1)[-1].removesuffix("_proj")


@final
@dataclass(frozen=True)
class Affine(_Owned):
    """`W z`, W (outputs, inputs)."""

    inputs: int
    outputs: int
    transposed: bool = False
    """The parameter is stored (in, out)."""
    kind: ClassVar[Kind] = Kind.WEIGHT

    def steers(self, demand: Demand) -> Capacity:
        return Capacity(self.inputs, self.inputs, "its input is not 0, several are linearly independent")

    def passes(self) -> Passage:
        if self.outputs > self.inputs:
            return Passage(
                Verdict.NO, f"{self.module} reaches only {self.inputs} of {self.outputs} dimensions as it stands"
            )
        return Passage(Verdict.ASK, f"{self.module} has full row rank")

    @property
    def stuck(self) -> str:
        return (
            f"{self.module} reads {self.inputs} numbers, so it steers at most {self.inputs} positions; fold fewer "
            "positions, or ask for least squares"
        )


@final
@dataclass(frozen=True)
class Bias(_Owned):
    """`p + b`."""

    width: int
    parameter: str = field(default="bias", kw_only=True)
    kind: ClassVar[Kind] = Kind.BIAS

    def steers(self, demand: Demand) -> Capacity:
        return Capacity(1, 1)

    def passes(self) -> Passage:
        return OPEN

    @property
    def stuck(self) -> str:
        return (
            f"the bias of {self.module} adds the same vector at every position, so several positions are met only if "
            "all want the same shift; edit a weight, or fold one position"
        )


@final
@dataclass(frozen=True)
class Scale(_Owned):
    """`m ⊙ u`, the elementwise product with a parameter; the effective m is `offset` + parameter."""

    width: int
    offset: int = 0
    kind: ClassVar[Kind] = Kind.SCALE

    def steers(self, demand: Demand) -> Capacity:
        return Capacity(1, 1, "every entry of the vector that the scale multiplies is nonzero where its target is")

    def passes(self) -> Passage:
        return Passage(Verdict.ASK, f"no entry of the scale of {self.module} is 0")

    @property
    def stuck(self) -> str:
        return (
            f"the scale of {self.module} is one number per coordinate for all positions, so alone it steers one "
            "position; edit the weight before it as well, or fold one position"
        )


@final
@dataclass(frozen=True)
class Normalise(Stage):
    """`p / sqrt(mean(p²) + eps)`, after subtracting the mean when `centred` (LayerNorm). No parameter."""

    eps: float = 0.0
    centred: bool = False

    def steers(self, demand: Demand) -> Capacity:
        return NEVER

    def passes(self) -> Passage:
        return Passage(Verdict.NO, "a normalisation reaches only vectors of one length")

    @property
    def stuck(self) -> str:
        return (
            "a normalisation has no parameter, and its output has one length whatever goes in; give it a scale, or add "
            "an output bias after it"
        )


@final
@dataclass(frozen=True)
class Pointwise(Stage):
    """A fixed function of each coordinate: `phi(p)`. Never inverted, never looked into."""

    name: str
    function: Callable[[Tensor], Tensor] | None = field(default=None, compare=False, repr=False)

    def steers(self, demand: Demand) -> Capacity:
        return NEVER

    def passes(self) -> Passage:
        return Passage(Verdict.NO, f"{self.name} is not known to reach every value")

    @property
    def stuck(self) -> str:
        return f"{self.name} has no parameter; steer a map before it to match, or after it to reach"


@final
@dataclass(frozen=True)
class Multiplier(Stage):
    """`alpha p`, a fixed number."""

    alpha: float

    def steers(self, demand: Demand) -> Capacity:
        return NEVER

    def passes(self) -> Passage:
        return OPEN if self.alpha != 0 else Passage(Verdict.NO, "a multiplier of 0 lets nothing through")

    @property
    def stuck(self) -> str:
        return "a fixed multiplier has no parameter; steer what it multiplies"


@final
@dataclass(frozen=True)
class Experts(_Owned):
    """A mixture: a router on z selects `active` of `count` experts, each `W_out,e h_e`, summed with gate weights."""

    count: int
    active: int
    inputs: int
    hidden: int
    outputs: int
    shared: bool = False
    """An expert that is always active stands beside the routed ones."""
    kind: ClassVar[Kind] = Kind.EXPERTS

    def steers(self, demand: Demand) -> Capacity:
        if demand is Demand.MATCH:
            condition = "its input is not 0; no tie at the border of the selection, lest rounding flips an expert"
            return Capacity(self.inputs, self.inputs, condition)
        width = self.active * self.hidden
        return Capacity(width, width, "some active expert has a nonzero gate and a nonzero hidden vector")

    def passes(self) -> Passage:
        return Passage(Verdict.NO, "a mixture of experts is not known to reach every value as it stands")

    @property
    def stuck(self) -> str:
        return f"{self.module} steers at most as many positions as its active experts read numbers; fold fewer"


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
class Skip(Stage):
    """The identity: what enters the sum, unchanged."""

    def steers(self, demand: Demand) -> Capacity:
        return NEVER

    def passes(self) -> Passage:
        return OPEN

    @property
    def stuck(self) -> str:
        return "the skip carries the difference on and has no parameter, so another branch must reach any wanted value"


@final
@dataclass(frozen=True)
class Mark(Stage):
    """Gives the value at this place a letter of the equation sheet. Does nothing else."""

    letter: str

    def steers(self, demand: Demand) -> Capacity:
        return NEVER

    def passes(self) -> Passage:
        return OPEN

    @property
    def stuck(self) -> str:
        return ""


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

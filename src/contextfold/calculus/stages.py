"""The stages of which blocks are made: what each can do, declared where it is defined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, final

from torch import Tensor

from contextfold.calculus.capacity import NEVER, Capacity, Demand, Kind, Verdict
from contextfold.calculus.expression import OPEN, Passage, Stage

__all__ = [
    "Affine",
    "Bias",
    "ExpertOutputs",
    "Experts",
    "Mark",
    "Multiplier",
    "Normalise",
    "Pointwise",
    "Scale",
    "Skip",
]


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
        last = self.module.rsplit(".", 1)[-1]
        return last if last == "c_proj" else last.removesuffix("_proj")


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
    """`alpha p`, a fixed number; not a number where only the weights tell it, and then it is believed nonzero."""

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
    """The inner half of a mixture: a router on z selects `active` of `count` experts; gives every `s_e h_e`."""

    count: int
    active: int
    inputs: int
    hidden: int
    shared: bool = False
    """An expert that is always active stands beside the routed ones."""
    kind: ClassVar[Kind] = Kind.EXPERTS

    def steers(self, demand: Demand) -> Capacity:
        if demand is Demand.REACH:
            return NEVER
        condition = "its input is not 0; no tie at the border of the selection, lest rounding flips an expert"
        return Capacity(self.inputs, self.inputs, condition)

    def passes(self) -> Passage:
        return Passage(Verdict.NO, "what experts give is not known to reach every value")

    @property
    def stuck(self) -> str:
        return f"{self.module} reads {self.inputs} numbers, so it matches at most {self.inputs} positions; fold fewer"


@final
@dataclass(frozen=True)
class ExpertOutputs(_Owned):
    """The outer half: `Σ_e W_out,e (s_e h_e)`, the output maps of `active` experts side by side as one matrix."""

    active: int
    hidden: int
    outputs: int
    shared: bool = False
    """One of them is always active."""
    kind: ClassVar[Kind] = Kind.EXPERTS

    def steers(self, demand: Demand) -> Capacity:
        if demand is Demand.MATCH:
            return NEVER
        width = self.active * self.hidden
        return Capacity(width, width, "some active expert has a nonzero gate and a nonzero hidden vector")

    def passes(self) -> Passage:
        return Passage(Verdict.NO, "output maps of experts are not known to reach every value as they stand")

    @property
    def stuck(self) -> str:
        width = self.active * self.hidden
        return f"{self.module}: {self.active} active experts read {width} numbers and steer as many positions"


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

"""Which rules carry out a plan of the calculus, by default and when a rule is asked for by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from contextfold.calculus import Expression, Plan, Way, plan
from contextfold.errors import InputError
from contextfold.rules.base import UpdateRule
from contextfold.rules.elementwise import InputScale, OutputScale
from contextfold.rules.experts import EvenShare, ExpertInput, LeastNorm, OutputOnly, SharedExpert
from contextfold.rules.joint import JointPostNorm
from contextfold.rules.linear import AttentionOutput, InputWeight, OutputAlone, OutputWeight, ParallelOutput
from contextfold.rules.postnorm import REFERENCES, PostNorm, PostNormBias, Reference
from contextfold.rules.shift import InputBias, OutputBias

__all__ = ["RULES", "Choice", "choose", "rule_named", "rules_for"]

RULES: tuple[type[UpdateRule], ...] = (
    InputWeight,
    InputBias,
    InputScale,
    ExpertInput,
    AttentionOutput,
    ParallelOutput,
    OutputWeight,
    OutputAlone,
    OutputBias,
    OutputScale,
    PostNorm,
    PostNormBias,
    JointPostNorm,
    LeastNorm,
    EvenShare,
    SharedExpert,
    OutputOnly,
)
"""Every rule. Where several serve a way, the first that does is the default."""

THROUGH = (PostNorm.name, PostNormBias.name)
"""Rules that go through a norm, so that a reference scale is chosen too."""

ALONE: tuple[type[UpdateRule], ...] = (OutputAlone, OutputOnly)
"""Rules that leave the inner function as the reduced run has it."""


@dataclass(frozen=True)
class Choice:
    """A plan of the calculus and the rules that carry it out."""

    plan: Plan
    inner: tuple[type[UpdateRule], ...]
    """One rule, or none; several where parallel branches are steered by different kinds of parameters."""
    outer: tuple[type[UpdateRule], ...]
    reference: Reference | None = None
    """The member of the post-norm class, where the outer rule goes through a norm."""

    @property
    def names(self) -> tuple[str, ...]:
        """As they stand in the header of a patch, in the order in which they act."""
        chosen = [rule.name for rule in self.outer]
        if self.reference is not None:
            chosen = [f"{name}: {self.reference.name}" if name in THROUGH else name for name in chosen]
        return (*(rule.name for rule in self.inner), *chosen)


def rule_named(name: str) -> type[UpdateRule]:
    """The rule called `name`. Raises `InputError`."""
    for rule in RULES:
        if rule.name == name:
            return rule
    raise InputError(f"rule {name!r} is unknown; choose one of {', '.join(_names())}")


def _names() -> tuple[str, ...]:
    return (*(rule.name for rule in RULES), *(reference.name for reference in REFERENCES))


def rules_for(way: Way) -> tuple[type[UpdateRule], ...]:
    """The rules that carry out `way`, the default first."""
    return tuple(rule for rule in RULES if rule.serves.covers(way))


def choose(expression: Expression, positions: int = 1, names: Sequence[str] = ()) -> Choice:
    """A plan for one block and its rules; `names` asks for rules, or members of the post-norm class, by name.

    A member applies where the outer rule goes through a norm; elsewhere there is nothing for it to choose.

    Raises `InputError` for an unknown name, `NoWay` when the calculus says that the block, or the block with the
    rules asked for, cannot absorb a context.
    """
    members = [reference for reference in REFERENCES if reference.name in names]
    rules = [rule_named(name) for name in names if name not in {member.name for member in members}]
    chosen = plan(expression, positions, [rule.serves for rule in rules])
    if any(rule in ALONE for rule in rules):
        chosen = chosen.without_inner()
    outer = _rules(chosen.outer, rules)
    through = any(rule.name in THROUGH for rule in outer)
    reference = (members or REFERENCES)[0] if through else None
    return Choice(chosen, _rules(chosen.inner, rules), outer, reference)


def _rules(way: Way | None, wanted: Sequence[type[UpdateRule]]) -> tuple[type[UpdateRule], ...]:
    if way is None:
        return ()
    fitting = rules_for(way)
    if fitting and len({step.demand for step in way.steps}) == 1:
        return (next((rule for rule in wanted if rule in fitting), fitting[0]),)
    single = [replace(way, kind=step.kind, steps=(step,)) for step in way.steps]
    return tuple(dict.fromkeys(rule for part in single for rule in rules_for(part)[:1]))

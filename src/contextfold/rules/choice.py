"""Which rules carry out a plan of the calculus, by default and when a rule is asked for by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contextfold.calculus import Expression, Plan, Way, plan
from contextfold.errors import InputError
from contextfold.rules.base import UpdateRule
from contextfold.rules.elementwise import InputScale, OutputScale
from contextfold.rules.experts import EvenShare, ExpertInput, LeastNorm, OutputOnly, SharedExpert
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
    LeastNorm,
    EvenShare,
    SharedExpert,
    OutputOnly,
)
"""Every rule. Where several serve a way, the first that does is the default."""

ALONE: tuple[type[UpdateRule], ...] = (OutputAlone, OutputOnly)
"""Rules that leave the inner function as the reduced run has it."""


@dataclass(frozen=True)
class Choice:
    """A plan of the calculus and the rules that carry it out."""

    plan: Plan
    inner: type[UpdateRule] | None
    outer: type[UpdateRule] | None
    reference: Reference | None = None
    """The member of the post-norm class, where the outer rule goes through a norm."""

    @property
    def names(self) -> tuple[str, ...]:
        """As they stand in the header of a patch, in the order in which they act."""
        outer = None if self.outer is None else self.outer.name
        if outer is not None and self.reference is not None:
            outer = f"{outer}: {self.reference.name}"
        return tuple(name for name in (None if self.inner is None else self.inner.name, outer) if name is not None)


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
    outer = _rule(chosen.outer, rules)
    through = outer in (PostNorm, PostNormBias)
    reference = (members or REFERENCES)[0] if through else None
    return Choice(chosen, _rule(chosen.inner, rules), outer, reference)


def _rule(way: Way | None, wanted: Sequence[type[UpdateRule]]) -> type[UpdateRule] | None:
    if way is None or not way.steps:
        return None
    fitting = rules_for(way)
    return next((rule for rule in wanted if rule in fitting), fitting[0] if fitting else None)

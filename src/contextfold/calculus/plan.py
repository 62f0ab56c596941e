"""From an answer of the calculus to a plan: an inner way (or none) and an outer one (or none)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from contextfold.calculus.capacity import Capacity, Demand, Kind, Verdict
from contextfold.calculus.compose import Answer, Reason, Way, answer
from contextfold.calculus.expression import Chain, Expression
from contextfold.calculus.render import formula
from contextfold.calculus.stages import ExpertOutputs
from contextfold.errors import NoWay

__all__ = ["Plan", "Service", "plan"]


@dataclass(frozen=True)
class Service:
    """The ways that a rule can carry out."""

    demand: Demand
    kind: Kind
    reads: str = ""
    """Only where the first stage to move reads the value of this letter; any when empty."""
    beside: bool = False
    """Only where contextual layers give values to parallel branches that the steered branch does not read."""
    shared: bool = False
    """Only where one of the experts is always active."""

    def covers(self, way: Way) -> bool:
        """Whether the rule fits: the same kind of parameters, asked to do the same."""
        demand = Demand.REACH if way.reaches else Demand.MATCH
        if not way.steps or self.kind is not way.kind or self.demand is not demand:
            return False
        first = way.steps[0]
        shared = isinstance(first.stage, ExpertOutputs) and first.stage.shared
        placed = self.reads in ("", first.reads) and (not self.beside or bool(first.beside))
        return placed and (not self.shared or shared)


@dataclass(frozen=True)
class Plan:
    """What to move in one block so that it gives, without the context, what it gave with it.

    The outer way decides whether the block can absorb the context; the inner way makes its inner function work as
    under the context first, so that the outer one has less to do. One without the other is possible: no outer
    function is needed where nothing bypasses the inner one, and no inner one where the outer reaches everything.
    """

    expression: Expression
    positions: int
    inner: Way | None
    outer: Way | None
    inner_ways: tuple[Way, ...] = ()
    """What else the inner way could have been, in order of preference."""
    outer_ways: tuple[Way, ...] = ()

    @property
    def decisive(self) -> Way:
        """The way on which exactness rests."""
        way = self.outer or self.inner
        assert way is not None
        return way

    @property
    def capacity(self) -> Capacity:
        """Positions that the plan steers exactly."""
        return self.decisive.capacity

    @property
    def verdict(self) -> Verdict:
        return self.capacity.at(self.positions)

    def without_inner(self) -> Plan:
        """The outer way alone; exact too, with its condition on what the untouched inner function gives."""
        return self if self.outer is None else replace(self, inner=None)


def plan(expression: Expression, positions: int = 1, services: Sequence[Service] = ()) -> Plan:
    """Choose how `expression` absorbs a context at `positions` positions at once.

    `services` restrict the choice: those that match, the inner way; those that reach, the outer one.

    Raises `NoWay` when the calculus says no, with the chain of reasons and the ways out.
    """
    if positions < 1:
        raise ValueError(f"a plan is for at least one position, met {positions}")
    whole = answer(expression, Demand.MATCH)
    wanted = [way for way in whole.ways if _allowed(way, services)]
    chosen = _best(wanted, positions)
    if chosen is None:
        raise NoWay(*_refusal(expression, positions, whole, services))
    if not chosen.reaches:
        return Plan(expression, positions, chosen, None, inner_ways=_able(wanted, positions))
    inner = _inner_ways(expression, chosen)
    fitting = [way for way in inner if _allowed(way, services) and way.capacity.at(positions) is not Verdict.NO]
    outer_ways = tuple(way for way in _able(wanted, positions) if way.reaches)
    return Plan(expression, positions, _best(fitting, positions), chosen, tuple(fitting), outer_ways)


def _allowed(way: Way, services: Sequence[Service]) -> bool:
    demand = Demand.REACH if way.reaches else Demand.MATCH
    mine = [service for service in services if service.demand is demand]
    return not mine or any(service.covers(way) for service in mine)


def _able(ways: Sequence[Way], positions: int) -> tuple[Way, ...]:
    return tuple(way for way in ways if way.capacity.at(positions) is not Verdict.NO)


def _best(ways: Sequence[Way], positions: int) -> Way | None:
    """The first that is sure; else the first that depends on the data."""
    for verdict in (Verdict.YES, Verdict.ASK):
        for way in ways:
            if way.capacity.at(positions) is verdict:
                return way
    return None


def _inner_ways(expression: Expression, way: Way) -> tuple[Way, ...]:
    """Ways to match what feeds the first step of `way`, their paths counted from the root."""
    if way.before is None:
        return ()
    path, stop = way.before
    upstream = Chain(expression.at(path).inside[:stop])
    found = answer(upstream, Demand.MATCH).ways
    if found and not found[0].steps:
        return ()
    moved = []
    for inner in found:
        if not inner.reaches:
            steps = tuple(replace(step, path=(*path, *step.path), anchor=path) for step in inner.steps)
            moved.append(replace(inner, steps=steps, before=None))
    return tuple(moved)


def _refusal(
    expression: Expression, positions: int, whole: Answer, services: Sequence[Service]
) -> tuple[str, tuple[str, ...]]:
    """What was asked, and the chain of reasons."""
    noun = "position" if positions == 1 else "positions"
    asked = f"{formula(expression)} cannot absorb a context at {positions} {noun}"
    reasons = list(whole.reasons)
    if services:
        always = {True: ", one of them always active", False: ""}
        rules = ", ".join(f"{s.demand.value} by {s.kind.value}{always[s.shared]}" for s in services)
        possible = sorted({way.kind.value for way in _able(whole.ways, positions)})
        reasons.insert(0, Reason(f"asked for {rules}; possible here: {', '.join(possible) or 'nothing'}"))
    lines = tuple(line for reason in dict.fromkeys(reasons) for line in reason.lines())
    return asked, lines

"""The composition rule: which parameters of an expression meet a demand, derived from what its stages declare.

Match (the output under z becomes what it was under z_C):
  chain     any one part that matches is enough: what comes after it then follows.            [E] lemmas 6, 7
  sum       either every branch matches, or one branch reaches what is missing.               [E] theorem 5
  product   as a sum, but a branch that reaches is divided by the others, so they may not be 0.
Reach (the output becomes any wanted vector):
  chain     the last part that reaches, if every part after it lets a wanted output be traced back; and a part that
            reaches before a normalisation together with the scale behind it.                 [E] lemmas 8-10, App. B
  sum       any one branch.                                                                   [E] lemmas 11, 12
  product   any one factor, if the others are nonzero.

Theorem 5 of the main paper is the case `match(skip + g(f(z)))`: the skip does not match, so g must reach.
Each rule gives sufficient conditions; where the answer is no, `reasons` says which part stood in the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from contextfold.calculus.capacity import ALWAYS, Capacity, Demand, Kind, Verdict
from contextfold.calculus.expression import Chain, Expression, Given, Passage, Product, Stage, Sum
from contextfold.calculus.spread import UNBOUNDED, Spread
from contextfold.calculus.stages import Mark, Normalise, Scale, Skip

__all__ = ["Answer", "Path", "Reason", "Step", "Way", "answer", "givens"]

Path = tuple[int, ...]
"""Where a part stands in an expression: the index to take at each level."""


@dataclass(frozen=True)
class Step:
    """One stage whose parameter moves."""

    path: Path
    stage: Stage
    demand: Demand
    kind: Kind
    reads: str = ""
    """Letter of the value that the stage reads, where the expression marks it."""
    beside: tuple[str, ...] = ()
    """What contextual layers give to parallel branches and this branch does not read."""
    anchor: Path = ()
    """For a step that reaches: the part, at or above it, that the step makes give what it gave in context."""


@dataclass(frozen=True)
class Way:
    """One way to meet a demand: the steps in the order in which they act."""

    demand: Demand
    kind: Kind
    steps: tuple[Step, ...]
    capacity: Capacity
    before: tuple[Path, int] | None = None
    """The chain, and how many of its parts, that feed the first step: what an inner rule may match."""

    @property
    def reaches(self) -> bool:
        """Whether a part must give an arbitrary output, which the theorem calls the outer function."""
        return any(step.demand is Demand.REACH for step in self.steps)


@dataclass(frozen=True)
class Reason:
    """Why a part does not help, and why the parts in it do not."""

    what: str
    causes: tuple[Reason, ...] = ()

    def lines(self, depth: int = 0) -> Iterator[str]:
        """Indented lines, the cause below what it explains."""
        if self.what:
            yield "  " * depth + "- " + self.what
        for cause in self.causes:
            yield from cause.lines(depth + bool(self.what))


@dataclass(frozen=True)
class Answer:
    """All ways, the preferred first, and what stood in the way of others."""

    ways: tuple[Way, ...]
    reasons: tuple[Reason, ...] = ()

    def at(self, positions: int) -> Verdict:
        """The best verdict of any way."""
        verdicts = {way.capacity.at(positions) for way in self.ways}
        return next((v for v in (Verdict.YES, Verdict.ASK) if v in verdicts), Verdict.NO)


@dataclass(frozen=True)
class _Place:
    """What surrounds a part while the rule walks down."""

    path: Path = ()
    reads: str = ""
    beside: tuple[str, ...] = ()
    spread: Spread = UNBOUNDED

    def inside(self, index: int) -> _Place:
        return replace(self, path=(*self.path, index))

    def in_chain(self, parts: Sequence[Expression], index: int) -> _Place:
        """The place of one part of a chain: behind all parts before it."""
        reads, spread = self.reads, self.spread
        for part in parts[:index]:
            reads, spread = _reading(reads, part), spread.through(part)
        return replace(self, path=(*self.path, index), reads=reads, spread=spread)


PREFERENCE = (
    Kind.WEIGHT, Kind.WEIGHT_AND_SCALE, Kind.EXPERTS, Kind.MIXED, Kind.BIAS, Kind.BIAS_AND_SCALE, Kind.SCALE,
)  # fmt: skip
"""A weight steers most positions; a scale divides by activations, so it comes last."""


def answer(expression: Expression, demand: Demand) -> Answer:
    """Apply the composition rule to `expression`."""
    return _walk(expression, demand, _Place())


def givens(expression: Expression) -> tuple[Given, ...]:
    """The values that an expression takes from outside, each once."""
    if isinstance(expression, Given):
        return (expression,)
    return tuple(dict.fromkeys(given for part in expression.inside for given in givens(part)))


def _walk(part: Expression, demand: Demand, place: _Place) -> Answer:
    match part:
        case Chain(parts):
            return _chain_match(parts, place) if demand is Demand.MATCH else _chain_reach(parts, place)
        case Sum(parts) | Product(parts):
            gate = isinstance(part, Product)
            return _side_match(parts, place, gate) if demand is Demand.MATCH else _side_reach(parts, place, gate)
        case Stage():
            return _stage(part, demand, place)
        case _:
            raise TypeError(f"{type(part).__name__} is no expression of stages")


def _stage(stage: Stage, demand: Demand, place: _Place) -> Answer:
    capacity = stage.steers(demand)
    if stage.kind in (Kind.WEIGHT, Kind.EXPERTS):
        if capacity.maybe and place.spread.maybe == 0:
            return Answer((), (Reason("a weight reads a vector that is always 0; edit a bias, or another site"),))
        limited = min(capacity.sure, place.spread.sure), min(capacity.maybe, place.spread.maybe)
        capacity = replace(capacity, sure=limited[0], maybe=limited[1])
    if capacity == ALWAYS:
        return Answer((Way(demand, Kind.MIXED, (), ALWAYS),))
    stuck = (Reason(stage.stuck),) if stage.stuck else ()
    if stage.kind is None or capacity.maybe == 0:
        return Answer((), stuck)
    step = Step(place.path, stage, demand, stage.kind, place.reads, place.beside)
    return Answer((Way(demand, stage.kind, (step,), capacity),), stuck)


def _reading(reads: str, part: Expression) -> str:
    """Letter of the value behind `part`: kept by what does nothing, forgotten by what computes."""
    match part:
        case Mark(letter):
            return letter
        case Given(name=name):
            return name
        case Skip():
            return reads
        case _:
            return ""


def _chain_match(parts: Sequence[Expression], place: _Place) -> Answer:
    found: list[tuple[tuple[int, bool, int], Way]] = []
    reasons: list[Reason] = []
    for index, part in enumerate(parts):
        inner = _walk(part, Demand.MATCH, place.in_chain(parts, index))
        reasons += inner.reasons
        later = [given.name for after in parts[index + 1 :] for given in givens(after) if given.changes]
        if later:
            reasons.append(Reason(f"what matches here is mixed with {', '.join(later)} later, which does not"))
            continue
        for way in inner.ways:
            # The earliest part that matches takes everything behind it along; one that reaches mends what the
            # parts before it left, so the latest is best.
            order = (PREFERENCE.index(way.kind) if way.steps else -1, way.reaches, -index if way.reaches else index)
            found.append((order, way if way.before else replace(way, before=(place.path, index))))
    return Answer(tuple(way for _, way in sorted(found, key=lambda pair: pair[0])), tuple(reasons))


def _chain_reach(parts: Sequence[Expression], place: _Place) -> Answer:
    ways: list[Way] = []
    reasons: list[Reason] = []
    asks: list[str] = []
    for index in reversed(range(len(parts))):
        part = parts[index]
        here = _walk(part, Demand.REACH, place.in_chain(parts, index))
        reasons += here.reasons
        through = _through(parts, index, place)
        for way in (*here.ways, *through):
            capacity = way.capacity
            for condition in asks:
                capacity = capacity.asking(condition)
            ways.append(replace(way, capacity=capacity, before=way.before or (place.path, index)))
        passage = _passage(part)
        if passage.verdict is Verdict.NO:
            reasons.append(Reason(f"what comes before is out of reach: {passage.why}"))
            break
        asks += [passage.why] if passage.verdict is Verdict.ASK else []
    ways.sort(key=lambda way: PREFERENCE.index(way.kind))
    return Answer(tuple(ways), tuple(reasons))


def _passage(part: Expression) -> Passage:
    if isinstance(part, Stage):
        return part.passes()
    return Passage(Verdict.NO, "a wanted output is not traced back through branches side by side")


def _through(parts: Sequence[Expression], index: int, place: _Place) -> Iterator[Way]:
    """A scale with a normalisation before it: the map before both sets the direction, the scale the rest.

    Section 4 of the equation sheet. A centred normalisation (LayerNorm) also fixes the mean of what it gives, which
    the family of section 4 does not respect, so there the scale stands alone.
    """
    scale = parts[index]
    below = index - 1
    while below > 0 and isinstance(parts[below], Mark):
        below -= 1
    if not isinstance(scale, Scale) or below < 1:
        return
    normalise = parts[below]
    if not isinstance(normalise, Normalise) or normalise.centred:
        return
    # Output maps of experts side by side are one matrix, so they go through a norm as a weight does.
    pairs = {
        Kind.WEIGHT: Kind.WEIGHT_AND_SCALE,
        Kind.EXPERTS: Kind.WEIGHT_AND_SCALE,
        Kind.BIAS: Kind.BIAS_AND_SCALE,
    }
    second = Step((*place.path, index), scale, Demand.REACH, Kind.SCALE, beside=place.beside)
    for way in _chain_reach(parts[:below], place).ways:
        if way.kind in pairs:
            maybe = 1 if way.kind is Kind.BIAS else way.capacity.maybe
            condition = "; ".join(filter(None, (way.capacity.condition, "the wanted branch is not 0")))
            capacity = Capacity(min(1, way.capacity.sure), maybe, condition)
            yield replace(way, kind=pairs[way.kind], steps=(*way.steps, second), capacity=capacity)


def _side_match(parts: Sequence[Expression], place: _Place, gate: bool) -> Answer:
    answers = [_single(_walk(part, Demand.MATCH, place.inside(i))) for i, part in enumerate(parts)]
    reached = _side_reach(parts, place, gate)
    ways = [] if any(not a.ways for a in answers) else list(_together(answers))
    ways += [_anchored(way, place.path) for way in reached.ways]
    if all(a.ways for a in answers):
        return Answer(tuple(ways), tuple(reason for a in answers for reason in a.reasons))
    unmatched = tuple(reason for a in answers if not a.ways for reason in a.reasons)
    name = "factor" if gate else "branch"
    what = f"not every {name} follows the context, so one of them must reach any wanted value"
    return Answer(tuple(ways), (Reason(what, tuple(dict.fromkeys((*unmatched, *reached.reasons)))),))


def _single(found: Answer) -> Answer:
    """Without the ways through a norm: their two steps belong together and do not mix with those of other branches."""
    pairs = (Kind.WEIGHT_AND_SCALE, Kind.BIAS_AND_SCALE)
    return replace(found, ways=tuple(way for way in found.ways if way.kind not in pairs))


def _anchored(way: Way, path: Path) -> Way:
    """Steps that reach, so that the part at `path` matches."""
    return replace(way, demand=Demand.MATCH, steps=tuple(replace(step, anchor=path) for step in way.steps))


def _together(answers: Sequence[Answer]) -> Iterator[Way]:
    """Every branch matched; by one kind of parameter where possible."""
    kinds = [kind for kind in PREFERENCE if any(w.kind is kind for a in answers for w in a.ways if w.steps)]
    seen: set[tuple[Path, ...]] = set()
    for kind in kinds:
        chosen = [next((w for w in a.ways if w.kind is kind or not w.steps), a.ways[0]) for a in answers]
        steps = tuple(step for way in chosen for step in way.steps)
        paths = tuple(step.path for step in steps)
        if paths in seen:
            continue
        seen.add(paths)
        capacity = ALWAYS
        for way in chosen:
            capacity = capacity.together(way.capacity)
        alike = {way.kind for way in chosen if way.steps}
        yield Way(Demand.MATCH, alike.pop() if len(alike) == 1 else Kind.MIXED, steps, capacity)
    if not kinds:
        yield Way(Demand.MATCH, Kind.MIXED, (), ALWAYS)


def _side_reach(parts: Sequence[Expression], place: _Place, gate: bool) -> Answer:
    ways: list[Way] = []
    reasons: list[Reason] = []
    for index, part in enumerate(parts):
        own = givens(part)
        others = [given for i, other in enumerate(parts) if i != index for given in givens(other)]
        beside = tuple(given.name for given in others if given.after and given not in own)
        inside = replace(place.inside(index), beside=beside if own else place.beside)
        found = _walk(part, Demand.REACH, inside)
        reasons += found.reasons
        for way in found.ways:
            capacity = way.capacity.asking("no entry of the other factors is 0") if gate else way.capacity
            ways.append(replace(way, capacity=capacity))
    ways.sort(key=lambda way: PREFERENCE.index(way.kind))
    return Answer(tuple(ways), tuple(reasons))

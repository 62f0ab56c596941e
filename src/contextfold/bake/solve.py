"""Layer by layer: every place is solved from what all examples put into it under the edits below it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from contextfold.bake.examples import Example, Frame
from contextfold.bake.joint import Joint, OuterJoint, Stops
from contextfold.bake.kept import BakedSite, Shelf
from contextfold.bake.lockstep import Lane, Lockstep
from contextfold.bake.moments import Moments, left_out
from contextfold.bake.prefix import Prefix, padded
from contextfold.outcomes import Finding, Outcome
from contextfold.patch import factor_dtype
from contextfold.room import give_back_freed_memory
from contextfold.rules import refit_scale
from contextfold.rules.base import finite, refuse_if
from contextfold.solving import solved

__all__ = ["GRID", "Pair", "kept_span", "pairs_of", "solve", "visited"]

Pair = tuple[Lane, Lane]
"""The same tokens with what is aimed at, and without the context, edited."""

GRID = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
"""Penalties, relative to the mean eigenvalue, among which leaving a question out decides."""

PROBES = 4
"""At so many layers, evenly spread, the penalty is decided; those between go on with it."""

PULL = 0.03
"""Weight of the present scale in the new one, in units of a typical activation."""


def pairs_of(
    model: nn.Module, frame: Frame, examples: Sequence[Example], size: int, emphasis: float = 1.0
) -> list[Pair]:
    """Forwards over batches of at most `size` examples of similar length; anchors are their own target.

    Where the model is to say a token of an answer, the square of what is missed counts `emphasis` times.
    """
    pairs: list[Pair] = []
    numbers = {id(example): i for i, example in enumerate(examples)}
    for moves in (True, False):
        chosen = sorted((e for e in examples if e.moves is moves), key=lambda e: e.tail.numel())
        if not chosen:
            continue
        prefix = Prefix.of(model, frame.full if moves else frame.kept)
        step = size if prefix.shared else 1
        for start in range(0, len(chosen), step):
            part = chosen[start : start + step]
            groups = torch.tensor([numbers[id(e)] for e in part])
            pairs.append(_pair(prefix, Prefix(model, frame.kept), part, groups, emphasis))
    return pairs


def _pair(full: Prefix, kept: Prefix, part: Sequence[Example], groups: Tensor, emphasis: float) -> Pair:
    """The examples of `part`, of which `groups` are the numbers, behind what they are to be answered by, and alone."""
    ids, real = padded([e.tail for e in part])
    answers = torch.tensor([e.answer for e in part])[:, None]
    weights = torch.where(torch.arange(ids.shape[1]) >= answers - 1, emphasis**0.5, 1.0)
    owners = groups[:, None].expand_as(ids)

    def lane(prefix: Prefix, edited: bool) -> Lane:
        # Tokens before the examples count only in that those of the first row are guarded, where the lane is edited.
        before = 0 if prefix.shared else prefix.ids.numel()
        counts = torch.cat([torch.zeros(ids.shape[0], before, dtype=torch.bool), real], 1)
        guarded = torch.arange(before if edited else 0)
        rows = counts.flatten().nonzero()[:, 0]
        return Lane(lambda: prefix.run(ids, real), edited, rows, guarded, owners[real], weights[real][:, None])

    return lane(full, False), lane(kept, True)


@torch.no_grad()
def solve(
    joints: Sequence[Joint],
    pairs: Sequence[Pair],
    lam0: float | None,
    tol: float,
    shelf: Shelf | None,
    progress: Callable[[int, int], None],
) -> tuple[BakedSite, ...]:
    """Solve `joints` in the order in which the model runs them, but for those that `shelf` holds.

    `lam0` None: leaving questions out decides, at the first place and at some after it. With a shelf, an edit that has
    acted is put there and not held: all but the last joint are without their edits afterwards. `progress` is told how
    many places of how many are solved.
    """
    last = max(joint.layer for joint in joints)
    probes = {round(last * i / PROBES) for i in range(PROBES)}
    chosen: dict[str, float] = {}
    reports: dict[str, BakedSite] = {}
    before: Joint | None = None
    for joint in joints:
        joint.delta = joint.scale = None
    for joint, stops in visited(joints, pairs):
        if shelf is not None and before is not None:
            before.delta = before.scale = None
        report = None if shelf is None else shelf.take(joint)
        if report is None:
            error = float("nan")
            if lam0 is None and (joint.layer in probes or joint.role not in chosen):
                chosen[joint.role], error = _decide(joint, stops)
            report = _solve(joint, stops, lam0 or chosen[joint.role], tol, error)
            if shelf is not None:
                shelf.put(joint, report)
        reports[joint.name], chosen[joint.role] = report, report.lam0
        progress(len(reports), len(joints))
        before = joint
    return tuple(reports[joint.name] for joint in joints)


def visited(joints: Sequence[Joint], pairs: Sequence[Pair]) -> Iterator[tuple[Joint, Stops]]:
    """The `joints`, none of which has an edit yet, in turn, with what all forwards have in hand there.

    An edit that a joint is given acts then, before the next is visited, and not again.
    """
    steps = Lockstep([lane for pair in pairs for lane in pair])
    with ExitStack() as stack:
        for place in joints:
            place.steps = steps
            stack.callback(setattr, place, "steps", None)
            place.listen(stack)
        stack.callback(steps.close)
        for _ in joints:
            joint = steps.advance()
            assert isinstance(joint, Joint), "the model runs its places in the order in which it was read"
            stops = [(a.stop, b.stop) for a, b in pairs if a.stop is not None and b.stop is not None]
            give_back_freed_memory()  # by the forwards: it would come on top of what the solve takes
            joint.survey(stops)
            yield joint, stops
            # Whoever asked still holds the list: emptied, so that no rows of one place outlive it.
            stops.clear()
            give_back_freed_memory()


def kept_span(joint: Joint, stops: Stops) -> Tensor:
    """An orthonormal basis `(k, in)` of what the kept tokens put in, float64."""
    guard = stops[0][1].guard.double()
    finite(joint.name, guard=guard)
    _, sizes, Vt = solved(torch.linalg.svd, guard, full_matrices=False)
    basis: Tensor = Vt[sizes > 1e-6 * sizes[0]]
    return basis


def _decide(joint: Joint, stops: Stops) -> tuple[float, float]:
    """The penalty of `GRID` under which questions that were left out are missed least, and by how much."""
    groups = torch.cat([reduced.lane.groups for _, reduced in stops])
    moments = Moments(joint.shape[1], joint.shape[0], kept_span(joint, stops))
    sides = [joint.weighted(full, reduced) for full, reduced in stops]
    s, t = (torch.cat(side) for side in zip(*sides, strict=True))
    errors = left_out(moments.unguarded(s), t, groups, GRID)
    best = min(range(len(GRID)), key=errors.__getitem__)
    return GRID[best], errors[best]


def _solve(joint: Joint, stops: Stops, lam0: float, tol: float, error: float) -> BakedSite:
    rows = sum(reduced.lane.rows.numel() for _, reduced in stops)
    moments = Moments(joint.shape[1], joint.shape[0], kept_span(joint, stops), rows)
    for full, reduced in stops:
        s, t = joint.weighted(full, reduced)
        finite(joint.name, s=s, t=t)
        moments.add(s, t)
    for name, part in moments.sums():
        finite(joint.name, **{name: part})
    ridge = moments.solve(lam0, tol)
    kept = ridge.delta.to(factor_dtype(stops[0][1].read.dtype))
    _fits(joint.name, kept.B, kept.A)
    joint.delta = kept
    if isinstance(joint, OuterJoint) and joint.norm is not None:
        joint.scale = _scale(joint, stops)
        _fits(joint.name, joint.scale.to(kept.B.dtype))
    size = joint.linear.norm(torch.float64) if isinstance(joint, OuterJoint) else joint.shape[0] ** 0.5
    ratio = ridge.delta.norm() / size if size else float("inf")
    return BakedSite(joint.layer, joint.role, ridge.delta.rank, lam0, ridge.explained, error, ratio)


def _fits(where: str, *parts: Tensor) -> None:
    bad = sum(int((~torch.isfinite(part)).sum()) for part in parts)
    refuse_if(bad > 0, Finding(Outcome.OVERFLOW, where, f"entries beyond {parts[0].dtype}", bad, 0))


def _scale(joint: OuterJoint, stops: Stops) -> Tensor:
    """The scale, refitted on the directions that the edited map gives, with a pull towards the present one ([ours])."""
    assert joint.norm is not None
    assert joint.delta is not None
    u, g = [], []
    for full, reduced in stops:
        q = reduced.output.double() + joint.delta(reduced.source.to(joint.delta.B.dtype)).double()
        weights = reduced.lane.weights.to(q)
        u.append(weights * joint.norm.unscaled(q))
        g.append(weights * joint.branch(full, reduced))
    directions = torch.cat(u)
    pull = PULL * float(directions.square().sum(0).mean())
    return refit_scale(joint.norm.scale, directions, torch.cat(g), pull)

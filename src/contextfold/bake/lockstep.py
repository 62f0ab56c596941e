"""Several forwards of one model, all stopped at the same place until what they need is known.

A bake solves one map after the other, each from what all examples put into it under the edits solved before. So
every forward stops inside a hook of the map, the map is solved, and all go on: one ordinary forward per batch, and
nothing stored from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from contextfold.pausing import Pausable

__all__ = ["Lane", "Lockstep", "Stop"]


@dataclass(frozen=True, eq=False)
class Stop:
    """What a forward has in hand where it stopped: rows of a map's input and output, and of what its result joins."""

    place: object
    read: Tensor
    """What the map reads, of all tokens: the forward holds it anyway, and a copy of the counting rows of every forward
    at once would take as much again."""
    lane: Lane
    given: Tensor
    """What the map gives, of all tokens, for the same reason."""
    parts: tuple[Tensor, ...]
    """`(n, d)` each: values that add up, times their factors, to what the result joins."""
    guard: Tensor
    """`(k, in)`: inputs of the kept tokens."""

    @property
    def source(self) -> Tensor:
        """`(n, in)`, a new copy."""
        return self.lane.pick(self.read)

    @property
    def output(self) -> Tensor:
        """`(n, out)`, a new copy."""
        return self.lane.pick(self.given)


@dataclass(eq=False)
class Lane:
    """One forward. `rows` and `kept` are flat indices of the tokens that count, and of those that must not move."""

    forward: Callable[[], object]
    edited: bool
    """Whether edits act on it."""
    rows: Tensor
    kept: Tensor
    groups: Tensor
    """`(n,)`: to which example each counting row belongs."""
    weights: Tensor
    """`(n, 1)`: by how much each counting row is multiplied where a place is solved."""
    parts: dict[tuple[object, int], Tensor] = field(default_factory=dict)
    """What a place has seen so far of what its result joins."""
    stop: Stop | None = None
    under_way: Pausable[object] | None = None

    def pick(self, value: Tensor) -> Tensor:
        """The counting rows of `(B, T, ·)` or `(B T, ·)`."""
        return value.reshape(-1, value.shape[-1])[self.rows.to(value.device)]

    def guard(self, value: Tensor) -> Tensor:
        """The rows of the kept tokens."""
        return value.reshape(-1, value.shape[-1])[self.kept.to(value.device)]


class Lockstep:
    """Drives lanes from stop to stop. The lane that runs is `current`; hooks of the model ask for it."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = tuple(lanes)
        self.current: Lane | None = None

    def advance(self) -> object | None:
        """Run every lane to its next stop; the place that they stopped at, or None when all are through."""
        for lane in self.lanes:
            lane.stop = None  # of all, before one of them fills its next one
        for lane in self.lanes:
            if lane.under_way is None:
                lane.under_way = Pausable(lane.forward)
            self.current = lane
            try:
                lane.under_way.go_on()
            finally:
                self.current = None
        places = {None if lane.stop is None else lane.stop.place for lane in self.lanes}
        assert len(places) == 1, "all lanes run the same layers"
        return places.pop()

    def arrive(self, stop: Stop) -> None:
        """Called by a hook inside a lane: wait here until the others have arrived and the map is solved."""
        assert self.current is not None
        assert self.current.under_way is not None
        self.current.stop = stop
        self.current.under_way.pause()

    def close(self) -> None:
        """End forwards that are under way, wherever they are."""
        for lane in self.lanes:
            under_way, lane.under_way, lane.stop = lane.under_way, None, None
            if under_way is not None:
                under_way.close()

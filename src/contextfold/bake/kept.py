"""What came of one place of a bake, and how it is kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from contextfold.bake.joint import Joint
from contextfold.lowrank import LowRank
from contextfold.store import Store

__all__ = ["BakedSite", "Shelf"]


@dataclass(frozen=True)
class BakedSite:
    """How one place was solved."""

    layer: int
    role: str
    rank: int
    lam0: float
    explained: float
    """Share of the wanted change that the edit meets on the examples."""
    left_out_error: float
    """Relative error on a question that was left out, where it was measured; NaN elsewhere."""
    weight_ratio: float
    """`‖dW‖ / ‖W‖`, Frobenius; of the identity for input maps."""


@dataclass(frozen=True)
class Shelf:
    """Where edits lie that do not act: a bake needs each of them once, and all of them only in the end."""

    store: Store
    device: torch.device

    def put(self, joint: Joint, report: BakedSite) -> None:
        """Write what `joint` was given."""
        assert joint.delta is not None
        tensors = {"B": joint.delta.B, "A": joint.delta.A}
        if joint.scale is not None:
            tensors["scale"] = joint.scale
        self.store.put(_place(joint), tensors, asdict(report))

    def take(self, joint: Joint) -> BakedSite | None:
        """Give `joint` its edit back, if it was solved before."""
        found = self.store.get(_place(joint), self.device)
        if found is None:
            return None
        parts, report = found
        joint.delta, joint.scale = LowRank(parts["B"], parts["A"]), parts.get("scale")
        return BakedSite(**report)

    def take_all(self, joints: Sequence[Joint]) -> tuple[BakedSite, ...]:
        """The same for all of them; nothing where one was not solved."""
        found = []
        for joint in joints:
            report = self.take(joint)
            if report is None:
                return ()
            found.append(report)
        return tuple(found)


def _place(joint: Joint) -> str:
    return f"{joint.layer:04d}-{joint.role.replace(' ', '-')}"

"""What came of one place of a bake, and how it is kept on disk."""

from __future__ import annotations

from dataclasses import asdict

import torch

from contextfold.bake.joint import Joint
from contextfold.bake.solve import BakedSite
from contextfold.lowrank import LowRank
from contextfold.store import Store

__all__ = ["keep", "kept"]


def keep(store: Store, joint: Joint, report: BakedSite) -> None:
    """Write what `joint` was given to `store`."""
    assert joint.delta is not None
    tensors = {"B": joint.delta.B, "A": joint.delta.A}
    if joint.scale is not None:
        tensors["scale"] = joint.scale
    store.put(_place(joint), tensors, asdict(report))


def kept(store: Store, joint: Joint, device: torch.device) -> BakedSite | None:
    """Give `joint` its edit back, if it was solved before."""
    found = store.get(_place(joint), device)
    if found is None:
        return None
    parts, report = found
    joint.delta, joint.scale = LowRank(parts["B"], parts["A"]), parts.get("scale")
    return BakedSite(**report)


def _place(joint: Joint) -> str:
    return f"{joint.layer:04d}-{joint.role.replace(' ', '-')}"

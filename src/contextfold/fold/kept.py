"""What came of one block of a sequence, and how it is kept on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from contextfold.fold.rows import SequenceLayer
from contextfold.outcomes import Finding, Outcome
from contextfold.patch import Edit, Site
from contextfold.patchfile import packed, unpacked
from contextfold.store import Store

__all__ = ["SolvedLayer"]


@dataclass(frozen=True, eq=False)
class SolvedLayer:
    """One block's edits, by which rules they were found, and how it was met."""

    edits: Mapping[Site, Edit]
    plan: tuple[str, ...]
    layer: SequenceLayer

    def keep(self, store: Store) -> None:
        """Write it to `store`."""
        tensors, sites = packed(self.edits)
        findings = [{**asdict(finding), "outcome": finding.outcome.name} for finding in self.layer.findings]
        layer = {**asdict(self.layer), "findings": findings}
        store.put(_place(self.layer.layer), tensors, {"sites": sites, "plan": self.plan, "layer": layer})

    @classmethod
    def kept(cls, store: Store, layer: int, device: torch.device) -> SolvedLayer | None:
        """That of `layer`, if it was solved before."""
        found = store.get(_place(layer), device)
        if found is None:
            return None
        tensors, report = found
        return cls(unpacked(report["sites"], tensors), tuple(report["plan"]), _layer(report["layer"]))


def _layer(row: Mapping[str, Any]) -> SequenceLayer:
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    findings = tuple(Finding(**{**found, "outcome": Outcome[found["outcome"]]}) for found in row["findings"])
    plain["findings"] = findings
    return SequenceLayer(**plain)


def _place(layer: int) -> str:
    return f"{layer:04d}"

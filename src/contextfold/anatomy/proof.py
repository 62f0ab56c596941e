"""What every proof shares: how equal is equal, and how a mismatch is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contextfold.errors import ProbeFailed

__all__ = ["TOLERANCE", "Limits", "seen_once"]

TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Relative error per vector and dtype. Upstream norms compute in float32 whatever the model's dtype, which sets
the first entry; a wrong form misses by far more than any of these."""


@dataclass(frozen=True)
class Limits:
    """Compares what was met in one block with what its form says."""

    block: str
    relative: float

    @classmethod
    def of(cls, block: str, dtype: torch.dtype) -> Limits:
        return cls(block, TOLERANCE.get(dtype, 0.0))

    def same(self, what: str, form: str, met: Tensor, rebuilt: Tensor) -> None:
        """Raises `ProbeFailed` when shapes differ or the relative error is too large."""
        if met.shape != rebuilt.shape:
            raise ProbeFailed(f"{self.block}: {what} has shape {tuple(met.shape)}, {form} {tuple(rebuilt.shape)}")
        met, rebuilt = met.double(), rebuilt.double()
        error = float((met - rebuilt).norm() / rebuilt.norm().clamp_min(torch.finfo(torch.float64).tiny))
        if not error <= self.relative:
            raise ProbeFailed(
                f"{self.block}: {what} is not {form}: relative error {error:.2g}, limit {self.relative:.2g}; "
                "the model's blocks do not have the form that its family describes"
            )

    def require(self, holds: bool, claim: str) -> None:
        if not holds:
            raise ProbeFailed(f"{self.block}: it is not so that {claim}; such a block is not supported")


def seen_once(block: str, name: str, values: Sequence[Tensor]) -> Tensor:
    """The one value that passed. Raises `ProbeFailed` when none or several did."""
    if not values:
        raise ProbeFailed(
            f"{block}: {name} never passed the module that it belongs to in a forward (a fused kernel that computes "
            "with the weights and never calls their modules?), so no hook can read it; switch such kernels off"
        )
    if len(values) > 1:
        raise ProbeFailed(
            f"{block}: {name} passed {len(values)} times in one forward instead of once (a looped or shared layer); "
            "one edit cannot serve several depths, so such a block is not supported"
        )
    return values[0]

"""What every proof shares: how equal is equal, and how a mismatch is told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from contextfold.errors import ProbeFailed

__all__ = ["TOLERANCE", "Limits", "seen_once"]

TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Relative error per vector and dtype. Upstream norms compute in float32 whatever the model's dtype, which sets
the first entry; a wrong form misses by far more than any of these."""


FACTOR = 1e-6
"""How far a multiplier may be from what the record says: a number that the model keeps in float32 is itself rounded."""

DEVIATIONS = 6
"""How many standard deviations of its rounding a fitted multiplier may be off besides; 3 is the most that was met in
1,400 layers."""


@dataclass(frozen=True)
class Limits:
    """Compares what was met in one block with what its form says."""

    block: str
    relative: float
    unit: float
    """Relative error of one rounding, at most."""

    @classmethod
    def of(cls, block: str, dtype: torch.dtype) -> Limits:
        return cls(block, TOLERANCE.get(dtype, 0.0), torch.finfo(dtype).eps / 2)

    def rounded_once(self) -> Limits:
        """For values between which there is no more than one rounding of the result."""
        return replace(self, relative=max(2 * self.unit, TOLERANCE[torch.float32]))

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

    def add_up(self, what: str, total: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Raises `ProbeFailed` when a part, by name, enters the sum with another factor than one.

        The sum and its parts are each rounded. Such errors are independent, so along a part they nearly cancel: where
        entries are right to 1 % only, a factor of 1.002 still shows.
        """
        exact = total.double()
        noise = self.unit / 3**0.5 * torch.stack([exact, *parts.values()]).square().sum(0).sqrt()
        noise = noise.clamp_min(torch.finfo(torch.float64).tiny)
        rest = (exact - sum(parts.values())) / noise
        for name, part in parts.items():
            along = part / noise
            power = float(along.square().sum())
            excess = float((rest * along).sum()) / power if power else 0.0
            limit = FACTOR + DEVIATIONS / math.sqrt(power) if power else 0.0
            if not abs(excess) <= limit:
                raise ProbeFailed(
                    f"{self.block}: {name} enters {what} {1 + excess:.6g} times, where the record says once: an "
                    f"unknown multiplier (limit of its error {limit:.2g}); such a block is not supported"
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

"""What every rule owes: it reaches its target on a dense float64 twin, and does nothing to what it did not read."""

from __future__ import annotations

import torch
from torch import Tensor

from contextfold.lowrank import LowRank

EXACT = 1e-9


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reaches(met: Tensor, wanted: Tensor, unpatched: Tensor) -> None:
    """`met` is `wanted`, and was not before."""
    assert float((unpatched - wanted).norm()) > 1e-2 * float(wanted.norm())
    assert float((met - wanted).norm()) <= EXACT * float(wanted.norm())


def vanishes(delta: LowRank, sources: Tensor) -> None:
    """Nothing happens to inputs orthogonal to all `sources (n, in)`, found by dense linear algebra."""
    width = sources.shape[1]
    basis = torch.linalg.qr(sources.T.double(), mode="complete").Q[:, sources.shape[0] :]
    assert basis.shape[1] == width - sources.shape[0] > 0
    assert float((delta.to_dense() @ basis).norm()) <= EXACT * delta.norm()


def smallest(delta: LowRank, sources: Tensor) -> None:
    """No exact edit is smaller: every other one differs by N with N S = 0, and the edit is orthogonal to those."""
    dense = delta.to_dense()
    width = sources.shape[1]
    N = random(*dense.shape, seed=9) @ (torch.eye(width) - torch.linalg.pinv(sources.double()) @ sources.double())
    assert abs(float((dense * N).sum())) <= EXACT * float(dense.norm() * N.norm())
    assert float((dense + N).norm()) > float(dense.norm())

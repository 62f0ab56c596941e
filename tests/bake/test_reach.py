"""The nearest branches that a norm can give, against a dense search."""

from __future__ import annotations

import torch

from contextfold.lowrank import invert_rmsnorm
from contextfold.rules import nearest_reachable


def test_long_branches_agree_with_the_inversion_of_one() -> None:
    g = 5 * torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    m = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = nearest_reachable(g, m)
    for row, found in zip(g, y, strict=True):
        exact = invert_rmsnorm(row, m)
        assert exact.mu < 0
        assert (found - exact.y).norm() < 1e-9 * exact.y.norm()
        assert abs(float(found.square().mean()) - 1) < 1e-12


def test_short_branches_keep_their_direction_and_zero_scales_ask_for_nothing() -> None:
    m = torch.tensor([1.0, 2.0, 0.0, -0.5], dtype=torch.float64)
    g = torch.tensor([[0.01, 0.04, 0.0, 0.02]], dtype=torch.float64)
    y = nearest_reachable(g, m)
    direction = torch.tensor([0.01, 0.02, 0.0, -0.04], dtype=torch.float64)
    assert torch.cosine_similarity(y[0], direction, dim=0) > 1 - 1e-12
    assert y[0, 2] == 0
    assert torch.isfinite(nearest_reachable(torch.zeros(1, 4, dtype=torch.float64), m)).all()

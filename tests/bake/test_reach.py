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


def test_weighted_and_pulled_rows_are_the_best_ones() -> None:
    draw = torch.Generator().manual_seed(2)
    g, u = (torch.randn(5, 7, dtype=torch.float64, generator=draw) for _ in range(2))
    g, u = 10 * g, u / u.square().mean(-1, keepdim=True).sqrt()
    m = torch.rand(7, dtype=torch.float64, generator=draw) + 0.5
    w = torch.rand(7, dtype=torch.float64, generator=draw) + 0.1

    def missed(y: torch.Tensor) -> torch.Tensor:
        return (w * (m * y - g).square()).sum(-1) + 0.5 * (y - u).square().sum(-1)

    y = nearest_reachable(g, m, w, u, 0.5)
    assert (y.square().mean(-1) - 1).abs().max() < 1e-12
    for size in (1e-3, 0.1, 1.0):
        other = y + size * torch.randn(200, 5, 7, dtype=torch.float64, generator=draw)
        assert (missed(other / other.square().mean(-1, keepdim=True).sqrt()) > missed(y)).all()


def test_what_the_norm_gives_already_asks_for_no_change() -> None:
    draw = torch.Generator().manual_seed(3)
    u = torch.randn(5, 7, dtype=torch.float64, generator=draw)
    u = u / u.square().mean(-1, keepdim=True).sqrt()
    m = torch.logspace(-4, 3, 7, dtype=torch.float64)
    w = torch.rand(7, dtype=torch.float64, generator=draw) + 0.1
    assert (nearest_reachable(m * u, m, w, u, 0.03) - u).abs().max() < 1e-9
    # A channel of scale 1e-4 cannot bring what is asked of it, and keeps what it gives.
    asked = m * u + torch.eye(7, dtype=torch.float64)[0]
    kept = nearest_reachable(asked, m, w, u, 0.03)
    assert (kept - u).abs().max() < 0.01
    assert (nearest_reachable(asked, m) - u).abs().max() > 0.5

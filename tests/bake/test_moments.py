"""The ridge against dense float64 linear algebra and brute force."""

from __future__ import annotations

import pytest
import torch

from contextfold.bake.moments import Moments, Ridge, left_out, penalty


def rows(n: int, inner: int, outer: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(n)
    s = torch.randn(n, inner, generator=g, dtype=torch.float64) * torch.logspace(0, -2, inner, dtype=torch.float64)
    return s, torch.randn(n, outer, generator=g, dtype=torch.float64)


def dense(s: torch.Tensor, t: torch.Tensor, lam0: float) -> torch.Tensor:
    gram = s.T @ s
    return torch.linalg.solve(gram + penalty(gram, lam0) * torch.eye(s.shape[1], dtype=s.dtype), s.T @ t).T


def none(inner: int) -> torch.Tensor:
    return torch.empty(0, inner, dtype=torch.float64)


@pytest.mark.parametrize("n", [7, 40])
def test_streamed_and_dual_forms_are_the_ridge(n: int) -> None:
    s, t = rows(n, 12, 5)
    whole = Moments(12, 5, none(12))
    for start in range(0, n, 3):
        whole.add(s[start : start + 3], t[start : start + 3])
    found = whole.solve(1e-2)
    expected = dense(s, t, 1e-2)
    assert (found.delta.to_dense() - expected).norm() < 1e-10 * expected.norm()
    lost = (t - s @ expected.T).square().sum() + found.lam * expected.square().sum()
    assert found.explained == pytest.approx(1 - float(lost / t.square().sum()), abs=1e-10)


def test_memory_does_not_grow_with_the_rows() -> None:
    s, t = rows(400, 12, 5)
    whole = Moments(12, 5, none(12))
    for start in range(0, 400, 4):
        whole.add(s[start : start + 4], t[start : start + 4])
        assert sum(part.shape[0] for part, _ in whole._rows) <= 12


def test_guarded_inputs_are_not_touched() -> None:
    s, t = rows(60, 12, 5)
    guarded = torch.linalg.qr(torch.randn(12, 3, dtype=torch.float64))[0].T
    whole = Moments(12, 5, guarded)
    whole.add(s, t)
    D = whole.solve(1e-3).delta
    assert D(guarded).abs().max() < 1e-12 * D(s).abs().max()
    free = Moments(12, 5, none(12))
    free.add(s, t)
    assert free.solve(1e-3).delta(guarded).abs().max() > 1e-2


def test_a_tolerance_lowers_the_rank_and_costs_no_more_than_it_says() -> None:
    s, t = rows(60, 12, 8)
    t = t * torch.logspace(0, -3, 8, dtype=torch.float64)

    def solved(tol: float) -> Ridge:
        whole = Moments(12, 8, none(12))
        whole.add(s, t)
        return whole.solve(1e-3, tol)

    full, low = solved(0.0), solved(1e-2)
    assert low.delta.rank < full.delta.rank == 8

    def objective(D: torch.Tensor) -> float:
        return float((t - s @ D.T).square().sum() + full.lam * D.square().sum())

    worse = objective(low.delta.to_dense()) - objective(full.delta.to_dense())
    assert 0 < worse <= 1.0001e-2 * full.explained * float(t.square().sum())


def test_left_out_questions_match_refits_without_them() -> None:
    s, t = rows(30, 12, 5)
    t = t + s @ torch.randn(12, 5, dtype=torch.float64)
    groups = torch.arange(30) // 4
    grid = (1e-3, 1e-1, 10.0)
    found = left_out(s, t, groups, grid)
    for lam0, error in zip(grid, found, strict=True):
        lam = penalty(s.T @ s, lam0)
        missed = 0.0
        for group in range(8):
            out = groups == group
            gram = s[~out].T @ s[~out] + lam * torch.eye(12, dtype=s.dtype)
            D = torch.linalg.solve(gram, s[~out].T @ t[~out]).T
            missed += float((t[out] - s[out] @ D.T).square().sum())
        assert error == pytest.approx(missed / float(t.square().sum()), rel=1e-9)
    assert len({round(e, 6) for e in found}) == 3

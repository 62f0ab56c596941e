"""LowRank against its dense twin, the two solves against dense linear algebra and random feasible points."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contextfold.lowrank import LowRank, invert_rmsnorm, invert_rmsnorm_rows, min_norm_update, times

SEEDS = st.integers(0, 10**6)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def product(out: int, rank: int, width: int, seed: int = 0) -> LowRank:
    return LowRank(random(out, rank, seed=seed), random(rank, width, seed=seed + 1))


@given(st.integers(1, 6), st.integers(0, 4), st.integers(1, 6), SEEDS)
def test_it_is_its_dense_twin(out: int, rank: int, width: int, seed: int) -> None:
    a, b, x = product(out, rank, width, seed), product(out, 2, width, seed + 7), random(3, width, seed=seed + 9)
    A, B = a.to_dense(), b.to_dense()
    assert a.shape == A.shape
    assert a.rank == rank
    assert torch.allclose(a(x), x @ A.T)
    assert torch.allclose((a + b).to_dense(), A + B)
    assert torch.allclose((a - b).to_dense(), A - B)
    assert torch.allclose((0.3 * a).to_dense(), 0.3 * A)
    assert math.isclose(a.norm(), float(A.norm()), rel_tol=1e-9, abs_tol=1e-12)
    assert torch.allclose(((a + b) - b).to_dense(), A)


def test_factors_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not form a product"):
        LowRank(random(3, 2), random(3, 4))


@given(st.integers(1, 5), SEEDS)
def test_recompress_finds_the_rank(rank: int, seed: int) -> None:
    one = product(9, rank, 8, seed)
    wasteful = one + one + product(9, rank, 8, seed + 5) * 0.0
    tight = wasteful.recompress()
    assert tight.rank == rank
    assert torch.allclose(tight.to_dense(), 2 * one.to_dense())


@given(st.floats(0.01, 0.9), SEEDS)
def test_recompress_keeps_its_tolerance_and_nothing_of_that_rank_is_better(tol: float, seed: int) -> None:
    one = product(9, 6, 8, seed)
    dense, small = one.to_dense(), one.recompress(tol)
    S = torch.linalg.svdvals(dense)
    assert float((dense - small.to_dense()).norm()) <= tol * float(dense.norm()) * (1 + 1e-9)
    assert math.isclose(
        float((dense - small.to_dense()).norm()), float(S[small.rank :].norm()), rel_tol=1e-6, abs_tol=1e-9
    )
    assert small.rank == 0 or float(S[small.rank - 1 :].norm()) > tol * float(dense.norm()) * (1 - 1e-9)


def test_recompress_of_nothing_is_nothing() -> None:
    assert product(4, 0, 5).recompress().rank == 0
    assert (product(4, 2, 5) * 0.0).recompress().rank == 0


@given(st.integers(1, 5), SEEDS)
def test_min_norm_update_is_the_pseudo_inverse(n: int, seed: int) -> None:
    S, T = random(n, 7, seed=seed), random(n, 4, seed=seed + 1)
    solution = min_norm_update(S, T)
    expected = T.T @ torch.linalg.pinv(S).T
    assert torch.allclose(solution.delta.to_dense(), expected, rtol=1e-6, atol=1e-9)
    assert torch.allclose(solution.delta(S), T, rtol=1e-7, atol=1e-8)
    assert solution.rank == n
    assert solution.residual < 1e-9


@given(st.integers(1, 4), st.integers(1, 3), SEEDS)
def test_rows_that_hold_the_edit_add_no_rank(moved: int, held: int, seed: int) -> None:
    S, T = random(moved + held, 9, seed=seed), random(moved + held, 4, seed=seed + 1)
    T[:held] = 0
    solution = min_norm_update(S, T)
    assert solution.delta.rank == moved
    assert solution.rank == moved + held
    assert torch.allclose(solution.delta.to_dense(), T.T @ torch.linalg.pinv(S).T, rtol=1e-6, atol=1e-9)


@given(st.integers(1, 40), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), SEEDS)
def test_a_product_in_parts_is_the_product_in_float64(out: int, dtype: torch.dtype, seed: int) -> None:
    W, x = random(out, 6, seed=seed).to(dtype), random(3, 6, seed=seed + 1).to(dtype)
    assert torch.allclose(times(W, x), x.double() @ W.double().T, rtol=1e-13, atol=1e-13)
    assert times(W, x[0]).shape == (out,)


def test_one_row_is_the_rank_one_form() -> None:
    s, t = random(1, 7), random(1, 4, seed=1)
    assert torch.allclose(min_norm_update(s, t).delta.to_dense(), torch.outer(t[0], s[0]) / s.square().sum())


def test_rows_of_very_unequal_length_are_all_met() -> None:
    S, T = random(3, 7), random(3, 4, seed=1)
    S[0] *= 1e9
    solution = min_norm_update(S, T)
    assert solution.condition < 100
    assert float((solution.delta(S) - T).norm()) < 1e-6 * float(T.norm())


def test_more_rows_than_the_width_get_the_least_squares_of_the_unit_rows() -> None:
    S, T = random(20, 5), random(20, 3, seed=1)
    solution = min_norm_update(S, T)
    unit, wanted = S / S.norm(dim=1, keepdim=True), T / S.norm(dim=1, keepdim=True)
    assert torch.allclose(solution.delta.to_dense(), torch.linalg.lstsq(unit, wanted).solution.T)
    assert solution.residual > 0.1


def test_zero_rows_and_no_rows() -> None:
    assert min_norm_update(torch.zeros(2, 5), torch.zeros(2, 3)).delta.rank == 0
    assert min_norm_update(torch.zeros(1, 5), random(1, 3)).residual == pytest.approx(1)
    twice = min_norm_update(random(1, 5).repeat(2, 1), random(1, 3, seed=1).repeat(2, 1))
    assert twice.rank == 1
    assert twice.residual < 1e-12
    assert math.isinf(twice.condition)


def objective(g: Tensor, m: Tensor, y: Tensor) -> Tensor:
    return ((m * y - g) ** 2).sum(-1)


def feasible(d: int, mean_square: float, count: int, seed: int, near: Tensor) -> Tensor:
    """Random points of the sphere: anywhere, and close to `near`."""
    far = random(count, d, seed=seed)
    close = near + 0.03 * random(count, d, seed=seed + 1) * near.abs().max()
    points = torch.cat([far, close])
    return points * torch.sqrt(mean_square / points.square().mean(-1, keepdim=True))


def check_optimal(g: Tensor, m: Tensor, mean_square: float, seed: int) -> bool:
    found = invert_rmsnorm(g, m, mean_square)
    assert float((found.y.square().mean() - mean_square).abs()) < 1e-10
    points = feasible(g.numel(), mean_square, 3000, seed, found.y)
    best = float(objective(g, m, found.y))
    assert best <= float(objective(g, m, points).min()) + 1e-9 * (1 + best)
    # Stationary: (m² - mu) y = g m, with mu at most min m², which makes it the global minimum.
    assert torch.allclose((m * m - found.mu) * found.y, g * m, rtol=1e-6, atol=1e-7)
    assert found.mu <= float((m * m).min()) * (1 + 1e-9) + 1e-12
    return found.hard


@given(st.integers(2, 9), st.sampled_from([1.0, 0.9]), SEEDS)
def test_inversion_of_the_norm_is_optimal(d: int, mean_square: float, seed: int) -> None:
    assert check_optimal(random(d, seed=seed), random(d, seed=seed + 1), mean_square, seed) is False


@given(st.integers(3, 9), st.sampled_from([1.0, 0.9]), st.integers(1, 2), SEEDS)
def test_the_hard_case_is_optimal(d: int, mean_square: float, ties: int, seed: int) -> None:
    """Coordinates of the smallest scale want nothing, the others little: the paper's root does not exist."""
    m = 1 + random(d, seed=seed).abs()
    m[:ties] = 0.5
    g = 0.01 * random(d, seed=seed + 1)
    g[:ties] = 0
    assert check_optimal(g, m, mean_square, seed) is True


@given(st.integers(3, 9), SEEDS)
def test_zeros_in_scale_and_target(d: int, seed: int) -> None:
    g, m = random(d, seed=seed), random(d, seed=seed + 1)
    m[0] = 0
    g[1] = 0
    check_optimal(g, m, 1.0, seed)


def test_a_coordinate_that_wants_nothing_need_not_be_hard() -> None:
    m, g = torch.tensor([0.5, 1.0, 1.0], dtype=torch.float64), torch.tensor([0.0, 9.0, 9.0], dtype=torch.float64)
    assert check_optimal(g, m, 1.0, 0) is False


@given(st.integers(1, 5), st.integers(2, 30), SEEDS)
def test_rows_are_inverted_together_as_one_by_one(n: int, d: int, seed: int) -> None:
    g, m, rho = random(n, d, seed=seed), random(d, seed=seed + 1), 1 - 0.2 * random(n, seed=seed + 2).sigmoid()
    g[0, m.abs().argmin()] = 0  # may be the hard case
    met = invert_rmsnorm_rows(g, m, rho)
    wanted = torch.stack([invert_rmsnorm(row, m, float(r)).y for row, r in zip(g, rho, strict=True)])
    assert torch.allclose(met, wanted, rtol=1e-7, atol=1e-9)

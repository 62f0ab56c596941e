"""LowRank against its dense twin, the two solves against dense linear algebra and random feasible points."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contextfold.lowrank import LowRank, Metric, invert_rmsnorm, invert_rmsnorm_rows, min_norm_update, times

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


@pytest.mark.parametrize("size", [1e-9, 1e-4, 1e6])
def test_the_inversion_knows_no_unit(size: float) -> None:
    """Wanted branch and scale in other units give the same vector; shorter vectors, in proportion."""
    g, m = random(4, 7, seed=1), random(7, seed=2)
    one = invert_rmsnorm_rows(g, m, torch.ones(4))
    assert torch.allclose(invert_rmsnorm_rows(size * g, size * m, torch.ones(4)), one, rtol=1e-9, atol=0)
    for row, y in zip(g, one, strict=True):
        met = invert_rmsnorm(size * row, size * m)
        assert torch.allclose(met.y, y, rtol=1e-9, atol=0)
        assert met.mu == pytest.approx(size**2 * invert_rmsnorm(row, m).mu, rel=1e-9, abs=0)
        shorter = invert_rmsnorm(row, size * m, size**-2)
        assert torch.allclose(size * shorter.y, y, rtol=1e-9, atol=0)


@pytest.mark.parametrize("wanted", [1e-3, 1.0, 1e3])
def test_one_coordinate_is_plus_or_minus_the_length(wanted: float) -> None:
    for g, m in ((wanted, 0.5), (-wanted, 0.5), (wanted, -0.5), (-wanted, -0.5)):
        met = invert_rmsnorm(torch.tensor([g]), torch.tensor([m]), 4.0)
        assert float(met.y) == pytest.approx(2.0 if g * m > 0 else -2.0)
        assert met.mu == pytest.approx(m * m - abs(g * m) / 2, rel=1e-9)


def test_what_nothing_depends_on_keeps_the_sign_of_what_is_wanted() -> None:
    m = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    g = torch.tensor([-0.3, 0.2, 0.0, 0.5], dtype=torch.float64)
    met = invert_rmsnorm(g, m)
    assert met.hard
    assert met.mu == 0
    free = ((4 - 0.25) / 3) ** 0.5
    assert torch.allclose(met.y, torch.tensor([-free, free, free, 0.5], dtype=torch.float64))
    together = invert_rmsnorm_rows(torch.stack([g, 9 * g]), m, torch.tensor([1.0, 0.25], dtype=torch.float64))
    assert torch.allclose(together[0], met.y)
    assert torch.allclose(together[1], invert_rmsnorm(9 * g, m, 0.25).y)


def test_dtype_and_device_are_those_of_both_factors() -> None:
    one = product(3, 2, 4).to(torch.float32)
    assert (one.B.dtype, one.A.dtype) == (torch.float32, torch.float32)
    away = product(3, 2, 4).to(torch.bfloat16, torch.device("meta"))
    assert {(f.device.type, f.dtype) for f in (away.B, away.A)} == {("meta", torch.bfloat16)}


def test_factors_must_be_matrices_and_the_message_has_their_shapes() -> None:
    for B, A in ((random(3, 2), random(2)), (random(3), random(3, 4)), (random(3, 2), random(3, 4))):
        with pytest.raises(ValueError, match="do not form a product") as refused:
            LowRank(B, A)
        assert str(refused.value) == f"B {tuple(B.shape)} and A {tuple(A.shape)} do not form a product"


@pytest.mark.parametrize(("out", "width"), [(3, 9), (9, 3), (6, 6)])
def test_singular_vectors_are_those_of_the_dense_product(out: int, width: int) -> None:
    one = product(out, 5, width)
    U, S, Vt = one.svd()
    k = min(5, out, width)
    assert (U.shape, S.shape, Vt.shape) == ((out, k), (k,), (k, width))
    assert torch.allclose(S, torch.linalg.svdvals(one.to_dense())[:k])
    assert torch.allclose(U.T @ U, torch.eye(k, dtype=torch.float64))
    assert torch.allclose(Vt @ Vt.T, torch.eye(k, dtype=torch.float64))
    assert torch.allclose(U * S @ Vt, one.to_dense())
    assert torch.allclose(product(out, 1, width).svd()[1], torch.linalg.svdvals(product(out, 1, width).to_dense())[:1])
    empty = product(out, 0, width).svd()
    assert [tuple(part.shape) for part in empty] == [(out, 0), (0,), (0, width)]


def test_norms_and_recompression_in_narrow_dtypes() -> None:
    one = product(6, 3, 5).to(torch.float32)
    assert one.norm() == pytest.approx(float(one.to_dense().double().norm()), rel=1e-6)
    huge = LowRank(1e30 * one.B, 1e30 * one.A)
    assert huge.norm() == pytest.approx(1e60 * one.norm(), rel=1e-6)  # does not fit into float32
    assert isinstance(one.norm(), float)
    # What rounding leaves of a product of rank 3 is no rank.
    assert (one + 1e-9 * one + product(6, 2, 5).to(torch.float32) * 1e-12).recompress().rank == 3
    diagonal = LowRank(torch.diag(torch.tensor([4.0, 3.0, 1e-3])), torch.eye(3))
    assert [diagonal.recompress(tol).rank for tol in (0.0, 1e-4, 3e-4, 0.5, 0.7, 1.0)] == [3, 3, 2, 2, 1, 0]


@pytest.mark.parametrize("ridge", [0.0, 1e-2, 0.5])
def test_with_a_metric_the_edit_is_the_dense_formula(ridge: float) -> None:
    """`dW = Tᵀ (S K⁻¹ Sᵀ)⁻¹ S K⁻¹`, and no other exact edit does less to typical inputs."""
    typical = random(60, 7, seed=3) * torch.linspace(0.2, 3, 7)
    S, T = random(2, 7), random(2, 4, seed=1)
    K = typical.T @ typical / 60
    K = K + ridge * K.diagonal().mean() * torch.eye(7)
    metric = Metric.of(typical, ridge)
    assert torch.allclose(metric.L @ metric.L.T, K)
    met = min_norm_update(S, T, metric)
    inverse = torch.linalg.inv(K)
    dense = T.T @ torch.linalg.inv(S @ inverse @ S.T) @ S @ inverse
    assert torch.allclose(met.delta.to_dense(), dense)
    assert torch.allclose(met.delta(S), T)
    assert (met.rank, met.residual < 1e-9) == (2, True)
    white = torch.linalg.solve(torch.linalg.cholesky(K), S.T).T
    assert met.condition == pytest.approx(float(torch.linalg.cond(white / white.norm(dim=1, keepdim=True))))
    narrow = Metric.of(typical.float(), ridge)
    assert narrow.L.dtype is torch.float64
    assert torch.allclose(Metric.of(typical).L, Metric.of(typical, 1e-2).L, rtol=0, atol=0)


def test_the_condition_is_that_of_the_rows_that_are_not_zero() -> None:
    S, T = random(4, 7), random(4, 3, seed=1)
    S[1], T[1] = 0, 0
    met = min_norm_update(S, T)
    alive = S[[0, 2, 3]]
    assert met.condition == pytest.approx(float(torch.linalg.cond(alive / alive.norm(dim=1, keepdim=True))))
    assert met.rank == 3
    assert torch.allclose(met.delta.to_dense(), T.T @ torch.linalg.pinv(S).T)
    none = min_norm_update(0 * S, 0 * T)
    assert (none.rank, none.condition, none.residual) == (0, 1.0, 0.0)
    assert min_norm_update(S[:0], T[:0]).condition == 1.0


@pytest.mark.parametrize(("apart", "rank"), [(1e-14, 1), (1e-9, 2)])
def test_rows_closer_than_rounding_are_one(apart: float, rank: int) -> None:
    S = random(1, 9).repeat(2, 1)
    S[1] += apart * random(9, seed=4)
    met = min_norm_update(S, random(2, 3, seed=1))
    assert met.rank == rank
    assert math.isinf(met.condition) is (rank == 1)


def test_the_residual_is_relative() -> None:
    for size in (1e-6, 1.0, 1e6):
        twice, want = random(1, 5).repeat(2, 1), size * random(2, 3, seed=1)
        expected = float((want - want.mean(0)).norm() / want.norm())
        assert min_norm_update(twice, want).residual == pytest.approx(expected, rel=1e-9)


def test_narrow_inputs_are_solved_in_float64() -> None:
    S, T = random(3, 7).bfloat16(), random(3, 4, seed=1).bfloat16()
    met = min_norm_update(S, T)
    assert {met.delta.B.dtype, met.delta.A.dtype} == {torch.float64}
    assert torch.allclose(met.delta(S.double()), T.double(), rtol=1e-10, atol=1e-12)
    found = invert_rmsnorm(T[0].float(), S[0, :4].float())
    assert found.y.dtype is torch.float64
    assert invert_rmsnorm_rows(T.float(), S[0, :4].float(), torch.ones(3)).dtype is torch.float64

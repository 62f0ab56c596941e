"""Several positions through a norm: the common scale against its optimality conditions and a linear programme."""

from __future__ import annotations

import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from contextfold.errors import NotControllable
from contextfold.lowrank import Metric, invert_rmsnorm
from contextfold.outcomes import Outcome
from contextfold.rules import JointPostNorm, joint_scale
from contextfold.rules.joint import FEASIBLE, SOFT
from contextfold.rules.lengths import SHORTEST, fit_lengths
from contract import random, reaches, smallest

EPS = 1e-6


def normed(p: Tensor, eps: float = EPS) -> Tensor:
    return p / torch.sqrt(p.square().mean(-1, keepdim=True) + eps)


def positive(n: int, d: int, seed: int) -> Tensor:
    """Equations that some positive a solves, an a that is not all alike."""
    G, a = random(n, d, seed=seed).abs(), 0.5 + random(d, seed=seed + 1).abs()
    return G / (G @ a)[:, None]


def room(G: Tensor) -> float:
    """The largest t for which some `a >= t` solves `G a = 1`; 0 where none is positive."""
    n, d = G.shape
    solved = linprog(
        [*[0.0] * d, -1.0], A_eq=torch.cat([G, G.new_zeros(n, 1)], 1).numpy(), b_eq=[1.0] * n,
        A_ub=torch.cat([-torch.eye(d, dtype=G.dtype), G.new_ones(d, 1)], 1).numpy(), b_ub=[0.0] * d,
        bounds=[(0, None)] * d + [(None, 1.0)],
    )  # fmt: skip
    return -solved.fun if solved.status == 0 else 0.0


@pytest.mark.parametrize(("n", "d"), [(1, 4), (2, 5), (3, 8), (6, 9)])
def test_the_scale_is_feasible_and_nothing_feasible_is_better_balanced(n: int, d: int) -> None:
    """Σ 1/a is convex, so it is least where its gradient has no component along any a + N with G N = 0."""
    for seed in range(5):
        G = positive(n, d, 10 * seed)
        met = joint_scale(G)
        assert met.miss <= FEASIBLE
        assert float((G @ met.a - 1).abs().max()) <= FEASIBLE
        assert float(met.a.min()) > 0
        null = torch.linalg.svd(G, full_matrices=True).Vh[n:]
        slope = met.a.pow(-2)
        assert float((null @ slope).norm()) <= 1e-5 * float(slope.norm())


def test_a_scale_in_closed_form() -> None:
    """One position: a_j ∝ G_j^(-1/2); two positions on coordinates of their own: each by itself."""
    row = torch.tensor([[0.25, 1.0, 4.0]], dtype=torch.float64)
    expected = row[0].rsqrt() / (row[0] @ row[0].rsqrt())
    assert torch.allclose(joint_scale(row).a, expected, rtol=1e-8)
    both = torch.block_diag(row, 3 * row)
    assert torch.allclose(joint_scale(both).a, torch.cat([expected, expected / 3]), rtol=1e-8)


def test_a_coordinate_that_nobody_wants_keeps_its_scale() -> None:
    G = positive(2, 5, 3)
    G[:, 1] = 0
    met = joint_scale(G / G.sum(1, keepdim=True))
    assert float(met.a[1]) == 1
    assert met.miss <= FEASIBLE


def test_it_agrees_with_a_linear_programme_on_what_is_possible() -> None:
    seen = {True: 0, False: 0}
    for seed in range(40):
        G = random(4, 5, seed=seed).square() * (random(4, 5, seed=seed + 500) > -0.4) + 1e-3
        G = G / G.mean()
        t = room(G)
        if 0 < t < 1e-3:
            continue  # on the border rounding decides
        possible = t > 0
        seen[possible] += 1
        assert (joint_scale(G).miss <= FEASIBLE) is possible
    assert min(seen.values()) >= 5


def test_where_nothing_fits_the_equations_are_soft_and_the_miss_is_told() -> None:
    """The least Σ 1/a + ‖G a − 1‖² / (2 SOFT): its gradient vanishes."""
    G = positive(2, 6, 1)
    G[1] = 2 * G[0]
    met = joint_scale(G)
    left = G @ met.a - 1
    assert met.miss == pytest.approx(float(left.abs().max()))
    assert met.miss > 0.3  # the best compromise of a and 2 a is 1/3 off
    slope = met.a.pow(-2)
    assert float((G.T @ left / SOFT - slope).norm()) <= 1e-6 * float(slope.norm())


def twin(n: int, d: int = 8, seed: int = 0, eps: float = EPS) -> dict[str, Tensor]:
    """A wanted branch that some positive scale serves: unit vectors under one scale that is not the old one."""
    t = {
        "h": random(n, 12, seed=seed), "W": random(d, 12, seed=seed + 1), "b": random(d, seed=seed + 2),
        "m": 1 + 0.3 * random(d, seed=seed + 3),
    }  # fmt: skip
    t["branch"] = t["h"] @ t["W"].T + t["b"]
    t["m"][0] *= -1
    unit = normed(random(n, d, seed=seed + 4))
    c = t["branch"].square().mean(1, keepdim=True).sqrt()
    rho = c / torch.sqrt(c * c + eps)
    unit *= rho / unit.square().mean(1, keepdim=True).sqrt()
    t["g"] = unit * t["m"] * (1 + 0.5 * random(d, seed=seed + 5).abs())
    return t


def after(t: dict[str, Tensor], met, eps: float = EPS) -> Tensor:
    return met.scale * normed(t["branch"] + met.solution.delta(t["h"]), eps)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("eps", [EPS, 2.0])
def test_all_positions_are_exact_under_one_scale(n: int, eps: float) -> None:
    for seed in range(4):
        t = twin(n, seed=10 * seed, eps=eps)
        t["g"] /= t["g"][0, 0].clone()  # one entry is exactly 1, and none of the numbers is special
        met = JointPostNorm().solve("block", t["h"], t["branch"], t["g"], t["m"], eps)
        assert list(met.findings) == []
        assert met.miss <= FEASIBLE
        assert torch.equal(met.lengths, torch.ones(n, dtype=torch.float64))
        assert torch.equal(met.g, t["g"])
        assert torch.equal(met.scale.sign(), t["m"].sign())
        found, wanted = after(t, met, eps), t["g"]
        assert float((found - wanted).norm()) <= 1e-6 * float(wanted.norm())
        assert float((t["m"] * normed(t["branch"], eps) - wanted).norm()) > 1e-2 * float(wanted.norm())
        if n > 1:
            smallest(met.solution.delta, t["h"])


def test_one_position_is_the_balanced_scale_and_exact() -> None:
    t = twin(1)
    met = JointPostNorm().solve("block", t["h"], t["branch"], t["g"], t["m"], EPS)
    reaches(after(t, met), t["g"], t["m"] * normed(t["branch"]))
    M = torch.sqrt(t["m"].square() + (0.1 * t["m"].abs().median()) ** 2)
    shape = (t["g"][0].abs() * M).sqrt()
    ratio = met.scale.abs() / shape
    assert torch.allclose(ratio, ratio.mean().expand_as(ratio), rtol=1e-8)


def test_a_scale_of_zero_becomes_positive() -> None:
    t = twin(2)
    t["m"][1] = 0
    met = JointPostNorm().solve("block", t["h"], t["branch"], t["g"], t["m"], EPS)
    assert float(met.scale[1]) > 0
    assert float(met.scale[0]) < 0


def test_a_branch_of_length_zero_gets_a_length() -> None:
    t = twin(2)
    t["branch"][0] = 0
    met = JointPostNorm().solve("block", t["h"], t["branch"], t["g"], t["m"], EPS)
    assert float((after(t, met) - t["g"]).norm()) <= 1e-5 * float(t["g"].norm())


def clashing(seed: int = 0) -> dict[str, Tensor]:
    """Two positions that want the same direction at lengths of 1 and 3: no scale serves both."""
    t = twin(3, seed=seed)
    t["g"][1] = 3 * t["g"][0]
    return t


def test_what_no_scale_serves_is_named_and_comes_as_near_as_the_scale_allows() -> None:
    t = clashing()
    met = JointPostNorm().solve("block", t["h"], t["branch"], t["g"], t["m"], EPS)
    (found,) = met.findings
    assert found.outcome is Outcome.SCALE_INFEASIBLE
    assert (found.where, found.quantity) == ("block", "largest relative miss of a reach")
    assert found.value == met.miss > 0.3
    assert found.threshold == FEASIBLE
    c = t["branch"].square().mean(1).sqrt()
    reach = (c / torch.sqrt(c * c + EPS)).square()
    unit = torch.stack([invert_rmsnorm(g, met.scale, float(r)).y for g, r in zip(t["g"], reach, strict=True)])
    assert torch.allclose(after(t, met), met.scale * unit, rtol=1e-6, atol=1e-8)


def test_free_lengths_make_it_exact_along_their_lines() -> None:
    t = clashing()
    along = t["g"] + 0.3 * random(*t["g"].shape, seed=9)
    met = JointPostNorm().solve("block", t["h"], t["branch"], t["g"], t["m"], EPS, along=along)
    (found,) = met.findings
    assert found.outcome is Outcome.LENGTH_FREED
    assert (found.where, found.quantity, found.threshold) == ("block", "largest relative change of a length", 0.0)
    assert found.value == pytest.approx(float((met.lengths - 1).abs().max()))
    assert found.value > 0.05
    wanted = t["g"] + (met.lengths - 1)[:, None] * along
    assert torch.allclose(met.g, wanted)
    assert float((after(t, met) - wanted).norm()) <= 1e-6 * float(wanted.norm())
    assert float(met.lengths.min()) >= SHORTEST


def test_lengths_stay_where_one_scale_serves_all() -> None:
    t = twin(3)
    met = JointPostNorm().solve("block", t["h"], t["branch"], t["g"], t["m"], EPS, along=t["g"])
    assert list(met.findings) == []
    assert torch.equal(met.g, t["g"])


@pytest.mark.parametrize("name", ["h", "g", "m"])
def test_what_is_not_finite_is_named(name: str) -> None:
    t = twin(2)
    t[name].view(-1)[1] = torch.nan
    with pytest.raises(NotControllable, match=f"block.*entries of {name} that are not finite"):
        JointPostNorm().solve("block", t["h"], t["branch"], t["g"], t["m"], EPS)


def test_a_zero_target_is_named_and_counted() -> None:
    t = clashing()
    dead = t["g"].clone()
    dead[1:] = 0
    with pytest.raises(NotControllable) as refused:
        JointPostNorm().solve("block", t["h"], t["branch"], dead, t["m"], EPS)
    (found,) = refused.value.findings
    assert (found.outcome, found.where, found.value) == (Outcome.NOTHING_TO_AIM_AT, "block", 2)
    assert (found.quantity, found.threshold) == ("positions with a zero target", 0)
    with pytest.raises(NotControllable, match="zero target"):
        JointPostNorm().solve("block", t["h"], t["branch"], t["g"], t["m"], EPS, along=0 * t["g"])


def test_with_a_metric_the_typical_inputs_move_least() -> None:
    t = twin(2)
    typical = random(40, 12, seed=8) * torch.linspace(0.1, 3, 12)
    plain, white = (
        JointPostNorm().solve("block", t["h"], t["branch"], t["g"], t["m"], EPS, metric=metric)
        for metric in (None, Metric.of(typical))
    )
    assert torch.allclose(after(t, white), after(t, plain), rtol=1e-6, atol=1e-8)
    moved = [float(met.solution.delta(typical).norm()) for met in (plain, white)]
    assert moved[1] < 0.99 * moved[0]


def reach_along(a: Tensor, g: Tensor, along: Tensor, M: Tensor, rho: Tensor, s: Tensor) -> Tensor:
    """`RMS((g_i + s e_i) ⊘ m')² / rho_i²` under `m' = M ⊘ sqrt(a)`, for offsets s `(n, k)`: `(n, k)`."""
    moved = g[:, None] + s[..., None] * along[:, None]
    return (moved * a.sqrt() / M).square().mean(-1) / rho.square()[:, None]


@pytest.mark.parametrize("seed", range(8))
def test_lengths_against_a_search_on_a_grid(seed: int) -> None:
    n, d = 4, 6
    a, M = 0.3 + random(d, seed=seed).abs(), 0.5 + random(d, seed=seed + 20).abs()
    rho = 0.9 + 0.1 * random(n, seed=seed + 40).sigmoid()
    g, along = 1.2 * random(n, d, seed=seed + 60), random(n, d, seed=seed + 80)
    scaled, beta = fit_lengths(a, g, along, M, rho)
    grid = torch.linspace(SHORTEST - 1, 9, 19_001, dtype=torch.float64).expand(n, -1)
    values = reach_along(a, g, along, M, rho, grid)
    k = max(1.0, float(values.min(1).values.max()))
    assert torch.allclose(a / scaled, torch.full_like(a, k), rtol=1e-6)
    assert float(beta.min()) >= SHORTEST
    met = reach_along(scaled, g, along, M, rho, (beta - 1)[:, None])[:, 0]
    assert torch.allclose(met, torch.ones_like(met), rtol=1e-6)
    # Nearest to 1, as a ratio: no sign change of reach - 1 on a length that is nearer.
    inside = (grid + 1).log().abs() < (beta.log().abs() - 3e-3)[:, None]
    side = (values / k > 1).double()
    crossing = (side[:, 1:] != side[:, :-1]) & inside[:, 1:] & inside[:, :-1]
    assert not bool(crossing.any())

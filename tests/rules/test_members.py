"""The members of the post-norm class by their formulas, the refit of a scale, and what a norm reaches at once."""

from __future__ import annotations

import pytest
import torch
from scipy.optimize import minimize

from contextfold.lowrank import invert_rmsnorm
from contextfold.rules import REFERENCES, PostNorm, PostNormBias, nearest_reachable, refit_scale
from contract import random

MEMBERS = {member.name: member for member in REFERENCES}
EPS = 1e-5
H, P, G = random(1, 9), random(1, 7, seed=1), random(1, 7, seed=2)


def shapes(m: torch.Tensor) -> dict[str, torch.Tensor]:
    """To what the new scale is proportional, coordinate by coordinate."""
    median = sorted(m.abs().tolist())[3] or 1.0
    floored = torch.tensor([(x * x + 0.01 * median * median) ** 0.5 for x in m.tolist()], dtype=torch.float64)
    sign = torch.tensor([-1.0 if x < 0 else 1.0 for x in m.tolist()], dtype=torch.float64)
    return {
        "flat": torch.ones(7, dtype=torch.float64), "floored": sign * floored,
        "balanced": sign * (G[0].abs() * floored).sqrt(), "scalar": m,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["flat", "floored", "balanced", "scalar"])
@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_the_new_scale_has_the_shape_that_its_member_says(name: str, size: float) -> None:
    m = size * (0.2 + random(7, seed=3))
    m[4] *= -1
    if name != "scalar":
        m[5] = 0.0
    for met in (
        PostNorm(MEMBERS[name]).solve("here", H, P, G, m, EPS),
        PostNormBias(MEMBERS[name]).solve("here", P, G, m, EPS),
    ):
        ratio = met.scale / shapes(m)[name]
        assert float(ratio[0]) > 0
        assert torch.allclose(ratio, ratio[:1].expand_as(ratio), rtol=1e-9)
        # The factor: what the norm gives has the reach of the branch as it is.
        unit = G[0] / met.scale
        assert float(unit.square().mean()) == pytest.approx(float(P.square().mean() / (P.square().mean() + EPS)))


@pytest.mark.parametrize("name", ["floored", "balanced"])
def test_a_scale_that_is_zero_in_most_places_is_floored_at_a_tenth(name: str) -> None:
    m = torch.zeros(7, dtype=torch.float64)
    m[0] = -2.0
    met = PostNorm(MEMBERS[name]).solve("here", H, P, G, m, EPS)
    ratio = met.scale / shapes(m)[name]
    assert torch.allclose(ratio, ratio[:1].expand_as(ratio), rtol=1e-9)


def test_a_branch_of_length_zero_gets_length_one() -> None:
    met = PostNormBias(MEMBERS["flat"]).solve("here", 0 * P, G, torch.ones(7), EPS)
    assert float(met.delta.square().mean()) == pytest.approx(1.0)
    assert torch.allclose(met.delta / float((1 + EPS) ** 0.5) * met.scale, G[0])


def test_the_length_of_the_branch_is_kept() -> None:
    met = PostNorm().solve("here", H, P, G, 1 + 0.1 * random(7, seed=3), EPS)
    q = P + met.delta(H)
    assert float(q.norm()) == pytest.approx(float(P.norm()))
    bias = PostNormBias().solve("here", P, G, 1 + 0.1 * random(7, seed=3), EPS)
    assert torch.allclose(P[0] + bias.delta, q[0])
    assert torch.allclose(bias.scale, met.scale)


def test_the_theorem_leaves_the_bias() -> None:
    met = PostNormBias(MEMBERS["theorem"]).solve("here", P, G, torch.ones(7), EPS)
    assert torch.equal(met.delta, torch.zeros(7, dtype=torch.float64))
    assert torch.allclose(met.scale, G[0] / (P[0] / torch.sqrt(P.square().mean() + EPS)))


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("pull", [1e-3, 2.0])
def test_refitting_is_a_ridge_towards_the_plan(n: int, pull: float) -> None:
    """The least of Σ_i (m_j u_ij − g_ij)² + pull (m_j − m'_j)², as ordinary least squares with one more row."""
    planned, u, g = random(7, seed=4), random(n, 7, seed=5), random(n, 7, seed=6)
    met = refit_scale(planned, u, g, pull)
    root = pull**0.5
    for j in range(7):
        A = torch.cat([u[:, j], torch.tensor([root], dtype=torch.float64)])[:, None]
        b = torch.cat([g[:, j], root * planned[j : j + 1]])[:, None]
        assert float(met[j]) == pytest.approx(float(torch.linalg.lstsq(A, b).solution))


@pytest.mark.parametrize("seed", range(4))
def test_no_unit_vector_comes_nearer(seed: int) -> None:
    """Against scipy on the sphere, started from many places; for branches that are longer than the norm's."""
    m = 0.3 + random(5, seed=seed).abs()
    g = 4 * random(3, 5, seed=seed + 10)
    met = nearest_reachable(g, m)
    for row, y in zip(g, met, strict=True):
        assert float(y.square().mean()) == pytest.approx(1.0)

        def far(x, row=row, m=m):
            unit = torch.tensor(x)
            return float((m * unit / unit.square().mean().sqrt() - row).square().sum())

        best = min(minimize(far, random(5, seed=s).numpy()).fun for s in range(3))
        assert far(y.numpy()) <= best * (1 + 1e-6) + 1e-9
        assert torch.allclose(y, invert_rmsnorm(row, m).y, rtol=1e-8)


def test_rows_do_not_know_each_other() -> None:
    m, g = 0.3 + random(5, seed=1).abs(), random(4, 5, seed=2) * torch.tensor([[0.01], [1.0], [5.0], [90.0]])
    together = nearest_reachable(g, m)
    for row, y in zip(g, together, strict=True):
        assert torch.allclose(nearest_reachable(row[None], m)[0], y, rtol=1e-12)
    short = g[0] / m
    assert torch.allclose(together[0], short / short.square().mean().sqrt(), rtol=1e-9)
    assert torch.equal(nearest_reachable(0 * g, m), 0 * g)

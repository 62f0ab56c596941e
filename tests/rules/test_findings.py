"""What a rule names, to the word and the number: the outcome, where, what was measured, its value and its limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from contextfold.errors import NotControllable
from contextfold.outcomes import Finding, Outcome
from contextfold.rules import (
    REFERENCES,
    Active,
    AttentionOutput,
    EvenShare,
    ExpertInput,
    InputBias,
    InputScale,
    InputWeight,
    LeastNorm,
    OutputBias,
    OutputOnly,
    OutputScale,
    OutputWeight,
    PostNorm,
    PostNormBias,
    SharedExpert,
    flips,
    ties,
)
from contract import random

MEMBERS = {member.name: member for member in REFERENCES}
EPS = 1e-6
H, P, G, M = random(1, 9), random(1, 6, seed=1), random(1, 6, seed=2), 1 + 0.3 * random(6, seed=3)
Z, Z_C, W = random(1, 6, seed=4), random(1, 6, seed=5), random(4, 6, seed=6)
ACTIVE = Active(torch.tensor([[0.7, 0.2]], dtype=torch.float64), random(1, 2, 5, seed=7))


def refusal(solve: Callable[..., Any], *arguments: Any, **named: Any) -> Finding:
    with pytest.raises(NotControllable) as refused:
        solve(*arguments, **named)
    (found,) = refused.value.findings
    return found


def same(found: Finding, outcome: Outcome, quantity: str, value: float, threshold: float, where: str = "here") -> None:
    assert (found.outcome, found.where, found.quantity) == (outcome, where, quantity)
    assert found.value == pytest.approx(value, rel=1e-9, abs=0)
    assert found.threshold == pytest.approx(threshold, rel=1e-9, abs=0)


CHECKED: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = {
    "input weight": (InputWeight().solve, {"z": Z, "z_C": Z_C}, ("z", "z_C")),
    "input bias": (InputBias().solve, {"W": W, "z": Z, "z_C": Z_C}, ("z", "z_C")),
    "input scale": (InputScale().solve, {"unit": Z, "z_C": Z_C, "m_pre": M}, ("unit", "z_C")),
    "output weight": (OutputWeight().solve, {"h": H, "branch": P, "g": G}, ("h", "g")),
    "output bias": (OutputBias().solve, {"branch": P, "g": G}, ("branch", "g")),
    "output scale": (OutputScale().solve, {"u": P, "g": G, "m": M}, ("u", "g")),
    "through a norm": (PostNorm().solve, {"h": H, "branch": P, "g": G, "m": M, "eps": EPS}, ("h", "g", "m")),
    "bias through a norm": (PostNormBias().solve, {"branch": P, "g": G, "m": M, "eps": EPS}, ("g", "m")),
    "shared expert": (
        SharedExpert().solve, {"gate": P[:, :1], "hidden": H, "branch": P, "g": G}, ("gate", "hidden", "g"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rule", "name"), [(rule, name) for rule in CHECKED for name in CHECKED[rule][2]])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_entries_that_are_not_finite_are_counted_by_name(rule: str, name: str, bad: float) -> None:
    solve, arguments, _ = CHECKED[rule]
    spoilt = arguments[name].clone()
    spoilt.view(-1)[: 2 if spoilt.numel() > 1 else 1] = bad
    found = refusal(solve, "here", **{**arguments, name: spoilt})
    same(found, Outcome.NOT_FINITE, f"entries of {name} that are not finite", min(2, spoilt.numel()), 0)


@pytest.mark.parametrize("rule", [EvenShare, LeastNorm, OutputOnly])
@pytest.mark.parametrize("name", ["gates", "hidden", "g"])
def test_of_experts_too(rule: type[EvenShare], name: str) -> None:
    parts = {"gates": ACTIVE.gates.clone(), "hidden": ACTIVE.hidden.clone(), "g": G.clone()}
    parts[name].view(-1)[0] = torch.nan
    found = refusal(rule().solve, "here", Active(parts["gates"], parts["hidden"]), P, parts["g"])
    same(found, Outcome.NOT_FINITE, f"entries of {name} that are not finite", 1, 0)


def test_zero_sources_are_counted() -> None:
    h = random(3, 9)
    h[1:] = 0
    found = refusal(OutputWeight().solve, "here", h, random(3, 6, seed=1), random(3, 6, seed=2))
    same(found, Outcome.ZERO_SOURCE, "rows that read a zero vector", 2, 0)
    for solve, more in ((OutputWeight().solve, ()), (PostNorm().solve, (M, EPS))):
        found = refusal(solve, "here", 0 * H, P, P + 1e-3 * G, *more)
        same(found, Outcome.ZERO_SOURCE, "rows that read a zero vector", 1, 0)
    found = refusal(SharedExpert().solve, "here", 0 * P[:, :1], H, P, G)
    same(found, Outcome.ZERO_SOURCE, "rows that read a zero vector", 1, 0)
    # A zero row of which nothing is wanted stands in nobody's way.
    branch = random(3, 6, seed=1)
    g = branch.clone()
    g[0] += 1
    assert list(OutputWeight().solve("here", h, branch, g).findings) == []


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_the_residual_of_positions_that_disagree(size: float) -> None:
    """Two positions with one source: the best edit gives both the mean of what they want."""
    h = H.repeat(2, 1)
    want = random(2, 6, seed=8)
    residual = float((want - want.mean(0)).norm() / want.norm())
    want = size * want
    found = refusal(OutputWeight().solve, "here", h, 0 * want, want)
    same(found, Outcome.INCONSISTENT, "relative residual", residual, 1e-6)
    found = refusal(AttentionOutput().solve, "here", h, 0 * want, want)
    same(found, Outcome.INCONSISTENT, "relative residual", residual, 1e-6)
    found = refusal(OutputBias().solve, "here", 0 * want, want)
    same(found, Outcome.INCONSISTENT, "relative residual", residual, 1e-6)
    found = refusal(InputBias().solve, "here", torch.eye(6, dtype=torch.float64), 0 * want, want)
    same(found, Outcome.INCONSISTENT, "relative residual", residual, 1e-6)
    found = refusal(OutputScale().solve, "here", torch.ones(2, 6, dtype=torch.float64), want, M)
    same(found, Outcome.INCONSISTENT, "relative residual", residual, 1e-6)


def test_the_residual_of_input_maps_that_cannot_agree() -> None:
    z, z_C = Z.repeat(2, 1), random(2, 6, seed=8)
    change = z_C - z
    residual = float((change - change.mean(0)).norm() / change.norm())
    same(refusal(InputWeight().solve, "here", z, z_C), Outcome.INCONSISTENT, "relative residual", residual, 1e-6)


def test_a_disagreement_within_rounding_is_none() -> None:
    want = random(1, 6, seed=8).repeat(2, 1)
    want[1, 0] += 1e-7 * float(want.norm())
    assert torch.allclose(OutputBias().solve("here", 0 * want, want).delta, want.mean(0), rtol=1e-12)
    assert list(OutputBias().solve("here", 0 * want, 0 * want).findings) == []
    assert list(OutputScale().solve("here", 1 + 0 * want, 0 * want, M).findings) == []


@pytest.mark.parametrize(("apart", "named"), [(1e-8, True), (1e-5, False)])
def test_the_condition_is_that_of_the_unit_rows(apart: float, named: bool) -> None:
    h = random(1, 9).repeat(2, 1)
    h[1] = 40 * (h[1] + apart * random(9, seed=3))
    met = OutputWeight().solve("here", h, random(2, 6, seed=1), random(2, 6, seed=2))
    condition = float(torch.linalg.cond(h / h.norm(dim=1, keepdim=True)))
    assert met.condition == pytest.approx(condition, rel=1e-4)
    if named:
        (found,) = met.findings
        assert (found.outcome, found.quantity, found.value) == (
            Outcome.NEAR_SINGULAR,
            "condition number",
            met.condition,
        )
        assert (found.where, found.threshold) == ("here", 1e6)
    else:
        assert list(met.findings) == []


def test_a_zero_entry_under_a_scale() -> None:
    u = P.clone()
    u[0, 2] = 1e-15
    size = float(u.square().mean().sqrt())
    for rule in (InputScale, OutputScale):
        same(refusal(rule().solve, "here", u, G, M), Outcome.ZERO_ENTRY, "min abs entry", 1e-15, 1e-12 * size)
    far = 1e6 * u
    far[0, 2] = 1e-9
    found = refusal(OutputScale().solve, "here", far, G, M)
    same(found, Outcome.ZERO_ENTRY, "min abs entry", 1e-9, 1e-12 * float(far.square().mean().sqrt()))
    same(refusal(OutputScale().solve, "here", 0 * u, G, M), Outcome.ZERO_ENTRY, "min abs entry", 0, 0)
    # Zero is what rounding leaves of a vector of that size, and no more; each position has a size of its own.
    pair = torch.cat([P, 1e-14 * P])
    assert torch.allclose(OutputScale().solve("here", pair, M * pair, 0 * M).scale, M)
    tall = 1e6 * u
    tall[0, 2] = 1e-4
    assert torch.allclose(OutputScale().solve("here", tall, G, M).scale, G[0] / tall[0])


def test_a_zero_entry_of_u_under_the_theorem() -> None:
    p = P.clone()
    p[0, 3] = 1e-15
    u = p / torch.sqrt(p.square().mean() + EPS)
    solve = PostNorm(MEMBERS["theorem"]).solve
    limit = 1e-12 * float(u.square().mean().sqrt())
    for wanted in (G[0, 3], 1.0):
        g = G.clone()
        g[0, 3] = wanted
        same(refusal(solve, "here", H, p, g, M, EPS), Outcome.ZERO_ACTIVATION, "min abs u", float(u[0, 3]), limit)
    same(refusal(solve, "here", H, 0 * P, G, M, EPS), Outcome.ZERO_ACTIVATION, "min abs u", 0, 0)
    g = G.clone()
    g[0, 3] = 0
    met = solve("here", H, p, g, M, EPS)
    expected = g[0] / u[0]
    expected[3] = M[3]
    assert torch.allclose(met.scale, expected)
    assert (met.delta, met.condition, list(met.findings)) == (None, 1.0, [])


def test_zero_is_relative_to_the_size_of_u() -> None:
    """A large eps makes all of u small; an entry of a millionth of the others is not zero then."""
    p = P.clone()
    p[0, 3] = 1e-9 * float(p.square().mean().sqrt())
    met = PostNorm(MEMBERS["theorem"]).solve("here", H, p, G, M, 1e12)
    assert torch.allclose(met.scale, G[0] / (p[0] / torch.sqrt(p.square().mean() + 1e12)))


@pytest.mark.parametrize("name", ["scalar", "appendix"])
def test_a_tiny_scale(name: str) -> None:
    m = 1e3 * M
    m[2] = -1e-12
    limit = 1e-12 * float(m.abs().median())
    found = refusal(PostNorm(MEMBERS[name]).solve, "here", H, P, G, m, EPS)
    same(found, Outcome.TINY_SCALE, "min abs m", 1e-12, limit)
    m[2] = 1e-6
    assert PostNorm(MEMBERS[name]).solve("here", H, P, G, m, EPS).delta is not None


def test_the_secular_hard_case() -> None:
    m, g = M.clone(), 0.01 * G
    m[:2], g[0, :2] = 0.1, 0
    for solve, more in ((PostNorm(MEMBERS["appendix"]).solve, (H,)), (PostNormBias(MEMBERS["appendix"]).solve, ())):
        (found,) = solve("here", *more, P, g, m, EPS).findings
        same(found, Outcome.SECULAR_HARD_CASE, "mu", 0.01, 0.01)


def test_nothing_to_aim_at() -> None:
    for solve, more in ((PostNorm().solve, (H,)), (PostNormBias().solve, ())):
        found = refusal(solve, "here", *more, P, 0 * G, M, EPS)
        same(found, Outcome.NOTHING_TO_AIM_AT, "RMS of g", 0, 0)


def test_a_gate_sum_of_zero() -> None:
    gates = torch.tensor([[0.7, -0.7]], dtype=torch.float64)
    found = refusal(EvenShare().solve, "here", Active(gates, ACTIVE.hidden), P, G)
    same(found, Outcome.GATE_SUM_ZERO, "gate sum S", 0, 1.4e-12)
    found = refusal(EvenShare().solve, "here", Active(0 * gates, ACTIVE.hidden), P, G)
    same(found, Outcome.GATE_SUM_ZERO, "gate sum S", 0, 0)
    gates[0, 1] = -0.8
    assert EvenShare().gate_sum("here", gates[0]) == pytest.approx(-0.1)
    met = EvenShare().solve("here", Active(gates, ACTIVE.hidden), P, G)
    assert (met.condition, list(met.findings)) == (1.0, [])


def test_a_dead_expert_is_named_with_its_number() -> None:
    hidden = ACTIVE.hidden.clone()
    hidden[0, 1] = 0
    found = refusal(EvenShare().solve, "here", Active(ACTIVE.gates, hidden), P, G)
    same(found, Outcome.ZERO_SOURCE, "rows that read a zero vector", 1, 0, where="here, expert 1")


def test_a_tie_is_the_first_of_its_positions_with_its_gap_and_its_limit() -> None:
    eps = torch.finfo(torch.float32).eps
    scores = torch.tensor([[4.0, 1.0, -8.0], [2.0, 1.0, 1.0 - 2 * eps], [5.0, 1.0, 1.0]], dtype=torch.float32)
    (found,) = ties("here", scores, 2)
    same(found, Outcome.TIED_ROUTER, "smallest gap of scores", 2 * eps, 16 * eps * 2.0)
    assert ties("here", scores[:1], 2) == []
    assert ties("here", scores[:1], 1) == []
    (zeros,) = ties("here", torch.zeros(1, 3), 1)
    same(zeros, Outcome.TIED_ROUTER, "smallest gap of scores", 0, 0)
    # The unit of rounding is that of the largest score by size, also where that is the most negative.
    assert ties("here", torch.tensor([[1.0, 1.0 - 17 * eps, 0.5]], dtype=torch.float32), 1) == []
    assert len(ties("here", torch.tensor([[1.0, 1.0 - 17 * eps, -64.0]], dtype=torch.float32), 1)) == 1
    (met,) = ExpertInput().solve("here", Z, Z_C, scores[1:2], 2).findings
    same(met, Outcome.TIED_ROUTER, "smallest gap of scores", 2 * eps, 16 * eps * 2.0)


def test_flips_count_positions() -> None:
    wanted, met = torch.tensor([[1, 2], [0, 3], [4, 1]]), torch.tensor([[2, 1], [0, 2], [1, 3]])
    (found,) = flips("here", wanted, met)
    same(found, Outcome.EXPERT_FLIP, "positions with other experts", 2, 0)
    assert flips("here", wanted[:1], met[:1]) == []


def test_protected_rows_count_for_every_rule_that_takes_them() -> None:
    kept = 100 * random(2, 9, seed=11)
    for solve, more in ((OutputWeight().solve, ()), (PostNorm().solve, (M, EPS))):
        both = [solve("here", H, P, G, *more, protected=rows) for rows in (None, kept)]
        plain, held = (met.delta for met in both)
        unit = torch.nn.functional.normalize(torch.cat([H, kept]))
        assert [met.condition for met in both] == pytest.approx([1.0, float(torch.linalg.cond(unit))])
        assert float(plain(kept).norm()) > 1e-2
        assert float(held(kept).norm()) < 1e-9
        assert torch.allclose(held(H), plain(H))
        assert torch.equal(solve("here", H, P, G, *more, protected=kept[:0]).delta.B, plain.B)
    z = 100 * random(2, 6, seed=11)
    scores = torch.tensor([[3.0, 2.0, 1.0]])
    for met in (InputWeight().solve("here", Z, Z_C, z), ExpertInput().solve("here", Z, Z_C, scores, 1, z)):
        assert float(met.D(z).norm()) < 1e-9
        assert torch.allclose(met.D(Z), Z_C - Z)
        assert met.condition == pytest.approx(
            float(torch.linalg.cond(torch.nn.functional.normalize(torch.cat([Z, z]))))
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_edit_of_an_input_map_is_made_in_single_precision_or_its_own(dtype: torch.dtype) -> None:
    met = InputWeight().solve("here", Z, Z_C)
    narrow = W.to(dtype)
    delta = met.delta(narrow)
    assert (delta.B.dtype, delta.A.dtype) == (torch.float64, torch.float64)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    expected = (narrow.to(wide) @ met.D.B.to(wide)).double()
    assert torch.allclose(delta.B, expected, rtol=1e-6, atol=1e-7)
    exact = narrow.double() @ met.D.B
    error = float((delta.B - exact).norm() / exact.norm())
    assert error < (1e-14 if dtype is torch.float64 else 3e-7)

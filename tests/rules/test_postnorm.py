"""Through a norm after the MLP: every member of the class, on a dense float64 twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from contextfold.errors import NotControllable
from contextfold.outcomes import Outcome
from contextfold.rules import REFERENCES, PostNorm, PostNormBias, Reference, refit_scale
from contract import random, reaches, vanishes

EPS = 1e-6
MEMBERS = {member.name: member for member in REFERENCES}


def normed(p: Tensor) -> Tensor:
    return p / torch.sqrt(p.square().mean(-1, keepdim=True) + EPS)


def twin(seed: int = 0) -> dict[str, Tensor]:
    return {
        "h": random(1, 12, seed=seed), "W": random(6, 12, seed=seed + 1), "b": random(6, seed=seed + 2),
        "g": random(1, 6, seed=seed + 3), "m": 1 + 0.3 * random(6, seed=seed + 4),
    }  # fmt: skip


@pytest.mark.parametrize("member", REFERENCES, ids=lambda member: member.name)
def test_every_member_is_exact(member: Reference) -> None:
    t = twin()
    p = t["h"] @ t["W"].T + t["b"]
    solution = PostNorm(member).solve("block", t["h"], p, t["g"], t["m"], EPS)
    q = p if solution.delta is None else p + solution.delta(t["h"])
    reaches(solution.scale * normed(q), t["g"], t["m"] * normed(p))
    assert (solution.delta is None) is (member.name == "theorem")
    if solution.delta is not None:
        vanishes(solution.delta, t["h"])


@pytest.mark.parametrize("member", REFERENCES, ids=lambda member: member.name)
def test_the_bias_sets_the_direction_where_h_is_zero(member: Reference) -> None:
    t = twin()
    solution = PostNormBias(member).solve("block", t["b"][None], t["g"], t["m"], EPS)
    reaches(solution.scale * normed(t["b"][None] + solution.delta), t["g"], t["m"] * normed(t["b"][None]))


@given(st.sampled_from(sorted(MEMBERS)), st.integers(0, 10**6))
def test_members_are_exact_on_random_blocks(name: str, seed: int) -> None:
    t = twin(seed)
    p = t["h"] @ t["W"].T + t["b"]
    try:
        solution = PostNorm(MEMBERS[name]).solve("block", t["h"], p, t["g"], t["m"], EPS)
    except NotControllable as refusal:
        raise AssertionError(name) from refusal
    q = p if solution.delta is None else p + solution.delta(t["h"])
    assert float((solution.scale * normed(q) - t["g"]).norm()) < 1e-9 * float(t["g"].norm())


def test_the_theorem_names_a_zero_entry_of_u() -> None:
    """A rectified branch whose output map has a zero row: u has an exact zero."""
    t = twin()
    p = t["h"].clamp_min(0) @ t["W"].T
    p[0, 3] = 0
    with pytest.raises(NotControllable, match="zero activation") as refused:
        PostNorm(MEMBERS["theorem"]).solve("block", t["h"], p, t["g"], t["m"], EPS)
    assert refused.value.findings[0].outcome is Outcome.ZERO_ACTIVATION
    solution = PostNorm(MEMBERS["balanced"]).solve("block", t["h"], p, t["g"], t["m"], EPS)
    assert solution.delta is not None
    reaches(solution.scale * normed(p + solution.delta(t["h"])), t["g"], t["m"] * normed(p))


@pytest.mark.parametrize("name", ["scalar", "appendix"])
def test_a_zero_scale_is_named_by_the_rules_that_divide_by_it(name: str) -> None:
    t = twin()
    t["m"][2] = 0
    p = t["h"] @ t["W"].T
    with pytest.raises(NotControllable) as refused:
        PostNorm(MEMBERS[name]).solve("block", t["h"], p, t["g"], t["m"], EPS)
    assert refused.value.findings[0].outcome is Outcome.TINY_SCALE


@pytest.mark.parametrize("name", ["balanced", "floored", "flat"])
def test_the_others_pass_a_zero_scale(name: str) -> None:
    t = twin()
    t["m"][2] = 0
    p = t["h"] @ t["W"].T
    solution = PostNorm(MEMBERS[name]).solve("block", t["h"], p, t["g"], t["m"], EPS)
    assert solution.delta is not None
    reaches(solution.scale * normed(p + solution.delta(t["h"])), t["g"], t["m"] * normed(p))


def test_nothing_to_aim_at_is_named() -> None:
    t = twin()
    with pytest.raises(NotControllable) as refused:
        PostNorm().solve("block", t["h"], t["h"] @ t["W"].T, torch.zeros(1, 6), t["m"], EPS)
    assert refused.value.findings[0].outcome is Outcome.NOTHING_TO_AIM_AT


def test_the_hard_case_of_the_appendix_is_named_and_exact() -> None:
    t = twin()
    t["m"][:2] = 0.1
    t["g"] *= 0.01
    t["g"][0, :2] = 0
    p = t["h"] @ t["W"].T
    solution = PostNorm(MEMBERS["appendix"]).solve("block", t["h"], p, t["g"], t["m"], EPS)
    assert [finding.outcome for finding in solution.findings] == [Outcome.SECULAR_HARD_CASE]
    assert solution.delta is not None
    reaches(solution.scale * normed(p + solution.delta(t["h"])), t["g"], t["m"] * normed(p))


def test_the_remainder_of_the_appendix_is_minus_mu_over_m() -> None:
    """Step 3 of the paper's appendix, done as the paper does it: divide what is left by the normalised branch."""
    t = twin()
    p = t["h"] @ t["W"].T
    solution = PostNorm(MEMBERS["appendix"]).solve("block", t["h"], p, t["g"], t["m"], EPS)
    assert solution.delta is not None
    unit = normed(p + solution.delta(t["h"]))[0]
    dm = (t["g"][0] - t["m"] * unit) / unit
    mu = -float((dm * t["m"]).mean())
    assert torch.allclose(dm, -mu / t["m"], rtol=1e-7)
    assert torch.allclose(solution.scale, t["m"] + dm, rtol=1e-7)


@given(st.integers(0, 10**6))
def test_no_exact_patch_is_better_balanced(seed: int) -> None:
    """`balanced` minimises ‖m' ⊘ M‖ among all exact patches; the others of the class are such patches."""
    t = twin(seed)
    p = t["h"] @ t["W"].T
    M = torch.sqrt(t["m"].square() + (0.1 * t["m"].abs().median()) ** 2)
    sizes = {}
    for name, member in MEMBERS.items():
        scale = PostNorm(member).solve("block", t["h"], p, t["g"], t["m"], EPS).scale
        sizes[name] = float((scale / M).norm())
    assert sizes["balanced"] <= min(sizes.values()) * (1 + 1e-9)


def test_refitting_moves_no_scale_far() -> None:
    u, g, planned = random(50, seed=1), random(50, seed=2), random(50, seed=3)
    g = planned * u * (1 + 1e-7 * random(50, seed=4))
    u[:5] = 1e-12
    moved = (refit_scale(planned, u, g, 1.2e-7) - planned).abs()
    assert float((moved / planned.abs()).max()) < 1e-3

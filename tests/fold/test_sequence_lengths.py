"""Free lengths: exact in direction where no positive scale serves all positions, and only where nothing reads them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from contextfold.anatomy import bind
from contextfold.errors import NotControllable
from contextfold.fold import fold_sequence, split
from contextfold.fold.lengths import halving_loss
from contextfold.outcomes import Outcome
from contextfold.rules import JointPostNorm
from contextfold.rules.lengths import SHORTEST, fit_lengths
from contextfold.runtime import applied, materialised, run
from tiny import FLOAT32_NORMS, POST_NORM, build, tokens

EPS = 1e-6


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def infeasible(seed):
    """Two positions want branches of one direction and different lengths, which no scale reaches both."""
    n, d, f = 5, 9, 12
    h, W, m = random(n, f, seed=seed), random(d, f, seed=seed + 1), 1 + 0.3 * random(d, seed=seed + 2)
    r, g = random(n, d, seed=seed + 3), random(n, d, seed=seed + 4)
    g[1] = 2 * g[0]
    return h, h @ W.T, g, m, r + g


def block(joint, h, p, r):
    """`r + m' ⊙ N(W' h)`."""
    q = p + joint.solution.delta(h)
    return r + joint.scale * q / torch.sqrt(q.square().mean(1, keepdim=True) + EPS)


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_every_sum_is_met_in_direction(seed):
    h, p, g, m, t = infeasible(seed)
    stuck = JointPostNorm().solve("block", h, p, g, m, EPS)
    assert stuck.findings[0].outcome is Outcome.SCALE_INFEASIBLE
    assert float((block(stuck, h, p, t - g) - t).norm()) > 1e-3 * float(t.norm())
    joint = JointPostNorm().solve("block", h, p, g, m, EPS, along=t)
    assert [finding.outcome for finding in joint.findings] == [Outcome.LENGTH_FREED]
    met = block(joint, h, p, t - g)
    assert float((met - joint.lengths[:, None] * t).norm()) < 1e-9 * float(t.norm())
    assert float((torch.cosine_similarity(met, t) - 1).abs().max()) < 1e-12
    assert float(joint.lengths.min()) >= SHORTEST - 1e-9


@given(n=st.integers(1, 6), d=st.integers(4, 12), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_the_scale_grows_no_more_than_it_must_and_the_nearest_lengths_are_taken(n, d, seed):
    a, M, rho = random(d, seed=seed).exp(), random(d, seed=seed + 1).exp(), 1 - 0.1 * random(n, seed=seed + 2).sigmoid()
    g, e = random(n, d, seed=seed + 3), random(n, d, seed=seed + 4)
    found, lengths = fit_lengths(a, g, e, M, rho)
    k = float((a / found)[0])

    def reach(beta):
        branch = g + (beta - 1)[:, None] * e
        return ((branch / M).square() * a).sum(1) / (d * rho.square())

    assert k >= 1
    assert torch.allclose(reach(lengths), torch.full((n,), k, dtype=torch.float64), rtol=1e-6)
    grid = torch.linspace(math.log(SHORTEST), 7, 8000, dtype=torch.float64).exp()
    curves = torch.stack([reach(beta.expand(n)) for beta in grid], 1)
    least = curves.min(1).values
    if k > 1 + 1e-9:  # one position is only just let in
        assert abs(float(least.max()) - k) < 1e-3 * k
    for curve, beta in zip(curves, lengths, strict=True):
        crossed = ((curve[1:] - k) * (curve[:-1] - k) < 0).nonzero()[:, 0]
        nearest = min((abs(float(grid[i].log())) for i in crossed), default=float("inf"))
        assert abs(float(beta.log())) < nearest + 5e-3


def test_lengths_are_left_alone_where_one_scale_serves_all():
    h, p, g, m, t = infeasible(0)
    h, p, g, t = h[1:3], p[1:3], g[1:3], t[1:3]
    plain = JointPostNorm().solve("block", h, p, g, m, EPS)
    assert not plain.findings
    free = JointPostNorm().solve("block", h, p, g, m, EPS, along=t)
    assert torch.equal(free.scale, plain.scale)
    assert bool((free.lengths == 1).all())


def test_a_sum_of_zero_has_no_direction():
    h, p, g, m, t = infeasible(0)
    t[2] = 0
    with pytest.raises(NotControllable, match="zero target"):
        JointPostNorm().solve("block", h, p, g, m, EPS, along=t)


CONTEXT, QUERY = tokens(11), tokens(24, seed=3)


@pytest.mark.parametrize("way", [materialised, applied])
@pytest.mark.parametrize("model_type", POST_NORM)
def test_a_tiny_model_is_exact_though_its_last_layer_is_infeasible(model_type, way):
    model = build(model_type)
    n = QUERY.numel()
    folded = fold_sequence(model, CONTEXT, QUERY)
    last = folded.layers[-1]
    assert last.outcome == "length freed"
    assert last.length_change_max > 0
    assert last.relative_error < 10 * FLOAT32_NORMS
    wanted = model(folded.split.full.ids[None]).logits[0, -n:]
    with way(model, folded.patch):
        patched = run(model, folded.split.reduced, last=n)
    without = run(model, folded.split.reduced, last=n)
    assert float((wanted - patched).abs().max()) < 1e-5 * float((wanted - without).abs().max())


def test_a_head_that_reads_lengths_is_found_out():
    model = build("gemma3_text")
    bound = bind(model)
    tokens_ = split(bound, CONTEXT, QUERY).full
    eps = halving_loss(bound, tokens_)
    assert 0 < eps < 1e-5
    model.model.norm = nn.Identity()
    assert halving_loss(bind(model), tokens_) > 0.1
    folded = fold_sequence(model, CONTEXT, QUERY)  # which frees no length, since that would cost more than it mends
    assert folded.layers[-1].outcome == "scale infeasible"
    assert folded.layers[-1].length_change_max == 0

"""One static patch for a whole sequence. The oracle is the model itself with the context in its window."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contextfold.errors import InputError, NotControllable
from contextfold.fold import SINK, fold_sequence
from contextfold.outcomes import Outcome
from contextfold.patch import MatrixEdit
from contextfold.rules import joint_scale
from contextfold.rules.joint import FEASIBLE
from contextfold.runtime import applied, materialised, run
from contextfold.verify import Prompt, fold_and_prove_sequence, verify_sequence_patch
from tiny import FLOAT32_NORMS, POST_NORM, TYPES, bits, build, shared, tokens

CONTEXT, QUERY = tokens(11), tokens(4, seed=2)
PRE_NORM = tuple(t for t in TYPES if t not in POST_NORM)


def gaps(model, folded, way=materialised):
    """Largest gap over the query positions, relative to the largest unpatched one."""
    n = folded.in_context.shape[0]
    wanted = model(folded.split.full.ids[None]).logits[0, -n:]
    with way(model, folded.patch):
        patched = run(model, folded.split.reduced, last=n)
    without = float((wanted - run(model, folded.split.reduced, last=n)).abs().max())
    assert without > 0.1, "the context does nothing here, so the test would prove nothing"
    return float((wanted - patched).abs().max()) / without


@pytest.mark.parametrize("keep", [(), SINK, ((0, 1), (3, 6))], ids=str)
@pytest.mark.parametrize("n", [1, 4, 16])
@pytest.mark.parametrize("model_type", PRE_NORM)
def test_exact_at_every_position(model_type, n, keep):
    model = build(model_type)
    folded = fold_sequence(model, CONTEXT, tokens(n, seed=3), keep=keep)
    assert gaps(model, folded) < FLOAT32_NORMS
    assert gaps(model, folded, applied) < FLOAT32_NORMS
    for layer in folded.layers:
        assert layer.outcome == "exact"
        assert layer.relative_error < FLOAT32_NORMS  # hidden states, not only the last logits


@pytest.mark.parametrize("n", [1, 4, 16])
@pytest.mark.parametrize("model_type", POST_NORM)
def test_through_a_norm_the_logits_are_exact_and_layers_that_miss_say_why(model_type, n):
    """A layer whose scale cannot serve all positions says so; in the last, their lengths are freed."""
    model = build(model_type)
    folded = fold_sequence(model, CONTEXT, tokens(n, seed=3))
    exact = [layer for layer in folded.layers if layer.outcome == "exact"]
    assert all(layer.relative_error < 10 * FLOAT32_NORMS for layer in exact)
    assert {layer.outcome for layer in folded.layers[:-1]} <= {"exact", "scale infeasible"}
    assert folded.layers[-1].outcome in ("exact", "length freed")
    assert gaps(model, folded) < 10 * FLOAT32_NORMS


def test_one_position_is_what_fold_token_would_give():
    """The joint scale of one position is the balanced one."""
    from contextfold.rules.joint import JointPostNorm
    from contextfold.rules.postnorm import PostNorm

    generator = torch.Generator().manual_seed(0)
    h, p, g, m = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((1, 7), (1, 9), (1, 9), (9,)))
    one, joint = PostNorm().solve("x", h, p, g, m, 1e-6), JointPostNorm().solve("x", h, p, g, m, 1e-6)
    assert torch.allclose(one.scale, joint.scale, rtol=1e-6)
    assert torch.allclose(one.delta.to_dense(), joint.solution.delta.to_dense(), rtol=1e-5, atol=1e-8)


@given(n=st.integers(1, 6), d=st.integers(8, 24), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_the_joint_scale_is_the_smallest_of_its_kind(n, d, seed):
    """Feasible by construction: a known positive a solves G a = 1. The found one costs no more, and is stationary."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.rand(d, generator=generator, dtype=torch.float64) + 0.2
    G = torch.rand(n, d, generator=generator, dtype=torch.float64) ** 2
    G = G / (G @ a)[:, None]
    found = joint_scale(G)
    assert found.miss < 1e-8
    assert bool((found.a > 0).all())
    assert float((1 / found.a).sum()) <= float((1 / a).sum()) * (1 + 1e-9)
    # No move inside the solution set lowers the cost: the gradient lies in the row space of G.
    gradient = 1 / found.a**2
    residual = gradient - G.T @ torch.linalg.lstsq(G.T, gradient).solution
    assert float(residual.norm()) < 1e-5 * float(gradient.norm())


@given(n=st.integers(1, 7), d=st.integers(2, 10), seed=st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_where_there_is_no_positive_scale_a_linear_programme_finds_none_either(n, d, seed):
    from scipy.optimize import linprog

    G = torch.rand(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 4
    found = joint_scale(G)
    A, one = G.numpy(), [1.0] * n
    if found.miss <= FEASIBLE:
        assert linprog([0.0] * d, A_eq=A, b_eq=one, bounds=(0, None)).status == 0
    else:
        assert linprog([0.0] * d, A_eq=A, b_eq=one, bounds=(1e-2, None)).status == 2


def test_chosen_positions_are_exact_and_the_patch_is_smaller():
    model = build("llama")
    query = tokens(9, seed=3)
    folded = fold_sequence(model, CONTEXT, query, at=[2, 8])
    wanted = model(torch.cat([CONTEXT, query])[None]).logits[0, -9:]
    with materialised(model, folded.patch):
        patched = run(model, folded.split.reduced, last=9)
    error = (wanted - patched).abs().max(-1).values
    assert float(error[[2, 8]].max()) < 1e-5
    assert float(error[[0, 4, 6]].min()) > 1e-3
    ranks = {e.delta.rank for e in folded.patch.edits.values() if isinstance(e, MatrixEdit)}
    assert ranks == {3}  # the sink and two positions
    assert folded.patch.header.exact_at == (0, 13, 19)


def test_repeated_tokens_without_positions_are_dependent_and_named():
    """More positions than the output map has inputs: least squares, reported, or refused under strict."""
    model = build("llama")
    folded = fold_sequence(model, CONTEXT, tokens(60, seed=3))
    assert {layer.rank for layer in folded.layers} == {48}
    assert Outcome.LEAST_SQUARES in {f.outcome for f in folded.layers[0].findings}
    with pytest.raises(NotControllable, match="least squares"):
        fold_sequence(model, CONTEXT, tokens(60, seed=3), strict=True)


def test_the_whitened_form_is_exact_and_disturbs_typical_text_less():
    model = build("llama")
    typical = tokens(120, seed=8)
    plain = fold_sequence(model, CONTEXT, QUERY)
    white = fold_sequence(model, CONTEXT, QUERY, typical=typical)
    assert gaps(model, white) < FLOAT32_NORMS
    base = model(typical[None]).logits[0].log_softmax(-1)

    def drift(folded):
        with materialised(model, folded.patch):
            logits = model(typical[None]).logits[0].log_softmax(-1)
        return float((base.exp() * (base - logits)).sum(-1).mean())

    assert drift(white) < 0.7 * drift(plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_measured(dtype):
    model = build("llama", dtype)
    before = bits(model)
    folded = fold_sequence(model, CONTEXT, QUERY)
    assert gaps(model, folded) < {torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    assert bits(model) == before


def test_the_suite_can_fail():
    model = build("llama")
    folded = fold_sequence(model, CONTEXT, QUERY)
    wrong = replace(folded, patch=folded.patch * -1.0)
    assert gaps(model, wrong) > 0.1


def test_bad_positions_say_what_to_do():
    with pytest.raises(InputError, match="indices into the query"):
        fold_sequence(shared("llama"), CONTEXT, QUERY, at=[4])
    with pytest.raises(InputError, match="indices into the query"):
        fold_sequence(shared("llama"), CONTEXT, QUERY, at=[])


def test_the_verdict_has_controls_and_names_the_cost_elsewhere():
    model = build("llama")
    prompt = Prompt(CONTEXT, tokens(6, seed=3), SINK)
    patch, verdict = fold_and_prove_sequence(model, prompt)
    found = verdict.to_json()
    assert verdict.proven, verdict.sentence()
    assert set(found["controls"]) == {"other_context", "shuffled_context", "random_patch"}
    assert found["elsewhere"]["mean_kl_nats"] > 0
    assert len(found["positions"]) == 6
    assert {"top1_match", "logit_gap", "unpatched_logit_gap"} <= set(found["positions"][0])
    assert {"rank", "condition", "scale_ratio_max", "outcome"} <= set(found["layers"][0])
    from contextfold.anatomy import bind

    assert verify_sequence_patch(bind(model), patch, prompt).proven
    broken = verify_sequence_patch(bind(model), patch * 0.5, prompt)
    assert not broken.proven

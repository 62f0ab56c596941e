"""Patch algebra and the geometry of patches. The oracle is dense float64 linear algebra, and scipy for the angles."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contextfold.compare import compare_patches, cosine, inner, norm, principal_angles
from contextfold.errors import InputError, PatchMismatch
from contextfold.fold import fold_token
from contextfold.lowrank import LowRank
from contextfold.patch import BiasEdit, Header, MatrixEdit, Patch, ScaleEdit, Site, combine
from contextfold.patchfile import load, save
from contextfold.runtime import materialised, run
from tiny import bits, build, shared, tokens

HEADER = Header(
    kind="token",
    model_type="llama",
    fingerprint="f",
    positions=(0, 9),
    exact_at=(9,),
    tokens_digest="t",
    context_digest="c",
    model_dtype="float64",
    factor_dtype="float64",
    attention="eager",
    materialised=True,
    plan=("input weight",),
)
SHAPES = {Site(0, "a"): (7, 5), Site(1, "b"): (4, 9), Site(1, "c", "bias"): (6,), Site(2, "d"): (3, 3)}
SCALE = Site(0, "norm")


def drawn(seed, skip=(), dtype=torch.float64):
    """A random patch over SHAPES with ranks 1 to 3, without the sites in `skip`."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    edits = {}
    for i, (site, shape) in enumerate(SHAPES.items()):
        rank = 1 + (seed + i) % 3
        edit = MatrixEdit(LowRank(noise(shape[0], rank), noise(rank, shape[1]))) if len(shape) == 2 else None
        edits[site] = edit or BiasEdit(noise(*shape))
    return Patch(HEADER, {s: e for s, e in edits.items() if s not in skip})


def with_scale(patch, seed):
    base = torch.arange(1.0, 5.0, dtype=torch.float64)
    value = base + torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return replace(patch, edits={**patch.edits, SCALE: ScaleEdit(base, value, 0)})


def dense(patch):
    """Every change as a dense float64 tensor, by site; zero where there is none."""
    changes = {site: torch.zeros(shape, dtype=torch.float64) for site, shape in SHAPES.items()}
    for site, edit in patch.edits.items():
        match edit:
            case MatrixEdit(delta):
                changes[site] = delta.B.double() @ delta.A.double()
            case BiasEdit(delta):
                changes[site] = delta.double()
            case ScaleEdit(base, value, _):
                changes[site] = value.double() - base.double()
    return changes


def flat(patch):
    return torch.cat([change.reshape(-1) for _, change in sorted(dense(patch).items(), key=lambda item: item[0])])


def close(first, second, **limits):
    return torch.allclose(flat(first), second if isinstance(second, torch.Tensor) else flat(second), **limits)


SEEDS = st.integers(0, 40)
FACTORS = st.floats(-4, 4, allow_nan=False)


# --- algebra ---------------------------------------------------------------------------------------------------


def test_one_patch_once_is_that_patch():
    patch = with_scale(drawn(1), 1)
    assert combine([patch], [1]) is patch
    assert patch * 1.0 is patch
    assert patch.header.exact_at == (9,)


@given(SEEDS, SEEDS)
def test_combine_of_plus_and_minus_one_is_the_difference(a, b):
    p, q = drawn(a), drawn(b, skip=(Site(2, "d"),))
    wanted = flat(p) - flat(q)
    assert close(combine([p, q], [1, -1]), wanted)
    assert close(p - q, wanted)
    assert close(p + -q, wanted)


@given(st.lists(st.tuples(SEEDS, FACTORS), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_combine_is_linear_and_the_order_does_not_matter(terms, random):
    patches, weights = [drawn(seed) for seed, _ in terms], [weight for _, weight in terms]
    wanted = sum(weight * flat(patch) for patch, weight in zip(patches, weights, strict=True))
    assert close(combine(patches, weights), wanted, atol=1e-12)
    order = random.sample(range(len(terms)), len(terms))
    mixed = combine([patches[i] for i in order], [weights[i] for i in order])
    assert close(mixed, wanted, atol=1e-12)
    assert len(terms) == 1 or mixed.header == combine(patches, weights).header


@given(SEEDS, FACTORS)
def test_scaling_is_linear_in_the_scales_too(seed, factor):
    patch = with_scale(drawn(seed), seed)
    assert close(patch * factor, factor * flat(patch), atol=1e-12)
    assert close(-patch, -flat(patch))


def test_two_edits_of_one_scale_are_refused_whatever_the_weights():
    p, q = with_scale(drawn(1), 1), with_scale(drawn(2), 2)
    for attempt in (
        lambda: combine([p, q], [1, -1]),
        lambda: p - q,
        lambda: p - p,
        lambda: combine([p, q], [0.5, 0.5]),
    ):
        with pytest.raises(InputError, match="scales do not add"):
            attempt()
    once = combine([p, drawn(2)], [1, 1])
    assert torch.equal(once.edits[SCALE].value, p.edits[SCALE].value)


@pytest.mark.parametrize(
    ("patches", "weights"), [([], []), ([1], []), ([1, 2], [1]), ([1], [math.nan]), ([1], [math.inf])]
)
def test_what_cannot_be_combined_is_refused(patches, weights):
    with pytest.raises(InputError):
        combine([drawn(seed) for seed in patches], weights)


def test_patches_of_other_weights_are_neither_combined_nor_compared():
    p = drawn(1)
    q = replace(p, header=replace(HEADER, fingerprint="other"))
    for attempt in (
        combine,
        lambda pair, _: p - q,
        lambda pair, _: compare_patches(*pair),
        lambda pair, _: cosine(*pair),
    ):
        with pytest.raises(PatchMismatch):
            attempt([p, q], [1, 1])


def test_nobody_claims_exactness_for_what_is_not_the_patch(tmp_path):
    p = drawn(1)
    for other in (p * 0.5, -p, p + p, p - p, p.select([0])):
        assert other.header.exact_at == ()
    assert (p * 0.5).header.kind == "scaled"
    assert p.select([0, 1, 2]) is p
    q = replace(p, header=replace(HEADER, tokens_digest="u", context_digest="d", attention="sdpa", positions=(0, 7)))
    joined = (p + q).header
    assert (joined.kind, joined.positions, joined.tokens_digest, joined.context_digest) == ("sum", (), "", "")
    assert (joined.attention, joined.plan) == ("mixed", ("input weight",))
    assert load(save(p + q, tmp_path / "sum.safetensors")).header == joined


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_half_a_patch_writes_weights_half_way_between(model_type):
    """Interpolation, at the weights that are really written; and the difference of a patch and itself is no patch."""
    model = build(model_type)
    patch = fold_token(model, tokens(11), tokens(3, seed=2)).patch

    def stored(factor):
        with materialised(model, patch * factor):
            return {s: model.get_submodule(s.module).get_parameter(s.parameter).detach().clone() for s in patch.edits}

    before = bits(model)
    without, half, with_it = stored(0.0), stored(0.5), stored(1.0)
    for site in patch.edits:
        assert torch.allclose(half[site], (without[site] + with_it[site]) / 2, rtol=1e-12, atol=1e-14), site
        assert not torch.allclose(half[site], with_it[site])
    assert bits(model) == before


def test_a_patch_minus_itself_leaves_the_model_as_it_was():
    model, context, query = shared("llama"), tokens(11), tokens(3, seed=2)
    folded = fold_token(model, context, query)
    reduced = folded.split.reduced
    unpatched = run(model, reduced)[0]
    assert float((folded.in_context - unpatched).abs().max()) > 0.1
    with materialised(model, folded.patch - folded.patch):
        assert torch.allclose(run(model, reduced)[0], unpatched, atol=1e-10)
    with materialised(model, combine([folded.patch, folded.patch], [0.25, 0.75])):
        assert torch.allclose(run(model, reduced)[0], folded.in_context, atol=1e-6)


# --- geometry --------------------------------------------------------------------------------------------------


@given(SEEDS, SEEDS)
def test_norm_inner_and_cosine_are_those_of_the_dense_vectors(a, b):
    p, q = with_scale(drawn(a), a), with_scale(drawn(b, skip=(Site(0, "a"),)), b)
    x, y = flat(p), flat(q)
    assert norm(p) == pytest.approx(float(x.norm()), rel=1e-12)
    assert inner(p, q) == pytest.approx(float(x @ y), rel=1e-10, abs=1e-10)
    assert cosine(p, q) == pytest.approx(float(x @ y / (x.norm() * y.norm())), abs=1e-12)
    found = compare_patches(p, q)
    assert found.cosine == pytest.approx(cosine(p, q), abs=1e-12)
    assert Site(0, "a") not in {s.site for s in found.sites}


@given(SEEDS, SEEDS)
def test_every_site_is_compared_as_its_dense_matrices_are(a, b):
    p, q = with_scale(drawn(a), a), with_scale(drawn(b), b)
    left, right = dense(p), dense(q)
    for found in compare_patches(p, q).sites:
        x, y = left[found.site], right[found.site]
        assert found.inner == pytest.approx(float((x * y).sum()), rel=1e-10, abs=1e-10)
        assert found.norms == pytest.approx((float(x.norm()), float(y.norm())))
        if x.dim() == 2:
            for angles, first, second in ((found.columns, x, y), (found.rows, x.T, y.T)):
                wanted = sorted(scipy.linalg.subspace_angles(first.numpy(), second.numpy()).tolist())
                assert angles == pytest.approx(wanted, abs=1e-7)
        else:
            assert found.columns == found.rows == ()


@given(SEEDS, SEEDS, FACTORS.filter(lambda f: abs(f) > 1e-3))
def test_cosine_is_symmetric_and_blind_to_length(a, b, factor):
    p, q = drawn(a), drawn(b)
    assert cosine(p, q) == pytest.approx(cosine(q, p), abs=1e-14)
    assert cosine(p, p) == pytest.approx(1.0, abs=1e-14)
    assert cosine(p * factor, q) == pytest.approx(math.copysign(1, factor) * cosine(p, q), abs=1e-12)
    assert cosine(p, -p) == pytest.approx(-1.0, abs=1e-14)


def test_kinds_can_be_asked_apart():
    p = with_scale(drawn(1), 1)
    vectors = (BiasEdit, ScaleEdit)
    assert math.hypot(norm(p, (MatrixEdit,)), norm(p, vectors)) == pytest.approx(norm(p))
    assert norm(p, (ScaleEdit,)) == pytest.approx(p.edits[SCALE].size())
    q = replace(p, edits={**(-p).edits, SCALE: p.edits[SCALE]})
    assert cosine(p, q, (MatrixEdit,)) == pytest.approx(-1)
    assert cosine(p, q, (ScaleEdit,)) == pytest.approx(1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nothing_has_no_direction(dtype):
    """What rounding leaves of p − p is no change: rank 0, norm 0, no cosine."""
    p = drawn(3, dtype=dtype)
    nothing = p - p
    assert norm(nothing) == 0
    assert math.isnan(cosine(p, nothing))
    assert all(site.columns == () and math.isnan(site.cosine) for site in compare_patches(p, nothing).sites)


@pytest.mark.parametrize("angle", [0.0, 1e-9, 1e-4, 0.3, 1.2, math.pi / 2])
def test_angles_are_right_where_cosines_round_to_one(angle):
    """A known rotation of one direction, beside a shared and a private one."""
    e = torch.eye(8, dtype=torch.float64)
    turned = math.cos(angle) * e[1] + math.sin(angle) * e[2]
    first = LowRank(torch.stack([e[0], e[1], e[5]], 1), torch.stack([e[0], e[1], e[5]]))
    second = LowRank(torch.stack([e[0], turned], 1), torch.stack([turned, e[0]]))
    for angles in principal_angles(first, second):
        assert angles.tolist() == pytest.approx(sorted([0.0, angle]), rel=1e-6, abs=1e-15)


@settings(max_examples=25)
@given(SEEDS)
def test_a_subspace_of_itself_has_no_angle_with_the_whole(seed):
    generator = torch.Generator().manual_seed(seed)
    whole = LowRank(
        torch.randn(9, 3, generator=generator, dtype=torch.float64),
        torch.randn(3, 6, generator=generator, dtype=torch.float64),
    )
    part = LowRank(whole.B[:, :2], whole.A[:2])
    for angles in principal_angles(whole, part):
        assert angles.numel() == 2
        assert float(angles.max()) < 1e-12
    swapped = principal_angles(part, whole)
    for one, other in zip(swapped, principal_angles(whole, part), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_one_context_folded_at_two_queries_reads_differently_and_writes_alike():
    """Sanity on real edits: a patch is nearer to itself than to the patch of another query."""
    model, context = shared("llama"), tokens(11)
    p = fold_token(model, context, tokens(3, seed=2)).patch
    q = fold_token(model, context, tokens(3, seed=3)).patch
    assert cosine(p, p) == pytest.approx(1)
    assert abs(cosine(p, q)) < 0.99

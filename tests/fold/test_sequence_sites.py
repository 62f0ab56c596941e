"""Where a patch for a sequence stands: output maps, all maps of the MLP, or attention's output maps."""

from __future__ import annotations

import pytest
import torch

import zoo
from contextfold.anatomy import bind
from contextfold.errors import InputError, NotControllable, UnsupportedModel
from contextfold.fold import SINK, fold_sequence
from contextfold.runtime import applied, materialised, recording, run
from contextfold.verify import Prompt, Settings, fold_and_prove_sequence, verify_sequence_patch
from tiny import FLOAT32_NORMS, POST_NORM, TYPES, build, tokens

CONTEXT = tokens(11)
PRE_NORM = tuple(t for t in TYPES if t not in POST_NORM)


def gap(model, folded, way=materialised):
    """Largest gap over the query positions, relative to the largest unpatched one."""
    n = folded.in_context.shape[0]
    with way(model, folded.patch):
        patched = run(model, folded.split.reduced, last=n)
    without = float((folded.in_context - run(model, folded.split.reduced, last=n)).abs().max())
    assert without > 0.1, "the context does nothing here, so the test would prove nothing"
    return float((folded.in_context - patched).abs().max()) / without


@pytest.mark.parametrize("way", [materialised, applied])
@pytest.mark.parametrize("n", [1, 4, 16])
@pytest.mark.parametrize("sites", ["all", "attention"])
@pytest.mark.parametrize("model_type", PRE_NORM)
def test_exact_at_every_position(model_type, sites, n, way):
    model = build(model_type)
    folded = fold_sequence(model, CONTEXT, tokens(n, seed=3), sites=sites)
    assert gap(model, folded, way) < FLOAT32_NORMS
    for layer in folded.layers:
        assert layer.outcome == "exact"
        assert layer.relative_error < FLOAT32_NORMS


def test_all_maps_match_what_is_inside_the_mlp_and_the_output_map_alone_does_not():
    model = build("llama")
    bound = bind(model)
    query = tokens(4, seed=3)
    inside = {}
    for sites in ("all", "output"):
        folded = fold_sequence(bound, CONTEXT, query, sites=sites)
        with recording(bound.blocks, slice(-4, None), "h") as wanted:
            run(model, folded.split.full)
        with materialised(bound, folded.patch), recording(bound.blocks, slice(-4, None), "h") as met:
            run(model, folded.split.reduced)
        inside[sites] = max(float((a["h"] - b["h"]).norm() / a["h"].norm()) for a, b in zip(wanted, met, strict=True))
    assert inside["all"] < FLOAT32_NORMS
    assert inside["output"] > 1e-2


def test_all_maps_go_through_a_norm_as_well():
    model = build("gemma3_text")
    folded = fold_sequence(model, CONTEXT, tokens(4, seed=3), sites="all")
    assert gap(model, folded) < 10 * FLOAT32_NORMS
    assert folded.patch.header.plan == ("input weight", "output weight through a norm, several positions")


@pytest.mark.parametrize(
    ("sites", "count", "plan"),
    [
        ("output", 1, ("output weight alone",)),
        ("all", 3, ("input weight", "output weight")),
        ("attention", 1, ("attention output",)),
    ],
)
def test_the_edits_stand_where_they_should_and_the_header_says_by_which_rules(sites, count, plan):
    model = build("llama")
    folded = fold_sequence(model, CONTEXT, tokens(4, seed=3), sites=sites)
    names = {"output": {"down_proj"}, "all": {"gate_proj", "up_proj", "down_proj"}, "attention": {"o_proj"}}[sites]
    assert {site.module.rsplit(".", 1)[1] for site in folded.patch.edits} == names
    assert len(folded.patch.edits) == count * len(folded.layers)
    assert folded.patch.header.plan == plan


@pytest.mark.parametrize("sites", ["all", "attention"])
def test_the_whitened_form_disturbs_typical_text_less(sites):
    model = build("llama")
    typical, query = tokens(120, seed=8), tokens(4, seed=3)
    base = model(typical[None]).logits[0].log_softmax(-1)
    drift = {}
    for name, text in {"plain": None, "white": typical}.items():
        folded = fold_sequence(model, CONTEXT, query, sites=sites, typical=text)
        assert gap(model, folded) < FLOAT32_NORMS
        with materialised(model, folded.patch):
            logits = model(typical[None]).logits[0].log_softmax(-1)
        drift[name] = float((base.exp() * (base - logits)).sum(-1).mean())
    assert drift["white"] < 0.8 * drift["plain"]


@pytest.mark.parametrize("sites", ["all", "attention"])
def test_too_many_positions_are_named_or_refused(sites):
    model = build("llama")
    query = tokens(60, seed=3)  # the maps read 32 numbers
    folded = fold_sequence(model, CONTEXT, query, sites=sites)
    assert folded.layers[0].rank == 32
    assert "least squares" in folded.layers[0].outcome
    with pytest.raises(NotControllable, match="least squares"):
        fold_sequence(model, CONTEXT, query, sites=sites, strict=True)


@pytest.mark.parametrize(
    ("model_type", "sites", "words"),
    [
        ("gemma3_text", "attention", "a norm follows its attention"),
        ("gpt2", "attention", "names no attention output map"),
        ("mamba", "all", "has no input maps"),
        ("mixtral", "all", "is a mixture"),
    ],
)
def test_sites_that_a_block_lacks_are_refused_by_name(model_type, sites, words):
    model = zoo.build(model_type)
    with pytest.raises(UnsupportedModel, match=f"layer 0 cannot be edited at sites '{sites}': .*{words}"):
        fold_sequence(model, CONTEXT, tokens(4, seed=3), sites=sites)


def test_unknown_sites_list_the_known_ones():
    with pytest.raises(InputError, match="choose one of output, all, attention"):
        fold_sequence(build("llama"), CONTEXT, tokens(4, seed=3), sites="everywhere")


@pytest.mark.parametrize("sites", ["all", "attention"])
def test_a_stored_patch_is_tested_against_controls_of_its_own_kind(sites):
    bound = bind(build("llama"))
    prompt = Prompt(CONTEXT, tokens(4, seed=3), SINK)
    seen = []
    patch, verdict = fold_and_prove_sequence(bound, prompt, Settings(), sites=sites, progress=seen.append)
    assert verdict.proven, verdict.sentence()
    assert len(seen) == 4 * len(bound.blocks)
    again = verify_sequence_patch(bound, patch, prompt)
    assert again.proven
    assert again.to_json()["sites"] == sites
    assert again.controls["other_context"] == verdict.controls["other_context"]


def test_a_patch_for_more_positions_than_outputs_is_no_wider_than_the_map():
    model = build("llama")
    folded = fold_sequence(model, CONTEXT, tokens(40, seed=3))
    assert {layer.rank for layer in folded.layers} == {41}
    assert {edit.delta.rank for edit in folded.patch.edits.values()} == {32}
    assert gap(model, folded) < FLOAT32_NORMS


@pytest.mark.parametrize("tol", [0.0, 1e-3, 0.1])
def test_recompression_keeps_its_tolerance_and_claims_no_more_than_it_holds(tol):
    model = build("llama")
    folded = fold_sequence(model, CONTEXT, tokens(16, seed=3))
    small = folded.patch.recompress(tol)
    for site, edit in folded.patch.edits.items():
        lost = torch.linalg.norm(edit.delta.to_dense() - small.edits[site].delta.to_dense())
        assert float(lost) <= max(tol, 1e-12) * edit.size()
    assert bool(small.header.exact_at) is (tol == 0)
    if tol == 0:
        assert gap(model, folded) < FLOAT32_NORMS
    else:
        assert small.nbytes < folded.patch.nbytes

"""One static patch for several positions of a mixture: the router stays, its experts' output maps move together."""

from __future__ import annotations

import pytest
import torch

import zoo
from conformance import tokens
from contextfold.anatomy import ExpertBlock, bind, observe
from contextfold.errors import InputError
from contextfold.fold import fold_sequence
from contextfold.patch import MatrixEdit
from contextfold.runtime import applied, materialised, recording, run

MIXTURES = ("mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss")
"""Routed alone; with a gated shared expert; with a shared one and a dense first layer; transposed, with biases."""

LIMIT = 1e-6
"""Their norms compute in float32 in a float64 model."""


def folded_mixture(model_type, n, **options):
    model = zoo.build(model_type)
    return model, fold_sequence(model, tokens(model, 9, 3), tokens(model, n, 103), **options)


def gap(model, folded, way=materialised):
    n = folded.in_context.shape[0]
    with way(model, folded.patch):
        patched = run(model, folded.split.reduced, last=n)
    without = float((folded.in_context - run(model, folded.split.reduced, last=n)).norm())
    assert without > 1e-2 * float(folded.in_context.norm())
    return float((folded.in_context - patched).norm()) / without


@pytest.mark.parametrize("n", [1, 4, 16])
@pytest.mark.parametrize("model_type", MIXTURES)
def test_exact_at_every_position(model_type, n):
    model, folded = folded_mixture(model_type, n)
    assert gap(model, folded) < LIMIT
    assert all(layer.outcome == "exact" for layer in folded.layers)
    assert all(layer.relative_error < LIMIT for layer in folded.layers)


@pytest.mark.parametrize("model_type", MIXTURES)
def test_exact_as_action(model_type):
    model, folded = folded_mixture(model_type, 4, written=False)
    assert gap(model, folded, applied) < LIMIT


def test_the_router_is_left_alone_and_several_experts_move():
    _, folded = folded_mixture("mixtral", 16)
    sites = [site for site in folded.patch.edits if site.layer == 1]
    assert {site.parameter for site in sites} == {"down_proj"}
    assert len({site.expert for site in sites}) > 2


def test_the_edit_of_all_experts_together_is_the_smallest():
    """Against dense linear algebra: the experts' maps side by side, the pseudo-inverse of what they read."""
    model, folded = folded_mixture("qwen2_moe", 6)
    bound = bind(model)
    block = bound.blocks[0]
    assert isinstance(block, ExpertBlock)
    with recording(bound.blocks[:1], slice(None), "z") as states:
        run(model, folded.split.reduced)
    seen = [observe(model, block, z) for z in states[0]["z"]]
    columns = tuple(sorted({column for one in seen for column in one.columns}))
    S = torch.cat([one.row(columns) for one in seen])
    edits = [folded.patch.edits[block.outputs[k].site] for k, _ in columns]
    assert all(isinstance(edit, MatrixEdit) for edit in edits)
    dW = torch.cat([edit.delta.to_dense() for edit in edits], 1)
    assert float((dW - (dW @ S.T) @ torch.linalg.pinv(S.T)).norm()) < 1e-9 * float(dW.norm())
    assert float((dW @ S.T).norm()) > 0


def test_more_positions_than_the_experts_can_serve_are_named():
    model = zoo.build("mixtral")
    small = fold_sequence(model, tokens(model, 9, 3), tokens(model, 16, 103), at=[3, 7])
    assert {layer.rank for layer in small.layers} == {3}
    assert all(layer.outcome == "exact" for layer in small.layers)


def test_the_whitened_form_is_refused_by_name():
    model = zoo.build("mixtral")
    with pytest.raises(InputError, match="layer 0 is a mixture of experts"):
        fold_sequence(model, tokens(model, 9, 3), tokens(model, 4, 103), typical=tokens(model, 20, 5))

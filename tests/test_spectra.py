"""Singular values and sizes, against dense linear algebra and counting by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from contextfold.anatomy import bind
from contextfold.fold import fold_sequence, fold_token
from contextfold.lowrank import LowRank
from contextfold.magnitudes import EDGES, counts
from contextfold.patch import MatrixEdit, Patch, ScaleEdit, Site
from contextfold.runtime import materialised, run
from contextfold.spectra import POINTS, spectra
from tiny import shared, tokens

CONTEXT, QUERY = tokens(9), tokens(4, seed=2)


def test_spectra_are_those_of_the_product():
    model = bind(shared("gemma3_text"))
    patch = fold_token(model, CONTEXT, QUERY).patch
    rows = spectra(patch)
    assert [row["layer"] for row in rows] == sorted(site.layer for site in patch.edits)
    by_name = {site.name: edit for site, edit in patch.edits.items()}
    for row in rows:
        edit = by_name[row["site"]]
        if isinstance(edit, MatrixEdit):
            dense = np.linalg.svd((edit.delta.B @ edit.delta.A).double().numpy(), compute_uv=False)
            assert row["singular_values"] == pytest.approx(dense[: row["rank"]], rel=1e-9, abs=1e-12 * dense[0])
            assert row["norm"] == pytest.approx(float(np.sqrt((dense**2).sum())))
        else:
            assert isinstance(edit, ScaleEdit)
            assert (row["kind"], row["singular_values"]) == ("scale", [])
            assert row["norm"] == pytest.approx(float((edit.value - edit.base).norm()))


def test_a_long_spectrum_is_thinned_but_keeps_its_ends():
    header = fold_token(bind(shared("llama")), CONTEXT, QUERY).patch.header
    B, A = torch.randn(120, 100, dtype=torch.float64), torch.randn(100, 110, dtype=torch.float64)
    (row,) = spectra(Patch(header, {Site(0, "a"): MatrixEdit(LowRank(B, A))}))
    dense = np.linalg.svd((B @ A).numpy(), compute_uv=False)
    assert row["numbers"][0] == 1
    assert row["numbers"][-1] == 100
    assert len(row["numbers"]) <= POINTS + 1
    assert 99 in row["numbers"]
    assert row["singular_values"] == pytest.approx([dense[k - 1] for k in row["numbers"]], rel=1e-6)


def test_sizes_are_counted_between_the_edges():
    assert EDGES[0] == pytest.approx(1e-8)
    assert EDGES[-1] == pytest.approx(10.0)
    found = counts(torch.tensor([0.0, -2.0, 2.0, 1e-30, 10.0, 500.0, 1.0]))
    assert sum(found) == 7
    assert found[0] == 2  # 0 and 1e-30
    assert found[-1] == 2  # 10 and 500
    assert found[EDGES.index(1.0) + 1] == 3  # 1 and 2, which is below 3.16


def test_a_layer_counts_every_entry_of_u_once():
    model = shared("gemma3_text")
    for layer in fold_token(bind(model), CONTEXT, QUERY).layers:
        assert sum(layer.u_counts) == model.config.hidden_size
        smallest = next(k for k, count in enumerate(layer.u_counts) if count)
        assert smallest == sum(edge <= layer.min_abs_u for edge in EDGES)
    assert all(layer.u_counts == () for layer in fold_token(bind(shared("llama")), CONTEXT, QUERY).layers)


def test_actions_are_what_the_written_edit_adds():
    model = shared("llama")
    bound = bind(model)
    folded = fold_sequence(bound, CONTEXT, QUERY)
    assert folded.patch.header.exact_at[1:] == tuple(range(9, 13))  # behind the sink, which is kept as it is
    before = [block.output_map.weight.clone() for block in bound.blocks]
    read = []
    with materialised(bound, folded.patch) as edited:
        after = [block.output_map.weight.clone() for block in bound.blocks]
        hooks = [
            block.output_map.module.register_forward_pre_hook(
                lambda _, args: read.append(args[0][0, [0, -4, -3, -2, -1]])
            )
            for block in bound.blocks
        ]
        run(edited, folded.split.reduced)
        for hook in hooks:
            hook.remove()
    for layer, old, new, h in zip(folded.layers, before, after, read, strict=True):
        bias = model.model.layers[layer.layer].mlp.down_proj.bias
        expected = ((new - old) @ h.T).norm(dim=0) / (old @ h.T + bias[:, None]).norm(dim=0)
        assert layer.actions == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-12)
        assert min(layer.actions[1:]) > 1e-3 > layer.actions[0]

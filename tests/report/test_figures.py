"""Figures are matplotlib's, and draw the numbers that they were given."""

from __future__ import annotations

import pytest

import runs
from contextfold.anatomy import bind
from contextfold.fold import SINK
from contextfold.report import figures, run_of
from contextfold.report.canvas import inline
from contextfold.spectra import spectra
from contextfold.verify import Prompt, fold_and_prove
from tiny import shared, tokens

matplotlib = pytest.importorskip("matplotlib.figure", reason="needs the extra 'report'")


def lines(figure, axes=0):
    return [line.get_ydata().tolist() for line in figure.axes[axes].lines]


@pytest.fixture(scope="module")
def proven():
    return fold_and_prove(bind(shared("gemma3_text")), Prompt(tokens(11), tokens(3, seed=2), SINK))


def test_a_verdict_is_a_run(proven):
    patch, verdict = proven
    json = run_of(verdict.to_json()).found
    (errors,) = lines(figures.residual_error(json["layers"]))
    assert errors == [layer["relative_error"] for layer in json["layers"]]
    drawn = figures.edit_norms(spectra(patch))
    assert isinstance(drawn, matplotlib.Figure)
    names = [text.get_text() for text in drawn.axes[0].get_legend().get_texts()]
    assert names == ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_feedforward_layernorm"]
    norms = {site.name: edit.size() for site, edit in patch.edits.items()}
    assert lines(drawn)[3] == pytest.approx([norms[f"model.layers.{k}.{names[3]}.weight"] for k in range(3)])


def test_a_heat_map_has_layers_upwards_and_keeps_what_is_missing():
    figure = figures.heat_map([[0.5, 2.0], [None, 1.0], [0.25, 0.0]], "size")
    (image,) = figure.axes[0].get_images()
    drawn = image.get_array()
    assert drawn.shape == (2, 3)
    assert (drawn[1, 0], drawn[0, 2]) == (2.0, 0.25)
    assert drawn.mask.tolist() == [[False, True, False], [False, False, False]]


def test_a_histogram_shows_shares():
    found = runs.fold()
    (image,) = figures.u_histogram(found["layers"], found["u_edges"]).axes[0].get_images()
    drawn = image.get_array()
    assert drawn[0, 1:3].tolist() == [3 / 8, 5 / 8]
    assert drawn.mask[0].tolist() == [True, False, False, True]


def test_published_and_ours_stand_beside_each_other():
    rows = [
        {"figure": "a", "published": 87.5, "ours": 99.0},
        {"figure": "b $_{", "published": None, "ours": 2.0},
        {"figure": "c", "published": 100.0, "ours": None},
    ]
    ax = figures.beside(rows, percent=True).axes[0]
    points = {(line.get_marker(), *map(float, line.get_xydata()[0])) for line in ax.lines if len(line.get_xdata()) == 1}
    assert points == {("s", 87.5, 0.0), ("o", 99.0, 0.0), ("o", 2.0, 1.0), ("s", 100.0, 2.0)}
    assert [text.get_text() for text in ax.texts] == ["a", "b $_{", "c"]
    assert ax.get_xlim()[0] < 0
    assert ax.get_xlim()[1] > 100


def test_curves_keep_their_points_and_draw_zeros_below():
    ax = figures.curves({"first": [(1.0, 0.5), (10.0, 0.0)], "second": [(5.0, 4.0)]}, "x", "y", "xy").axes[0]
    assert [line.get_xdata().tolist() for line in ax.lines] == [[1.0, 10.0], [5.0]]
    assert ax.lines[0].get_ydata().tolist() == pytest.approx([0.5, 0.5 / 3])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert figures.curves({"a": [(1.0, 0.0)]}, "x", "y").axes[0].lines[0].get_ydata().tolist() == [0.0]


def test_singular_values_stand_in_axes_of_their_map():
    figure = figures.singular_values(runs.SPECTRA)
    assert len(figure.axes) == 1
    assert lines(figure) == [[1.0, 0.5, 0.25], [1.0, 0.5, 0.25]]


def test_recovered_shows_its_interval():
    found = runs.bake()
    figure = figures.recovered(
        [("patched", found["kl_recovered"], (0.8, 0.9), "patched"), ("control", -3.0, None, "control")]
    )
    spans = [line.get_xdata() for line in figure.axes[0].lines]
    assert list(spans[0]) == [0.8, 0.9]
    assert list(spans[1]) == [0.875]
    assert figure.axes[0].get_xlim()[0] == -2.0  # a bad control does not push the rest together


@pytest.mark.parametrize("name", ["$\\frac{1}{$", "<script>", "a" * 200, "\u202e\x00\n", "日本語"])
def test_strange_names_can_be_drawn(name):
    parts = [{**part, "name": name} for part in runs.ablate()["parts"]]
    svg = inline(figures.part_costs(parts), "x")
    assert "<script>" not in svg
    assert svg.startswith("<svg")
    row = {**runs.SPECTRA[0], "site": f"layers.0.{name}"}
    svg += inline(figures.singular_values([row]), "y")
    assert not any(char in svg for char in "\x00\u202e")


def test_the_settings_of_the_user_come_back():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    inline(figures.residual_error(runs.fold()["layers"]), "x")
    assert dict(mpl.rcParams) == before


def test_zeros_are_drawn_below_everything():
    rows = [{"logit_gap": 0.0}, {"logit_gap": 3e-6}]
    (drawn,) = lines(figures.step_gaps(rows, {"logit_gap": "patched"}))
    assert drawn == pytest.approx([1e-6, 3e-6])
    assert inline(figures.gaps([("all", 0.0, "patched"), ("nothing", None, "control")]), "z")

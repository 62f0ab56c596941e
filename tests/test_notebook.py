"""What a notebook shows: the numbers of the result, escaped, without any import beyond those of the result itself."""

from __future__ import annotations

import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

from contextfold.ablate import ablate
from contextfold.anatomy import bind
from contextfold.bake import Frame, answered, bake
from contextfold.fold import SINK, fold_sequence, fold_token
from contextfold.notebook import card, short
from contextfold.stepwise import Summary, generate
from contextfold.verify import Prompt, evaluate, fold_and_prove
from contextfold.verify.sequence import fold_and_prove_sequence
from tiny import shared, tokens

CONTEXT, QUERY = tokens(11), tokens(3, seed=2)
HOSTILE = "<script>alert(1)</script>"


class Cells(HTMLParser):
    """Tags that occur, and the cells of the table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []
        self.text = ""
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self._in_cell = tag in ("td", "th")
        if self._in_cell:
            self.cells.append("")

    def handle_data(self, data):
        self.text += data
        if self._in_cell:
            self.cells[-1] += data


@pytest.fixture(scope="module")
def bound():
    return bind(shared("gemma3_text"))


def read(result) -> Cells:
    found = Cells(result._repr_html_())
    assert found.tags == {"div", "table", "thead", "tbody", "tr", "th", "td"}
    return found


def test_a_verdict_shows_its_runs_and_controls(bound):
    patch, verdict = fold_and_prove(bound, Prompt(CONTEXT, QUERY, SINK))
    found = read(replace(verdict, model=HOSTILE))
    json = verdict.to_json()
    assert HOSTILE in found.text
    assert verdict.sentence() in found.text
    assert short(json["worst_logit_gap"]) in found.cells
    assert short(json["unpatched_logit_gap"]) in found.cells
    for name in json["controls"]:
        assert f"{name.replace('_', ' ')} (control)" in found.cells
    shown = read(patch)
    assert shown.cells[5::5] == ["0", "1", "2"]
    assert repr(patch) in shown.text
    assert short(patch.max_abs_dm) != "–"


def test_a_failed_verdict_is_marked(bound):
    _, verdict = fold_and_prove(bound, Prompt(CONTEXT, QUERY, SINK))
    assert "✓" in verdict._repr_html_()
    wrong = replace(verdict, steps=tuple(replace(step, written=step.unpatched) for step in verdict.steps))
    assert "✗" in wrong._repr_html_()
    assert "✓" not in wrong._repr_html_()


def test_folds_and_sequences_show_their_layers(bound):
    for folded in (fold_token(bound, CONTEXT, QUERY), fold_sequence(bound, CONTEXT, QUERY)):
        found = read(folded)
        assert found.cells[5::5] == ["0", "1", "2"]
        assert short(folded.layers[1].weight_ratio) in found.cells
    _, verdict = fold_and_prove_sequence(bound, Prompt(CONTEXT, QUERY, SINK))
    assert f"{len(verdict.written)} / {len(verdict.written)}" in read(verdict).cells


def test_an_ablation_and_a_generation_show_themselves(bound):
    found = ablate(bound, CONTEXT, QUERY, {HOSTILE: ((1, 4),), "rest": ((4, 11),)})
    shown = read(found)
    assert HOSTILE in shown.cells
    assert short(found.ranked()[0].kl_nats) == shown.cells[8]
    summary = Summary(tuple(generate(bound, torch.cat([CONTEXT, QUERY]), tokens=3)), bound.dtype)
    assert f"{summary.matches} / 3" in read(summary).cells


def test_a_bake_and_its_verdict_show_themselves():
    bound = bind(shared("llama"))
    frame, asked = Frame(tokens(2, seed=3), tokens(9, seed=4)), [tokens(4, seed=50 + i) for i in range(3)]
    examples = answered(bound, frame.full, asked, tokens=3)
    baked = bake(bound, frame, examples)
    assert {"output map", "attention output map"} <= set(read(baked).cells)
    verdict = evaluate(bound, baked, frame, examples)
    found = read(verdict)
    assert f"{verdict.patched.share:.1%}" in found.cells
    assert "random patch (control)" in found.cells


def test_texts_are_escaped_and_gaps_are_dashes():
    assert HOSTILE not in card(HOSTILE, HOSTILE, (HOSTILE,), ((HOSTILE,),))
    assert Cells(card(HOSTILE, "s", (HOSTILE,), ((HOSTILE,),), True)).cells == [HOSTILE, HOSTILE]
    assert (short(None), short(float("nan")), short(0.001234)) == ("–", "–", "0.0012")


def test_showing_imports_nothing(bound):
    result = fold_token(bound, CONTEXT, QUERY)
    before = set(sys.modules)
    assert result._repr_html_()
    assert set(sys.modules) == before

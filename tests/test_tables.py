"""Tables in a terminal of 80 columns: no name of a run is broken over lines, and no figure is cut off."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from contextfold import bakeview, show
from contextfold.anatomy import bind
from contextfold.bake import Frame, answered, bake
from contextfold.fold import SINK
from contextfold.verify import Prompt, evaluate, fold_and_prove
from contextfold.verify.controls import OTHER, SHUFFLED
from contextfold.verify.sequence import fold_and_prove_sequence
from tiny import shared, tokens

PROMPT = Prompt(tokens(11), tokens(3, seed=2), SINK)
CONTROLS = ("other context (control)", "shuffled context (control)", "random patch (control)")
WAYS = ("patched: weights written", "patched: beside the weights", "patched, input off by a rounding")


def drawn(view) -> list[str]:
    file = StringIO()
    Console(file=file, width=80).print(view)
    return file.getvalue().splitlines()


def begins(lines: list[str]) -> set[str]:
    """First cells of rows that hold more than them."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    return {row[0] for row in rows if len(row) > 2 and any(row[1:])}


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_runs_of_a_fold_and_of_a_sequence_have_a_line_each(model_type):
    bound = bind(shared(model_type))
    _, verdict = fold_and_prove(bound, PROMPT)
    lines = drawn(show.verdict_view(verdict))
    assert begins(lines) == {*WAYS, *CONTROLS, "the model with itself", "without patch (control)"}
    assert not any("…" in line for line in lines)
    _, sequence = fold_and_prove_sequence(bound, PROMPT)
    lines = drawn(show.verdict_view(sequence))
    assert begins(lines) == {*WAYS, *CONTROLS, "without patch (control)"}
    assert not any("…" in line for line in lines)


def test_runs_of_a_bake_have_a_line_each():
    bound = bind(shared("llama"))
    frame, asked = Frame(tokens(2, seed=3), tokens(9, seed=4)), [tokens(4, seed=50 + i) for i in range(3)]
    examples = answered(bound, frame.full, asked, tokens=3)
    baked = bake(bound, frame, examples)
    verdict = evaluate(
        bound, baked, frame, examples, controls={OTHER: baked.patch * 0.1, SHUFFLED: baked.patch * 0.2},
        windows={OTHER: tokens(9, seed=5), SHUFFLED: tokens(9, seed=6)},
        elsewhere={"general questions": examples}, strengths=(0.5,),
    )  # fmt: skip
    lines = drawn(bakeview.verdict_view(replace(verdict, model="a-model")))
    named = {"without the context", "patched", "patch × 0.5", "same answers, left alone", "general questions"}
    named |= {"other context (in window)", "shuffled context (in window)"}
    assert named | set(CONTROLS) <= begins(lines)
    assert not any("…" in line for line in lines)

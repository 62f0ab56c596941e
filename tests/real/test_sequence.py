"""One static patch for a text on the built-in models, in float32, weights written: every token, through norms too."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from contextfold import models, prompts
from contextfold.anatomy import bind
from contextfold.errors import UnsupportedModel
from contextfold.fold import fold_sequence
from contextfold.runtime import materialised, run

pytestmark = pytest.mark.real

TEXTS = Path(__file__).parents[2] / "scripts" / "texts"
WORDS = {64: 55, 256: 219}
"""Words of the answer that make about so many tokens."""


@cache
def loaded(name):
    found = models.load(name)
    return bind(found.model), found.tokenizer


def gaps(name, size, **options):
    """The fold, per position the largest difference of logits, and how many first tokens agree."""
    bound, tokenizer = loaded(name)
    answer = " ".join((TEXTS / "answer.txt").read_text().split()[: WORDS[size]])
    ids = prompts.encode(tokenizer, (TEXTS / "note.txt").read_text(), answer)
    folded = fold_sequence(bound, ids.context, ids.query, **options)
    n, wanted = ids.query.numel(), folded.in_context
    without = run(bound.model, folded.split.reduced, last=n)
    assert float((without - wanted).abs().max()) > 10
    with materialised(bound, folded.patch):
        logits = run(bound.model, folded.split.reduced, last=n)
    assert bool((logits.argmax(1) == wanted.argmax(1)).all())
    return folded, float((logits - wanted).abs().max())


@pytest.mark.parametrize("sites", ["output", "all", "attention"])
def test_smollm2_every_layer_and_every_logit(sites):
    folded, worst = gaps("smollm2", 64, sites=sites)
    assert worst <= 1e-4
    assert all(layer.outcome == "exact" and layer.relative_error < 1e-5 for layer in folded.layers)


@pytest.mark.parametrize("size", [64, 256])
def test_gemma_every_logit(size):
    """With 254 positions no positive scale serves all of them, in the last layer neither."""
    folded, worst = gaps("gemma3-270m", size)
    assert worst <= 1e-4
    last = folded.layers[-1]
    assert last.outcome == ("length freed" if size == 256 else "exact")
    assert last.relative_error < 1e-5
    assert last.length_change_max < 0.5


def test_gemma_refuses_attention_by_name():
    with pytest.raises(UnsupportedModel, match="norm follows its attention"):
        gaps("gemma3-270m", 64, sites="attention")

"""A shortened context with a patch for the rest. Oracles: losses of plain calls, and the published perplexities."""

from __future__ import annotations

import math

import pytest
import torch

import tiny
from contextfold import models
from contextfold.models import Loaded
from contextfold.questions import questions
from contextfold.reproduce import Bench, paper_named, shortened
from contextfold.reproduce.arxiv_2609_39329 import closed
from contextfold.reproduce.harbour import DOCUMENT, JUDGED, REFERENCE
from contextfold.reproduce.shortened import measure_budget

TEXT = "Oak and elm stand by the mill.\n"
PAIRS = (("Who stands?", "Oak."), ("Where?", "By the mill."))


def nothing() -> None:
    pass


@pytest.fixture
def small(monkeypatch):
    """A tiny model with a short document, since it has 256 positions."""
    monkeypatch.setattr(shortened, "DOCUMENT", TEXT)
    monkeypatch.setattr(shortened, "REFERENCE", PAIRS)
    monkeypatch.setattr(shortened, "JUDGED", PAIRS[::-1])
    model, tokenizer = tiny.build("llama", torch.float32), tiny.letters()
    return model, tokenizer, Bench("tiny", lambda dtype: Loaded(model, tokenizer, "tiny"))


def log_perplexity(model, before, tails, answers) -> float:
    """Nats per token of the answers, by torch's own loss on plain calls."""
    lost, count = 0.0, 0
    for tail, answer in zip(tails, answers, strict=True):
        ids = torch.cat([before, tail, answer])
        logits = model(input_ids=ids[None]).logits[0, -len(answer) - 1 : -1]
        lost += float(torch.nn.functional.cross_entropy(logits.double(), answer, reduction="sum"))
        count += len(answer)
    return lost / count


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_losses_are_those_of_plain_calls(small, share):
    model, tokenizer, bench = small
    found = measure_budget(
        bench, nothing, dtype=torch.float32, share=share, ways=("output",), asked=2, judged=2, controls=True
    )  # fmt: skip
    laid = questions(tokenizer, TEXT, [question for question, _ in PAIRS[::-1]])
    answers = [torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]) for _, text in PAIRS[::-1]]
    count = round(share * len(laid.context))
    assert (found["kept_tokens"], found["document_tokens"]) == (count, len(laid.context))
    whole = log_perplexity(model, torch.cat([laid.kept, laid.context]), laid.tails, answers)
    short = log_perplexity(model, torch.cat([laid.kept, laid.context[:count]]), laid.tails, answers)
    assert found["whole"]["log_perplexity"] == pytest.approx(whole, rel=1e-4)
    assert found["short"]["log_perplexity"] == pytest.approx(short, rel=1e-4)
    assert found["whole"]["same"] == found["whole"]["tokens"] == sum(map(len, answers))
    assert found["whole"]["kl_nats"] < 1e-9 < found["short"]["kl_nats"]
    # Judged by what it was learnt from, the patch is nearer to the whole context than nothing and than the controls.
    assert found["ways"]["output"]["kl_nats"] < found["short"]["kl_nats"]
    assert found["controls"]["random"]["kl_nats"] > found["ways"]["output"]["kl_nats"]
    assert found["controls"]["other_document"]["kl_nats"] > found["ways"]["output"]["kl_nats"]


def test_the_share_that_comes_back_is_of_the_log_perplexity():
    assert closed(math.log(8.8), math.log(123.4), math.log(21.1)) == pytest.approx(
        100 * math.log(123.4 / 21.1) / math.log(123.4 / 8.8)
    )
    assert closed(1.0, 3.0, 3.0) == 0
    assert closed(1.0, 3.0, 1.0) == 100


def test_the_document_holds_what_is_asked_and_no_question_is_asked_twice():
    assert len({question for question, _ in (*REFERENCE, *JUDGED)}) == len(REFERENCE) + len(JUDGED)
    for fact in ("Tamber", "nine metres", "Old Martha", "orange", "six knots", "1958", "two crowns", "forty"):
        assert fact in DOCUMENT


def test_published_figures_stand_at_their_budgets():
    judged = {"log_perplexity": 1.0, "kl_nats": 0.1, "same": 1, "tokens": 2}
    found = {
        "kept_tokens": 1, "document_tokens": 20, "whole": judged, "short": {**judged, "log_perplexity": 2.0},
        "ways": {"output": {**judged, "log_perplexity": 1.25}}, "controls": {},
    }  # fmt: skip
    rows = paper_named("2609.39329").rows({"kept-5": found, "kept-10": found})
    cells = {(row.section[:10], row.figure): (row.published, row.ours) for row in rows}
    assert cells["perplexity", "5% of the context kept, no patch"] == (123.4, 7.39)
    assert cells["perplexity", "10% of the context kept, no patch"] == (None, 7.39)
    assert cells["perplexity", "5% of the context kept, MLP output map, as in the paper"] == (21.1, 3.49)
    assert cells["of what th", "5% kept, MLP output map, as in the paper"] == (66.9, 75.0)
    nothing_lost = {**found, "short": {**judged, "log_perplexity": 1.02}}
    rows = paper_named("2609.39329").rows({"kept-50": nothing_lost})
    (row,) = (row for row in rows if row.section.startswith("of what"))
    assert row.ours is None
    assert "0.02 nats" in row.note


@pytest.mark.real
def test_the_built_in_model_gets_back_what_the_short_document_lost():
    loaded = models.load("smollm2")
    found = measure_budget(
        Bench("smollm2", lambda dtype: loaded), nothing, dtype=torch.float32, share=0.05, ways=("output",), asked=2,
        judged=4, controls=False,
    )  # fmt: skip
    whole, short, patched = (
        each["log_perplexity"] for each in (found["whole"], found["short"], found["ways"]["output"])
    )
    assert short > whole + 1
    assert closed(whole, short, patched) > 40

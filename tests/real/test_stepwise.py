"""Stepwise folding on the built-in models: the paper's prompts, one long answer, half precision, the command line."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

from contextfold import models, prompts, suites
from contextfold.anatomy import bind
from contextfold.cli import app
from contextfold.errors import NotControllable
from contextfold.stepwise import PAPER, Summary, Window, generate
from tiny import bits

pytestmark = pytest.mark.real

MODELS = ("smollm2", "gemma3-270m")


@cache
def bound(name, dtype):
    loaded = models.load(name, dtype=dtype)
    return bind(loaded.model), loaded.tokenizer


def summary_of(name, dtype, **settings):
    model, tokenizer = bound(name, dtype)
    ids = [prompts.encode_text(tokenizer, text) for text in suites.PAPER]
    found = [token for prompt in ids for token in generate(model, prompt, PAPER, tokens=20, **settings)]
    return Summary(tuple(found), dtype), ids, found


@pytest.mark.parametrize("past", ["free", "forced"])
@pytest.mark.parametrize("name", MODELS)
def test_float32_agrees_on_every_token(name, past):
    summary, _, _ = summary_of(name, torch.float32, history=past, prove_every=20)
    assert summary.holds, summary.sentence()
    assert summary.matches == 100
    assert len(summary.proofs) == 5
    assert summary.worst_proven_gap <= 1e-4
    assert summary.worst_action_gap <= 1e-4
    assert summary.unpatched_gap > 1


def test_a_long_answer_in_float32():
    """256 tokens with the document folded away, the question and the answer kept."""
    model, tokenizer = bound("smollm2", torch.float32)
    parts = prompts.encode(tokenizer, suites.DEMO.context, suites.DEMO.query)
    ids = torch.cat([parts.context, parts.query])
    window = Window.after(parts.context.numel(), ids.numel())
    summary = Summary(tuple(generate(model, ids, window, tokens=256)), torch.float32)
    assert summary.holds, summary.sentence()
    assert summary.matches == 256
    assert max(summary.worst_proven_gap, summary.worst_action_gap) <= 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_agrees_as_well_as_the_model_with_itself(name, dtype):
    """The yardstick: the model with its cache against itself without, on the same tokens."""
    model, tokenizer = bound(name, dtype)
    first = prompts.encode_text(tokenizer, suites.PAPER[0])
    if not bool(torch.isfinite(model.model(first[None]).logits).all()):
        with pytest.raises(NotControllable, match="not finite"):
            list(generate(model, first))
        return
    summary, ids, found = summary_of(name, dtype, history="forced", prove_every=10)
    itself = 0
    for k, prompt in enumerate(ids):
        mine = found[20 * k : 20 * (k + 1)]
        whole = torch.cat([prompt, torch.tensor([token.chosen for token in mine])])
        logits = model.model(whole[None], use_cache=False).logits[0, prompt.numel() - 1 : -1]
        itself += sum(int(row.argmax()) == token.in_context for row, token in zip(logits, mine, strict=True))
    assert summary.matches >= itself, f"{summary.matches} of 100, the model with itself {itself}"


def test_the_weights_are_as_they_were():
    model, tokenizer = bound("smollm2", torch.float32)
    before = bits(model.model)
    list(generate(model, prompts.encode_text(tokenizer, suites.PAPER[0]), tokens=2, prove_every=1))
    assert bits(model.model) == before


def test_the_command(capsys):
    arguments = ["generate", "smollm2", "--context", suites.DEMO.context, "--prompt", suites.DEMO.query]
    with pytest.raises(SystemExit) as ended:
        app([*arguments, "--tokens", "4"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert "Edmund" in printed
    assert "proven" in printed
    with pytest.raises(SystemExit):
        app([*arguments, "--tokens", "4", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["holds"]
    assert found["top1_matches"] == found["tokens"] == 4

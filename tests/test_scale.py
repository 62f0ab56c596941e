"""docs/scale.md: its formulas against torch's own counter, its fit against rates that are known, its tables."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from contextfold.anatomy import bind
from contextfold.bake import Example, Frame, bake
from contextfold.fold import fold_sequence, fold_token
from tiny import tokens

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))

from scaling import costs, fit, page  # noqa: E402 (the path comes first)

SHAPES = ((2, 64, 160, 4, 2), (3, 64, 192, 2, 1), (2, 96, 160, 3, 3))
"""Layers, width, width of the MLP, heads, heads of keys and values."""


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def model(request):
    L, d, f, heads, keys = request.param
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=d, intermediate_size=f, num_hidden_layers=L, num_attention_heads=heads,
        num_key_value_heads=keys, max_position_embeddings=256, attn_implementation="eager",
    )  # fmt: skip
    bound = bind(LlamaForCausalLM(config).eval())
    return bound, costs.Shape.of(config)


@torch.no_grad()
def counted(call):
    with FlopCounterMode(display=False) as counter:
        found = call()
    return counter.get_total_flops(), found


def nbytes(patch):
    return sum(4 * (edit.delta.B.numel() + edit.delta.A.numel()) for edit in patch.edits.values())


@pytest.mark.parametrize(("c", "n"), [(20, 8), (9, 21)])
def test_a_token_takes_what_the_formula_says(model, c, n):
    bound, shape = model
    seen, folded = counted(lambda: fold_token(bound, tokens(c), tokens(n, seed=2)))
    cost = costs.token(shape, c, n)
    assert seen == cost.counted
    assert nbytes(folded.patch) == cost.patch
    assert seen != costs.token(shape, c + 1, n).counted


@pytest.mark.parametrize(("c", "n"), [(20, 8), (9, 21)])
def test_a_sequence_takes_what_the_formula_says(model, c, n):
    bound, shape = model
    seen, folded = counted(lambda: fold_sequence(bound, tokens(c), tokens(n, seed=2)))
    cost = costs.sequence(shape, c, n)
    assert seen == cost.counted
    assert nbytes(folded.patch) == cost.patch


@pytest.mark.parametrize(("questions", "tail"), [(4, 8), (18, 10)], ids=["fewer rows than inputs", "more"])
def test_a_bake_takes_what_the_formula_says(model, questions, tail):
    """The second has more rows than the maps have inputs, and more examples than run together."""
    bound, shape = model
    examples = [Example(tokens(tail, seed=k), tail // 2) for k in range(questions)]
    seen, baked = counted(lambda: bake(bound, Frame(tokens(1), tokens(12, seed=99)), examples))
    ranks = [(a.rank, b.rank) for a, b in zip(baked.sites[::2], baked.sites[1::2], strict=True)]
    cost = costs.bake(shape, 12, questions, tail, ranks)
    assert seen == cost.counted
    assert nbytes(baked.patch) == cost.patch
    widest = costs.bake(shape, 12, questions, tail)
    assert widest.patch > cost.patch


def test_entries_of_a_model_are_counted():
    """The published number of weights, and that of a model in memory."""
    whole = page.LLAMA_70B.maps + 2 * page.LLAMA_70B.V * page.LLAMA_70B.d
    assert whole == pytest.approx(70.55e9, rel=1e-3)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=10, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2))  # fmt: skip
    maps = sum(p.numel() for name, p in model.model.layers.named_parameters() if p.dim() == 2)
    assert costs.Shape.of(model.config).maps == maps


def test_the_fit_finds_rates_that_are_known():
    rates = fit.Rates(5e10, 2e10, 8e9, 1e-3)
    rows = [
        row for row in json.loads(page.RESULT.read_text())["points"] if row["fitted"]
    ]  # fmt: skip
    made = [{**row, "seconds": rates.seconds(fit.cost_of(row), fit.shape_of(row))} for row in rows]
    found = fit.fitted(made)
    assert vars(found) == pytest.approx(vars(rates), rel=1e-6)


def test_the_page_shows_the_file(monkeypatch, tmp_path):
    text = page.DOCUMENT.read_text()
    assert page.page() == text
    assert {match[1] for match in page.MARKERS.findall(text)} == {
        "memory", "rates", "errors", "points", "large", "long", "million",
    }  # fmt: skip
    found = json.loads(page.RESULT.read_text())
    slower = {**found, "points": [{**row, "seconds": 3 * row["seconds"]} for row in found["points"]]}
    monkeypatch.setattr(page, "RESULT", tmp_path / "scale.json")
    page.RESULT.write_text(json.dumps(slower))
    assert page.page() != text


def test_figures_in_the_text_follow_from_the_formulas():
    text = " ".join(page.DOCUMENT.read_text().split())
    big = page.LLAMA_70B
    weights = big.maps + 2 * big.V * big.d
    assert f"{2 * weights / 1e9:.0f} GB in bfloat16, {4 * weights / 1e9:.0f} GB in float32" in text
    assert f"at `c = P / (2 q)`, {round(big.layer / (2 * big.q), -3):,.0f} tokens" in text
    row, cache = costs.WORD * big.L * (big.d + big.f), 2 * big.cache
    assert f"{row / 1e6:.1f} MB; a token of context takes {cache / 1e6:.2f} MB" in text
    assert f"the cache of 1000 tokens from {-(-1000 * cache // row)} positions on" in text
    baked = costs.bake(big, 1000, page.QUESTIONS, page.TAIL)
    assert f"a bake at full rank {baked.patch / (1000 * cache):.0f} times as much" in text
    many = costs.bake(big, 1000, page.MANY, page.TAIL)
    shares = [(cost.solves + cost.factorings) / cost.operations for cost in (baked, many)]
    assert "a sixth of the operations, with 300 three fifths" in text
    assert shares == pytest.approx([1 / 6, 3 / 5], rel=0.1)
    activations = page.token_peak(big, 200_000, 0)
    assert f"At 200,000 tokens the activations of the run with the context take {activations / 1e9:.0f} GB" in text
    reading = 2 * weights / page.WRITTEN
    assert f"that takes {reading:.0f} s, against {costs.token(big, 1000, 32).operations / page.ROUND:.1f} s" in text


def test_points_left_out_were_not_fitted():
    from scaling.points import FITTED, LEFT_OUT

    points = json.loads(page.RESULT.read_text())["points"]
    assert {row["model"] for row in points if row["fitted"]} == set(FITTED)
    assert {row["model"] for row in points if not row["fitted"]} == set(LEFT_OUT)
    documented = set(
        re.findall(r"`(\w+)`", (ROOT / "docs" / "json.md").read_text().split("scale.json")[1].split("\n## ")[0])
    )
    assert {key for row in points for key in row} <= documented

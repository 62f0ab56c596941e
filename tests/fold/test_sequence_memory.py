"""What a fold of a sequence holds besides its result: one block's worth, however many blocks there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import tiny
from contextfold.anatomy import bind
from contextfold.fold import fold_sequence
from storage import Peak, expected_peak
from tiny import POST_NORM, tokens

CONTEXT, QUERY = tokens(5), tokens(20, seed=3)


def model_of(model_type, **settings):
    """As `tiny.build`, of other sizes, in float32 and with the attention that models have by default."""
    config_name, model_name, extra = tiny.TYPES[model_type]
    settings = {**tiny.COMMON, **extra, **settings}
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return bind(model.eval())


def held(layers, model_type, **options):
    """Peak bytes above the model, without the patch itself."""
    bound = model_of(model_type, num_hidden_layers=layers)
    fold_sequence(bound, CONTEXT, QUERY)  # the fingerprint is taken once
    with Peak(bound.model.state_dict().values()) as peak:
        folded = fold_sequence(bound, CONTEXT, QUERY, **options)
    return peak.bytes - folded.patch.nbytes


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {}),
        ("llama", {"written": False}),
        ("llama", {"sites": "all"}),
        ("llama", {"sites": "attention"}),
        ("llama", {"typical": tokens(80, seed=8)}),
        (POST_NORM[1], {}),
    ],
    ids=["output", "action", "all", "attention", "whitened", "through a norm"],
)
def test_nothing_but_the_patch_grows_with_the_number_of_blocks(model_type, options):
    few, many = (held(layers, model_type, **options) for layers in (3, 9))
    # Less than the in-context sums of one block of six: what is aimed at, the least of what could add up.
    assert many - few < QUERY.numel() * tiny.COMMON["hidden_size"] * 4


@pytest.mark.parametrize(
    ("n", "f", "d", "L", "V"),
    [
        (80, 192, 96, 4, 101),
        (40, 192, 96, 12, 101),
        (40, 192, 96, 4, 3000),
        (60, 96, 96, 6, 101),
        (80, 768, 96, 4, 101),
    ],
)
def test_the_formula_of_the_documents_holds(n, f, d, L, V):
    bound = model_of("llama", hidden_size=d, intermediate_size=f, num_hidden_layers=L, vocab_size=V)
    query = tokens(n - 1, seed=3)
    fold_sequence(bound, CONTEXT, query[:2])
    with Peak(bound.model.state_dict().values()) as peak:
        fold_sequence(bound, CONTEXT, query)
    assert peak.bytes == pytest.approx(expected_peak(n=n, c=5, f=f, d=d, L=L, V=V), rel=0.2)


def test_resident_bytes_of_real_sizes_are_those_of_the_formula():
    """`python scripts/sequences.py memory` writes them."""
    file = Path(__file__).parents[2] / "docs" / "measured" / "sequence-memory.json"
    rows = json.loads(file.read_text())["rows"]
    assert {row["positions"] for row in rows if row["model"] == "smollm2"} == {64, 256, 512}
    for row in rows:
        sizes = {name: row[name] for name in ("L", "d", "f", "V")}
        assert row["peak_bytes"] == pytest.approx(
            expected_peak(n=row["positions"] + 1, c=row["context"], **sizes), rel=0.2
        )


def test_the_count_sees_what_is_held():
    with Peak() as peak:
        kept = [torch.ones(1000) for _ in range(3)]
        for _ in range(5):
            torch.ones(2000)
    assert peak.bytes == 4 * 1000 * len(kept) + 4 * 2000

"""What a fold of a sequence holds besides its result: one block's worth, however many blocks there are."""

from __future__ import annotations

import pytest
import torch
import transformers

import tiny
from contextfold.anatomy import bind
from contextfold.fold import fold_sequence
from storage import Peak
from tiny import POST_NORM, tokens

CONTEXT, QUERY = tokens(5), tokens(20, seed=3)


def llama(layers, model_type="llama"):
    """As `tiny.build`, of so many layers."""
    config_name, model_name, extra = tiny.TYPES[model_type]
    settings = {**tiny.COMMON, **extra, "num_hidden_layers": layers}
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return bind(model.eval())


def held(layers, model_type, **options):
    """Peak bytes above the model, without the patch itself."""
    bound = llama(layers, model_type)
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


def test_the_count_sees_what_is_held():
    with Peak() as peak:
        kept = [torch.ones(1000) for _ in range(3)]
        for _ in range(5):
            torch.ones(2000)
    assert peak.bytes == 4 * 1000 * len(kept) + 4 * 2000

"""The four ways in which the output maps of a mixture share a wanted change, on real blocks."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import zoo
from conformance import EXACT, FLOAT32_INSIDE, gap, tokens
from contextfold.anatomy import bind
from contextfold.errors import InputError, NotControllable, NoWay
from contextfold.fold import fold_token
from contextfold.outcomes import Outcome
from contextfold.runtime import applied, materialised, run

SHARED = {"qwen2_moe": "shared_expert", "deepseek_v3": "shared_experts"}
"""With an expert that is always active: behind a gate, or as it is."""

NORM = "experts by least norm"
EVEN = "experts by even share"
ALONE = "shared expert alone"
ONLY = "experts, output only"

CASES = [(t, rule) for t in ("mixtral", "gpt_oss", *SHARED) for rule in (NORM, EVEN, ALONE, ONLY)]


@cache
def bound(model_type):
    return bind(zoo.build(model_type))


def folded(model_type, rule, **options):
    model = bound(model_type)
    return fold_token(model, tokens(model.model, 9, 3), tokens(model.model, 6, 103), experts=rule, **options)


@pytest.mark.parametrize("keep", [[0], []], ids=["sink", "nothing kept"])
@pytest.mark.parametrize(("model_type", "rule"), [c for c in CASES if c[1] != ALONE or c[0] in SHARED])
def test_every_form_is_exact(model_type, rule, keep):
    model = bound(model_type)
    options = {} if keep else {"keep": ()}
    written, action = folded(model_type, rule, **options), folded(model_type, rule, written=False, **options)
    assert rule in written.patch.header.plan
    reduced, wanted = written.split.reduced, written.in_context
    unpatched = gap(run(model.model, reduced)[0], wanted)
    assert unpatched > 1e-2
    limit = FLOAT32_INSIDE if model_type != "gpt_oss" else EXACT
    with materialised(model, written.patch):
        assert gap(run(model.model, reduced)[0], wanted) <= limit * unpatched
    with applied(model, action.patch):
        assert gap(run(model.model, reduced)[0], wanted) <= limit * unpatched


def outputs(fold, layer=2):
    """Name and edit of every output map that moves in one layer."""
    maps = {m.site for m in bound(fold.patch.header.model_type).blocks[layer].output_maps}
    return {s: e.delta.to_dense() for s, e in fold.patch.edits.items() if s in maps and e.size() > 1e-9}


@pytest.mark.parametrize("model_type", SHARED)
def test_the_shared_expert_alone_moves(model_type):
    moved = outputs(folded(model_type, ALONE))
    assert [site.module.rsplit(".", 2)[1] for site in moved] == [SHARED[model_type]]
    assert len(outputs(folded(model_type, NORM))) == 3


@pytest.mark.parametrize("model_type", ["mixtral", *SHARED])
def test_output_only_leaves_router_and_input_maps_alone(model_type):
    fold = folded(model_type, ONLY)
    mixtures = [block for block in bound(model_type).blocks if block.maps[0].site.module.endswith("gate")]
    reading = {m.site for block in mixtures for m in block.maps} - {m.site for b in mixtures for m in b.output_maps}
    assert reading
    assert not reading & {site for site, edit in fold.patch.edits.items() if edit.size() > 0}


@pytest.mark.parametrize(("model_type", "layer"), [("mixtral", 0), ("qwen2_moe", 0), ("deepseek_v3", 1)])
def test_even_shares_move_the_same_way_and_least_norm_by_less(model_type, layer):
    """In the first mixture of the model, where both forms meet the same tokens."""
    even, least = (outputs(folded(model_type, rule, keep=()), layer) for rule in (EVEN, NORM))
    assert even.keys() == least.keys()
    assert len(even) > 1
    for edits in (even, least):
        way = [torch.linalg.svd(edit)[0][:, 0] for edit in edits.values()]
        assert all(abs(float(one @ way[0])) > 1 - 1e-9 for one in way)
    sizes = [sum(float(edit.norm()) ** 2 for edit in edits.values()) for edits in (least, even)]
    assert sizes[0] < sizes[1]


def test_there_is_no_shared_expert_in_mixtral():
    with pytest.raises(NoWay, match="asked for reach by experts, one of them always active; possible here: experts"):
        folded("mixtral", ALONE)


def test_a_gate_sum_of_zero_has_no_even_share():
    """Two experts with opposite gates: the least norm needs no sum."""
    model = zoo.build("mixtral")
    gate = model.model.layers[1].mlp.gate
    plain = gate.forward

    def opposite(x):
        logits, scores, chosen = plain(x)
        return logits, torch.stack([scores[:, 0], -scores[:, 0]], 1), chosen

    gate.forward = opposite
    context, query = tokens(model, 9, 3), tokens(model, 6, 103)
    with pytest.raises(NotControllable) as refused:
        fold_token(model, context, query, experts=EVEN)
    assert refused.value.findings[0].outcome is Outcome.GATE_SUM_ZERO
    assert "layer 1" in str(refused.value)
    fold = fold_token(model, context, query)
    with materialised(model, fold.patch):
        assert gap(run(model, fold.split.reduced)[0], fold.in_context) < 1e-6


def test_an_unknown_rule_is_refused_and_a_dense_model_has_nothing_to_share():
    with pytest.raises(InputError, match="experts by even share"):
        folded("mixtral", "output weight")
    model = zoo.build("llama")
    fold = fold_token(model, tokens(model, 9, 3), tokens(model, 6, 103), experts=EVEN)
    assert fold.patch.header.plan == ("input weight", "output weight")

"""Whatever the numbers: an outcome with a name, and nothing in a patch, in JSON or in an adapter that is not finite."""

from __future__ import annotations

import itertools
import json
import math
from random import Random

import pytest
import torch

import tiny
import wounds
from contextfold.anatomy import bind
from contextfold.bake import Frame, answered, bake
from contextfold.bake.moments import Moments, left_out, penalty
from contextfold.cli.common import show_or_json
from contextfold.errors import NotControllable
from contextfold.files import plain
from contextfold.fold import fold_sequence, fold_token
from contextfold.lowrank import LowRank, min_norm_update
from contextfold.outcomes import Outcome
from contextfold.patch import MatrixEdit, Patch
from contextfold.rules import OutputWeight
from contextfold.rules.base import judge
from contextfold.verify import Prompt, Settings, compare, fold_and_prove
from contextfold.verify.controls import random_like
from watched import kept

TRIALS = 2
"""Per wound, of doors and texts that are drawn."""


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def family(request):
    bind(tiny.shared(request.param))  # the first one makes torch write its own folders
    return request.param


@pytest.mark.parametrize("wound", list(wounds.WOUNDS))
def test_hostile_numbers(family, wound, tmp_path):
    """Every trial ends in a finite result or in one of our errors."""
    rng = Random(f"{family} {wound}")
    pairs = list(itertools.product(wounds.DOORS, wounds.TEXTS))
    found = []
    if kept(lambda: found.append(wounds.wounded(family, wound, torch.float32, rng)), tmp_path) != "taken":
        return  # the proof of the anatomy met the numbers first
    for trial, (door, text) in enumerate(rng.sample(pairs, TRIALS)):
        place = tmp_path / str(trial)
        place.mkdir()
        laid = wounds.TEXTS[text](rng)
        assert kept(lambda door=door, laid=laid, place=place: wounds.DOORS[door](found[0], laid, place), place)


def test_the_checks_see_what_is_not_finite(tmp_path):
    with pytest.raises(AssertionError, match="/a/1"):
        wounds.check_numbers({"a": [1.0, math.nan]})
    patch = fold_token(tiny.shared("llama"), tiny.tokens(9), tiny.tokens(3, seed=2)).patch
    site = next(iter(patch.edits))
    bad = MatrixEdit(patch.edits[site].delta * math.inf)
    with pytest.raises(AssertionError, match="not finite"):
        wounds.check_patch(Patch(patch.header, {**patch.edits, site: bad}), tmp_path)


# --- what the campaigns found, one by one ----------------------------------------------------------------------------


def zero_output_map(model_type="llama", layer=1):
    model = tiny.build(model_type, torch.float32)
    with torch.no_grad():
        model.model.layers[layer].mlp.down_proj.weight.zero_()
    return bind(model)


def test_a_map_of_zeros_has_no_ratio_to_it():
    """It was Infinity, which is no JSON."""
    prompt = Prompt(tiny.tokens(9), tiny.tokens(4, seed=2))
    _, verdict = fold_and_prove(zero_output_map(), prompt, Settings(other=tiny.tokens(9, seed=4)))
    assert verdict.proven
    assert [row["weight_ratio"] is None for row in verdict.to_json()["layers"]] == [False, True, False]


def test_an_edit_of_nothing_has_a_random_twin():
    """ZeroDivisionError, for factors of zeros and of rank 0."""
    patch = fold_token(tiny.shared("llama"), tiny.tokens(9), tiny.tokens(3, seed=2)).patch
    site = next(iter(patch.edits))
    out, inner = patch.edits[site].delta.shape
    for rank in (0, 1):
        nothing = MatrixEdit(LowRank(torch.zeros(out, rank), torch.zeros(rank, inner)))
        twin = random_like(Patch(patch.header, {site: nothing}))
        assert twin.edits[site].size() == 0
    twin = random_like(patch)
    for site, edit in patch.edits.items():
        assert twin.edits[site].size() == pytest.approx(edit.size(), rel=1e-6)


def test_what_is_no_number_is_infinitely_far():
    """NaN compares as smaller than nothing, so a maximum over tokens lost it."""
    found = compare(torch.tensor([0.0, 1.0]), torch.tensor([math.nan, 1.0]))
    assert (found.logit_gap, found.kl_nats) == (math.inf, math.inf)
    assert compare(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0])).logit_gap == 0


@pytest.mark.parametrize("size", [1e-160, 1e-80, 1.0, 1e80, 1e150])
def test_the_penalty_of_a_ridge_has_no_scale(size):
    """Squares of a Gram matrix left the range of float64: no penalty, and the factorisation failed."""
    rows = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gram = rows.T @ rows
    assert penalty(gram * size, 1e-2) == pytest.approx(size * penalty(gram, 1e-2), rel=1e-9)
    moments = Moments(5, 2, torch.zeros(0, 5, dtype=torch.float64))
    root = size**0.5
    moments.add(rows * root, rows[:, :2] * root)
    assert moments.solve(1e-2).explained == pytest.approx(_explained(rows), rel=1e-6)


def _explained(rows):
    moments = Moments(5, 2, torch.zeros(0, 5, dtype=torch.float64))
    moments.add(rows, rows[:, :2])
    return moments.solve(1e-2).explained


def test_questions_on_which_nothing_is_wanted_are_not_missed():
    """ZeroDivisionError when the penalty was to be decided."""
    rows = torch.randn(6, 4, dtype=torch.float64)
    assert left_out(rows, torch.zeros(6, 2), torch.arange(6) // 2, (1e-2, 1e-1)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("parameter", "value"),
    [("post_attention_layernorm.weight", 1e18), ("mlp.up_proj.weight", 1e35)],
)
def test_a_bake_that_overflows_says_so(parameter, value):
    """A patch with infinities came out, or LAPACK's own words."""
    model = tiny.build("llama", torch.float32)
    with torch.no_grad():
        model.model.layers[2].get_parameter(parameter).mul_(value)
    bound = bind(model)
    frame = Frame(tiny.tokens(1), tiny.tokens(8, seed=4))
    examples = answered(bound, frame.full, [tiny.tokens(60, seed=5)], tokens=2)
    with pytest.raises(NotControllable) as met:
        bake(bound, frame, examples)
    assert {finding.outcome for finding in met.value.findings} <= {Outcome.NOT_FINITE, Outcome.OVERFLOW}


def test_json_has_null_for_what_is_no_number():
    assert plain({"a": [math.nan, (math.inf, 1)], "b": "x"}) == {"a": [None, [None, 1]], "b": "x"}


@pytest.mark.parametrize("fold", [fold_token, fold_sequence])
def test_a_context_of_8192_tokens(fold):
    """The last token of 8,192 and a few is met as exactly as that of nine."""
    config = {**tiny.COMMON, "max_position_embeddings": 9000, "num_hidden_layers": 2}
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    bound = bind(LlamaForCausalLM(LlamaConfig(**config)).eval())
    folded = fold(bound, tiny.tokens(8192), tiny.tokens(3, seed=2))
    assert max(layer.relative_error for layer in folded.layers) < 1e-5


def test_a_residual_that_is_no_number_is_not_solved():
    """A wanted change of NaN counted as none, with a residual of 0; and NaN is not larger than a limit."""
    h, g = torch.ones(1, 4, dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64)
    bad = torch.full((1, 3), math.nan, dtype=torch.float64)
    with pytest.raises(NotControllable) as met:
        OutputWeight().solve("here", h, bad, g)
    assert met.value.findings[0].outcome is Outcome.NOT_FINITE
    solution = min_norm_update(h, bad)
    assert math.isnan(solution.residual)
    with pytest.raises(NotControllable):
        judge("here", h, g, solution)


def test_a_bake_into_a_map_of_zeros():
    """ZeroDivisionError, after all the work."""
    frame = Frame(tiny.tokens(1), tiny.tokens(8, seed=4))
    bound = zero_output_map()
    examples = answered(bound, frame.full, [tiny.tokens(4, seed=5), tiny.tokens(5, seed=6)], tokens=2)
    baked = bake(bound, frame, examples, method="output")
    assert [math.isfinite(site.weight_ratio) for site in baked.sites] == [True, False, True]


def test_a_command_prints_json_that_other_programs_read(capsys):
    show_or_json(True, {"left_out_error": math.nan, "ratio": [math.inf]}, lambda: "")
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"left_out_error": None, "ratio": [None]}

"""A verdict must say no when it should: the controls, the unpatched gap and the sentence."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from contextfold.anatomy import bind
from contextfold.errors import InputError, PatchMismatch
from contextfold.fold import SINK, fold_token
from contextfold.patch import MatrixEdit, ScaleEdit
from contextfold.runtime import Run, run
from contextfold.verify import (
    Prompt,
    Settings,
    compare,
    continuation,
    fold_and_prove,
    random_like,
    rounding_noise,
    shuffled,
    verify_patch,
    verify_prompts,
)
from tiny import bits, build, shared, tokens

CONTEXT, QUERY = tokens(11), tokens(3, seed=2)
PROMPT = Prompt(CONTEXT, QUERY, keep=SINK)

KEYS = {
    "tokens", "top1_matches", "worst_logit_gap", "median_logit_gap", "unpatched_logit_gap", "max_abs_dm",
    "scatter_top1_matches", "scatter_logit_gap", "controls", "materialised",
}  # fmt: skip


def test_compare_against_numbers_worked_out_by_hand():
    p = torch.tensor([2.0, 0.0, 0.0]).log_softmax(0)
    found = compare(p, torch.tensor([0.0, 1.0, 0.0]))
    q = torch.tensor([0.0, 1.0, 0.0]).log_softmax(0)
    assert found.kl_nats == pytest.approx(float((p.exp() * (p - q)).sum()))
    assert (found.top1_match, found.top1, found.margin) == (False, 1, pytest.approx(2.0))
    assert found.logit_gap == pytest.approx(float((p - torch.tensor([0.0, 1.0, 0.0])).abs().max()))
    same = compare(p, p)
    assert (same.logit_gap, same.kl_nats, same.top1_match, same.margin) == (0.0, 0.0, True, 0.0)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_right_patch_is_proven(model_type):
    _, verdict = fold_and_prove(shared(model_type), PROMPT)
    assert verdict.proven, verdict.sentence()
    assert verdict.sentence().startswith("Proven")
    found = verdict.to_json()
    assert set(found) >= KEYS
    json.dumps(found, allow_nan=False)
    assert set(found["controls"]) == {"other_context", "shuffled_context", "random_patch"}
    assert found["worst_logit_gap"] < 1e-6 < 1e-2 < found["unpatched_logit_gap"]


def test_a_wrong_patch_is_not_proven():
    model = build("gemma3_text")
    patch, _ = fold_and_prove(model, PROMPT)
    edits = {s: e.scaled(-1.0) if isinstance(e, MatrixEdit) else e for s, e in patch.edits.items()}
    verdict = verify_patch(model, replace(patch, edits=edits), PROMPT)
    assert not verdict.proven
    assert "worst logit gap" in verdict.sentence()


def test_a_control_that_comes_close_spoils_the_verdict():
    """If another context's patch did as well, the patch would carry nothing of the context."""
    _, verdict = fold_and_prove(shared("llama"), Prompt(CONTEXT, QUERY, keep=SINK), Settings(other=CONTEXT))
    assert not verdict.proven
    assert "other_context" in verdict.sentence()


def test_a_stored_patch_is_tested_on_its_own_tokens_only():
    model = shared("llama")
    patch, _ = fold_and_prove(model, PROMPT)
    again = verify_patch(model, patch, PROMPT)
    assert again.proven
    assert len(again.to_json()["layers"]) == 3
    for wrong in (
        Prompt(CONTEXT, tokens(3, seed=9), SINK),
        Prompt(CONTEXT.flip(0), QUERY, SINK),
        Prompt(CONTEXT, QUERY),
    ):
        with pytest.raises(InputError, match="folded for another"):
            verify_patch(model, patch, wrong)
    with pytest.raises(PatchMismatch):
        verify_patch(shared("mistral"), patch, PROMPT)


def test_suite_forces_the_history_and_folds_every_token():
    model = build("gemma3_text")
    before = bits(model)
    seen = []
    verdict = verify_prompts(model, [Prompt(CONTEXT), Prompt(tokens(9, seed=4))], tokens=4, progress=seen.append)
    assert verdict.to_json()["tokens"] == len(seen) == 8
    assert verdict.proven, verdict.sentence()
    assert bits(model) == before
    ids = CONTEXT
    for step in verdict.steps[:4]:  # greedy by transformers alone
        choice = int(model(ids[None]).logits[0, -1].argmax())
        assert step.in_context == choice
        ids = torch.cat([ids, torch.tensor([choice])])
    assert [len(step.controls) > 0 for step in verdict.steps] == [True, False, False, False] * 2


def test_the_paper_protocol_shows_the_model_one_token():
    folded = fold_token(shared("llama"), CONTEXT[:-1], CONTEXT[-1:], keep=())
    assert folded.split.reduced.ids.tolist() == [int(CONTEXT[-1])]
    assert folded.split.reduced.positions.tolist() == [10]


def test_nothing_to_verify():
    with pytest.raises(InputError, match="nothing to verify"):
        verify_prompts(shared("llama"), [])


def test_random_patch_has_the_same_norms():
    patch = fold_token(shared("gemma3_text"), CONTEXT, QUERY).patch
    other = random_like(patch)
    for site, edit in patch.edits.items():
        assert other.edits[site].size() == pytest.approx(edit.size(), rel=1e-6)
        drawn = other.edits[site]
        assert not torch.allclose(
            drawn.value if isinstance(drawn, ScaleEdit) else drawn.delta.A,
            edit.value if isinstance(edit, ScaleEdit) else edit.delta.A,
        )


def test_shuffling_moves_dropped_tokens_only():
    mixed = shuffled(CONTEXT, ((0, 1), (4, 6)))
    assert sorted(mixed.tolist()) == sorted(CONTEXT.tolist())
    assert not torch.equal(mixed, CONTEXT)
    for kept in (0, 4, 5):
        assert mixed[kept] == CONTEXT[kept]
    assert shuffled(torch.tensor([3, 7, 7, 7]), SINK) is None


def test_rounding_noise_is_small_there_and_gone_after():
    model = shared("llama", torch.float32)  # norms compute in float32 and would swallow the noise of float64
    tokens_ = Run(CONTEXT, torch.arange(11))
    quiet = run(model, tokens_)
    with rounding_noise(model):
        noisy = run(model, tokens_)
    assert 0 < float((noisy - quiet).abs().max()) < 1e-3
    assert torch.equal(run(model, tokens_), quiet)


def test_continuation_is_greedy_decoding():
    model = shared("llama")
    wanted = model.generate(CONTEXT[None], max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)[0, 11:]
    assert continuation(bind(model), Run(CONTEXT, torch.arange(11)), 5).tolist() == wanted.tolist()

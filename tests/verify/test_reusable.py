"""The verdict of a baked patch: right numbers, and able to say no."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import tiny
from contextfold.anatomy import Bound, bind
from contextfold.bake import Example, Frame, answered, bake
from contextfold.errors import InputError
from contextfold.runtime import Run, run
from contextfold.verify import Effect, Recovery, ReusableVerdict, Spoken, evaluate
from contextfold.verify.controls import OTHER, RANDOM, SHUFFLED
from contextfold.verify.reusable import answer_logits, compare_answers

FRAME = Frame(tiny.tokens(2, seed=3), tiny.tokens(9, seed=4))
OTHER_TOKENS = tiny.tokens(9, seed=9)
QUESTIONS = [tiny.tokens(4, seed=50 + i) for i in range(4)]


@pytest.fixture(scope="module")
def bound() -> Bound:
    return bind(tiny.build("llama"))


@pytest.fixture(scope="module")
def examples(bound: Bound) -> tuple[Example, ...]:
    return answered(bound, FRAME.full, QUESTIONS, tokens=3)


@pytest.fixture(scope="module")
def verdict(bound: Bound, examples: tuple[Example, ...]) -> ReusableVerdict:
    # Judged by what it was made from: these tests are about the numbers, not about how far a tiny model generalises.
    baked = bake(bound, FRAME, examples, lam0=1e-4)
    other = bake(bound, Frame(FRAME.kept, OTHER_TOKENS), examples, lam0=1e-4).patch
    bare = answered(bound, FRAME.kept, QUESTIONS, tokens=3, moves=False)
    return evaluate(
        bound, baked, FRAME, examples, controls={OTHER: other}, windows={OTHER: OTHER_TOKENS},
        elsewhere={"elsewhere": bare}, strengths=(0.0, 1.0),
        fewer={4: baked.patch, 1: lambda: bake(bound, FRAME, examples[:1], lam0=1e-4).patch},
    )  # fmt: skip


def test_the_unpatched_divergence_is_the_one_computed_by_hand(
    bound: Bound, examples: tuple[Example, ...], verdict: ReusableVerdict
) -> None:
    example = examples[2]
    logits = []
    for before in (FRAME.full, FRAME.kept):
        ids = torch.cat([before, example.tail])
        logits.append(run(bound.model, Run(ids, torch.arange(ids.numel())), last=ids.numel()))
    total = 0.0
    for k in range(3):
        p = torch.softmax(logits[0][FRAME.full.numel() + example.answer + k - 1], 0)
        q = torch.softmax(logits[1][FRAME.kept.numel() + example.answer + k - 1], 0)
        total += float((p * (p / q).log()).sum())
    assert verdict.unpatched.kl_nats[2] == pytest.approx(total / 3, rel=1e-9)
    assert total > 1e-3


def test_a_patch_is_told_from_its_controls(verdict: ReusableVerdict) -> None:
    assert verdict.patched.share > 0.9
    assert verdict.patched.low <= verdict.patched.share <= verdict.patched.high
    assert set(verdict.controls) == {OTHER, RANDOM}
    assert all(control.share < 0.5 for control in verdict.controls.values())
    assert verdict.same_answers == 1.0
    patch, context = verdict.elsewhere["elsewhere"]
    assert patch.mean > 0.01
    assert context.mean > 0.01


def test_a_scorer_of_ones_own_is_asked_about_every_answer(bound: Bound, examples: tuple[Example, ...]) -> None:
    patch = bake(bound, FRAME, examples, lam0=1e-4).patch
    bare = answered(bound, FRAME.kept, QUESTIONS, tokens=3)

    def first(spoken: Spoken, answer: Sequence[int]) -> float:
        assert spoken.question in {tuple(q.tolist()) for q in QUESTIONS}
        return float(answer[0])

    verdict = evaluate(bound, patch, FRAME, examples, scorer=first)
    means = {name: sum(float(e.tail[e.answer]) for e in rows) / 4 for name, rows in (("c", examples), ("b", bare))}
    assert verdict.scores["in_context"] == means["c"] != means["b"]
    assert verdict.scores["unpatched"] == means["b"]
    assert verdict.scores["patched"] == sum(s.patched[0] for s in verdict.spoken) / 4
    assert verdict.to_json()["scores"] == verdict.scores


def test_strengths_run_from_nothing_to_the_patch(verdict: ReusableVerdict) -> None:
    assert verdict.strengths[0.0] == pytest.approx(0.0, abs=1e-12)
    assert verdict.strengths[1.0] == pytest.approx(verdict.patched.share, abs=1e-12)


def test_fewer_questions_bring_less_back(verdict: ReusableVerdict) -> None:
    assert list(verdict.fewer) == [1, 4]
    assert verdict.fewer[4].share == verdict.patched.share > 1.2 * verdict.fewer[1].share


def test_json_is_what_the_object_says(verdict: ReusableVerdict) -> None:
    data = verdict.to_json()
    assert data["kl_recovered"] == 1 - data["kl_patched"] / data["kl_unpatched"]
    assert data["holds"] == (not verdict.reasons())
    assert len(data["sites"]) == 6
    assert data["calibration_tokens"] == 28
    assert f"{verdict.patched.share:.1%}" in data["verdict"]


def test_a_wrong_patch_is_no_stand_in(bound: Bound, examples: tuple[Example, ...]) -> None:
    patch = bake(bound, FRAME, examples, lam0=1e-4).patch
    turned = evaluate(bound, patch * -1.0, FRAME, examples)
    assert turned.patched.share < 0
    assert not turned.holds
    assert "recovers less than 80%" in turned.sentence()
    same = evaluate(bound, patch, FRAME, examples, controls={OTHER: patch, SHUFFLED: patch})
    assert [reason.split(" recovers")[0] for reason in same.reasons()] == [
        f"control {OTHER}", f"control {SHUFFLED}",
    ]  # fmt: skip


def test_a_control_may_bring_back_what_its_context_does_in_the_window(
    bound: Bound, examples: tuple[Example, ...], verdict: ReusableVerdict
) -> None:
    window = verdict.windows[OTHER]
    answers = [answer_logits(bound.model, FRAME.full, e) for e in examples]
    others = [answer_logits(bound.model, torch.cat([FRAME.kept, OTHER_TOKENS]), e) for e in examples]
    by_hand = Effect.of([compare_answers(p, q) for p, q in zip(answers, others, strict=True)])
    assert window == Recovery.of(by_hand, verdict.unpatched)
    assert verdict.to_json()["controls"][OTHER]["in_window"] == window.to_json()
    assert verdict.to_json()["controls"][RANDOM]["in_window"] is None

    def told(control: float, high: float, low: float = 0.9) -> list[str]:
        def share(value: float, low: float, high: float) -> Recovery:
            return replace(window, share=value, low=low, high=high)

        windows = {OTHER: share(high - 0.1, high - 0.2, high)}
        shares = {"controls": {OTHER: share(control, control, control)}, "patched": share(0.95, low, 0.97)}
        return replace(verdict, windows=windows, **shares).reasons()

    assert told(0.3, high=0.4) == []
    assert told(0.19, high=0.1) == []
    assert told(0.3, high=0.1) == [f"control {OTHER} recovers 30%"]
    assert told(0.45, high=0.4) == [f"control {OTHER} recovers 45%"]
    assert told(0.92, high=0.99) == [f"control {OTHER} recovers 92%"]


def test_nothing_to_judge_by_is_refused(bound: Bound, examples: tuple[Example, ...]) -> None:
    patch = bake(bound, FRAME, examples, lam0=1e-4).patch
    with pytest.raises(InputError, match="no held-out questions"):
        evaluate(bound, patch, FRAME, ())

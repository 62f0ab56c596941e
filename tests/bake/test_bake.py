"""Baking on tiny models. The oracle is the model with the context in its window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from contextfold.anatomy import Bound, bind
from contextfold.bake import ESTIMATORS, Baked, Example, Frame, answered, bake, places
from contextfold.bake import examples as answering
from contextfold.bake import solve as solving
from contextfold.bake.joint import Joint
from contextfold.errors import InputError
from contextfold.runtime import Run, materialised, run
from contextfold.store import clear

FRAME = Frame(tiny.tokens(2, seed=3), tiny.tokens(9, seed=4))
STEPS: dict[str, Any] = {"lam0": 1e-4, "batch": 5}


def questions(count: int, seed: int) -> list[Tensor]:
    return [tiny.tokens(3 + i % 4, seed=seed + i) for i in range(count)]


def answers(bound: Bound, examples: tuple[Example, ...], before: Tensor) -> list[Tensor]:
    """Logits of the model as it is now, over the answers."""
    tails = [(torch.cat([before, e.tail]), e.tail.numel() - e.answer + 1) for e in examples]
    return [run(bound.model, _run(ids), last=n) for ids, n in tails]


def gap(wanted: list[Tensor], given: list[Tensor]) -> float:
    """Mean squared difference of the logits."""
    return sum(float((p - q).square().mean()) for p, q in zip(wanted, given, strict=True)) / len(wanted)


def _run(ids: Tensor) -> Run:
    return Run(ids, torch.arange(ids.numel()))


@pytest.fixture(params=["llama", "gemma3_text", "mistral"])
def bound(request: pytest.FixtureRequest) -> Bound:
    return bind(tiny.build(request.param))


@pytest.mark.parametrize("method", [e.name for e in ESTIMATORS])
def test_known_questions_are_answered_as_with_the_context(bound: Bound, method: str) -> None:
    # Fewer tokens than inputs of any map, so that every map can meet them all.
    examples = answered(bound, FRAME.full, questions(4, 50), tokens=3)
    assert sum(e.tail.numel() for e in examples) < 32
    wanted = answers(bound, examples, FRAME.full)
    before = gap(wanted, answers(bound, examples, FRAME.kept))
    baked = bake(bound, FRAME, examples, method=method, **STEPS)
    with materialised(bound, baked.patch):
        after = gap(wanted, answers(bound, examples, FRAME.kept))
    # Behind a norm the length of a branch is given.
    limit = 0.7 if bound.model_type == "gemma3_text" else 0.1
    assert before > 1e-3
    assert after < limit * before
    with materialised(bound, baked.patch * -1.0):
        assert gap(wanted, answers(bound, examples, FRAME.kept)) > before


def test_an_estimator_solves_its_places(bound: Bound) -> None:
    examples = answered(bound, FRAME.full, questions(3, 50), tokens=2)
    for method, roles in (
        ("two-sites", ["attention output map", "output map"]),
        ("matrix", ["input maps", "output map"]),
        ("all", ["attention output map", "input maps", "output map"]),
    ):
        baked = bake(bound, FRAME, examples, method=method)
        assert [site.role for site in baked.sites] == roles * len(bound.blocks)
        assert places(bound, method) == len(baked.sites)


def test_kept_tokens_do_not_move() -> None:
    bound = bind(tiny.build("llama"))
    examples = answered(bound, FRAME.full, questions(12, 50), tokens=4)
    patch = bake(bound, FRAME, examples, **STEPS).patch
    bare = run(bound.model, _run(FRAME.kept), last=2)
    with materialised(bound, patch):
        assert (run(bound.model, _run(FRAME.kept), last=2) - bare).abs().max() < 1e-5 * bare.abs().max()
        moved = torch.cat([FRAME.kept, examples[0].tail])
        with_tail = run(bound.model, _run(moved))
    assert (with_tail - run(bound.model, _run(moved))).abs().max() > 1e-3 * bare.abs().max()


def test_anchors_hold_other_questions_in_place() -> None:
    bound = bind(tiny.build("llama"))
    examples = answered(bound, FRAME.full, questions(8, 50), tokens=4)
    anchors = answered(bound, FRAME.kept, questions(8, 90), tokens=4, moves=False)

    def drift(baked: Baked) -> float:
        inputs = [_run(torch.cat([FRAME.kept, a.tail])) for a in anchors]
        bare = [run(bound.model, tokens, last=4) for tokens in inputs]
        with materialised(bound, baked.patch):
            return sum(
                float((run(bound.model, tokens, last=4) - b).square().mean())
                for tokens, b in zip(inputs, bare, strict=True)
            )

    free, held = bake(bound, FRAME, examples, **STEPS), bake(bound, FRAME, (*examples, *anchors), **STEPS)
    assert drift(held) < 0.3 * drift(free)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_emphasis_brings_answers_nearer_and_leaves_questions_further(name: str) -> None:
    bound = bind(tiny.build(name))
    # More tokens than inputs, so that not all can be met.
    examples = answered(bound, FRAME.full, questions(30, 50), tokens=4)

    def missed(emphasis: float) -> tuple[float, float]:
        """Of the logits, where answers are said and where questions are read; token by token, without padding."""
        patch = bake(bound, FRAME, examples, lam0=1e-3, emphasis=emphasis).patch
        found = [0.0, 0.0]
        for e in examples:
            n = e.tail.numel()
            wanted = run(bound.model, _run(torch.cat([FRAME.full, e.tail])), last=n)
            with materialised(bound, patch):
                given = run(bound.model, _run(torch.cat([FRAME.kept, e.tail])), last=n)
            squares = (wanted - given).square().mean(-1)
            found[0] += float(squares[e.answer - 1 :].sum())
            found[1] += float(squares[: e.answer - 1].sum())
        return found[0], found[1]

    low, even, high = (missed(emphasis) for emphasis in (0.01, 1.0, 100.0))
    assert low[0] > 1.1 * even[0] > 1.1**2 * high[0]
    assert high[1] > 1.1 * even[1]


def test_batches_do_not_change_the_answer_or_the_patch(bound: Bound) -> None:
    asked = questions(7, 50)
    together = answered(bound, FRAME.full, asked, tokens=4)
    for i, question in enumerate(asked):
        alone = answered(bound, FRAME.full, [question], tokens=4)[0]
        assert alone.tail.tolist() == together[i].tail.tolist()
        assert alone.answer == question.numel()
    one, many = (bake(bound, FRAME, together, lam0=1e-2, batch=size).patch for size in (1, 7))
    for site, edit in one.edits.items():
        first, second = (e.delta.to_dense() if hasattr(e, "delta") else e.value for e in (edit, many.edits[site]))
        assert (first - second).norm() < 1e-4 * first.norm(), site.name


@pytest.mark.parametrize("window", [15, 20, 21, 22, 40])
def test_questions_share_a_batch_as_long_as_windows_see_all_of_it(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, model, extra = tiny.TYPES["gemma3_text"]
    monkeypatch.setitem(tiny.TYPES, "gemma3_text", (config, model, {**extra, "sliding_window": window}))
    bound = bind(tiny.build("gemma3_text"))
    asked = questions(7, 50)
    longest = FRAME.full.numel() + max(question.numel() for question in asked) + 4
    batches = []
    batch = answering._batch
    monkeypatch.setattr(answering, "_batch", lambda *a: batches.append(len(a[1])) or batch(*a))
    together = answered(bound, FRAME.full, asked, tokens=4)
    assert longest == 21
    assert (batches == [7]) == (window > longest)
    for question, example in zip(asked, together, strict=True):
        ids = torch.cat([FRAME.full, question])
        for _ in range(4):  # without any cache
            ids = torch.cat([ids, run(bound.model, _run(ids)).argmax(-1).view(1)])
        assert example.tail.tolist() == ids[FRAME.full.numel() :].tolist()


def test_answers_end_with_a_stop_token() -> None:
    bound = bind(tiny.build("llama"))
    free = answered(bound, FRAME.full, questions(3, 50), tokens=5)
    end = int(free[0].tail[free[0].answer + 1])
    short = answered(bound, FRAME.full, questions(3, 50), tokens=5, stop=(end,))
    first = short[0].tail[short[0].answer :].tolist()
    assert first == free[0].tail[free[0].answer :][: first.index(end) + 1].tolist()
    sampled = [answered(bound, FRAME.full, questions(3, 50), tokens=5, temperature=1.0, seed=s) for s in (0, 0, 1)]
    tails = [[e.tail.tolist() for e in found] for found in sampled]
    assert tails[0] == tails[1] != tails[2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_that_are_kept_are_not_given_again(temperature: float, tmp_path: Path) -> None:
    bound = bind(tiny.build("llama"))
    calls: list[object] = []
    bound.model.register_forward_hook(lambda *_: calls.append(None))
    how: dict[str, Any] = {"tokens": 4, "temperature": temperature, "seed": 3}

    def tails(asked: list[Tensor], before: Tensor = FRAME.full, **more: Any) -> list[list[int]]:
        calls.clear()
        return [e.tail.tolist() for e in answered(bound, before, asked, store=tmp_path, **{**how, **more})]

    asked = questions(20, 50)
    plain = [e.tail.tolist() for e in answered(bound, FRAME.full, asked, **how)]
    assert [e.tail.tolist() for e in answered(bound, FRAME.full, asked[:3], **how)] == plain[:3]
    first = tails(asked[:12])
    assert first == plain[:12]
    assert tails(asked[:12]) == first
    assert not calls
    assert tails(asked) == plain
    assert calls
    assert len(list(tmp_path.iterdir())) == 2
    # Asked in another way, or after something else, or by another model.
    assert tails(asked, tokens=3) == [tail[:-1] for tail in plain]
    assert tails(asked, before=FRAME.kept) != plain
    bound = bind(tiny.build("llama", seed=1))
    assert tails(asked) != plain


def test_answers_of_a_stopped_command_fall_into_the_same_batches(tmp_path: Path) -> None:
    bound = bind(tiny.build("llama"))
    asked = questions(40, 50)
    sizes: list[int] = []

    def stop(count: int) -> None:
        sizes.append(count)
        if len(sizes) == 2:  # none was known, then the first batch
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answered(bound, FRAME.full, asked, tokens=3, store=tmp_path, progress=stop)
    answered(bound, FRAME.full, asked, tokens=3, store=tmp_path, progress=sizes.append)
    assert sizes == [0, 16, 16, 16, 8]
    names = sorted(path.name for path in tmp_path.iterdir())
    clear(tmp_path)
    answered(bound, FRAME.full, asked, tokens=3, store=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.fixture
def solves(monkeypatch: pytest.MonkeyPatch) -> list[Joint]:
    """The places that were solved, and not taken from work that was kept."""
    found: list[Joint] = []
    solve = solving._solve

    def counted(joint: Joint, *arguments: Any) -> Any:
        found.append(joint)
        return solve(joint, *arguments)

    monkeypatch.setattr(solving, "_solve", counted)
    return found


@pytest.mark.parametrize("lam0", [1e-2, None])
def test_a_stopped_bake_goes_on_with_the_same_bits(tmp_path: Path, lam0: float | None, solves: list[Joint]) -> None:
    bound = bind(tiny.build("llama"))
    before = bound.fingerprint
    examples = answered(bound, FRAME.full, questions(6, 50), tokens=4)
    asked = {**STEPS, "lam0": lam0}
    whole = bake(bound, FRAME, examples, **asked)

    class Stop(Exception):
        pass

    def stop(done: int, of: int) -> None:
        if done == 3:
            raise Stop

    with pytest.raises(Stop):
        bake(bound, FRAME, examples, store=tmp_path / "work", progress=stop, **asked)
    assert len(list((tmp_path / "work").iterdir())) == 3
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in bound.model.modules())
    seen: list[int] = []
    solves.clear()
    again = bake(bound, FRAME, examples, store=tmp_path / "work", progress=lambda done, _: seen.append(done), **asked)
    assert len(solves) == 3
    assert seen == [1, 2, 3, 4, 5, 6]
    clear(tmp_path / "work")
    assert not (tmp_path / "work").exists()
    assert [s.lam0 for s in again.sites] == [s.lam0 for s in whole.sites]
    for site, edit in whole.patch.edits.items():
        other = again.patch.edits[site]
        assert torch.equal(edit.delta.B, other.delta.B)
        assert torch.equal(edit.delta.A, other.delta.A)
    assert bound.fingerprint == before


def test_work_of_another_bake_is_not_used(tmp_path: Path, solves: list[Joint]) -> None:
    bound = bind(tiny.build("llama"))
    examples = answered(bound, FRAME.full, questions(6, 50), tokens=4)
    with pytest.raises(KeyboardInterrupt):
        bake(bound, FRAME, examples, store=tmp_path, progress=_interrupt, **STEPS)
    solves.clear()
    bake(bound, FRAME, examples[:5], store=tmp_path, **STEPS)
    assert len(solves) == 6


def test_work_that_another_process_clears_in_the_end_is_done_again(tmp_path: Path, solves: list[Joint]) -> None:
    bound = bind(tiny.build("gemma3_text"))
    examples = answered(bound, FRAME.full, questions(6, 50), tokens=4)
    whole = bake(bound, FRAME, examples, **STEPS).patch
    count = len(solves)
    solves.clear()

    def lose(done: int, of: int) -> None:
        if done == of and len(solves) == of:
            min(tmp_path.iterdir()).unlink()

    again = bake(bound, FRAME, examples, store=tmp_path, progress=lose, **STEPS).patch
    assert len(solves) == 2 * count
    assert list(again.edits) == list(whole.edits)
    for site, edit in whole.edits.items():
        assert edit.size() == again.edits[site].size() > 0


def test_edits_that_have_acted_are_not_held(tmp_path: Path, solves: list[Joint]) -> None:
    bound = bind(tiny.build("llama"))
    examples = answered(bound, FRAME.full, questions(6, 50), tokens=4)
    held: list[int] = []

    def count(*_: int) -> None:
        held.append(sum(joint.delta is not None for joint in solves))

    bake(bound, FRAME, examples, store=tmp_path, progress=count, **STEPS)
    bake(bound, FRAME, examples, progress=count, **STEPS)
    assert held == [1] * 6 + [7, 8, 9, 10, 11, 12]


def _interrupt(done: int, of: int) -> None:
    if done == 2:
        raise KeyboardInterrupt


def test_left_out_questions_can_choose_the_penalty() -> None:
    bound = bind(tiny.build("llama"))
    examples = answered(bound, FRAME.full, questions(12, 50), tokens=4)
    sites = bake(bound, FRAME, examples, lam0=None).sites
    assert sites[0].left_out_error == sites[0].left_out_error
    assert {s.lam0 for s in sites} <= {1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "magic"}, "estimator 'magic' is unknown"),
        ({"lam0": 0.0}, "it must be positive"),
        ({"tol": 1.0}, "tol is 1.0"),
        ({"emphasis": 0.0}, "emphasis is 0.0; it must be positive"),
        ({"emphasis": float("nan")}, "emphasis is nan"),
        ({"examples": ()}, "no example on which the context acts"),
        ({"examples": (Example(torch.tensor([500]), 0),)}, "outside 0..100"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], message: str) -> None:
    bound = bind(tiny.shared("llama"))
    examples = change.pop("examples", (Example(torch.tensor([5, 6]), 1),))
    with pytest.raises(InputError, match=message):
        bake(bound, FRAME, examples, **change)
    with pytest.raises(InputError, match="keep the first token"):
        Frame(torch.empty(0, dtype=torch.int64), torch.tensor([1]))

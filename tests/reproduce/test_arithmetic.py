"""Tasks baked into weights. Oracle: the model run token by token, by hand, with the task's prompt and without it."""

from __future__ import annotations

import json

import pytest
import torch

import tiny
from contextfold import models, prompts
from contextfold.anatomy import bind
from contextfold.bake import Frame, answered, bake
from contextfold.models import Loaded
from contextfold.reproduce import Bench, arithmetic
from contextfold.reproduce.arithmetic import SHOTS, TASKS, TOKENS, Task, items, measure_task, prompt_of
from contextfold.runtime import materialised

POOL, LEARN, JUDGE = 12, 4, 4


def nothing() -> None:
    pass


def say(model, tokenizer, text: str) -> str:
    """The line that the model says after `text`, greedily, one plain call per token."""
    ids = [tokenizer.convert_tokens_to_ids("<bos>"), *tokenizer(text, add_special_tokens=False)["input_ids"]]
    said = []
    for _ in range(TOKENS):
        said.append(int(model(input_ids=torch.tensor([ids + said])).logits[0, -1].argmax()))
        if tokenizer.decode(said[-1:]) == "\n":
            break
    return tokenizer.decode(said, skip_special_tokens=True).strip().split("\n")[0].strip()


@pytest.fixture
def made_up(monkeypatch):
    """A tiny model, and a task whose right answer is what it says when it has the prompt."""
    model, tokenizer = tiny.build("llama", torch.float32), tiny.letters()
    tokenizer.add_bos_token = True
    instruction = "Do it."

    def line(numbers) -> str:
        return " ".join(map(str, numbers)) + " ="

    task = Task(instruction, lambda numbers: say(model, tokenizer, f"{instruction}\n{line(numbers)}"))
    monkeypatch.setitem(arithmetic.TASKS, "made up", task)
    monkeypatch.setitem(arithmetic.TASKS, "another", Task("Or that", lambda numbers: 0))
    return model, tokenizer, line, task


def test_items_are_different_and_prompts_say_what_the_task_is():
    shots, asked = items(60)
    assert len(shots) == SHOTS
    assert len(asked) == len({*asked}) == 60
    assert not {*shots} & {*asked}
    assert items(60) == (shots, asked)
    assert [TASKS[name].answer((2, 3, 4)) for name in ("multiply", "sum", "last", "first")] == [24, 9, 4, 2]
    assert prompt_of(TASKS["sum"], False, shots) == "Sum numbers.\n"
    assert prompt_of(TASKS["sum"], True, [(2, 3, 4), (1, 1, 1)]) == "2 3 4 = 9\n1 1 1 = 3\n"


def test_the_filter_and_the_scores_are_those_of_plain_runs(made_up):
    model, tokenizer, line, task = made_up
    bench = Bench("tiny", lambda dtype: Loaded(model, tokenizer, "tiny"))
    advanced: list[int] = []
    found = measure_task(
        bench, lambda: advanced.append(1), dtype=torch.float32, task="made up", shown=False, pool=POOL, learn=LEARN,
        judge=JUDGE, ways=("output",), other="another",
    )  # fmt: skip
    _, asked = items(POOL)
    bare = [say(model, tokenizer, line(numbers)) == str(task.answer(numbers)) for numbers in asked]
    assert found["prompted"] == POOL
    assert found["unprompted"] == sum(bare)
    assert found["left"] == POOL - sum(bare) >= LEARN + JUDGE
    assert found["judged"] == JUDGE
    assert len(advanced) == 4
    assert 0 <= found["controls"]["random"] <= JUDGE
    assert set(found["controls"]) == {"random", "other_task"}
    # Under the same patch, written by hand, plain runs are right as often.
    left = [k for k in range(POOL) if not bare[k]]
    bound, before = bind(model), prompts.encode(tokenizer, "Do it.\n", line(asked[0])).context
    tails = [prompts.encode(tokenizer, "Do it.\n", line(asked[k])).query for k in left[:LEARN]]
    ends = tokenizer("\n", add_special_tokens=False)["input_ids"]
    examples = answered(bound, before, tails, tokens=TOKENS, stop=ends)
    patch = bake(bound, Frame(before[:1], before[1:]), examples, method="output", emphasis=1.0)
    right = [str(task.answer(asked[k])) for k in left[-JUDGE:]]
    with materialised(bound, patch.patch):
        said = [say(model, tokenizer, line(asked[k])) for k in left[-JUDGE:]]
    assert found["ways"]["output"] == sum(a == b for a, b in zip(said, right, strict=True))


def test_too_few_items_are_not_baked(made_up):
    model, tokenizer, _, _ = made_up
    bench = Bench("tiny", lambda dtype: Loaded(model, tokenizer, "tiny"))
    found = measure_task(
        bench, nothing, dtype=torch.float32, task="multiply", shown=True, pool=3, learn=2, judge=2, ways=("output",),
        other=None,
    )  # fmt: skip
    assert found["left"] < 4
    assert (found["judged"], found["ways"], found["controls"]) == (0, {}, {})


def test_the_command_says_what_the_model_cannot_do(call, folder, tmp_path):
    code, printed, _ = call(
        "reproduce", "2510.08734", "--model", folder, "--quick", "--work", tmp_path / "w", "--json"
    )  # fmt: skip
    assert code == 0
    found = json.loads(printed)
    rows = {(row["section"], row["figure"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"]) == 6
    for row in rows.values():
        assert row["ours"] is None
        assert row["difference"] is None
        assert "too few" in row["note"]
    assert sorted({row["published"] for row in rows.values()}, key=str) == [100.0, None]


@pytest.mark.real
def test_a_task_that_gemma_can_do_is_baked_from_a_few_examples():
    loaded = models.load("gemma3-270m")
    found = measure_task(
        Bench("gemma3-270m", lambda dtype: loaded), nothing, dtype=torch.float32, task="last", shown=True, pool=16,
        learn=8, judge=6, ways=("output",), other=None,
    )  # fmt: skip
    assert found["prompted"] >= 14
    assert found["unprompted"] <= 1
    assert found["ways"]["output"] >= 5
    assert found["controls"]["random"] <= 1

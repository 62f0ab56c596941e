"""A task on three one-digit numbers, given by an instruction or by examples, baked into the weights.

Source: arXiv 2510.08734, table 1: items are filtered to those that are right with the prompt and wrong without it, a
patch is learnt from ten of them and tested on twenty others, without the prompt.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from contextfold import prompts
from contextfold.anatomy import Bound
from contextfold.bake import Example, Frame, answered, bake
from contextfold.patch import Patch
from contextfold.reproduce.engine import Bench
from contextfold.runtime import materialised
from contextfold.verify import random_like

__all__ = ["TASKS", "Task", "measure_task"]

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """A function of three numbers, and the instruction that names it."""

    instruction: str
    answer: Callable[[Numbers], int]


TASKS = {
    "multiply": Task("Multiply numbers.", math.prod),
    "sum": Task("Sum numbers.", sum),
    "last": Task("Last number.", lambda numbers: numbers[-1]),
    "first": Task("First number.", lambda numbers: numbers[0]),
}
"""The paper's two, and two that a small model can do when it sees examples."""

SHOTS = 8
"""Examples of a prompt that shows a task instead of naming it."""

TOKENS = 4
"""Of an answer, at most; it ends with its line."""


def items(count: int) -> tuple[list[Numbers], list[Numbers]]:
    """`SHOTS` triples of digits from 1 to 9 for a prompt, and `count` others to be asked; all different."""
    every: list[Numbers] = [(a, b, c) for a in range(1, 10) for b in range(1, 10) for c in range(1, 10)]
    drawn = random.Random(3).sample(every, SHOTS + count)
    return drawn[:SHOTS], drawn[SHOTS:]


def _line(numbers: Numbers) -> str:
    return " ".join(map(str, numbers)) + " ="


@dataclass(frozen=True, eq=False)
class _Asked:
    """All items, tokenised behind one prompt."""

    bound: Bound
    tokenizer: Any
    frame: Frame
    tails: tuple[Tensor, ...]
    right: tuple[str, ...]

    @classmethod
    def of(cls, bound: Bound, tokenizer: Any, prompt: str, asked: Sequence[Numbers], task: Task) -> _Asked:
        spans = [prompts.encode(tokenizer, prompt, _line(numbers)) for numbers in asked]
        context, kept = spans[0].context, spans[0].sink[1]
        right = tuple(str(task.answer(numbers)) for numbers in asked)
        return cls(bound, tokenizer, Frame(context[:kept], context[kept:]), tuple(s.query for s in spans), right)

    def answers(self, before: Tensor, chosen: Sequence[int]) -> tuple[Example, ...]:
        ends = self.tokenizer("\n", add_special_tokens=False)["input_ids"]
        return answered(self.bound, before, [self.tails[i] for i in chosen], tokens=TOKENS, stop=ends)

    def score(self, found: Sequence[Example], chosen: Sequence[int]) -> list[bool]:
        """Whether the line that was said is the number, and nothing else."""
        said = [self.tokenizer.decode(e.tail[e.answer :], skip_special_tokens=True) for e in found]
        return [text.strip().split("\n")[0].strip() == self.right[i] for text, i in zip(said, chosen, strict=True)]

    def patched(self, patch: Patch, chosen: Sequence[int]) -> list[bool]:
        with materialised(self.bound, patch):
            return self.score(self.answers(self.frame.kept, chosen), chosen)


def prompt_of(task: Task, shown: bool, shots: Sequence[Numbers]) -> str:
    """The instruction, or the examples."""
    if not shown:
        return task.instruction + "\n"
    return "".join(f"{_line(numbers)} {task.answer(numbers)}\n" for numbers in shots)


@torch.no_grad()
def measure_task(
    bench: Bench, advance: Callable[[], None], *, dtype: torch.dtype, task: str, shown: bool, pool: int, learn: int,
    judge: int, ways: Sequence[str], other: str | None,
) -> dict[str, Any]:  # fmt: skip
    """Right answers with the prompt, without it, and without it under a patch, by estimator of `contextfold.bake`.

    `pool` items are asked; of those that the filter leaves, `learn` are learnt from and `judge` others judged by. With
    fewer nothing is baked. `other` names a task whose patch is a control, right by chance where the two `agree`; a
    random patch of equal norm is another.
    """
    bound, tokenizer, kind = bench.bound(dtype), bench.tokenizer(dtype), TASKS[task]
    shots, asked = items(pool)
    job = _Asked.of(bound, tokenizer, prompt_of(kind, shown, shots), asked, kind)
    everything = range(pool)
    said = job.answers(job.frame.full, everything)
    advance()
    prompted = job.score(said, everything)
    unprompted = job.score(job.answers(job.frame.kept, everything), everything)
    advance()
    left = [i for i in everything if prompted[i] and not unprompted[i]]
    found: dict[str, Any] = {
        "prompt": prompt_of(kind, shown, shots), "asked": pool, "prompted": sum(prompted),
        "unprompted": sum(unprompted), "left": len(left), "judged": 0, "agree": 0, "ways": {}, "controls": {},
    }  # fmt: skip
    if len(left) < learn + judge:
        return found
    learnt, judged = left[:learn], left[-judge:]
    examples = [said[i] for i in learnt]
    patches: dict[str, Patch] = {}
    learn_by = partial(bake, bound, emphasis=1.0)  # all tokens alike, as in the papers
    for way in ways:
        patches[way] = learn_by(job.frame, examples, method=way).patch
        found["ways"][way] = sum(job.patched(patches[way], judged))
        advance()
    found["judged"] = judge
    found["controls"]["random"] = sum(job.patched(random_like(patches[ways[0]]), judged))
    if other is not None:
        foreign = _Asked.of(bound, tokenizer, prompt_of(TASKS[other], shown, shots), asked, TASKS[other])
        patch = learn_by(foreign.frame, foreign.answers(foreign.frame.full, learnt), method=ways[0]).patch
        found["controls"]["other_task"] = sum(job.patched(patch, judged))
        found["agree"] = sum(job.right[i] == foreign.right[i] for i in judged)
    advance()
    return found

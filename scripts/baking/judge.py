"""How far a model is from another on the answers to some questions, and what a call takes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bench import clock
from torch import Tensor

from contextfold.anatomy import Bound
from contextfold.bake import Example, Frame
from contextfold.ceiling import peak_memory, reset_peak, used_memory
from contextfold.room import give_back_freed_memory
from contextfold.verify import Effect
from contextfold.verify.reusable import answer_logits, compare_answers

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Judge:
    """Questions with what a reference says on them. The context moves the answers, or is to leave them alone."""

    bound: Bound
    frame: Frame
    examples: Sequence[Example]
    wanted: Sequence[Tensor]
    """`(a, V)` each."""

    @classmethod
    def of(cls, bound: Bound, frame: Frame, examples: Sequence[Example]) -> Judge:
        """The reference is the model as it is now, with the context where the context is to act."""
        wanted = [answer_logits(bound.model, frame.full if e.moves else frame.kept, e) for e in examples]
        return cls(bound, frame, examples, wanted)

    def __call__(self, before: Tensor | None = None) -> Effect:
        """The model as it is now, with nothing but the kept tokens (or `before`) in front of the questions."""
        start = self.frame.kept if before is None else before
        given = (answer_logits(self.bound.model, start, example) for example in self.examples)
        return Effect.of([compare_answers(p, q) for p, q in zip(self.wanted, given, strict=True)])


@dataclass(frozen=True)
class Cost:
    """Of one call: seconds, and bytes at the peak beyond what was there before."""

    seconds: float
    bytes: int


def measured(call: Callable[[], T]) -> tuple[T, Cost]:
    """The call's result and what it took."""
    gc.collect()
    give_back_freed_memory()  # what is free but still held would hide what the call needs
    reset_peak()
    before, started = used_memory(), clock()
    result = call()
    return result, Cost(clock() - started, max(peak_memory() - before, 0))

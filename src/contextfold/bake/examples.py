"""What a bake learns from: a context, and questions with the answers that the model gives when it has the context."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from contextfold.anatomy import Bound
from contextfold.bake.prefix import Prefix, padded
from contextfold.bake.remembered import Remembered
from contextfold.errors import InputError

__all__ = ["Example", "Frame", "answered", "digest_of"]


@dataclass(frozen=True, eq=False)
class Frame:
    """What stands before every question: `kept (k,)` token ids that stay, then `context (c,)` that is to go.

    The kept tokens hold the sink, the first token of the sequence, on which attention rests whatever it is. No edit
    of a map acts on them.
    """

    kept: Tensor
    context: Tensor

    def __post_init__(self) -> None:
        if self.kept.numel() == 0 or self.context.numel() == 0:
            raise InputError(
                f"{self.kept.numel()} kept and {self.context.numel()} context tokens; keep the first token, on which "
                "attention rests, and give a context of at least one"
            )

    @property
    def full(self) -> Tensor:
        """`(k + c,)`: what the in-context model sees before a question."""
        return torch.cat([self.kept, self.context])


@dataclass(frozen=True, eq=False)
class Example:
    """A question and its answer, as they follow the context or stand without it."""

    tail: Tensor
    """`(n,)` token ids."""
    answer: int
    """Index in the tail at which the answer begins. What the model says about `answer - 1` and on is compared."""
    moves: bool = True
    """Whether the context is to act here. False is an anchor: the patched model must do what the bare one does."""

    @property
    def question(self) -> Tensor:
        return self.tail[: self.answer]


BATCH = 16
"""Questions that are answered together."""


def answered(
    bound: Bound,
    before: Tensor,
    questions: Sequence[Tensor],
    *,
    tokens: int = 32,
    stop: Iterable[int] = (),
    moves: bool = True,
    temperature: float = 0.0,
    seed: int = 0,
    store: Path | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[Example, ...]:
    """What the model with `before (p,)` in front of it answers to each question `(q,)`; greedy at temperature 0.

    An answer ends with a token of `stop`, or after `tokens` of them. `store` is a folder in which answers are kept:
    what this model was asked there before, in the same way, is not generated again. `progress` is told how many more
    are done.

    Raises `InputError` for empty questions or sequences longer than the model's position table, and `NotWritten`
    where answers cannot be kept.
    """
    _check(bound, before, questions, tokens)
    ends = frozenset(stop)
    known = None if store is None else Remembered(store, bound, before, tokens, sorted(ends), temperature, seed)
    answers: dict[int, Tensor] = {} if known is None else known.answers(questions)
    progress(len(answers))
    left = {i: question.numel() for i, question in enumerate(questions) if i not in answers}
    if left:
        prefix = Prefix.of(bound.model, before)
        for chosen in _batches(prefix, left, tokens):
            part = [questions[i] for i in chosen]
            found = _batch(prefix, part, tokens, ends, _Choice(temperature, [(seed, i) for i in chosen]))
            answers |= dict(zip(chosen, found, strict=True))
            if known is not None:
                known.keep(part, found)
            progress(len(chosen))
    return tuple(Example(torch.cat([q, answers[i]]), q.numel(), moves) for i, q in enumerate(questions))


def _batches(prefix: Prefix, lengths: Mapping[int, int], tokens: int) -> list[list[int]]:
    """Numbers of questions that are answered together: of similar length, or of one length where windows slide.

    In the order in which they are asked, so that what is left of work that was stopped falls into the same batches.
    """
    size = BATCH if prefix.shared else 1
    slides = prefix.slides(prefix.ids.numel() + max(lengths.values()) + tokens)
    batches: list[list[int]] = []
    for i in sorted(lengths, key=lengths.__getitem__):
        last = batches[-1] if batches else []
        if not last or len(last) == size or (slides and lengths[last[0]] != lengths[i]):
            batches.append([i])
        else:
            last.append(i)
    return batches


def _check(bound: Bound, before: Tensor, questions: Sequence[Tensor], tokens: int) -> None:
    if not questions or min(question.numel() for question in questions) == 0:
        raise InputError("there are no questions, or one is empty; give at least one token for each")
    total = before.numel() + max(question.numel() for question in questions) + tokens
    if bound.max_positions is not None and total > bound.max_positions:
        raise InputError(
            f"{total} tokens, but the model has {bound.max_positions} positions; shorten the context or the answers"
        )


class _Choice:
    """The next token of each row: the first one, or a sample; whose company a question is in changes nothing.

    A row draws from a generator of its own, whose seed follows from the row's of `seeds`.
    """

    def __init__(self, temperature: float, seeds: Sequence[tuple[int, int]]) -> None:
        self._temperature = temperature
        digests = (hashlib.sha256(repr(seed).encode()).digest() for seed in seeds)
        self._generators = [torch.Generator().manual_seed(int.from_bytes(d[:8], "big") >> 1) for d in digests]

    def __call__(self, logits: Tensor) -> Tensor:
        """`(B, V) -> (B,)`."""
        if self._temperature == 0:
            return logits.argmax(-1).cpu()
        weights = torch.softmax(logits.cpu().float() / self._temperature, -1)
        rows = zip(weights, self._generators, strict=True)
        return torch.cat([torch.multinomial(row, 1, generator=own) for row, own in rows])


def _batch(prefix: Prefix, questions: list[Tensor], tokens: int, stop: frozenset[int], choose: _Choice) -> list[Tensor]:
    """Answers of one batch, each `(a,)`."""
    session = prefix.session(len(questions))
    choice = choose(session.extend(*padded(questions)))
    answers: list[list[int]] = [[] for _ in questions]
    going = [True] * len(questions)
    for step in range(tokens):
        for row, token in enumerate(choice.tolist()):
            if going[row]:
                answers[row].append(token)
                going[row] = token not in stop
        if not any(going) or step == tokens - 1:
            break
        choice = choose(session.extend(choice[:, None], torch.ones(len(questions), 1, dtype=torch.bool)))
    return [torch.tensor(answer, dtype=torch.int64) for answer in answers]


def digest_of(frame: Frame, examples: Sequence[Example]) -> str:
    """SHA-256 over the token ids of everything that a bake is made from."""
    whole = hashlib.sha256()
    for part in (frame.kept, frame.context, *(e.tail for e in examples)):
        whole.update(part.to(torch.int64).contiguous().numpy().tobytes() + b"|")
    whole.update(repr([(e.answer, e.moves) for e in examples]).encode())
    return whole.hexdigest()

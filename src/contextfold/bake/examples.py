"""What a bake learns from: a context, and questions with the answers that the model gives when it has the context."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contextfold.anatomy import Bound
from contextfold.bake.prefix import Prefix, padded
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
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[Example, ...]:
    """What the model with `before (p,)` in front of it answers to each question `(q,)`; greedy at temperature 0.

    An answer ends with a token of `stop`, or after `tokens` of them. `progress` is told how many more are done.

    Raises `InputError` for empty questions or sequences longer than the model's position table.
    """
    _check(bound, before, questions, tokens)
    prefix = Prefix.of(bound.model, before)
    choose = _Choice(temperature, seed)
    found: dict[int, Example] = {}
    for chosen in _batches(prefix, [question.numel() for question in questions], tokens):
        answers = _batch(prefix, [questions[i] for i in chosen], tokens, frozenset(stop), choose)
        for i, answer in zip(chosen, answers, strict=True):
            found[i] = Example(torch.cat([questions[i], answer]), questions[i].numel(), moves)
        progress(len(chosen))
    return tuple(found[i] for i in range(len(questions)))


def _batches(prefix: Prefix, lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Indices of questions that are answered together: of similar length, or of one length where windows slide."""
    size = BATCH if prefix.shared else 1
    slides = prefix.slides(prefix.ids.numel() + max(lengths) + tokens)
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
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
    """The next token of each row: the first one, or a sample."""

    def __init__(self, temperature: float, seed: int) -> None:
        self._temperature = temperature
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """`(B, V) -> (B,)`."""
        if self._temperature == 0:
            return logits.argmax(-1).cpu()
        weights = torch.softmax(logits.cpu().float() / self._temperature, -1)
        return torch.multinomial(weights, 1, generator=self._generator)[:, 0]


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

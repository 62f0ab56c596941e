"""A context of which only a beginning is kept, with a patch for the rest and without one.

Source: arXiv 2609.39329, which keeps a compressed cache of the context and patches the MLP output maps so that the
model answers reference questions as with the whole cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from contextfold import suites
from contextfold.anatomy import Bound
from contextfold.bake import Example, Frame, bake
from contextfold.patch import Patch
from contextfold.questions import questions
from contextfold.reproduce.engine import Bench
from contextfold.reproduce.harbour import DOCUMENT, JUDGED, REFERENCE
from contextfold.runtime import materialised
from contextfold.verify import random_like
from contextfold.verify.reusable import answer_logits, compare_answers

__all__ = ["REPEAT", "measure_budget"]

REPEAT = "Repeat the text, word for word."
"""Asked of the model, it makes the document itself a reference."""

CHUNKS = 4
"""Pieces in which the document is repeated."""


def _laid_out(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor, list[Example]]:
    """Tokens that always stay `(k,)`, the document `(c,)`, and the questions with their true answers."""
    laid = questions(tokenizer, DOCUMENT, [question for question, _ in pairs])
    answers = [_tokens(tokenizer, answer) for _, answer in pairs]
    tails = zip(laid.tails, answers, strict=True)
    return laid.kept, laid.context, [Example(torch.cat([tail, answer]), tail.numel()) for tail, answer in tails]


def _tokens(tokenizer: Any, text: str) -> Tensor:
    """A text inside a sequence: nothing in front of it."""
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])


def references(tokenizer: Any, asked: int) -> list[Example]:
    """The document repeated in pieces, and `asked` questions about it with their true answers."""
    (tail,) = questions(tokenizer, DOCUMENT, [REPEAT]).tails
    words = _tokens(tokenizer, DOCUMENT)
    pieces = [piece for piece in words.tensor_split(CHUNKS) if piece.numel()]
    repeated = [Example(torch.cat([tail, piece]), tail.numel()) for piece in pieces]
    return [*repeated, *_laid_out(tokenizer, REFERENCE[:asked])[2]]


@torch.no_grad()
def measure_budget(
    bench: Bench, advance: Callable[[], None], *, dtype: torch.dtype, share: float, ways: Sequence[str], asked: int,
    judged: int, controls: bool,
) -> dict[str, Any]:  # fmt: skip
    """Keep the first `share` of the document's tokens; the rest goes, and a patch learnt from references replaces it.

    Judged on the true answers to `judged` other questions: `log_perplexity` (nats per token), `kl_nats` to the model
    with the whole document, `same` first tokens and `tokens`; by estimator of `contextfold.bake`, and without a patch.
    """
    bound, tokenizer = bench.bound(dtype), bench.tokenizer(dtype)
    kept, document, held_out = _laid_out(tokenizer, JUDGED[:judged])
    count = round(share * document.numel())
    frame = Frame(torch.cat([kept, document[:count]]), document[count:])
    learnt = references(tokenizer, asked)
    wanted = [answer_logits(bound.model, frame.full, each) for each in held_out]
    found: dict[str, Any] = {
        "kept_tokens": count, "document_tokens": document.numel(),
        "whole": _judge(bound, frame.full, held_out, wanted), "short": _judge(bound, frame.kept, held_out, wanted),
        "ways": {}, "controls": {},
    }  # fmt: skip
    advance()
    learn_by = partial(bake, bound, emphasis=1.0)  # all tokens alike, as in the paper
    for way in ways:
        patch = learn_by(frame, learnt, method=way).patch
        found["ways"][way] = _under(bound, patch, frame, held_out, wanted)
        if controls and way == ways[0]:
            other = Frame(frame.kept, _tokens(tokenizer, suites.OTHER_CONTEXT))
            for name, wrong in (
                ("random", random_like(patch)), ("other_document", learn_by(other, learnt, method=way).patch),
            ):  # fmt: skip
                found["controls"][name] = _under(bound, wrong, frame, held_out, wanted)
        advance()
    return found


def _under(
    bound: Bound, patch: Patch, frame: Frame, examples: Sequence[Example], wanted: Sequence[Tensor]
) -> dict[str, float]:
    with materialised(bound, patch):
        return _judge(bound, frame.kept, examples, wanted)


def _judge(bound: Bound, before: Tensor, examples: Sequence[Example], wanted: Sequence[Tensor]) -> dict[str, float]:
    """The model with `before` in front, weights as they are now, on the true answers."""
    lost, kl, same, tokens = 0.0, 0.0, 0, 0
    for example, reference in zip(examples, wanted, strict=True):
        logits = answer_logits(bound.model, before, example)
        truth = example.tail[example.answer :]
        lost -= float(torch.log_softmax(logits.double(), -1).gather(1, truth[:, None]).sum())
        mean, equal, count = compare_answers(reference, logits)
        kl, same, tokens = kl + mean * count, same + equal, tokens + count
    return {"log_perplexity": lost / tokens, "kl_nats": kl / tokens, "same": same, "tokens": tokens}

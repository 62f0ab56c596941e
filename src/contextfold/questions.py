"""A context and many questions become token ids: what stays before each question, what goes, and the questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contextfold.errors import InputError
from contextfold.prompts import Chat, chat, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Questions", "questions", "read_questions"]


@dataclass(frozen=True, eq=False)
class Questions:
    """Token ids of many runs that begin alike: `kept (k,)`, then `context (c,)`, then one of `tails`, each `(q,)`.

    Without the context a run is `kept` and a tail: nothing is tokenised a second time. `stop` are the tokens that end
    an answer.
    """

    kept: Tensor
    context: Tensor
    tails: tuple[Tensor, ...]
    stop: tuple[int, ...]
    removed: str
    """The text that goes."""
    example: str
    """What the model sees of the first question once it has gone."""
    notice: str
    """What the user has to know about where the context stands."""


def questions(
    tokenizer: PreTrainedTokenizerBase, context: str, asked: Sequence[str], *, today: date | None = None
) -> Questions:
    """Lay out `asked`, each as the user's turn after `context`; without a chat template, as `Question: … Answer:`.

    A question that ends with a colon says itself where the answer goes and is left as it is. Raises `InputError` for
    no questions, and wherever `prompts.chat` and `prompts.encode` do.
    """
    if not asked:
        raise InputError("there are no questions; give at least one line of text")
    if tokenizer.chat_template is None:
        return _plain(tokenizer, context, asked)
    chats = [chat(tokenizer, context, question, today=today) for question in asked]
    edges = {(c.removed[0], c.removed[1], tuple(c.ids[: c.removed[1]].tolist())) for c in chats}
    if len(edges) != 1:
        raise InputError("the chat template writes other tokens before the question for different questions")
    start, stop = max(chats[0].removed[0], 1), chats[0].removed[1]
    if start >= stop:
        raise InputError("this chat has no context to remove; give it a system message")
    ids = chats[0].ids
    tails = tuple(c.ids[stop:] for c in chats)
    return Questions(ids[:start], ids[start:stop], tails, _ends(tokenizer), *_shown(chats[0]))


def _shown(first: Chat) -> tuple[str, str, str]:
    if first.folded:
        where = "the chat template knows no system message, so the context stands at the start of the user's turn"
    else:
        where = "the context is the system message; ask the patched model with an empty one"
    inserted = f"; the template's own text {first.inserted!r} is kept out" if first.inserted else ""
    return first.removed_text, first.kept, where + inserted


def _plain(tokenizer: PreTrainedTokenizerBase, context: str, asked: Sequence[str]) -> Questions:
    before = context.rstrip() + "\n\n"
    texts = [q if q.rstrip().endswith(":") else f"Question: {q}\nAnswer:" for q in asked]
    parts = [encode(tokenizer, before, text) for text in texts]
    whole = parts[0].context
    kept = parts[0].sink[1]
    lines = [i for i in (_one_token(tokenizer, text) for text in ("\n", "\n\n")) if i is not None]
    return Questions(
        whole[:kept], whole[kept:], tuple(part.query for part in parts), (*_ends(tokenizer), *lines), before,
        str(tokenizer.decode(torch.cat([whole[:kept], parts[0].query]))),
        "the tokenizer has no chat template, so context and question are plain text and an answer ends with its line",
    )  # fmt: skip


def _one_token(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return int(ids[0]) if len(ids) == 1 else None


def _ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    return () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)


def read_questions(text: str) -> list[str]:
    """One question per line; a backslash and n stand for a line break inside one. Blank lines and doubles are left out.

    Raises `InputError` when nothing is left.
    """
    found = list(dict.fromkeys(line.strip().replace("\\n", "\n") for line in text.splitlines() if line.strip()))
    if not found:
        raise InputError("there are no questions; write one per line")
    return found

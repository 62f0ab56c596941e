"""Text and chats become token ids here and nowhere else: token ids are the currency of the rest of the house.

Two texts are only folded together if they are tokenised together as they are tokenised apart; a chat is
rendered once, with its context, and the context is a span of that rendering's tokens. So the run without the
context is always the run with it minus some tokens: nothing is rendered or tokenised a second time, and no
default system prompt, second BOS or merge across the boundary can slip in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from contextfold.chattemplate import ChatTemplate, beyond, common, gap
from contextfold.errors import InputError, one_line
from contextfold.files import expanded, read_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Chat", "Spans", "chat", "encode", "encode_parts", "encode_text", "parse_spans", "read_argument"]


LARGEST = 64 * 2**20
"""Bytes of a text in a file; no context window holds as much."""

DIGITS = 9
"""Of a number in a span; longer ones are no position of a token."""


@dataclass(frozen=True, eq=False)
class Spans:
    """What a fold takes: `context (c,)` and `query (n,)`, token ids that follow each other in one sequence.

    `sink` is the span of the context that stays when the context goes, because attention rests on it:
    positions `[start, stop)` of the sequence, BOS or whatever else the first token is.
    """

    context: Tensor
    query: Tensor
    sink: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Chat:
    """A rendered chat, and the span of its tokens that goes when the context goes.

    `ids (T,)` are the tokens of `text`, the generation prompt included. `removed` is the span `[start, stop)`
    of `ids` that holds the context; it is empty if there was none. `removed_text` is the same as text, and
    `kept` the text that remains: what the model sees after folding. `bare` is what the template itself
    renders without a system message, and `inserted` what that holds beyond `kept`: empty, or a default system
    prompt, which is why `kept` differs from `bare`. `folded` says that the template knows no system message,
    so that the context stands at the start of the user's turn.
    """

    text: str
    ids: Tensor
    removed: tuple[int, int]
    removed_text: str
    kept: str
    bare: str
    inserted: str
    folded: bool

    def spans(self) -> Spans:
        """What a fold takes: the context ends where `removed` ends, and the sink is all that stands before it.

        The first token is the sink even if the template begins with the context. Raises `InputError` for a
        chat without a context.
        """
        start, stop = self.removed
        if start == stop:
            raise InputError("this chat has no context to remove; give it a system message")
        return Spans(self.ids[:stop], self.ids[stop:], (0, max(start, 1)))


def encode(tokenizer: PreTrainedTokenizerBase, context: str, query: str) -> Spans:
    """`context` and `query` as the token ids of one text.

    What the tokenizer itself puts in front of a text, a BOS in most cases, is put in front of the context,
    unless the context begins with it already. What it puts behind a text is left out, since the text goes on.

    Raises `InputError` if a text is empty, or if the two are tokenised together otherwise than one by one.
    """
    for name, text in (("context", context), ("query", query)):
        if not text:
            raise InputError(f"the {name} is empty; give at least one token of text")
    first, second, both = (_ids(tokenizer, text) for text in (context, query, context + query))
    if both != first + second:
        raise InputError(_boundary_message(tokenizer, context, query, (first, second, both)))
    prefix = _prefix(tokenizer, context, first)
    return Spans(_tensor(prefix + first), _tensor(second), (0, 1))


def encode_parts(
    tokenizer: PreTrainedTokenizerBase, parts: Mapping[str, str], query: str
) -> tuple[Spans, dict[str, tuple[int, int]]]:
    """Named texts and a query as the token ids of one text, and where each of the parts stands in it.

    What the tokenizer itself puts in front of a text belongs to no part.

    Raises `InputError` if there are no parts, one is empty, or two neighbours are tokenised together otherwise than
    one by one.
    """
    if not parts:
        raise InputError("there are no parts; give at least one")
    names, texts = list(parts), list(parts.values())
    spans: dict[str, tuple[int, int]] = {}
    start = 0
    for k, name in enumerate(names):
        if not texts[k]:
            raise InputError(f"part {name!r} is empty; give at least one token of text")
        try:
            whole = encode(tokenizer, "".join(texts[: k + 1]), "".join(texts[k + 1 :]) + query)
        except InputError as error:
            raise InputError(f"between part {name!r} and what follows it: {error}") from error
        stop = whole.context.numel()
        spans[name] = (start if k else stop - len(_ids(tokenizer, texts[0])), stop)
        start = stop
    return whole, spans


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """One text as token ids `(n,)`, with what the tokenizer puts in front of a text, as in `encode`.

    Raises `InputError` if the text is empty.
    """
    if not text:
        raise InputError("the text is empty; give at least one token of text")
    ids = _ids(tokenizer, text)
    return _tensor(_prefix(tokenizer, text, ids) + ids)


def chat(tokenizer: PreTrainedTokenizerBase, system: str | None, user: str, *, today: date | None = None) -> Chat:
    """Render one turn of a chat whose system message is the context.

    The removed span leaves what the template renders without a system message, wherever that is the rendering
    with one minus a stretch of it. Where the template then inserts a text of its own, only the context itself
    is removed and its empty turn stays; `inserted` shows the text that was kept out. With `system` None or
    empty nothing is removed, and inserting a text is refused. `today` is for templates that print the date:
    their rendering would otherwise be another one tomorrow.

    Raises `InputError` if the tokenizer has no template, the template refuses or rewrites the messages,
    prints today's date while `today` is None, or inserts a text where there is no context; if a message is
    blank or holds the BOS token; and if tokens merge across an edge of the context.
    """
    if tokenizer.chat_template is None:
        raise InputError("this tokenizer has no chat template; give the context and the query as plain text")
    _check_messages(tokenizer, system, user)
    template = ChatTemplate(tokenizer, user, today).placed()
    template.check_date()
    bare = template.without_system()
    text = bare if system is None else template.with_system(system)
    if not system:
        template.check_nothing_inserted(text, system)
        return _finished(template, text, bare, text, (template.at, template.at))
    start = template.at
    stop = start + len(_as_rendered(text, system, start))
    stretch = gap(text, bare, start)
    if stretch is not None and stretch[1] >= stop:
        start, stop = stretch
    return _finished(template, text, bare, text[:start] + text[stop:], (start, stop))


def _finished(template: ChatTemplate, text: str, bare: str, kept: str, characters: tuple[int, int]) -> Chat:
    """The chat in tokens: the characters that go must be tokens that go."""
    tokenizer = template.tokenizer
    ids, kept_ids = _ids(tokenizer, text), _ids(tokenizer, kept)
    for sequence in (ids, kept_ids):
        _check_bos(tokenizer, sequence)
    # The tokens that stand wholly before the context, whatever the context begins with.
    before = common(_ids(tokenizer, text[: template.at]), ids)
    removed = gap(ids, kept_ids, before)
    if removed is None:
        edges = [text[max(edge - 9, 0) : edge + 9] for edge in characters]
        raise InputError(
            f"the context merges with its neighbours in the chat template, at {edges[0]!r} or at {edges[1]!r}; "
            "take the spaces and newlines away from the ends of the context"
        )
    return Chat(
        text=text,
        ids=_tensor(ids),
        removed=removed,
        removed_text=text[characters[0] : characters[1]],
        kept=kept,
        bare=bare,
        inserted=beyond(bare, kept),
        folded=template.folded,
    )


def _check_messages(tokenizer: PreTrainedTokenizerBase, system: str | None, user: str) -> None:
    for name, text in (("system", system), ("user", user)):
        if text and not text.strip():
            raise InputError(f"the {name} message is blank; give some text, or an empty one")
        bos = tokenizer.bos_token_id
        if text and bos is not None and bos in _ids(tokenizer, text):
            raise InputError(
                f"the {name} message holds the BOS token {tokenizer.bos_token!r}, which only the chat template may "
                "write; give the bare text"
            )


def _check_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> None:
    """Raises `InputError` if the sequence begins with more than one BOS."""
    bos = tokenizer.bos_token_id
    if bos is not None and ids[:2] == [bos, bos]:
        raise InputError(
            f"the sequence begins with two BOS tokens {tokenizer.bos_token!r}; leave out the one in the text"
        )


def _as_rendered(text: str, system: str, at: int) -> str:
    """The context as it stands in the rendering: many templates strip a message. Raises `InputError`."""
    for context in (system, system.strip()):
        if text.startswith(context, at):
            return context
    raise InputError(f"the chat template rewrites the context (it shows {text[at : at + 40]!r}); give it as plain text")


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The bare token ids of a text: what the tokenizer would add is decided elsewhere, once."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _prefix(tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int]) -> list[int]:
    """What the tokenizer puts in front of `text`, whose bare ids are given; nothing if the text begins with it.

    Raises `InputError` if the text itself begins with two BOS.
    """
    _check_bos(tokenizer, ids)
    whole = list(tokenizer(text)["input_ids"])
    for size in range(len(whole) - len(ids) + 1):
        if whole[size : size + len(ids)] == ids:
            return [] if ids[:size] == whole[:size] else whole[:size]
    raise InputError(
        "this tokenizer tokenises a text otherwise once it adds special tokens to it; give token ids instead"
    )


def _tensor(ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.long)


def _boundary_message(
    tokenizer: PreTrainedTokenizerBase,
    context: str,
    query: str,
    ids: tuple[list[int], list[int], list[int]],
) -> str:
    """What to say when `ids`, of the context, the query and both, do not fit together."""
    first, second, both = ids

    def tokens(part: list[int]) -> str:
        return " ".join(map(repr, tokenizer.convert_ids_to_tokens(part)))

    # The joined text, from the third last token of the context to as far after the merge.
    start = min(max(len(first) - 3, 0), common(first + second, both))
    if context[-1].isspace():
        way_out = f"move the {context[-1]!r} at the end of the context to the start of the query"
    elif query[0].isspace():
        way_out = f"move the {query[0]!r} at the start of the query to the end of the context"
    else:
        way_out = "put a space or a newline at the start of the query"
    return (
        f"context and query are other tokens together than apart: apart … {tokens(first[-3:])} | "
        f"{tokens(second[:3])} …, together … {tokens(both[start : start + 6])} …; {way_out}"
    )


def read_argument(value: str) -> str:
    """A text given on a command line: the text itself, or `@file` for the content of a UTF-8 file, unchanged.

    A text that begins with `@` is written with `@@`. A byte order mark is no text and is left out. Raises
    `InputError` if the file cannot be read or is not UTF-8.
    """
    if not value.startswith("@"):
        return value
    if value.startswith("@@"):
        return value[1:]
    path = expanded(value[1:])
    try:
        return read_whole(path, LARGEST).decode("utf-8-sig")
    except OSError as error:
        raise InputError(
            f"cannot read the file {path} ({error.strerror}); give an existing file, or write @@ for a text that "
            "begins with @"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"the file {path} is not UTF-8 (byte {error.start} is 0x{error.object[error.start]:02x}); convert it"
        ) from error


def parse_spans(text: str, length: int) -> tuple[tuple[int, int], ...]:
    """Spans such as `0:1,5:9` of a sequence of `length` tokens: `((0, 1), (5, 9))`, each `[start, stop)`.

    Raises `InputError` unless they are written so, not empty, inside the sequence, in order and apart.
    """
    spans: list[tuple[int, int]] = []
    for part in text.split(","):
        part = part.strip()
        start, colon, stop = part.partition(":")
        if not (colon and start.isdecimal() and stop.isdecimal() and len(start) <= DIGITS and len(stop) <= DIGITS):
            raise InputError(f"'{one_line(part, 40)}' is no span of tokens; write start:stop, as in 0:1,5:9")
        span = (int(start), int(stop))
        if not span[0] < span[1] <= length:
            raise InputError(
                f"the span {part} is empty or leaves the sequence, which has {length} tokens; "
                f"write 0 <= start < stop <= {length}"
            )
        if spans and span[0] < spans[-1][1]:
            raise InputError(
                f"the span {part} overlaps or precedes {spans[-1][0]}:{spans[-1][1]}; write spans in order"
            )
        spans.append(span)
    return tuple(spans)

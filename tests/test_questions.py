"""A context and questions as token ids, with toy tokenizers and templates."""

from __future__ import annotations

import pytest
import torch

from contextfold.errors import InputError
from contextfold.questions import questions, read_questions
from test_prompts import CHATML, NO_SYSTEM, make

PLAIN = ["one a", "a b", "two b:"]


def test_plain_text_is_asked_and_answered_in_words() -> None:
    tokenizer = make(bos=True)
    laid = questions(tokenizer, "one two", PLAIN)
    assert laid.kept.tolist() == [tokenizer.bos_token_id]
    whole = torch.cat([laid.kept, laid.context, laid.tails[0]]).tolist()
    assert whole == tokenizer("one two\n\nQuestion: one a\nAnswer:")["input_ids"]
    assert torch.cat([laid.context, laid.tails[2]]).tolist() == tokenizer("one two\n\ntwo b:")["input_ids"][1:]
    assert "no chat template" in laid.notice


def test_a_chat_loses_its_system_message_and_nothing_else() -> None:
    tokenizer = make(template=CHATML)
    laid = questions(tokenizer, "one two", ["a", "b"])
    messages = [{"role": "system", "content": "one two"}, {"role": "user", "content": "b"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert torch.cat([laid.kept, laid.context, laid.tails[1]]).tolist() == ids
    assert laid.kept.numel() >= 1
    assert "one two" in laid.removed
    assert "one two" not in laid.example


def test_lists_of_questions() -> None:
    assert read_questions("a?\n\n b? \na?\nword: x\\nplural:\n") == ["a?", "b?", "word: x\nplural:"]
    with pytest.raises(InputError, match="one per line"):
        read_questions(" \n")
    with pytest.raises(InputError, match="at least one line"):
        questions(make(), "one", [])


def test_without_a_system_role_the_user_is_told_where_the_context_stands() -> None:
    laid = questions(make(template=NO_SYSTEM), "one two", ["a", "b"])
    assert "start of the user's turn" in laid.notice
    assert "one two" in laid.removed

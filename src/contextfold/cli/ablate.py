"""`contextfold ablate`: what each part of a prompt is worth, as removal and as patch."""

from __future__ import annotations

from typing import Annotated

import typer

from contextfold.cli.common import (
    Dtype,
    DtypeOption,
    FallbackOption,
    JsonOption,
    MaxMemoryOption,
    Model,
    QueryOption,
    RuleOption,
    bind_model,
    load_model,
    show_or_json,
    spelled,
    steps,
)
from contextfold.errors import InputError


def ablate(
    model: Model,
    part: Annotated[list[str], typer.Option(help="NAME=TEXT or NAME=@file, once per part, in the prompt's order.")],
    query: QueryOption,
    tokens: Annotated[int, typer.Option(help="Tokens of the answer.")] = 1,
    rule: RuleOption = "appendix",
    fallback: FallbackOption = "floored",
    dtype: DtypeOption = Dtype.float32,
    max_memory: MaxMemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what each part of a prompt is worth: what its removal alone costs, and which patch absorbs it."""
    from contextfold import prompts
    from contextfold.ablate import ablate as ablate_parts
    from contextfold.ablationview import ablation_view

    texts = _named(part)
    asked = prompts.read_argument(query)
    loaded = load_model(model, dtype, max_memory)
    ids, spans = prompts.encode_parts(loaded.tokenizer, texts, asked)
    bound = bind_model(loaded)
    decode = loaded.tokenizer.decode
    with steps("removing", len(spans) * tokens) as progress:
        found = ablate_parts(
            bound, ids.context, ids.query, {name: (span,) for name, span in spans.items()}, rule=rule,
            fallback=fallback, tokens=tokens, progress=progress,
        )  # fmt: skip
    payload = {"model": model, "query": asked, **found.to_json(), "answer_text": decode(list(found.answer))}
    payload["parts"] = [
        {**row, "text": texts[row["name"]], "positions": spelled(row["positions"], decode)} for row in payload["parts"]
    ]
    show_or_json(as_json, payload, lambda: ablation_view(found, decode), loaded)
    raise typer.Exit(0 if found.proven else 1)


def _named(parts: list[str]) -> dict[str, str]:
    from contextfold import prompts

    texts: dict[str, str] = {}
    for given in parts:
        name, equals, value = given.partition("=")
        if not equals or not name:
            raise InputError(f"--part {given[:40]!r} has no name; write NAME=TEXT or NAME=@file")
        if name in texts:
            raise InputError(f"two parts are called {name!r}; give each its own name")
        texts[name] = prompts.read_argument(value)
    return texts

"""`contextfold dynamics`: the implicit updates while a context comes or goes, one token at a time."""

from __future__ import annotations

from typing import Annotated

import typer

from contextfold.cli.common import (
    ContextOption,
    Dtype,
    DtypeOption,
    JsonOption,
    Model,
    QueryOption,
    bind_model,
    load_model,
    read_prompt,
    show_or_json,
    waiting,
)
from contextfold.errors import InputError


def dynamics(
    model: Model,
    context: ContextOption,
    query: QueryOption,
    direction: Annotated[str, typer.Option(help="growing, or removing (from the left).")] = "growing",
    dtype: DtypeOption = Dtype.float32,
    as_json: JsonOption = False,
) -> None:
    """Follow the weight updates that are equivalent to each context token: norms, loss, alignment, effective rank."""
    from contextfold.fold.course import dynamics as follow
    from contextfold.fold.course import dynamics_view

    if direction not in ("growing", "removing"):
        raise InputError(f"direction {direction!r} is unknown; choose growing or removing")
    loaded = load_model(model, dtype)
    prompt = read_prompt(loaded.tokenizer, context, query, "sink")
    with waiting("following the context, one token at a time"):
        found = follow(bind_model(loaded), prompt.context, prompt.query, direction=direction)  # type: ignore[arg-type]
    show_or_json(as_json, found.to_json(), lambda: dynamics_view(found))

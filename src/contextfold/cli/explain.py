"""`contextfold explain`: how every block absorbs a context, or why it cannot; no weights needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from contextfold.cli.common import Dtype, JsonOption, load_model, show_or_json


def explain(
    target: Annotated[
        str, typer.Argument(help="A folder (a config.json is enough), a hub id, a .gguf file, or a built-in name.")
    ],
    positions: Annotated[int, typer.Option(help="Positions that one patch must meet at once.")] = 1,
    rule: Annotated[list[str] | None, typer.Option(help="Rule asked for by name; may be repeated.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say per block: its expression, the chosen plan with its equations, capacity, and what would break it."""
    from contextfold.explain import explain as explain_model
    from contextfold.explain import explanation_view

    found = explain_model(_source(target), positions, rule or ())
    show_or_json(as_json, found.to_json(), lambda: explanation_view(found))
    raise typer.Exit(0 if found.controllable else 1)


def _source(target: str) -> Any:
    """A configuration is enough where one can be had without loading; built-in models and GGUF files are loaded."""
    from contextfold import models

    builtin = target in {b.name for b in models.BUILTINS}
    if builtin or Path(target).suffix.lower() == ".gguf":
        return load_model(target, Dtype.float32).model
    return target

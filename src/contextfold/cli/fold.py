"""`contextfold fold`: a patch for one token, proven, then written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from contextfold.cli.common import (
    ContextOption,
    Dtype,
    DtypeOption,
    FallbackOption,
    JsonOption,
    KeepOption,
    Model,
    QueryOption,
    RuleOption,
    bind_model,
    check_writable,
    load_model,
    other_context,
    out,
    protocol,
    read_prompt,
    show_or_json,
    waiting,
)
from contextfold.errors import InputError


def fold(
    model: Model,
    context: ContextOption,
    query: QueryOption,
    out_file: Annotated[Path | None, typer.Option("--out", help="Where to write the patch.")] = None,
    positions: Annotated[
        str, typer.Option(help="Query tokens that must be exact: last (one token), all, or indices like 0,4,7.")
    ] = "last",
    strict: Annotated[bool, typer.Option(help="With several positions: refuse layers that are not exact.")] = False,
    keep: KeepOption = "sink",
    rule: RuleOption = "balanced",
    fallback: FallbackOption = None,
    dtype: DtypeOption = Dtype.float32,
    as_json: JsonOption = False,
) -> None:
    """Fold a context for the last token of a query, or for all its tokens at once; prove the patch, then write it."""
    from contextfold import patchfile, show
    from contextfold.verify import SequenceVerdict, Settings, Verdict, fold_and_prove, fold_and_prove_sequence

    check_writable(out_file)
    at = read_positions(positions)
    loaded = load_model(model, dtype)
    prompt = read_prompt(loaded.tokenizer, context, query, keep)
    settings = Settings(rule, fallback, other_context(loaded), model, protocol(prompt))
    verdict: Verdict | SequenceVerdict
    with waiting("folding and proving"):
        bound = bind_model(loaded)
        if positions == "last":
            patch, verdict = fold_and_prove(bound, prompt, settings)
        else:
            patch, verdict = fold_and_prove_sequence(bound, prompt, settings, at=at, strict=strict)
    written = patchfile.save(patch, out_file) if out_file is not None and verdict.proven else None
    payload = {**verdict.to_json(), "patch": None if written is None else str(written)}
    show_or_json(as_json, payload, lambda: show.verdict_view(verdict))
    if not as_json and out_file is not None:
        out.print(f"Wrote {written} ({patch.nbytes} bytes)." if written else "Not proven, so nothing was written.")
    raise typer.Exit(0 if verdict.proven else 1)


def read_positions(text: str) -> list[int] | None:
    """`0,4,7` as indices; None for `all` and `last`."""
    if text in ("all", "last"):
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"positions {text!r} are neither last, all, nor indices like 0,4,7") from None

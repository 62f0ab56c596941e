"""`contextfold fold`: a patch for one token, proven, then written."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from contextfold.cli.common import (
    ContextOption,
    Dtype,
    DtypeOption,
    FallbackOption,
    JsonOption,
    KeepOption,
    MaxMemoryOption,
    Model,
    QueryOption,
    RuleOption,
    as_read,
    bind_model,
    check_writable,
    load_model,
    other_context,
    out,
    protocol,
    read_prompt,
    show_or_json,
    spelled,
    steps,
    waiting,
    working,
    written_patch,
)
from contextfold.errors import InputError


class Sites(StrEnum):
    """Which maps carry a patch for several positions."""

    output = "output"
    all = "all"
    attention = "attention"


def fold(
    model: Model,
    context: ContextOption,
    query: QueryOption,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Where to write the patch; a command that was stopped goes on there.")
    ] = None,
    positions: Annotated[
        str, typer.Option(help="Query tokens that must be exact: last (one token), all, or indices like 0,4,7.")
    ] = "last",
    sites: Annotated[
        Sites, typer.Option(help="With several positions, what is edited: MLP output maps, all its maps, or attention.")
    ] = Sites.output,
    typical: Annotated[
        str | None, typer.Option(help="With several positions: text, or @file, that the patch should disturb least.")
    ] = None,
    strict: Annotated[bool, typer.Option(help="With several positions: refuse layers that are not exact.")] = False,
    keep: KeepOption = "sink",
    rule: RuleOption = "balanced",
    fallback: FallbackOption = None,
    dtype: DtypeOption = Dtype.float32,
    max_memory: MaxMemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fold a context for the last token of a query, or for all its tokens at once; prove the patch, then write it."""
    from contextfold import show
    from contextfold.spectra import spectra
    from contextfold.verify import SequenceVerdict, Settings, Verdict, fold_and_prove

    check_writable(out_file)
    at = read_positions(positions)
    if positions == "last" and (sites is not Sites.output or typical is not None or strict):
        raise InputError("--sites, --typical and --strict are for several positions: add --positions all")
    loaded = load_model(model, dtype, max_memory)
    prompt = read_prompt(loaded.tokenizer, context, query, keep)
    verdict: Verdict | SequenceVerdict
    with working(out_file) as store:
        if positions == "last":
            settings = Settings(rule, fallback, other_context(loaded), model, protocol(prompt))
            with waiting("folding and proving"):
                patch, verdict = fold_and_prove(bind_model(loaded), prompt, settings)
        else:
            n = prompt.query.numel() if at is None else len(set(at))
            text = protocol(prompt, f"{n} tokens folded")
            settings = Settings(other=other_context(loaded), name=model, protocol=text)
            options = {"at": at, "sites": sites.value, "typical": _tokens(loaded, typical), "strict": strict}
            patch, verdict = _sequence(bind_model(loaded), prompt, settings, {**options, "store": store})
        written = written_patch(patch, out_file, verdict.proven)
    payload = {**as_read(context, query), **verdict.to_json(), "spectra": spectra(patch)}
    payload["patch"] = None if written is None else str(written)
    rows = "steps" if positions == "last" else "positions"
    payload[rows] = spelled(payload[rows], loaded.tokenizer.decode)
    show_or_json(as_json, payload, lambda: show.verdict_view(verdict), loaded)
    if not as_json and out_file is not None:
        out.print(f"Wrote {written} ({patch.nbytes} bytes)." if written else "Not proven, so nothing was written.")
    raise typer.Exit(0 if verdict.proven else 1)


def _sequence(bound: Any, prompt: Any, settings: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """Fold and prove, with a bar that counts layers."""
    from contextfold.verify import FOLDS, fold_and_prove_sequence

    with steps("folding and proving, layers", FOLDS * len(bound.blocks)) as advance:
        return fold_and_prove_sequence(bound, prompt, settings, **options, progress=advance)


def _tokens(loaded: Any, text: str | None) -> Any:
    from contextfold import prompts

    return None if text is None else prompts.encode_text(loaded.tokenizer, prompts.read_argument(text))


def read_positions(text: str) -> list[int] | None:
    """`0,4,7` as indices; None for `all` and `last`."""
    if text in ("all", "last"):
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"positions {text!r} are neither last, all, nor indices like 0,4,7") from None

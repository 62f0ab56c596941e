"""`contextfold verify`: a patch file, or the rule over a suite, put to the test."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from contextfold.cli.common import (
    Dtype,
    DtypeOption,
    FallbackOption,
    JsonOption,
    MaxMemoryOption,
    RuleOption,
    as_read,
    bind_model,
    load_model,
    other_context,
    protocol,
    read_prompt,
    read_spans,
    show_or_json,
    spelled,
    steps,
    waiting,
)
from contextfold.errors import InputError


def verify(
    model: Annotated[str | None, typer.Argument(help="As for fold; or use --model.")] = None,
    model_option: Annotated[str | None, typer.Option("--model", help="The model, where no argument names it.")] = None,
    patch: Annotated[Path | None, typer.Option(help="A patch file to put to the test.")] = None,
    suite: Annotated[str | None, typer.Option(help="paper: five prompts × 20 tokens, each folded afresh.")] = None,
    context: Annotated[str | None, typer.Option(help="Context of the patch: text or @file.")] = None,
    query: Annotated[str | None, typer.Option(help="Query of the patch: text or @file.")] = None,
    keep: Annotated[str | None, typer.Option(help="As for fold; the suite keeps none, a patch the sink.")] = None,
    rule: RuleOption = "balanced",
    fallback: FallbackOption = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens per prompt of the suite.")] = None,
    dtype: DtypeOption = Dtype.float32,
    max_memory: MaxMemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put a patch file, or the rule itself over a suite of prompts, to the test."""
    from contextfold import show

    name = model or model_option
    if name is None:
        raise InputError("name a model: contextfold verify MODEL …")
    if (suite is None) == (patch is None):
        raise InputError("give either --patch FILE with --context and --query, or --suite paper")
    if suite is not None:
        loaded, verdict, said = _suite(name, suite, keep, tokens, rule, fallback, dtype, max_memory)
    else:
        assert patch is not None
        loaded, verdict, said = _stored(name, patch, context, query, keep or "sink", dtype, max_memory)
    show_or_json(as_json, said, lambda: show.verdict_view(verdict), loaded)
    raise typer.Exit(0 if verdict.proven else 1)


def _suite(
    name: str, suite: str, keep: str | None, tokens: int | None, rule: str, fallback: str | None, dtype: Dtype,
    max_memory: str | None,
) -> tuple[Any, Any, dict[str, Any]]:  # fmt: skip
    from contextfold import prompts, suites
    from contextfold.verify import Prompt, Settings, verify_prompts

    if suite != "paper":
        raise InputError(f"suite {suite!r} is unknown; there is one: paper")
    loaded = load_model(name, dtype, max_memory)
    count = suites.PAPER_TOKENS if tokens is None else tokens
    spans = read_spans(keep or "none", None)
    items = [Prompt(prompts.encode_text(loaded.tokenizer, text), keep=spans) for text in suites.PAPER]
    seen = "only the current token" if not spans else "the kept spans and the current token"
    protocol = f"{len(items)} prompts × {count} tokens, each folded afresh; the patched model saw {seen}."
    with steps("folding", len(items) * count) as progress:
        settings = Settings(rule, fallback, None, name, protocol)
        verdict = verify_prompts(bind_model(loaded), items, tokens=count, settings=settings, progress=progress)
    return loaded, verdict, _json(loaded, verdict, {"prompts": list(suites.PAPER)})


def _json(loaded: Any, verdict: Any, texts: dict[str, Any]) -> dict[str, Any]:
    found = {**texts, **verdict.to_json()}
    rows = "positions" if "positions" in found else "steps"
    return {**found, rows: spelled(found[rows], loaded.tokenizer.decode)}


def _stored(
    name: str, path: Path, context: str | None, query: str | None, keep: str, dtype: Dtype, max_memory: str | None
) -> tuple[Any, Any, dict[str, Any]]:
    from contextfold import patchfile
    from contextfold.spectra import spectra
    from contextfold.verify import Settings, verify_patch, verify_sequence_patch

    if context is None or query is None:
        raise InputError("a patch is exact for one context and query: give both with --context and --query")
    stored = patchfile.load(path)
    loaded = load_model(name, dtype, max_memory)
    prompt = read_prompt(loaded.tokenizer, context, query, keep)
    with waiting("proving"):
        settings = Settings(other=other_context(loaded), name=name, protocol=protocol(prompt))
        bound = bind_model(loaded)
        test = verify_sequence_patch if stored.header.kind == "sequence" else verify_patch
        verdict = test(bound, stored, prompt, settings)
    said = {**_json(loaded, verdict, as_read(context, query)), "spectra": spectra(stored)}
    return loaded, verdict, said

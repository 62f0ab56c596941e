"""`contextfold demo`: a real model, a real context, and the table that proves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from contextfold.cli.common import (
    Dtype,
    DtypeOption,
    JsonOption,
    bind_model,
    load_model,
    other_context,
    out,
    read_prompt,
    show_or_json,
    spelled,
    steps,
)


def demo(
    model: Annotated[str, typer.Option(help="smollm2, gemma3-270m, or any other model.")] = "smollm2",
    tokens: Annotated[int, typer.Option(help="Tokens of the answer.")] = 12,
    dtype: DtypeOption = Dtype.float32,
    as_json: JsonOption = False,
) -> None:
    """A real model, a real context, weights written, and a table that proves it."""
    from contextfold import show, suites
    from contextfold.fold import SINK, split
    from contextfold.verify import Settings, continuation, verify_prompts

    loaded = load_model(model, dtype)
    prompt = read_prompt(loaded.tokenizer, suites.DEMO.context, suites.DEMO.query, "sink")
    bound = bind_model(loaded)
    assert prompt.query is not None
    if not as_json:
        out.print(f"[bold]Context[/] ({prompt.context.numel()} tokens): {suites.DEMO.context.strip()}")
        out.print(f"[bold]Query[/] ({prompt.query.numel()} tokens): {suites.DEMO.query}\n")
    reduced = split(bound, prompt.context, prompt.query, SINK, "absolute").reduced
    protocol = (
        "Every token of the answer is folded afresh; the patched model saw the sink, the query and the answer so "
        "far, not the context."
    )
    with steps("folding", tokens) as progress:
        settings = Settings(other=other_context(loaded), name=model, protocol=protocol)
        verdict = verify_prompts(bound, [prompt], tokens=tokens, settings=settings, progress=progress)
    without = continuation(bound, reduced, tokens).tolist()
    decode: Callable[[Any], str] = loaded.tokenizer.decode
    payload = {"context": suites.DEMO.context, "query": suites.DEMO.query, **verdict.to_json()}
    payload["steps"] = spelled(payload["steps"], decode)
    if not as_json:
        out.print(show.token_table(verdict.steps[0], decode))
        out.print(show.continuation_panel(verdict, without, decode))
    show_or_json(as_json, payload, lambda: show.verdict_view(verdict))
    raise typer.Exit(0 if verdict.proven else 1)

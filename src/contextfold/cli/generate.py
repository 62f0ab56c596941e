"""`contextfold generate`: the answer token by token, each token folded afresh, in-context and patched side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
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
    RuleOption,
    bind_model,
    load_model,
    out,
    read_prompt,
    read_spans,
    show_or_json,
    spelled,
)


class See(StrEnum):
    """What the patched model sees besides the current token and --keep."""

    current = "current"
    generated = "generated"
    prompt = "prompt"


class Past(StrEnum):
    """Whose choice the history goes on with."""

    free = "free"
    forced = "forced"


def generate(
    model: Model,
    context: ContextOption,
    prompt: Annotated[str | None, typer.Option(help="Text that follows the context, or @file.")] = None,
    keep: KeepOption = "sink",
    see: Annotated[
        See, typer.Option(help="What stays besides: nothing, the answer, or prompt and answer.")
    ] = See.prompt,
    tokens: Annotated[int, typer.Option(help="Tokens of the answer, at most.")] = 40,
    history: Annotated[Past, typer.Option(help="Go on with the patched model's tokens, or the in-context ones.")] = (
        Past.free
    ),
    prove_every: Annotated[int, typer.Option(help="Prove every k-th token on written weights; 0: the first.")] = 40,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    rule: RuleOption = "balanced",
    fallback: FallbackOption = None,
    dtype: DtypeOption = Dtype.float32,
    max_memory: MaxMemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Generate with the context folded into the weights at every step, next to the model that has it."""
    from contextfold import prompts, stepwise
    from contextfold.verify.receipt import receipt_of

    loaded = load_model(model, dtype, max_memory)
    ids, window = _layout(loaded.tokenizer, context, prompt, keep, see)
    bound = bind_model(loaded)
    end = loaded.tokenizer.eos_token_id
    steps = stepwise.generate(
        bound, ids, window, tokens=tokens, history=history.value, prove_every=prove_every, rule=rule,
        fallback=fallback, temperature=temperature, seed=seed, stop=() if end is None else (end,),
    )  # fmt: skip
    decode: Callable[[Any], str] = loaded.tokenizer.decode
    found = tuple(steps if as_json else _streamed(steps, decode))
    summary = stepwise.Summary(found, bound.dtype)
    text = decode([token.chosen for token in found])
    payload = {
        "model": model, "history": history.value, "see": see.value, "context": prompts.read_argument(context),
        "query": None if prompt is None else prompts.read_argument(prompt), "text": text, **summary.to_json(),
    }  # fmt: skip
    payload |= {"steps": spelled(payload["steps"], decode), "receipt": receipt_of(bound)}
    show_or_json(as_json, payload, lambda: f"\n{text!r}\n{summary.sentence()}", loaded)
    raise typer.Exit(0 if summary.holds else 1)


def _layout(tokenizer: Any, context: str, prompt: str | None, keep: str, see: See) -> tuple[Any, Any]:
    """Token ids of the whole prompt, and what the patched model sees of it."""
    import torch

    from contextfold import prompts
    from contextfold.stepwise import Window

    if prompt is None:
        ids = prompts.encode_text(tokenizer, prompts.read_argument(context))
        return ids, Window(read_spans(keep, ids.numel()), generated=see is not See.current)
    parts = read_prompt(tokenizer, context, prompt, keep)
    ids = torch.cat([parts.context, parts.query])
    if see is See.prompt:
        return ids, Window.after(parts.context.numel(), ids.numel(), parts.keep)
    return ids, Window(parts.keep, generated=see is See.generated)


def _streamed(steps: Iterator[Any], decode: Callable[[Any], str]) -> Iterator[Any]:
    """Print a line per token as it comes."""
    out.print(f"{'token':>5}  {'in context':<18}{'patched':<18}{'gap':>8}  {'agree':>6}", style="bold", highlight=False)
    matches = 0
    for count, token in enumerate(steps, 1):
        matches += token.match
        note = f"differs, margin {token.margin:.2g}" if not token.match else ""
        gap = token.logit_gap
        if token.proof is not None:
            worst = token.proof.worst_layer
            gap = token.proof.written.logit_gap
            note = f"{note} proven; worst layer {worst.layer}, {worst.relative_error:.1g}".strip()
        first, second = (repr(decode([i])) for i in (token.in_context, token.patched))
        line = f"{token.index:>5}  {first:<18}{second:<18}{gap:>8.1g}  {matches / count:>6.0%}  {note}"
        out.print(line, style=None if token.match else "yellow", highlight=False, markup=False, soft_wrap=True)
        yield token

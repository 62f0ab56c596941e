"""Prompts × greedy tokens, each token folded afresh, history forced to the baseline ([E] section 4)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from contextfold.anatomy import Bound, bind
from contextfold.errors import InputError
from contextfold.fold import DEFAULT_RULE, Spans
from contextfold.patch import Patch
from contextfold.runtime import Decoder, Run
from contextfold.verify.receipt import receipt_of
from contextfold.verify.step import Step, prove_patch, prove_token
from contextfold.verify.verdict import Verdict

__all__ = ["Prompt", "Settings", "continuation", "fold_and_prove", "verify_patch", "verify_prompts"]


@dataclass(frozen=True, eq=False)
class Prompt:
    """Token ids: `context (c,)` is dropped but for `keep`; `query (n,)` and what is generated stays.

    With `query` None the patched model sees only the current token, as in the paper's experiments: at every step
    all tokens before it are the context.
    """

    context: Tensor
    query: Tensor | None = None
    keep: Spans = ()

    def at(self, generated: Tensor) -> tuple[Tensor, Tensor]:
        """Context and query once `generated (k,)` has been appended."""
        if self.query is not None:
            return self.context, torch.cat([self.query, generated])
        tokens = torch.cat([self.context, generated])
        return tokens[:-1], tokens[-1:]


@dataclass(frozen=True, eq=False)
class Settings:
    """How to fold and what to compare with."""

    rule: str = DEFAULT_RULE
    fallback: str | None = None
    other: Tensor | None = None
    """Context of the negative control; the next prompt's, or random tokens, when None."""
    name: str = ""
    """What the model is called in the verdict."""
    protocol: str = ""
    """What the patched model saw, in words."""


def verify_prompts(
    model: Bound | nn.Module,
    prompts: Sequence[Prompt],
    *,
    tokens: int = 1,
    settings: Settings = Settings(),
    progress: Callable[[Step], None] = lambda step: None,
) -> Verdict:
    """Fold every prompt for `tokens` greedy steps and prove every patch.

    Negative controls are built for the first token of every prompt. `progress` is called after each step.

    Raises `InputError`, `UnsupportedModel`, and `NotControllable` where no exact edit exists.
    """
    bound = model if isinstance(model, Bound) else bind(model)
    if not prompts or tokens < 1:
        raise InputError("nothing to verify: give at least one prompt and one token")
    started = time.monotonic()
    steps: list[Step] = []
    for index, prompt in enumerate(prompts):
        own = settings
        if settings.other is None and len(prompts) > 1:
            own = replace(settings, other=prompts[(index + 1) % len(prompts)].context)
        steps += [replace(step, prompt=index) for step in _prompt_steps(bound, prompt, tokens, own, progress)]
    return _verdict(bound, steps, settings, started)


def fold_and_prove(model: Bound | nn.Module, prompt: Prompt, settings: Settings = Settings()) -> tuple[Patch, Verdict]:
    """One patch for the last token of `prompt`, and its verdict with negative controls."""
    bound = model if isinstance(model, Bound) else bind(model)
    started = time.monotonic()
    context, query = prompt.at(torch.empty(0, dtype=torch.int64))
    step, patch = prove_token(
        bound, context, query, _cached(bound, context, query), keep=prompt.keep, rule=settings.rule,
        fallback=settings.fallback, other=settings.other,
    )  # fmt: skip
    return patch, _verdict(bound, [step], settings, started)


def verify_patch(model: Bound | nn.Module, patch: Patch, prompt: Prompt, settings: Settings = Settings()) -> Verdict:
    """Put a stored patch to the test on the tokens that it was folded for.

    Raises `InputError` for other tokens and `PatchMismatch` for another model or other weights.
    """
    bound = model if isinstance(model, Bound) else bind(model)
    started = time.monotonic()
    context, query = prompt.at(torch.empty(0, dtype=torch.int64))
    cached = _cached(bound, context, query)
    step = prove_patch(bound, patch, context, query, cached, keep=prompt.keep, rule=settings.rule, other=settings.other)
    return _verdict(bound, [step], settings, started)


def _cached(bound: Bound, context: Tensor, query: Tensor) -> Tensor:
    """In-context logits `(V,)` by the path of generation: a prefix into the cache, then the last token."""
    tokens = torch.cat([context, query])
    decoder = Decoder(bound.model)
    if tokens.numel() > 1:
        decoder.extend(tokens[:-1])
    return decoder.extend(tokens[-1:])


def _prompt_steps(
    bound: Bound, prompt: Prompt, tokens: int, settings: Settings, progress: Callable[[Step], None]
) -> list[Step]:
    steps: list[Step] = []
    generated = torch.empty(0, dtype=torch.int64)
    context, query = prompt.at(generated)
    decoder = Decoder(bound.model)
    prefix = torch.cat([context, query])[:-1]
    if prefix.numel():
        decoder.extend(prefix)
    for k in range(tokens):
        context, query = prompt.at(generated)
        cached = decoder.extend(query[-1:])
        step, _ = prove_token(
            bound, context, query, cached, keep=prompt.keep, rule=settings.rule, fallback=settings.fallback,
            with_controls=k == 0, other=settings.other,
        )  # fmt: skip
        steps.append(step)
        progress(step)
        generated = torch.cat([generated, torch.tensor([step.in_context])])
    return steps


def _verdict(bound: Bound, steps: Sequence[Step], settings: Settings, started: float) -> Verdict:
    return Verdict(
        model=settings.name or bound.model_type,
        dtype=bound.dtype,
        rule=settings.rule,
        fallback=settings.fallback,
        protocol=settings.protocol,
        steps=tuple(steps),
        receipt=receipt_of(bound, time.monotonic() - started),
    )


def continuation(bound: Bound, tokens: Run, count: int) -> Tensor:
    """Greedy continuation `(count,)` of `tokens` without any patch: what the model says on its own."""
    decoder = Decoder(bound.model)
    logits = decoder.extend(tokens.ids, tokens.positions)
    chosen = [int(logits.argmax())]
    for k in range(1, count):
        logits = decoder.extend(torch.tensor(chosen[-1:]), tokens.positions[-1:] + k)
        chosen.append(int(logits.argmax()))
    return torch.tensor(chosen)

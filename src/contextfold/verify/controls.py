"""Negative controls: patches that must *not* do what the real one does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from contextfold.anatomy import Bound
from contextfold.fold import Folded, Spans, fold_token
from contextfold.lowrank import LowRank
from contextfold.patch import BiasEdit, Edit, MatrixEdit, Patch, ScaleEdit
from contextfold.runtime import materialised, run
from contextfold.verify.metrics import Comparison, compare

__all__ = [
    "OTHER",
    "RANDOM",
    "SHUFFLED",
    "negative_controls",
    "other_tokens",
    "random_like",
    "shuffled",
    "wrong_contexts",
]

OTHER = "other_context"
SHUFFLED = "shuffled_context"
RANDOM = "random_patch"

SEED = 0


def shuffled(context: Tensor, keep: Spans) -> Tensor | None:
    """The context with its dropped tokens in another order; None when every order is the same."""
    free = torch.ones(context.numel(), dtype=torch.bool)
    for start, stop in keep:
        free[start:stop] = False
    tokens = context[free]
    if len(set(tokens.tolist())) < 2:
        return None
    generator = torch.Generator().manual_seed(SEED)
    order = tokens
    while torch.equal(order, tokens):
        order = tokens[torch.randperm(tokens.numel(), generator=generator)]
    mixed = context.clone()
    mixed[free] = order
    return mixed


def other_tokens(context: Tensor, keep: Spans, vocabulary: int) -> Tensor:
    """Random tokens in place of the dropped ones: another context of the same length."""
    generator = torch.Generator().manual_seed(SEED)
    other = torch.randint(0, vocabulary, context.shape, generator=generator)
    for start, stop in keep:
        other[start:stop] = context[start:stop]
    return other


def wrong_contexts(context: Tensor, keep: Spans, vocabulary: int, other: Tensor | None) -> dict[str, Tensor]:
    """By control, the tokens that take the context's place.

    `other (c',)` is another context; random tokens stand in when it is None. A control that cannot be built (a
    context of one token has one order) is left out.
    """
    mixed = shuffled(context, keep)
    found = {OTHER: other_tokens(context, keep, vocabulary) if other is None else other}
    return found if mixed is None else {**found, SHUFFLED: mixed}


def random_like(patch: Patch) -> Patch:
    """A random patch with the same sites, ranks and norms; an edit that changes nothing stays one."""
    generator = torch.Generator().manual_seed(SEED)
    return replace(patch, edits={site: _random(edit, generator) for site, edit in patch.edits.items()})


def _random(edit: Edit, generator: torch.Generator) -> Edit:
    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)

    size = edit.size()
    if size == 0:
        return edit
    match edit:
        case MatrixEdit(delta):
            drawn = LowRank(noise(delta.B), noise(delta.A))
            return MatrixEdit(drawn * (size / drawn.norm()))
        case BiasEdit(delta):
            step = noise(delta)
            return BiasEdit(step * (size / float(step.norm())))
        case ScaleEdit(base, value, offset):
            step = noise(value)
            return ScaleEdit(base, base + step * (size / float(step.norm())), offset)


def negative_controls(
    bound: Bound,
    folded: Folded,
    context: Tensor,
    query: Tensor,
    keep: Spans,
    rule: str,
    fallback: str | None,
    other: Tensor | None,
) -> Mapping[str, Comparison]:
    """Each control's patch written into the weights, against the real in-context logits; see `wrong_contexts`."""
    patches = {
        name: fold_token(bound, tokens, query, keep=keep, rule=rule, fallback=fallback).patch
        for name, tokens in wrong_contexts(context, keep, bound.vocabulary, other).items()
    }
    patches[RANDOM] = random_like(folded.patch)
    found = {}
    for name, patch in patches.items():
        with materialised(bound, patch):
            found[name] = compare(folded.in_context, run(bound.model, folded.split.reduced)[0])
    return found

"""What a fold of one token aims at: the model with its context, seen once for any number of folds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from contextfold.anatomy import Bound, Weights
from contextfold.errors import InputError
from contextfold.fold.split import Split, split
from contextfold.runtime import BlockState, Run, recording, run

__all__ = ["TokenTargets", "token_targets"]


@dataclass(frozen=True, eq=False)
class TokenTargets:
    """What the last token of a full run gave."""

    tokens: Run
    weights: Weights
    """Those that ran."""
    logits: Tensor
    """`(V,)`."""
    states: tuple[BlockState, ...]
    """Letters z, y and t `(1, ·)`, per block."""

    def check(self, bound: Bound, parts: Split) -> TokenTargets:
        """Itself. Raises `InputError` when other tokens or other weights ran than those to be folded."""
        if not torch.equal(self.tokens.ids, parts.full.ids):
            raise InputError("the targets are of other tokens than context and query; aim at these tokens first")
        if self.weights is not bound.weights:
            raise InputError("the targets are of another model or other weights; aim again on this model")
        return self


def token_targets(bound: Bound, context: Tensor, query: Tensor) -> TokenTargets:
    """Run `context (c,)` and `query (n,)`, both token ids, once; `fold_token` takes the result as `targets`.

    Worth it where several spans are dropped from one sequence, or one is folded in several ways. Raises `InputError`.
    """
    return seen(bound, split(bound, context, query, keep=()).full)


def seen(bound: Bound, tokens: Run) -> TokenTargets:
    """The targets of a full run."""
    with recording(bound.blocks, slice(-1, None), "zyt") as states:
        logits = run(bound.model, tokens)[0]
    return TokenTargets(tokens, bound.weights, logits, tuple(states))

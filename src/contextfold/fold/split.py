"""Which tokens run, at which positions, with the context and without it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from contextfold.anatomy import Bound
from contextfold.errors import InputError
from contextfold.runtime import Run, takes_positions

__all__ = ["SINK", "Positions", "Spans", "Split", "digest", "split"]

Spans = Sequence[tuple[int, int]]
"""Half-open ranges of token indices of the context."""

SINK: Spans = ((0, 1),)
"""The first token of the sequence. Attention rests on it whatever it is, so it is kept by default."""

Positions = Literal["absolute", "renumbered"]
"""Whether kept tokens keep the positions that they had, or count from 0. Models that take none always count."""


@dataclass(frozen=True, eq=False)
class Split:
    """A sequence with its context, and the same without the dropped part."""

    full: Run
    reduced: Run
    sink: int | None
    """Row of the sink in the reduced run, or None when it was dropped (or is the query itself)."""

    @property
    def dropped(self) -> int:
        """Number of context tokens that the reduced run lacks."""
        return self.full.ids.numel() - self.reduced.ids.numel()


def split(bound: Bound, context: Tensor, query: Tensor, keep: Spans = SINK, positions: Positions = "absolute") -> Split:
    """Lay out the full and the reduced run of `context (c,)` followed by `query (n,)`, both int64 token ids.

    Raises `InputError` for empty or misshapen ids, ids outside the vocabulary, spans outside the context, a
    sequence longer than the model's position table, or an unknown position policy.
    """
    context, query = _ids(bound, "context", context), _ids(bound, "query", query)
    if positions not in ("absolute", "renumbered"):
        raise InputError(f"positions {positions!r} is unknown; choose 'absolute' or 'renumbered'")
    total = context.numel() + query.numel()
    if bound.max_positions is not None and total > bound.max_positions:
        raise InputError(f"{total} tokens, but the model has {bound.max_positions} positions; shorten the context")
    kept = torch.zeros(total, dtype=torch.bool)
    kept[context.numel() :] = True
    for start, stop in keep:
        if not 0 <= start < stop <= context.numel():
            raise InputError(f"kept span {start}:{stop} is not inside the context of {context.numel()} tokens")
        kept[start:stop] = True
    if bool(kept.all()):
        raise InputError("every token of the context is kept, so there is nothing to fold")
    ids, index = torch.cat([context, query]), torch.arange(total)
    rows = index[kept]
    # Recurrent models and models that count tokens themselves (ALiBi) take no positions, so they renumber.
    absolute = positions == "absolute" and takes_positions(bound.model)
    reduced = rows if absolute else torch.arange(rows.numel())
    sink = 0 if bool(kept[0]) and rows.numel() > 1 else None
    return Split(Run(ids, index), Run(ids[kept], reduced), sink)


def _ids(bound: Bound, name: str, ids: Tensor) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        met = f"{tuple(ids.shape)} of {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        raise InputError(f"{name} must be token ids, a 1-D integer tensor; met {met}")
    if ids.numel() == 0:
        raise InputError(f"the {name} is empty; give at least one token")
    if int(ids.min()) < 0 or int(ids.max()) >= bound.vocabulary:
        raise InputError(f"{name} has token ids outside 0..{bound.vocabulary - 1}; was another tokenizer used?")
    return ids.to("cpu", torch.int64)


def digest(tokens: Run) -> str:
    """SHA-256 of token ids and positions."""
    both = torch.stack([tokens.ids, tokens.positions]).to(torch.int64).contiguous()
    return hashlib.sha256(both.numpy().tobytes()).hexdigest()

"""One static patch that is exact at every kept position of a known sequence at once (equation sheet, section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from contextfold.anatomy import Bound, DenseBlock, bind
from contextfold.errors import InputError, UnsupportedModel
from contextfold.fold.header import header_of
from contextfold.fold.rows import RowsFold, SequenceLayer
from contextfold.fold.split import SINK, Positions, Spans, Split, split
from contextfold.patch import Patch
from contextfold.rules import JointPostNorm, OutputAlone
from contextfold.runtime import Action, Written, recording, run

__all__ = ["FoldedSequence", "fold_sequence"]


@dataclass(frozen=True, eq=False)
class FoldedSequence:
    """A patch, the in-context logits it was aimed at, and a report per layer."""

    patch: Patch
    split: Split
    in_context: Tensor
    """`(n, V)`: in-context logits at the query positions."""
    layers: tuple[SequenceLayer, ...]


def fold_sequence(
    model: Bound | nn.Module,
    context: Tensor,
    query: Tensor,
    *,
    keep: Spans = SINK,
    at: Sequence[int] | None = None,
    typical: Tensor | None = None,
    strict: bool = False,
    positions: Positions = "absolute",
    written: bool = True,
) -> FoldedSequence:
    """One fixed patch under which the query, without the dropped context, gives at every position what it gave with it.

    Each block's output map (and, through a norm after it, the scale) is edited once, for all positions together, while
    one forward of the reduced run passes through it. The inner maps are left alone. Exact for as many positions as
    the maps' inputs are independent; what remains is measured and reported per layer, and taken up by the layers above.

    Arguments:
        model: a bound model, or a transformers model, which is then bound and proven first.
        context: token ids `(c,)`, with BOS where the model wants one.
        query: token ids `(n,)` that follow it.
        keep: spans of the context that stay, by default the sink.
        at: indices into the query that must be exact; None for every kept token. The sink is always among them.
        typical: token ids `(t,)` of text that the patch should disturb least (the whitened form); None for the edit
            that is smallest in Frobenius norm.
        strict: refuse layers that cannot be met exactly instead of reporting them.
        positions: `absolute` (kept tokens keep theirs) or `renumbered`.
        written: measure on written weights, rounded to their dtype; False measures the low-rank action.

    Raises `InputError`, `UnsupportedModel`, and `NotControllable` (under `strict` also for inexact layers).
    """
    bound = model if isinstance(model, Bound) else bind(model)
    blocks = _dense(bound)
    parts = split(bound, context, query, keep, positions)
    rows = _rows(parts, query.numel(), at)
    full_rows = _in_full(parts, context.numel(), query.numel(), keep)[rows].tolist()
    with recording(bound.blocks, full_rows, "t") as wanted:
        in_context = run(bound.model, parts.full, last=query.numel())
    usual = _typical_inputs(bound, blocks, typical)
    folds = [
        RowsFold(block, state["t"], rows, usual[i] if usual else None, strict)
        for i, (block, state) in enumerate(zip(blocks, wanted, strict=True))
    ]
    overlay = (Written if written else Action)(bound.model, [site for fold in folds for site in fold.sites])
    with ExitStack() as stack:
        for fold in folds:
            fold.listen(stack, overlay)
        with overlay:
            run(bound.model, parts.reduced)
    plan = (JointPostNorm.name if blocks[0].norm_post is not None else OutputAlone.name,)
    exact = tuple(parts.reduced.positions[rows].tolist())
    patch = Patch(header_of(bound, parts, "sequence", exact, plan, written), overlay.edits)
    return FoldedSequence(patch, parts, in_context, tuple(fold.report() for fold in folds))


def _dense(bound: Bound) -> tuple[DenseBlock, ...]:
    """Several positions use several experts, each with its own share: that is another system of equations."""
    blocks = tuple(block for block in bound.blocks if isinstance(block, DenseBlock))
    if len(blocks) != len(bound.blocks):
        first = next(block for block in bound.blocks if not isinstance(block, DenseBlock))
        raise UnsupportedModel(
            f"{first.name} is a mixture of experts; one patch for several positions is for dense blocks only. "
            "Fold one token at a time with fold_token"
        )
    return blocks


def _rows(parts: Split, n: int, at: Sequence[int] | None) -> Tensor:
    """Rows of the reduced run that must be exact."""
    total = parts.reduced.ids.numel()
    if at is None:
        return torch.arange(total)
    chosen = sorted(set(at))
    if not chosen or chosen[0] < 0 or chosen[-1] >= n:
        raise InputError(f"positions {list(at)} are not indices into the query of {n} tokens")
    sink = [] if parts.sink is None else [parts.sink]
    return torch.tensor([*sink, *(total - n + i for i in chosen)])


def _in_full(parts: Split, c: int, n: int, keep: Spans) -> Tensor:
    """Row of the full run at which each row of the reduced run stood."""
    kept = torch.zeros(c + n, dtype=torch.bool)
    kept[c:] = True
    for start, stop in keep:
        kept[start:stop] = True
    return torch.arange(c + n)[kept]


def _typical_inputs(bound: Bound, blocks: Sequence[DenseBlock], typical: Tensor | None) -> list[Tensor] | None:
    """What every output map reads on typical text: `(t, f)` per block."""
    if typical is None:
        return None
    tokens = split(bound, typical[:1], typical[1:], keep=()).full
    with recording(bound.blocks, slice(1, None), "h") as states:
        run(bound.model, tokens)
    return [state["h"] for state in states]

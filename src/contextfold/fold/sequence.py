"""One static patch that is exact at every kept position of a known sequence at once (equation sheet, section 5)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from contextfold.anatomy import Bound, bind
from contextfold.errors import InputError
from contextfold.fold.header import header_of
from contextfold.fold.lengths import FREE, halving_loss
from contextfold.fold.rows import RowsFold, SequenceLayer, Targets
from contextfold.fold.rowsites import PatchSites, rows_fold, rows_kind
from contextfold.fold.split import SINK, Positions, Spans, Split, split
from contextfold.patch import Edit, Patch, Site
from contextfold.runtime import Action, BlockState, Written, before, recording, run

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
    sites: PatchSites = "output",
    typical: Tensor | None = None,
    strict: bool = False,
    positions: Positions = "absolute",
    written: bool = True,
    progress: Callable[[SequenceLayer], None] = lambda layer: None,
) -> FoldedSequence:
    """One fixed patch under which the query, without the dropped context, gives at every position what it gave with it.

    Each block's output map (and, through a norm after it, the scale) is edited once, for all positions together, while
    one forward of the reduced run passes through it. Exact for as many positions as what the maps read is independent;
    what remains is measured and reported per layer, and taken up by the layers above. Of a mixture of experts, the
    experts that the reduced run selects are edited, and the router is not.

    Arguments:
        model: a bound model, or a transformers model, which is then bound and proven first.
        context: token ids `(c,)`, with BOS where the model wants one.
        query: token ids `(n,)` that follow it.
        keep: spans of the context that stay, by default the sink.
        at: indices into the query that must be exact; None for every kept token. The sink is always among them.
        sites: `output`, the MLP's output maps; `all`, its input maps too, so that the activations inside it are those
            with the context as well; `attention`, the attention output maps, and the MLPs are left alone.
        typical: token ids `(t,)` of text that the patch should disturb least (the whitened form); None for the edit
            that is smallest in Frobenius norm.
        strict: refuse layers that cannot be met exactly instead of reporting them.
        positions: `absolute` (kept tokens keep theirs) or `renumbered`.
        written: measure on written weights, rounded to their dtype; False measures the low-rank action.
        progress: called with each layer when it is done.

    Raises `InputError`, `UnsupportedModel` (also for sites that a block lacks), and `NotControllable` (under `strict`
    also for inexact layers).
    """
    bound = model if isinstance(model, Bound) else bind(model)
    letters = "".join(sorted({letter for block in bound.blocks for letter in rows_kind(block, sites).letters}))
    parts = split(bound, context, query, keep, positions)
    rows = _rows(parts, query.numel(), at)
    full_rows = _in_full(parts, context.numel(), query.numel(), keep)[rows].tolist()
    with recording(bound.blocks, full_rows, letters) as wanted:
        in_context = run(bound.model, parts.full, last=query.numel())
    run_of = _Solving(bound, parts, wanted, rows, sites, typical, strict, written, progress)
    folds, edits = run_of(free=True)
    if folds[-1].report().length_change_max > 0 and halving_loss(bound, parts.full) > FREE:
        folds, edits = run_of(free=False)
    plan = tuple(dict.fromkeys(name for fold in folds for name in fold.plan))
    exact = tuple(parts.reduced.positions[rows].tolist())
    patch = Patch(header_of(bound, parts, "sequence", exact, plan, written), edits)
    return FoldedSequence(patch, parts, in_context, tuple(fold.report() for fold in folds))


@dataclass(frozen=True, eq=False)
class _Solving:
    """The reduced run, in which every block is solved while the forward passes through it."""

    bound: Bound
    parts: Split
    wanted: Sequence[BlockState]
    rows: Tensor
    sites: PatchSites
    typical: Tensor | None
    strict: bool
    written: bool
    progress: Callable[[SequenceLayer], None]

    def __call__(self, free: bool) -> tuple[list[RowsFold], Mapping[Site, Edit]]:
        """Solvers and edits; `free`: that the lengths of the last block's finished sums may be used."""
        blocks, model = self.bound.blocks, self.bound.model
        folds = [
            rows_fold(
                self.bound, block, self.sites,
                Targets(state, self.rows, self.strict, free and block is blocks[-1], self.progress),
            )
            for block, state in zip(blocks, self.wanted, strict=True)
        ]  # fmt: skip
        if self.typical is not None:
            _look_at_typical(self.bound, folds, self.typical)
        overlay = (Written if self.written else Action)(model, [site for fold in folds for site in fold.sites])
        with ExitStack() as stack:
            for fold in folds:
                fold.listen(stack, overlay)
            with overlay:
                run(model, self.parts.reduced)
        return folds, overlay.edits


def _rows(parts: Split, n: int, at: Sequence[int] | None) -> Tensor:
    """Rows of the reduced run that must be exact, counted from its end: a model may put tokens of its own in front."""
    total = parts.reduced.ids.numel()
    if at is None:
        return torch.arange(total) - total
    chosen = sorted(set(at))
    if not chosen or chosen[0] < 0 or chosen[-1] >= n:
        raise InputError(f"positions {list(at)} are not indices into the query of {n} tokens")
    sink = [] if parts.sink is None else [parts.sink]
    return torch.tensor([*sink, *(total - n + i for i in chosen)]) - total


def _in_full(parts: Split, c: int, n: int, keep: Spans) -> Tensor:
    """Row of the full run, counted from its end, at which each row of the reduced run stood."""
    kept = torch.zeros(c + n, dtype=torch.bool)
    kept[c:] = True
    for start, stop in keep:
        kept[start:stop] = True
    return torch.arange(c + n)[kept] - (c + n)


def _look_at_typical(bound: Bound, folds: Sequence[RowsFold], typical: Tensor) -> None:
    """Let every solver see what its maps read on typical text, in one forward."""
    tokens = split(bound, typical[:1], typical[1:], keep=()).full
    with ExitStack() as stack:
        for fold in folds:
            for letter, module in fold.readers.items():
                stack.callback(before(module, partial(fold.see_usual, letter)).remove)
        run(bound.model, tokens)

"""One static patch that is exact at every kept position of a known sequence at once (equation sheet, section 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from contextfold.anatomy import Bound, bind
from contextfold.errors import InputError
from contextfold.fold.header import header_of
from contextfold.fold.instep import Job, solve_in_step
from contextfold.fold.kept import SolvedLayer
from contextfold.fold.lengths import FREE, halving_loss
from contextfold.fold.rows import SequenceLayer
from contextfold.fold.rowsites import PatchSites, rows_kind
from contextfold.fold.split import SINK, Positions, Spans, Split, digest, split
from contextfold.notebook import card, short
from contextfold.patch import Patch
from contextfold.runtime import Run
from contextfold.store import Store, key_of

__all__ = ["FoldedSequence", "fold_sequence"]


@dataclass(frozen=True, eq=False)
class FoldedSequence:
    """A patch, the in-context logits it was aimed at, and a report per layer."""

    patch: Patch
    split: Split
    in_context: Tensor
    """`(n, V)`: in-context logits at the query positions."""
    layers: tuple[SequenceLayer, ...]

    def _repr_html_(self) -> str:
        """The patch and how every layer was met, for a notebook."""
        rows = [
            (str(r.layer), str(r.rank), short(r.relative_error), short(r.weight_ratio), r.outcome) for r in self.layers
        ]
        worst = max((r.relative_error for r in self.layers), default=float("nan"))
        sentence = f"Every layer is met within {worst:.1g}, relative; a verdict proves the whole."
        return card(repr(self.patch), sentence, ("layer", "rank", "error", "‖dW‖/‖W‖", "outcome"), rows)


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
    store: Path | None = None,
    progress: Callable[[SequenceLayer], None] = lambda layer: None,
) -> FoldedSequence:
    """One fixed patch under which the query, without the dropped context, gives at every position what it gave with it.

    Each block's output map (and, through a norm after it, the scale) is edited once, for all positions together, while
    one forward of the reduced run passes through it, and the one that has the context is a block ahead. Exact for as
    many positions as what the maps read is independent; what remains is measured and reported per layer, and taken up
    by the layers above. Of a mixture of experts, the experts that the reduced run selects are edited, and the router is
    not.

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
        store: a folder in which solved layers are kept, so that a fold that was stopped goes on where it was, with the
            same bits. They stay there until `contextfold.store.clear(folder)`, for when the patch is safe; those of
            another fold are not used.
        progress: called with each layer when it is done, and with those that were kept before anything runs.

    The memory that it takes besides its result is that of one block, and of the forwards (`docs/numerics.md`).

    Raises `InputError`, `UnsupportedModel` (also for sites that a block lacks), and `NotControllable` (under `strict`
    also for inexact layers).
    """
    bound = model if isinstance(model, Bound) else bind(model)
    kinds = [rows_kind(block, sites, typical is not None) for block in bound.blocks]
    parts = split(bound, context, query, keep, positions)
    rows = _rows(parts, query.numel(), at)
    job = Job(
        bound, parts.full, parts.reduced, None if typical is None else _alone(bound, typical), rows,
        _in_full(parts, context.numel(), query.numel(), keep)[rows].tolist(), query.numel(),
        "".join(sorted({letter for kind in kinds for letter in kind.letters})), sites, strict, written,
    )  # fmt: skip
    kept = None if store is None else Store(store, _key(job))
    known = _known(bound, kept)
    for layer in known.values():
        progress(layer.layer)

    def solved(layer: SolvedLayer) -> None:
        if kept is not None:
            layer.keep(kept)
        progress(layer.layer)

    layers, in_context = solve_in_step(job, known, True, solved)
    if layers[-1].layer.length_change_max > 0 and halving_loss(bound, parts.full) > FREE:
        below = {layer.layer.layer: layer for layer in layers[:-1]}
        layers, in_context = solve_in_step(job, below, False, lambda layer: None)
    plan = tuple(dict.fromkeys(name for layer in layers for name in layer.plan))
    exact = tuple(parts.reduced.positions[rows].tolist())
    edits = {site: edit for layer in layers for site, edit in layer.edits.items()}
    patch = Patch(header_of(bound, parts, "sequence", exact, plan, written), edits)
    return FoldedSequence(patch, parts, in_context, tuple(layer.layer for layer in layers))


def _known(bound: Bound, kept: Store | None) -> dict[int, SolvedLayer]:
    """Blocks that were solved before, by their index."""
    if kept is None:
        return {}
    found = ((block.index, SolvedLayer.kept(kept, block.index, block.anchor.device)) for block in bound.blocks)
    return {index: layer for index, layer in found if layer is not None}


def _key(job: Job) -> str:
    """Of everything that the edits depend on."""
    typical = None if job.typical is None else digest(job.typical)
    return key_of(
        job.bound, "sequence", digest(job.full), digest(job.reduced), job.rows.tolist(), job.sites, typical,
        job.strict, job.written,
    )  # fmt: skip


def _alone(bound: Bound, text: Tensor) -> Run:
    """A text on its own, checked as contexts are."""
    return split(bound, text[:1], text[1:], keep=()).full


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

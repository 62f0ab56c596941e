"""The proof of one step: weights written, the unmodified model, one sequence, only the kept tokens in its cache.

Each map's edited weight is stored when the map runs (`InTurn`): the same forward, bit for bit, as with all of them
stored at once, without a second copy of the model's maps in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contextfold.anatomy import Bound
from contextfold.fold import LayerReport, digest
from contextfold.fold.block import BlockFold
from contextfold.header import receipt
from contextfold.patch import Edit, Patch, ScaleEdit, Site
from contextfold.rules import InputWeight, OutputWeight, PostNorm, Reference
from contextfold.runtime import BlockState, InTurn, Run
from contextfold.stepwise.cache import KeptCache
from contextfold.stepwise.pair import forward
from contextfold.stepwise.window import Batch
from contextfold.verify import Comparison, compare

__all__ = ["Proof", "Rules", "prove"]

Rules = tuple[Reference, Reference | None]
"""Member of the post-norm class, and the one where it is undefined."""


@dataclass(frozen=True, eq=False)
class Proof:
    """The patch of one step, and what the model with the patch written into its weights gave."""

    written: Comparison
    """Unmodified forward over the written weights, against the first row."""
    unpatched: Comparison
    """The same forward without the patch."""
    size: float
    """Of the in-context logits: how far the largest stands from their mean."""
    layers: tuple[LayerReport, ...]
    edits: Mapping[Site, Edit]
    seen: Run
    """The kept tokens and the current one, at their positions."""
    full: Run
    """Everything up to the current token."""
    rules: Rules

    @property
    def worst_layer(self) -> LayerReport:
        return max(self.layers, key=lambda layer: layer.relative_error)

    @property
    def max_abs_dm(self) -> float:
        return max((layer.max_abs_dm for layer in self.layers), default=0.0)

    def patch(self, bound: Bound) -> Patch:
        """The edits with a header. Exact at the current token, given the keys and values that the kept tokens had
        when they were current; with nothing kept, given nothing (kind `token`)."""
        through = f"{PostNorm.name}: {self.rules[0].name}"
        normed = any(isinstance(edit, ScaleEdit) for edit in self.edits.values())
        header = receipt(
            bound,
            "token" if self.seen.ids.numel() == 1 else "step",
            (InputWeight.name, through if normed else OutputWeight.name),
            materialised=True,
            positions=tuple(self.seen.positions.tolist()),
            exact_at=(int(self.seen.positions[-1]),),
            tokens_digest=digest(self.seen),
            context_digest=digest(self.full),
        )
        return Patch(header, self.edits)


@dataclass(frozen=True, eq=False)
class _Alone:
    """The model on the kept tokens of one sequence and nothing else, in a batch of one."""

    bound: Bound
    seen: Run
    kept: KeptCache

    def logits(self) -> Tensor:
        """`(V,)`, from an ordinary forward of the current token over a cache made afresh."""
        logits: Tensor = self.run(last=1).logits[0, -1]
        return logits

    def run(self, last: int) -> Any:
        mask = torch.ones(1, self.seen.ids.numel())
        ids, positions = self.seen.ids[None, -1:], self.seen.positions[None, -1:]
        return forward(self.bound.model, ids, mask, positions, self.kept.fresh(), last)


def prove(
    bound: Bound,
    batch: Batch,
    row: int,
    kept: KeptCache,
    wanted: Sequence[BlockState],
    in_context: Tensor,
    rules: Rules,
) -> tuple[Proof, Tensor]:
    """Solve the patch of the current token on written weights, then run the unmodified model with them.

    Returns the proof and the logits `(V,)` of that run. Raises `NotControllable` where no exact edit exists. The
    weights come back bit for bit.
    """
    columns, now = batch.columns(row), torch.tensor([batch.ids.shape[1] - 1])
    positions = batch.positions[row]
    index, real = torch.cat([columns, now]), batch.real[row]
    seen = Run(batch.ids[row, index], positions[index])
    alone = _Alone(bound, seen, kept)
    without = alone.logits()
    sizes = bound.weights.sizes
    folds = [
        BlockFold(bound.model, block, state, None, rules, sizes)
        for block, state in zip(bound.blocks, wanted, strict=True)
    ]
    overlay = InTurn(bound.model, [site for block in bound.blocks for site in block.sites])
    with ExitStack() as hooks:
        for fold in folds:
            fold.listen(hooks, overlay)
        with overlay:
            alone.run(last=0)
            hooks.close()
            # No hook is left that sees an activation. Those of the overlay store the edited weight of a map before it
            # runs and the original after it: nothing but stored weights tells this model from the one that was loaded.
            logits = alone.logits()
    proof = Proof(
        written=compare(in_context, logits),
        unpatched=compare(in_context, without),
        size=float((in_context.double() - in_context.double().mean()).abs().max()),
        layers=tuple(fold.report() for fold in folds),
        edits=overlay.edits,
        seen=seen,
        full=Run(batch.ids[row, real], positions[real]),
        rules=rules,
    )
    return proof, logits

"""How exact one static patch is for a sequence, on any model type: used by the tests and by `scripts/sequences.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import zoo
from conformance import CONTEXT, EXACT, FLOAT32_INSIDE, computes_in_float32, default_dtype, gap, tokens
from contextfold.anatomy import bind
from contextfold.fold import FoldedSequence, fold_sequence
from contextfold.runtime import materialised, run

POSITIONS = (1, 4, 16)


@dataclass(frozen=True)
class SequenceGap:
    """Distance of the patched logits from those in context, written weights, over all query positions together."""

    ratio: float
    """As a fraction of the unpatched distance."""
    unpatched: float
    """Relative to the in-context logits."""
    limit: float
    outcomes: tuple[str, ...]
    """What the layers met besides exactness."""

    @property
    def exact(self) -> bool:
        return self.ratio <= self.limit


def measure_sequences(model_type: str, counts: tuple[int, ...] = POSITIONS) -> dict[int, SequenceGap]:
    """Float64, one tiny model, one patch for each number of positions."""
    model = zoo.build(model_type)
    with default_dtype(torch.float64 if model_type == "xglm" else torch.float32):
        bound = bind(model)
        context = tokens(model, CONTEXT, 3)
        found = {}
        for n in counts:
            folded = fold_sequence(bound, context, tokens(model, n, 103))
            found[n] = _measured(model, folded, n)
    return found


def _measured(model: torch.nn.Module, folded: FoldedSequence, n: int) -> SequenceGap:
    reduced, wanted = folded.split.reduced, folded.in_context
    unpatched = gap(run(model, reduced, last=n), wanted)
    with materialised(model, folded.patch):
        met = gap(run(model, reduced, last=n), wanted)
    limit = FLOAT32_INSIDE if computes_in_float32(model, reduced.ids) else EXACT
    outcomes = sorted({f.outcome.label for layer in folded.layers for f in layer.findings})
    return SequenceGap(met / unpatched, unpatched, limit, tuple(outcomes))

"""Exact patches: which edits, solved in which order."""

from contextfold.fold.block import LayerReport
from contextfold.fold.rows import SequenceLayer
from contextfold.fold.rowsites import SITES, PatchSites, sites_of
from contextfold.fold.sequence import FoldedSequence, fold_sequence
from contextfold.fold.split import SINK, Positions, Spans, Split, digest, split
from contextfold.fold.targets import TokenTargets, token_targets
from contextfold.fold.token import DEFAULT_RULE, Folded, fold_token, reference

__all__ = [
    "DEFAULT_RULE",
    "SINK",
    "SITES",
    "Folded",
    "FoldedSequence",
    "LayerReport",
    "PatchSites",
    "Positions",
    "SequenceLayer",
    "Spans",
    "Split",
    "TokenTargets",
    "digest",
    "fold_sequence",
    "fold_token",
    "reference",
    "sites_of",
    "split",
    "token_targets",
]

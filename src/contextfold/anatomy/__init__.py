"""Where the letters live. An anatomy sees a model and never a rule."""

from contextfold.anatomy.bind import Bound, Weights, family_of, weights_digest
from contextfold.anatomy.block import (
    Block,
    DenseBlock,
    ExpertBlock,
    LinearMap,
    Norm,
    Reading,
    first_output,
    first_tensor,
    rows,
)
from contextfold.anatomy.experts import Call, Observation, observe, split_columns
from contextfold.anatomy.families import FAMILIES
from contextfold.anatomy.layer import norm_at
from contextfold.anatomy.probe import bind
from contextfold.anatomy.record import Dense, Experts, Family, Mixer, Sites, Tap, Wiring
from contextfold.anatomy.refused import REFUSED

__all__ = [
    "FAMILIES",
    "REFUSED",
    "Block",
    "Bound",
    "Call",
    "Dense",
    "DenseBlock",
    "ExpertBlock",
    "Experts",
    "Family",
    "LinearMap",
    "Mixer",
    "Norm",
    "Observation",
    "Reading",
    "Sites",
    "Tap",
    "Weights",
    "Wiring",
    "bind",
    "family_of",
    "first_output",
    "first_tensor",
    "norm_at",
    "observe",
    "rows",
    "split_columns",
    "weights_digest",
]

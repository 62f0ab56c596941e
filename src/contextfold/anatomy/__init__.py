"""Where the letters live. An anatomy sees a model and never a rule."""

from contextfold.anatomy.bind import Block, Bound, LinearMap, Norm, family_of, weights_digest
from contextfold.anatomy.families import FAMILIES
from contextfold.anatomy.probe import bind, first_output, first_tensor
from contextfold.anatomy.record import Family, Sites

__all__ = [
    "FAMILIES",
    "Block",
    "Bound",
    "Family",
    "LinearMap",
    "Norm",
    "Sites",
    "bind",
    "family_of",
    "first_output",
    "first_tensor",
    "weights_digest",
]

"""The known families. A new one of a known form is one record and one line here, or in the tuple of its file."""

from __future__ import annotations

from contextfold.anatomy.families.classic import CLASSIC
from contextfold.anatomy.families.mixers import MIXERS
from contextfold.anatomy.families.mixtures import MIXTURES
from contextfold.anatomy.families.modern import MODERN
from contextfold.anatomy.record import Family

__all__ = ["FAMILIES"]

FAMILIES: tuple[Family, ...] = (*MODERN, *CLASSIC, *MIXTURES, *MIXERS)

"""Reusable patches: a context learnt from questions and answers, in closed form, layer by layer."""

from contextfold.bake.door import EMPHASIS, LAM0, TOL, Baked, bake, places
from contextfold.bake.estimators import ESTIMATORS, Estimator, estimator
from contextfold.bake.examples import Example, Frame, answered, digest_of
from contextfold.bake.joint import joints_of
from contextfold.bake.kept import BakedSite
from contextfold.bake.prefix import Prefix, padded
from contextfold.bake.solve import GRID

__all__ = [
    "EMPHASIS",
    "ESTIMATORS",
    "GRID",
    "LAM0",
    "TOL",
    "Baked",
    "BakedSite",
    "Estimator",
    "Example",
    "Frame",
    "Prefix",
    "answered",
    "bake",
    "digest_of",
    "estimator",
    "joints_of",
    "padded",
    "places",
]

"""When a block can absorb a context: stages, what each can steer, and the one rule by which that composes.

It is the working form of section 5 of arXiv 2511.17864 (definitions 3 and 4, theorem 5 and the lemmas on components).
"""

from contextfold.calculus.capacity import ALWAYS, NEVER, Capacity, Demand, Kind, Verdict
from contextfold.calculus.compose import Answer, Path, Reason, Step, Way, answer, givens
from contextfold.calculus.expression import Chain, Expression, Given, Passage, Product, Stage, Sum
from contextfold.calculus.plan import Plan, Service, plan
from contextfold.calculus.render import definitions, formula
from contextfold.calculus.stages import (
    Affine,
    Bias,
    ExpertOutputs,
    Experts,
    Mark,
    Multiplier,
    Normalise,
    Pointwise,
    Scale,
    Skip,
)

__all__ = [
    "ALWAYS",
    "NEVER",
    "Affine",
    "Answer",
    "Bias",
    "Capacity",
    "Chain",
    "Demand",
    "ExpertOutputs",
    "Experts",
    "Expression",
    "Given",
    "Kind",
    "Mark",
    "Multiplier",
    "Normalise",
    "Passage",
    "Path",
    "Plan",
    "Pointwise",
    "Product",
    "Reason",
    "Scale",
    "Service",
    "Skip",
    "Stage",
    "Step",
    "Sum",
    "Verdict",
    "Way",
    "answer",
    "definitions",
    "formula",
    "givens",
    "plan",
]

"""One class per constructive proof. A rule sees tensors and never a model."""

from contextfold.rules.base import UpdateRule
from contextfold.rules.choice import RULES, Choice, choose, rule_named, rules_for
from contextfold.rules.elementwise import InputScale, OutputScale, ScaleSolution
from contextfold.rules.experts import (
    Active,
    EvenShare,
    ExpertInput,
    ExpertsSolution,
    LeastNorm,
    OutputOnly,
    SharedExpert,
    flips,
    ties,
)
from contextfold.rules.joint import JointPostNorm, JointScale, joint_scale
from contextfold.rules.linear import (
    AttentionOutput,
    InputWeight,
    OutputAlone,
    OutputWeight,
    ParallelOutput,
    Steering,
    WeightSolution,
)
from contextfold.rules.postnorm import (
    REFERENCES,
    PostNorm,
    PostNormBias,
    PostNormSolution,
    Reference,
    refit_scale,
)
from contextfold.rules.reach import nearest_reachable
from contextfold.rules.shift import BiasSolution, InputBias, OutputBias

__all__ = [
    "REFERENCES",
    "RULES",
    "Active",
    "AttentionOutput",
    "BiasSolution",
    "Choice",
    "EvenShare",
    "ExpertInput",
    "ExpertsSolution",
    "InputBias",
    "InputScale",
    "InputWeight",
    "JointPostNorm",
    "JointScale",
    "LeastNorm",
    "OutputAlone",
    "OutputBias",
    "OutputOnly",
    "OutputScale",
    "OutputWeight",
    "ParallelOutput",
    "PostNorm",
    "PostNormBias",
    "PostNormSolution",
    "Reference",
    "ScaleSolution",
    "SharedExpert",
    "Steering",
    "UpdateRule",
    "WeightSolution",
    "choose",
    "flips",
    "joint_scale",
    "nearest_reachable",
    "refit_scale",
    "rule_named",
    "rules_for",
    "ties",
]

"""Whether it is true: metrics, negative controls, verdicts."""

from contextfold.verify.controls import negative_controls, random_like, shuffled
from contextfold.verify.metrics import Comparison, compare
from contextfold.verify.reusable import Effect, Recovery, ReusableVerdict, Scorer, Spoken, evaluate
from contextfold.verify.sequence import FOLDS, SequenceVerdict, fold_and_prove_sequence, verify_sequence_patch
from contextfold.verify.step import Step, prove_patch, prove_token, rounding_noise
from contextfold.verify.suite import Prompt, Settings, continuation, fold_and_prove, verify_patch, verify_prompts
from contextfold.verify.verdict import Verdict

__all__ = [
    "FOLDS",
    "Comparison",
    "Effect",
    "Prompt",
    "Recovery",
    "ReusableVerdict",
    "Scorer",
    "SequenceVerdict",
    "Settings",
    "Spoken",
    "Step",
    "Verdict",
    "compare",
    "continuation",
    "evaluate",
    "fold_and_prove",
    "fold_and_prove_sequence",
    "negative_controls",
    "prove_patch",
    "prove_token",
    "random_like",
    "rounding_noise",
    "shuffled",
    "verify_patch",
    "verify_prompts",
    "verify_sequence_patch",
]

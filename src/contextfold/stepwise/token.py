"""What one step of generation gave."""

from __future__ import annotations

from dataclasses import dataclass

from contextfold.stepwise.proof import Proof

__all__ = ["Token"]


@dataclass(frozen=True)
class Token:
    """One token of one sequence. Ids are what each model chooses; gaps and margins are in logits."""

    sequence: int
    """Which of the prompts."""
    index: int
    """Counted from the end of the prompt."""
    position: int
    """Of the token that was current when this one was chosen."""
    in_context: int
    patched: int
    """By the written weights at proven steps, by the patched row elsewhere."""
    chosen: int
    """Which of the two the history goes on with."""
    logit_gap: float
    """Largest difference of the two rows' logits. The second row is right by construction up to rounding, so this
    says how much rounding there is, and proves nothing."""
    margin: float
    """By how many logits the in-context model prefers its own token to the patched one's; 0 when they agree."""
    proof: Proof | None

    @property
    def match(self) -> bool:
        return self.in_context == self.patched

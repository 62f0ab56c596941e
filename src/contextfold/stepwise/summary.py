"""Tokens -> figures: what agreed, what was proven, and how far off the worst was."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

import torch

from contextfold.files import plain
from contextfold.notebook import card, short
from contextfold.stepwise.proof import Proof
from contextfold.stepwise.token import Token
from contextfold.verify.verdict import EXACT

__all__ = ["Summary"]

FACTOR = 10.0
"""The model without the patch must miss by at least this many times the worst proven gap."""


@dataclass(frozen=True)
class Summary:
    """What a generation showed. Gaps and margins are in logits, divergences in nats."""

    tokens: tuple[Token, ...]
    dtype: torch.dtype

    @property
    def proofs(self) -> list[Proof]:
        return [token.proof for token in self.tokens if token.proof is not None]

    @property
    def matches(self) -> int:
        return sum(token.match for token in self.tokens)

    @property
    def worst_proven_gap(self) -> float:
        return max((proof.written.logit_gap for proof in self.proofs), default=float("nan"))

    @property
    def worst_action_gap(self) -> float:
        return max(token.logit_gap for token in self.tokens)

    @property
    def unpatched_gap(self) -> float:
        """Median over the proven steps."""
        return statistics.median([proof.unpatched.logit_gap for proof in self.proofs] or [float("nan")])

    @property
    def limit(self) -> float:
        """Largest gap that still counts as exact in this dtype.

        A fraction of the size of the logits. What the patch changes is no measure here: kept tokens carry the context
        in their keys and values, so late in an answer it may be little.
        """
        return EXACT[self.dtype] * statistics.median([proof.size for proof in self.proofs] or [float("nan")])

    def reasons(self) -> list[str]:
        """Why it does not hold; empty when it does. A mismatch within the limit is a near-tie, not a failure."""
        found = []
        if not self.unpatched_gap > FACTOR * self.worst_proven_gap:
            found.append("without the patch the gap is no larger, so nothing was put to the test")
        elif not self.worst_proven_gap <= self.limit:
            found.append(f"the worst proven gap {self.worst_proven_gap:.3g} exceeds {self.limit:.3g}")
        real = [token for token in self.tokens if not token.match and not token.margin <= 2 * self.limit]
        if real:
            found.append(f"{len(real)} tokens differ by more than rounding")
        return found

    @property
    def holds(self) -> bool:
        return not self.reasons()

    def sentence(self) -> str:
        """The result in words."""
        numbers = (
            f"{self.matches} of {len(self.tokens)} tokens agree; {len(self.proofs)} steps proven on written weights, "
            f"worst gap {self.worst_proven_gap:.2g} ({self.unpatched_gap:.3g} without the patch); "
            f"at most {self.worst_action_gap:.2g} between the two rows at any step"
        )
        return f"Holds: {numbers}." if self.holds else f"Does not hold: {numbers}; " + "; ".join(self.reasons()) + "."

    def _repr_html_(self) -> str:
        """The figures, for a notebook."""
        rows = [
            ("tokens that agree", f"{self.matches} / {len(self.tokens)}"),
            ("steps proven on written weights", str(len(self.proofs))),
            ("worst gap of these", short(self.worst_proven_gap)),
            ("without the patch (control), median", short(self.unpatched_gap)),
            ("between the two rows, at most", short(self.worst_action_gap)),
        ]
        return card("generation, folded at every step", self.sentence(), ("", ""), rows, self.holds)

    def to_json(self) -> dict[str, Any]:
        """Stable keys; documented in `docs/json.md`."""
        proofs = self.proofs
        worst = max(proofs, key=lambda proof: proof.worst_layer.relative_error) if proofs else None
        found = {
            "holds": self.holds,
            "verdict": self.sentence(),
            "dtype": str(self.dtype).removeprefix("torch."),
            "tokens": len(self.tokens),
            "top1_matches": self.matches,
            "proven_steps": len(proofs),
            "proven_top1_matches": sum(proof.written.top1_match for proof in proofs),
            "worst_proven_gap": self.worst_proven_gap,
            "worst_proven_kl_nats": max((proof.written.kl_nats for proof in proofs), default=None),
            "worst_action_gap": self.worst_action_gap,
            "unpatched_logit_gap": self.unpatched_gap,
            "max_abs_dm": max((proof.max_abs_dm for proof in proofs), default=None),
            "worst_layer": None if worst is None else _layer(worst),
            "mismatches": [_mismatch(token) for token in self.tokens if not token.match],
            "steps": [_step(token) for token in self.tokens],
        }
        return plain(found)


def _layer(proof: Proof) -> dict[str, Any]:
    layer = proof.worst_layer
    return {"layer": layer.layer, "relative_error": layer.relative_error, "outcome": layer.outcome}


def _mismatch(token: Token) -> dict[str, Any]:
    row = asdict(token)
    return {key: row[key] for key in ("sequence", "index", "in_context", "patched", "margin")}


def _step(token: Token) -> dict[str, Any]:
    return {
        "sequence": token.sequence,
        "position": token.position,
        "in_context": token.in_context,
        "patched": token.patched,
        "action_gap": token.logit_gap,
        "proven_gap": None if token.proof is None else token.proof.written.logit_gap,
        **(_proven(token.proof) if token.proof is not None else dict.fromkeys(PROVEN)),
        "margin": token.margin,
        "chosen": token.chosen,
    }


PROVEN = ("unpatched", "unpatched_gap", "kl_nats", "weight_ratio", "relative_error")
"""Keys of a step that only a proof can fill."""


def _proven(proof: Proof) -> dict[str, Any]:
    return {
        "unpatched": proof.unpatched.top1,
        "unpatched_gap": proof.unpatched.logit_gap,
        "kl_nats": proof.written.kl_nats,
        "weight_ratio": [layer.weight_ratio for layer in proof.layers],
        "relative_error": [layer.relative_error for layer in proof.layers],
    }

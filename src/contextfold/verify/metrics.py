"""How far two next-token distributions are apart. Logits are `(V,)`; gaps are in logits, divergences in nats."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Comparison", "compare", "margin"]


@dataclass(frozen=True)
class Comparison:
    """A model against the in-context one, at one position."""

    logit_gap: float
    """Largest absolute difference of the logits; infinite where one of them is not a number."""
    kl_nats: float
    """KL(in-context ‖ this), in nats."""
    top1_match: bool
    top1: int
    """Token id that this model prefers."""
    margin: float
    """By how many logits the in-context model prefers its first token over this model's choice; 0 when equal."""


def compare(in_context: Tensor, logits: Tensor) -> Comparison:
    """Both `(V,)`, in any dtype; computed in float64.

    What is not a number counts as infinitely far: it would compare as smaller than nothing, and be lost in a maximum.
    """
    p, q = in_context.double(), logits.double()
    log_p, log_q = torch.log_softmax(p, 0), torch.log_softmax(q, 0)
    first, choice = int(p.argmax()), int(q.argmax())
    return Comparison(
        logit_gap=_distance((p - q).abs().max()),
        kl_nats=_distance((log_p.exp() * (log_p - log_q)).sum()),
        top1_match=first == choice,
        top1=choice,
        margin=float(p[first] - p[choice]),
    )


def _distance(value: Tensor) -> float:
    found = float(value)
    return math.inf if math.isnan(found) else max(found, 0.0)


def margin(logits: Tensor) -> float:
    """Distance, in logits, between the first and the second choice of `(V,)`."""
    best = logits.double().topk(2).values
    return float(best[0] - best[1])

"""How many entries of a vector are how large, in half decades: what a smallest value alone does not say."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["EDGES", "counts"]

EDGES = tuple(10 ** (k / 2) for k in range(-16, 3))
"""From 1e-8 to 10. What lies below the first, zeros included, and above the last has a count of its own."""


def counts(values: Tensor) -> tuple[int, ...]:
    """Of any shape: how many `|values|` lie below the first edge, between neighbours, and from the last edge on."""
    edges = torch.tensor(EDGES, dtype=torch.float64)
    bins = torch.bucketize(values.detach().double().abs().flatten().cpu(), edges, right=True)
    return tuple(torch.bincount(bins, minlength=len(EDGES) + 1).tolist())

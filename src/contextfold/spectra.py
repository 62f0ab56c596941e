"""What is inside a patch, edit by edit: norms, and the singular values of every change of a matrix."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from contextfold.patch import BiasEdit, Edit, MatrixEdit, Patch, ScaleEdit

__all__ = ["POINTS", "spectra"]

POINTS = 40
"""Singular values that are kept of an edit: all of a small one, else about so many, half of them evenly spread, half
over the logarithm."""


def spectra(patch: Patch) -> list[dict[str, Any]]:
    """A row per edit, in the order of the model. Stable keys; documented in `docs/json.md`.

    Norms are Frobenius or Euclidean. Singular values are those of `B A`, in float64, by QR of both factors; the
    product is never formed.
    """
    return [
        {"layer": site.layer, "site": site.name, **_row(edit)}
        for site, edit in sorted(patch.edits.items(), key=lambda item: item[0].layer)
    ]


def _row(edit: Edit) -> dict[str, Any]:
    match edit:
        case MatrixEdit(delta):
            values = delta.to(torch.float64).svd()[1]
            return {"kind": "matrix", "rank": delta.rank, "norm": edit.size(), **_values(values)}
        case BiasEdit():
            return {"kind": "bias", "rank": None, "norm": edit.size(), "numbers": [], "singular_values": []}
        case ScaleEdit():
            return {"kind": "scale", "rank": None, "norm": edit.size(), "numbers": [], "singular_values": []}


def _values(values: Tensor) -> dict[str, Any]:
    n = values.numel()
    if n == 0:  # an edit of rank 0 changes nothing
        return {"numbers": [], "singular_values": []}
    half = POINTS // 2
    even = {1 + round((n - 1) * k / (half - 1)) for k in range(half)}
    first = {round(math.exp(math.log(n) * k / (half - 1))) for k in range(half)} | {n - 1}
    chosen = sorted((even | first) & set(range(1, n + 1))) if n > POINTS else list(range(1, n + 1))
    return {"numbers": chosen, "singular_values": [float(values[k - 1]) for k in chosen]}

"""How alike two patches are, as edits of weights: norms, cosines and angles, from the factors alone.

A patch is taken as one long vector: all entries of its matrix changes, bias changes and changes of norm scales. No
change of a matrix is ever formed; everything here is read off the singular values and vectors of `B A`, in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from contextfold.errors import PatchMismatch
from contextfold.lowrank import LowRank
from contextfold.patch import BiasEdit, Edit, MatrixEdit, Patch, ScaleEdit, Site
from contextfold.solving import solved

__all__ = [
    "KINDS",
    "PatchComparison",
    "SiteComparison",
    "compare_patches",
    "cosine",
    "inner",
    "norm",
    "principal_angles",
]

Kinds = tuple[type[Edit], ...]

KINDS: Kinds = (MatrixEdit, BiasEdit, ScaleEdit)
"""All kinds of edits. A scale may change by hundreds where a matrix changes by one, so the kinds can be asked apart."""


@dataclass(frozen=True, eq=False)
class SiteComparison:
    """Two edits of one parameter."""

    site: Site
    norms: tuple[float, float]
    """Frobenius (Euclidean) norms of the two changes."""
    inner: float
    """`⟨dP, dQ⟩`, Frobenius."""
    columns: tuple[float, ...]
    """Principal angles between the column spaces, what the edits write, in radians, ascending; of matrices only."""
    rows: tuple[float, ...]
    """The same between the row spaces, what the edits read."""

    @property
    def cosine(self) -> float:
        return _ratio(self.inner, *self.norms)


@dataclass(frozen=True, eq=False)
class PatchComparison:
    """Two patches, and a comparison for every parameter that both of them edit."""

    norms: tuple[float, float]
    """Of the whole patches; a site that only one of them edits counts here."""
    inner: float
    sites: tuple[SiteComparison, ...]

    @property
    def cosine(self) -> float:
        """1 for the same direction, 0 for nothing in common; NaN when a patch changes nothing."""
        return _ratio(self.inner, *self.norms)


def compare_patches(first: Patch, second: Patch) -> PatchComparison:
    """Everything at once. Raises `PatchMismatch` for patches of different models or weights."""
    _check(first, second)
    shared = [site for site in sorted(first.edits) if site in second.edits]
    sites = tuple(_site(site, first.edits[site], second.edits[site]) for site in shared)
    return PatchComparison((norm(first), norm(second)), math.fsum(site.inner for site in sites), sites)


def inner(first: Patch, second: Patch, kinds: Kinds = KINDS) -> float:
    """`Σ ⟨dP, dQ⟩` over the sites that both edit. Raises `PatchMismatch` as `compare_patches` does."""
    _check(first, second)
    pairs = ((edit, second.edits[site]) for site, edit in first.edits.items() if site in second.edits)
    return math.fsum(_inner(_spectrum(a), _spectrum(b)) for a, b in pairs if isinstance(a, kinds))


def norm(patch: Patch, kinds: Kinds = KINDS) -> float:
    """`sqrt(Σ ‖dP‖²)` over the sites."""
    return math.hypot(*(_spectrum(edit).norm for edit in patch.edits.values() if isinstance(edit, kinds)))


def cosine(first: Patch, second: Patch, kinds: Kinds = KINDS) -> float:
    """`⟨dP, dQ⟩ / (‖dP‖ ‖dQ‖)`; NaN when a patch changes nothing. Raises as `compare_patches` does."""
    return _ratio(inner(first, second, kinds), norm(first, kinds), norm(second, kinds))


def principal_angles(first: LowRank, second: LowRank) -> tuple[Tensor, Tensor]:
    """Angles between the column spaces and between the row spaces, each `(min(rank, rank),)` float64, ascending.

    In radians. Zero means a shared direction. The ranks are numerical: directions that rounding made do not count.
    """
    p, q = _spectrum(MatrixEdit(first)), _spectrum(MatrixEdit(second))
    return _angles(p.U, q.U), _angles(p.Vt.T, q.Vt.T)


@dataclass(frozen=True, eq=False)
class _Spectrum:
    """`U (out, k), S (k,), Vt (k, in)` of a change, float64; a vector is a matrix with one column."""

    U: Tensor
    S: Tensor
    Vt: Tensor

    @property
    def norm(self) -> float:
        return float(self.S.norm())


def _spectrum(edit: Edit) -> _Spectrum:
    match edit:
        case MatrixEdit(delta):
            change = delta
        case BiasEdit(vector):
            change = LowRank(vector[:, None], torch.ones_like(vector[:1, None]))
        case ScaleEdit(base, value, _):
            difference = value.double() - base.double()
            change = LowRank(difference[:, None], torch.ones_like(difference[:1, None]))
    wide = change.to(torch.float64)
    U, S, Vt = wide.svd()
    # Measured against the factors and not the product: in `p − p` all that is left of the product is rounding.
    # Factors were rounded when they were stored; the decomposition adds roundings in proportion to the size.
    eps = torch.finfo(change.B.dtype).eps + max(wide.B.shape[0], wide.A.shape[1]) * torch.finfo(torch.float64).eps
    limit = eps * float(wide.B.norm() * wide.A.norm())
    keep = limit < S
    return _Spectrum(U[:, keep], S[keep], Vt[keep])


def _inner(p: _Spectrum, q: _Spectrum) -> float:
    """`⟨P, Q⟩ = Σ_ij S_i S'_j (u_i · u'_j)(v_i · v'_j)`."""
    shared = (p.U.T @ q.U) * (p.Vt @ q.Vt.T)
    return float(p.S @ shared @ q.S)


def _site(site: Site, first: Edit, second: Edit) -> SiteComparison:
    p, q = _spectrum(first), _spectrum(second)
    matrices = isinstance(first, MatrixEdit)
    columns = tuple(_angles(p.U, q.U).tolist()) if matrices else ()
    rows = tuple(_angles(p.Vt.T, q.Vt.T).tolist()) if matrices else ()
    return SiteComparison(site, (p.norm, q.norm), _inner(p, q), columns, rows)


def _angles(first: Tensor, second: Tensor) -> Tensor:
    """Between the spans of two orthonormal bases `(n, a)` and `(n, b)`.

    The cosines are the singular values of `Q₁ᵀQ₂`, the sines those of `Q₂ − Q₁Q₁ᵀQ₂` with Q₂ the narrower one. A cosine
    near 1 says little about a small angle and a sine near 1 little about a large one, so each angle is taken from the
    smaller of the two (Björck and Golub, 1973).
    """
    wide, narrow = (first, second) if first.shape[1] >= second.shape[1] else (second, first)
    if narrow.shape[1] == 0:
        return narrow.new_zeros(0)
    across = wide.T @ narrow
    cosines = solved(torch.linalg.svdvals, across).clamp(max=1.0)
    sines = solved(torch.linalg.svdvals, narrow - wide @ across).flip(0).clamp(max=1.0)
    return torch.where(cosines**2 > 0.5, torch.arcsin(sines), torch.arccos(cosines))


def _ratio(product: float, a: float, b: float) -> float:
    return product / (a * b) if a and b else math.nan


def _check(first: Patch, second: Patch) -> None:
    if first.header.fingerprint != second.header.fingerprint:
        raise PatchMismatch(
            "the patches were made for different models or weights, so they cannot be compared; fold both on one model"
        )

"""A ridge whose data pass by once: sums instead of rows, unless the rows are fewer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from contextfold.bake.tiles import Tiles
from contextfold.lowrank import LowRank
from contextfold.solving import solved

__all__ = ["Moments", "Ridge", "left_out"]


@dataclass(frozen=True, eq=False)
class Ridge:
    """`D (out, in)` that minimises `Σ ‖D s_i − t_i‖² + lam ‖D‖²`, as a product of low rank."""

    delta: LowRank
    lam: float
    explained: float
    """Share of the objective `Σ ‖t_i‖²` that D takes away; 1 is all."""


@dataclass(eq=False)
class Moments:
    """Streamed sums over rows `s (n, in)`, `t (n, out)`; the rows themselves are kept while they are fewer than `in`.

    `guarded (k, in)`, orthonormal rows, spans inputs on which the solution is zero: sources enter without their part
    in that span.
    """

    inner: int
    outer: int
    guarded: Tensor
    rows: int = 0
    """How many rows are to come, where that is known: those that will be summed need not be kept first."""
    total: float = 0.0
    count: int = 0
    _rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _sums: Tiles | None = None

    def unguarded(self, s: Tensor) -> Tensor:
        """Sources `(n, in)` without their part in the guarded span."""
        basis = self.guarded.to(s)
        return s - (s @ basis.T) @ basis

    def add(self, s: Tensor, t: Tensor) -> None:
        """More rows. Products are formed in their dtype and summed in float64."""
        self.total += float(t.double().square().sum())
        self.count += s.shape[0]
        self._rows.append((self.unguarded(s), t))
        if self._sums is None and max(self.count, self.rows) < self.inner:
            return
        self._sums = self._sums or Tiles(self.inner, self.outer, s)
        while self._rows:
            self._sums.add(*self._rows.pop(0))

    def sums(self) -> Iterator[tuple[str, Tensor]]:
        """What was summed so far, by name and in parts: products of what is finite need not be."""
        return iter(()) if self._sums is None else self._sums.parts()

    def solve(self, lam0: float, tol: float = 0.0) -> Ridge:
        """`D = T Sᵀ (S Sᵀ + lam I)⁻¹`, `lam = lam0 ‖S Sᵀ‖_F² / tr(S Sᵀ)` (equation sheet, section 6), in float64.

        With fewer rows than inputs, `D = T (Sᵀ S + lam I)⁻¹ Sᵀ`, the same matrix. Directions of the output that carry
        less than `tol` of what is explained together are dropped: the kept ones are the leading eigenvectors of
        `D (S Sᵀ + lam I) Dᵀ`, the order in which they serve the objective. Sums are used up.
        """
        if self._sums is not None:
            sums, self._sums = self._sums, None
            lam = sums.penalty(lam0)
            energy = sums.eliminate(lam)
            U = _leading(energy, tol)
            delta = LowRank(U, sums.substitute(U))
        else:
            s, t = (torch.cat(side).double() for side in zip(*self._rows, strict=True))
            gram = s @ s.T
            lam = penalty(gram, lam0)
            weights = solved(torch.cholesky_solve, t, _factor(gram, lam))
            # D = weightsᵀ s and its energy lie in what the rows of t span: neither (out, in) nor (out, out) is formed.
            span = solved(torch.linalg.qr, t.T)[0]
            left = span.T @ weights.T
            energy = left @ (gram @ (t @ span))
            U = _leading(energy, tol)
            delta = LowRank(span @ U, (U.T @ left) @ s)
        explained = float(energy.trace()) / self.total if self.total else 1.0
        return Ridge(delta, lam, explained)


def penalty(gram: Tensor, lam0: float) -> float:
    """`lam0 ‖K‖_F² / tr(K)`: lam0 in units of a weighted mean of the eigenvalues; the same for `S Sᵀ` and `Sᵀ S`."""
    trace = float(gram.trace())
    # Relative to the trace first: squares of what is very small or large leave the range of float64.
    return lam0 * float((gram / trace).square().sum()) * trace if trace else 1.0


def _factor(gram: Tensor, lam: float) -> Tensor:
    regular = gram.clone()
    regular.diagonal().add_(lam)
    factor: Tensor = solved(torch.linalg.cholesky, regular)
    return factor


def _leading(energy: Tensor, tol: float) -> Tensor:
    """Leading eigenvectors `(·, r)` of `energy`, the largest first, that leave out at most `tol` of its trace."""
    values, vectors = solved(torch.linalg.eigh, (energy + energy.T) / 2)
    values = values.clamp_min(0)
    lost = values.cumsum(0) <= tol * float(values.sum())
    kept: Tensor = vectors[:, ~lost].flip(1)
    return kept


def left_out(s: Tensor, t: Tensor, groups: Tensor, grid: tuple[float, ...]) -> tuple[float, ...]:
    """Relative error on each group when it is left out of the ridge, per `lam0` of `grid`; no refit is run.

    With `S Sᵀ = Q Λ Qᵀ` and `Z = Sᵀ Q`, the rows of group g that a ridge without them would miss are
    `(I − M_gg)⁻¹ (T_g − M_g T)`, `M = Z (Λ + lam)⁻¹ Zᵀ`: the block form of the leave-one-out identity of ridge
    regression. Rows `s (n, in)`, `t (n, out)`, `groups (n,)`. The penalty is that of all rows.
    """
    s, t = s.double(), t.double()
    total = float(t.square().sum())
    if total == 0:  # nothing is wanted, so nothing is missed
        return (0.0,) * len(grid)
    gram = s.T @ s
    values, Q = solved(torch.linalg.eigh, gram)
    values, Z = values.clamp_min(0), s @ Q
    cross = Z.T @ t
    errors = []
    for lam0 in grid:
        shrink = 1 / (values + penalty(gram, lam0))
        rest = t - Z @ (shrink[:, None] * cross)
        missed = 0.0
        for group in sorted(set(groups.tolist())):
            rows = groups == group
            M = (Z[rows] * shrink) @ Z[rows].T
            own = torch.eye(M.shape[0], dtype=M.dtype, device=M.device) - M
            missed += float(solved(torch.linalg.solve, own, rest[rows]).square().sum())
        errors.append(missed / total)
    return tuple(errors)

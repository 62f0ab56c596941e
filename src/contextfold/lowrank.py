"""Low-rank matrices that are never formed unless asked, and the two solves that everything rests on.

Equation numbers refer to `docs/equations.md`, the project's equation sheet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from contextfold.solving import solved

__all__ = [
    "Inversion",
    "LowRank",
    "Metric",
    "Solution",
    "invert_rmsnorm",
    "invert_rmsnorm_rows",
    "min_norm_update",
    "times",
]

SINGULAR = 1e-12
"""A singular value below this fraction of the largest counts as zero (float64 solves)."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """`B @ A` with `B (out, r)` and `A (r, in)`; acts on rows `x (n, in)` as `x Aᵀ Bᵀ`."""

    B: Tensor
    A: Tensor

    def __post_init__(self) -> None:
        if self.B.dim() != 2 or self.A.dim() != 2 or self.B.shape[1] != self.A.shape[0]:
            raise ValueError(f"B {tuple(self.B.shape)} and A {tuple(self.A.shape)} do not form a product")

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.B.shape[0], self.A.shape[1]

    @property
    def rank(self) -> int:
        """Width of the factors: an upper bound of the rank of the product."""
        return self.A.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """`(…, in) -> (…, out)`: the action on rows."""
        return x @ self.A.T @ self.B.T

    def __add__(self, other: LowRank) -> LowRank:
        """Exact sum; the factors are concatenated."""
        return LowRank(torch.cat([self.B, other.B], 1), torch.cat([self.A, other.A], 0))

    def __mul__(self, factor: float) -> LowRank:
        return LowRank(self.B * factor, self.A)

    __rmul__ = __mul__

    def __neg__(self) -> LowRank:
        return self * -1.0

    def __sub__(self, other: LowRank) -> LowRank:
        return self + -other

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> LowRank:
        return LowRank(self.B.to(device=device, dtype=dtype), self.A.to(device=device, dtype=dtype))

    def to_dense(self) -> Tensor:
        """`(out, in)`, formed."""
        return self.B @ self.A

    def norm(self) -> float:
        """Frobenius norm in float64, from the r×r Gram matrices: `‖BA‖² = tr(BᵀB · AAᵀ)`."""
        B, A = self.B.double(), self.A.double()
        return math.sqrt(max(float(((B.T @ B) * (A @ A.T)).sum()), 0.0))

    def recompress(self, tol: float = 0.0) -> LowRank:
        """The best approximation with relative Frobenius error at most `tol`; exact up to rounding for 0.

        QR of both factors reduces the SVD of `BA` to one of an r×r core. Singular values are dropped from the
        smallest up while their joint norm stays below `tol · ‖BA‖`.
        """
        U, S, Vt = self.svd()
        tail = torch.sqrt(torch.flip(torch.cumsum(torch.flip(S.double() ** 2, [0]), 0), [0]))
        limit = max(tol, S.numel() * torch.finfo(S.dtype).eps) * float(tail[0]) if S.numel() else 0.0
        keep = int((tail > limit).sum())
        return LowRank(U[:, :keep] * S[:keep], Vt[:keep])

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """`U (out, k), S (k,), Vt (k, in)` of the product, k = min(r, out, in); the product is not formed."""
        if self.rank == 0:  # LAPACK refuses a matrix without columns, aloud
            return self.B, self.B.new_zeros(0), self.A
        Qb, Rb = solved(torch.linalg.qr, self.B)
        Qa, Ra = solved(torch.linalg.qr, self.A.T)
        U, S, Vt = solved(torch.linalg.svd, Rb @ Ra.T, full_matrices=False)
        return Qb @ U, S, Vt @ Qa.T


PARTS = 16
"""In how many parts a matrix is widened: a part of the maps of a small model stays in the cache."""


def times(W: Tensor, rows: Tensor) -> Tensor:
    """`W x` in float64 for rows `(…, in) -> (…, out)`, W `(out, in)` of any dtype.

    W is widened part by part, since a float64 copy of it whole would cost more than the product.
    """
    x = rows.double()
    if W.dtype == torch.float64:
        return linear(x, W)
    return torch.cat([linear(x, part.double()) for part in W.chunk(PARTS)], -1)


@dataclass(frozen=True, eq=False)
class Solution:
    """`delta` with `delta @ sources.T = changes.T`, its residual and how well posed it was."""

    delta: LowRank
    rank: int
    """Numerical rank of the sources."""
    condition: float
    """Condition number of the row-normalised sources, zero rows left out (1.0 when there are none)."""
    residual: float
    """`‖delta Sᵀ − Tᵀ‖ / ‖T‖`, Frobenius; 0 when nothing was wanted."""


@dataclass(frozen=True, eq=False)
class Metric:
    """Which inputs an edit should disturb least: `K = L Lᵀ`, the covariance of typical inputs, kept as L `(in, in)`."""

    L: Tensor

    @classmethod
    def of(cls, typical: Tensor, ridge: float = 1e-2) -> Metric:
        """From inputs `(t, in)`; `ridge` times the mean eigenvalue keeps unseen directions from being free."""
        H = typical.double()
        K = H.T @ H / H.shape[0]
        K.diagonal().add_(ridge * K.diagonal().mean())
        return cls(solved(torch.linalg.cholesky, K))

    def whiten(self, rows: Tensor) -> Tensor:
        """`x L⁻ᵀ` for rows `(n, in)`."""
        white: Tensor = solved(torch.linalg.solve_triangular, self.L, rows.T, upper=False)
        return white.T

    def back(self, A: Tensor) -> Tensor:
        """`A L⁻¹` for factors `(r, in)`."""
        factors: Tensor = solved(torch.linalg.solve_triangular, self.L.T, A.T, upper=True)
        return factors.T


def min_norm_update(sources: Tensor, changes: Tensor, metric: Metric | None = None) -> Solution:
    """The smallest edit, in Frobenius norm, with `dW s_i = t_i` for every row: `dW = Tᵀ (S⁺)ᵀ` (section 5).

    One row gives the rank-1 form `t sᵀ / ‖s‖²` of section 3 ([E] eq. 2, 3). Exact when the rows of
    `sources (n, in)` are independent, or dependent with consistent `changes (n, out)`; least squares over the
    row-normalised system otherwise. Solved in float64. With a metric K the edit is smallest in
    `tr(dW K dWᵀ)`, the mean square of what it does to typical inputs: `dW = Tᵀ (S K⁻¹ Sᵀ)⁻¹ S K⁻¹`.
    """
    S, T = sources.double(), changes.double()
    if metric is not None:
        plain = min_norm_update(metric.whiten(S), T)
        return Solution(LowRank(plain.delta.B, metric.back(plain.delta.A)), plain.rank, plain.condition, plain.residual)
    length = S.norm(dim=1, keepdim=True)
    alive = length[:, 0] > 0
    # Rows are normalised first: a sink row is a thousand times longer than the others and would hide them.
    unit = S[alive] / length[alive]
    wanted = T[alive] / length[alive]
    U, sigma, Vt = _wide_svd(unit)
    keep = sigma > SINGULAR * sigma[:1].clamp_min(torch.finfo(torch.float64).tiny)
    rank = int(keep.sum())
    dual = U[:, keep] / sigma[keep]
    moved = (wanted != 0).any(1)
    if 0 < int(moved.sum()) < rank:
        # Rows that only hold the edit still shape A and add no column to B: the rank is that of what changes.
        delta = LowRank(wanted[moved].T, dual[moved] @ Vt[keep])
    else:
        delta = LowRank(wanted.T @ dual, Vt[keep])
    total = float(T.norm())
    residual = 0.0 if total == 0 else float((delta(S) - T).norm()) / total
    condition = float(sigma[0] / sigma[keep][-1]) if rank else 1.0
    return Solution(delta, rank, condition if rank == sigma.numel() else math.inf, residual)


def _wide_svd(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The thin `U, S, Vt` of rows `(n, in)`, by the QR of the columns that they make.

    LAPACK does the same for rows as they are, by a slower path: up to four times the seconds for a few long rows.
    """
    Q, R = solved(torch.linalg.qr, rows.T)
    U, sigma, Vt = solved(torch.linalg.svd, R.T, full_matrices=False)
    return U, sigma, Vt @ Q.T


@dataclass(frozen=True, eq=False)
class Inversion:
    """Nearest reachable vector of a scaled RMS norm, and the multiplier that found it."""

    y: Tensor
    mu: float
    hard: bool
    """The secular equation had no root and its hard case was solved."""


NEWTON_STEPS = 64
"""Far above need: the iteration is monotone and took at most 8 steps on thousands of random cases."""


def invert_rmsnorm(g: Tensor, m: Tensor, mean_square: float = 1.0) -> Inversion:
    """Minimise `‖m ⊙ y − g‖²` subject to `mean(y²) = mean_square` ([E] App. B.2, with its hard case).

    Stationarity gives `y_k = g_k m_k / (m_k² − mu)` and the secular equation
    `F(mu) = mean((g m)² / (m² − mu)²) = mean_square` on `(−∞, min m²)`, where F grows from 0. If some coordinate
    of the smallest m² has `g_k m_k ≠ 0`, F grows to infinity and there is exactly one root. Otherwise F may stay
    below `mean_square` (the *hard case* of a trust-region problem): then `mu = min m²` and the norm that is
    missing goes to the smallest-scale coordinates, where it costs the same in every direction.

    Shapes: `g (d,)`, `m (d,)`; float64 inside and out.
    """
    g, m = g.double(), m.double()
    a, m2 = g * m, m * m
    least = m2.min()
    smallest = m2 <= least * (1 + SINGULAR)
    active = a != 0
    d = a.numel()

    def mean_of(mu: Tensor, power: int) -> Tensor:
        return (a[active] ** 2 / (m2[active] - mu) ** power).sum() / d

    if not bool((smallest & active).any()) and float(mean_of(least, 2)) <= mean_square:
        y = torch.zeros_like(a)
        y[active] = a[active] / (m2[active] - least)
        missing = d * mean_square - (y**2).sum()
        sign = torch.where(g[smallest] * torch.where(m[smallest] < 0, -1.0, 1.0) < 0, -1.0, 1.0).double()
        y[smallest] = sign * torch.sqrt(missing / int(smallest.sum()))
        return Inversion(y, float(least), True)

    # Bracket in closed form: F <= at lo, F >= at hi; Newton on F^(-1/2), nearly linear in mu, from the right.
    lo = least - math.sqrt(float((a**2).mean()) / mean_square)
    mu = (m2[active] - a[active].abs() / math.sqrt(d * mean_square)).min()
    mu = torch.minimum(mu, least - torch.finfo(torch.float64).eps * least.clamp_min(1e-300))
    for _ in range(NEWTON_STEPS):
        F = mean_of(mu, 2)
        # d/dmu F^(-1/2) = -F^(-3/2) mean(a²/(m²-mu)³)
        step = (F**-0.5 - mean_square**-0.5) * F**1.5 / mean_of(mu, 3)
        new = torch.maximum(mu + step, lo)
        if float((new - mu).abs()) <= 4e-16 * float(mu.abs() + least):
            mu = new
            break
        mu = new
    y = a / (m2 - mu)
    # What rounding left of the constraint is spread evenly: the direction is unchanged.
    y = y * torch.sqrt(mean_square / (y**2).mean())
    return Inversion(y, float(mu), False)


def invert_rmsnorm_rows(g: Tensor, m: Tensor, mean_square: Tensor) -> Tensor:
    """`invert_rmsnorm(...).y` for rows `g (n, d)` under one scale `m (d,)`, each with its `mean_square (n,)`.

    Rows that may be the hard case are solved one by one; the rest together, by the same iteration.
    """
    g, m = g.double(), m.double()
    a, m2 = g * m, m * m
    least = m2.min()
    rho = mean_square.double().sqrt()
    lo = least - a.square().mean(1).sqrt() / rho
    mu = (m2 - a.abs() / (rho * math.sqrt(m.numel()))[:, None]).min(1).values
    mu = torch.minimum(mu, least - torch.finfo(torch.float64).eps * least.clamp_min(1e-300))
    for _ in range(NEWTON_STEPS):
        part = (a / (m2 - mu[:, None])).square()
        F = part.mean(1)
        step = (F**-0.5 - 1 / rho) * F**1.5 / (part / (m2 - mu[:, None])).mean(1)
        mu, before = torch.maximum(mu + step, lo), mu
        if bool(((mu - before).abs() <= 4e-16 * (mu.abs() + least)).all()):
            break
    y = a / (m2 - mu[:, None])
    y = y * (rho / y.square().mean(1).sqrt())[:, None]
    for row in (a[:, m2 <= least * (1 + SINGULAR)] == 0).all(1).nonzero()[:, 0].tolist():
        y[row] = invert_rmsnorm(g[row], m, float(mean_square[row])).y
    return y

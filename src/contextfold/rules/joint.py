"""Several positions through a norm after the MLP: one scale for all, then the output map for each direction.

A scale m' serves n positions when every wanted branch fits under it: `RMS(g_i ⊘ m') = rho_i`. With `m' = M ⊘ sqrt(a)`
these are n linear equations for a > 0, `G a = 1`, `G_ij = (g_ij / M_j)² / (d rho_i²)` (equation sheet, several
positions). Among their solutions the balanced one, smallest in `‖m' ⊘ M‖² = Σ 1 / a_j`, is found through its dual:

    minimise Σ 1/a_j  subject to  G a = 1      stationary:  a_j = s_j^(-1/2),  s = Gᵀ lambda
    maximise D(lambda) = 2 Σ sqrt(s_j) − Σ lambda_i         gradient  G a − 1,  Hessian  −½ G diag(s^(-3/2)) Gᵀ

D is concave with one unknown per position, and its gradient grows without bound where some s_j tends to 0, so a stays
positive by itself. For one position the solution is the balanced scale of `postnorm`. Where no positive solution exists
D is unbounded, and on its way up it shows that: `lambdaᵀ (G a − 1) = sᵀ a − Σ lambda_i`, so while s > 0 every a > 0
misses some equation by at least `−Σ lambda_i / ‖lambda‖₁`. A pull on lambda makes the equations soft,
`G a − 1 = pull · lambda`. So: first with a pull that keeps the scale moderate, and from there with next to none, unless
that is shown to be hopeless. Every block aims at the measured in-context sum, so the next one that can reach it takes
up what a soft one left; a scale strained to its limit amplifies rounding instead. The last block has no next one, but a
norm that reads only the direction of its sum: see `lengths`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from contextfold.calculus import Demand, Kind, Service
from contextfold.lowrank import Metric, Solution, invert_rmsnorm_rows, min_norm_update
from contextfold.outcomes import Finding, Outcome
from contextfold.rules.base import MATRIX, UpdateRule, finite, refuse_if
from contextfold.rules.lengths import fit_lengths
from contextfold.rules.postnorm import floored_scale
from contextfold.solving import solved

__all__ = ["JointPostNorm", "JointScale", "JointSolution", "joint_scale"]

HARD = 1e-12
"""Softness with which exactness is tried: far below what float32 can show."""

SOFT = 1e-3
"""Softness where there is no positive solution: a position's miss is this times its lambda. On 254 positions of Gemma 3
270M scales grow to 4 times the old ones, and one rounding of the embeddings moves the logits by 1e-4; at 1e-6 they grow
to 13 times and it moves them by 14, with misses no smaller, since each block inherits the strain of those below."""

NEWTON_STEPS = 60
"""For each of the two softnesses; feasible problems take about ten."""

FEASIBLE = 1e-6
"""Largest relative miss of a position's reach that still counts as exact."""


@dataclass(frozen=True, eq=False)
class JointScale:
    """`a (d,)` with `G a ≈ 1`, and the largest miss."""

    a: Tensor
    miss: float


def joint_scale(G: Tensor) -> JointScale:
    """The balanced positive solution of `G a = 1`, `G (n, d) >= 0`; the soft one where there is none.

    Damped Newton on the dual, in float64: n unknowns, one n×n solve a step. The soft problem is solved first, since it
    always has a solution, and the hard one starts there.
    """
    G = G.double()
    seen = (G > 0).any(0)
    H = G[:, seen]
    # With lambda constant, a scales as lambda^(-1/2): start where the mean equation holds.
    start = G.new_full((G.shape[0],), float((H @ H.sum(0).rsqrt()).mean()) ** 2)
    soft = _dual_maximum(H, start, SOFT)
    hard = soft if _hopeless(soft) else _dual_maximum(H, soft, HARD, may_give_up=True)
    exact = _scale_of(G, seen, hard)
    return exact if exact.miss <= FEASIBLE else _scale_of(G, seen, soft)


def _hopeless(lam: Tensor) -> bool:
    """Whether `lam (n,)`, with `Gᵀ lam > 0`, shows that every positive a misses by more than what counts as exact."""
    return float(-lam.sum()) > FEASIBLE * float(lam.abs().sum())


def _scale_of(G: Tensor, seen: Tensor, lam: Tensor) -> JointScale:
    a = G.new_ones(G.shape[1])
    a[seen] = (lam @ G[:, seen]).rsqrt()
    return JointScale(a, float((G @ a - 1).abs().max()))


def _dual_maximum(H: Tensor, lam: Tensor, pull: float, may_give_up: bool = False) -> Tensor:
    """Climb `D(lambda) − pull ‖lambda‖² / 2` from `lam (n,)`, halving steps that leave `s > 0` or gain too little."""

    def dual(x: Tensor) -> float:
        s = x @ H
        return -math.inf if bool((s <= 0).any()) else float(2 * s.sqrt().sum() - x.sum() - 0.5 * pull * x @ x)

    value = dual(lam)
    for _ in range(NEWTON_STEPS):
        s = lam @ H
        slope = H @ s.rsqrt() - 1 - pull * lam
        curve = 0.5 * (H * s**-1.5) @ H.T + pull * torch.eye(H.shape[0], dtype=torch.float64, device=H.device)
        step = solved(torch.linalg.solve, curve, slope)
        decrement = float(slope @ step)
        if decrement <= 1e-18 * max(1.0, abs(value)) or (may_give_up and _hopeless(lam)):
            break
        size = 1.0
        while dual(lam + size * step) < value + 0.25 * size * decrement and size > 1e-12:
            size *= 0.5
        lam = lam + size * step
        value = dual(lam)
    return lam


@dataclass(frozen=True, eq=False)
class JointSolution:
    """New effective scale, edit of the output map, and how the equations were met."""

    solution: Solution
    scale: Tensor
    g: Tensor
    """`(n, d)`: the wanted branches, as they were given but where a length was freed."""
    lengths: Tensor
    """`(n,)`: what each finished sum is to be multiplied by; 1 where no length was freed."""
    miss: float
    """Largest relative miss of a position's reach, before any length was freed; 0 where one scale serves all."""
    findings: Sequence[Finding]


@final
@dataclass(frozen=True)
class JointPostNorm(UpdateRule):
    """Several positions through a norm after the MLP: one scale that all of them fit under, then the output map."""

    name: ClassVar[str] = "output weight through a norm, several positions"
    equation: ClassVar[str] = "m' = M ⊘ sqrt(a), G a = 1, a > 0; dW_out = T S⁺, t_i = q_i - W_out h_i - b"
    source: ClassVar[str] = "[ours]"
    condition: ClassVar[str] = "h_i independent, and some a > 0 solves G a = 1; least squares otherwise"
    minimal: ClassVar[str] = "smallest ‖m' ⊘ M‖, then smallest Frobenius norm of dW_out"
    serves: ClassVar[Service] = Service(Demand.REACH, Kind.WEIGHT_AND_SCALE)
    meets: ClassVar[tuple[Outcome, ...]] = (*MATRIX, Outcome.SCALE_INFEASIBLE, Outcome.LENGTH_FREED)

    def solve(
        self, where: str, h: Tensor, branch: Tensor, g: Tensor, m: Tensor, eps: float, metric: Metric | None = None,
        along: Tensor | None = None,
    ) -> JointSolution:  # fmt: skip
        """`h (n, f)`, `branch = W_out h + b (n, d)`, wanted `g (n, d)`, effective scale `m (d,)`, the norm's `eps`.

        `along (n, d)`: by how much the wanted branches grow when the finished sums double, where only the directions of
        these are read; None where their lengths count. Raises `NotControllable` for values that are not finite, a zero
        target or a zero source.
        """
        finite(where, h=h, g=g, m=m)
        h, p, g, m = h.double(), branch.double(), g.double(), m.double()
        _alive(where, g)
        c = p.square().mean(1).sqrt()
        c = torch.where(c > 0, c, torch.ones_like(c))
        rho = c / torch.sqrt(c * c + eps)
        M = floored_scale(m)
        joint = joint_scale((g / M).square() / (g.shape[1] * rho.square())[:, None])
        a, lengths, findings = joint.a, torch.ones_like(c), []
        exact = joint.miss <= FEASIBLE
        if not exact and along is not None:
            _alive(where, along)
            a, lengths = fit_lengths(a, g, along.double(), M, rho)
            g, exact = g + (lengths - 1)[:, None] * along.double(), True
            _alive(where, g)
            far = float((lengths - 1).abs().max())
            findings.append(Finding(Outcome.LENGTH_FREED, where, "largest relative change of a length", far, 0.0))
        elif not exact:
            findings.append(
                Finding(Outcome.SCALE_INFEASIBLE, where, "largest relative miss of a reach", joint.miss, FEASIBLE)
            )
        scale = torch.where(m < 0, -1.0, 1.0).double() * M * a.rsqrt()
        unit = _units(g, scale, rho) if exact else invert_rmsnorm_rows(g, scale, rho.square())
        solution = min_norm_update(h, (c / rho)[:, None] * unit - p, metric)
        return JointSolution(solution, scale, g, lengths, joint.miss, findings)


def _alive(where: str, targets: Tensor) -> None:
    dead = int((targets.square().mean(1) == 0).sum())
    refuse_if(dead > 0, Finding(Outcome.NOTHING_TO_AIM_AT, where, "positions with a zero target", dead, 0))


def _units(g: Tensor, scale: Tensor, rho: Tensor) -> Tensor:
    """The normalised vectors `(n, d)` that the scale turns into g."""
    wanted = torch.where(g != 0, g / scale, torch.zeros_like(g))
    return wanted * (rho / wanted.square().mean(1).sqrt())[:, None]

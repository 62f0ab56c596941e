"""Output map and scale together, through a norm after the MLP (equation sheet, section 4).

For *any* reference scale `r`, with no zero where g is not: put `t = RMS(g ⊘ r) / rho` and `m' = t r`. Then
`ŷ = g ⊘ m'` has exactly the RMS that the norm can reach, so `q = (c / rho) ŷ` is a vector of RMS c whose
normalised form is ŷ, and `m' ⊙ ŷ = g`. A rank-1 edit of the output map produces q. No activation is divided by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from contextfold.calculus import Demand, Kind, Service
from contextfold.lowrank import LowRank, invert_rmsnorm, min_norm_update
from contextfold.outcomes import Finding, Outcome
from contextfold.rules.base import MATRIX, UpdateRule, finite, judge, refuse_if
from contextfold.rules.linear import with_protected

__all__ = [
    "REFERENCES",
    "PostNorm",
    "PostNormBias",
    "PostNormBiasSolution",
    "PostNormSolution",
    "Reference",
    "refit_scale",
]

ZERO = 1e-12
"""An entry below this fraction of its vector's RMS (or median scale) counts as zero."""

FLOOR = 0.1
"""tau of the floored scale, as a fraction of median(abs(m))."""


THROUGH = (
    Outcome.NOTHING_TO_AIM_AT,
    Outcome.ZERO_ACTIVATION,
    Outcome.TINY_SCALE,
    Outcome.SECULAR_HARD_CASE,
    Outcome.NOT_FINITE,
)
"""What the choice of the new scale may meet; which of them depends on the reference."""


@dataclass(frozen=True, eq=False)
class _Problem:
    """One position: wanted branch `g (d,)`, present unscaled branch `u (d,)`, scale `m (d,)`, reachable `rho`."""

    where: str
    g: Tensor
    u: Tensor
    m: Tensor
    rho: float


@dataclass(frozen=True, eq=False)
class _Answer:
    """`scale ⊙ unit = g`, RMS(unit) = rho; `moves_map` is False when unit is already u."""

    scale: Tensor
    unit: Tensor
    moves_map: bool = True
    findings: Sequence[Finding] = ()


def _through(problem: _Problem, r: Tensor) -> _Answer:
    """The family of section 4 for a reference scale r."""
    wanted = problem.g != 0
    ratio = torch.zeros_like(r)
    ratio[wanted] = problem.g[wanted] / r[wanted]
    t = float(ratio.square().mean().sqrt()) / problem.rho
    return _Answer(t * r, ratio / t)


def _median(m: Tensor) -> float:
    """median(abs(m)), or 1 when that is zero: the unit in which a scale is called tiny."""
    return float(m.abs().median()) or 1.0


def _no_tiny_scale(problem: _Problem) -> None:
    limit = ZERO * _median(problem.m)
    tiny = problem.m.abs() <= limit
    least = float(problem.m.abs().min())
    refuse_if(bool(tiny.any()), Finding(Outcome.TINY_SCALE, problem.where, "min abs m", least, limit))


def _theorem(problem: _Problem) -> _Answer:
    limit = ZERO * float(problem.u.square().mean().sqrt())
    dead = problem.u.abs() <= limit
    stuck = dead & (problem.g != 0)
    least = float(problem.u.abs().min())
    refuse_if(bool(stuck.any()), Finding(Outcome.ZERO_ACTIVATION, problem.where, "min abs u", least, limit))
    scale = torch.where(dead, problem.m, problem.g / torch.where(dead, torch.ones_like(problem.u), problem.u))
    return _Answer(scale, problem.u, moves_map=False)


def _appendix(problem: _Problem) -> _Answer:
    _no_tiny_scale(problem)
    inversion = invert_rmsnorm(problem.g, problem.m, problem.rho**2)
    scale = problem.m - inversion.mu / problem.m
    if not inversion.hard:
        return _Answer(scale, inversion.y)
    least = float(problem.m.abs().min())
    found = Finding(Outcome.SECULAR_HARD_CASE, problem.where, "mu", inversion.mu, least**2)
    return _Answer(scale, inversion.y, findings=[found])


def _scalar(problem: _Problem) -> _Answer:
    _no_tiny_scale(problem)
    return _through(problem, problem.m)


def floored_scale(m: Tensor) -> Tensor:
    """`M = sqrt(m² + tau²)`: the magnitude of the scale, kept away from zero."""
    tau = FLOOR * _median(m)
    return torch.sqrt(m * m + tau * tau)


def _sign(m: Tensor) -> Tensor:
    return torch.where(m < 0, -1.0, 1.0).double()


def _floored(problem: _Problem) -> _Answer:
    return _through(problem, _sign(problem.m) * floored_scale(problem.m))


def _balanced(problem: _Problem) -> _Answer:
    # A rounding error e in ŷ_i becomes m'_i e in the branch, and matters in units of the scale M_i that the model
    # gives that coordinate. So: minimise Σ (m'_i / M_i)² subject to the reach Σ (g_i / m'_i)² = d rho². Stationarity
    # gives m'_i / M_i² ∝ g_i² / m'_i³, that is m'_i ∝ sqrt(|g_i| M_i), and the constraint sets the factor t.
    return _through(problem, _sign(problem.m) * torch.sqrt(problem.g.abs() * floored_scale(problem.m)))


def _flat(problem: _Problem) -> _Answer:
    return _through(problem, torch.ones_like(problem.m))


@dataclass(frozen=True)
class Reference:
    """A member of the post-norm class: which scale the new one is proportional to."""

    name: str
    equation: str
    source: str
    condition: str
    minimal: str
    answer: Callable[[_Problem], _Answer]


REFERENCES = (
    Reference(
        "balanced", "m' = t · sign(m) sqrt(abs(g) M), M = sqrt(m² + tau²), tau = 0.1 median(abs(m))", "[ours]",
        "h != 0, g != 0", "smallest ‖m' ⊘ M‖: least amplification of rounding, in units of the old scale", _balanced,
    ),
    Reference(
        "floored", "m' = t · sign(m) M, M = sqrt(m² + tau²), tau = 0.1 median(abs(m))", "[ours]", "h != 0, g != 0",
        "keeps the shape of the old scale where it is not tiny", _floored,
    ),
    Reference(
        "theorem", "m' = g ⊘ u", "[E] eq. 4", "every u_i != 0 where g_i != 0",
        "the output map is not touched", _theorem,
    ),
    Reference(
        "appendix", "m' = m - mu ⊘ m, mu the root of the secular equation", "[E] App. B, hard case [ours]",
        "h != 0, g != 0, every m_i != 0", "smallest ‖m ⊙ y - g‖ before the scale moves", _appendix,
    ),
    Reference(
        "scalar", "m' = t · m", "[ours]", "h != 0, g != 0, every m_i != 0",
        "the scale changes by one number", _scalar,
    ),
    Reference(
        "flat", "m' = t · 1", "[ours]", "h != 0, g != 0", "smallest largest entry of m'", _flat,
    ),
)  # fmt: skip
"""The members, the default first. One class, one table: only the reference scale differs."""


@dataclass(frozen=True, eq=False)
class PostNormSolution:
    """New effective scale and edit of the output map; `delta` is None when the map is not touched."""

    delta: LowRank | None
    scale: Tensor
    condition: float
    findings: Sequence[Finding]


def _aim(reference: Reference, where: str, branch: Tensor, g: Tensor, m: Tensor, eps: float) -> tuple[_Answer, Tensor]:
    """The new scale, and the change `q - branch (1, d)` of what the norm reads, for one position."""
    finite(where, g=g, m=m)
    length = float(g.double().square().mean().sqrt())
    refuse_if(length == 0, Finding(Outcome.NOTHING_TO_AIM_AT, where, "RMS of g", length, 0))
    p = branch.double()
    # A branch that is exactly zero has no length to keep; any will do.
    c = float(p.square().mean().sqrt()) or 1.0
    rho = c / math.sqrt(c * c + eps)
    u = p[0] / math.sqrt(c * c + eps)
    answer = reference.answer(_Problem(where, g[0].double(), u, m.double(), rho))
    return answer, (c / rho) * answer.unit[None] - p


@final
@dataclass(frozen=True)
class PostNorm(UpdateRule):
    """Through a norm after the MLP: a new scale, and a rank-1 edit of the output map that sets the direction."""

    name: ClassVar[str] = "output weight through a norm"
    equation: ClassVar[str] = "m' = t · r, dW_out = (q - W_out h - b) hᵀ / ‖h‖², q ∝ g ⊘ m'"
    source: ClassVar[str] = "[E] eq. 4 and App. B as members of one class [ours]"
    condition: ClassVar[str] = "h != 0, g != 0; one position; what the reference scale asks besides"
    minimal: ClassVar[str] = "smallest Frobenius norm of dW_out for the given reference scale"
    serves: ClassVar[Service] = Service(Demand.REACH, Kind.WEIGHT_AND_SCALE)
    meets: ClassVar[tuple[Outcome, ...]] = (*THROUGH, *MATRIX[:-1])

    reference: Reference = REFERENCES[0]

    def solve(
        self, where: str, h: Tensor, branch: Tensor, g: Tensor, m: Tensor, eps: float,
        protected: Tensor | None = None,
    ) -> PostNormSolution:  # fmt: skip
        """One position: `h (1, f)`, `branch = W_out h + b (1, d)`, wanted `g (1, d)`, effective scale `m (d,)`.

        Of a mixture of experts, h is `Active.sources` and the edit is taken apart by `Active.split`.
        `eps` is the norm's own. `protected (p, f)`: inputs on which the output map must not change (the scale
        is common to all positions and does change). Raises `NotControllable`.
        """
        finite(where, h=h)
        answer, change = _aim(self.reference, where, branch, g, m, eps)
        if not answer.moves_map:
            return PostNormSolution(None, answer.scale, 1.0, answer.findings)
        sources, changes = with_protected(h.double(), change, protected)
        solution = min_norm_update(sources, changes)
        findings = [*answer.findings, *judge(where, sources, changes, solution)]
        return PostNormSolution(solution.delta, answer.scale, solution.condition, findings)


@dataclass(frozen=True, eq=False)
class PostNormBiasSolution:
    """New effective scale and edit of the output bias, both `(d,)`."""

    delta: Tensor
    scale: Tensor
    findings: Sequence[Finding]


@final
@dataclass(frozen=True)
class PostNormBias(UpdateRule):
    """Through a norm after the MLP with the output bias setting the direction: no condition on h."""

    name: ClassVar[str] = "output bias through a norm"
    equation: ClassVar[str] = "m' = t · r, db = q - (W_out h + b), q ∝ g ⊘ m'"
    source: ClassVar[str] = "[ours]"
    condition: ClassVar[str] = "the map has a bias, g != 0; one position; what the reference scale asks besides"
    minimal: ClassVar[str] = "the only bias for the given reference scale and length of q"
    serves: ClassVar[Service] = Service(Demand.REACH, Kind.BIAS_AND_SCALE)
    meets: ClassVar[tuple[Outcome, ...]] = THROUGH

    reference: Reference = REFERENCES[0]

    def solve(self, where: str, branch: Tensor, g: Tensor, m: Tensor, eps: float) -> PostNormBiasSolution:
        """One position, shapes as in `PostNorm.solve`. Raises `NotControllable`."""
        answer, change = _aim(self.reference, where, branch, g, m, eps)
        delta = change[0] if answer.moves_map else torch.zeros_like(change[0])
        return PostNormBiasSolution(delta, answer.scale, answer.findings)


def refit_scale(planned: Tensor, u: Tensor, g: Tensor, eps: float) -> Tensor:
    """The planned scale, corrected for what rounding did to the output map: `(d,)`.

    `m_j = (Σ g_ij u_ij + eps m'_j) / (Σ u_ij² + eps)`, the least-squares scale with a pull of weight eps towards the
    plan, u `(n, d)` as measured after the map was written. With eps the machine epsilon of the storage dtype and u
    off by about eps, no scale moves by more than a fraction sqrt(eps) / 2, however small u is. [ours]
    """
    u, g = (rows.double().reshape(-1, planned.numel()) for rows in (u, g))
    return ((g * u).sum(0) + eps * planned) / (u.square().sum(0) + eps)

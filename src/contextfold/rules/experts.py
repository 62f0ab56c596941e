"""Mixtures of experts (equation sheet, section 7): match the router first, then give the wanted sum.

With E experts, gate weights s_e (0 for those that are not active) and hidden vectors h_e, the branch is
`Σ_e s_e W_out,e h_e`. So the output maps side by side are one matrix that reads `(s_1 h_1, …, s_E h_E)`: the
least-norm rule is the pseudo-inverse on that, and the others are special choices among its exact solutions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from contextfold.calculus import Demand, Kind, Service
from contextfold.lowrank import LowRank, min_norm_update
from contextfold.outcomes import Finding, Outcome
from contextfold.rules.base import MATRIX, UpdateRule, finite, judge, refuse_if
from contextfold.rules.linear import InputWeight, Steering

__all__ = [
    "Active",
    "EvenShare",
    "ExpertInput",
    "ExpertsSolution",
    "LeastNorm",
    "OutputOnly",
    "SharedExpert",
    "flips",
    "ties",
]

ZERO = 1e-12
"""A gate sum below this fraction of the sum of absolute gates counts as zero."""

TIE = 16
"""Scores closer than this many units of rounding (of the largest score) are called tied."""

_REACH = Service(Demand.REACH, Kind.EXPERTS)


def ties(where: str, scores: Tensor, active: int) -> Sequence[Finding]:
    """Name a tie at the border of the selection: `scores (n, E)` in the dtype in which the router compares them."""
    if active >= scores.shape[1]:
        return []
    ordered = scores.double().sort(dim=1, descending=True).values
    gap = ordered[:, active - 1] - ordered[:, active]
    limit = TIE * torch.finfo(scores.dtype).eps * ordered.abs().amax(1)
    tied = gap <= limit
    if not bool(tied.any()):
        return []
    row = int(tied.nonzero()[0])
    return [Finding(Outcome.TIED_ROUTER, where, "smallest gap of scores", float(gap[row]), float(limit[row]))]


def flips(where: str, wanted: Tensor, met: Tensor) -> Sequence[Finding]:
    """Name positions where other experts are active than under the context: `wanted, met (n, k)` indices."""
    other = wanted.sort(dim=1).values != met.sort(dim=1).values
    count = int(other.any(1).sum())
    return [Finding(Outcome.EXPERT_FLIP, where, "positions with other experts", count, 0)] if count else []


@final
@dataclass(frozen=True)
class ExpertInput(UpdateRule):
    """Router, shared gate, and the input maps of every expert active under z_C read on z what they read on z_C.

    One D serves them all, as `dW = W D`; scores, selection and gate weights then follow, selection biases included.
    """

    name: ClassVar[str] = "experts, input weight"
    equation: ClassVar[str] = "dW = W (z_C - z) zᵀ / ‖z‖² for router, shared gate and experts active under z_C"
    source: ClassVar[str] = "[E] lemmas on the MLP and on mixtures of experts"
    condition: ClassVar[str] = "z != 0; no tie at the border of the selection; several positions: z_i independent"
    minimal: ClassVar[str] = "smallest Frobenius norm of D among all D with D z = z_C - z"
    serves: ClassVar[Service] = Service(Demand.MATCH, Kind.EXPERTS)
    meets: ClassVar[tuple[Outcome, ...]] = (*MATRIX, Outcome.TIED_ROUTER, Outcome.EXPERT_FLIP)

    def solve(
        self, where: str, z: Tensor, z_C: Tensor, scores_C: Tensor, active: int, protected: Tensor | None = None
    ) -> Steering:
        """`z, z_C (n, d)`, `scores_C (n, E)` the router's scores under the context, `active` experts per position.

        Raises `NotControllable` as `InputWeight`; a tied router is named, not refused.
        """
        steering = InputWeight().solve(where, z, z_C, protected)
        findings = [*steering.findings, *ties(where, scores_C, active)]
        return Steering(steering.D, steering.condition, findings)


@dataclass(frozen=True, eq=False)
class Active:
    """What the experts did at n positions: `gates (n, E)`, 0 where not active, and `hidden (n, E, f)`."""

    gates: Tensor
    hidden: Tensor

    @property
    def sources(self) -> Tensor:
        """`(n, E f)`: what the output maps, seen as one matrix, read."""
        return (self.gates.double()[..., None] * self.hidden.double()).flatten(1)

    def split(self, delta: LowRank) -> Mapping[int, LowRank]:
        """The edit of that one matrix, `(d, E f)`, as one edit per expert that is active somewhere."""
        width = self.hidden.shape[2]
        moved = (self.gates != 0).any(0).nonzero()[:, 0].tolist()
        return {e: LowRank(delta.B, delta.A[:, e * width : (e + 1) * width]) for e in moved}


@dataclass(frozen=True, eq=False)
class ExpertsSolution:
    """The edit of each expert's output map that moves, by index."""

    deltas: Mapping[int, LowRank]
    condition: float
    findings: Sequence[Finding]


@final
@dataclass(frozen=True)
class EvenShare(UpdateRule):
    """Every active expert takes the same share of the change, whatever its gate."""

    name: ClassVar[str] = "experts by even share"
    equation: ClassVar[str] = "dW_out,e = (g_rest / S) h_eᵀ / ‖h_e‖², S = Σ s_e as measured"
    source: ClassVar[str] = "[E] lemma on mixtures of experts"
    condition: ClassVar[str] = "S != 0, every active h_e != 0; one position"
    minimal: ClassVar[str] = "per expert, for its share; not jointly"
    serves: ClassVar[Service] = _REACH
    meets: ClassVar[tuple[Outcome, ...]] = (Outcome.GATE_SUM_ZERO, Outcome.ZERO_SOURCE, Outcome.NOT_FINITE)

    def solve(self, where: str, experts: Active, branch: Tensor, g: Tensor) -> ExpertsSolution:
        """One position; `branch (1, d)` the whole branch as it is, `g (1, d)` as it should be.

        S is the measured sum: weights renormalised in float32 do not add up to 1. Raises `NotControllable`.
        """
        finite(where, gates=experts.gates, hidden=experts.hidden, g=g)
        gates = experts.gates[0].double()
        share = (g - branch).double() / self.gate_sum(where, gates)
        deltas: dict[int, LowRank] = {}
        findings: list[Finding] = []
        for e in gates.nonzero()[:, 0].tolist():
            h_e = experts.hidden[:, e].double()
            solution = min_norm_update(h_e, share)
            findings += judge(f"{where}, expert {e}", h_e, share, solution)
            deltas[e] = solution.delta
        return ExpertsSolution(deltas, 1.0, findings)

    @staticmethod
    def gate_sum(where: str, gates: Tensor) -> float:
        """S of `gates (E,)`. Raises `NotControllable` where it is 0."""
        S, limit = float(gates.sum()), ZERO * float(gates.abs().sum())
        refuse_if(abs(S) <= limit, Finding(Outcome.GATE_SUM_ZERO, where, "gate sum S", S, limit))
        return S


class JointOutput(UpdateRule):
    """All output maps of the active experts as one matrix, moved as little as possible."""

    equation: ClassVar[str] = "dW_out,e = s_e g_rest h_eᵀ / Σ_j s_j² ‖h_j‖²"
    minimal: ClassVar[str] = "smallest joint Frobenius norm over the experts"
    serves: ClassVar[Service] = _REACH
    meets: ClassVar[tuple[Outcome, ...]] = MATRIX

    @final
    def solve(self, where: str, experts: Active, branch: Tensor, g: Tensor) -> ExpertsSolution:
        """`branch, g (n, d)`: the whole branch as it is and as it should be. Raises `NotControllable`."""
        finite(where, gates=experts.gates, hidden=experts.hidden, g=g)
        sources, changes = experts.sources, (g - branch).double()
        solution = min_norm_update(sources, changes)
        findings = judge(where, sources, changes, solution)
        return ExpertsSolution(experts.split(solution.delta), solution.condition, findings)


@final
@dataclass(frozen=True)
class LeastNorm(JointOutput):
    """The change is spread so that the edits of all experts together are smallest."""

    name: ClassVar[str] = "experts by least norm"
    source: ClassVar[str] = "[ours]"
    condition: ClassVar[str] = "one s_j h_j != 0, S may be 0; several positions: their (s_j h_j) independent"


@final
@dataclass(frozen=True)
class OutputOnly(JointOutput):
    """The router is left alone: the experts that z selects give the whole wanted branch."""

    name: ClassVar[str] = "experts, output only"
    source: ClassVar[str] = "[ours]"
    condition: ClassVar[str] = "one s_j h_j != 0 among the experts that z selects; immune to ties of the router"


@final
@dataclass(frozen=True)
class SharedExpert(UpdateRule):
    """The expert that is always active takes all of it; routed experts are untouched."""

    name: ClassVar[str] = "shared expert alone"
    equation: ClassVar[str] = "dW_out,s = g_rest h_sᵀ / (s_s ‖h_s‖²)"
    source: ClassVar[str] = "[ours]"
    condition: ClassVar[str] = "there is a shared expert, s_s h_s != 0; several positions: s_s h_s independent"
    minimal: ClassVar[str] = "smallest Frobenius norm of the one map that moves"
    serves: ClassVar[Service] = Service(Demand.REACH, Kind.EXPERTS, shared=True)
    meets: ClassVar[tuple[Outcome, ...]] = MATRIX

    def solve(self, where: str, gate: Tensor, hidden: Tensor, branch: Tensor, g: Tensor) -> ExpertsSolution:
        """`gate (n, 1)` (ones without a shared gate), `hidden (n, f)`; the edit stands under index 0."""
        finite(where, gate=gate, hidden=hidden, g=g)
        sources, changes = (gate * hidden).double(), (g - branch).double()
        solution = min_norm_update(sources, changes)
        findings = judge(where, sources, changes, solution)
        return ExpertsSolution({0: solution.delta}, solution.condition, findings)

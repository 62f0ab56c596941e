"""Edits of a matrix: the input maps of a branch, and an output map with no norm after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn.functional import linear

from contextfold.calculus import Demand, Kind, Service
from contextfold.lowrank import LowRank, min_norm_update
from contextfold.outcomes import Finding, Outcome
from contextfold.rules.base import MATRIX, UpdateRule, finite, judge

__all__ = [
    "AttentionOutput",
    "InputWeight",
    "MatrixOutput",
    "OutputAlone",
    "OutputWeight",
    "ParallelOutput",
    "Steering",
    "WeightSolution",
    "with_protected",
]


def with_protected(sources: Tensor, changes: Tensor, protected: Tensor | None) -> tuple[Tensor, Tensor]:
    """Append rows `protected (p, in)` that the edit must not move: their wanted change is zero."""
    if protected is None or protected.shape[0] == 0:
        return sources, changes
    nothing = changes.new_zeros(protected.shape[0], changes.shape[1])
    return torch.cat([sources, protected]), torch.cat([changes, nothing])


@dataclass(frozen=True, eq=False)
class Steering:
    """`D` with `(1 + D) z_i = z_C,i`: one solve that serves every map reading z, as `dW = W D`."""

    D: LowRank
    condition: float
    findings: Sequence[Finding]

    def delta(self, W: Tensor) -> LowRank:
        """The edit of one input map `W (out, d)`."""
        # In the precision of W, or single where that is less: a rounding here moves h, which the output map then reads
        # as it is, and costs no exactness; a float64 copy of W would cost three times the product.
        wide = torch.promote_types(W.dtype, torch.float32)
        rows: Tensor = linear(self.D.B.T.to(wide), W.to(wide))
        return LowRank(rows.T.double(), self.D.A)


@final
@dataclass(frozen=True)
class InputWeight(UpdateRule):
    """Every input map W that reads z produces on z what it produced on z_C."""

    name: ClassVar[str] = "input weight"
    equation: ClassVar[str] = "dW = W (z_C - z) zᵀ / ‖z‖²"
    source: ClassVar[str] = (
        "[E] eq. 2, 3, lemma on the MLP, and lemma on norms with z = N(s); [L] theorem 2.3; n positions [ours]"
    )
    condition: ClassVar[str] = "z != 0; several positions: z_i independent"
    minimal: ClassVar[str] = "smallest Frobenius norm of D among all D with D z = z_C - z"
    serves: ClassVar[Service] = Service(Demand.MATCH, Kind.WEIGHT)
    meets: ClassVar[tuple[Outcome, ...]] = MATRIX

    def solve(self, where: str, z: Tensor, z_C: Tensor, protected: Tensor | None = None) -> Steering:
        """`z, z_C (n, d)`, `protected (p, d)` rows that the maps must still read as before.

        Raises `NotControllable` for a zero source, inconsistent rows, or values that are not finite.
        """
        finite(where, z=z, z_C=z_C)
        sources, changes = with_protected(z.double(), (z_C - z).double(), protected)
        solution = min_norm_update(sources, changes)
        findings = judge(where, sources, changes, solution)
        return Steering(solution.delta, solution.condition, findings)


@dataclass(frozen=True, eq=False)
class WeightSolution:
    """The edit of one matrix."""

    delta: LowRank
    condition: float
    findings: Sequence[Finding]


class MatrixOutput(UpdateRule):
    """A matrix with no norm after it gives any wanted output. What differs between sites is what g and h are."""

    equation: ClassVar[str] = "dW_out = (g - W_out h - b) hᵀ / ‖h‖²"
    minimal: ClassVar[str] = "smallest Frobenius norm"

    @final
    def solve(
        self, where: str, h: Tensor, branch: Tensor, g: Tensor, protected: Tensor | None = None
    ) -> WeightSolution:
        """`h (n, f)`, `branch = W_out h + b (n, d)` as it is, `g (n, d)` as it should be.

        `protected (p, f)`: inputs on which the map must not change. Raises `NotControllable` for a zero source,
        inconsistent rows, or values that are not finite.
        """
        finite(where, h=h, branch=branch, g=g)
        sources, changes = with_protected(h.double(), (g - branch).double(), protected)
        solution = min_norm_update(sources, changes)
        findings = judge(where, sources, changes, solution)
        return WeightSolution(solution.delta, solution.condition, findings)


@final
@dataclass(frozen=True)
class OutputWeight(MatrixOutput):
    """The output map, with no norm after it, gives the wanted branch."""

    name: ClassVar[str] = "output weight"
    source: ClassVar[str] = "[E] lemma on output weights; aimed at the measured g [ours]"
    condition: ClassVar[str] = "h != 0; several positions: h_i independent"
    serves: ClassVar[Service] = Service(Demand.REACH, Kind.WEIGHT)
    meets: ClassVar[tuple[Outcome, ...]] = MATRIX


@final
@dataclass(frozen=True)
class OutputAlone(MatrixOutput):
    """The output map does all of it; the input maps are left alone, so h is what the reduced run gives."""

    name: ClassVar[str] = "output weight alone"
    source: ClassVar[str] = "[P] per token; [ours]"
    condition: ClassVar[str] = "h of the reduced run != 0; several positions: h_i independent"
    minimal: ClassVar[str] = "smallest Frobenius norm; one matrix per block"
    serves: ClassVar[Service] = Service(Demand.REACH, Kind.WEIGHT)
    meets: ClassVar[tuple[Outcome, ...]] = MATRIX


@final
@dataclass(frozen=True)
class AttentionOutput(MatrixOutput):
    """The attention output map gives v_C, after which the MLP needs no edit. h is a, the concatenated heads."""

    name: ClassVar[str] = "attention output"
    equation: ClassVar[str] = "dW_o = (v_C - v) aᵀ / ‖a‖²"
    source: ClassVar[str] = "[ours]"
    condition: ClassVar[str] = "a of the reduced run != 0; no norm after attention; several positions: a_i independent"
    minimal: ClassVar[str] = "smallest Frobenius norm; one matrix per block"
    serves: ClassVar[Service] = Service(Demand.REACH, Kind.WEIGHT, reads="a")
    meets: ClassVar[tuple[Outcome, ...]] = MATRIX


@final
@dataclass(frozen=True)
class ParallelOutput(MatrixOutput):
    """Attention and MLP side by side: the MLP takes up what attention lost, r is x plus the attention branch."""

    name: ClassVar[str] = "parallel output"
    equation: ClassVar[str] = "dW_out = (g - W_out h - b) hᵀ / ‖h‖², g = (y_C - x - attention(x)) / alpha"
    source: ClassVar[str] = "[E] lemma on parallel blocks; aimed at the measured g [ours]"
    condition: ClassVar[str] = "h != 0; several positions: h_i independent"
    serves: ClassVar[Service] = Service(Demand.REACH, Kind.WEIGHT, beside=True)
    meets: ClassVar[tuple[Outcome, ...]] = MATRIX

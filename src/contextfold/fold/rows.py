"""One block, solved for several positions at once while the reduced run passes through it: what all sites share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from contextfold.anatomy import Block, LinearMap
from contextfold.anatomy import rows as first_rows
from contextfold.errors import NotControllable
from contextfold.lowrank import LowRank, Metric, Solution
from contextfold.outcomes import Finding, Outcome, labels
from contextfold.patch import MatrixEdit, Site, factor_dtype
from contextfold.rules.base import NEAR_SINGULAR, RESIDUAL
from contextfold.runtime import BlockState, Overlay

__all__ = ["RowsFold", "SequenceLayer", "Targets"]


@dataclass(frozen=True)
class SequenceLayer:
    """How one block was met at the chosen positions."""

    layer: int
    rank: int
    """Numerical rank of the sources, the least over the block's solves: how many positions its maps can serve here."""
    condition: float
    weight_ratio: float
    """Largest `‖dW‖ / ‖W‖` of the block's maps, Frobenius."""
    scale_ratio_max: float
    """Largest `|m'_i| / (|m_i| + median |m|)`; NaN without a norm after the MLP."""
    max_abs_dm: float
    relative_error: float
    """Largest `‖t − t_C‖ / ‖t_C‖` over the positions, t the finished sum as the patched block gave it, t_C as it was
    wanted: where lengths were freed, with the length that it was given."""
    length_change_max: float
    """Largest `|beta_i − 1|`, the change of a freed length; 0 where none was freed."""
    findings: tuple[Finding, ...]
    actions: tuple[float, ...] = ()
    """Per position of the patch's `exact_at`, `‖dW h‖ / ‖W h‖` of the map that gives the branch: what it adds there."""

    @property
    def outcome(self) -> str:
        """Labels of what was met, `exact` when there was nothing to remark."""
        return labels(self.findings)


@dataclass(frozen=True, eq=False)
class Targets:
    """What a block is to give, and how."""

    wanted: BlockState
    """In context, at the chosen positions: t, and what the site matches besides."""
    rows: Tensor
    """The chosen rows of the reduced run, counted from its end."""
    strict: bool = False
    free: bool = False
    """Whether only the directions of the finished sums are read, so that their lengths may be used."""


@dataclass(eq=False)
class RowsFold(ABC):
    """Solves one block for the chosen rows together."""

    letters: ClassVar[str]
    """What it needs to know of the run with the context."""

    block: Block
    targets: Targets
    usual: dict[str, Tensor] = field(default_factory=dict, init=False)
    """By letter, `(t, ·)`: what maps read on typical text, for the whitened form; empty for the plain one."""
    numbers: dict[str, float] = field(default_factory=dict, init=False)
    findings: list[Finding] = field(default_factory=list, init=False)
    actions: tuple[float, ...] = field(default=(), init=False)

    @property
    @abstractmethod
    def sites(self) -> tuple[Site, ...]:
        """Every parameter that it may edit."""

    @property
    @abstractmethod
    def plan(self) -> tuple[str, ...]:
        """Names of its rules, in the order in which they act."""

    @property
    @abstractmethod
    def readers(self) -> Mapping[str, nn.Module]:
        """By letter, a module that is called on what an edited map reads."""

    @abstractmethod
    def _solving(self, stack: ExitStack, overlay: Overlay) -> None:
        """Hook in what solves the block."""

    def listen(self, stack: ExitStack, overlay: Overlay) -> None:
        self._solving(stack, overlay)
        stack.callback(self.block.total.listen(self._see_total).remove)

    def see_usual(self, letter: str, value: Tensor) -> None:
        """Typical inputs of one letter, without the first token, which is the sink."""
        self.usual[letter] = first_rows(value)[1:].detach().clone()

    def _metric(self, letter: str) -> Metric | None:
        return Metric.of(self.usual[letter]) if letter in self.usual else None

    def _pick(self, value: Tensor) -> Tensor:
        return first_rows(value)[self.targets.rows.to(value.device)].double()

    def _aim(self) -> Tensor:
        """`(n, d)`: the finished sums that were wanted in the end."""
        return self.targets.wanted["t"].double()

    def _see_total(self, value: Tensor) -> None:
        target = self._aim()
        error = (self._pick(value) - target).norm(dim=1) / target.norm(dim=1)
        self.numbers["relative_error"] = float(error.max())

    def _judge(self, solution: Solution) -> None:
        known = self.numbers
        known["rank"] = min(known.get("rank", math.inf), solution.rank)
        known["condition"] = max(known.get("condition", 1.0), solution.condition)
        name = self.block.name
        if solution.residual > RESIDUAL:
            found = [Finding(Outcome.LEAST_SQUARES, name, "relative residual", solution.residual, RESIDUAL)]
        elif solution.condition > NEAR_SINGULAR:
            found = [Finding(Outcome.NEAR_SINGULAR, name, "condition number", solution.condition, NEAR_SINGULAR)]
        else:
            found = []
        self._note(found)

    def _note(self, found: Sequence[Finding]) -> None:
        """Keep findings. Raises `NotControllable` when only exact layers are allowed, and this is none."""
        self.findings += found
        inexact = [f for f in found if f.outcome in (Outcome.LEAST_SQUARES, Outcome.SCALE_INFEASIBLE)]
        if self.targets.strict and inexact:
            raise NotControllable(inexact)

    def _acting(self, delta: LowRank, rows: Tensor, branch: Tensor) -> LowRank:
        """Notes what `delta` adds to `branch (n, d)`, which the map gives for `rows (n, f)` as it is."""
        self.actions = tuple((delta(rows).norm(dim=1) / branch.norm(dim=1)).tolist())
        return delta

    def _put(self, overlay: Overlay, linear: LinearMap, delta: LowRank) -> None:
        """Lend an edit, for more positions than the map has outputs (or inputs) in no more factors than it has."""
        dtype = self._factor_dtype()
        W = linear.norm(dtype)
        ratio = delta.norm() / W if W else math.inf
        self.numbers["weight_ratio"] = max(self.numbers.get("weight_ratio", 0.0), ratio)
        if delta.rank > min(delta.shape):
            delta = _square(delta)
        # In one piece, as it comes from a file: products with a transposed view may round otherwise.
        overlay.put(linear.site, MatrixEdit(LowRank(*(part.to(dtype).contiguous() for part in (delta.B, delta.A)))))

    def _factor_dtype(self) -> torch.dtype:
        return factor_dtype(self.block.anchor.dtype)

    def report(self) -> SequenceLayer:
        missing = float("nan")
        return SequenceLayer(
            layer=self.block.index,
            rank=int(self.numbers.get("rank", 0)),
            condition=self.numbers.get("condition", 1.0),
            weight_ratio=self.numbers.get("weight_ratio", 0.0),
            scale_ratio_max=self.numbers.get("scale_ratio_max", missing),
            max_abs_dm=self.numbers.get("max_abs_dm", 0.0),
            relative_error=self.numbers.get("relative_error", missing),
            length_change_max=self.numbers.get("length_change_max", 0.0),
            findings=tuple(self.findings),
            actions=self.actions,
        )


def _square(delta: LowRank) -> LowRank:
    """The same edit, formed, times an identity of the smaller size."""
    dense = delta.to_dense()
    out, width = delta.shape
    eye = torch.eye(min(out, width), dtype=dense.dtype, device=dense.device)
    return LowRank(eye, dense) if out <= width else LowRank(dense, eye)

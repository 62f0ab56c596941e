"""One block, solved for several positions at once while the reduced run passes through it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from contextfold.anatomy import DenseBlock, Norm
from contextfold.anatomy import rows as first_rows
from contextfold.errors import NotControllable
from contextfold.lowrank import Metric, Solution, min_norm_update
from contextfold.outcomes import Finding, Outcome
from contextfold.patch import MatrixEdit, ScaleEdit, Site
from contextfold.rules import JointPostNorm, refit_scale
from contextfold.rules.base import NEAR_SINGULAR, RESIDUAL, finite
from contextfold.runtime import Overlay, before

__all__ = ["RowsFold", "SequenceLayer"]


@dataclass(frozen=True)
class SequenceLayer:
    """How one block was met at the chosen positions."""

    layer: int
    rank: int
    """Numerical rank of the sources: how many positions the output map can serve here."""
    condition: float
    weight_ratio: float
    """`‖dW‖ / ‖W‖`, Frobenius."""
    scale_ratio_max: float
    """Largest `|m'_i| / (|m_i| + median |m|)`; NaN without a norm after the MLP."""
    max_abs_dm: float
    relative_error: float
    """Largest `‖t − t_C‖ / ‖t_C‖` over the positions, t the finished sum as the patched block gave it."""
    findings: tuple[Finding, ...]

    @property
    def outcome(self) -> str:
        """Labels of what was met, `exact` when there was nothing to remark."""
        return ", ".join(sorted({f.outcome.label for f in self.findings})) or Outcome.EXACT.label


@dataclass(eq=False)
class RowsFold:
    """Solves the output map of one block, and the scale behind it, for the chosen rows together."""

    block: DenseBlock
    wanted: Tensor
    """`(n, d)`: the finished sums in context."""
    rows: Tensor
    usual: Tensor | None
    """`(t, f)`: typical inputs of the output map, for the whitened form."""
    strict: bool

    parts: dict[int, Tensor] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    g: Tensor = field(init=False)
    scale: Tensor | None = None

    @property
    def sites(self) -> tuple[Site, ...]:
        post = () if self.block.norm_post is None else (self.block.norm_post.site,)
        return (self.block.output_map.site, *post)

    def listen(self, stack: ExitStack, overlay: Overlay) -> None:
        for k, reading in enumerate(self.block.residual):
            stack.callback(reading.listen(partial(self._see_part, k)).remove)
        stack.callback(before(self.block.output_map.module, partial(self._match, overlay)).remove)
        if self.block.norm_post is not None:
            stack.callback(before(self.block.norm_post.module, partial(self._refit, overlay)).remove)
        stack.callback(self.block.total.listen(self._see_total).remove)

    def _pick(self, value: Tensor) -> Tensor:
        return first_rows(value)[self.rows.to(value.device)].double()

    def _see_part(self, k: int, value: Tensor) -> None:
        self.parts[k] = self._pick(value)

    def _see_total(self, value: Tensor) -> None:
        target = self.wanted.double()
        error = (self._pick(value) - target).norm(dim=1) / target.norm(dim=1)
        self.numbers["relative_error"] = float(error.max())

    def _match(self, overlay: Overlay, value: Tensor) -> None:
        linear, h = self.block.output_map, self._pick(value)
        self.g = self.block.wanted_branch(self.wanted, [self.parts[k] for k in sorted(self.parts)])
        finite(self.block.name, h=h, g=self.g)
        branch = linear.exact(h)
        metric = None if self.usual is None else Metric.of(self.usual)
        if self.block.norm_post is None:
            solution = min_norm_update(h, self.g - branch, metric)
        else:
            solution = self._through_norm(self.block.norm_post, h, branch, metric)
        self._judge(solution)
        dtype = self._factor_dtype()
        W = float(torch.linalg.vector_norm(linear.weight, dtype=dtype))
        self.numbers["weight_ratio"] = solution.delta.norm() / W if W else math.inf
        overlay.put(linear.site, MatrixEdit(solution.delta.to(dtype)))

    def _through_norm(self, norm: Norm, h: Tensor, branch: Tensor, metric: Metric | None) -> Solution:
        joint = JointPostNorm().solve(self.block.name, h, branch, self.g, norm.scale, norm.eps, metric)
        self.findings += joint.findings
        self._refuse_inexact(joint.findings)
        m = norm.scale.abs()
        self.numbers["scale_ratio_max"] = float((joint.scale.abs() / (m + m.median())).max())
        self.scale = joint.scale
        return joint.solution

    def _refit(self, overlay: Overlay, q: Tensor) -> None:
        """The scale once more, by least squares over the positions, now that the map is what it is after rounding."""
        norm = self.block.norm_post
        assert norm is not None
        assert self.scale is not None
        base, dtype = norm.scale, self._factor_dtype()
        scale = refit_scale(self.scale, norm.unscaled(self._pick(q)), self.g, torch.finfo(q.dtype).eps)
        self.numbers["max_abs_dm"] = float((scale - base).abs().max())
        overlay.put(norm.site, ScaleEdit(base.to(dtype), scale.to(dtype), norm.offset))

    def _judge(self, solution: Solution) -> None:
        self.numbers |= {"rank": solution.rank, "condition": solution.condition}
        name, found = self.block.name, []
        if solution.residual > RESIDUAL:
            found.append(Finding(Outcome.LEAST_SQUARES, name, "relative residual", solution.residual, RESIDUAL))
        elif solution.condition > NEAR_SINGULAR:
            found.append(Finding(Outcome.NEAR_SINGULAR, name, "condition number", solution.condition, NEAR_SINGULAR))
        self.findings += found
        self._refuse_inexact(found)

    def _refuse_inexact(self, findings: Sequence[Finding]) -> None:
        inexact = [f for f in findings if f.outcome in (Outcome.LEAST_SQUARES, Outcome.SCALE_INFEASIBLE)]
        if self.strict and inexact:
            raise NotControllable(inexact)

    def _factor_dtype(self) -> torch.dtype:
        return torch.float64 if self.block.anchor.dtype == torch.float64 else torch.float32

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
            findings=tuple(self.findings),
        )

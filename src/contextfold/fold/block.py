"""One block, solved while the reduced run passes through it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from contextfold.anatomy import (
    Block,
    Call,
    DenseBlock,
    ExpertBlock,
    LinearMap,
    Norm,
    Observation,
    first_output,
    first_tensor,
    observe,
    rows,
    split_columns,
)
from contextfold.errors import NotControllable
from contextfold.lowrank import LowRank
from contextfold.magnitudes import counts
from contextfold.outcomes import Finding, Outcome, labels
from contextfold.patch import MatrixEdit, ScaleEdit, Site, factor_dtype
from contextfold.rules import EvenShare, InputWeight, OutputWeight, PostNorm, Reference, SharedExpert, refit_scale
from contextfold.rules.base import NEAR_SINGULAR, UpdateRule
from contextfold.rules.linear import Steering, WeightSolution
from contextfold.rules.postnorm import PostNormSolution
from contextfold.runtime import BlockState, Overlay, before

__all__ = ["BlockFold", "LayerReport"]

S = TypeVar("S", Steering, WeightSolution, PostNormSolution)


@dataclass(frozen=True)
class LayerReport:
    """How one block was met; all norms Euclidean or Frobenius."""

    layer: int
    relative_error: float
    """`‖y − y_C‖ / ‖y_C‖` at the folded position, of the patched block as it ran."""
    absolute_error: float
    """`max |y − y_C|`."""
    weight_ratio: float
    """Largest `‖dW‖ / ‖W‖` of the block's maps."""
    max_abs_dm: float
    min_abs_u: float
    """Smallest |u_i| of the branch before the edit of the output map; NaN without a norm after the MLP."""
    min_abs_m: float
    cos_z: float
    """Cosine between z and z_C."""
    condition: float
    """Largest condition number of the block's solves."""
    findings: tuple[Finding, ...]
    u_counts: tuple[int, ...] = ()
    """How many `|u_i|` lie between neighbouring `magnitudes.EDGES`; empty where `min_abs_u` is NaN."""

    @property
    def outcome(self) -> str:
        """Labels of what was met, `exact` when there was nothing to remark."""
        return labels(self.findings)


@dataclass(eq=False)
class BlockFold:
    """Solves one block while the reduced run passes through it; the last row is the target, the sink stays."""

    model: nn.Module
    block: Block
    wanted: BlockState
    sink: int | None
    rules: tuple[Reference, Reference | None]
    sizes: Mapping[Site, float]
    """Frobenius norms of the stored maps."""
    outer: tuple[type[UpdateRule], ...] = ()
    """The rules that give the wanted branch; of a mixture, how its output maps share it."""

    findings: list[Finding] = field(default_factory=list)
    steering: Steering | None = None
    inner_skipped: bool = False
    """The plan needs no edit of the input maps (a parallel block reads the same z anyway), or z gave none."""
    dry: bool = False
    """The branch of a mixture is being called besides the forward."""
    parts: dict[int, Tensor] = field(default_factory=dict)
    """What each residual reading gave at the last row, float64."""
    g: Tensor = field(init=False)
    y: Tensor = field(init=False)
    member: Reference = field(init=False)
    scale: Tensor | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    u_counts: tuple[int, ...] = ()

    def listen(self, stack: ExitStack, overlay: Overlay) -> None:
        block = self.block

        def see_y(_module: nn.Module, _args: object, output: object) -> None:
            self.y = first_output(output)[0, -1].double()

        for k, reading in enumerate(block.residual):
            stack.callback(reading.listen(partial(self._see_part, k)).remove)
        match block:
            case DenseBlock():
                self._listen_dense(block, stack, overlay)
            case ExpertBlock():
                self._listen_experts(block, stack, overlay)
        if block.norm_post is not None:
            stack.callback(before(block.norm_post.module, lambda q: self.refit(rows(q), overlay)).remove)
        stack.callback(block.layer.register_forward_hook(see_y).remove)

    def _see_part(self, k: int, value: Tensor) -> None:
        if not self.dry:
            self.parts[k] = rows(value)[-1:].double()

    def _listen_dense(self, block: DenseBlock, stack: ExitStack, overlay: Overlay) -> None:
        for linear in block.input_maps:
            stack.callback(before(linear.module, self._input_matcher(linear, overlay)).remove)

        def match(h: Tensor) -> None:
            branch = block.output_map.exact(rows(h)[-1:])
            delta = self.match_output(rows(h), branch)
            if delta is not None:
                self._put_matrix(overlay, block.output_map, delta)

        stack.callback(before(block.output_map.module, match).remove)

    def _listen_experts(self, block: ExpertBlock, stack: ExitStack, overlay: Overlay) -> None:
        def match(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # The branch is called again while it is being solved, and those calls are not to be solved.
            if not self.dry:
                self.dry = True
                self._match_experts(block, rows(first_tensor(args, kwargs)), Call.of(args, kwargs), overlay)
                self.dry = False

        stack.callback(block.branch[0].register_forward_pre_hook(match, with_kwargs=True).remove)

    def _match_experts(self, block: ExpertBlock, z: Tensor, call: Call, overlay: Overlay) -> None:
        """All of a mixture in one place, since z is known before any of its maps runs (equation sheet, section 7)."""
        here = call.at(z.shape[0] - 1)
        wanted = observe(self.model, block, self.wanted["z"][0], here)
        if not self.inner_skipped:
            self._steer(z)
        if self.steering is not None:
            for linear in (*block.input_maps, *(block.stacked_inputs[k] for k in sorted(wanted.inputs))):
                self._put_matrix(overlay, linear, _steered(linear, self.steering))
        seen = observe(self.model, block, z[-1], here)
        if self.steering is not None and set(seen.hidden) != set(wanted.hidden):
            flipped = len(set(seen.hidden) ^ set(wanted.hidden))
            self.findings.append(Finding(Outcome.EXPERT_FLIP, block.name, "experts that differ", flipped, 0))
        columns = [c for c in seen.columns if SharedExpert not in self.outer or block.outputs[c[0]].site.expert is None]
        h = seen.row(columns)
        if self.sink is not None:
            h = torch.cat([observe(self.model, block, z[self.sink], call.at(self.sink)).row(columns), h])
        delta = self.match_output(h, seen.branch[None])
        if delta is not None:
            even = EvenShare in self.outer
            edits = self._evenly(seen, columns, h, delta(h[-1:])) if even else split_columns(delta, columns)
            for k, part in edits:
                self._put_matrix(overlay, block.outputs[k], part)

    def _evenly(
        self, seen: Observation, columns: Sequence[tuple[int, int]], h: Tensor, change: Tensor
    ) -> Iterator[tuple[int, LowRank]]:
        """Every map moves by the same `change / S` of `(1, d)`, which its gate then weighs."""
        shares = torch.tensor([seen.shares[k] for k, _ in columns], dtype=torch.float64)
        parts = torch.split(h, [width for _, width in columns], 1)
        for (k, _), fraction, part in zip(
            columns, shares / EvenShare.gate_sum(self.block.name, shares), parts, strict=True
        ):
            yield k, self._output_weight(part, torch.zeros_like(change), fraction * change)

    def _input_matcher(self, linear: LinearMap, overlay: Overlay) -> Callable[[Tensor], None]:
        """`dW = W D`, one D for all input maps (equation sheet, section 3)."""

        def match(z: Tensor) -> None:
            if self.steering is None and not self.inner_skipped:
                self._steer(rows(z))
            if self.steering is not None:
                self._put_matrix(overlay, linear, _steered(linear, self.steering))

        return match

    def _steer(self, z: Tensor) -> None:
        z_C = self.wanted["z"]
        self.numbers["cos_z"] = float(torch.cosine_similarity(z[-1:].double(), z_C.double()))
        try:
            self.steering = self._protecting(
                z, lambda protected: InputWeight().solve(self.block.name, z[-1:], z_C, protected)
            )
        except NotControllable as error:
            if error.findings[0].outcome is not Outcome.ZERO_SOURCE:
                raise
            # Nothing can be read off a zero vector; the output map alone is exact too, if h allows it.
            self.inner_skipped = True
            self.findings.append(Finding(Outcome.INNER_SKIPPED, self.block.name, "norm of z", 0.0, 0.0))
            return
        self._note(self.steering.condition, self.steering.findings)

    def match_output(self, h: Tensor, branch: Tensor) -> LowRank | None:
        """The edit of the output map that reads `h (n, f)`, aimed at the measured branch `g = (r' − r) / alpha`.

        `branch (1, d)` is what the map gives at the last row as it is. None when the scale alone does it.
        """
        self.g = self.block.wanted_branch(self.wanted["t"], [self.parts[k] for k in sorted(self.parts)])
        if self.block.norm_post is None:
            return self._output_weight(h, branch, self.g)
        return self._through_norm(self.block.norm_post, h, branch)

    def _output_weight(self, h: Tensor, branch: Tensor, g: Tensor) -> LowRank:
        solution = self._protecting(
            h, lambda protected: OutputWeight().solve(self.block.name, h[-1:], branch, g, protected)
        )
        self._note(solution.condition, solution.findings)
        return solution.delta

    def _through_norm(self, norm: Norm, h: Tensor, branch: Tensor) -> LowRank | None:
        u = norm.unscaled(branch)
        self.numbers["min_abs_u"] = float(u.abs().min())
        self.u_counts = counts(u)
        self.numbers["min_abs_m"] = float(norm.scale.abs().min())
        first, second = self.rules
        self.member = first
        fixed = (self.block.name, h[-1:], branch, self.g, norm.scale, norm.eps)

        def solve(member: Reference) -> PostNormSolution:
            return self._protecting(h, lambda protected: PostNorm(member).solve(*fixed, protected))

        try:
            solution = solve(first)
        except NotControllable as error:
            if second is None or error.findings[0].outcome not in (Outcome.TINY_SCALE, Outcome.ZERO_ACTIVATION):
                raise
            reason = error.findings[0]
            self.findings.append(
                Finding(Outcome.FELL_BACK, self.block.name, reason.quantity, reason.value, reason.threshold)
            )
            self.member = second
            solution = solve(second)
        self._note(solution.condition, solution.findings)
        self.scale = solution.scale
        return solution.delta

    def refit(self, q: Tensor, overlay: Overlay) -> None:
        """The scale, once the norm's input is known as it really is.

        The theorem's member divides by it outright (eq. 4); for the others only what rounding did is corrected.
        """
        if self.dry:
            return
        norm = self.block.norm_post
        assert norm is not None
        assert self.scale is not None
        u = norm.unscaled(q[-1:])[0]
        if self.member.name == "theorem":
            answer = PostNorm(self.member).solve(self.block.name, q[-1:], q[-1:], self.g, norm.scale, norm.eps)
            scale = answer.scale
        else:
            scale = refit_scale(self.scale, u, self.g[0], torch.finfo(q.dtype).eps)
        dtype = self._factor_dtype()
        base = norm.scale
        self.numbers["max_abs_dm"] = float((scale - base).abs().max())
        overlay.put(norm.site, ScaleEdit(base.to(dtype), scale.to(dtype), norm.offset))

    def _protecting(self, rows: Tensor, solve: Callable[[Tensor | None], S]) -> S:
        """Solve with the sink's row held fixed; without, where the query reads what the sink reads.

        The patch runs as it was built, so a sink that moves costs nothing in exactness.
        """
        if self.sink is None:
            return solve(None)
        try:
            solution = solve(rows[self.sink : self.sink + 1].double())
            if solution.condition <= NEAR_SINGULAR:
                return solution
            number = Finding(Outcome.SINK_MOVED, self.block.name, "condition number", solution.condition, NEAR_SINGULAR)
        except NotControllable as error:
            reason = error.findings[0]
            if reason.outcome is not Outcome.INCONSISTENT:
                raise
            number = Finding(Outcome.SINK_MOVED, self.block.name, reason.quantity, reason.value, reason.threshold)
        solution = solve(None)
        self.findings.append(number)
        return solution

    def _factor_dtype(self) -> torch.dtype:
        stored = self.block.anchor.dtype
        return factor_dtype(stored)

    def _put_matrix(self, overlay: Overlay, linear: LinearMap, delta: LowRank) -> None:
        W = self.sizes[linear.site]
        self.numbers["weight_ratio"] = max(self.numbers.get("weight_ratio", 0.0), delta.norm() / W if W else math.inf)
        overlay.put(linear.site, MatrixEdit(delta.to(self._factor_dtype())))

    def _note(self, condition: float, findings: Sequence[Finding]) -> None:
        self.numbers["condition"] = max(self.numbers.get("condition", 1.0), condition)
        self.findings += findings

    def report(self) -> LayerReport:
        y_C = self.wanted["y"][0].double()
        missing = float("nan")
        return LayerReport(
            layer=self.block.index,
            relative_error=float((self.y - y_C).norm() / y_C.norm()),
            absolute_error=float((self.y - y_C).abs().max()),
            weight_ratio=self.numbers.get("weight_ratio", 0.0),
            max_abs_dm=self.numbers.get("max_abs_dm", 0.0),
            min_abs_u=self.numbers.get("min_abs_u", missing),
            min_abs_m=self.numbers.get("min_abs_m", missing),
            cos_z=self.numbers.get("cos_z", missing),
            condition=self.numbers.get("condition", 1.0),
            findings=tuple(self.findings),
            u_counts=self.u_counts,
        )


def _steered(linear: LinearMap, steering: Steering) -> LowRank:
    """`W D`, in the precision that `Steering.delta` tells."""
    wide = torch.promote_types(linear.like.dtype, torch.float32)
    return LowRank(linear.after(steering.D.to(wide)).B.double(), steering.D.A)

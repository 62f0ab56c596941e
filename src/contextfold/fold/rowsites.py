"""The sites at which a block can take up the context of several positions, one class each."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from contextfold.anatomy import (
    Block,
    Bound,
    Call,
    DenseBlock,
    ExpertBlock,
    LinearMap,
    Norm,
    first_tensor,
    observe,
    split_columns,
)
from contextfold.anatomy import rows as first_rows
from contextfold.errors import InputError, UnsupportedModel
from contextfold.fold.rows import RowsFold, Targets
from contextfold.lowrank import LowRank, Metric, min_norm_update
from contextfold.patch import ScaleEdit, Site
from contextfold.rules import (
    AttentionOutput,
    InputWeight,
    JointPostNorm,
    OutputAlone,
    OutputOnly,
    OutputWeight,
    refit_scale,
)
from contextfold.rules.base import finite
from contextfold.runtime import Overlay, before

__all__ = ["SITES", "PatchSites", "rows_fold", "rows_kind", "sites_of"]

PatchSites = Literal["output", "all", "attention"]
"""Which maps carry a patch: the MLP's output maps, its input maps as well, or those of attention."""

SITES: tuple[PatchSites, ...] = ("output", "all", "attention")


@dataclass(eq=False)
class _BranchRows(RowsFold):
    """The output maps, and the scale of a norm behind them, give the wanted branches."""

    letters: ClassVar[str] = "t"

    parts: dict[int, Tensor] = field(default_factory=dict, init=False)
    """What each residual reading gave at the chosen rows, float64."""
    g: Tensor = field(init=False)
    scale: Tensor | None = field(default=None, init=False)
    lengths: Tensor | None = field(default=None, init=False)
    dry: bool = field(default=False, init=False)
    """The branch of a mixture is being called besides the forward."""

    @property
    def sites(self) -> tuple[Site, ...]:
        post = () if self.block.norm_post is None else (self.block.norm_post.site,)
        return (*(linear.site for linear in self.block.output_maps), *post)

    def _solving(self, stack: ExitStack, overlay: Overlay) -> None:
        for k, reading in enumerate(self.block.residual):
            stack.callback(reading.listen(partial(self._see_part, k)).remove)
        if self.block.norm_post is not None:
            stack.callback(before(self.block.norm_post.module, partial(self._refit, overlay)).remove)

    def _see_part(self, k: int, value: Tensor) -> None:
        if not self.dry:
            self.parts[k] = self._pick(value)

    def _aim(self) -> Tensor:
        target = super()._aim()
        return target if self.lengths is None else target * self.lengths[:, None]

    def _reach(self, h: Tensor, branch: Tensor, metric: Metric | None) -> LowRank:
        """The edit under which what reads `h (n, f)`, and gives `branch (n, d)` as it is, gives the wanted branches."""
        block = self.block
        self.g = block.wanted_branch(self.targets.wanted["t"], [self.parts[k] for k in sorted(self.parts)])
        finite(block.name, h=h, g=self.g)
        if block.norm_post is None:
            solution = min_norm_update(h, self.g - branch, metric)
            self._judge(solution)
            return self._acting(solution.delta, h, branch)
        return self._reach_through(block.norm_post, h, branch, metric)

    def _reach_through(self, norm: Norm, h: Tensor, branch: Tensor, metric: Metric | None) -> LowRank:
        block = self.block
        along = self.targets.wanted["t"].double() / block.total.factor / block.alpha if self.targets.free else None
        joint = JointPostNorm().solve(block.name, h, branch, self.g, norm.scale, norm.eps, metric, along)
        self._note(joint.findings)
        m = norm.scale.abs()
        self.numbers["scale_ratio_max"] = float((joint.scale.abs() / (m + m.median())).max())
        self.numbers["length_change_max"] = float((joint.lengths - 1).abs().max())
        self.g, self.scale, self.lengths = joint.g, joint.scale, joint.lengths
        self._judge(joint.solution)
        return self._acting(joint.solution.delta, h, branch)

    def _refit(self, overlay: Overlay, q: Tensor) -> None:
        """The scale once more, by least squares over the positions, now that the map is what it is after rounding."""
        if self.dry:
            return
        norm = self.block.norm_post
        assert norm is not None
        assert self.scale is not None
        base, dtype = norm.scale, self._factor_dtype()
        scale = refit_scale(self.scale, norm.unscaled(self._pick(q)), self.g, torch.finfo(q.dtype).eps)
        self.numbers["max_abs_dm"] = float((scale - base).abs().max())
        overlay.put(norm.site, ScaleEdit(base.to(dtype), scale.to(dtype), norm.offset))


@dataclass(eq=False)
class DenseRows(_BranchRows):
    """The output map of a dense block; the input maps are left alone."""

    block: DenseBlock

    @property
    def plan(self) -> tuple[str, ...]:
        return (OutputAlone.name if self.block.norm_post is None else JointPostNorm.name,)

    @property
    def readers(self) -> Mapping[str, nn.Module]:
        return {"h": self.block.output_map.module}

    def _solving(self, stack: ExitStack, overlay: Overlay) -> None:
        super()._solving(stack, overlay)
        stack.callback(before(self.block.output_map.module, partial(self._match, overlay)).remove)

    def _match(self, overlay: Overlay, value: Tensor) -> None:
        linear, h = self.block.output_map, self._pick(value)
        self._put(overlay, linear, self._reach(h, linear.exact(h), self._metric("h")))


@dataclass(eq=False)
class AllRows(DenseRows):
    """The input maps first, so that h is what it was with the context; then the output map."""

    letters: ClassVar[str] = "tz"

    steering: LowRank | None = field(default=None, init=False)

    @property
    def sites(self) -> tuple[Site, ...]:
        return self.block.sites

    @property
    def plan(self) -> tuple[str, ...]:
        outer = OutputWeight.name if self.block.norm_post is None else JointPostNorm.name
        return (InputWeight.name, outer)

    @property
    def readers(self) -> Mapping[str, nn.Module]:
        return {**super().readers, "z": self.block.input_maps[0].module}

    def _solving(self, stack: ExitStack, overlay: Overlay) -> None:
        super()._solving(stack, overlay)
        for linear in self.block.input_maps:
            stack.callback(before(linear.module, partial(self._steer, overlay, linear)).remove)

    def _steer(self, overlay: Overlay, linear: LinearMap, value: Tensor) -> None:
        """`dW = W D`, one D for all input maps (equation sheet, one position)."""
        if self.steering is None:
            z, z_C = self._pick(value), self.targets.wanted["z"].double()
            finite(self.block.name, z=z, z_C=z_C)
            solution = min_norm_update(z, z_C - z, self._metric("z"))
            self._judge(solution)
            self.steering = solution.delta
        self._put(overlay, linear, linear.after(self.steering))


@dataclass(eq=False)
class ExpertRows(_BranchRows):
    """The output maps of all experts that the positions use, side by side as one matrix; the router is left alone."""

    block: ExpertBlock
    model: nn.Module

    @property
    def plan(self) -> tuple[str, ...]:
        return (OutputOnly.name if self.block.norm_post is None else JointPostNorm.name,)

    @property
    def readers(self) -> Mapping[str, nn.Module]:
        return {}

    def _solving(self, stack: ExitStack, overlay: Overlay) -> None:
        super()._solving(stack, overlay)

        def match(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # The branch is called again while it is being solved, and those calls are not to be solved.
            if not self.dry:
                self.dry = True
                self._match(overlay, first_rows(first_tensor(args, kwargs)), Call.of(args, kwargs))
                self.dry = False

        stack.callback(self.block.branch[0].register_forward_pre_hook(match, with_kwargs=True).remove)

    def _match(self, overlay: Overlay, z: Tensor, call: Call) -> None:
        """One row of sources per position: its experts' hidden vectors times their shares, zero where it uses none."""
        rows = (self.targets.rows + z.shape[0]).tolist()
        seen = [observe(self.model, self.block, z[row], call.at(row)) for row in rows]
        columns = tuple(sorted({column for one in seen for column in one.columns}))
        h = torch.cat([one.row(columns) for one in seen])
        delta = self._reach(h, torch.stack([one.branch for one in seen]), None)
        for k, part in split_columns(delta, columns):
            self._put(overlay, self.block.outputs[k], part)


@dataclass(eq=False)
class AttentionRows(RowsFold):
    """The attention output map gives v_C; the MLP then reads what it read with the context, and is left alone."""

    letters: ClassVar[str] = "tv"

    x: Tensor = field(init=False)

    @property
    def _map(self) -> LinearMap:
        assert self.block.attention_output is not None
        return self.block.attention_output

    @property
    def sites(self) -> tuple[Site, ...]:
        return (self._map.site,)

    @property
    def plan(self) -> tuple[str, ...]:
        return (AttentionOutput.name,)

    @property
    def readers(self) -> Mapping[str, nn.Module]:
        return {"a": self._map.module}

    def _solving(self, stack: ExitStack, overlay: Overlay) -> None:
        stack.callback(before(self.block.layer, self._see_x).remove)
        stack.callback(before(self._map.module, partial(self._match, overlay)).remove)

    def _see_x(self, value: Tensor) -> None:
        self.x = self._pick(value)

    def _match(self, overlay: Overlay, value: Tensor) -> None:
        a, v_C = self._pick(value), self.targets.wanted["v"].double()
        finite(self.block.name, a=a, v_C=v_C)
        branch = self._map.exact(a)
        solution = min_norm_update(a, v_C - self.x - branch, self._metric("a"))
        self._judge(solution)
        self._put(overlay, self._map, self._acting(solution.delta, a, branch))


def rows_kind(block: Block, sites: PatchSites, whitened: bool = False) -> type[RowsFold]:
    """The class that edits `sites` of `block`. Raises `InputError` for an unknown word, and for the whitened form of
    what has none; `UnsupportedModel`."""
    match sites, block:
        case "attention", Block(attention_output=LinearMap(), norm_attention=None) if len(block.residual) == 1:
            return AttentionRows
        case "output", DenseBlock():
            return DenseRows
        case "output", ExpertBlock() if whitened:
            raise InputError(
                f"{block.name} is a mixture of experts, whose positions read through different maps; the whitened "
                "form is for dense blocks: leave out the typical text"
            )
        case "output", ExpertBlock():
            return ExpertRows
        case "all", DenseBlock() if block.input_maps:
            return AllRows
        case _ if sites in SITES:
            raise UnsupportedModel(f"{block.name} cannot be edited at sites {sites!r}: {_lacking(block, sites)}")
    raise InputError(f"sites {sites!r} is unknown; choose one of {', '.join(SITES)}")


def _lacking(block: Block, sites: PatchSites) -> str:
    if sites == "all":
        what = "has no input maps" if isinstance(block, DenseBlock) else "is a mixture, whose positions use other maps"
        return f"it {what}; use sites 'output'"
    if block.norm_attention is not None:
        return "a norm follows its attention, which then reaches only vectors of one length; use sites 'output'"
    return "its record names no attention output map that gives v in one place; use sites 'output'"


def rows_fold(bound: Bound, block: Block, sites: PatchSites, targets: Targets) -> RowsFold:
    """One block's solver. Raises as `rows_kind`."""
    kind = rows_kind(block, sites)
    if kind is ExpertRows:
        assert isinstance(block, ExpertBlock)
        return ExpertRows(block, targets, bound.model)
    return kind(block, targets)


def sites_of(plan: tuple[str, ...]) -> PatchSites:
    """What a patch with this plan edits."""
    if AttentionOutput.name in plan:
        return "attention"
    return "all" if InputWeight.name in plan else "output"

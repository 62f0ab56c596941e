"""Places where a bake edits, and what each of them is asked for: rows in, wanted changes out, edits in the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from contextfold.anatomy import Block, DenseBlock, LinearMap, Norm, Reading, first_tensor, norm_at
from contextfold.anatomy.sharded import whole_input
from contextfold.bake.lockstep import Lane, Lockstep, Stop
from contextfold.lowrank import LowRank
from contextfold.patch import Edit, MatrixEdit, ScaleEdit, Site, factor_dtype
from contextfold.rules import nearest_reachable

__all__ = ["ATTENTION", "INNER", "OUTPUT", "InnerJoint", "Joint", "OuterJoint", "joints_of"]

ATTENTION, INNER, OUTPUT = "attention output map", "input maps", "output map"
"""Roles, in the order in which a block runs them."""

STAY = 0.03
"""Behind a norm, weight of the direction that the map gives now, in units of a typical channel of the branch."""

FLOOR = 1e-3
"""Under the variance of a channel, in units of the mean variance."""

Stops = list[tuple[Stop, Stop]]
"""Where the forwards with what is aimed at, and those that are edited, stand."""


@dataclass(eq=False, kw_only=True)
class Joint(ABC):
    """A place to be solved, and the edit that acts there on edited lanes once it is."""

    layer: int
    role: str
    delta: LowRank | None = None
    scale: Tensor | None = None
    """New effective scale `(d,)` of a norm behind the map."""
    steps: Lockstep | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return f"layer {self.layer}, {self.role}"

    @property
    def lane(self) -> Lane | None:
        """The lane that runs, if a bake is what runs the model."""
        return None if self.steps is None else self.steps.current

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(out, in) of the edit."""

    @abstractmethod
    def listen(self, stack: ExitStack) -> None:
        """Register hooks that stop every lane here until it is solved, and then edit those to be edited."""

    @abstractmethod
    def survey(self, stops: Stops) -> None:
        """Take from all forwards what `wanted` needs to know of them together."""

    @abstractmethod
    def wanted(self, full: Stop, reduced: Stop) -> tuple[Tensor, Tensor]:
        """Sources `(n, in)` and the changes `(n, out)` wanted of them."""

    def weighted(self, full: Stop, reduced: Stop) -> tuple[Tensor, Tensor]:
        """The same, every row as heavy as it is to count."""
        weights = reduced.lane.weights.to(reduced.read)
        s, t = self.wanted(full, reduced)
        return weights * s, weights * t

    @abstractmethod
    def edits(self) -> dict[Site, Edit]:
        """What was solved, as edits of the model's parameters."""


@dataclass(eq=False, kw_only=True)
class OuterJoint(Joint):
    """A map whose result joins the stream: `sum = base + alpha · branch`, the branch behind a norm or not."""

    linear: LinearMap
    base: tuple[Reading, ...]
    alpha: Tensor
    norm: Norm | None
    channels: Tensor | None = None
    """`(d,)`: what a miss of the branch counts in each channel, behind a norm, once the forwards are surveyed."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.linear.shape

    def listen(self, stack: ExitStack) -> None:
        for k, reading in enumerate(self.base):
            stack.callback(reading.listen(partial(self._see_base, k)).remove)
        stack.callback(self.linear.module.register_forward_hook(self._at_map, with_kwargs=True).remove)
        if self.norm is not None:
            stack.callback(self.norm.module.register_forward_hook(self._at_norm, with_kwargs=True).remove)

    def _see_base(self, k: int, value: Tensor) -> None:
        if self.lane is not None and self.delta is None:
            self.lane.parts[self, k] = self.lane.pick(value)

    def _at_map(self, m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        lane = self.lane
        if lane is None or self.steps is None:
            return None
        source = whole_input(m, first_tensor(args, kwargs))
        if self.delta is None:
            parts = tuple(lane.parts.pop((self, k)) for k in range(len(self.base)))
            self.steps.arrive(Stop(self, source, lane, output, parts, lane.guard(source)))
        if not lane.edited or self.delta is None:
            return None
        return (output + self.delta(source.to(self.delta.B.dtype))).to(output.dtype)

    def _at_norm(self, _m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        if self.lane is None or not self.lane.edited or self.scale is None or self.norm is None:
            return None
        return (self.norm.unscaled(first_tensor(args, kwargs)) * self.scale).to(output.dtype)

    def joined(self, stop: Stop) -> Tensor:
        """`(n, d)`, float64: what the branch joins."""
        parts = (r.factor.to(part.device) * part.double() for r, part in zip(self.base, stop.parts, strict=True))
        return sum(parts, torch.zeros((), dtype=torch.float64, device=stop.given.device))

    def branch(self, full: Stop, reduced: Stop) -> Tensor:
        """`g (n, d)`, float64: what lifts the run without the context to the finished sum of the one with it."""
        own = self.unedited(full)
        return own + (self.joined(full) - self.joined(reduced)) / self.alpha.to(own.device)

    def unedited(self, stop: Stop) -> Tensor:
        """`(n, d)`, float64: the branch that the map makes without an edit."""
        output = stop.output.double()
        return output if self.norm is None else self.norm.unscaled(output) * self.norm.scale

    def survey(self, stops: Stops) -> None:
        """Behind a norm channels are in each other's way, and what varies little is as much to be met as what does."""
        if self.norm is None:
            return
        count, zero = 0, torch.zeros((), dtype=torch.float64, device=stops[0][0].given.device)
        total, square = zero, zero
        for full, _ in stops:
            sums = self.unedited(full) + self.joined(full) / self.alpha.to(zero.device)
            count, total, square = count + sums.shape[0], total + sums.sum(0), square + sums.square().sum(0)
        variance = (square / count - (total / count).square()).clamp_min(0)
        self.channels = _evened(variance, self.norm.scale.double())

    def wanted(self, full: Stop, reduced: Stop) -> tuple[Tensor, Tensor]:
        g, p = self.branch(full, reduced), reduced.output.double()
        if self.norm is not None:
            return self._through_norm(self.norm, g, p, reduced.source)
        return reduced.source, (g - p).to(reduced.read.dtype)

    def _through_norm(self, norm: Norm, g: Tensor, p: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Behind a norm the map sets a direction; `p (n, d)` keeps its length c.

        What is missed there counts in the branch, times `m / c`; so rows weigh as much as their branch is long in
        units of c.
        """
        c = p.square().mean(-1, keepdim=True).sqrt().clamp_min(torch.finfo(p.dtype).tiny)
        y = nearest_reachable(g, norm.scale, self.channels, p / c, STAY)
        weight = (norm.scale * y).square().mean(-1, keepdim=True).sqrt() / c
        return source * weight.to(source.dtype), (weight * (c * y - p)).to(source.dtype)

    def edits(self) -> dict[Site, Edit]:
        found: dict[Site, Edit] = {}
        if self.delta is not None:
            found[self.linear.site] = MatrixEdit(self.delta)
        if self.norm is not None and self.scale is not None:
            like = factor_dtype(self.linear.like.dtype)
            found[self.norm.site] = ScaleEdit(self.norm.scale.to(like), self.scale.to(like), self.norm.offset)
        return found


@dataclass(eq=False, kw_only=True)
class InnerJoint(Joint):
    """All maps that read z, with one edit for all: `dW = W D` ([T], the thought matrix)."""

    maps: tuple[LinearMap, ...]

    @property
    def shape(self) -> tuple[int, int]:
        width = self.maps[0].shape[1]
        return width, width

    def listen(self, stack: ExitStack) -> None:
        for linear in self.maps:
            stack.callback(linear.module.register_forward_pre_hook(self._before_map, with_kwargs=True).remove)

    def _before_map(self, _m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lane = self.lane
        if lane is None or self.steps is None:
            return None
        z = first_tensor(args, kwargs)
        if self.delta is None:
            self.steps.arrive(Stop(self, z, lane, z, (), lane.guard(z)))
        if not lane.edited or self.delta is None:
            return None
        moved = (z + self.delta(z.to(self.delta.B.dtype))).to(z.dtype)
        return ((moved, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): moved})

    def survey(self, stops: Stops) -> None:
        """Nothing: every row says by itself what is wanted."""

    def wanted(self, full: Stop, reduced: Stop) -> tuple[Tensor, Tensor]:
        source = reduced.source
        return source, full.source - source

    def edits(self) -> dict[Site, Edit]:
        if self.delta is None:
            return {}
        D = self.delta
        return {m.site: MatrixEdit(m.after(D)) for m in self.maps}


def _evened(variance: Tensor, m: Tensor) -> Tensor:
    """Weights `(d,)` of channels, one over the variance of each, `Σ w m² = d`; scale `m (d,)`."""
    relative = variance / variance.mean() if variance.any() else torch.ones_like(variance)
    weights = 1 / (relative + FLOOR)
    return weights / (weights * m.square()).mean().clamp_min(torch.finfo(weights.dtype).tiny)


def joints_of(model: nn.Module, block: Block, roles: tuple[str, ...]) -> tuple[Joint, ...]:
    """The joints of one block among `roles`; those that it does not have, or that are not known of it, are left out.

    An attention output map is used where the anatomy names it. A mixture of experts has no single map that reads h.
    """
    found: list[Joint] = []
    attention = block.attention_output
    if ATTENTION in roles and attention is not None:
        norm = None if block.norm_attention is None else norm_at(_site_of(model, block), block.norm_attention)
        one = torch.ones((), dtype=torch.float64)
        base = (Reading(block.layer, "input", one),)
        found.append(OuterJoint(layer=block.index, role=ATTENTION, linear=attention, base=base, alpha=one, norm=norm))
    if isinstance(block, DenseBlock):
        if INNER in roles and block.input_maps:
            found.append(InnerJoint(layer=block.index, role=INNER, maps=block.input_maps))
        if OUTPUT in roles:
            found.append(
                OuterJoint(
                    layer=block.index, role=OUTPUT, linear=block.output_map, base=block.residual, alpha=block.alpha,
                    norm=block.norm_post,
                )
            )  # fmt: skip
    return tuple(found)


def _site_of(model: nn.Module, block: Block) -> Site:
    name = next(name for name, module in model.named_modules() if module is block.norm_attention)
    return Site(block.index, name)

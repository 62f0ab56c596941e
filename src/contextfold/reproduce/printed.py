"""The main paper's two updates as they are printed: from theory alone, with nothing measured on edited weights.

`fold_token` aims every block at the measured in-context output, on weights that are written and rounded. The paper's
Algorithm 1 (arXiv 2511.17864) takes the in-context activations of its formulas as they are: `h` from the run with the
context, `v_C - v` as the change wanted. In exact arithmetic both are the same. In half precision they are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from contextfold.anatomy import Bound, DenseBlock, Norm, rows
from contextfold.errors import InputError
from contextfold.fold import Split
from contextfold.header import receipt
from contextfold.lowrank import LowRank, invert_rmsnorm
from contextfold.patch import MatrixEdit, Patch, ScaleEdit, factor_dtype
from contextfold.rules import InputWeight
from contextfold.runtime import Action, InTurn, Overlay, before, run

__all__ = ["PRINTED", "Printed", "fold_as_printed", "in_context_states", "is_plain"]

PRINTED = ("theorem", "appendix")
"""Updates that the paper prints."""

State = Mapping[str, Tensor]
"""Of one block at the last position of the run with the context: `z (1, d)`, `h (1, f)` and `q (1, d)`, what the
output map reads and what it gives, and the parts of v, the stream behind attention; float64 from the model's dtype."""


@dataclass(frozen=True, eq=False)
class Printed:
    """A patch, and how often the inversion of the RMS norm had no root."""

    patch: Patch
    hard_cases: int
    zero_divisions: int
    """Entries whose divisor was 0 and was replaced by 1, as the paper does."""


@contextmanager
def in_context_states(bound: Bound) -> Iterator[list[dict[str, Tensor]]]:
    """States of every block, from the forward of a full run inside the `with`. Raises `InputError` for mixtures."""
    blocks = _dense(bound)
    states: list[dict[str, Tensor]] = [{} for _ in blocks]
    with ExitStack() as stack:
        for block, state in zip(blocks, states, strict=True):
            _listen(stack, block, state)
        yield states


def is_plain(bound: Bound) -> bool:
    """Whether every block has the form that the paper prints updates for."""
    return all(isinstance(block, DenseBlock) and block.input_maps for block in bound.blocks)


def _dense(bound: Bound) -> list[DenseBlock]:
    if not is_plain(bound):
        raise InputError(f"{bound.model_type} has blocks that are no plain MLP; the paper prints no update for them")
    return [block for block in bound.blocks if isinstance(block, DenseBlock)]


def _listen(stack: ExitStack, block: DenseBlock, state: dict[str, Tensor]) -> None:
    def keep(letter: str, value: Tensor) -> None:
        state[letter] = rows(value)[-1:].detach().double()

    for k, reading in enumerate(block.residual):
        stack.callback(reading.listen(partial(keep, f"part {k}")).remove)
    stack.callback(before(block.input_maps[0].module, partial(keep, "z")).remove)
    stack.callback(before(block.output_map.module, partial(keep, "h")).remove)
    after = block.output_map.module.register_forward_hook(lambda _m, _a, output: keep("q", rows(output)))
    stack.callback(after.remove)


def _stream(block: DenseBlock, state: State) -> Tensor:
    """v `(1, d)`, from what the residual readings gave."""
    v = block.shift
    for k, reading in enumerate(block.residual):
        v = v + reading.factor * state[f"part {k}"]
    return v


@dataclass(eq=False)
class _Block:
    block: DenseBlock
    wanted: State
    rule: str
    overlay: Overlay
    seen: dict[str, Tensor] = field(default_factory=dict)
    hard: bool = False
    zeros: int = 0

    def listen(self, stack: ExitStack) -> None:
        # Hooks of the same module run in the order in which they were registered: first z is kept, then used.
        _listen(stack, self.block, self.seen)
        stack.callback(before(self.block.input_maps[0].module, self._steer).remove)
        stack.callback(before(self.block.output_map.module, self._aim).remove)

    @property
    def _wide(self) -> torch.dtype:
        return factor_dtype(self.block.anchor.dtype)

    def _steer(self, _z: Tensor) -> None:
        """`dW = W (z_C - z) zᵀ / ‖z‖²`: eq. (2), (3)."""
        steering = InputWeight().solve(self.block.name, self.seen["z"], self.wanted["z"])
        for linear in self.block.input_maps:
            self.overlay.put(linear.site, MatrixEdit(steering.delta(linear.weight).to(self._wide)))

    def _aim(self, _h: Tensor) -> None:
        change = (_stream(self.block, self.wanted) - _stream(self.block, self.seen)) / self.block.alpha
        norm = self.block.norm_post
        if norm is None:
            self._move_map(change)
            return
        scale = self._theorem(norm, change[0]) if self.rule == "theorem" else self._appendix(norm, change[0])
        self.overlay.put(norm.site, ScaleEdit(norm.scale.to(self._wide), scale.to(self._wide), norm.offset))

    def _move_map(self, change: Tensor) -> None:
        """`dW = change hᵀ / ‖h‖²` with the in-context h: lemma on output weights."""
        h = self.wanted["h"]
        delta = LowRank(change.T, h / h.square().sum())
        self.overlay.put(self.block.output_map.site, MatrixEdit(delta.to(self._wide)))

    def _theorem(self, norm: Norm, change: Tensor) -> Tensor:
        """`m' = m + (v_C - v) ⊘ u`, u the in-context branch before its scale: eq. (4)."""
        return norm.scale + self._divide(change, norm.unscaled(self.wanted["q"])[0])

    def _appendix(self, norm: Norm, change: Tensor) -> Tensor:
        """Appendix B: aim the output map at the inverted norm of g, then let the scale take up the remainder."""
        q = self.wanted["q"]
        g = change + norm.scale * norm.unscaled(q)[0]
        inversion = invert_rmsnorm(g, norm.scale)
        self.hard = inversion.hard
        target = q.square().mean().sqrt() * inversion.y[None]
        self._move_map(target - q)
        reached = norm.unscaled(target)[0]
        return norm.scale + self._divide(g - norm.scale * reached, reached)

    def _divide(self, top: Tensor, bottom: Tensor) -> Tensor:
        zero = bottom == 0
        self.zeros = int(zero.sum())
        return top / torch.where(zero, torch.ones_like(bottom), bottom)


def fold_as_printed(
    bound: Bound, parts: Split, states: Sequence[State], rule: str = "theorem", *, written: bool = True
) -> Printed:
    """A patch by the paper's formulas, `rule` one of `PRINTED`; blocks without a norm after the MLP have one rule.

    `states` come from `in_context_states`. Sums and quotients are in float64; what is stored is rounded to the model's
    dtype, or acts beside the weights when `written` is False. Raises `InputError`, `NotControllable`.
    """
    overlay = (InTurn if written else Action)(bound.model, [site for block in bound.blocks for site in block.sites])
    folds = [_Block(b, state, rule, overlay) for b, state in zip(_dense(bound), states, strict=True)]
    with ExitStack() as stack:
        for fold in folds:
            fold.listen(stack)
        with overlay:
            run(bound.model, parts.reduced)
    header = receipt(bound, "token", (f"{rule}, as printed",), materialised=written)
    return Printed(Patch(header, overlay.edits), sum(f.hard for f in folds), sum(f.zeros for f in folds))

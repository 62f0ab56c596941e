"""One forward, two rows: the model with everything in its window, and the patched model with what is kept.

Both rows enter a block with the same vector, since the patched block below gave `y_C`. So they share keys and values,
and differ inside the block only: in what attention finds, hence in r and in z. The input maps, patched, give the
second row what they give the first (`W z_C`), hence h is the first row's too; the output map, patched, gives the
wanted branch `g = g_C + (r_C − r) / alpha`, which is known as soon as the first row's branch is. The edits themselves
need not be formed to know what they do: that is left to the proof.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from contextfold.anatomy import Block, Bound, DenseBlock, first_output, first_tensor
from contextfold.anatomy.sharded import whole_input
from contextfold.anatomy.wrapped import device_of
from contextfold.errors import NotControllable
from contextfold.outcomes import Finding, Outcome
from contextfold.runtime import BlockState, before, keeps_logits
from contextfold.stepwise.cache import SharedCache
from contextfold.stepwise.once import few_rows, once
from contextfold.stepwise.window import Batch

__all__ = ["Pair", "Pairing", "forward"]


@dataclass(frozen=True, eq=False)
class Pair:
    """What one step gave: logits `(B, V)` of both rows, and per sequence the states that a fold aims at."""

    in_context: Tensor
    patched: Tensor
    wanted: tuple[tuple[BlockState, ...], ...] = ()
    """`[sequence][block]`, letters z, t and y of the first row; empty where nothing is to be proven."""


@torch.no_grad()
def forward(model: nn.Module, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any, last: int = 1) -> Any:
    """An ordinary forward with a cache: `ids`, `positions (rows, n)`, `mask (rows, columns)` of everything seen.

    A model that can compute some logits only computes those of the `last` columns, which may be none.
    """
    device = device_of(model)
    n = ids.shape[1]
    arguments = {"logits_to_keep": torch.arange(n - last, n, device=device)} if keeps_logits(model) else {}
    return model(
        input_ids=ids.to(device),
        attention_mask=mask.to(device, torch.int64),
        position_ids=positions.to(device),
        cache=cache,
        use_cache=True,
        **arguments,
    )


class Pairing:
    """Two rows per sequence through a bound model; hooks live for one forward only."""

    def __init__(self, bound: Bound, rows: int) -> None:
        self._model = bound.model
        self._rows = rows
        self._joints = [_Joint(block, rows) for block in bound.blocks]

    def __call__(self, batch: Batch, cache: Any, prove: bool) -> Pair:
        """Run the last column of `batch`; `cache` holds the columns before it, and grows by one.

        `prove` keeps the states that a fold aims at. Raises `NotControllable` where the patch does not exist: a
        zero source, or values that are not finite.
        """
        rows = self._rows
        seen = batch.kept.clone()
        seen[:, -1] = True
        mask = torch.cat([batch.real, seen])
        ids, positions = batch.ids[:, -1:].repeat(2, 1), batch.positions[:, -1:].repeat(2, 1)
        with ExitStack() as stack:
            for joint in self._joints:
                joint.listen(stack, prove)
            few_rows(self._model, stack)
            output = forward(self._model, ids, mask, positions, SharedCache(cache, rows))
        logits: Tensor = output.logits[:, -1]
        _check_sources(self._joints)
        wanted = tuple(tuple(joint.state(row) for joint in self._joints) for row in range(rows)) if prove else ()
        for joint in self._joints:
            joint.forget()
        return Pair(logits[:rows], logits[rows:], wanted)


@dataclass(eq=False)
class _Joint:
    """Where the branch of one block joins the stream, for 2B rows; the second half is the patched one."""

    block: Block
    rows: int
    parts: dict[int, Tensor] = field(default_factory=dict)
    letters: dict[str, Tensor] = field(default_factory=dict)
    source: Tensor | None = None

    def __post_init__(self) -> None:
        anchor = self.block.anchor
        # Sums are formed in the dtype of the model, but never in half precision.
        self.wide = torch.promote_types(anchor.dtype, torch.float32)
        shares = [reading.factor / self.block.alpha for reading in self.block.residual]
        self.shares = [None if bool((s == 1).all()) else s.to(anchor.device, self.wide) for s in shares]
        """What each part of r counts for in the branch; None for one."""

    def listen(self, stack: ExitStack, prove: bool) -> None:
        block = self.block
        for k, reading in enumerate(block.residual):
            stack.callback(reading.listen(partial(self.parts.__setitem__, k)).remove)
        *others, last = self._ends()
        for module in others:
            stack.callback(module.register_forward_hook(self._same).remove)
        stack.callback(last.register_forward_hook(self._join, with_kwargs=True).remove)
        if isinstance(block, DenseBlock) and last is not block.output_map.module:
            stack.callback(before(block.output_map.module, partial(setattr, self, "source")).remove)
        if prove:
            if block.reads_z is not None:
                stack.callback(before(block.reads_z, partial(self.letters.__setitem__, "z")).remove)
            stack.callback(block.total.listen(partial(self.letters.__setitem__, "t")).remove)
            stack.callback(block.layer.register_forward_hook(self._see_y).remove)
        once(block, self.rows, stack)

    def _ends(self) -> tuple[nn.Module, ...]:
        """Modules whose results add up to the branch."""
        block = self.block
        if block.norm_post is not None:
            return (block.norm_post.module,)
        return (block.output_map.module,) if isinstance(block, DenseBlock) else tuple(block.branch)  # type: ignore[attr-defined]

    def _same(self, module: nn.Module, args: object, output: Any) -> Any:
        first = first_output(output)[: self.rows]
        return _with_first(output, torch.cat([first, first]))

    def _join(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """`g = g_C + (r_C − r) / alpha` for the second half."""
        if isinstance(self.block, DenseBlock) and module is self.block.output_map.module:
            self.source = whole_input(module, first_tensor(args, kwargs))
        first = first_output(output)[: self.rows]
        gap = reduce(torch.add, map(self._lost, self.parts))
        g = first.to(self.wide) + gap.reshape(first.shape)
        return _with_first(output, torch.cat([first, g.to(first.dtype)]))

    def _lost(self, k: int) -> Tensor:
        """What the second half lacks in one part of r, in units of the branch."""
        part, share = self.parts[k].to(self.wide), self.shares[k]
        lost = part[: self.rows] - part[self.rows :]
        return lost if share is None else share * lost

    def _see_y(self, module: nn.Module, args: object, output: object) -> None:
        self.letters["y"] = first_output(output)

    def state(self, row: int) -> BlockState:
        flat = {letter: value.reshape(2 * self.rows, -1) for letter, value in self.letters.items()}
        return BlockState({letter: value[row : row + 1].clone() for letter, value in flat.items()})

    def forget(self) -> None:
        """Let go of the activations of the last forward."""
        self.parts.clear()
        self.letters.clear()
        self.source = None


def _with_first(output: Any, value: Tensor) -> Any:
    """`output` with its first tensor replaced."""
    return value if isinstance(output, Tensor) else (value, *output[1:])


def _check_sources(joints: list[_Joint]) -> None:
    """A patch needs a vector to read: h, which the patched row shares with the first."""
    found = [(joint, joint.source[: joint.rows]) for joint in joints if joint.source is not None]
    if not found:
        return
    largest = torch.stack([h.reshape(h.shape[0], -1).abs().amax(1).min() for _, h in found]).tolist()
    for (joint, _), value in zip(found, largest, strict=True):
        if value > 0 and value < float("inf"):
            continue
        outcome = Outcome.ZERO_SOURCE if value == 0 else Outcome.NOT_FINITE
        raise NotControllable([Finding(outcome, joint.block.name, "max abs h", value, 0.0)])

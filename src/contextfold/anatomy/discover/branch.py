"""Which steps of a layer are a token-wise branch: found by holding every step still but one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contextfold.anatomy.discover.tape import LayerCall, Tape
from contextfold.anatomy.discover.values import by_token, same

__all__ = ["Branch", "Influence", "find_branches", "influence", "last_maps"]

NOISE = 1e-2
"""Size of a disturbance, relative to what is disturbed."""

STILL = 1e-9
"""Relative change below which a step's input did not move: everything that feeds it was held still, bit for bit."""


@dataclass(frozen=True)
class Influence:
    """Which steps a disturbance of one step's other rows, or of its last row, reaches directly."""

    other_rows_reach_last: frozenset[int]
    last_row_reaches_last: frozenset[int]


@dataclass(frozen=True)
class Branch:
    """A step whose result is `output`, fed token by token by `inputs` that all read the same z."""

    inputs: tuple[int, ...]
    output: int
    size: int
    """Parameters of its maps."""


def influence(call: LayerCall, tape: Tape, source: int) -> Influence:
    """Two replays in which every step keeps its recorded result but `source`, which is disturbed."""
    return Influence(_moved(call, tape, source, True), _moved(call, tape, source, False))


def _moved(call: LayerCall, tape: Tape, source: int, others: bool) -> frozenset[int]:
    tokens = call.tokens

    def replace(index: int, result: Tensor) -> Tensor:
        if index >= len(tape.steps) or result.shape != tape.steps[index].result.shape:
            return result
        kept = tape.steps[index].result
        return _disturbed(kept, tokens, others) if index == source else kept.clone()

    played = call.play(replace)
    found = set()
    for index, (was, now) in enumerate(zip(tape.steps, played.steps, strict=False)):
        if was.parameters != now.parameters or was.read.shape != now.read.shape:
            break
        before, after = by_token(was.read, tokens), by_token(now.read, tokens)
        if before is None or after is None:
            # No row per token: only whether it moved at all can be told.
            if not same(now.read.double(), was.read.double(), STILL):
                found.add(index)
        elif not same(after[-1], before[-1], STILL):
            found.add(index)
    return frozenset(found)


def _disturbed(value: Tensor, tokens: int, others: bool) -> Tensor:
    rows = value.clone().reshape(tokens, -1) if value.numel() % tokens == 0 else value.clone().reshape(1, -1)
    chosen = slice(0, -1) if others else slice(-1, None)
    generator = torch.Generator().manual_seed(4)
    part = rows[chosen]
    size = NOISE * float(value.double().square().mean().sqrt())
    part.add_(size * torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part))
    return rows.reshape(value.shape)


def last_maps(tape: Tape, width: int, tokens: int) -> list[int]:
    """Steps that give one vector of the stream's width per token."""
    found = []
    for index, step in enumerate(tape.steps):
        rows = by_token(step.result, tokens)
        if rows is not None and rows.shape[1] == width and by_token(step.read, tokens) is not None:
            found.append(index)
    return found


def find_branches(
    call: LayerCall, tape: Tape, reaches: Sequence[Influence], sizes: Callable[[int], int]
) -> list[Branch]:
    """Every token-wise branch, the largest first."""
    width = tape.result.shape[-1]
    found = []
    for output in last_maps(tape, width, call.tokens):
        mixed = any(output in reach.other_rows_reach_last for reach in reaches) or _mixes_sides(call, tape, output)
        inputs = tuple(k for k, reach in enumerate(reaches) if output in reach.last_row_reaches_last)
        reads = [by_token(tape.steps[k].read, call.tokens) for k in inputs]
        if not mixed and inputs and all(same(read, reads[0], STILL) for read in reads):
            found.append(Branch(inputs, output, sum(sizes(k) for k in (*inputs, output))))
    return sorted(found, key=lambda branch: -branch.size)


def _mixes_sides(call: LayerCall, tape: Tape, output: int) -> bool:
    """Whether what the step reads at the last token moves with keys and values of another layer."""

    def hold(index: int, result: Tensor) -> Tensor:
        fits = index < len(tape.steps) and result.shape == tape.steps[index].result.shape
        return tape.steps[index].result.clone() if fits else result

    played = call.play(hold, disturb_sides=1.0)
    if output >= len(played.steps):
        return True
    before, after = by_token(tape.steps[output].read, call.tokens), by_token(played.steps[output].read, call.tokens)
    return before is None or after is None or not same(after[-1], before[-1], STILL)

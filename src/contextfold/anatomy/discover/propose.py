"""From what was found in one layer to a record of it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from contextfold.anatomy.discover.branch import Branch, Influence, find_branches, influence, last_maps
from contextfold.anatomy.discover.mixture import propose_mixture, stacked_groups
from contextfold.anatomy.discover.tape import LayerCall, Tape
from contextfold.anatomy.discover.values import by_token
from contextfold.anatomy.discover.wiring import wired
from contextfold.anatomy.record import Dense, Mixer, Sites, Wiring
from contextfold.errors import UnsupportedModel

__all__ = ["propose"]


def propose(call: LayerCall) -> Sites:
    """The record of one layer. Raises `UnsupportedModel`, with what was found missing."""
    tape = call.play()
    if by_token(tape.result, call.tokens) is None:
        raise UnsupportedModel(
            f"a layer gives {tuple(tape.result.shape)} for {call.tokens} tokens, not one vector per token (several "
            "streams, or another layout)"
        )
    reasons = []
    for group in reversed(stacked_groups(call.layer, tape)):
        try:
            return propose_mixture(call, tape, group)
        except UnsupportedModel as error:
            reasons.append(str(error))
    reaches = [influence(call, tape, k) for k in range(len(tape.steps))]
    branches = find_branches(call, tape, reaches, lambda k: _size(call.layer, tape, k))
    for branch in branches:
        try:
            return _dense(call, tape, branch)
        except UnsupportedModel as error:
            reasons.append(str(error))
    return _mixer(call, tape, reaches, reasons)


def _size(layer: nn.Module, tape: Tape, step: int) -> int:
    return sum(layer.get_parameter(name).numel() for name in tape.steps[step].parameters)


def _module(tape: Tape, step: int) -> str:
    """The module that owns the weight of a step."""
    return tape.steps[step].parameters[0].rpartition(".")[0]


def _dense(call: LayerCall, tape: Tape, branch: Branch) -> Dense:
    inputs = tuple(dict.fromkeys(_module(tape, k) for k in branch.inputs))
    return wired(call, tape, Dense(inputs, _module(tape, branch.output), Wiring()))


def _mixer(call: LayerCall, tape: Tape, reaches: Sequence[Influence], reasons: Sequence[str]) -> Mixer:
    """No token-wise branch: the last map of the stream's width that feeds no other map."""
    ends = [
        k
        for k in last_maps(tape, tape.result.shape[-1], call.tokens)
        if not reaches[k].last_row_reaches_last and not reaches[k].other_rows_reach_last
    ]
    if not ends or reasons:
        raise UnsupportedModel(reasons[0] if reasons else "no map was found whose result joins the stream")
    return wired(call, tape, Mixer(_module(tape, ends[-1]), Wiring()))

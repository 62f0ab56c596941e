"""The proof that blocks are all there is: with every finished sum exchanged, everything behind it must follow.

A fold makes the finished sums of the reduced run equal those of the full run at one token. That gives equal logits only
if each block's result is a function of its sum at that token, and the logits of the last result. Layers that mix tokens
behind the MLP, side streams, second stacks and looped layers all fail here, whatever each block looks like by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from contextfold.anatomy.block import Block, first_output
from contextfold.anatomy.proof import Limits

__all__ = ["prove_closed"]


@torch.no_grad()
def prove_closed(blocks: tuple[Block, ...], run: Callable[[int], Any], limits: Limits) -> None:
    """Run two texts that end in the same token; in the second, every finished sum at that token is the first's.

    `run(seed)` runs the model on a text of its own and gives its output; the last token is the same for all seeds.

    Raises `ProbeFailed` unless the second text's results and logits at that token are the first's.
    """
    totals: list[Tensor] = []
    results: list[Tensor] = []
    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.total.listen(lambda value: totals.append(_last(value).clone())).remove)
            stack.callback(_listen_result(block, results))
        wanted = run(1).logits[0, -1]
    met: list[Tensor] = []
    with ExitStack() as stack:
        for block, total in zip(blocks, totals, strict=True):
            stack.callback(block.total.listen(partial(_exchange, total)).remove)
            stack.callback(_listen_result(block, met))
        logits = run(2).logits[0, -1]
    for block, result, expected in zip(blocks, met, results, strict=True):
        replace(limits, block=block.name).same("the result", "a function of the finished sum", result, expected)
    limits.same("logits", "a function of the last block's result", logits, wanted)


def _last(value: Tensor) -> Tensor:
    """The last token, a view; modules may be called on flattened tokens."""
    return value[-1] if value.dim() == 2 else value[0, -1]


def _exchange(total: Tensor, value: Tensor) -> None:
    _last(value).copy_(total)


def _listen_result(block: Block, into: list[Tensor]) -> Callable[[], None]:
    def keep(_module: nn.Module, _args: object, output: object) -> None:
        into.append(_last(first_output(output)).clone())

    return block.layer.register_forward_hook(keep).remove

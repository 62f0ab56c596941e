"""Linear maps that give the same in both rows are run on the first row alone.

A map of a small model is bound by the arithmetic of its rows on a processor, so a second row that is known beforehand
is not free: it costs from a tenth to the whole of the first, by the library that multiplies.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from contextfold.anatomy import Block, DenseBlock, first_output

__all__ = ["once"]


def once(block: Block, rows: int, stack: ExitStack) -> None:
    """Until `stack` closes, the maps of `block` read one of two equal halves of `2 rows` where that is all they need.

    The maps of a dense branch always do: what the patched half gives there is known from the first half, whatever it
    reads. Other maps, those of attention before it mixes tokens, do where both halves are equal to the bit. To look
    is free on a processor; on another device it would wait for the device, where a second row costs nothing anyway.
    """
    if next(block.layer.parameters()).device.type != "cpu":
        return
    known = {linear.module for linear in block.maps} if isinstance(block, DenseBlock) else set()
    for module in block.layer.modules():
        if module in known or isinstance(module, nn.Linear | Conv1D):
            _Half(rows, module in known).listen(module, stack)


class _Half:
    """The hooks of one map."""

    def __init__(self, rows: int, known: bool) -> None:
        self.rows = rows
        self.known = known
        self.taken = False

    def listen(self, module: nn.Module, stack: ExitStack) -> None:
        stack.callback(module.register_forward_pre_hook(self._take).remove)
        # First of all hooks, so that the others see as many rows as ever.
        stack.callback(module.register_forward_hook(self._repeat, prepend=True).remove)

    def _take(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        whole = args[0] if args else None
        self.taken = isinstance(whole, Tensor) and whole.shape[0] == 2 * self.rows and self._alike(whole)
        return (args[0][: self.rows], *args[1:]) if self.taken else None

    def _alike(self, whole: Tensor) -> bool:
        return self.known or torch.equal(whole[: self.rows], whole[self.rows :])

    def _repeat(self, module: nn.Module, args: object, output: Any) -> Any:
        if not self.taken:
            return None
        half = first_output(output)
        whole = torch.cat([half, half])
        return whole if isinstance(output, Tensor) else (whole, *output[1:])

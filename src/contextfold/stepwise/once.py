"""What a second row costs on a processor, and how it is spared.

The product of a matrix and one row is bound by memory, so a second row should be nearly free. On a processor it costs
from a tenth to more than the whole of the first, by the library that multiplies. So maps whose second row is known are
run on the first row alone, and the vocabulary matrix multiplies in the order that suits few rows.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from contextfold.anatomy import Block, DenseBlock
from contextfold.anatomy.sharded import is_sharded

__all__ = ["few_rows", "once"]


def once(block: Block, rows: int, stack: ExitStack) -> None:
    """Until `stack` closes, the maps of a dense branch read the first half of `2 rows` and give it twice.

    What the second half would give is not used: it is known from the first half, whatever the maps read.
    """
    if isinstance(block, DenseBlock):
        for linear in block.maps:
            stack.callback(linear.module.register_forward_pre_hook(partial(_first_half, rows)).remove)
            # First of all hooks, so that the others see as many rows as ever.
            stack.callback(linear.module.register_forward_hook(_twice, prepend=True).remove)


def _first_half(rows: int, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0][:rows], *args[1:])


def _twice(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return torch.cat([output, output])


def few_rows(model: Any, stack: ExitStack) -> None:
    """Until `stack` closes, a float32 vocabulary matrix gives `(W xᵀ)ᵀ` in place of `x Wᵀ`.

    For two rows and a wide W the library takes a quarter to two thirds of the time in this order (docs/stepwise.md).
    The module itself is called on no rows, so that whatever else listens to it still hears it.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.weight.device.type != "cpu" or head.weight.dtype != torch.float32:
        return
    if is_sharded(head.weight):  # its own call brings the parts together
        return
    inputs: list[Tensor] = []

    def take(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs.append(args[0])
        return (args[0][:0],)

    def give(module: nn.Linear, args: object, output: Tensor) -> Tensor:
        x = inputs.pop()
        product = (module.weight @ x.reshape(-1, x.shape[-1]).T).T
        logits = product if module.bias is None else product + module.bias
        return logits.reshape(*x.shape[:-1], -1)

    stack.callback(head.register_forward_pre_hook(take).remove)
    stack.callback(head.register_forward_hook(give, prepend=True).remove)

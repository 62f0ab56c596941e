"""Whether anything reads the length of the last block's finished sum: shown on the model itself, not assumed."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from contextfold.anatomy import Bound, first_output
from contextfold.runtime import Run, run

__all__ = ["FREE", "halving_loss"]

FREE = 1e-3
"""Largest loss at which lengths count as free: about what a layer without a scale for all positions misses otherwise.
The eps of a norm stays far below, a head that reads lengths far above."""

TOKENS = 8
"""Enough to show it, too few to cost anything beside the forwards of a fold."""


def halving_loss(bound: Bound, tokens: Run) -> float:
    """Largest relative change of the logits, over the first positions of `tokens`, when sums there are halved.

    Every other position is halved, which is exact in every dtype; so what changes is what the head makes of lengths:
    the eps of its norm, about `3 eps / (2 RMS²)`, or everything where it has no norm that comes first.
    """
    few = Run(tokens.ids[:TOKENS], tokens.positions[:TOKENS])
    n = few.ids.numel()
    plain = run(bound.model, few, last=n)
    total = bound.blocks[-1].total
    if total.side == "output":
        handle = total.module.register_forward_hook(_halve_output)
    else:
        handle = total.module.register_forward_pre_hook(_halve_input, with_kwargs=True)
    try:
        halved = run(bound.model, few, last=n)
    finally:
        handle.remove()
    # Row by row, since a vocabulary is wide.
    rows = ((one.double(), other.double()) for one, other in zip(plain, halved, strict=True))
    return max(float((other - one).norm() / one.norm()) for one, other in rows)


def _halved(value: Tensor) -> Tensor:
    other = value.clone()
    other[..., ::2, :] *= 0.5
    return other


def _halve_output(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
    first = _halved(first_output(output))
    return first if isinstance(output, Tensor) else (first, *output[1:])


def _halve_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    if args:
        return (_halved(args[0]), *args[1:]), kwargs
    name = next(key for key, value in kwargs.items() if isinstance(value, Tensor))
    return args, {**kwargs, name: _halved(kwargs[name])}

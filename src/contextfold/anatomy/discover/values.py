"""Compare values by rows: which tensors are the same, and by what factor one contains another."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["TOLERANCE", "affine_between", "by_token", "factor_between", "same"]

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Relative difference below which two values are called the same."""


def by_token(value: Tensor, tokens: int) -> Tensor | None:
    """`(T, ·)` in float64, or None when the value has no row per token."""
    if value.dim() >= 2 and value.shape[-2] == tokens and value.numel() == tokens * value.shape[-1]:
        return value.reshape(tokens, -1).double()
    return None


def same(a: Tensor | None, b: Tensor | None, limit: float) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return False
    return float((a - b).norm()) <= limit * max(float(b.norm()), torch.finfo(torch.float64).tiny)


def factor_between(whole: Tensor, part: Tensor, limit: float) -> Tensor | None:
    """`f (d,)` with `whole = f ⊙ part` on all rows `(n, d)`, a number `()` where all entries agree; or None."""
    power = part.square().sum(0)
    if not bool((power > 0).all()):
        return None
    factor = (whole * part).sum(0) / power
    if not same(factor * part, whole, limit):
        return None
    number = factor.median()
    return number if same(number * part, whole, limit) else factor


def affine_between(whole: Tensor, part: Tensor, limit: float) -> tuple[Tensor, Tensor] | None:
    """`f, c (d,)` with `whole = f ⊙ part + c` on all rows `(n, d)`, n > 2; or None."""
    factor = factor_between(whole - whole.mean(0), part - part.mean(0), limit)
    if factor is None:
        return None
    constant = (whole - factor * part).mean(0)
    return (factor, constant) if same(factor * part + constant, whole, limit) else None

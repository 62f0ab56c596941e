"""Factors of a wanted width: zeros where there are too few columns, the best approximation where too many."""

from __future__ import annotations

import math

import torch

from contextfold.errors import InputError
from contextfold.lowrank import LowRank

__all__ = ["SERVED_RANKS", "check_rank", "cut", "padded", "served_rank"]

SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM may be told as `--max-lora-rank`."""


def check_rank(rank: int) -> None:
    """Raises `InputError` for a rank that servers do not take."""
    if rank not in SERVED_RANKS:
        raise InputError(f"rank {rank} is none that servers allow; allowed are {', '.join(map(str, SERVED_RANKS))}")


def served_rank(rank: int) -> int:
    """The smallest allowed rank that holds `rank`; the largest one where none does."""
    return next((allowed for allowed in SERVED_RANKS if allowed >= rank), SERVED_RANKS[-1])


def cut(delta: LowRank, rank: int) -> tuple[LowRank, float]:
    """The best approximation of at most `rank`, in the dtype of the factors, and `‖lost‖ / ‖delta‖`, Frobenius.

    Eckart and Young: the largest singular values are kept. A delta of that rank is returned as it is.
    """
    if delta.rank <= rank:
        return delta, 0.0
    U, S, Vt = delta.to(torch.float64).svd()
    kept = LowRank(U[:, :rank] * S[:rank], Vt[:rank]).to(delta.B.dtype)
    total = float(S.square().sum())
    return kept, math.sqrt(float(S[rank:].square().sum()) / total) if total else 0.0


def padded(delta: LowRank, rank: int) -> LowRank:
    """The same product with factors of width `rank`, which is not below its own."""
    missing = rank - delta.rank
    out, inner = delta.shape
    return delta + LowRank(delta.B.new_zeros(out, missing), delta.A.new_zeros(missing, inner))

"""The receipt of a fold."""

from __future__ import annotations

from contextfold.anatomy import Bound
from contextfold.fold.split import Split, digest
from contextfold.header import receipt
from contextfold.patch import Header

__all__ = ["header_of"]


def header_of(
    bound: Bound, parts: Split, kind: str, exact_at: tuple[int, ...], plan: tuple[str, ...], written: bool
) -> Header:
    """What a patch for the reduced run of `parts` is for, and how it was made."""
    return receipt(
        bound,
        kind,
        plan,
        materialised=written,
        positions=tuple(parts.reduced.positions.tolist()),
        exact_at=exact_at,
        tokens_digest=digest(parts.reduced),
        context_digest=digest(parts.full),
    )

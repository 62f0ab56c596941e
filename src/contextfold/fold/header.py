"""The receipt that every patch carries."""

from __future__ import annotations

import torch

from contextfold.anatomy import Bound
from contextfold.fold.split import Split, digest
from contextfold.patch import Header
from contextfold.versions import versions

__all__ = ["header_of"]


def header_of(
    bound: Bound, parts: Split, kind: str, exact_at: tuple[int, ...], plan: tuple[str, ...], written: bool
) -> Header:
    """What a patch for the reduced run of `parts` is for, and how it was made."""
    factor = torch.float64 if bound.dtype == torch.float64 else torch.float32
    return Header(
        kind=kind,
        model_type=bound.model_type,
        fingerprint=bound.fingerprint,
        positions=tuple(parts.reduced.positions.tolist()),
        exact_at=exact_at,
        tokens_digest=digest(parts.reduced),
        context_digest=digest(parts.full),
        model_dtype=str(bound.dtype).removeprefix("torch."),
        factor_dtype=str(factor).removeprefix("torch."),
        attention=bound.attention,
        materialised=written,
        plan=plan,
        versions=versions(),
    )

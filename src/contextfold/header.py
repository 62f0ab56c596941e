"""The receipt that every patch of a bound model carries."""

from __future__ import annotations

import torch

from contextfold.anatomy import Bound
from contextfold.patch import Header, factor_dtype
from contextfold.versions import versions

__all__ = ["receipt"]


def receipt(
    bound: Bound,
    kind: str,
    plan: tuple[str, ...],
    *,
    materialised: bool,
    positions: tuple[int, ...] = (),
    exact_at: tuple[int, ...] = (),
    tokens_digest: str = "",
    context_digest: str = "",
) -> Header:
    """A header with what the model itself tells; a patch that is about no run has no positions and no digest of one."""
    return Header(
        kind=kind,
        model_type=bound.model_type,
        fingerprint=bound.fingerprint,
        positions=positions,
        exact_at=exact_at,
        tokens_digest=tokens_digest,
        context_digest=context_digest,
        model_dtype=str(bound.dtype).removeprefix("torch."),
        factor_dtype=str(factor_dtype(bound.dtype)).removeprefix("torch."),
        attention=bound.attention,
        materialised=materialised,
        plan=plan,
        versions={**versions(), "threads": str(torch.get_num_threads())},
    )

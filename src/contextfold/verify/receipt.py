"""What a verdict says about the run that it comes from."""

from __future__ import annotations

from typing import Any

import torch

from contextfold.anatomy import Bound
from contextfold.versions import versions

__all__ = ["receipt_of"]


def receipt_of(bound: Bound, seconds: float | None = None) -> dict[str, Any]:
    """Weights, attention, threads, versions, and how long it took."""
    receipt: dict[str, Any] = {
        "fingerprint": bound.fingerprint,
        "attention": bound.attention,
        "threads": torch.get_num_threads(),
        **versions(),
    }
    return receipt if seconds is None else {**receipt, "seconds": round(seconds, 1)}

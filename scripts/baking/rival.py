"""The practical rival: the prompt stays, and its keys and values are computed once."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from bench import clock, random_ids, seconds

from contextfold.anatomy import Bound
from contextfold.bake import Prefix

SIZES = (512, 2048, 8192)
"""Tokens of context."""
STEPS = 24


def prefix_cache(bound: Bound, size: int) -> dict[str, Any]:
    """Bytes of the cache of `size` tokens, and what a generated token takes with them in front and without.

    The two runs alternate token by token, so that a busy machine slows both.
    """
    if bound.max_positions is not None and size + STEPS > bound.max_positions:
        return {"context": size, "skipped": f"the model has {bound.max_positions} positions"}
    ids = random_ids(bound, size)
    found: list[Prefix] = []
    prefill = seconds(lambda: found.append(Prefix.of(bound.model, ids)))
    prefix = found[0]
    bytes_ = sum(layer.keys.nbytes + layer.values.nbytes for layer in prefix.cache.layers)
    with_it, without = prefix.session(1), Prefix.of(bound.model, ids[:1]).session(1)
    one = torch.ones(1, 1, dtype=torch.bool)
    spent: tuple[list[float], list[float]] = ([], [])
    for step in range(STEPS):
        for session, times in zip((with_it, without), spent, strict=True):
            started = clock()
            session.extend(ids[step][None, None], one)
            times.append(1000 * (clock() - started))
    times = [statistics.median(part[2:]) for part in spent]
    return {
        "context": size,
        "bytes": bytes_,
        "seconds_prefill": prefill,
        "ms_per_token": times[0],
        "ms_per_token_without": times[1],
    }

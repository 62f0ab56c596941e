"""Multipliers that depend on the depth of a layer: measured in every layer, and written down one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from contextfold.anatomy.discover.wiring import shortened
from contextfold.anatomy.record import Factor, Sites, Wiring

__all__ = ["has_numbers", "joined"]


def has_numbers(sites: Sites) -> bool:
    """Whether a multiplier was measured that no attribute of the layer holds; another layer may have another."""
    return any(isinstance(factor, float) and factor != 1.0 for factor in _factors(sites.wiring))


def joined(found: Mapping[int, Sites], limit: float) -> tuple[Sites, ...]:
    """One record for all layers, by index, that differ in nothing but numbers. `limit`: the relative error of those."""
    groups: dict[str, dict[int, Sites]] = {}
    for index, sites in found.items():
        bare = [0.0 if isinstance(factor, float) else factor for factor in _factors(sites.wiring)]
        key = repr(replace(sites, wiring=_with_factors(sites.wiring, bare)))
        groups.setdefault(key, {})[index] = sites
    return tuple(_one(group, limit) for group in groups.values())


def _one(group: Mapping[int, Sites], limit: float) -> Sites:
    columns = zip(*(_factors(sites.wiring) for sites in group.values()), strict=True)
    factors = [_factor(dict(zip(group, column, strict=True)), limit) for column in columns]
    first = next(iter(group.values()))
    return replace(first, wiring=shortened(_with_factors(first.wiring, factors)))


def _factor(by_layer: Mapping[int, Factor], limit: float) -> Factor:
    """What all layers agree on, or one number per layer."""
    first = next(iter(by_layer.values()))
    numbers = {index: factor for index, factor in by_layer.items() if isinstance(factor, float)}
    alike = not numbers or max(numbers.values()) - min(numbers.values()) <= limit * abs(min(numbers.values()))
    return first if alike else numbers


def _factors(wiring: Wiring) -> list[Factor]:
    taps = (*wiring.residual, *(() if wiring.total is None else (wiring.total,)))
    return [wiring.alpha, *(tap.factor for tap in taps)]


def _with_factors(wiring: Wiring, factors: Sequence[Factor]) -> Wiring:
    alpha, *rest = factors
    residual = tuple(replace(tap, factor=factor) for tap, factor in zip(wiring.residual, rest, strict=False))
    total = None if wiring.total is None else replace(wiring.total, factor=rest[-1])
    return replace(wiring, alpha=alpha, residual=residual, total=total)

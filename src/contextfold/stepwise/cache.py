"""One key-value cache for two rows, and a cache that holds only the kept tokens.

The one place outside `anatomy`, `models` and `prompts` that imports transformers: a cache of ours has to be one of
its caches. Layers are read through `keys` and `values`, written through `update`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DummyLayer, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from contextfold.errors import UnsupportedModel

__all__ = ["KeptCache", "SharedCache", "check_cache", "empty_cache", "stacked"]

PLAIN = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
"""Layers that hold keys and values of tokens and nothing else; a dummy holds nothing."""


class SharedCache(Cache):
    """Lets 2B rows read and extend a cache of B: the second half reads what the first half wrote.

    Both halves enter every layer with the same vector, so their new keys and values are the same too. The first
    half's are stored. For B = 1 what is read is a view; larger batches copy one layer at a time.
    """

    def __init__(self, inner: DynamicCache, rows: int) -> None:
        super().__init__(layers=inner.layers)
        self._inner = inner
        self._rows = rows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        first = slice(self._rows)
        keys, values = self._inner.update(key_states[first], value_states[first], layer_idx, *args, **kwargs)
        return self._twice(keys), self._twice(values)

    def _twice(self, stored: Tensor) -> Tensor:
        return stored.expand(2, -1, -1, -1) if self._rows == 1 else torch.cat([stored, stored])


@dataclass(frozen=True, eq=False)
class KeptCache:
    """Keys and values of some tokens of one sequence, as they were when those tokens were current."""

    model: nn.Module
    stored: tuple[tuple[int, Tensor, Tensor], ...]
    """Layer, keys and values `(1, heads, kept, ·)`."""

    @classmethod
    def of(cls, model: nn.Module, cache: DynamicCache, row: int, columns: Tensor, seen: int) -> KeptCache:
        """Copy `columns` of one row out of a cache of `seen` columns.

        A layer with a sliding window has forgotten its oldest columns, and so has the kept part.
        """
        stored = []
        for index, layer in enumerate(cache.layers):
            keys, values = _stored(layer)
            if keys is None or values is None:
                continue
            place = columns - (seen - keys.shape[2])
            place = place[place >= 0].to(keys.device)
            if place.numel():
                stored.append((index, keys[row : row + 1, :, place], values[row : row + 1, :, place]))
        return cls(model, tuple(stored))

    def fresh(self) -> DynamicCache:
        """A new ordinary cache of the model that holds them and nothing else."""
        cache = empty_cache(self.model)
        for index, keys, values in self.stored:
            cache.update(keys, values, index)
        return cache


def _stored(layer: Any) -> tuple[Tensor | None, Tensor | None]:
    """Keys and values `(B, heads, columns, ·)`; none in a layer that borrows those of another, or was not run yet."""
    if not isinstance(layer, DynamicLayer) or not layer.is_initialized:
        return None, None
    return layer.keys, layer.values


def stacked(model: nn.Module, caches: Sequence[DynamicCache | None], width: int) -> DynamicCache:
    """One cache of `width` columns out of one per sequence, shorter ones padded with zeros on the left.

    Sequences are not run together for this: a row that sees padding alone has no softmax, and what it gives instead
    (not a number, in some dtypes) would spread through the values.
    """
    both = empty_cache(model)
    for index in range(max(len(cache.layers) for cache in caches if cache is not None)):
        parts = [(None, None) if cache is None else _stored(cache.layers[index]) for cache in caches]
        keys, values = (_padded(side, width) for side in zip(*parts, strict=True))
        if keys is not None and values is not None:
            both.update(keys, values, index)
    return both


def _padded(parts: Sequence[Tensor | None], width: int) -> Tensor | None:
    """`(B, heads, width, ·)`; None where no sequence has anything."""
    like = next((part for part in parts if part is not None), None)
    if like is None:
        return None
    whole = like.new_zeros(len(parts), like.shape[1], width, like.shape[3])
    for row, part in enumerate(parts):
        if part is not None:
            whole[row, :, width - part.shape[2] :] = part[0]
    return whole


def empty_cache(model: nn.Module) -> DynamicCache:
    """The cache that the model makes for itself."""
    config: Any = model.config
    return DynamicCache(config=config)


def check_cache(cache: object) -> None:
    """Refuse, by name, a model that remembers anything but keys and values of tokens."""
    if type(cache) is not DynamicCache:
        raise UnsupportedModel(
            f"the model keeps a {type(cache).__name__}; stepwise folding shares one plain key-value cache between two "
            "rows and knows no other: fold each token with fold_token instead"
        )
    odd = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in PLAIN})
    if odd:
        raise UnsupportedModel(
            f"the model's cache has layers of type {', '.join(odd)}; stepwise folding shares plain keys and values "
            "between two rows and knows no other: fold each token with fold_token instead"
        )

"""Many continuations of one beginning: its keys and values are computed once and shared by all."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from contextfold.anatomy.wrapped import device_of
from contextfold.runtime import keeps_logits, takes_positions

__all__ = ["Prefix", "Session", "padded"]

PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)
"""Cache layers that hold keys and values of tokens and nothing else: only these can be shared and padded behind."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """The beginning `ids (p,)` of a sequence, run once."""

    model: nn.Module
    ids: Tensor
    cache: Any = None
    """None where there is nothing to keep, or the model remembers more than keys and values: the beginning then runs
    again with each continuation."""

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module, ids: Tensor) -> Prefix:
        """Run the beginning `ids (p,)`, p > 0, and keep its cache where the model's cache can be shared."""
        places = torch.arange(ids.numel())[None]
        cache = _forward(model, ids[None], torch.ones_like(ids[None]), places, None, True).cache
        plain = type(cache) is DynamicCache and all(type(layer) in PLAIN for layer in cache.layers)
        return cls(model, ids, cache if plain else None)

    @property
    def shared(self) -> bool:
        """Whether continuations may share a batch: padding would stay in any other memory than keys and values."""
        return self.cache is not None

    def slides(self, places: int) -> bool:
        """Whether some layer no longer sees all of so many places: padding between tokens would use some of them up."""
        layers = self.cache.layers if self.shared else ()
        return any(type(layer) is DynamicSlidingWindowLayer and places >= layer.sliding_window for layer in layers)

    @torch.no_grad()
    def run(self, ids: Tensor, real: Tensor) -> None:
        """One forward of the continuations `ids (B, n)`, padded on the right; hooks see it, nothing is kept."""
        if self.cache is not None:
            seen = torch.cat([torch.ones(ids.shape[0], self.ids.numel(), dtype=torch.bool), real], 1)
            places = self.ids.numel() + torch.arange(ids.shape[1]).expand_as(ids)
            _forward(self.model, ids, seen, places, _Borrowed(self.cache), True)
            return
        before = self.ids[None].expand(ids.shape[0], -1)
        ids = torch.cat([before, ids], 1)
        seen = torch.cat([torch.ones_like(before, dtype=torch.bool), real], 1)
        _forward(self.model, ids, seen, torch.arange(ids.shape[1]).expand_as(ids), None, False)

    def session(self, rows: int) -> Session:
        """`rows` continuations, each to be extended by blocks of tokens."""
        cache = copy.deepcopy(self.cache)
        if cache is not None and rows > 1:
            cache.batch_repeat_interleave(rows)
        return Session(self, rows, cache)


class Session:
    """A batch of continuations with their common cache."""

    def __init__(self, prefix: Prefix, rows: int, cache: Any) -> None:
        self._prefix = prefix
        self._cache = cache
        self._seen = torch.ones(rows, prefix.ids.numel() if cache is not None else 0, dtype=torch.bool)

    @torch.no_grad()
    def extend(self, ids: Tensor, real: Tensor) -> Tensor:
        """Append `ids (B, n)`, of which the leading `real (B, n)` are no padding; logits `(B, V)` after the last."""
        last = real.sum(1) - 1
        if self._cache is None:
            before = self._prefix.ids[None].expand(ids.shape[0], -1)
            ids, real = torch.cat([before, ids], 1), torch.cat([torch.ones_like(before, dtype=torch.bool), real], 1)
            last = last + before.shape[1]
        self._seen = torch.cat([self._seen, real], 1)
        places = (self._seen.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        # A vocabulary is wide: logits are computed in the few columns where some row ends.
        columns, which = torch.unique(last, return_inverse=True)
        output = _forward(self._prefix.model, ids, self._seen, places, self._cache, True, columns)
        self._cache = output.cache
        logits: Tensor = output.logits
        rows = torch.arange(ids.shape[0], device=logits.device)
        return logits[rows, (which if logits.shape[1] == columns.numel() else last).to(logits.device)]


class _Borrowed(Cache):
    """Lends the keys and values of the beginning to any number of rows, and forgets those of what follows."""

    def __init__(self, inner: DynamicCache) -> None:
        super().__init__(layers=inner.layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[layer_idx]
        keys, values = (kept.expand(key_states.shape[0], -1, -1, -1) for kept in (layer.keys, layer.values))
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)


def padded(tails: list[Tensor]) -> tuple[Tensor, Tensor]:
    """`ids (B, T)` with padding on the right, where no real token looks, and which of them are real `(B, T)`."""
    lengths = torch.tensor([tail.numel() for tail in tails])
    ids = torch.nn.utils.rnn.pad_sequence(tails, batch_first=True)
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]


def _forward(
    model: nn.Module, ids: Tensor, seen: Tensor, places: Tensor, cache: Any, remember: bool, at: Tensor | None = None
) -> Any:
    """An ordinary forward; logits in the columns `at` only where the model can do that, by default in the first."""
    device = device_of(model)
    arguments: dict[str, Any] = {"cache": cache} if remember else {}
    if takes_positions(model):
        arguments["position_ids"] = places.to(device)
    if keeps_logits(model):
        arguments["logits_to_keep"] = (torch.zeros(1, dtype=torch.int64) if at is None else at).to(device)
    mask = seen.to(device, torch.int64)
    return model(input_ids=ids.to(device), attention_mask=mask, use_cache=remember, **arguments)

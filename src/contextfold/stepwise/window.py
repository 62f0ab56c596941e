"""What the patched model sees besides the current token, and how prompts of different lengths share a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from contextfold.anatomy import Bound
from contextfold.errors import InputError
from contextfold.fold import Spans

__all__ = ["PAPER", "Batch", "Window", "batch"]


@dataclass(frozen=True)
class Window:
    """What is kept; the rest of the tokens before the current one is the dropped part, folded at every step."""

    spans: Spans = ()
    """Half-open ranges of token indices of the prompt."""
    generated: bool = False
    """Whether tokens stay that were generated before."""

    @classmethod
    def after(cls, context: int, prompt: int, spans: Spans = ((0, 1),)) -> Window:
        """Fold the first `context` tokens but for `spans`, keep the rest of the `prompt` tokens and what follows."""
        return cls((*spans, *(((context, prompt),) if context < prompt else ())), generated=True)


PAPER: Final = Window()
"""Nothing but the current token, as in section 4 of arXiv 2511.17864."""


@dataclass(eq=False)
class Batch:
    """B sequences that grow by one column a step, padded on the left; a column is one position of the cache."""

    ids: Tensor
    """`(B, T)`, int64; 0 in the padding."""
    real: Tensor
    """`(B, T)`, bool: what is no padding."""
    kept: Tensor
    """`(B, T)`, bool: what the patched rows see of it."""
    generated: Tensor
    """`(B,)`, bool: whether new columns are kept."""

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    @property
    def positions(self) -> Tensor:
        """`(B, T)`: every sequence counts from 0; padding stands at 0, where nobody looks."""
        return (self.real.cumsum(1) - 1).clamp_min(0)

    def append(self, chosen: Tensor) -> None:
        """One more column `chosen (B,)`: the current tokens of the next step."""
        column = torch.ones(self.rows, 1, dtype=torch.bool)
        self.ids = torch.cat([self.ids, chosen[:, None]], 1)
        self.real = torch.cat([self.real, column], 1)
        self.kept = torch.cat([self.kept, self.generated[:, None]], 1)

    def columns(self, row: int) -> Tensor:
        """Kept columns of one sequence before the current one, in order."""
        return self.kept[row, :-1].nonzero()[:, 0]


def batch(bound: Bound, prompts: Sequence[Tensor], windows: Sequence[Window], tokens: int) -> Batch:
    """Lay out `prompts`, each `(n,)` of token ids, for `tokens` steps.

    Raises `InputError` for empty or misshapen ids, ids outside the vocabulary, spans outside a prompt, or
    sequences that would outgrow the model's position table.
    """
    if not prompts or tokens < 1:
        raise InputError("nothing to generate: give at least one prompt and one token")
    if len(windows) != len(prompts):
        raise InputError(f"{len(windows)} windows for {len(prompts)} prompts; give one, or one for each")
    width = max(_checked(bound, ids, tokens) for ids in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    real, kept = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, window) in enumerate(zip(prompts, windows, strict=True)):
        pad = width - prompt.numel()
        ids[row, pad:], real[row, pad:] = prompt.cpu(), True
        for start, stop in window.spans:
            if not 0 <= start < stop <= prompt.numel():
                raise InputError(f"kept span {start}:{stop} is not inside the prompt of {prompt.numel()} tokens")
            kept[row, pad + start : pad + stop] = True
        if bool(kept[row, pad:].all()) and prompt.numel() > 1:
            raise InputError("every token of the prompt is kept, so there is nothing to fold")
    return Batch(ids, real, kept, torch.tensor([window.generated for window in windows]))


def _checked(bound: Bound, ids: Tensor, tokens: int) -> int:
    if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        raise InputError("a prompt must be token ids, a 1-D integer tensor")
    if ids.numel() == 0 or int(ids.min()) < 0 or int(ids.max()) >= bound.vocabulary:
        raise InputError(f"a prompt is empty, or has token ids outside 0..{bound.vocabulary - 1}")
    total = ids.numel() + tokens - 1
    if bound.max_positions is not None and total > bound.max_positions:
        raise InputError(f"{total} tokens, but the model has {bound.max_positions} positions; generate fewer")
    return ids.numel()

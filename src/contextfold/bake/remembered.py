"""Answers on disk: a bake that was stopped, or is given more questions, does not generate again what it knows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from contextfold.anatomy import Bound
from contextfold.store import Store, key_of

__all__ = ["Remembered"]


class Remembered:
    """Answers that `bound` gave, told how it was asked by `asked`; one file for each batch, in `folder`.

    Files of another model, another beginning or another way to ask stay unread. Raises `NotWritten` where nothing can
    be kept.
    """

    def __init__(self, folder: Path, bound: Bound, before: Tensor, *asked: object) -> None:
        self._store = Store(folder, key_of(bound, "answers", before.tolist(), asked))
        self._prefix = f"answers-{self._store.key[:16]}"
        self._known: dict[tuple[int, ...], Tensor] = {}
        for place in self._store.places(self._prefix):
            found = self._store.get(place, torch.device("cpu"))
            if found is not None:
                tensors, report = found
                parts = (torch.split(tensors[name], report[name]) for name in ("questions", "answers"))
                self._known |= {tuple(q.tolist()): a for q, a in zip(*parts, strict=True)}

    def answers(self, questions: Sequence[Tensor]) -> dict[int, Tensor]:
        """To those of the questions, each `(q,)`, that were asked before: number of the question -> `(a,)`."""
        keys = {i: tuple(question.tolist()) for i, question in enumerate(questions)}
        return {i: self._known[key] for i, key in keys.items() if key in self._known}

    def keep(self, questions: Sequence[Tensor], answers: Sequence[Tensor]) -> None:
        """Write what was answered together: the file is there whole, or not at all."""
        together = hashlib.sha256(repr([q.tolist() for q in questions]).encode()).hexdigest()[:16]
        sides = {"questions": questions, "answers": answers}
        lengths = {name: [part.numel() for part in side] for name, side in sides.items()}
        self._store.put(f"{self._prefix}-{together}", {n: torch.cat(list(s)) for n, s in sides.items()}, lengths)

"""What is asked: contexts with questions, and the answers that a model gives, kept on disk because they take long."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from bench import seconds
from torch import Tensor

from contextfold import models
from contextfold.anatomy import Bound, bind
from contextfold.bake import Example, Frame, answered
from contextfold.questions import Questions, questions

ROOT = Path(__file__).parents[2]
TEXTS = ROOT / "scripts" / "bake"
WORK = ROOT / "build" / "bake"

CONTEXTS = ("persona", "language", "format", "classification", "transformation", "facts")
TOKENS = 32
"""Tokens of an answer, at most."""

ANCHORS = slice(0, 30)
"""Neutral questions that may join a solve."""
NEUTRAL = slice(30, 42)
"""Neutral questions, none of them an anchor, on which it is measured what a way does elsewhere."""


@dataclass(frozen=True, eq=False)
class Model:
    """A built-in model, loaded and proven once."""

    name: str
    bound: Bound
    loaded: models.Loaded

    @property
    def bytes(self) -> int:
        """Of the weights."""
        return sum(p.numel() * p.element_size() for p in self.bound.model.parameters())


@cache
def model_of(name: str) -> Model:
    loaded = models.load(name)
    return Model(name, bind(loaded.model), loaded)


@dataclass(frozen=True, eq=False)
class Material:
    """One context on one model. Answers are the in-context model's, elsewhere the bare model's."""

    frame: Frame
    calibration: tuple[Example, ...]
    held_out: tuple[Example, ...]
    sampled: tuple[Example, ...]
    """Other answers to the calibration questions, sampled at temperature 1."""
    anchors: tuple[Example, ...]
    elsewhere: dict[str, tuple[Example, ...]]
    seconds: float
    """What the answers to the calibration questions took."""
    seconds_sampled: float
    """What the sampled ones took."""


def text_of(context: str) -> dict[str, Any]:
    """A context with its questions, or the neutral ones."""
    found: dict[str, Any] = json.loads((TEXTS / f"{context}.json").read_text())
    return found


def material(model: Model, context: str, most: int | None = None) -> Material:
    """Everything about one context. `most` takes so many questions of each kind only, for a quick look."""
    stored = text_of(context)
    neutral = text_of("neutral")["questions"]
    asked = {
        "calibration": stored["queries"],
        "sampled": stored["queries"],
        "held_out": stored["held_out"],
        "anchors": neutral[ANCHORS],
        "neutral": neutral[NEUTRAL],
        "untouched": stored["untouched"],
    }
    asked = {kind: texts[:most] for kind, texts in asked.items()}
    laid = questions(model.loaded.tokenizer, stored["context"], [text for texts in asked.values() for text in texts])
    frame = Frame(laid.kept, laid.context)
    tails, found, spent = iter(laid.tails), {}, {}
    for kind, texts in asked.items():
        moves = kind in ("calibration", "sampled", "held_out")
        part = [next(tails) for _ in texts]
        found[kind], spent[kind] = answers_of(
            model, frame.full if moves else frame.kept, part, laid, moves, float(kind == "sampled")
        )  # fmt: skip
    elsewhere = {kind: found[kind] for kind in ("neutral", "untouched")}
    return Material(
        frame, found["calibration"], found["held_out"], found["sampled"], found["anchors"], elsewhere,
        spent["calibration"], spent["sampled"],
    )  # fmt: skip


def frame_of(model: Model, context: str) -> Frame:
    """What stands before the questions of a context."""
    stored = text_of(context)
    laid = questions(model.loaded.tokenizer, stored["context"], stored["queries"][:1])
    return Frame(laid.kept, laid.context)


def answers_of(
    model: Model, before: Tensor, asked: Sequence[Tensor], laid: Questions, moves: bool, temperature: float
) -> tuple[tuple[Example, ...], float]:
    """Answers and the seconds that they took when they were given."""
    parts = [model.bound.fingerprint, before.tolist(), [q.tolist() for q in asked], TOKENS, laid.stop]
    parts += [temperature] if temperature else []
    path = WORK / f"answers-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]}.json"
    if not path.exists():
        found: list[Example] = []
        spent = seconds(
            lambda: found.extend(
                answered(
                    model.bound, before, asked, tokens=TOKENS, stop=laid.stop, moves=moves, temperature=temperature
                )
            )
        )
        rows = [{"tail": e.tail.tolist(), "answer": e.answer} for e in found]
        write(path, json.dumps({"seconds": spent, "examples": rows}))
    stored = json.loads(path.read_text())
    examples = (Example(torch.tensor(row["tail"]), row["answer"], moves) for row in stored["examples"])
    return tuple(examples), stored["seconds"]


def write(path: Path, text: str) -> None:
    """The old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)

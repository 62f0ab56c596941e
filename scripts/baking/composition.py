"""Two contexts in one model: baked apart and added, baked together, and one taken away again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baking.judge import Judge
from baking.material import Model, answers_of, material, text_of
from baking.ways import Bake
from contextfold import combine
from contextfold.bake import Example, Frame
from contextfold.patch import Patch
from contextfold.questions import questions
from contextfold.runtime import materialised
from contextfold.verify import Recovery

PAIRS = (("persona", "language"), ("facts", "persona"))
"""A manner and a language to say it in; facts, and who tells them."""


@dataclass(frozen=True, eq=False)
class Both:
    """One context behind the other, in one window, and half of the questions of each."""

    frame: Frame
    known: tuple[Example, ...]
    held_out: tuple[Example, ...]

    @classmethod
    def of(cls, model: Model, first: str, second: str, most: int | None) -> Both:
        stored = [text_of(name) for name in (first, second)]
        halves = {kind: [s[kind][: most or len(s[kind]) // 2] for s in stored] for kind in ("queries", "held_out")}
        learn, judge = ([question for half in halves[kind] for question in half] for kind in halves)
        context = "\n\n".join(s["context"] for s in stored)
        laid = questions(model.loaded.tokenizer, context, [*learn, *judge])
        frame, tails = Frame(laid.kept, laid.context), list(laid.tails)

        def answered(part: list[Any], temperature: float) -> tuple[Example, ...]:
            return answers_of(model, frame.full, part, laid, True, temperature)[0]

        known = tuple(e for temperature in (0.0, 1.0) for e in answered(tails[: len(learn)], temperature))
        return cls(frame, known, answered(tails[len(learn) :], 0.0))


def composed(model: Model, way: Bake, first: str, second: str, most: int | None = None) -> dict[str, Any]:
    """What patches of two contexts do together. Keys are documented in docs/json.md.

    `on_both`: questions of both, held against the model that has both contexts in its window. `on_first`: questions
    of the first, held against the model that has the first one alone.
    """
    both = Both.of(model, first, second, most)
    apart = {name: material(model, name, most) for name in (first, second)}

    def baked(frame: Frame, examples: tuple[Example, ...]) -> Patch:
        patch = way.learn(model.bound, frame, examples).patch
        assert patch is not None
        return patch

    together = baked(both.frame, both.known)
    a, b = (baked(stuff.frame, way.chosen(stuff)) for stuff in apart.values())
    summed = {"first": a, "second": b, "together": together}
    sums: dict[str, tuple[float, ...]] = {"sum": (1, 1), "half of the sum": (0.5, 0.5)}
    summed |= {name: combine([a, b], weights) for name, weights in sums.items()}
    taken = {"first": a, "together": together, "together less second": combine([together, b], (1, -1))}
    return {
        "first": first,
        "second": second,
        "on_both": _judged(model, both.frame, both.held_out, summed),
        "on_first": _judged(model, apart[first].frame, apart[first].held_out, taken),
    }


def _judged(model: Model, frame: Frame, held_out: tuple[Example, ...], patches: dict[str, Patch]) -> dict[str, Any]:
    judge = Judge.of(model.bound, frame, held_out)
    unpatched = judge()
    found: dict[str, Any] = {}
    for name, patch in patches.items():
        with materialised(model.bound, patch):
            found[name] = Recovery.of(judge(), unpatched).to_json()
    return {"kl_unpatched": unpatched.mean, "patches": found}

"""arXiv 2510.08734: an instruction about three one-digit numbers becomes a patch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from contextfold.reproduce.arithmetic import TASKS, measure_task
from contextfold.reproduce.engine import Paper, Part
from contextfold.reproduce.row import Missing, Row

__all__ = ["PAPER"]

LEARN, JUDGE = 10, 20
"""Items to learn from and to be judged by, as in the paper."""

WAYS = {
    "two-sites": "attention and MLP output maps (the default of bake)",
    "output": "MLP output map, into which the paper's appendix puts the vector",
    "matrix": "thought matrix, its vector in the output map",
    "all": "attention, thought matrix and output map",
}
"""Estimators of `contextfold.bake`, in words."""

PROMPTS = {"instruction": False, "examples": True}

WHAT = {
    "multiply": "product of three one-digit numbers",
    "sum": "sum of three one-digit numbers",
    "last": "last of three one-digit numbers",
    "first": "first of three one-digit numbers",
}

OTHER = {"last": "first", "first": "last"}


def _parts(quick: bool) -> list[Part]:
    parts = []
    for task in TASKS:
        for words, shown in PROMPTS.items():
            if task in OTHER and not shown:
                continue
            ways = ("output",) if quick else tuple(WAYS)
            options = {
                "task": task, "shown": shown, "pool": 6 if quick else 60, "learn": 2 if quick else LEARN,
                "judge": 2 if quick else JUDGE, "ways": ways, "other": OTHER.get(task),
            }  # fmt: skip
            parts.append(Part(f"{task}-{words}", measure_task, options, 3 + len(ways), torch.float32))
    return parts


def _rows(results: Mapping[str, Any]) -> list[Row]:
    rows = []
    for name, found in results.items():
        task, words = name.split("-")
        rows += _published(task, words, found) if task not in OTHER else _stand_in(task, found)
    return rows


def _counts(found: Mapping[str, Any]) -> str:
    return (
        f"of {found['asked']} items {found['prompted']} are right with the prompt and {found['unprompted']} without, "
        f"{found['left']} pass the paper's filter"
    )


def _published(task: str, words: str, found: Mapping[str, Any]) -> list[Row]:
    """The paper's own tasks: measured where enough items pass its filter."""
    section = f"{WHAT[task]}, prompt: {words}; right without it under the patch, %"
    if not found["judged"]:
        note = f"{_counts(found)}: too few to learn from and be judged by"
        return [Row(section, "patched, without the prompt", 100.0, None, note)]
    return [
        Row(section, f"patched: {WAYS[way]}", 100.0, 100 * right / found["judged"], _counts(found))
        for way, right in found["ways"].items()
    ]


def _stand_in(task: str, found: Mapping[str, Any]) -> list[Row]:
    """A task that the model can do when it is shown examples."""
    section = f"stand-in: {WHAT[task]}, prompt: examples; right without it under the patch, %"
    if not found["judged"]:
        return [Row(section, "patched, without the prompt", None, None, f"{_counts(found)}: too few")]
    judged = found["judged"]
    rows = [
        Row(section, f"patched: {WAYS[way]}", None, 100 * right / judged, _counts(found) if not k else "")
        for k, (way, right) in enumerate(found["ways"].items())
    ]
    for control, right in found["controls"].items():
        note = f"the {OTHER[task]} of three; the two agree on {found['agree']} of {judged}"
        note = note if control == "other_task" else ""
        rows.append(Row(section, f"control: patch of {_control(control)}", None, 100 * right / judged, note))
    return rows


def _control(name: str) -> str:
    return {"random": "random directions, equal norms", "other_task": "the other task"}[name]


PAPER = Paper(
    number="2510.08734",
    title="Transmuting prompts into weights",
    model="gemma3-270m",
    parts=_parts,
    rows=_rows,
    missing=(
        Missing(
            "multiply and sum by a model that can do them",
            "the paper ran Gemma 3 1B, whose weights are not at hand; the small models cannot do either, with the "
            "instruction or with examples, so tasks that they can do stand in",
        ),
        Missing(
            "Algorithm 1 with its rate and repeated passes",
            "bake solves every place once by a ridge, in the same order; its text is not at hand",
        ),
        Missing("translation (table 3)", "its figures are not known"),
    ),
)

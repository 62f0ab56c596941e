"""A jobs file becomes jobs: models × contexts × seeds × estimators for bakes, × queries × rules for token folds."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from contextfold.bake import ESTIMATORS, LAM0, TOL, estimator
from contextfold.conversion import key_of_file, key_of_text
from contextfold.errors import InputError, one_line
from contextfold.files import expanded
from contextfold.fold import DEFAULT_RULE, SINK, reference
from contextfold.models import BUILTINS, DTYPES
from contextfold.prompts import parse_spans, read_argument
from contextfold.questions import read_questions
from contextfold.reproduce.engine import code_digest
from contextfold.suites import QUESTIONS
from contextfold.sweep.fields import Fields, Names
from contextfold.versions import versions

__all__ = ["ANCHORS", "HELD_OUT", "Job", "read_jobs"]

HELD_OUT = 4
"""One question in so many is held out when the file names none."""

ANCHORS = 40
"""Built-in questions that may be anchors; on those behind them the effect elsewhere is measured."""

ANSWERS = 1000
"""Answers per question, at most."""

JOBS = 100_000
"""Jobs of one file, at most: a few lists of a thousand names multiply to what no memory holds."""


@dataclass(frozen=True)
class Job:
    """One bake, or one fold of a token, with its verdict. All of it is plain data."""

    kind: str
    """`bake` or `fold`."""
    model: str
    """As the file names it."""
    source: str
    """Where the model is: a folder's whole path, else the name."""
    stamp: str
    """What changes when the model's files change; empty for a hub id, which is taken at its word."""
    dtype: str
    context: str
    """What the file calls it."""
    text: str
    """The context itself."""
    method: str
    """Of a bake its estimator, of a fold its rule."""
    seed: int | None
    """Of the sampled answers of a bake; None for a fold."""
    options: Mapping[str, Any]
    """The other arguments, questions included."""

    @property
    def digest(self) -> str:
        """SHA-256 of all that the result depends on: this job, the source of this package, and versions."""
        told = {name: value for name, value in asdict(self).items() if name != "source"}
        whole = json.dumps([told, code_digest(), sorted(versions().items())], sort_keys=True)
        return hashlib.sha256(whole.encode()).hexdigest()

    @property
    def label(self) -> str:
        """In words, for a message."""
        parts = (self.kind, self.model, self.context, self.method, None if self.seed is None else f"seed {self.seed}")
        return ", ".join(part for part in parts if part is not None)


def read_jobs(path: Path) -> tuple[Job, ...]:
    """The jobs of a YAML file, those of a model together. Paths in it start at its own folder.

    Raises `InputError`, in one line, for whatever the file says that cannot be run; weights are not loaded.
    """
    top = Fields.read(path)
    top.only("models", "dtype", "contexts", "seeds", "bake", "fold")
    dtypes = tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    dtype = top.one_of("dtype", dtypes, "float32")
    contexts = top.section("contexts")
    bakes = None if "bake" not in top else _Bakes.of(top.section("bake"))
    folds = None if "fold" not in top else _Folds.of(top.section("fold"), path.parent)
    if bakes is None and folds is None:
        raise top.refused("it asks for nothing; add a section bake or fold")
    seeds = top.whole_numbers("seeds", [0])
    if bakes is None and "seeds" in top:
        raise top.refused("seeds are of sampled answers, which only a bake has; leave them out")
    if bakes is not None and len(seeds) > 1 and bakes.options["answers"] == 1:
        raise top.refused("seeds are of sampled answers, and bake has answers: 1; give it 2, or leave out the seeds")
    models = top.names("models")
    count = len(models) * len(contexts.values) * sum(part.many(seeds) for part in (bakes, folds) if part is not None)
    if count > JOBS:
        raise top.refused(f"it asks for {count} jobs, and {JOBS} are the most of one file; split it")
    found: list[Job] = []
    for model in models:
        source, stamp = _identity(model, path.parent)
        start = partial(Job, model=model, source=source, stamp=stamp, dtype=dtype)
        for name in contexts:
            text, learn, judge = _context(contexts, name, path.parent)
            part = partial(start, context=name, text=text)
            if bakes is not None:
                found += bakes.jobs(part, top.where, name, seeds, (learn, judge), path.parent)
            if folds is not None:
                found += folds.jobs(part)
    return tuple(found)


def _context(contexts: Fields, name: str, base: Path) -> tuple[str, Names, Names]:
    """Its text, and its own questions to learn from and to be judged by, None where it has none."""
    if isinstance(contexts[name], str):
        return _text(contexts.words(name), base), None, None
    own = contexts.section(name)
    own.only("text", "queries", "held_out")
    return _text(own.words("text"), base), own.lines("queries"), own.lines("held_out")


@dataclass(frozen=True)
class _Bakes:
    """The section `bake`."""

    fields: Fields
    estimators: Sequence[str]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, fields: Fields) -> _Bakes:
        fields.only(
            "estimators", "queries", "held_out", "tokens", "answers", "anchors", "penalty", "tol", "controls",
        )  # fmt: skip
        estimators = fields.names("estimators", [ESTIMATORS[0].name])
        for name in estimators:
            estimator(name)
        penalty = None if fields.get("penalty") == "auto" else fields.number("penalty", LAM0)
        options = {
            "tokens": fields.whole_number("tokens", 32, 1),
            "answers": fields.whole_number("answers", 2, 1, ANSWERS),
            "anchors": fields.whole_number("anchors", 0, 0, min(ANCHORS, len(QUESTIONS))),
            "penalty": penalty,
            "tol": fields.number("tol", TOL),
            "controls": fields.yes("controls", True),
        }
        return cls(fields, estimators, options)

    def many(self, seeds: Sequence[int]) -> int:
        """Jobs for one model and context."""
        return len(seeds) * len(self.estimators)

    def jobs(
        self, part: Any, where: str, context: str, seeds: Sequence[int], own: tuple[Names, Names], base: Path
    ) -> list[Job]:
        learn, judge = (_questions(mine or self.fields.lines(key), base)
                        for mine, key in zip(own, ("queries", "held_out"), strict=True))  # fmt: skip
        if not learn:
            raise InputError(f"{where}: bake has no queries for context {context!r}; give it some, or the section")
        if not judge and len(learn) < HELD_OUT:
            raise InputError(
                f"{where}: {len(learn)} queries of context {context!r} are too few to hold some out; give {HELD_OUT}, "
                "or held_out"
            )
        if judge:
            learn = [question for question in learn if question not in judge]
        else:
            learn, judge = [q for i, q in enumerate(learn) if i % HELD_OUT], learn[::HELD_OUT]
        if not learn:
            raise InputError(f"{where}: every query of context {context!r} is held out; give others to learn from")
        options = {**self.options, "queries": learn, "held_out": judge}
        return [
            part(kind="bake", method=name, seed=seed, options=options) for seed in seeds for name in self.estimators
        ]


@dataclass(frozen=True)
class _Folds:
    """The section `fold`."""

    queries: Sequence[str]
    rules: Sequence[str]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, fields: Fields, base: Path) -> _Folds:
        fields.only("queries", "rules", "fallback", "keep")
        rules = fields.names("rules", [DEFAULT_RULE])
        fallback = fields.words("fallback") if "fallback" in fields else None
        for name in (*rules, *(() if fallback is None else (fallback,))):
            reference(name)
        keep = fields.words("keep") if "keep" in fields else "sink"
        spans = {"none": (), "sink": tuple(SINK)}.get(keep) if keep in ("none", "sink") else None
        if spans is None:
            spans = parse_spans(keep, sys.maxsize)
        queries = [_text(query, base) for query in fields.names("queries")]
        return cls(queries, rules, {"fallback": fallback, "keep": [list(span) for span in spans]})

    def many(self, seeds: Sequence[int]) -> int:
        """Jobs for one model and context."""
        return len(self.queries) * len(self.rules)

    def jobs(self, part: Any) -> list[Job]:
        return [
            part(kind="fold", method=rule, seed=None, options={**self.options, "query": query})
            for query in self.queries
            for rule in self.rules
        ]


def _text(value: str, base: Path) -> str:
    """The text itself, or what stands in the file that `@` names, from `base` on."""
    if value.startswith("@") and not value.startswith("@@"):
        path = base / expanded(value[1:])
        if not os.path.isfile(path):  # a pipe that nobody writes to would be waited for
            raise InputError(
                f"there is no file {one_line(repr(str(path)))}; give an existing file, or write @@ for a text"
            )
        return read_argument(f"@{path}")
    return read_argument(value)


def _questions(given: Names, base: Path) -> list[str]:
    """A list as it is; a text has one question per line."""
    if given is None:
        return []
    return list(given) if not isinstance(given, str) else read_questions(_text(given, base))


def _identity(model: str, base: Path) -> tuple[str, str]:
    """Where a model is, and what changes when its files do. Reads them whole: about a second per GB.

    Raises `InputError` when a model that must be here is not.
    """
    for builtin in BUILTINS:
        if model == builtin.name:
            return model, key_of_text(builtin.stamp())
    path = base / expanded(model)
    if os.path.isdir(path) and (path / "config.json").is_file():
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        return str(path.resolve()), key_of_text(" ".join(f"{file.name} {key_of_file(file)}" for file in files))
    if os.path.isfile(path) and path.suffix.lower() == ".gguf":
        return str(path.resolve()), key_of_file(path)
    if model.count("/") == 1 and not os.path.exists(path) and not model.startswith((".", "/", "~")):
        return model, ""
    known = ", ".join(builtin.name for builtin in BUILTINS)
    raise InputError(
        f"there is no model {one_line(repr(model))} in {base.resolve()}; give a folder with a config.json, a .gguf "
        f"file, a hub id written owner/name, or one of {known}"
    )

"""One job after the other, with one model held as long as its jobs come."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from contextfold import models, prompts, suites
from contextfold.anatomy import Bound
from contextfold.bake import Example, Frame, answered, bake
from contextfold.ceiling import proc_status, reset_peak
from contextfold.errors import ContextfoldError, InputError
from contextfold.questions import questions
from contextfold.reproduce.engine import Bench
from contextfold.sweep.jobs import ANCHORS, Job
from contextfold.sweep.results import failed_row, row_of
from contextfold.verify import Prompt, Settings, evaluate, fold_and_prove
from contextfold.verify.controls import wrong_contexts

__all__ = ["Worker"]

FAILURES = (ContextfoldError, RuntimeError, ValueError, ArithmeticError, MemoryError)
"""What a job may die of without taking the sweep with it: refusals, and what torch raises. A mistake in this package
stops the sweep, whose finished jobs are kept."""

REMEMBERED = 16
"""Sets of answers that are kept for the next job; one is generated once for all estimators."""


class Worker:
    """Runs jobs. Holds the model of the last one, and answers that several of its jobs learn from or are judged by."""

    def __init__(self) -> None:
        self._source = ""
        self._bench: Bench | None = None
        self._refused: dict[str, str] = {}
        self._answers: dict[tuple[object, ...], tuple[Example, ...]] = {}

    def run(self, job: Job, digest: str) -> dict[str, Any]:
        """The row of a job; of one that fails, a row with its error.

        `digest` is what whoever asks takes for the job's digest: where it runs elsewhere, another one means that
        other versions run here.
        """
        reset_peak()
        started = time.monotonic()
        try:
            if job.digest != digest:
                raise InputError("other versions of contextfold, torch, transformers or Python run on this worker")
            bound = self._bound(job)
            payload = self._bake(job, bound) if job.kind == "bake" else self._fold(job, bound)
        except FAILURES as error:
            return failed_row(job, digest, error, round(time.monotonic() - started, 3))
        return row_of(job, digest, payload, round(time.monotonic() - started, 3), proc_status("VmHWM"))

    def _bound(self, job: Job) -> Bound:
        if job.source in self._refused:
            raise InputError(self._refused[job.source])
        if self._bench is None or self._source != job.source:
            self._bench = None  # before the next one comes
            self._answers.clear()
            self._bench = Bench(job.source, lambda dtype: models.load(job.source, dtype=dtype))
            self._source = job.source
        try:
            return self._bench.bound(getattr(torch, job.dtype))
        except ContextfoldError as error:
            self._refused[job.source] = str(error)
            raise

    def _tokenizer(self, job: Job) -> Any:
        assert self._bench is not None
        return self._bench.tokenizer(getattr(torch, job.dtype))

    def _fold(self, job: Job, bound: Bound) -> Mapping[str, Any]:
        tokenizer, given = self._tokenizer(job), job.options
        ids = prompts.encode(tokenizer, job.text, given["query"])
        keep = tuple((int(start), int(stop)) for start, stop in given["keep"])
        other = prompts.encode_text(tokenizer, suites.OTHER_CONTEXT)
        settings = Settings(job.method, given["fallback"], other, job.model)
        patch, verdict = fold_and_prove(bound, Prompt(ids.context, ids.query, keep), settings)
        return {**verdict.to_json(), "holds": verdict.proven, "patch_bytes": patch.nbytes}

    def _bake(self, job: Job, bound: Bound) -> Mapping[str, Any]:
        given, tokenizer = job.options, self._tokenizer(job)
        learn, judge = given["queries"], given["held_out"]
        laid = questions(tokenizer, job.text, [*learn, *judge])
        frame, n = Frame(laid.kept, laid.context), len(learn)
        ask = _Ask(self._answers, bound, given["tokens"], laid.stop)
        general = questions(tokenizer, job.text, list(suites.QUESTIONS)).tails
        examples = [
            *(e for seed in _draws(job) for e in ask(frame.full, laid.tails[:n], seed=seed)),
            *ask(frame.kept, general[: given["anchors"]], moves=False),
        ]
        plan = {"method": job.method, "lam0": given["penalty"], "tol": given["tol"]}
        started = time.monotonic()
        baked = bake(bound, frame, examples, **plan)
        solved = round(time.monotonic() - started, 3)
        other = prompts.encode_text(tokenizer, suites.OTHER_CONTEXT)
        windows = wrong_contexts(frame.context, (), bound.vocabulary, other) if given["controls"] else {}
        moving = [example for example in examples if example.moves]
        wrong = {name: bake(bound, Frame(frame.kept, ids), moving, **plan).patch for name, ids in windows.items()}
        verdict = evaluate(
            bound, baked, frame, ask(frame.full, laid.tails[n:]), controls=wrong, windows=windows,
            elsewhere={"general questions": ask(frame.kept, general[ANCHORS:], moves=False)},
            strengths=(0.5, 1.5), stop=laid.stop, name=job.model, method=job.method,
        )  # fmt: skip
        return {**verdict.to_json(), "solve_seconds": solved, "patch_bytes": baked.patch.nbytes}


def _draws(job: Job) -> list[int | None]:
    """The greedy answer, and then the seeds of sampled ones; no two seeds of a sweep share one."""
    count = job.options["answers"]
    return [None, *((job.seed or 0) * count + k for k in range(1, count))]


class _Ask:
    """Answers, from memory where these have been given."""

    def __init__(
        self, memory: dict[tuple[object, ...], tuple[Example, ...]], bound: Bound, tokens: int, stop: tuple[int, ...]
    ) -> None:
        self._memory, self._bound, self._tokens, self._stop = memory, bound, tokens, stop

    def __call__(
        self, before: Tensor, tails: Sequence[Tensor], *, seed: int | None = None, moves: bool = True
    ) -> tuple[Example, ...]:
        if not tails:
            return ()
        ids = (tuple(before.tolist()), tuple(tuple(tail.tolist()) for tail in tails))
        key = (*ids, self._bound.dtype, self._tokens, self._stop, seed, moves)
        if key not in self._memory:
            if len(self._memory) >= REMEMBERED:
                self._memory.clear()
            self._memory[key] = answered(
                self._bound, before, list(tails), tokens=self._tokens, stop=self._stop, moves=moves,
                temperature=0.0 if seed is None else 1.0, seed=seed or 0,
            )  # fmt: skip
        return self._memory[key]
